"""The data of clients: a source returns a Dataset, and a partition divides its samples among clients."""
