"""What is done with runs that have ended: they are verified, and their models exported."""
