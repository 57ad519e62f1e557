"""Training of one client on its rank: its context for hooks, its batch loop and its upload."""
