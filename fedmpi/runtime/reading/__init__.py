"""What run directories tell: how far a run is, and how two of them differ. Read by login nodes: without torch."""
