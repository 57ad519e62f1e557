"""Sources that are tables: rows of numbers and words, one row a sample."""
