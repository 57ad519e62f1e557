"""Secure aggregation: the server learns the sum of all vectors, but no single vector (Bonawitz et al. 2017)."""
