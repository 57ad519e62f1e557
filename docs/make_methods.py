"""Write docs/methods.md from the sources of the methods.   python docs/make_methods.py > docs/methods.md

Formulas come from the docstrings of the modules, and options from the fields of the dataclasses. The cost of a round is
measured: message sizes are those of the packings, and passes are counted while one client trains.
"""

import csv
import dataclasses
import sys
from importlib import import_module
from pathlib import Path
from statistics import mean

import torch

from fedmpi import config, methods
from fedmpi.comm.base import SingleProcess
from fedmpi.common.registry import load_object
from fedmpi.engine.round_control import TRAIN
from fedmpi.method import VALIDATION
from fedmpi.runtime import build, build_data, build_model

HEAD = """# Methods

This page is generated from the sources by `python docs/make_methods.py > docs/methods.md`.

Each section gives the equations of a method, its options and its costs. The costs hold for the default options and the
model mcmahan_cnn on 8x8 images with ten classes. The columns "up" and "down" give what a
client sends and receives in a round. Sizes of messages and states are in multiples of d, the number of parameters (here
d = 188,810).

The number of passes per step is the number of forward and backward passes through the body of the network in one local
epoch, divided by the number of optimiser steps. It includes passes that compute statistics before and after training.
FedAvg needs one forward and one backward pass per step.
"""

MOVED = Path(__file__).parents[1] / "benchmarks" / "results" / "moved.csv"
CHANGED = """## Results that changed after a comparison with the papers

Some methods were corrected after a comparison with their papers. The table shows the accuracy before and after the
correction: the mean of the last ten rounds over seeds 0 to 2, and in brackets the range over these seeds. For kNN-Per
it is the accuracy of the clients' personal models. All numbers are in benchmarks/results/moved.csv.

The accuracies were measured on handwritten digits, which are divided among ten clients with Dirichlet(0.1). Clients
train for 20 rounds of two epochs with learning rate 0.05, momentum 0.5 and `prox: none`.

| method | change | before | after |
| --- | --- | --- | --- |
"""
WHY = {
    "{name: fedavg}": "none",
    "{name: fedld}": "the weighted sum of the projections, and not each projection, is scaled to the length of the "
    "update; directions with equal eigenvalues are treated as one",
    "{name: fedsol}": "Lambda uses one norm per layer, of weight and bias together, as in equation (7) of the paper",
    "{name: fedsol, adaptive: false}": "at w = w0 the gradient of the proximal term is exactly zero",
    "{name: gradproj}": "the gradient of the proximal term is exactly zero at w = w0, also for the L2 distance; "
    "the config has equal weights",
    "{name: fedsol, prox: {name: fedsol_table4.py:ScaffoldTerm}}": "c_i is the mean gradient and no longer grows "
    "without bound",
    "{name: fedsol, prox: {name: fedsol_table4.py:FedDynTerm}}": "g_k no longer grows without bound",
    "{name: ccvr}": "features are drawn with the symmetric square root of the covariance, "
    "which is the same on every processor",
    "{name: knnper, similarity: paper}": "this option is new: it uses exp(-d), as the paper does; "
    "the default is exp(-d^2), as in the authors' code",
    "{name: fedsol_table10.py:Objective, objective: A4}": "eps is computed without Lambda, as in the paper",
}


def changed():
    rows = list(csv.DictReader(MOVED.open()))
    lines = []
    for method, why in WHY.items():
        cells = []
        for when in ("before", "after"):
            values = [float(row[when]) for row in rows if row["method"] == method]
            cells.append(f"{mean(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        lines.append(f"| `{method}` | {why} | {' | '.join(cells)} |")
    return "\n".join(lines)


class Passes:
    """Counts forward and backward passes through the first layer with parameters of a module."""

    def __init__(self, module):
        self.forward, self.backward = 0, 0
        first = next(m for m in module.modules() if any(True for _ in m.parameters(recurse=False)))
        first.register_forward_pre_hook(lambda *_: self._add("forward"))
        first.register_full_backward_hook(lambda *_: self._add("backward"))

    def _add(self, which):
        setattr(self, which, getattr(self, which) + 1)


def cost(name):
    """Return (up, down, client state, server state) in multiples of d, and (forward, backward) passes per step."""
    overrides = [f"method={{name: {name}}}", "train.epochs=1", "train.momentum=0.0"]
    if VALIDATION in load_object(name, methods.registry, "method").needs:
        overrides.append("data.validation=0.1")
    settings = config.load("configs/quickstart.yaml", overrides)
    made = build.make_experiment(settings, build_data.build_partitioned_data(settings), torch.device("cpu"))
    fed = build.make_federation(made, SingleProcess(torch.device("cpu")), lambda: False)
    modules = [
        fed.trainer.frozen_copy(i)[1].module for i in range(2)
    ]  # before hooks are registered, since a copy of the module would include them
    counts = [Passes(module) for module in (made.net.module, *modules)]
    messages = made.messages
    fed.transport.broadcast(TRAIN, fed.server)
    # in round 1, because some methods do less in round 0
    client = fed.states.client_context(
        0, 1, fed.config.learning_rate(1), fed.transport.broadcast_copy, fed.transport.empty_download
    )
    up = messages.upload_layout(1).packing.size
    client.run_round(torch.zeros(up))
    plain = build_model.make_module(settings, made.data.input_shape, made.data.classes)
    d = sum(p.numel() for p in plain.parameters())  # of the model without the changes by the method
    down = messages.broadcast_layout().packing.size + messages.per_client_download.size
    sizes = (up, down, messages.client_state.size, messages.server_state.size)
    steps = max(client.steps, 1)
    return [size / d for size in sizes], [sum(getattr(c, w) for c in counts) / steps for w in ("forward", "backward")]


def section(name, target):
    module, _, attribute = target.partition(":")
    source = import_module(module)
    lines = [f"## {name}", "", "```text", (source.__doc__ or "").strip(), "```", ""]
    fields = [f for f in dataclasses.fields(getattr(source, attribute)) if f.init]
    if fields:
        lines += ["| option | default | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{f.name}` | `{f.default!r}` | {f.metadata.get('doc', '')} |" for f in fields]
        lines.append("")
    (up, down, client, server), (forward, backward) = cost(name)
    lines += [
        "| up | down | state per client | state on the server | forward passes per step | backward passes per step |",
        "| --- " * 6 + "|",
        f"| {up:.2f} d | {down:.2f} d | {client:.2f} d | {server:.2f} d | {forward:.1f} | {backward:.1f} |",
        "",
    ]
    return "\n".join(lines)


def main():
    torch.set_num_threads(1)
    sections = [section(*entry) for entry in methods.registry.items()]
    sys.stdout.write("\n".join([HEAD, CHANGED + changed() + "\n", *sections]))


if __name__ == "__main__":
    main()
