"""Local training as one would write it with plain torch, with which methods are compared."""

import copy
from contextlib import contextmanager
from pathlib import Path

import torch
from helpers import prepare, run_experiment, settings
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from fedmpi.common import seeds

NET = {"name": f"{Path(__file__).parent / 'nets.py'}:norm64"}
FULL = {"batch_size": "full", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}


def experiment(method, options=None, epochs=5, net=NET, **changes):
    """Prepare an experiment with norm64 in float64 and `epochs` full-batch steps per round."""
    return prepare(
        settings(method, "norm", model=net, options=options or {}, train={**FULL, "epochs": epochs}, **changes)
    )


def rows_of(it, k=0, part="train"):
    """Return x and y of client k's rows of a part: train, test or validation."""
    shard = getattr(it.experiment.data, part)[k]
    return shard.x[shard.index], shard.y[shard.index]


def module_of(it, w=None, b=None):
    """Return a copy of the run's module, with other weights and buffers if they are given."""
    module = copy.deepcopy(it.experiment.net.module)
    if w is not None:
        module.load_state_dict(it.experiment.model.state_dict(w.clone(), (it.b if b is None else b).clone()))
    return module


def flat(module):
    """Return all weights of a module as a vector (d,)."""
    return parameters_to_vector(module.parameters()).detach()


def pieces(it, w):
    """Return flat weights (d,) as a list of tensors."""
    return [segment.view(w).clone() for segment in it.experiment.model.layout.segments]


def load_pieces(module, weights):
    """Load a list of tensors into a module."""
    with torch.no_grad():
        for p, value in zip(module.parameters(), weights, strict=True):
            p.copy_(value)


def weighted_mean(weights, clients):
    """Return the weighted mean over clients of their lists of tensors."""
    tensors = zip(*clients, strict=True)
    return [sum(n * value for n, value in zip(weights, values, strict=True)) / sum(weights) for values in tensors]


def loss_of(module, rows):
    """Return the cross-entropy in evaluation mode."""
    x, y = rows
    with torch.no_grad():
        return cross_entropy(module.eval()(x), y).item()


def batches(it, k, t, fit=0):
    """Yield x and y of each step of a client's round."""
    train, (x, y) = it.experiment.settings.train, rows_of(it, k)
    generator = seeds.torch_generator(it.experiment.settings.seed, "batches", t, k, fit)
    for _ in range(train.epochs):
        for rows in torch.randperm(len(x), generator=generator).split(train.batch_size):
            if len(rows) == train.batch_size or not train.drop_last:
                yield x[rows], y[rows]


def train_epochs(
    module, rows, stream, lr=0.05, epochs=1, momentum=0.9, weight_decay=0.0, batch_size=10, drop_last=False
):
    """Train a module by SGD on the cross-entropy with a new optimiser.

    Args:
        stream: round, client, and number of the fit in that client's round, which determine the order of batches.
    """
    x, y = rows
    sgd = torch.optim.SGD(module.parameters(), lr, momentum, weight_decay=weight_decay)
    generator = seeds.torch_generator(0, "batches", *stream)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(batch_size):
            if len(batch) == batch_size or not drop_last:
                sgd.zero_grad()
                cross_entropy(module(x[batch]), y[batch]).backward()
                sgd.step()


def gradient(module, loss):
    """Return the gradient of a loss as one tensor per parameter."""
    return torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, materialize_grads=True)


def features(module, x):
    """Return features and logits of norm64."""
    z = x.double()
    for layer in module[:-1]:
        z = layer(z)
    return z, module[-1](z)


def length(pieces):
    """Return the norm of a list of tensors."""
    return torch.cat([piece.flatten() for piece in pieces]).norm()


@contextmanager
def displaced(module, eps):
    """Context manager: move a module to w + eps, then restore weights and buffers."""
    saved = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        for p, piece in zip(module.parameters(), eps, strict=True):
            p += piece
    yield
    module.load_state_dict(saved)


def descend(module, steps, direction, *arguments):
    """Make SGD steps with the settings FULL along the tensors that direction(module, *arguments) returns."""
    sgd = torch.optim.SGD(module.parameters(), FULL["lr"], FULL["momentum"], weight_decay=FULL["weight_decay"])
    for _ in range(steps):
        for p, g in zip(module.parameters(), direction(module, *arguments), strict=True):
            p.grad = g.detach().clone()
        sgd.step()
    return module


def assert_trains_along(it, client, direction, steps=5):
    """Check that a client of an `experiment` ends where steps along direction(module, received, x, y) end.

    Args:
        direction: returns the tensors of one step. `received` is the received model in evaluation mode.
    """
    received = module_of(it).eval().requires_grad_(False)
    module = descend(module_of(it), steps, direction, received, *rows_of(it))
    it.experiment.method.train(client)
    mine = it.experiment.net.module.state_dict()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-11, msg=name)


def assert_is_fedavg(method, net="mlp", options=None, **changes):
    """Check that the run of a method has the bits of FedAvg's, including batch statistics, and return both runs."""
    mine = run_experiment(settings(method, net, options=options or {}, **changes))
    theirs = run_experiment(settings("fedavg", net, **changes))
    assert mine.hashes == theirs.hashes
    assert torch.equal(mine.b, theirs.b)
    return mine, theirs
