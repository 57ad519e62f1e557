"""`fedmpi doctor`: what this machine has, what a config would get here, and what is wrong; fit for a bug report.

The command itself imports no library that could hang or crash: torch, MPI and the config are asked about in child
processes, each with a deadline.
"""
