"""Write the files of a run directory, and the lines that a run prints on the console."""
