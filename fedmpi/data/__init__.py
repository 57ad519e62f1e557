"""From files to what a client trains on: sources -> Dataset -> partition -> Federated -> batches."""
