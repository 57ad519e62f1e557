"""What becomes of a round, and of a run, in which something goes wrong."""
