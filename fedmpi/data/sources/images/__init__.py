"""Data sources of images: public data sets, image folders, and CSV files that list images."""
