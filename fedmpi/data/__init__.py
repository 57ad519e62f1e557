"""The data of clients: sources return a Dataset, partitions divide it into FederatedData, which yields batches."""
