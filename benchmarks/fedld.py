"""Compare the possible readings of FedLD's length correction with each other and with FedAvg.

    python benchmarks/fedld.py digits [--root DIR] [--seeds 0 1 2] [--to benchmarks/results/fedld.csv]

Dirichlet partitions with alpha 0.1, 0.5 and 100; 5 and 10 clients; weights by samples and equal weights. Each line of
the output file is one run: the mean accuracy of the global model over the last ten rounds, and after the last round.
Runs that are in the file already are not repeated. The files of fashion_mnist and pneumonia (medmnist's
pneumoniamnist.npz) are read from --root.
"""

import argparse
import csv
import itertools
import time
from pathlib import Path

import torch

from fedmpi import config
from fedmpi.comm.base import SingleProcess
from fedmpi.engine.federation_config import RunCallbacks
from fedmpi.runtime import build, build_data
from fedmpi.runtime.record.summary import summarize_run

READINGS = {
    "fedavg": ["method={name: fedavg}"],
    "margin only": ["method={name: fedld, principal: false}"],
    "text": ["method={name: fedld}"],
    "axis, l2": ["method={name: fedld, variant: printed}"],
    "axis, sum": ["method={name: fedld}", "server.rule={name: principal, correction: axis, share: sum}"],
    "published": ["method={name: fedld, variant: code}"],
}
CNN = "model={name: mcmahan_cnn}"
SETS = {  # data set: settings of its runs
    "digits": [CNN, "rounds=20", "train={epochs: 2, batch_size: 20, lr: 0.05, momentum: 0.9}"],
    "fashion_mnist": [
        "data={source: fashion_mnist}",
        "model={name: mlp}",
        "rounds=10",
        "train={epochs: 1, batch_size: 50, lr: 0.01, momentum: 0.9}",
    ],
    "pneumonia": [
        "data={source: npz, path: pneumoniamnist.npz}",
        "model={name: mlp}",
        "rounds=25",
        "train={epochs: 1, batch_size: 50, lr: 0.01, momentum: 0.5, weight_decay: 0.0005}",
    ],
}
COLUMNS = ("data", "alpha", "clients", "weighting", "seed", "reading", "mean_last_10", "last", "seconds")


def run(name, alpha, clients, weighting, seed, reading, root):
    """Run one setting and return the accuracies: the mean of the last ten rounds, and that of the last round."""
    overrides = [
        *SETS[name],
        *([f"data.root={root}"] if root else []),
        f"data.partition={{scheme: dirichlet, clients: {clients}, alpha: {alpha}}}",
        f"cohort.weighting={weighting}",
        f"seed={seed}",
        *READINGS[reading],
        "evaluate={protocol: [global]}",
    ]
    settings = config.load("configs/quickstart.yaml", overrides)
    experiment = build.make_experiment(settings, build_data.build_partitioned_data(settings), torch.device("cpu"))
    rows = []
    build.make_federation(
        experiment, SingleProcess(torch.device("cpu")), lambda: False, RunCallbacks(rows.append)
    ).run()
    results = summarize_run(rows, ["accuracy"], "finished")
    return results["mean_last_10"]["accuracy"], results["last"]["accuracy"]


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=SETS)
    parser.add_argument("--root")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--to", type=Path, default=Path("benchmarks/results/fedld.csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    there = list(csv.DictReader(arguments.to.open())) if arguments.to.exists() else []
    result = {tuple(row[name] for name in COLUMNS[:6]) for row in there}
    with arguments.to.open("a", newline="") as file:
        writer = csv.writer(file)
        if not there:
            writer.writerow(COLUMNS)
        grid = itertools.product(arguments.seeds, (0.1, 0.5, 100), (10, 5), ("samples", "uniform"), READINGS)
        for seed, alpha, clients, weighting, reading in grid:
            case = (arguments.data, str(alpha), str(clients), weighting, str(seed), reading)
            if case in result:
                continue
            began = time.perf_counter()
            mean, last = run(arguments.data, alpha, clients, weighting, seed, reading, arguments.root)
            writer.writerow([*case, f"{mean:.2f}", f"{last:.2f}", f"{time.perf_counter() - began:.1f}"])
            file.flush()


if __name__ == "__main__":
    main()
