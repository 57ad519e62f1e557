"""How often training makes the host wait for a GPU, on the simulated one.  simulated_cuda.py synchronisations.py FILE

Writes {case of every_method.py: {"steps": ..., "a client": ...}} into FILE: how often all steps of a client's round
made the host wait, and how often its whole round did, each the most that any client caused.
"""

import json
import sys
import warnings
from collections import Counter
from pathlib import Path

import simulated_cuda
import torch
from every_method import VARIANTS
from helpers import prepare, small_settings

from fedmpi.engine.local.client import LocalClient
from fedmpi.methods import registry

LARGE = ("alexnet", "vgg", "resnet")  # take long, and hold nothing new


def waits(method, net, changes):
    """({(round, client): how often the host waited in the client's round}, the same of its optimiser's steps)"""
    in_rounds, in_steps, take_part, fit = {}, Counter(), LocalClient.take_part, LocalClient.fit

    def now():
        return simulated_cuda.totals().get("sync", 0)

    def counted_round(client, row):
        before = now()
        fine = take_part(client, row)
        in_rounds[client.round, client.id] = now() - before
        return fine

    def counted_steps(client, *args, **options):
        before = now()
        fitted = fit(client, *args, **options)
        in_steps[client.round, client.id] += now() - before
        return fitted

    train = {name: value for name, value in changes.get("train", {}).items() if name != "steps"}
    changes = {**changes, "rounds": 2, "evaluate": {"every": 100}, "train": {**train, "epochs": 1}}
    LocalClient.take_part, LocalClient.fit = counted_round, counted_steps
    try:
        prepare(small_settings(method, net, **changes), device=torch.device("cuda")).fed.run()
    finally:
        LocalClient.take_part, LocalClient.fit = take_part, fit
    return in_rounds, in_steps


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = {method: (method, "norm", {}) for method in sorted(registry)} | VARIANTS
    found = {}
    for name, case in cases.items():
        if any(net in name for net in LARGE):
            continue
        in_rounds, in_steps = waits(*case)
        found[name] = {"steps": max(in_steps.values(), default=0), "a client": max(in_rounds.values())}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
