"""Run `fedmpi` on several ranks, with the GPU hidden from rank 0.

torchrun ... server_without_gpu.py run CONFIG
"""

import os

if os.environ["RANK"] == "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

from fedmpi.cli import main

main()
