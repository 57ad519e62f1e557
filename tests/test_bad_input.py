"""Every mistake ends in one message, exit code 2, soon, without a traceback, and under a launcher with nobody left."""

import gzip
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import BIN, ROOT, by_rank, clean_env, fedmpi, launcher

from fedmpi import cli
from fedmpi.runtime import memory

SOON_S = 5.0
CONFIG = """\
rounds: 1
output: OUTPUT
data:
  source: digits
  root: ROOT
  partition: {scheme: iid, clients: 4}
model: {name: logistic}
method: {name: fedavg}
train:
  lr: 0.1
"""


@pytest.fixture
def config(tmp_path):
    """Writes run.yaml, with text replaced in it, and gives its path."""

    def write(old="", new="", name="run.yaml", net="logistic"):
        text = CONFIG.replace("OUTPUT", str(tmp_path / "runs")).replace("ROOT", str(tmp_path)).replace("logistic", net)
        assert old in text
        path = tmp_path / name
        path.write_text(text.replace(old, new) if old else text)
        return path

    return write


def images(root, pixels=b"\0" * 8 * 16):
    """A data set in MNIST's files: 8 pictures of 4 x 4, and as many for the test."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        header = bytes((0, 0, 8, 3)) + b"".join(n.to_bytes(4, "big") for n in (8, 4, 4))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels))
        header = bytes((0, 0, 8, 1)) + (8).to_bytes(4, "big")
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + bytes(range(8))))
    return folder / "train-images-idx3-ubyte.gz"


def cut(path):
    """Half a file, as a broken copy leaves it."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def table(root):
    np.savez(root / "a.npz", x=np.random.default_rng(0).normal(size=(40, 3)), y=np.arange(40) % 2)
    return root / "a.npz"


# What is wrong -> (replace in the config, by, prepare the folder, what the message says)
MISTAKES = {
    "unknown key": ("rounds: 1", "rounds: 1\ncolour: red", None, r"run\.yaml:2: colour: unknown key; .*allowed: "),
    "mistyped key": (
        "lr: 0.1",
        "epochss: 1",
        None,
        r"run\.yaml:10: train\.epochss: unknown key; did you mean 'epochs'\?",
    ),
    "mistyped option": (
        "name: fedavg",
        "name: fedprox, nu: 1.0",
        None,
        r"run\.yaml:8: method\.nu: unknown key; did you mean 'mu'\?",
    ),
    "mistyped name": ("fedavg", "fedavgg", None, r"run\.yaml:8: .*'fedavgg'; did you mean 'fedavg'\?"),
    "wrong type": ("lr: 0.1", "lr: fast", None, r"run\.yaml:10: train\.lr: 'fast' is not allowed; must be a number"),
    "out of bounds": ("lr: 0.1", "momentum: 1.5", None, r"run\.yaml:10: train\.momentum: 1\.5 .*< 1"),
    "option out of bounds": (
        "name: fedavg",
        "name: fedld, keep: 2.0",
        None,
        r"run\.yaml:8: method\.keep: 2\.0 .*<= 1",
    ),
    "option of a method in a method": (
        "name: fedavg",
        "name: fedatom, client: {name: fedprox, mu: -1}",
        None,
        r"run\.yaml:8: method\.client\.mu: -1 .*>= 0",
    ),
    "a method in a method without a name": (
        "name: fedavg",
        "name: fedatom, client: {mu: 1}",
        None,
        r"run\.yaml:8: method\.client: name is missing: .*mu",
    ),
    "methods that do not go together": (
        "name: fedavg",
        "name: fedatom, client: fedper",
        None,
        r"method\.client: .*shares and trains the whole model; FedPer does not fit",
    ),
    "a group that is not there": (
        "rounds: 1",
        "rounds: 1\nserver: {rule: {name: krum, groups: [coef]}}",
        None,
        r"server\.rule\.groups: there is no group coef; .* has head",
    ),
    "duplicate key": ("rounds: 1", "rounds: 1\nrounds: 2", None, r"run\.yaml:2: .*rounds.*(twice|duplicate|line 1)"),
    "not YAML": ("rounds: 1", "rounds: [1", None, r"run\.yaml:\d+"),
    "more clients than samples": ("clients: 4", "clients: 5000", None, r"clients=5000.*lower `clients`"),
    "shards that do not fit": ("iid, clients: 4", "shards, clients: 4, s: 2", None, r"8 shards are fewer than the 10"),
    "more shards than samples": ("iid, clients: 4", "shards, clients: 900, s: 2", None, r"900 x 2 shards"),
    "a minimum that cannot hold": (
        "iid, clients: 4",
        "dirichlet, clients: 200, min_size: 10",
        None,
        r"min_size=10 cannot hold",
    ),
    "missing file": ("source: digits", "source: mnist", None, r"there is no file .*data\.root"),
    "truncated .gz": ("source: digits", "source: mnist", lambda r: cut(images(r)), r"train-images-idx3-ubyte\.gz"),
    "shortened file": (
        "source: digits",
        "source: mnist",
        lambda r: images(r, b"\0" * 100),
        r"damaged: its header says",
    ),
    "truncated .npz": (
        "source: digits",
        "source: npz\n  path: a.npz",
        lambda r: cut(table(r)),
        r"a\.npz is no readable",
    ),
    "text for an .npz": (
        "source: digits",
        "source: npz\n  path: a.npz",
        lambda r: (r / "a.npz").write_text("x, y\n1, 2\n"),
        r"a\.npz is no readable",
    ),
    "a model for other data": (
        "logistic",
        "mcmahan_cnn",
        lambda r: table(r),
        r"model mcmahan_cnn: a sample has shape \(3,\), but it needs images",
    ),
    "output is a file": ("rounds: 1", "rounds: 1", lambda r: (r / "runs").write_text(""), r"runs is a file"),
    "no such device": ("rounds: 1", "rounds: 1\ncompute: {device: cuda}", None, r"no usable GPU|built without CUDA"),
}


