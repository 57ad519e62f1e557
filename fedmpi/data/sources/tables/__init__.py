"""Data sources of tables with one row per sample."""
