"""Many runs of one file: expand it, train the runs here or as a Slurm array, choose settings, and make their table."""
