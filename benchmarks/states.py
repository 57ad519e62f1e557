"""W6: measure 10,000 clients with client state (SCAFFOLD) with a memory limit, without a limit, and in a loop by hand.

    python benchmarks/states.py [--clients 10000] [--cohort 500] [--rounds 12] [--cap 0.05]

Softmax regression on 28x28 pixels (7,850 parameters, 31 kB of state per client), 2 samples per client, one step. Each
side is a process of its own: a complete `fedmpi.run` with client_state.max_gib: --cap (GiB), which writes a checkpoint
per round; the same without a limit; and a loop by hand with the clients' rows in one memory-mapped file, which writes
no checkpoint and cannot be resumed after a crash. Seconds are medians of a round. Memory is the increase of the
process's peak (VmHWM) since before it had model and data (63 MB); pages of the mapped file count while they are in
memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import median

import numpy as np
import torch
from measure import print_result, read_memory_bytes, reset_peak_memory
from torch.nn.functional import cross_entropy

from fedmpi.data.dataset import Dataset

SAMPLES, PIXELS, CLASSES, LR = 2, 784, 10, 0.05


def samples(root: Path, *, clients: int) -> Dataset:
    """Return a data set of random pixels; a data source of the config."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(clients * SAMPLES + 100, 1, 28, 28, generator=g)
    y = torch.randint(CLASSES, (len(x),), generator=g)
    n = clients * SAMPLES
    return Dataset(x[:n], y[:n], x[n:], y[n:], classes=CLASSES)


def run_fedmpi(args, folder, cap):
    """Run fedmpi with a memory limit of `cap` GiB, and return the seconds of each round."""
    import fedmpi
    from fedmpi.config import Settings

    tree = {
        "name": "run",
        "output": str(folder),
        "rounds": args.rounds,
        "data": {
            "source": f"{Path(__file__).resolve()}:samples",
            "clients": args.clients,
            "client_test": "global",
            "partition": {"scheme": "iid", "clients": args.clients},
        },
        "model": {"name": "logistic"},
        "method": {"name": "scaffold"},
        "train": {"batch_size": "full", "lr": LR, "momentum": 0.0},
        "cohort": {"fraction": args.cohort / args.clients},
        "evaluate": {"every": 10**6},
        "client_state": {"max_gib": cap},
    }
    fedmpi.run(Settings.model_validate(tree))
    rows = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["wall_s"] for row in rows]


def run_scaffold_by_hand(args, folder):
    """Run SCAFFOLD with option II, c_i+ = c_i - c + (w - w_i) / (K lr), by hand; return the seconds of each round."""
    data = samples(folder, clients=args.clients)
    x, y = data.train_x.flatten(1), data.train_y
    d = (PIXELS + 1) * CLASSES
    stored = np.lib.format.open_memmap(folder / "states.npy", "w+", np.float32, (args.clients, d))
    w, c, seconds_taken = torch.zeros(d), torch.zeros(d), []
    rng = np.random.default_rng(0)
    for _ in range(args.rounds):
        began = time.perf_counter()
        dw, dc = torch.zeros(d), torch.zeros(d)
        for k in sorted(rng.choice(args.clients, args.cohort, replace=False)):
            c_k, live = torch.from_numpy(stored[k]), w.clone().requires_grad_()
            rows = slice(k * SAMPLES, (k + 1) * SAMPLES)
            weight, bias = live[:-CLASSES].view(CLASSES, PIXELS), live[-CLASSES:]
            loss = cross_entropy(torch.addmm(bias, x[rows], weight.T), y[rows])
            (g,) = torch.autograd.grad(loss, live)
            step = g - c_k + c
            new = c_k - c + step
            dw.sub_(step, alpha=LR / args.cohort)
            dc.add_(new - c_k, alpha=1 / args.clients)
            c_k.copy_(new)
        w.add_(dw)
        c.add_(dc)
        seconds_taken.append(time.perf_counter() - began)
    stored.flush()
    return seconds_taken


def run_side_in_process(args):
    """Run one side in this process, and print {seconds, bytes}."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        if args.inner != "hand":
            import_module("fedmpi.runtime.execute")  # imported before the measurement, since code does not count
        torch.ones(1, requires_grad=True).sum().backward()  # start autograd's threads, whose memory does not count
        before = read_memory_bytes("VmRSS")
        reset_peak_memory()
        sys.stdout, out = sys.stderr, sys.stdout
        seconds_taken = (
            run_scaffold_by_hand(args, folder)
            if args.inner == "hand"
            else run_fedmpi(args, folder, json.loads(args.inner))
        )
        peak = read_memory_bytes("VmHWM") - before
        print(json.dumps({"seconds": seconds_taken, "bytes": peak}), file=out)


def run_side(args, which):
    """Run one side in a process of its own, and return its results."""
    words = [sys.executable, "-W", "ignore", __file__, "--inner", which]
    for key in ("clients", "cohort", "rounds"):
        words += [f"--{key}", str(getattr(args, key))]
    words += ["--folder", str(args.folder)] if args.folder else []
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--cohort", type=int, default=500, help="clients a round")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cap", type=float, default=0.05, help="GiB of client state in memory")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        run_side_in_process(args)
        return
    results = {
        name: run_side(args, which) for name, which in (("capped", str(args.cap)), ("free", "null"), ("hand", "hand"))
    }
    what = f"{args.clients:,} stateful clients, {args.cohort} a round"
    seconds = {name: median(each["seconds"][1:] or each["seconds"]) for name, each in results.items()}
    cap = f"capped at {args.cap:g} GiB"
    print_result(what, (cap, seconds["capped"]), ("by hand", seconds["hand"]))
    print_result(what, (cap, seconds["capped"]), ("without a cap", seconds["free"]))
    mib = {name: each["bytes"] / 2**20 for name, each in results.items()}
    print_result(f"{what}, memory", (cap, mib["capped"]), ("without a cap", mib["free"]), unit="MiB", digits=0)
    print_result(f"{what}, memory", (cap, mib["capped"]), ("by hand", mib["hand"]), unit="MiB", digits=0)


if __name__ == "__main__":
    main()
