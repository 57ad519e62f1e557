"""The programs in benchmarks/ run; what they measure is for a quiet machine."""

import json
import re
import runpy
import subprocess
import sys
import warnings
from importlib import import_module

import pytest
import torch
from helpers import ROOT, clean_env, launcher

RATIO = r".* [\d.]+ \S+ .*ratio [\d.]+.*\n"
SMALL_CNN = "cnn.py --threads 1 --samples 5 --test 20 --blocks 1 --rounds"
COMMANDS = {  # what each prints
    "small.py --rounds 2": f"logistic{RATIO}mlp{RATIO}",
    f"{SMALL_CNN} 1": rf"1 rank\(s\), fp32: fedmpi{RATIO}",
    "vectors.py --d 1000 --repeats 2": r"1 rank\(s\), 1,000 parameters.*\nserver, m=12.*\n",
    "methods.py fedavg --rounds 1": r"method .*\nfedavg .*\n",
    "methods.py fedsam --passes --samples 10": r"method .*\nfedsam +2.00 .*perturbs.*\n",
    "startup.py --repeats 1 --ranks 1": r"to the first step\n(.* s *\n)(.* x\n)+to the end\n(.* s *\n)(.* x\n)+",
    "sweep.py --runs 2 --parts 1 --rounds 1": f"runs of .*, wall{RATIO}runs of .*, processor{RATIO}",
    "checkpoint.py --pairs 1 --samples 20": f"fedavg: 1 rounds with, 1 without.*\n{RATIO}",
    "rules.py krum median --m 3 900 --d 2000 --gib 0.001 --repeats 1": (
        f"mean, m=3{RATIO}krum, m=3{RATIO}median, m=3{RATIO}m=900, d=2,000 left out.*\n"
    ),
    "collectives.py --ranks 2 --d 1000 --repeats 2 --backend mpi": (
        f"broadcast, mpi, 2 ranks{RATIO}gather of rows, mpi, 2 ranks{RATIO}"
    ),
    "scaling.py --ranks 2 --rounds 1 --train 0.0001": (
        f"strong, . ranks, 48 clients{RATIO}weak, . ranks, 3 clients{RATIO}(.*, 2 ranks, {RATIO}){{4}}no fit.*\n"
    ),
    "states.py --clients 40 --cohort 10 --rounds 2 --cap 0.0001": f"(40 stateful clients{RATIO}){{4}}",
    "exchange.py --ranks 2 --gib 0.001 --rounds 1 --backend gloo --placement sharded": (
        f"(exchange of 0.001 GiB, 6 clients, 2 ranks, gloo, sharded{RATIO}){{4}}"
    ),
    "augment.py --pictures 60 --workers 0 --repeats 1": f"(augmented epoch, (wall|processor){RATIO}){{8}}",
    "gpu/rounds.py --device cpu --share 100 --rounds 1": f"cnn, {RATIO}cifar10, .*\npacked, .*\n",
}


@pytest.fixture
def from_benchmarks(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), str(ROOT / "benchmarks"), *sys.path])


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.smoke] * each.startswith("rules.py")) for each in COMMANDS]
)
def test_a_program_runs(from_benchmarks, monkeypatch, capsys, command):
    monkeypatch.setattr(sys, "argv", command.split())
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(ROOT / "benchmarks" / sys.argv[0]), run_name="__main__")
    torch.set_num_threads(threads)
    output = re.sub(r"^\[.* UCX .*\n", "", capsys.readouterr().out, flags=re.MULTILINE)  # of an MPI without /sys
    assert re.fullmatch(COMMANDS[command], output)


def test_ranks_wait_for_each_other():
    """The one program that runs under mpirun itself."""
    command = [*launcher("mpirun", 3), sys.executable, *f"{SMALL_CNN} 2".split()]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = r"waiting: the rank that waits least [\d.]+ % of a round \(median\); rank 0 .* %, rank 1 .*, rank 2 .* %\n"
    assert re.search(text, done.stdout)


def test_every_program_of_the_suite_is_there_and_tried(from_benchmarks):
    suite = import_module("suite")
    named = {file.name for part in suite.PARTS.values() for file in (suite.split(c)[1] for c in part.commands)}
    assert named - {"peers.py"} <= {command.split()[0] for command in COMMANDS}  # which needs other programs


def test_the_suite_keeps_what_is_printed(from_benchmarks, monkeypatch, tmp_path, capfd):
    """A part that fails is said, keeps what was there, and does not keep the others from running."""
    suite, page = import_module("suite"), import_module("make_performance")
    scaled = [f"weak, {n} ranks, 3 clients, d=10: fedmpi {n}.0 s  training alone 1.0 s  ratio 1" for n in (2, 4)]
    scaled.append("weak, 64 ranks, 3 clients, d=10: fit 9.0 s  training alone 1.0 s  ratio 9  (extrapolated)")
    program = tmp_path / "says.py"
    program.write_text("import sys; print('\\n'.join(sys.argv[1:]))")
    bad = tmp_path / "fails.py"
    bad.write_text("raise SystemExit('no')")
    row = "one, two: fedmpi 1.0 s  by hand 2.0 s  ratio 0.50"
    parts = {
        "exchange": suite.Part("one thing", f"{program} '{row}' 'and so on'"),
        "small": suite.Part("another", str(bad)),
        "scaling": suite.Part("a third", f"{program} {' '.join(repr(text) for text in scaled)}"),
    }
    for module in (suite, page):
        monkeypatch.setattr(module, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["suite.py", "--results", str(tmp_path / "results")])
    with pytest.raises(SystemExit, match="failed: small"):
        suite.main()
    kept = json.loads((tmp_path / "results" / "exchange.json").read_text())
    assert kept["commands"][0]["lines"] == [row, "and so on"]
    assert {"processor", "torch", "date", "commit", "load_before"} <= set(kept["machine"])
    assert not (tmp_path / "results" / "small.json").exists()

    capfd.readouterr()
    words = ["--results", str(tmp_path / "results"), "--figures", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["make_performance.py", *words])
    page.main()
    said = capfd.readouterr().out
    assert "| one, two | fedmpi 1 s | by hand 2 s | 0.50 |  |" in said
    assert "and so on" in said
    assert "Not measured yet: `python benchmarks/suite.py small`." in said
    assert all((tmp_path / f"performance_{name}.png").stat().st_size > 5000 for name in ("ratios", "scaling"))
