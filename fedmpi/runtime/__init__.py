"""Everything about a run on one rank: data, objects, training, checkpoints, the run directory and the exit code."""
