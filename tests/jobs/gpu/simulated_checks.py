"""Check parts of fedmpi around training on the simulated GPU.

    simulated_cuda.py --gpus 2 simulated_checks.py FILE

Writes {check: its results} to FILE.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import simulated_cuda
import torch
import torch.distributed as dist
from helpers import federated, images, prepare, settings, small_settings
from torch import nn

from fedmpi.comm.base import SingleProcess
from fedmpi.common.errors import UserError
from fedmpi.data.batches import Shard, batches
from fedmpi.data.federated import split
from fedmpi.data.lazy_images import LazyImages, make_lazy_images
from fedmpi.data.streaming import Stream
from fedmpi.engine.federation import Federation
from fedmpi.engine.packed.packed_fit import PackedFit
from fedmpi.flat import linear
from fedmpi.flat.model import FlatModel
from fedmpi.privacy.noise import NoiseKey
from fedmpi.runtime import private_runs

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
MIXED = "Expected all tensors to be on the same device"
MISTAKES = {  # what a GPU refuses: what its error says
    "torch.zeros(3, device=GPU) + torch.ones(3)": MIXED,
    "torch.zeros(()).add_(torch.tensor(2.0, device=GPU))": MIXED,
    "torch.add(torch.zeros(3, device=GPU), 1, out=torch.zeros(3))": MIXED,
    "torch.zeros(3, device=GPU).add_(torch.zeros(3, device=OTHER))": MIXED,
    "torch.func.vmap(lambda x: x + torch.ones(3))(torch.zeros(2, 3, device=GPU))": MIXED,
    "nn.Linear(3, 2)(torch.zeros(1, 3, device=GPU))": MIXED,
    "torch.zeros(3)[torch.tensor([0], device=GPU)]": "indices should be either on cpu",
    "torch.rand(3, device=GPU, generator=torch.Generator())": "Expected a 'cuda' device type for generator",
    "torch.zeros(3, device=GPU).numpy()": "can't convert cuda:0 device type tensor to numpy",
    "dist.ProcessGroupGloo(dist.HashStore(), 0, 1).send([torch.zeros(3, device=GPU)], 0, 0)": "unsupported device cuda",
    "cpu_over_nccl()": "No backend type associated with device type cpu",
    "not_deterministic()": "does not have a deterministic implementation",
}
WIDE = {"name": "mlp", "hidden": [4096]}  # 284,676 weights, more than a block of columns


def count(function, *arguments):
    simulated_cuda.COUNTS.clear()
    function(*arguments)
    return dict(simulated_cuda.COUNTS)


def not_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        torch.rand(3, device=GPU).cumsum(0)
    finally:
        torch.use_deterministic_algorithms(False)


def cpu_over_nccl():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=GPU)
    try:
        dist.broadcast(torch.zeros(3, device=GPU), 0)
        dist.broadcast(torch.zeros(3), 0)
    finally:
        dist.destroy_process_group()


def undetected_mistakes():
    """Return the mistakes that are not rejected although they should be."""
    found = {}
    for code, message in MISTAKES.items():
        try:
            eval(code)
            found[code] = "no error"
        except Exception as error:
            found |= {} if message in str(error) else {code: f"{type(error).__name__}: {error}"}
    return found


def synchronisations():
    """Return how often the host waits in operations that need no wait, and in operations that need one."""

    def without_a_wait():
        x, place = torch.ones(3, device=GPU), torch.zeros(3, pin_memory=True)
        x.add_(1).mul_(x)
        torch.ones(3).to(GPU, non_blocking=True)
        x.new_full((), 2.0)
        place.copy_(x, non_blocking=True)
        assert place.isnan().all()  # it is there once the host has waited

    x = torch.ones(3, device=GPU)
    waits = [lambda: x.sum().item(), lambda: bool(x[0]), x.cpu, x.tolist, lambda: x[x > 0], torch.cuda.synchronize]
    waits += [lambda: torch.ones(3).to(GPU), lambda: x.new_tensor(2.0)]
    return [count(call).get("sync", 0) for call in (without_a_wait, *waits)]


def gather_classes():
    """Return the classes that gather the uploads of a model with two blocks if the config asks for sums."""
    found = {}
    for name, server in {"streamed": {}, "local": {"reduce": "local"}}.items():
        it = prepare(settings("fedavg", model=WIDE, rounds=1, server=server), device=GPU)
        gathering = it.fed.transport.begin_gather
        ways = []
        it.fed.transport.begin_gather = lambda *given, make=gathering, ways=ways: (
            ways.append(made := make(*given)) or made
        )
        it.fed.run()
        found[name] = [type(way).__name__ for way in ways]
    return found


def hashes_with_secure_aggregation():
    """Return the hashes of runs whose masked sums are in the memory of the CPU and of the GPU."""
    config = settings("fedavg", model=WIDE, rounds=2, privacy={"secagg": {"threshold": 3}})
    runs = [prepare(config, device=device) for device in (torch.device("cpu"), GPU)]
    for it in runs:
        it.fed.run()
    return [it.hashes for it in runs]


def hashes_with_differential_privacy():
    """Return, for clients and for samples, the hashes of runs with the same noise on the CPU and on the GPU."""
    found = []
    for unit, net, delta in (("client", "norm", 0.01), ("sample", "mlp", 1e-4)):
        dp = {"unit": unit, "clip": 1.0, "noise_multiplier": 0.5, "delta": delta}
        cohort = {"fraction": 1.0, "weighting": "uniform"}
        given = {"cohort": cohort, "evaluate": {"protocol": ["global"]}, "privacy": {"dp": dp}, "rounds": 2}
        config, key = settings("scaffold", net, **given), NoiseKey(bytes(32), "run")
        for device in (torch.device("cpu"), GPU):
            it = prepare(config, device=device)
            if unit == "client":
                messages = it.experiment.messages
                it.fed.server.privacy = private_runs.make_release(config, it.experiment.data, messages, key)
            else:
                it.experiment.private_steps.key = key
            it.fed.run()
            found.append(it.hashes)
    return found


def scratch_memory():
    """Return the largest number of float64 entries that sums over 2,000 rows use."""
    rows = torch.randn(2000, 20_000).to(GPU)
    linear.weighted_sum(rows, torch.full((2000,), 1 / 2000))
    linear.gram(rows)
    linear.inner_products(rows, rows[0])
    linear.trimmed_mean(rows, 0.1)
    return linear._buffers.wide.numel()


def hash_of_a_model():
    it = prepare(settings("fedavg", "norm"), device=GPU)
    return count(it.experiment.model.layout.sha256, it.experiment.model.w)


def downloads_of_fedfomo():
    """Return how often the server waits for its GPU to choose a client's download, with 7 and with 40 clients."""
    found = []
    for clients in (7, 40):
        data = split(images(10 * clients), "iid", clients, 0)
        server = prepare(small_settings("fedfomo", rounds=1), data, device=GPU).fed.server
        assert server.state.P.shape == (clients, clients)
        found.append(count(server.download, 0, 0).get("sync", 0))
    return found


