"""What a run goes on from."""
