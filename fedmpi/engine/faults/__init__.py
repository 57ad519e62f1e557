"""Handling of faults in a round: rank failures, bad uploads, divergence."""
