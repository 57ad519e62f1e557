"""Read run directories: the progress of a run, and the differences between two runs. Works without importing torch."""
