"""A client on its rank: what it is handed, its batches and steps, what it sends."""
