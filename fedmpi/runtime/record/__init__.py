"""What a run leaves on disk and on the console."""
