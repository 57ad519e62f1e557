"""`fedmpi` on several ranks, of which rank 0 sees no GPU.   torchrun ... server_without_gpu.py run CONFIG"""

import os

if os.environ["RANK"] == "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

from fedmpi.cli import main

main()
