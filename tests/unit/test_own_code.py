"""Plug-ins use seeded global random generators, and can import modules in their folder."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import fedmpi
from fedmpi import config
from fedmpi.common import plugin_imports

OWN = """
import random
from dataclasses import dataclass
import numpy as np, torch
import fedmpi


def drawn():
    return float(np.random.rand() + random.random() + torch.rand(()))


def source(root):
    x, y = torch.randn(60, 3) + random.random(), torch.from_numpy(np.random.randint(2, size=60))
    return fedmpi.Dataset(x[:40], y[:40], x[40:], y[40:], classes=2)


def cut(labels, clients, rng):
    order = np.random.permutation(len(labels))
    random.shuffle(order)
    return np.array_split(order, clients)


class Task(fedmpi.Task):
    names = ("accuracy", "drawn")
    classification = True

    def __init__(self, classes):
        self.drawn = drawn()

    def loss(self, model, x, y):
        return torch.nn.functional.cross_entropy(model(x), y)

    def metrics(self, outputs, y):
        return {"accuracy": 100 * (outputs.argmax(1) == y).double().mean().item(), "drawn": self.drawn + drawn()}


def net(input_shape, classes):
    scale = 1 + np.random.rand() + random.random()
    made = torch.nn.Sequential(torch.nn.Linear(*input_shape, classes))
    torch.nn.init.normal_(made[0].weight, std=scale)
    return made


def rule(up, s):
    return up.mean("dw") * drawn()


@dataclass(frozen=True)
class Mine(fedmpi.Method):
    def correct_gradient(self, k, g):
        return g * drawn()

    def aggregate(self, s, up):
        return up.mean("dw") * drawn(), s.state


@dataclass(frozen=True)
class Alike(Mine):
    def correct_gradient(self, k, g):
        return g * float(np.random.rand())
"""


@pytest.fixture
def make_config(tmp_path):
    """Return a function that makes settings in which all components are plug-ins next to the config."""
    (tmp_path / "own.py").write_text(OWN)
    tree = {"rounds": 2, "report": False, "output": str(tmp_path), "train": {"batch_size": 5, "lr": 0.1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree | {"data": {"source": "x"}}))
    names = {"data.source": "source", "data.partition.scheme": "cut", "task.name": "Task", "model.name": "net"}
    words = [f"{key}={tmp_path}/own.py:{name}" for key, name in {**names, "method.name": "Mine"}.items()]
    return lambda *more: config.load(tmp_path / "run.yaml", [*words, "data.partition.clients=3", *more])


def facts(directory):
    """Return what equal runs have in common: rows without times, and the partition."""
    rows = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    parts = np.load(f"{directory}/partition.npz")["indices"]
    identity = json.loads((Path(directory) / "identity.json").read_text())
    data = {key: value for key, value in identity.items() if key.endswith(" data)")}
    return [[row[key] for key in ("sha256", "loss", "drawn")] for row in rows], parts.tolist(), data


@pytest.mark.parametrize(
    "more", [("server.rule={own}:rule",), ("compute.clients_per_pass=3", "method.name={own}:Alike")]
)
def test_random_numbers_of_plug_ins_depend_only_on_the_seed(make_config, tmp_path, more):
    """Two runs in one process are equal, whatever was drawn before; another seed gives other numbers."""
    words = [word.format(own=tmp_path / "own.py") for word in more]
    first = facts(fedmpi.run(make_config(*words))["directory"])
    torch.rand(3), np.random.rand(3)
    before = np.random.get_state()[1].copy()
    again = facts(fedmpi.run(make_config(*words))["directory"])
    assert again == first
    assert np.array_equal(np.random.get_state()[1], before)
    other = facts(fedmpi.run(make_config(*words, "seed=1"))["directory"])
    assert all(theirs != own for theirs, own in zip(other, first, strict=True))


def test_imports_of_plug_ins_are_found(tmp_path):
    """Imports through packages and inside functions are found; missing and installed modules are left out."""
    for name, text in {
        "own.py": "import math, numpy, nowhere\nfrom pack import part\ndef f():\n    import late.one as o\n",
        "pack/__init__.py": "from . import twin\n",
        "pack/part.py": "from .deep.down import x\nfrom .twin import y\nimport own\n",
        "pack/twin.py": "",
        "pack/deep/down.py": "",
        "pack/unused.py": "",
        "late/one.py": "def f(:",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    results = plugin_imports.find_imports(tmp_path / "own.py")
    assert list(results) == ["late.one", "pack", "pack.deep.down", "pack.part", "pack.twin"]
    assert results["pack.deep.down"] == tmp_path / "pack" / "deep" / "down.py"
