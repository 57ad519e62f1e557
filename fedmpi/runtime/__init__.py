"""Run an experiment on one rank: build its data and objects, train, and write checkpoints and the run directory."""
