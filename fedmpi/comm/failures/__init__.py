"""Rank failures: report the error of a job once, regroup the remaining ranks, and end processes."""
