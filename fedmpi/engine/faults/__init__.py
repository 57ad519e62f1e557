"""Handling of faults during training: rank failures, bad uploads, and divergence."""
