"""`fedmpi analyse`: its output, its files, and one-line errors."""

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
def isolated_environment(monkeypatch):
    """Remove variables of launchers, and restore the environment and the search path after the test."""
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
def directory(tmp_path_factory):
    """Return a directory with a config and two runs of it: atoms (period 1) and fast (period 2)."""
    path = tmp_path_factory.mktemp("analyse")
    (path / "atoms.yaml").write_text(CONFIG)
    for more in ([], ["name=fast", "method.period=2"]):
        done = fedmpi("run", path / "atoms.yaml", f"output={path}", *more)
        assert done.returncode == 0, done.stderr
    return path


def test_variance_measures_the_unchanged_run(monkeypatch, capsys, directory):
    assert (
        main(monkeypatch, "analyse", "variance", directory / "atoms.yaml", "--replicates", 2, "--to", directory / "new")
        == 0
    )
    out = capsys.readouterr().out.splitlines()
    assert [line.split(" averaged ")[0] for line in out[1:3]] == ["round 0: kernels", "round 1: kernels"]
    facts = json.loads((directory / "new" / "variance.json").read_text())
    last = json.loads((directory / "atoms" / "metrics.jsonl").read_text().splitlines()[-1])
    assert facts["sha256"] == last["sha256"]  # measuring does not change the run
    assert (facts["replicates"], facts["config"]["method"]["name"]) == (2, "fedatom")
    assert (directory / "new" / "variance.png").stat().st_size > 10_000


def test_virtual_evaluates_all_pairs_of_clients(monkeypatch, capsys, directory):
    assert main(monkeypatch, "analyse", "virtual", directory / "atoms", "--trust", "--to", directory / "new") == 0
    data, out = capsys.readouterr().out.split("\n", 1)
    assert data == "data: digits {test_fraction: 0.2}, files below data"
    assert out.startswith("round 2: 3 clients train, then 10 models are evaluated\naccuracy on the global test set of")
    facts = json.loads((directory / "new" / "virtual.json").read_text())
    assert (facts["round"], len(facts["models"]), facts["run"]) == (2, 9, str(directory / "atoms"))


def test_virtual_starts_from_the_runs_model(monkeypatch, capsys, directory):
    """Without training, all models equal the model of the run and have its last accuracy."""
    config = (directory / "atoms" / "config.yaml").read_text()
    untrained = directory / "untrained"
    untrained.mkdir()
    (untrained / "config.yaml").write_text(config.replace("epochs: 1", "epochs: 0"))
    (untrained / "model.safetensors").write_bytes((directory / "atoms" / "model.safetensors").read_bytes())
    assert main(monkeypatch, "analyse", "virtual", untrained, "--trust", "--to", untrained) == 0
    last = json.loads((directory / "atoms" / "metrics.jsonl").read_text().splitlines()[-1])
    facts = json.loads((untrained / "virtual.json").read_text())
    assert facts["aggregate"]["accuracy"] == last["accuracy"]
    assert {row["accuracy"] for row in facts["models"]} == {last["accuracy"]}


def test_communication_counts_transmitted_parameters(monkeypatch, capsys, directory):
    runs = [directory / "atoms", directory / "fast"]
    assert main(monkeypatch, "analyse", "communication", *runs, "--metric", "loss", "--to", directory / "new") == 0
    out = capsys.readouterr().out.splitlines()
    # 3x3 convolution, 1 to 6 channels, 3 atoms: 18 coefficients and 6 biases are not sent in the second of two rounds
    up = [float(line.split()[2].replace(",", "")) for line in out[2:4]]
    assert up[0] - up[1] == 3 * 24 / 2
    facts = json.loads((directory / "new" / "communication.json").read_text())
    assert [point["settings"] for point in facts["points"]] == [str(run) for run in runs for _ in range(2)]
    assert (directory / "new" / "communication.png").stat().st_size > 10_000


def test_flops_compares_a_method_with_fedavg(monkeypatch, capsys, directory):
    options = "method={name: fedsol, layers: all}"
    assert main(monkeypatch, "analyse", "flops", directory / "atoms.yaml", options, "--to", directory / "new") == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out] == ["client", "method", "fedavg", "fedsol", "written:"]
    facts = json.loads((directory / "new" / "flops.json").read_text())
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
            "method fedavg: client 0 makes fewer than 2 steps with the model that is sent",
        ),
        (["communication", "{place}/atoms", "--to", "{place}/atoms.yaml"], "--to: cannot create {place}/atoms.yaml: "),
        (["gaussian"], "No such command 'gaussian'"),
    ],
)
def test_mistakes_of_users_are_one_line_with_exit_code_2(monkeypatch, capsys, directory, arguments, text):
    words = [word.format(place=directory) for word in arguments]
    elsewhere = ["--to", directory / "bad"] if "--to" not in words and words[1:] else []
    assert main(monkeypatch, "analyse", *words, *elsewhere) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"fedmpi: error: {text.format(place=directory)}")
    assert err.count("\n") == 1
    assert out == ""
