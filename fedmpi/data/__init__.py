"""The data of clients: sources -> Dataset -> partition -> Federated -> batches."""
