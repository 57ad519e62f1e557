"""Run every method on a tiny federation, in one job of any size.

Once per rank: every_method.py FILE BACKEND [DEVICE]

Rank 0 writes {case: results} to FILE: results that must not depend on the ranks, and the bytes that each rank counted.
DEVICE cuda gives each rank the GPU of its local rank, or the CPU if the rank sees no GPU.
Ranks that share a GPU communicate through gloo and have their server on the CPU, so that the server's bits are those of
CPU kernels. A single process has its server on the CPU with BACKEND gloo, and on the clients' device with auto.
The variable FEDMPI_CASES selects cases, one per line (default: all); FEDMPI_COMPUTE is the section `compute` of their
configs, as JSON.
"""

import json
import os
import sys
from pathlib import Path

import torch
from helpers import ROOT, digest, prepare, record, small_settings

from fedmpi.comm import Timeouts, connect, detect
from fedmpi.comm.base import SingleProcess
from fedmpi.engine.scheduler import RankSpeeds
from fedmpi.flat import linear
from fedmpi.methods import registry
from fedmpi.runtime.device import configure_numerics


def wire(form):
    return {"comm": {"compression": form}}


ADAMW = {"optim": "adamw", "momentum": None, "lr": 0.003, "steps": 3, "clip_norm": 1.0, "persist_optimizer": True}
DILOCO = {"train": ADAMW, "server": {"optim": "momentum", "nesterov": True, "lr": 0.7}}
PERSONAL = "fedatom_personal"
TABLE_4 = ROOT / "configs/papers/fedsol_table4.py"
BEST = {"data": {"validation": 0.2}, "evaluate": {"best": {"metric": "accuracy", "patience": 1}}, "rounds": 5}

# In addition to each method with its defaults: options, rules and placements that use other parts of the engine.
VARIANTS = {
    "fedavg, five by five kernels": ("fedavg", "cnn", {}),
    "fedld, the authors' code": ("fedld", "norm", {"options": {"variant": "code"}}),
    "fedsol, all layers": ("fedsol", "norm", {"options": {"layers": "all"}}),
    "fedsol along scaffold": ("fedsol", "norm", {"options": {"layers": "all", "prox": f"{TABLE_4}:ScaffoldTerm"}}),
    "fedsol along moon": (f"{TABLE_4}:AlongMOON", "norm", {}),
    "fednova, corrected": ("fednova", "mlp", {"options": {"ccvr": True}}),
    "feddyn, mean reported": ("feddyn", "mlp", {"options": {"report": "avg"}}),
    "fedproto with weights": ("fedproto", "norm", {"options": {"share_weights": True}}),
    "fedavg, adam": ("fedavg", "mlp", {"server": {"optim": "adam", "lr": 0.01}}),
    "fedavg, adamw kept, then nesterov": ("fedavg", "norm", DILOCO),
    "fedavg, sgd kept": ("fedavg", "mlp", {"train": {"persist_optimizer": True}}),
    "fedrep, adamw kept": ("fedrep", "mlp", {"train": {**ADAMW, "steps": None, "epochs": 1}}),
    "fedavg, the best model": ("fedavg", "norm", BEST),
    "fedper, the best model": ("fedper", "norm", BEST),
    "scaffold, pinned": ("scaffold", "mlp", {"cohort": {"placement": "pinned"}}),
    "scaffold, more ranks than clients in a round": ("scaffold", "mlp", {"cohort": {"fraction": 0.2}}),
    "fedavg, statistics over all batches": ("fedavg", "norm", {"model": {"name": "helpers:cumulative_net"}}),
    "ditto, rank 0 trains": ("ditto", "norm", {"server": {"trains_clients": True}}),
    "fedpac, rank 0 trains": ("fedpac", "mlp", {"server": {"trains_clients": True}, "train": {"batch_size": "full"}}),
    "fedgh, hierarchical": ("fedgh", "norm", {"options": {"variant": "hierarchical"}}),
    "perfedavg, exact": ("perfedavg", "norm", {"options": {"variant": "exact"}, "train": {"batch_size": 4}}),
    "fedbabu, fine-tuned": ("fedbabu", "norm", {"evaluate": {"protocol": ["personal", "ft(1)"]}}),
    "fedavg, geometric median": ("fedavg", "cnn", {"server": {"rule": "geometric_median"}}),
    "fedavg, median": ("fedavg", "cnn", {"server": {"rule": "median"}}),
    "fedatom, fast and slow": (PERSONAL, "norm", {"rounds": 4, "options": {"period": 3, "personal_head": "local"}}),
    "fedatom, alpha kept": (PERSONAL, "norm", {"rounds": 4, "options": {"period": 3, "alpha_fast": "keep"}}),
    "fedatom, fedsol's clients, principal": (
        "fedatom",
        "cnn",
        {"options": {"period": 2, "client": "fedsol"}, "server": {"rule": "principal"}},
    ),
    "fedavg, int8": ("fedavg", "norm", wire("int8")),
    "scaffold, bf16": ("scaffold", "norm", wire("bf16")),
    "scaffold, int8": ("scaffold", "norm", wire("int8")),
    "fedpac, fp16": ("fedpac", "mlp", wire("fp16")),
    "fedatom, int8": ("fedatom", "norm", {"rounds": 4, "options": {"period": 2}, **wire("int8")}),
    **{
        f"{method}, sharded": (method, "norm", {"server": {"placement": "sharded"}, "cohort": {"fraction": 1.0}})
        for method in ("fedavg", "scaffold", "fedld", "fedfomo")
    },
    "fedavg, median of shards": ("fedavg", "cnn", {"server": {"rule": "median", "placement": "sharded"}}),
    "fedld, shards of which some do not count": (
        "fedld",
        "mlp",
        {"server": {"placement": "sharded"}, "faults": {"on_bad_update": "drop", "max_norm": 0.4}},
    ),
    "fedrep, evaluated at the end": ("fedrep", "mlp", {"evaluate": {"every": 3}}),
}


