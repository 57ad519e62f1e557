"""Aggregation rules, which compute the direction of the server step from the updates, and server optimisers."""
