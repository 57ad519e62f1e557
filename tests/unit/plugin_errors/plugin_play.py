"""A tiny experiment with a plug-in of a user in it, which its config names as path/to/file.py:name."""

import inspect

import torch
from helpers import prepare
from torch.nn import functional

import fedmpi
from fedmpi.config.schema import Settings
from fedmpi.runtime import build_data

GOOD = f"{__file__}:good_source"


def table(n=40):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=g)
    return x, (x[:, 0] > 0).long()


def good_source(root):
    return changed()


def changed(**parts):
    x, y = table(60)
    whole = {"train_x": x[:40], "train_y": y[:40], "test_x": x[40:], "test_y": y[40:], "classes": 2}
    return fedmpi.Dataset(**{**whole, **parts})


class TaskBase:
    names = ("hits",)

    def __init__(self, classes):
        pass

    def loss(self, model, x, y):
        return functional.cross_entropy(model(x), y)

    def metrics(self, outputs, y):
        return {"hits": 1.0}


def run_plugins(**sections):
    """Two rounds of three clients with 13 or 14 rows each; sections replace those of the config."""
    tree = {
        "rounds": 2,
        "data": {"source": GOOD, "partition": {"scheme": "iid", "clients": 3}},
        "model": {"name": "mlp", "hidden": [4]},
        "method": {"name": "fedavg"},
        "train": {"batch_size": 5, "lr": 0.1, "momentum": 0.0},
        "evaluate": {"protocol": ["global", "personal"]},
    }
    tree |= {key: value for key, value in sections.items() if value is not None}
    settings = Settings.model_validate(tree)
    it = prepare(settings, build_data.build_partitioned_data(settings))
    it.reason = it.fed.run()
    return it


def sections_of(kind, thing):
    """The sections of a config that name this plug-in."""
    named = f"{inspect.getsourcefile(thing)}:{thing.__name__}"
    return {
        "source": {"data": {"source": named, "partition": {"scheme": "iid", "clients": 3}}},
        "partition": {"data": {"source": GOOD, "partition": {"scheme": named, "clients": 3}}},
        "model": {"model": {"name": named}},
        "task": {"task": {"name": named}},
        "rule": {"server": {"rule": {"name": named}}},
        "method": {"method": {"name": named}},
    }[kind]