def cases():
    plain = {method: (method, "norm", {"rounds": 2}) for method in sorted(registry)}
    asked = os.environ.get("FEDMPI_CASES", "").splitlines()
    chosen = {name: case for name, case in (plain | VARIANTS).items() if not asked or name in asked}
    compute = json.loads(os.environ.get("FEDMPI_COMPUTE", "{}"))
    return {
        name: small_settings(method, net, **changes, compute=compute) for name, (method, net, changes) in chosen.items()
    }


def pick_device(kind, job):
    if kind == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", job.local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def sizes(messages, t):
    """Return the numbers of entries of a broadcast, of a per-client download and of an upload in round t.

    Layout groups that did not change in the previous round are not broadcast again.
    """
    told = messages.broadcast_layout(messages.groups_in_round(t - 1) if t else None)
    return told.packing.size, messages.per_client_download.size, messages.upload_layout(t).size


def main() -> None:
    # Make the tiny models' slots count as large, so that they are summed while they arrive, or sharded.
    linear.CHUNK, linear.BLOCK, linear.CHUNK_GPU = 64, 128, 64
    job, backend = detect(os.environ), sys.argv[2]
    device = pick_device(*sys.argv[3:] or ["cpu"], job)
    if device.type == "cuda":
        configure_numerics(small_settings("fedavg", compute={"deterministic": True}))  # before the first kernel
    # Measured speeds would decide which rank trains which client, and so the number of bytes sent.
    RankSpeeds.relative_costs = lambda self, t: {}
    comm = connect(job, backend, device, Timeouts(start=300, round=600))
    if job.size == 1 and backend == "gloo":
        comm = SingleProcess(torch.device("cpu"))
    found = {}
    for name, config in cases().items():
        counted = comm.sent_bytes, comm.received_bytes
        it = prepare(config, comm=comm, device=device)
        it.fed.run()
        mine = {
            "kept": {k: digest(row) for k, row in it.fed.states.rows.items() if len(row)},
            "bytes": (comm.sent_bytes - counted[0], comm.received_bytes - counted[1]),
        }
        ranks = [json.loads(said) for said in comm.allgather_bytes(json.dumps(mine).encode(), 600)]
        messages = it.experiment.messages
        found[name] = record(it) | {
            "kept": sorted(pair for rank in ranks for pair in rank["kept"].items()),  # a client held twice would show
            "bytes": [rank["bytes"] for rank in ranks],
            "rounds": [(row["sent_bytes"], row["received_bytes"], len(row["cohort"])) for row in it.rows],
            "sizes": [sizes(messages, row["round"]) for row in it.rows],
        }
    if comm.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    comm.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
