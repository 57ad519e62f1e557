"""Writing of the files of a run directory, and of the lines that a run prints on the console."""
