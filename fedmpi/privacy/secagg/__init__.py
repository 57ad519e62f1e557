"""Secure aggregation: the server learns the sum of the clients' vectors, but no single vector (Bonawitz et al. 2017)."""
