"""Sweeps: expand a file to many runs, train them here or as a Slurm array, tune settings, and make result tables."""
