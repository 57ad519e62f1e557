"""Aggregation rules, which compute the direction of the server step from the clients' updates; server optimisers."""
