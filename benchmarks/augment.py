"""Compare an epoch of augmented CIFAR-10 batches in fedmpi and in torchvision.

    python benchmarks/augment.py

50,000 random images of 3 x 32 x 32 bytes (--pictures), batches of 50: crop with padding 4, flip, normalisation with
CIFAR-10's mean and deviation, Cutout 16. torchvision: a map-style data set of PIL images as in
torchvision.datasets.CIFAR10 (array -> Image.fromarray), transforms of version 1 or 2, and a DataLoader with --workers
worker processes; and transforms of version 2 on tensors, without PIL. fedmpi: `batches` in one thread (--threads), the
default of a rank. Nothing is trained. Both get the same number of cores, which is the number of workers, and run in
turn; results are medians of wall time, and of processor time including that of the workers.
"""

import argparse
import os
import resource
import time
from dataclasses import replace

import numpy as np
import torch
from measure import print_result, run_in_turn
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from fedmpi.common.torchvision_compat import torchvision
from fedmpi.data.batches import Shard, batches
from fedmpi.data.lazy_images import make_lazy_images
from fedmpi.data.transforms.geometric import Cutout, HorizontalFlip, RandomCrop
from fedmpi.runtime.device import keep_freed_memory

MEAN, STD, BATCH, SIZE = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 50, 16


class TensorCutout:
    """Cutout on a tensor, as implemented by its authors (github.com/uoguelph-mlrg/Cutout)."""

    def __call__(self, x):
        h, w = x.shape[1:]
        y, z = np.random.randint(h), np.random.randint(w)
        x[:, max(y - SIZE // 2, 0) : y + SIZE // 2, max(z - SIZE // 2, 0) : z + SIZE // 2] = 0
        return x


class ImageDataset(Dataset):
    """A data set like torchvision.datasets.CIFAR10 without its files; `tensors`: byte tensors instead of PIL images."""

    def __init__(self, data, targets, transform, tensors=False):
        self.data, self.targets, self.transform = data, targets, transform
        self.tensor = torch.from_numpy(data).permute(0, 3, 1, 2).contiguous() if tensors else None

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        picture = Image.fromarray(self.data[index]) if self.tensor is None else self.tensor[index]
        return self.transform(picture), self.targets[index]


def make_torchvision_epochs(data, targets, workers):
    """Return {name: function that iterates over one epoch with torchvision}."""
    from torchvision.transforms import v2

    v1 = torchvision.transforms
    chains = {
        "v1 on PIL": [v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)],
        "v2 on PIL": [
            *(v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), v2.PILToTensor()),
            *(v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)),
        ],
        "v2 on tensors": [
            *(v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()),
            *(v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)),
        ],
    }
    sides = {}
    for name, chain in chains.items():
        data_set = ImageDataset(data, targets, v1.Compose([*chain, TensorCutout()]), tensors="tensors" in name)
        loader = DataLoader(data_set, batch_size=BATCH, shuffle=True, num_workers=workers)
        sides[name] = lambda loader=loader: sum(len(y) for _, y in loader)
    return sides


def make_fedmpi_epoch(data, targets, blocks):
    """Return a function that iterates over one epoch with fedmpi.

    blocks: store images as (n, H, W, C) for channels-last CNNs, which is fedmpi's default.
    """
    stored = make_lazy_images(torch.from_numpy(data).permute(0, 3, 1, 2), MEAN, STD, 3).to("cpu", blocks)
    stored.pipeline = replace(stored.pipeline, transforms=(RandomCrop(padding=4), HorizontalFlip(), Cutout(size=SIZE)))
    shard, seed = Shard(stored, torch.tensor(targets), torch.arange(len(stored))), 0

    def epoch():
        nonlocal seed
        seed += 1
        order, drawn = (torch.Generator().manual_seed(2 * seed + i) for i in (0, 1))
        return sum(len(y) for _, y in batches(shard, BATCH, order, augment=drawn))

    return epoch


def processor_seconds():
    """Return the processor seconds of this process and of its worker processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=2, help="their worker processes; cores for both")
    parser.add_argument("--threads", type=int, default=1, help="ours")
    parser.add_argument("--repeats", type=int, default=4)
    given = parser.parse_args()
    keep_freed_memory()  # the setting of every fedmpi rank
    allowed = os.sched_getaffinity(0)
    cores = sorted(allowed)[: max(given.workers, 1)]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(given.threads)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (given.pictures, 32, 32, 3), dtype=np.uint8)
    targets = rng.integers(0, 10, given.pictures).tolist()
    sides = {"ours": make_fedmpi_epoch(data, targets, True), "ours, planes": make_fedmpi_epoch(data, targets, False)}
    sides |= make_torchvision_epochs(data, targets, given.workers)
    wall, used = {}, {}

    def counted(name, side):
        def one():
            began, before = time.perf_counter(), processor_seconds()
            assert side() == given.pictures
            wall.setdefault(name, []).append(time.perf_counter() - began)
            used.setdefault(name, []).append(processor_seconds() - before)

        return one

    run_in_turn({name: counted(name, side) for name, side in sides.items()}, given.repeats)
    os.sched_setaffinity(0, allowed)
    for what, results in (("wall", wall), ("processor", used)):
        best = {name: sorted(each[1:] or each)[len(each[1:] or each) // 2] for name, each in results.items()}
        for name in sides:
            if not name.startswith("ours"):
                note = f"{best[name] / best['ours']:.1f} times as fast, {given.pictures} pictures, {len(cores)} cores"
                print_result(
                    f"augmented epoch, {what}, torchvision {name}",
                    ("fedmpi", best["ours"]),
                    ("torchvision", best[name]),
                    note=note,
                )
        print_result(
            f"augmented epoch, {what}, planes beside blocks", ("planes", best["ours, planes"]), ("blocks", best["ours"])
        )


if __name__ == "__main__":
    main()
