"""Measure the effect of each setting of `compute` on the time of a round on a GPU.

    python benchmarks/gpu/settings.py

fedmpi runs with and without the setting, on the same data and device, in turn in one process; results are medians of
the seconds and their ratio. The images are random, since their content does not affect speed. Names on the command line
select some of SETTINGS.
"""

import argparse
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import print_result, run_in_turn
from rounds import wait_for_device
from vectors import run_one_round

from fedmpi.comm.base import SingleProcess
from fedmpi.config import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.runtime import build
from fedmpi.runtime.device import configure_numerics


class Setting(NamedTuple):
    """A setting of `compute`, with the task on which its effect is measured."""

    model: str
    shape: tuple[int, ...]  # shape of an image
    samples: int  # samples per client
    batch_size: int
    change: dict  # changes of the config
    without: dict = {}  # changes of the config for the side without the setting


GRAPHS, ONE_BY_ONE = {"compute": {"graphs": True}}, {"compute": {"graphs": False}}
SETTINGS = {
    "graphs, mlp": Setting("mlp", (1, 28, 28), 300, 10, GRAPHS, ONE_BY_ONE),
    "graphs, mcmahan_cnn": Setting("mcmahan_cnn", (1, 28, 28), 300, 10, GRAPHS, ONE_BY_ONE),
    "pack, mlp": Setting("mlp", (1, 28, 28), 300, 10, {"compute": {"clients_per_pass": 10}}),
    "pack, lenet5": Setting("lenet5", (3, 32, 32), 300, 10, {"compute": {"clients_per_pass": 10}}),
    "tf32, mlp": Setting("mlp", (1, 28, 28), 300, 10, {"compute": {"tf32": True}}),
    "tf32, resnet18": Setting("resnet18", (3, 32, 32), 500, 50, {"compute": {"tf32": True}}),
    "cudnn_benchmark, resnet18": Setting("resnet18", (3, 32, 32), 500, 50, {"compute": {"cudnn_benchmark": True}}),
    "bf16, resnet18": Setting("resnet18", (3, 32, 32), 500, 50, {"compute": {"precision": "bf16"}}),
    "compile, resnet18": Setting("resnet18", (3, 32, 32), 500, 50, {"compute": {"compile": True}}),
    "channels_last: false, resnet18": Setting("resnet18", (3, 32, 32), 500, 50, {"compute": {"channels_last": False}}),
    "deterministic, resnet18": Setting("resnet18", (3, 32, 32), 500, 50, {"compute": {"deterministic": True}}),
}
CLIENTS = 10


def make_round(setting, change, device, rounds, share):
    """Return a function that sets the config's numerics and runs the next round of a federation."""
    g, n = torch.Generator().manual_seed(0), CLIENTS * (setting.samples // share) + 100
    x, y = torch.randn(n, *setting.shape, generator=g), torch.randint(10, (n,), generator=g)
    tree = {
        "rounds": rounds,
        "data": {"source": "benchmark", "partition": {"scheme": "iid", "clients": CLIENTS}},
        "model": {"name": setting.model},
        "method": {"name": "fedavg"},
        "train": {"batch_size": setting.batch_size, "lr": 0.01, "momentum": 0.9},
        "evaluate": {"every": 10**6},
        **change,
    }
    s = Settings.model_validate(tree)
    data = split(Dataset(x[:-100], y[:-100], x[-100:], y[-100:], classes=10), "iid", CLIENTS, 0, "global")
    configure_numerics(s)
    fed = build.make_federation(build.make_experiment(s, data, device), SingleProcess(device), lambda: False)

    def make_next(fed, numbers):
        configure_numerics(s)
        run_one_round(fed, next(numbers))
        wait_for_device(device)

    return partial(make_next, fed, count())


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SETTINGS), help="default: all")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--share", type=int, default=1, help="1/share of the images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names:
        setting = SETTINGS[name]
        sides = {
            side: make_round(setting, change, torch.device(args.device), args.rounds, args.share)
            for side, change in (("with it", setting.change), ("without", setting.without))
        }
        seconds = run_in_turn(sides, args.rounds)
        print_result(name, ("with it", seconds["with it"]), ("without", seconds["without"]))


if __name__ == "__main__":
    main()
