"""Who started this process, as which rank, and where the others are."""
