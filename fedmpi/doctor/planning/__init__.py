"""What a run would need, said without training it: memory, bytes, seconds, and the words for Slurm."""
