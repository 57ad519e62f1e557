"""Sweeps: expand a file into many runs, train them locally or as a Slurm array, tune settings, make result tables."""
