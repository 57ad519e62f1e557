"""`fedmpi doctor` reports what this machine has and what a config would use on it; `fedmpi plan` what a run would need.

Other programs run under a time limit, and MPI in a process of its own, since it may end the process.
"""
