"""The data of clients: a source returns a Dataset, a partition divides it, FederatedData holds it, batches reads it."""
