"""What several tests start from: a tiny federation in which states migrate, one way to run it, and the launchers."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedmpi.comm.base import Solo
from fedmpi.common.registry import load
from fedmpi.common.signals import SIGNALS
from fedmpi.config.schema import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import Federated, hold_out, split
from fedmpi.engine.federation import Federation
from fedmpi.engine.federation_config import RunCallbacks
from fedmpi.flat.packing import Views
from fedmpi.method.base import PLAIN_SGD, VALIDATION
from fedmpi.methods import registry
from fedmpi.runtime import build

ROOT = Path(__file__).parents[1]
SMALL_SWEEP = """\
name: few
rounds: 2
data: {source: digits, partition: {scheme: iid, clients: 3}}
model: {name: logistic}
method: {name: fedavg}
over:
  method: {FedAvg: {}, FedProx: {method: {name: fedprox, mu: 0.1}}}
  seed: [0, 1]
"""
BIN = Path(sys.executable).parent  # where fedmpi, mpirun and torchrun of this environment are
CPU = torch.device("cpu")
NETS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": [16]},
    "norm": {"name": "helpers:norm_net"},  # batch statistics travel, and dropout draws
    "cnn": {"name": "mcmahan_cnn"},  # convolution weights lie channels-last in the flat vector
}
# What a method needs beyond its registry line; everything else about it is read off its declarations.
SPECIAL: dict[str, dict[str, Any]] = {
    "fedrep": {"head_epochs": 2},  # ten, the paper's, only take longer
    "ditto": {"lam": 0.3},
}


# A layer in factors is smaller than a dense one only where that is wide enough.
WIDE: dict[str, dict[str, Any]] = {"mlp": {"name": "mlp", "hidden": [32]}, "norm": {"name": "helpers:wide_net"}}
# There are atoms where there are convolutions.
CONVOLUTIONS: dict[str, dict[str, Any]] = {"mlp": {"name": "helpers:conv_net"}}
NETS_OF = {"fedpara": NETS | WIDE, "pfedpara": NETS | WIDE, "fedatom": NETS | CONVOLUTIONS}
NETS_OF["fedatom_personal"] = NETS_OF["fedatom"]


def norm_net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """(C, 8, 8) -> convolution, batch normalisation, pool, dropout -> linear `classes`."""
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(6 * (height // 2) * (width // 2), classes),
    )


def conv_net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """(1, 8, 8) -> two convolutions, the second one 1x1, pool -> linear 12 -> linear `classes`; nothing but weights."""
    layers = [nn.Conv2d(input_shape[0], 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(5 * 9, 12), nn.ReLU(), nn.Linear(12, classes))


def wide_net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """norm_net with a second convolution of 6 on 6 maps, 324 weights; in factors of rank 3 they are 234."""
    net = norm_net(input_shape, classes)
    return nn.Sequential(*net[:4], nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), *net[4:])


def cumulative_net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """norm_net whose batch statistics are means over all batches so far: the count is an integer that stays home."""
    net = norm_net(input_shape, classes)
    net[1].momentum = None
    return net


def images(n: int = 170, tests: int = 60, classes: int = 4, seed: int = 0) -> Dataset:
    """Noisy pictures (1, 8, 8) of `classes` random patterns; learnable, but not in one round."""
    g = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, 1, 8, 8, generator=g)
    y = torch.randint(classes, (n + tests,), generator=g)
    y[:classes] = y[n : n + classes] = torch.arange(classes)  # no class is missing
    x = 0.6 * patterns[y] + torch.randn(n + tests, 1, 8, 8, generator=g)
    return Dataset(x[:n], y[:n], x[n:], y[n:], classes)


def federated(clients: int = 7, seed: int = 0, client_test: Any = "aligned") -> Federated:
    """Seven clients with skewed labels and 10 to 50 samples each, so that batches differ in size, and the last of 10
    is not full."""
    return split(images(), "dirichlet", clients, seed, client_test, alpha=0.5, min_size=7)


def settings(method: str = "fedavg", net: str = "mlp", **changes: Any) -> Settings:
    """A tiny experiment; `changes` are sections to merge: train={"lr": 0.1}, rounds=2, method options as options={}."""
    options = changes.pop("options", SPECIAL.get(method, {}))
    needs = load(method, registry, "method").needs
    tree: dict[str, Any] = {
        "rounds": 3,
        "data": {
            "source": "digits",
            "partition": {"scheme": "dirichlet", "clients": 7},
            "validation": 0.2 if VALIDATION in needs else 0.0,
        },
        "model": NETS[net],
        "method": {"name": method, **options},
        "train": {"batch_size": 10, "lr": 0.05, "momentum": 0.0 if PLAIN_SGD in needs else 0.9},
        "cohort": {"fraction": 0.6},
        "evaluate": {"protocol": ["global", "personal"]},
    }
    for key, value in changes.items():
        merged = isinstance(value, dict) and key != "model"  # another model has other options
        tree[key] = {**tree.get(key, {}), **value} if merged else value
    return Settings.model_validate(tree)


def small_settings(method: str, net: str = "mlp", **changes: Any) -> Settings:
    """`settings` for what every method is tried on: with the net that this one needs."""
    return settings(method, net, **{"model": NETS_OF.get(method, NETS)[net], **changes})


@dataclass
class FinishedRun:
    """One experiment that was run: `rows` as in metrics.jsonl, and the rows of the other files by their names."""

    fed: Federation
    made: build.Experiment
    rows: list[dict[str, Any]]
    files: dict[str, list[dict[str, Any]]]
    reason: str
    w0: torch.Tensor  # where the run began, and b0
    b0: torch.Tensor

    @property
    def lines(self) -> list[dict[str, Any]]:
        return self.files["clients.jsonl"]

    @property
    def updates(self) -> list[dict[str, Any]]:
        return self.files["updates.jsonl"]

    @property
    def w(self) -> torch.Tensor:
        return self.fed.server.w

    @property
    def b(self) -> torch.Tensor:
        return self.fed.server.b

    @property
    def uploads(self) -> Views:
        """What the clients of the last round sent, one row each."""
        t, members = self.rows[-1]["round"], self.rows[-1]["cohort"]
        packing = self.made.messages.upload(t).packing
        return packing.views(self.fed.transport.buffers.rows("rows", len(members), packing.size))

    def kept(self, k: int) -> Views:
        """What client k keeps; `_w` and `_b` are its own parts of the model."""
        return self.made.messages.client_state.views(self.fed.states.rows[k])

    @property
    def hashes(self) -> list[str]:
        return [row["sha256"] for row in self.rows if row["round"] >= 0]


def prepare(
    config: Settings,
    data: Federated | None = None,
    comm: Any = None,
    stop: Any = lambda: False,
    device: torch.device = CPU,
) -> FinishedRun:
    """The experiment, ready to run."""
    torch.set_num_threads(1)
    data = data or federated()
    data = data if data.validation else hold_out(data, config.data.validation, config.seed)
    made = build.experiment(config, data, device)
    w0, b0 = made.model.w.detach().clone(), made.model.b.clone()
    rows: list[dict[str, Any]] = []
    files: dict[str, list[dict[str, Any]]] = defaultdict(list)
    callbacks = RunCallbacks()
    callbacks.round, callbacks.append = rows.append, lambda file, *more: files[file].extend(more)
    fed = build.federation(made, comm or Solo(device), stop, callbacks)
    return FinishedRun(fed, made, rows, files, "", w0, b0)


def play(config: Settings, data: Federated | None = None, comm: Any = None) -> FinishedRun:
    """The experiment, run."""
    it = prepare(config, data, comm)
    it.reason = it.fed.run()
    return it


def digest(x: torch.Tensor) -> str:
    """Of the bits, so that -0 is not 0 and a nan equals itself."""
    return hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def record(it: FinishedRun) -> dict[str, Any]:
    """All that must not depend on ranks: every round's bits and figures, and at the root the final state."""
    times = ("wall_s", "train_s", "wait_s", "server_s", "evaluate_s", "sent_bytes", "received_bytes")
    best = it.fed.server.best if it.fed.server else None
    return {
        "rows": [{name: value for name, value in row.items() if name not in times} for row in it.rows],
        "lines": it.lines,
        "updates": it.updates,
        "w": it.made.model.layout.sha256(it.fed.server.w) if it.fed.server else None,
        "b": digest(it.fed.server.b) if it.fed.server else None,
        "server": digest(it.fed.server.state_row) if it.fed.server else None,
        "best": [digest(x) for x in best.state_tensors.values()] if best else [],
    }


