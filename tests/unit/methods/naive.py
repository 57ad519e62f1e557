"""Local training as anybody would write it with torch, for methods to be compared with: norm64, full batches."""

import copy
from contextlib import contextmanager
from pathlib import Path

import torch
from helpers import prepare, settings

NET = {"name": f"{Path(__file__).parent / 'nets.py'}:norm64"}
FULL = {"batch_size": "full", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}


def experiment(method, options=None, epochs=5, **changes):
    """Norm64 in float64, `epochs` full-batch steps a round."""
    return prepare(
        settings(method, "norm", model=NET, options=options or {}, train={**FULL, "epochs": epochs}, **changes)
    )


def rows_of(it, k=0):
    shard = it.made.data.train[k]
    return shard.x[shard.index], shard.y[shard.index]


def features(module, x):
    """z and logits of norm64."""
    z = x.double()
    for layer in module[:-1]:
        z = layer(z)
    return z, module[-1](z)


def gradient(module, loss):
    """One tensor a parameter."""
    return torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, materialize_grads=True)


def length(pieces):
    return torch.cat([piece.flatten() for piece in pieces]).norm()


@contextmanager
def displaced(module, eps):
    """At w + eps; afterwards weights and buffers are as before."""
    saved = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        for p, piece in zip(module.parameters(), eps, strict=True):
            p += piece
    yield
    module.load_state_dict(saved)


def descend(module, steps, direction):
    """`direction()` gives each step's pieces; torch's SGD with FULL's settings does the rest."""
    sgd = torch.optim.SGD(module.parameters(), FULL["lr"], FULL["momentum"], weight_decay=FULL["weight_decay"])
    for _ in range(steps):
        for p, piece in zip(module.parameters(), direction(), strict=True):
            p.grad = piece.detach().clone()
        sgd.step()
    return module


def assert_same(it, module):
    """The engine's module is this one, buffers included."""
    mine = it.made.net.module.state_dict()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-11, msg=name)
