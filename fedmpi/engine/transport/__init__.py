"""The messages of a round: the broadcast, downloads for individual clients, and five ways of gathering uploads."""
