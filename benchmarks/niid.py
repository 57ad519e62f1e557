"""One cell of NIID-Bench as Flower runs it: its own partition, and the plainest program for it.

    python benchmarks/niid.py partition --root DIR > flower.csv
    fedmpi sweep configs/benchmarks/niid_bench.yaml 'only={set: FashionMNIST, partition: flower, method: FedAvg}' \\
        'over.partition={flower: {data: {partition: {scheme: file, path: flower.csv}}}}' data.root=DIR
    python benchmarks/niid.py plain --root DIR [--seed 0] [--rounds 50]

partition: FashionMNIST by Dirichlet(0.5) among ten clients, as a file for `scheme: file`. Flower's data set has a seed
of its own, 42, whatever the run's (baselines/niid_bench, dataset.py), so that all runs of a cell share one partition.
Class after class, in one stream: the class shuffled, shares q ~ Dir(alpha 1_N), 0 for clients that hold n/N samples,
cut at floor(cumsum(q / sum q) n_c); all of it anew until every client holds 10 samples.
plain: FedAvg on that partition without fedmpi's engine, models and optimisers. A line a round: round, accuracy.
benchmarks/results/niid.csv has what both gave.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedmpi.data.sources.pictures.public_arrays import fashion_mnist

CLIENTS, ALPHA, SEED = 10, 0.5, 42


def owners(labels):
    """(n,) which client each sample goes to."""
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


def net():
    """Flower's CNNMnist."""
    convolutions = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers = [nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*convolutions, nn.Flatten(), *layers)


def plain(x, y, tests, labels, owner, rounds):
    """The accuracy after each round: ten epochs of SGD a client, in batches of 64."""
    model = net()
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("partition", "plain"))
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=50)
    asked = parser.parse_args()
    data = fashion_mnist(asked.root)
    owner = owners(data.train_y.numpy())
    if asked.what == "partition":
        print("client", *owner, sep="\n")
        return
    torch.set_num_threads(1)
    torch.manual_seed(asked.seed)
    x, tests = (part.stored.float() / 255 for part in (data.train_x, data.test_x))
    for t, accuracy in enumerate(plain(x, data.train_y, tests, data.test_y, owner, asked.rounds)):
        print(f"{t},{accuracy:.2f}", flush=True)


if __name__ == "__main__":
    main()
