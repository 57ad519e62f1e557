"""Training of several clients of a rank at once (`compute.pack`), with operations that are batched over clients."""
