"""The messages of a round: the broadcast, downloads of single clients, and four ways of gathering uploads."""
