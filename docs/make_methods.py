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
from fedmpi.runtime import build, build_data

HEAD = """# Methods

This page is generated from the sources by `python docs/make_methods.py > docs/methods.md`.

Costs are those of the default options. Messages and state are in multiples of d, the number of parameters
(d = 188,810 for mcmahan_cnn on 8x8 images with ten classes). Passes are the forward and backward passes through the
body of the network in one local epoch, divided by the number of optimiser steps. Passes that compute statistics before
and after training are included. FedAvg needs one forward and one backward pass per step.
"""

MOVED = Path(__file__).parents[1] / "benchmarks" / "results" / "moved.csv"
CHANGED = """## Results that changed after a comparison with the papers

Some methods were corrected after a comparison with their papers. The table shows the accuracy before and after, on
the digits task of docs/results.md (ten clients, Dirichlet(0.1), 20 rounds of two epochs, lr 0.05, momentum 0.5,
`prox: none`): the mean of the last ten rounds over seeds 0 to 2, and in brackets the range
(benchmarks/results/moved.csv). For kNN-Per it is the accuracy of the clients' personal models.

| method | change | before | after |
| --- | --- | --- | --- |
"""
WHY = {
    "{name: fedavg}": "nothing",
    "{name: fedld}": "the weighted sum of the projections is scaled to the length of the update, "
    "instead of each projection; directions with equal eigenvalues are treated as one",
    "{name: fedsol}": "Lambda uses one norm per layer, of weight and bias together (7)",
    "{name: fedsol, adaptive: false}": "at w = w0 the gradient of the proximal term is exactly zero",
    "{name: gradproj}": "the same, also for the L2 distance; its config has equal weights",
    "{name: fedsol, prox: {name: fedsol_table4.py:ScaffoldTerm}}": "c_i is the mean gradient; it grew without bound",
    "{name: fedsol, prox: {name: fedsol_table4.py:FedDynTerm}}": "the same for g_k",
    "{name: ccvr}": "features are drawn with the symmetric root of the covariance, equal on every processor",
    "{name: knnper, similarity: paper}": "new option: exp(-d), as in the paper; the default is the code's exp(-d^2)",
    "{name: fedsol_table10.py:Objective, objective: A4}": "eps without Lambda, as in the paper",
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
    plain = build.make_module(settings, made.data.input_shape, made.data.classes)
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
        f"Up {up:.2f} d, down {down:.2f} d; state {client:.2f} d per client, {server:.2f} d on the server; "
        f"{forward:.1f} forward and {backward:.1f} backward passes per step.",
        "",
    ]
    return "\n".join(lines)


def main():
    torch.set_num_threads(1)
    sections = [section(*entry) for entry in methods.registry.items()]
    sys.stdout.write("\n".join([HEAD, CHANGED + changed() + "\n", *sections]))


if __name__ == "__main__":
    main()
