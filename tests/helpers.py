"""Helpers of several tests: a tiny federation whose client states migrate, functions to run it, and the launchers."""

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

from fedmpi.comm.base import SingleProcess
from fedmpi.common.registry import load_object
from fedmpi.common.signals import SIGNALS
from fedmpi.config.schema import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import FederatedData, hold_out_validation, split
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
grid:
  method: {FedAvg: {}, FedProx: {method: {name: fedprox, mu: 0.1}}}
  seed: [0, 1]
"""
BIN = Path(sys.executable).parent  # the folder of this environment's fedmpi, mpirun and torchrun
CPU = torch.device("cpu")
NETS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": [16]},
    "norm": {"name": "helpers:norm_net"},  # batch statistics travel, and dropout draws
    "cnn": {"name": "mcmahan_cnn"},  # convolution weights lie channels-last in the flat vector
}
# Options that the tests give to a method; its other requirements are read from its declarations.
SPECIAL: dict[str, dict[str, Any]] = {
    "fedrep": {"head_epochs": 2},  # ten, the paper's, only take longer
    "ditto": {"lam": 0.3},
}


# Models with a layer so wide that its low-rank factors have fewer parameters.
WIDE: dict[str, dict[str, Any]] = {"mlp": {"name": "mlp", "hidden": [32]}, "norm": {"name": "helpers:wide_net"}}
# A model with convolutions, since only these have atoms.
CONVOLUTIONS: dict[str, dict[str, Any]] = {"mlp": {"name": "helpers:conv_net"}}
NETS_OF = {"fedpara": NETS | WIDE, "pfedpara": NETS | WIDE, "fedatom": NETS | CONVOLUTIONS}
NETS_OF["fedatom_personal"] = NETS_OF["fedatom"]


def norm_net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a network for images (C, 8, 8): convolution, batch normalisation, pooling, dropout and a linear layer."""
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
    """Return a network without buffers for images (1, 8, 8): a convolution, a 1x1 convolution, two linear layers."""
    layers = [nn.Conv2d(input_shape[0], 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(5 * 9, 12), nn.ReLU(), nn.Linear(12, classes))


def wide_net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return norm_net with a second convolution from 6 to 6 maps: 324 weights, or 234 as factors of rank 3."""
    net = norm_net(input_shape, classes)
    return nn.Sequential(*net[:4], nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), *net[4:])


def cumulative_net(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return norm_net with batch statistics that are means over all batches; their integer count is never uploaded."""
    net = norm_net(input_shape, classes)
    net[1].momentum = None
    return net


def images(n: int = 170, tests: int = 60, classes: int = 4, seed: int = 0) -> Dataset:
    """Return noisy images (1, 8, 8) of `classes` random patterns, which a model learns in more than one round."""
    g = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, 1, 8, 8, generator=g)
    y = torch.randint(classes, (n + tests,), generator=g)
    y[:classes] = y[n : n + classes] = torch.arange(classes)  # ensure that every class occurs
    x = 0.6 * patterns[y] + torch.randn(n + tests, 1, 8, 8, generator=g)
    return Dataset(x[:n], y[:n], x[n:], y[n:], classes)


def federated(clients: int = 7, seed: int = 0, client_test: Any = "aligned") -> FederatedData:
    """Divide `images` among seven clients with skewed labels and 10 to 50 samples each.

    With batches of 10 the last batch of most clients is smaller.
    """
    return split(images(), "dirichlet", clients, seed, client_test, alpha=0.5, min_size=7)


def settings(method: str = "fedavg", net: str = "mlp", **changes: Any) -> Settings:
    """Return the settings of a tiny experiment.

    Args:
        method: the method.
        net: a key of NETS.
        changes: keys and sections to merge, such as train={"lr": 0.1} or rounds=2; `options` are those of the method.
    """
    options = changes.pop("options", SPECIAL.get(method, {}))
    needs = load_object(method, registry, "method").needs
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
        merged = isinstance(value, dict) and key != "model"  # a model is replaced, since others have other options
        tree[key] = {**tree.get(key, {}), **value} if merged else value
    return Settings.model_validate(tree)


def small_settings(method: str, net: str = "mlp", **changes: Any) -> Settings:
    """Return `settings` for a test of all methods, with a network that has the layers that this method needs."""
    return settings(method, net, **{"model": NETS_OF.get(method, NETS)[net], **changes})


@dataclass
class FinishedRun:
    """An experiment and its results: `rows` as in metrics.jsonl, `files` with the rows of the other files by name."""

    fed: Federation
    experiment: build.Experiment
    rows: list[dict[str, Any]]
    files: dict[str, list[dict[str, Any]]]
    reason: str
    w0: torch.Tensor  # initial weights; b0: initial float buffers
    b0: torch.Tensor

    @property
    def lines(self) -> list[dict[str, Any]]:
        return self.files["clients.jsonl"]

    @property
    def updates(self) -> list[dict[str, Any]]:
        return self.files["update_stats.jsonl"]

    @property
    def w(self) -> torch.Tensor:
        return self.fed.server.w

    @property
    def b(self) -> torch.Tensor:
        return self.fed.server.b

    @property
    def uploads(self) -> Views:
        """Return the uploads of the last round's cohort, one row per client."""
        t, members = self.rows[-1]["round"], self.rows[-1]["cohort"]
        packing = self.experiment.messages.upload_layout(t).packing
        return packing.views(self.fed.transport.buffers.get("rows", len(members), packing.size))

    def client_state(self, k: int) -> Views:
        """Return the client state of client k; `_w` and `_b` are its personal weights and buffers."""
        return self.experiment.messages.client_state.views(self.fed.states.rows[k])

    @property
    def hashes(self) -> list[str]:
        return [row["sha256"] for row in self.rows if row["round"] >= 0]


