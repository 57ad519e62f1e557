"""Count how often training waits for the simulated GPU.

    simulated_cuda.py synchronisations.py FILE

Writes {"on the GPU" or "over gloo": {case of every_method.py: {"steps": ..., "a client": ..., "uploads": ...}}} to
FILE: how often the host waited in all steps of a client's round, in its whole round, and for a copy to the GPU; each
number is the maximum over the clients. Messages are on the GPU, or on the CPU, as with gloo.
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

from fedmpi.comm.base import SingleProcess
from fedmpi.engine.client_states import ClientStates
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.methods import registry


def count_waits(method, net, changes, messages):
    """Return {"steps", "a client", "uploads": {(round, client): how often the host waited}}."""
    found = {"steps": Counter(), "a client": Counter(), "uploads": Counter()}
    view, run_round, fit = ClientStates.client_context, ClientContext.run_round, ClientContext.fit

    def count(part, what, function, owner, t, client, *args, **options):
        before = simulated_cuda.COUNTS.get(what, 0)
        try:
            return function(owner, *args, **options)
        finally:
            found[part][t, client] += simulated_cuda.COUNTS.get(what, 0) - before

    def counted_view(states, client, t, *args):
        return count("uploads", "upload", view, states, t, client, client, t, *args)

    def counted_round(client, row):
        def run(client):
            return count("a client", "sync", run_round, client, client.round, client.id, row)

        return count("uploads", "upload", run, client, client.round, client.id)

    def counted_steps(client, *args, **options):
        return count("steps", "sync", fit, client, client.round, client.id, *args, **options)

    train = {name: value for name, value in changes.get("train", {}).items() if name != "steps"}
    changes = {**changes, "rounds": 2, "evaluate": {"every": 100}, "train": {**train, "epochs": 1}}
    ClientStates.client_context, ClientContext.run_round, ClientContext.fit = counted_view, counted_round, counted_steps
    try:
        config, comm = small_settings(method, net, **changes), SingleProcess(torch.device(messages))
        prepare(config, comm=comm, device=torch.device("cuda")).fed.run()
    finally:
        ClientStates.client_context, ClientContext.run_round, ClientContext.fit = view, run_round, fit
    return {part: max(counts.values(), default=0) for part, counts in found.items()}


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = {method: (method, "norm", {}) for method in sorted(registry)} | VARIANTS
    found = {
        where: {name: count_waits(*case, messages) for name, case in cases.items()}
        for where, messages in {"on the GPU": "cuda", "over gloo": "cpu"}.items()
    }
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
