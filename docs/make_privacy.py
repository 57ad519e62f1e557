"""Write the table of methods of docs/privacy.md: which of them run with each part of the section `privacy`.

    python -W ignore docs/make_privacy.py          print the table; the page contains it between two comments

A method is tried with the checks that a run makes at its start, and with one round if its samples are protected.
"""

import sys
import tempfile
from pathlib import Path

import torch

from fedmpi import config
from fedmpi.comm.base import SingleProcess
from fedmpi.common.errors import UserError
from fedmpi.methods import registry
from fedmpi.privacy.noise import NoiseKey
from fedmpi.runtime import build, build_data

BASE = """\
rounds: 1
data: {source: digits, validation: 0.1, partition: {scheme: dirichlet, clients: 4, alpha: 1}}
model: {name: mlp}
method: {name: %s}
train: {batch_size: 50, momentum: 0}
cohort: {weighting: uniform}
"""
MODES = {
    "client": ["privacy.dp={unit: client, clip: 1, noise_multiplier: 1, delta: 1.e-3}"],
    "sample": ["privacy.dp={unit: sample, clip: 1, noise_multiplier: 1, delta: 1.e-5}"],
    "secagg": ["privacy.secagg={threshold: 3}"],
}
MODEL = {"fedatom": "lenet5", "fedatom_personal": "lenet5"}  # methods that need convolutions
REASONS = (  # words of the message -> the reason in the table
    ("single uploads", "single uploads"),
    ("single values", "single uploads"),
    ("label counts", "label counts"),
    ("label_counts", "label counts"),
    ("needs validation", "validation samples"),
    ("outside of steps", "reads samples outside of steps"),
    ("hook step", "gradients of its own"),
    ("hook loss", "loss of a whole batch"),
    ("length of local training", "sets the number of steps"),
    ("more steps in a round", "sets the number of steps"),
)


def try_method(name, words, folder):
    """Return "yes", or why the method is refused."""
    path = folder / "c.yaml"
    path.write_text(BASE % name)
    model = [f"model.name={MODEL[name]}", "data.augment=[{resize: 28}]"] if name in MODEL else []
    settings = config.load(path, [*words, *model])
    data = build_data.build_partitioned_data(settings)
    try:
        experiment = build.make_experiment(settings, data, torch.device("cpu"))
        if experiment.private_steps is not None:
            experiment.private_steps.key = NoiseKey(bytes(32), "run")
            build.make_federation(experiment, SingleProcess(torch.device("cpu")), lambda: False).run()
    except UserError as error:
        text = str(error)
        return "no: " + next((reason for words, reason in REASONS if words in text), text)
    return "yes"


def make_table():
    """Return the lines of the table."""
    lines = ["| method | client-level | sample-level | secure aggregation |", "| --- | --- | --- | --- |"]
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(registry):
            cells = [try_method(name, words, Path(folder)) for words in MODES.values()]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(make_table()) + "\n")
