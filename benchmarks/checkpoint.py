"""Measure the cost of a checkpoint per round.

    python benchmarks/checkpoint.py [METHOD]

100 clients, 10 per round, the 1.66 M-parameter CNN on 28x28 images, batch 50, 600 samples per client, one local epoch;
then the global model is evaluated on 10,000 test images. One run in one process: every other round is followed by a
checkpoint, as with checkpoint.every=1, the rounds between by none, as with every=0. A checkpoint is copied when its
round ends and written during the next round, whose time is measured. Seconds are medians of a round; the ratio is that
of the medians; the first two rounds do not count. A method with client state (scaffold) writes ten more rows per round.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from engine import images, settings

from fedmpi.comm.base import SingleProcess
from fedmpi.data.federated import split
from fedmpi.runtime import build
from fedmpi.runtime.checkpoints import CheckpointWriter, ClientStateFiles


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="?", default="fedavg")
    parser.add_argument("--pairs", type=int, default=20, help="rounds of either kind")
    parser.add_argument("--samples", type=int, default=600, help="of a client")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = settings(2 * args.pairs + 2, False)
    config = type(config).model_validate({**config.model_dump(mode="json"), "method": {"name": args.method}})
    data = split(images(100, args.samples, 10_000 * args.samples // 600), "iid", 100, 0, "global")
    experiment = build.make_experiment(config, data, torch.device("cpu"))
    fed = build.make_federation(experiment, SingleProcess(torch.device("cpu")), lambda: False)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        (Path(folder) / "checkpoints").mkdir()
        stored = CheckpointWriter(Path(folder) / "checkpoints", ClientStateFiles(Path(folder) / "state"), 1, 2)
        seconds, stamps = {True: [], False: []}, []

        def keep(fed, t, memory, last):
            stamps.append(time.perf_counter())
            if t >= 2:
                seconds[(t - 1) % 2 == 0].append(stamps[-1] - stamps[-2])
            if t % 2 == 0:
                stored.save(fed, t, memory, last)
            else:  # count the rows of that round as stored, so that they are never written
                fed.states.stored_up_to = t

        fed.reporter.callbacks.save_state = keep
        fed.run()
        stored.wait()
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
    with_, without = median(seconds[True]), median(seconds[False])
    rounds = f"{len(seconds[True])} rounds with, {len(seconds[False])} without"
    print(f"{args.method}: {rounds}; {size / 2**20:.0f} MiB in all")
    print(f"a round with a checkpoint {with_:.3f} s, without {without:.3f} s: ratio {with_ / without:.3f}")


if __name__ == "__main__":
    main()
