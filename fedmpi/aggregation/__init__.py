"""Aggregation rules, which compute one direction from many updates, and server optimisers."""
