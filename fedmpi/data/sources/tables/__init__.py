"""Data sources that are tables of numbers and words, with one row per sample."""
