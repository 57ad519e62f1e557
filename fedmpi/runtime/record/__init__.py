"""The files that a run writes to its run directory, and the lines that it prints on the console."""