def graph_results():
    """Compare a FedAvg run without and with graphs: launches, number of captures, and whether the weights agree."""
    found = []
    for graphs in (False, True):
        it = prepare(settings("fedavg", "norm", train={"epochs": 4}, compute={"graphs": graphs}), device=GPU)
        found.append((it, count(it.fed.run)["launch"]))
    (one, launches), (other, fewer) = found
    captured = len(other.fed.trainer.graphs._captured)
    return {"launches": [launches, fewer], "captured": captured, "same": torch.equal(one.w, other.w)}


def batch_norm_without_cudnn():
    """Return which batch normalisations, with weights at a multiple of 16 bytes or elsewhere, do not use cuDNN."""
    layers = nn.BatchNorm1d(4), nn.Linear(1, 1, bias=False), nn.BatchNorm1d(4)
    model = FlatModel(nn.Sequential(*layers).to(GPU))
    return ["forward" in layer.__dict__ for layer in model.module]


def message_about_a_model_that_cannot_be_captured():
    """Return the message about a model whose forward pass synchronises with the device."""
    it = prepare(
        settings("fedavg", "norm", model={"name": "helpers:cumulative_net"}, compute={"graphs": True}), device=GPU
    )
    try:
        it.fed.run()
    except UserError as error:
        return str(error)


def waits_of_a_pack():
    """Return how often the host waits for clients that are trained together, and their models on this GPU and on a CPU.

    The clients' last batches have different sizes.
    """
    waits, models, fit = [], [], PackedFit.__call__

    def counted(self):
        waits.append(count(fit, self).get("sync", 0))

    config = settings("scaffold", rounds=1, cohort={"fraction": 1.0}, compute={"clients_per_pass": 7})
    PackedFit.__call__ = counted
    for device in (GPU, torch.device("cpu")):
        it = prepare(config, federated(seed=1), device=device)
        it.fed.run()
        models += it.hashes
    PackedFit.__call__ = fit
    return {"waits": waits, "models": models}