# ---- processes ----
def by_rank(script: Path, *commands: str) -> Path:
    """A program that does another command on each rank of an mpirun (the last one also on all ranks beyond)."""
    cases = [f'[ "$OMPI_COMM_WORLD_RANK" = {rank} ] && exec {command}' for rank, command in enumerate(commands)]
    script.write_text("\n".join(["#!/bin/sh", *cases, f"exec {commands[-1]}", ""]))
    script.chmod(0o755)
    return script


def clean_env(**more: str) -> dict[str, str]:
    """The caller's environment without launcher variables: the suite itself may run under srun or mpirun."""
    launchers = ("SLURM_", "OMPI_", "PMI", "PRTE", "MPI_LOCAL", "TORCHELASTIC")
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if not k.startswith(launchers) and k not in ranks}
    return env | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{env['PATH']}"} | mpirun_files() | more


def mpirun_files() -> dict[str, str]:
    """A place for one mpirun's own files: in a common one a killed mpirun's end the next of its process number."""
    return {"PRTE_MCA_prte_tmpdir_base": tempfile.mkdtemp(dir=mpirun_places())}


@functools.cache
def mpirun_places() -> str:
    places = tempfile.mkdtemp(prefix="mpirun-")
    atexit.register(shutil.rmtree, places, ignore_errors=True)
    return places


