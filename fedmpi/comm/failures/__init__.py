"""What becomes of a job whose ranks fail, die or freeze."""
