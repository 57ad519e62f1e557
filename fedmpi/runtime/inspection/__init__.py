"""Read run directories, to show the progress of a run or to compare two runs, without importing torch."""