def launcher(kind: str, size: int) -> list[str]:
    """The words before `program arguments` that start `size` ranks; `alone` starts one."""
    if kind == "alone":
        return []
    command = shutil.which(kind, path=clean_env()["PATH"])
    if kind == "torchrun":
        options = ["--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "0", "--nproc-per-node", str(size)]
        start = [command] if command else [sys.executable, "-m", "torch.distributed.run"]
        return [*start, *options, "--no-python"]
    if command is None:
        import pytest

        pytest.skip(f"no {kind} on PATH")
    options = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in _version(command) else []
    options += ["--allow-run-as-root"] if options and os.geteuid() == 0 else []
    return [command, *options, "-n", str(size)]


@functools.cache
def fork_server() -> Any:
    """The one that `fedmpi` below asks; it ends with the tests."""
    from fork_server import Server  # here: configs name this file as a plug-in, which finds no file beside it

    server = Server(clean_env())
    atexit.register(server.close)
    return server


def warm(env: dict[str, str] | None = None) -> dict[str, str]:
    """An environment in which `fedmpi`, and WORDS of fork_server.py, have imported torch."""
    return fork_server().known(clean_env() if env is None else env)


@functools.cache
def _version(command: str) -> str:
    return subprocess.run([command, "--version"], capture_output=True, text=True).stdout


def fedmpi(
    *arguments: object, kind: str = "alone", size: int = 1, limit_s: float = 120, cold: bool = False, **options: Any
) -> Any:
    """Run `fedmpi arguments` to its end; the result has returncode, stdout and stderr.

    Args:
        kind: a launcher; with "alone" the command runs within this process, unless `cold` asks for one of its own.
        size: ranks to start.
        limit_s: seconds after which a command in processes of its own is a failure.
        cold: start Python anew in every rank; else what a run needs is imported already (fork_server.py).
        options: env and cwd of the command; those of `subprocess.run` where it has processes of its own.
    """
    if kind == "alone" and not cold:
        return invoke(*arguments, **options)
    command = [*launcher(kind, size), "fedmpi", *map(str, arguments)]
    env = options.pop("env", clean_env())
    env = env if cold else warm(env)
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=env, **{"cwd": ROOT, **options})


def invoke(*arguments: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run the console entry `fedmpi arguments` within this process, which is left as it was."""
    from fedmpi import cli

    words, out, err = ["fedmpi", *map(str, arguments)], io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    state = os.environ.copy(), sys.path[:], os.getcwd(), sys.argv, warnings.showwarning, torch.get_num_threads()
    env = clean_env() if env is None else env
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = words
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.resetwarnings()
            cli.main()
    except SystemExit as ended:
        code = ended.code
    finally:
        environment, sys.path[:], folder, sys.argv, warnings.showwarning, threads = state
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        gc.unfreeze()
        gc.enable()
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def left_over(word: str) -> list[str]:
    """Processes that were started with this word among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_text():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def gone(word: str) -> bool:
    """Whether none of them is left within two minutes, which only a machine that stands still needs."""
    for _ in range(1200):
        if not left_over(word):
            return True
        time.sleep(0.1)
    return False
