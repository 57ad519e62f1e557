r"""Check one cell of NIID-Bench as Flower runs it: write Flower's partition, and train with a minimal program.

    python benchmarks/niid.py partition --root DIR > flower.csv
    fedmpi sweep configs/benchmarks/niid_bench.yaml 'include={set: FashionMNIST, partition: flower, method: FedAvg}' \
        'grid.partition={flower: {data: {partition: {scheme: file, path: flower.csv}}}}' data.root=DIR
    python benchmarks/niid.py plain --root DIR [--seed 0] [--rounds 50]

partition: divides FashionMNIST by Dirichlet(0.5) among ten clients, and prints a file for `scheme: file`. Flower's data
set has its own seed, 42, independent of the run's seed (baselines/niid_bench, dataset.py), so that all runs of a cell
share one partition. For one class after another, from one random stream: the class is shuffled, proportions
q ~ Dir(alpha 1_N) are drawn and set to 0 for clients that have n/N samples, and the class is cut at
floor(cumsum(q / sum q) n_c). All of this is repeated until every client has 10 samples.
plain: trains FedAvg on that partition without fedmpi's engine, models and optimisers, and prints a line per round:
round, accuracy. benchmarks/results/niid.csv contains the results of both.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedmpi.data.sources.images.public_arrays import fashion_mnist

CLIENTS, ALPHA, SEED = 10, 0.5, 42


def partition_clients(labels):
    """Return the client of each sample, (n,)."""
    rng, n = np.random.default_rng(SEED), len(labels)
    while True:
        owner = np.full(n, -1)
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)
            rng.shuffle(rows)
            q = rng.dirichlet(np.full(CLIENTS, ALPHA))
            q = q * (np.bincount(owner[owner >= 0], minlength=CLIENTS) < n / CLIENTS)
            ends = (np.cumsum(q / q.sum()) * len(rows)).astype(int)
            ends[-1] = len(rows)
            owner[rows] = np.repeat(np.arange(CLIENTS), np.diff(ends, prepend=0))
        if np.bincount(owner, minlength=CLIENTS).min() >= 10:
            return owner


def make_net():
    """Return Flower's model CNNMnist."""
    convolutions = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers = [nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*convolutions, nn.Flatten(), *layers)


def train_plain_fedavg(x, y, tests, labels, owner, rounds):
    """Train FedAvg with ten epochs of SGD per client in batches of 64, and yield the accuracy after each round."""
    model = make_net()
    w = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(rounds):
        new = {name: torch.zeros_like(value) for name, value in w.items()}
        for client in range(CLIENTS):
            rows = torch.from_numpy(np.flatnonzero(owner == client))
            model.load_state_dict(w)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
            for _ in range(10):
                for batch in rows[torch.randperm(len(rows))].split(64):
                    optimiser.zero_grad()
                    cross_entropy(model(x[batch]), y[batch]).backward()
                    optimiser.step()
            for name, value in model.state_dict().items():
                new[name] += value * (len(rows) / len(y))
        w = new
        model.load_state_dict(w)
        with torch.no_grad():
            yield 100 * (model(tests).argmax(1) == labels).double().mean().item()


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("partition", "plain"))
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    data = fashion_mnist(args.root)
    owner = partition_clients(data.train_y.numpy())
    if args.what == "partition":
        print("client", *owner, sep="\n")
        return
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    x, tests = (part.stored.float() / 255 for part in (data.train_x, data.test_x))
    for t, accuracy in enumerate(train_plain_fedavg(x, data.train_y, tests, data.test_y, owner, args.rounds)):
        print(f"{t},{accuracy:.2f}", flush=True)


if __name__ == "__main__":
    main()