def prepare(
    config: Settings,
    data: FederatedData | None = None,
    comm: Any = None,
    stop: Any = lambda: False,
    device: torch.device = CPU,
) -> FinishedRun:
    """Build an experiment without running it."""
    torch.set_num_threads(1)
    data = data or federated()
    data = data if data.validation else hold_out_validation(data, config.data.validation, config.seed)
    made = build.make_experiment(config, data, device)
    w0, b0 = made.model.w.detach().clone(), made.model.b.clone()
    rows: list[dict[str, Any]] = []
    files: dict[str, list[dict[str, Any]]] = defaultdict(list)
    callbacks = RunCallbacks()
    callbacks.record_round, callbacks.append_rows = rows.append, lambda file, *more: files[file].extend(more)
    fed = build.make_federation(made, comm or SingleProcess(device), stop, callbacks)
    return FinishedRun(fed, made, rows, files, "", w0, b0)


def run_experiment(config: Settings, data: FederatedData | None = None, comm: Any = None) -> FinishedRun:
    """Build an experiment and run it."""
    it = prepare(config, data, comm)
    it.reason = it.fed.run()
    return it


def digest(x: torch.Tensor) -> str:
    """Return a hash of a tensor's bits, so that -0 differs from 0 and nan equals itself."""
    return hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def record(it: FinishedRun) -> dict[str, Any]:
    """Return all results that must not depend on the ranks: hashes and metrics of each round, rank 0's final state."""
    times = ("wall_s", "train_s", "wait_s", "server_s", "evaluate_s", "sent_bytes", "received_bytes")
    best = it.fed.server.best if it.fed.server else None
    return {
        "rows": [{name: value for name, value in row.items() if name not in times} for row in it.rows],
        "lines": it.lines,
        "updates": it.updates,
        "w": it.experiment.model.layout.sha256(it.fed.server.w) if it.fed.server else None,
        "b": digest(it.fed.server.b) if it.fed.server else None,
        "server": digest(it.fed.server.state_row) if it.fed.server else None,
        "best": [digest(x) for x in best.state_tensors.values()] if best else [],
    }


# ---- processes ----
def write_rank_script(script: Path, *commands: str) -> Path:
    """Write a program that runs a different command on each rank of an mpirun; further ranks run the last one."""
    cases = [f'[ "$OMPI_COMM_WORLD_RANK" = {rank} ] && exec {command}' for rank, command in enumerate(commands)]
    script.write_text("\n".join(["#!/bin/sh", *cases, f"exec {commands[-1]}", ""]))
    script.chmod(0o755)
    return script


def clean_env(**more: str) -> dict[str, str]:
    """Return the caller's environment without launcher variables, since the tests may run under srun or mpirun."""
    launchers = ("SLURM_", "OMPI_", "PMI", "PRTE", "MPI_LOCAL", "TORCHELASTIC")
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if not k.startswith(launchers) and k not in ranks}
    return env | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{env['PATH']}"} | mpirun_tmp_env() | more


def mpirun_tmp_env() -> dict[str, str]:
    """Return a variable that gives one mpirun its own folder for temporary files.

    In a common folder, files that a killed mpirun has left end a later mpirun with the same process number.
    """
    return {"PRTE_MCA_prte_tmpdir_base": tempfile.mkdtemp(dir=mpirun_tmp_root())}


@functools.cache
def mpirun_tmp_root() -> str:
    places = tempfile.mkdtemp(prefix="mpirun-")
    atexit.register(shutil.rmtree, places, ignore_errors=True)
    return places


def launcher(kind: str, size: int) -> list[str]:
    """Return the words of a launcher's command before the program, for `size` ranks; none for kind "alone"."""
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
    """Return the fork server that `fedmpi` uses; it ends with the tests."""
    from fork_server import Server  # here, because as a plug-in this file cannot import files of its folder

    server = Server(clean_env())
    atexit.register(server.close)
    return server


def warm_env(env: dict[str, str] | None = None) -> dict[str, str]:
    """Return environment variables with which `fedmpi`, and COMMAND of fork_server.py, start with torch imported."""
    return fork_server().client_env(clean_env() if env is None else env)


@functools.cache
def _version(command: str) -> str:
    return subprocess.run([command, "--version"], capture_output=True, text=True).stdout


def fedmpi(
    *arguments: object, kind: str = "alone", size: int = 1, limit_s: float = 120, cold: bool = False, **options: Any
) -> Any:
    """Run `fedmpi arguments` to its end, and return an object with returncode, stdout and stderr.

    Args:
        arguments: the command and its arguments.
        kind: a launcher; with "alone" the command runs within this process, unless `cold` is true.
        size: number of ranks.
        limit_s: time limit in seconds if the command runs in processes of its own.
        cold: start a new Python in every rank; otherwise torch is already imported (fork_server.py).
        options: env and cwd of the command; in processes of its own any options of `subprocess.run`.
    """
    if kind == "alone" and not cold:
        return invoke(*arguments, **options)
    command = [*launcher(kind, size), "fedmpi", *map(str, arguments)]
    env = options.pop("env", clean_env())
    env = env if cold else warm_env(env)
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=env, **{"cwd": ROOT, **options})


def invoke(*arguments: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run `fedmpi arguments` within this process, and restore the process's state afterwards."""
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


def find_processes(word: str) -> list[str]:
    """Return the ids of processes that have this word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_text():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def wait_until_ended(word: str) -> bool:
    """Return whether all processes with this word in their command line end within two minutes.

    The limit is long because the machine may be overloaded.
    """
    for _ in range(1200):
        if not find_processes(word):
            return True
        time.sleep(0.1)
    return False