def check(done, message):
    assert done.returncode == 2, done.stderr
    assert re.search(message, done.stderr, re.S), done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_message_soon(config, tmp_path, mistake):
    old, new, prepare, message = MISTAKES[mistake]
    path = config(old, new)
    if prepare:
        prepare(tmp_path)
    if mistake == "a model for other data":
        path.write_text(path.read_text().replace("source: digits", "source: npz\n  path: a.npz"))
    if mistake == "no such device" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    for _ in range(2):  # once more where the machine was busy
        began = time.monotonic()
        done = fedmpi("run", path)
        seconds = time.monotonic() - began
        if seconds < SOON_S:
            break
    check(done, message)
    assert seconds < SOON_S
    assert not (tmp_path / "runs").is_dir()  # nothing was begun


def test_a_launcher_that_promised_more(config):
    done = fedmpi("run", config(), env=clean_env(SLURM_NTASKS="4", SLURM_JOB_ID="1"))
    check(done, "4 tasks allocated but world size 1: start it with `srun fedmpi run")


def test_divergence(config):
    done = fedmpi("run", config("lr: 0.1", "lr: 1.0e+30", net="mlp"))
    check(done, r"round 0: client 0, 1, 2, 3 sent values that are not finite.*lower train\.lr")


def test_more_than_the_memory_allows(config, monkeypatch, capsys, tmp_path):
    """Asked of the machine through one function, so that a small one can be played."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 10_000)
    monkeypatch.setattr(sys, "argv", ["fedmpi", "run", str(config("name: fedavg", "name: scaffold"))])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in cli.THREAD_VARIABLES:
        monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert re.match(r"fedmpi: error: memory: 1 rank\(s\) .* are free.*Use fewer clients", said), said
    assert not (tmp_path / "runs").exists()


# ---- under a launcher ----
def left_over(word):
    """Processes that were started with this word among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_text():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def gone(word):
    for _ in range(50):
        if not left_over(word):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("mistake", "kind", "size"),
    [("mistyped key", "mpirun", 5), ("missing file", "mpirun", 5), ("more clients than samples", "torchrun", 3)],
)
def test_rank_0_alone_reports(config, tmp_path, mistake, kind, size):
    old, new, _, message = MISTAKES[mistake]
    path = config(old, new)
    done = fedmpi("run", path, kind=kind, size=size, limit_s=60)
    said = done.stderr + done.stdout  # some launchers show the ranks' errors among the output
    assert done.returncode != 0
    assert kind == "torchrun" or done.returncode == 2  # torchrun has its own
    assert len(re.findall(message, said, re.S)) == 1, said
    assert said.count("error: ") == 1, said
    assert "fedmpi [rank" not in said
    assert "fedmpi/" not in said  # no frame of ours: torchrun shows its own
    assert gone(str(path))


def test_divergence_ends_all_ranks(config):
    path = config("lr: 0.1", "lr: 1.0e+30", net="mlp")
    done = fedmpi("run", path, kind="mpirun", size=3, limit_s=60)
    check(done, r"round 0: client 0, 1, 2, 3 sent values that are not finite")
    assert gone(str(path))


def ranks_of(tmp_path, *paths):
    """An mpirun of `fedmpi run`, each rank with its own config."""
    script = by_rank(tmp_path / "start.sh", *(f"{BIN}/fedmpi run {path}" for path in paths))
    command = [*launcher("mpirun", len(paths)), str(script)]
    return subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_rank_with_another_config_is_named(config, tmp_path):
    more = "name: run\ncomm: {backend: mpi}\ntrain:\n"
    one = config("train:\n", more)
    other = config("train:\n  lr: 0.1", f"{more}  lr: 0.2\nseed: 5", name="other.yaml")
    done = ranks_of(tmp_path, one, one, other)
    check(done, r"rank 2 differs from rank 0 in seed, train\.lr")
    assert "rank 1 differs" not in done.stderr
    assert gone(str(tmp_path))


def own_data(config, tmp_path, name, labels):
    """A config whose data.root holds a table with these labels; None: no table."""
    root = tmp_path / name
    root.mkdir()
    if labels is not None:
        np.savez(root / "a.npz", x=np.random.default_rng(0).normal(size=(40, 3)), y=labels)
    path = config("source: digits", "source: npz\n  path: a.npz", name=f"{name}.yaml")
    path.write_text(path.read_text().replace(f"root: {tmp_path}", f"root: {root}") + "name: run\n")
    return path


def test_a_rank_with_other_data_is_named(config, tmp_path):
    one = own_data(config, tmp_path, "one", np.arange(40) % 2)
    other = own_data(config, tmp_path, "other", np.arange(40) // 20)
    check(ranks_of(tmp_path, one, other, one), r"rank 1 differs from rank 0 in .*\(training data\)")


def test_a_rank_that_alone_lacks_its_data_is_named(config, tmp_path):
    """The others wait for it at the start; the launcher ends them."""
    one = own_data(config, tmp_path, "one", np.arange(40) % 2)
    done = ranks_of(tmp_path, one, own_data(config, tmp_path, "other", None))
    check(done, r"fedmpi \[rank 1 on .*there is no file .*other/a\.npz")
    assert gone(str(tmp_path))
