"""Training of several clients of a rank at once (`compute.clients_per_pass`), with operations batched over clients."""
