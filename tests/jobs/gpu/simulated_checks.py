"""What fedmpi does around training, on the simulated GPU.  simulated_cuda.py simulated_checks.py FILE

Writes {check: what it found} into FILE.
"""

import gc
import json
import sys
from pathlib import Path

import simulated_cuda
import torch
from helpers import prepare, settings, small_settings

from fedmpi.common.errors import UserError
from fedmpi.flat import linear

GPU = torch.device("cuda", 0)
WIDE = {"name": "mlp", "hidden": [4096]}  # 284,676 weights, more than a block of columns


def count(function, *arguments):
    simulated_cuda.COUNTS.clear()
    function(*arguments)
    return simulated_cuda.totals()


def ways_of_gathering():
    """The classes that gather the uploads of a model of two blocks, where the config asks for sums."""
    found = {}
    for name, server in {"streamed": {}, "local": {"reduce": "local"}}.items():
        it = prepare(settings("fedavg", model=WIDE, rounds=1, server=server), device=GPU)
        gathering = it.fed.exchange.gathering
        ways = []
        it.fed.exchange.gathering = lambda *given, make=gathering, ways=ways: ways.append(made := make(*given)) or made
        it.fed.run()
        found[name] = [type(way).__name__ for way in ways]
    return found


def scratch_memory():
    """The most float64 entries that sums over 2,000 rows have taken."""
    rows = torch.randn(2000, 20_000).to(GPU)
    linear.combine(rows, torch.full((2000,), 1 / 2000))
    linear.gram(rows)
    linear.products(rows, rows[0])
    linear.trimmed_mean(rows, 0.1)
    return linear._buffers.wide.numel()


def products_at_once():
    """The most products of a chunk's columns that lay in memory while a Gram matrix was formed of ten chunks."""
    counts, wide, scratch, linear.SCRATCH_GPU = [], linear._wide, linear.SCRATCH_GPU, 50 * 64

    def counting(x):
        counts.append(sum(type(each) is torch.Tensor and each.shape == (50, 50) for each in gc.get_objects()))
        return wide(x)

    linear._wide = counting
    try:
        linear.gram(torch.randn(50, 640).to(GPU))
    finally:
        linear._wide, linear.SCRATCH_GPU = wide, scratch
    assert len(counts) == 10
    return max(counts)


def hash_of_a_model():
    it = prepare(settings("fedavg", "norm"), device=GPU)
    return count(it.made.model.layout.sha256, it.made.model.w)


def downloads_of_fedfomo():
    """How often the server waits for its GPU to choose what one client gets, of 7 and of 40 clients."""
    found = []
    for clients in (7, 40):
        config = small_settings("fedfomo", rounds=1, data={"partition": {"scheme": "iid", "clients": clients}})
        server = prepare(config, device=GPU).fed.server
        found.append(count(server.download, 0, 0).get("sync", 0))
    return found


def graphs():
    """Launches of a run of FedAvg without and with graphs, how many were captured, and whether the weights agree."""
    found = []
    for graphs in (False, True):
        it = prepare(settings("fedavg", "norm", train={"epochs": 4}, compute={"graphs": graphs}), device=GPU)
        found.append((it, count(it.fed.run)["launch"]))
    (one, launches), (other, fewer) = found
    captured = len(other.fed.worker.graphs._captured)
    return {"launches": [launches, fewer], "captured": captured, "same": torch.equal(one.w, other.w)}


def a_model_that_cannot_be_captured():
    """What is said of one whose forward pass asks the device."""
    it = prepare(
        settings("fedavg", "norm", model={"name": "helpers:cumulative_net"}, compute={"graphs": True}), device=GPU
    )
    try:
        it.fed.run()
    except UserError as error:
        return str(error)


def main():
    checks = (
        *(ways_of_gathering, scratch_memory, products_at_once, hash_of_a_model, downloads_of_fedfomo, graphs),
        a_model_that_cannot_be_captured,
    )
    Path(sys.argv[1]).write_text(json.dumps({check.__name__: check() for check in checks}))


if __name__ == "__main__":
    main()
