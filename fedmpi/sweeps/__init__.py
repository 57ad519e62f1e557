"""Sweeps: expand a file into many runs, train them here or as a Slurm array, tune settings, and make result tables."""
