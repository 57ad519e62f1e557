"""Sources of pictures: public sets in their own layouts, folders, and tables that name files."""