def same_batches(found, expected):
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(x.cpu(), u) and torch.equal(y.cpu(), v) for (x, y), (u, v) in pairs)


def launches_of_an_epoch():
    """Return the number of launches for reading 5,000 samples of 3,136 bytes in batches of 10."""
    x, y = torch.randn(5000, 1, 28, 28), torch.arange(5000)
    shard, found = Shard(x.to(GPU), y.to(GPU), y.flip(0)), []
    counts = count(lambda: found.extend(batches(shard, 10, torch.Generator().manual_seed(0))))
    expected = batches(Shard(x, y, shard.index), 10, torch.Generator().manual_seed(0))
    return {"launch": counts["launch"], "same": same_batches(found, expected)}


def uploads_of_an_epoch():
    """Return the copies to the GPU for reading 200 images from disk; ten of them take 320 KiB as floats."""
    rows = np.random.default_rng(0).integers(0, 256, (200, 3, 52, 52), np.uint8)
    source = SimpleNamespace(shape=rows.shape, dtype=rows.dtype, read=lambda index: rows[index])
    on_cpu, y = make_lazy_images(Stream(source), None, None, 3), torch.arange(200)
    pictures, pinned, shown, found = on_cpu.to(GPU, False), [], LazyImages.to_inputs, []

    def noted(self, raw, u):
        pinned.append(raw.is_pinned())
        return shown(self, raw, u)

    LazyImages.to_inputs = noted
    shard = Shard(pictures, y.to(GPU), y)
    counts = count(lambda: found.extend(batches(shard, 10, torch.Generator().manual_seed(0))))
    LazyImages.to_inputs = shown
    expected = batches(Shard(on_cpu, y, y), 10, torch.Generator().manual_seed(0))
    same = same_batches(found, expected)
    return {"counts": counts, "pinned": all(pinned), "parts": len(pinned), "same": same}


def pinned_memory():
    """Return the sizes of the cohort's rows and of their buffer, and whether the buffer and the broadcast are pinned.

    Messages are on the CPU, and on the GPU.
    """
    found = []
    for messages in ("cpu", "cuda"):
        it = prepare(small_settings("scaffold", rounds=1), comm=SingleProcess(torch.device(messages)), device=GPU)
        it.fed.run()
        rows, row = (
            it.fed.transport.buffers.tensors["rows"],
            it.experiment.itemsize * it.experiment.messages.max_upload_size(),
        )
        pinned = rows.is_pinned(), it.fed.transport.broadcast_row.is_pinned()
        found.append((row * len(it.rows[-1]["cohort"]), rows.nbytes, *pinned))
    return found


def waits_for_uploads_of_a_pack():
    """Return how often the host waits while a round's clients are trained together and their uploads are written.

    Also returns the result; with messages on the CPU and on the GPU.
    """
    found, train = {}, Federation.train_clients
    config = small_settings("fedavg", rounds=1, compute={"clients_per_pass": 7}, train={"momentum": 0.0})
    for messages in ("cpu", "cuda"):
        it = prepare(config, comm=SingleProcess(torch.device(messages)), device=GPU)
        counts = []
        Federation.train_clients = lambda *given, counts=counts: counts.append(count(train, *given).get("sync", 0))
        try:
            it.fed.run()
        finally:
            Federation.train_clients = train
        found[messages] = counts, it.hashes
    return found


def main():
    checks = (
        *(
            undetected_mistakes,
            synchronisations,
            gather_classes,
            scratch_memory,
            hash_of_a_model,
            downloads_of_fedfomo,
            graph_results,
        ),
        *(batch_norm_without_cudnn, message_about_a_model_that_cannot_be_captured, waits_of_a_pack),
        *(
            hashes_with_secure_aggregation,
            hashes_with_differential_privacy,
            launches_of_an_epoch,
            uploads_of_an_epoch,
            pinned_memory,
            waits_for_uploads_of_a_pack,
        ),
    )
    Path(sys.argv[1]).write_text(json.dumps({check.__name__: check() for check in checks}))


if __name__ == "__main__":
    main()
