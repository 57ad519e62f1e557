"""`fedmpi doctor`: what this machine has, what a config would get here, and what is wrong; fit for a bug report.
`fedmpi plan`: what a run of a config would need.

Programs are asked within a time limit, and MPI in a process of its own, which it may end.
"""
