"""The rendezvous of a job's ranks: an authenticated key-value store at rank 0."""
