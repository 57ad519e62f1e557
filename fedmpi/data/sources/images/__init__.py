"""Data sources of images: public sets in their published layouts, folders, and tables that list files."""
