"""Read the tasks that fedmpi writes for another program, and write that program's results; needs torch and numpy.

A folder contains task.npz, which fedmpi writes (ours.py), and theirs.npz, which a by_*.py writes. Numbers are float64.
The rows of x are sorted by client; an order is one pass over a client's rows, in the order of its batches.
"""

import json
import sys
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


class Task:
    """A task with the arrays of task.npz as attributes.

    x (n, f), y (n,), sizes (N,) rows of each client, w0 (d,), widths (layers + 1,) of the network, cohorts (rounds, m),
    p (rounds, m) weights of the mean, batch, lr, epochs; order_rows, order_client, order_length: all passes in
    sequence; trained (rounds, m, d): the models that fedmpi's clients uploaded; options: a dict for the other program.
    """

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "task.npz") as file:
            for name in file.files:
                value = file[name]
                setattr(self, name, torch.from_numpy(value) if value.ndim else value.item())
        self.folder, self.options = folder, json.loads(self.options)
        self.clients, self.classes = len(self.sizes), int(self.widths[-1])
        self.starts = [0, *self.sizes.cumsum(0).tolist()]
        self.orders = defaultdict(deque)
        for client, rows in zip(
            self.order_client.tolist(), self.order_rows.split(self.order_length.tolist()), strict=True
        ):
            self.orders[client].append(rows)

    def rows(self, client: int) -> slice:
        return slice(self.starts[client], self.starts[client + 1])

    def owner(self, x: Tensor) -> int:
        """Return the client whose rows x, a view of the task's x, contains."""
        return self.starts.index(x.storage_offset() // x.shape[1])

    def passes(self, client: int, size: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return the batches (x, y) of the client's next pass in fedmpi's order; size: a different batch size."""
        rows = self.orders[client].popleft()
        return [(self.x[part], self.y[part]) for part in rows.split(size or self.batch)]

    def network(self) -> tuple[nn.Sequential, nn.Linear]:
        """Return the network's body and head, with the weights w0."""
        *inner, last = pairwise(self.widths.tolist())
        body = nn.Sequential(*(layer for a, b in inner for layer in (nn.Linear(a, b), nn.ReLU())))
        head = nn.Linear(*last)
        nn.utils.vector_to_parameters(self.w0.clone(), [*body.parameters(), *head.parameters()])
        return body, head

    def finish(self, **found: Tensor | list[Tensor]) -> None:
        """Write theirs.npz.

        found: w (rounds, d), the global model after each round; loss (rounds,); kept (N, ...), the clients' own models.
        """
        arrays = {name: torch.stack(list(value)).detach().numpy() for name, value in found.items() if len(value)}
        left = sum(map(len, self.orders.values()))
        np.savez(self.folder / "theirs.npz", left=left, **arrays)


class Loader:
    """A client's batches: each iteration yields the client's next pass in fedmpi's order."""

    def __init__(self, task: Task, client: int, size: int | None = None) -> None:
        self.task, self.client, self.size = task, client, size or task.batch

    def __len__(self) -> int:
        return -(-int(self.task.sizes[self.client]) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.task.passes(self.client, self.size))


def flat(parameters) -> Tensor:
    """Return a copy of parameters as one vector (d,)."""
    return nn.utils.parameters_to_vector(parameters).detach().clone()


def serve(run: Callable[[Task], None]) -> None:
    """Call run(task) for the tasks of all folders on the command line; write error.txt to the folder if one fails."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for folder in map(Path, sys.argv[1:]):
        try:
            run(Task(folder))
        except Exception:
            (folder / "error.txt").write_text(traceback.format_exc())
