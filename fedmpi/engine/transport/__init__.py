"""The messages of a round: the broadcast, downloads for individual clients, and four ways of gathering uploads."""
