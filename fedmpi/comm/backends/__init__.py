"""The communication back ends: MPI, and gloo and NCCL through torch.distributed."""
