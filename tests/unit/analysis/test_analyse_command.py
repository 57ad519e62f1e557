"""`fedmpi analyse`: what it prints and writes, and mistakes in one line."""

import json
import os
import sys

import pytest
from helpers import ROOT, fedmpi

from fedmpi import cli
from fedmpi.cli import arguments

CONFIG = f"""\
name: atoms
rounds: 2
data: {{source: digits, partition: {{scheme: iid, clients: 6}}}}
model: {{name: "{ROOT}/tests/helpers.py:norm_net"}}
method: {{name: fedatom, atoms: 3}}
train: {{batch_size: 50, lr: 0.05}}
cohort: {{fraction: 0.5}}
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher, and an environment and a search path that the test may change."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "SLURM_", "TORCHELASTIC", "MPI_LOCAL")):
            monkeypatch.delenv(name)
    for name in arguments.THREAD_VARIABLES:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(sys, "path", list(sys.path))


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fedmpi", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a config and two runs of it: atoms (period 1) and fast (period 2)."""
    path = tmp_path_factory.mktemp("analyse")
    (path / "atoms.yaml").write_text(CONFIG)
    for more in ([], ["name=fast", "method.period=2"]):
        done = fedmpi("run", path / "atoms.yaml", f"output={path}", *more)
        assert done.returncode == 0, done.stderr
    return path


def test_variance(monkeypatch, capsys, place):
    assert main(monkeypatch, "analyse", "variance", place / "atoms.yaml", "--replicates", 2, "--to", place / "new") == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(" averaged ")[0] for line in out[1:3]] == ["round 0: kernels", "round 1: kernels"]
    facts = json.loads((place / "new" / "variance.json").read_text())
    last = json.loads((place / "atoms" / "metrics.jsonl").read_text().splitlines()[-1])
    assert facts["sha256"] == last["sha256"]  # the run that was measured is the run
    assert (facts["replicates"], facts["config"]["method"]["name"]) == (2, "fedatom")
    assert (place / "new" / "variance.png").stat().st_size > 10_000


def test_virtual(monkeypatch, capsys, place):
    assert main(monkeypatch, "analyse", "virtual", place / "atoms", "--trust", "--to", place / "new") == 0
    data, out = capsys.readouterr().out.split("\n", 1)
    assert data == "data: digits {test_fraction: 0.2}, files below data"
    assert out.startswith("round 2: 3 clients train, then 10 models are evaluated\naccuracy on the global test set of")
    facts = json.loads((place / "new" / "virtual.json").read_text())
    assert (facts["round"], len(facts["models"]), facts["run"]) == (2, 9, str(place / "atoms"))


def test_virtual_starts_from_the_runs_model(monkeypatch, capsys, place):
    """Without training all models are the run's: its last accuracy."""
    config = (place / "atoms" / "config.yaml").read_text()
    still = place / "still"
    still.mkdir()
    (still / "config.yaml").write_text(config.replace("epochs: 1", "epochs: 0"))
    (still / "model.safetensors").write_bytes((place / "atoms" / "model.safetensors").read_bytes())
    assert main(monkeypatch, "analyse", "virtual", still, "--trust", "--to", still) == 0
    last = json.loads((place / "atoms" / "metrics.jsonl").read_text().splitlines()[-1])
    facts = json.loads((still / "virtual.json").read_text())
    assert facts["aggregate"]["accuracy"] == last["accuracy"]
    assert {row["accuracy"] for row in facts["models"]} == {last["accuracy"]}


def test_communication(monkeypatch, capsys, place):
    runs = [place / "atoms", place / "fast"]
    assert main(monkeypatch, "analyse", "communication", *runs, "--metric", "loss", "--to", place / "new") == 0
    out = capsys.readouterr().out.splitlines()
    # a 3x3 convolution of 6 on 1 with 3 atoms: 18 coefficients and 6 biases rest in the second of two rounds
    up = [float(line.split()[2].replace(",", "")) for line in out[2:4]]
    assert up[0] - up[1] == 3 * 24 / 2
    facts = json.loads((place / "new" / "communication.json").read_text())
    assert [point["settings"] for point in facts["points"]] == [str(run) for run in runs for _ in range(2)]
    assert (place / "new" / "communication.png").stat().st_size > 10_000


def test_flops(monkeypatch, capsys, place):
    options = "method={name: fedsol, layers: all}"
    assert main(monkeypatch, "analyse", "flops", place / "atoms.yaml", options, "--to", place / "new") == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out] == ["client", "method", "fedavg", "fedsol", "written:"]
    facts = json.loads((place / "new" / "flops.json").read_text())
    fedavg, fedsol = facts["methods"]
    assert (fedavg["ratio"], fedavg["delta"], fedsol["options"]) == (1, 0, {"layers": "all"})
    assert fedsol["ratio"] == 2 + fedsol["delta"]  # Table 5: 2x + delta


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["variance", "{place}/atoms.yaml", "method={{name: fedavg}}"], "method.name: fedavg on model "),
        (["variance", "{place}/none.yaml"], "{place}/none.yaml: there is no such config file"),
        (["variance", "{place}/atoms.yaml", "--replicates", "1"], "Invalid value for '--replicates'"),
        (["virtual", "{place}"], "{place} is not a run directory: it contains no config.yaml"),
        (["communication", "{place}"], "{place} is not a run directory: it contains no metrics.jsonl"),
        (["communication", "{place}/atoms", "--metric", "lost"], "--metric: {place}/atoms has no 'lost'; did you mean"),
        (["communication"], "Missing argument 'RUN_DIR"),
        (["flops", "{place}/none.yaml"], "{place}/none.yaml: there is no such config file"),
        (
            ["flops", "{place}/atoms.yaml", "train.epochs=0"],
            "method fedavg: client 0 makes 0 step(s) of the model that is sent",
        ),
        (["communication", "{place}/atoms", "--to", "{place}/atoms.yaml"], "--to: cannot create {place}/atoms.yaml: "),
        (["gaussian"], "No such command 'gaussian'"),
    ],
)
def test_a_users_mistake_is_one_line_and_code_2(monkeypatch, capsys, place, arguments, text):
    words = [word.format(place=place) for word in arguments]
    elsewhere = ["--to", place / "bad"] if "--to" not in words and words[1:] else []
    assert main(monkeypatch, "analyse", *words, *elsewhere) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"fedmpi: error: {text.format(place=place)}")
    assert err.count("\n") == 1
    assert out == ""
