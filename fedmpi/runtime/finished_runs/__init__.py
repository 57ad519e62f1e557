"""Tools for runs that have ended: load, export and apply their models, and replay and verify the runs."""
