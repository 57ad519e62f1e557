"""Run a case in fedmpi, and write the initial weights and batches for the other program, and the results."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.comm.base import SingleProcess
from fedmpi.config import Settings
from fedmpi.data import batches
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import FederatedData, split
from fedmpi.engine.federation_config import RunCallbacks
from fedmpi.runtime import build

SIZES, CLASSES, FEATURES, WIDTH, ROUNDS = (35, 18, 38, 12, 16), 5, 12, 16, 3


@dataclass
class Ours:
    """The results of fedmpi: w0 (d,), w (rounds, d), loss (rounds,); kept: client state (N, ...) by name."""

    w0: Tensor
    w: Tensor
    loss: Tensor
    kept: dict[str, Tensor]


def clients(sizes: Sequence[int]) -> FederatedData:
    """Return a federation with clients of these sizes, each with two of the five classes."""
    g = torch.Generator().manual_seed(7)
    centres, xs, ys = torch.randn(CLASSES, FEATURES, generator=g), [], []
    for k, n in enumerate(sizes):
        y = (k + torch.randint(2, (n,), generator=g)) % CLASSES
        xs.append(centres[y] + 0.7 * torch.randn(n, FEATURES, generator=g))
        ys.append(y)
    x, y, site = torch.cat(xs), torch.cat(ys), torch.repeat_interleave(torch.tensor(sizes))
    made = split(Dataset(x, y, x[:5], y[:5], CLASSES, site, site[:5]), "site", len(sizes), 0, "global")
    wide: dict[int, Tensor] = {id(shard.x): shard.x.double() for shard in made.train.values()}
    train = {k: replace(shard, x=wide[id(shard.x)]) for k, shard in made.train.items()}
    tests = {k: replace(shard, x=shard.x.double()) for k, shard in made.test.items()}
    whole = replace(made.global_test, x=made.global_test.x.double())
    return replace(made, x_dtype=torch.float64, train=train, test=tests, global_test=whole)


def settings(changes: dict[str, Any]) -> Settings:
    """Return the settings of a small run with three of five clients per round; changes: {config key: value}."""
    tree: dict[str, Any] = {
        "rounds": ROUNDS,
        "seed": 4,  # with this seed every client takes part, and all except one of them twice
        "data": {"source": "made here", "partition": {"scheme": "site"}},
        "model": {"name": "mlp", "hidden": [WIDTH]},
        "method": {"name": "fedavg"},
        "train": {"batch_size": 10, "epochs": 2, "lr": 0.1, "momentum": 0.0},
        "cohort": {"fraction": 0.6},
        "evaluate": {"every": 10**6},
        "compute": {"clients_per_pass": 1},
    }
    for key, value in changes.items():
        *path, last = key.split(".")
        at = tree
        for name in path:
            at = at.setdefault(name, {})
        at[last] = value
    return Settings.model_validate(tree)


def run(changes: dict[str, Any], folder: Path | None = None, options: dict[str, Any] | None = None) -> Ours:
    """Run fedmpi and return the results.

    Args:
        changes: as in `settings`; and "sizes", the number of rows of each client.
        folder: if given, the task for the other program is written there.
        options: options for the other program.
    """
    changes = dict(changes)
    sizes = changes.pop("sizes", SIZES)
    data, asked = clients(sizes), settings(changes)
    passes: list[Tensor] = []
    plain = batches.epoch_order

    def watched(shard: Any, size: int | None, generator: torch.Generator | None) -> Tensor:
        rows = plain(shard, size, generator)
        if generator is not None:
            passes.append(rows)
        return rows

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    batches.epoch_order = watched
    try:
        made = build.make_experiment(asked, data, torch.device("cpu"))
        lines: list[dict[str, Any]] = []
        fed = build.make_federation(made, SingleProcess(torch.device("cpu")), lambda: False, RunCallbacks(lines.append))
        w0, w, trained, weights, step = fed.server.w.clone(), [], [], [], fed.server.step

        def stepping(t: int, lr: float, up: Any, *rest: Any) -> Any:
            if up.dw.shape[1] == len(w0):
                trained.append(fed.server.w + torch.as_tensor(up.dw))
            weights.append(up.p.clone())
            said = step(t, lr, up, *rest)
            w.append(fed.server.w.clone())
            return said

        fed.server.step = stepping
        fed.run()
    finally:
        batches.epoch_order = plain
        torch.set_default_dtype(before)
    lines = [line for line in lines if line["round"] >= 0]
    rows = [fed.states._get_row(k) for k in range(data.clients)]
    views = [made.messages.client_state.views(row) for row in rows]
    kept = {name: torch.stack([getattr(view, name) for view in views]) for name in views[0]}
    if folder is not None:
        owner = np.searchsorted(np.cumsum(sizes), [int(rows[0]) for rows in passes], side="right")
        np.savez(
            folder / "task.npz",
            x=next(iter(data.train.values())).x.numpy(),
            y=next(iter(data.train.values())).y.numpy(),
            sizes=np.array(sizes),
            w0=w0.numpy(),
            widths=np.array([FEATURES, WIDTH, CLASSES]),
            cohorts=np.array([line["cohort"] for line in lines]),
            p=torch.stack(weights).numpy(),
            batch=asked.train.batch_size,
            lr=asked.train.lr,
            epochs=asked.train.epochs,
            order_rows=torch.cat(passes).numpy(),
            order_client=owner,
            order_length=np.array([len(rows) for rows in passes]),
            trained=torch.stack(trained).numpy() if trained else np.zeros((0, 0, 0)),
            options=json.dumps(options or {}),
        )
    losses = torch.tensor([line["train_loss"] for line in lines], dtype=torch.float64)
    return Ours(w0, torch.stack(w), losses, kept)
