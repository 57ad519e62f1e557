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

SIDES = r"[^:]*: .* [\d.]+ \S+  .* [\d.]+ \S+  ratio [\d.]+"  # measure.line
TINY = {  # program: (arguments, what it prints)
    "small.py": (["--rounds", "2"], r"logistic .* ratio [\d.]+ .*fast\nmlp .* ratio [\d.]+ .*fast\n"),
    "cnn.py": (
        ["--threads", "1", "--samples", "5", "--test", "20", "--rounds", "1", "--blocks", "1"],
        r"1 rank\(s\), fp32: fedmpi .* s a round .*, by hand .*ratio [\d.]+ .*\n",
    ),
    "vectors.py": (["--d", "1000", "--repeats", "2"], r"1 rank\(s\), 1,000 parameters.*\nserver, m=12.*\n"),
    "methods.py": (["fedavg", "--rounds", "1"], r"method .*\nfedavg .*\n"),
    "methods.py --passes": (["fedsam", "--passes", "--samples", "10"], r"method .*\nfedsam +2.00 .*perturbs.*\n"),
    "startup.py": (
        ["--repeats", "1", "--ranks", "1"],
        r"to the first step\n(.* s *\n)(.* x\n)+to the end\n(.* s *\n)(.* x\n)+",
    ),
    "sweep.py": (
        ["--runs", "2", "--parts", "1", "--rounds", "1"],
        rf"runs of the quickstart, wall{SIDES}.*same hashes.*\nruns of the quickstart, processor{SIDES}.*\n",
    ),
    "checkpoint.py": (["--pairs", "1", "--samples", "20"], r"fedavg: 1 rounds with, 1 without.*\n.*ratio [\d.]+\n"),
    "rules.py": (
        ["krum", "median", "--m", "3", "900", "--d", "2000", "--gib", "0.001", "--repeats", "1"],
        rf"mean, m=3{SIDES}\nkrum, m=3{SIDES}.*\nmedian, m=3{SIDES}.*\nm=900, d=2,000 left out.*\n",
    ),
    "collectives.py": (
        ["--ranks", "2", "--d", "1000", "--repeats", "2", "--backend", "mpi"],
        "".join(rf"{what}, mpi, 2 ranks{SIDES}.*\n" for what in ("broadcast", "gather of rows")),
    ),
    "scaling.py": (
        ["--ranks", "2", "--rounds", "1", "--train", "0.0001"],
        rf"strong, . ranks, 48 clients{SIDES}\nweak, . ranks, 3 clients{SIDES}\n"
        rf"((strong|weak), 2 ranks, .*{SIDES}\n){{4}}no fit: 4 points for 6.*\n",
    ),
    "states.py": (
        ["--clients", "40", "--cohort", "10", "--rounds", "2", "--cap", "0.0001"],
        rf"(40 stateful clients, 10 a round{SIDES}\n){{2}}(40 stateful.*, memory{SIDES}\n){{2}}",
    ),
    "exchange.py": (
        ["--ranks", "2", "--gib", "0.001", "--rounds", "1", "--backend", "gloo", "--placement", "sharded"],
        rf"(exchange of 0.001 GiB, 6 clients, 2 ranks, gloo, sharded.*{SIDES}\n){{4}}",
    ),
    "augment.py": (
        ["--pictures", "60", "--workers", "0", "--repeats", "1"],
        rf"(augmented epoch, wall, {SIDES}.*\n){{4}}(augmented epoch, processor, {SIDES}.*\n){{4}}",
    ),
    "gpu/rounds.py": (
        ["--device", "cpu", "--share", "100", "--rounds", "1"],
        rf"cnn, .*{SIDES}.*\ncifar10, .*\npacked, .*\n",
    ),
}


@pytest.fixture
def from_benchmarks(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), str(ROOT / "benchmarks"), *sys.path])


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=[pytest.mark.smoke] * (name == "rules.py")) for name in TINY]
)
def test_it_runs(from_benchmarks, monkeypatch, capsys, program):
    words, said = TINY[program]
    file = program.split()[0]
    monkeypatch.setattr(sys, "argv", [file, *words])
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(ROOT / "benchmarks" / file), run_name="__main__")
    torch.set_num_threads(threads)
    assert re.fullmatch(said, capsys.readouterr().out)


def test_ranks_wait_for_each_other():
    """The one program that runs under mpirun itself."""
    words = ["--threads", "1", "--samples", "5", "--test", "20", "--rounds", "2", "--blocks", "1"]
    command = [*launcher("mpirun", 3), sys.executable, str(ROOT / "benchmarks" / "cnn.py"), *words]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = r"waiting: the rank that waits least [\d.]+ % of a round \(median\); rank 0 .* %, rank 1 .*, rank 2 .* %\n"
    assert re.search(text, done.stdout)


def test_every_program_of_the_suite_is_there_and_tried(from_benchmarks):
    suite = import_module("suite")
    named = {file.name for part in suite.PARTS.values() for file in (suite.split(c)[1] for c in part.commands)}
    optional = {"peers.py"}  # which needs other programs
    assert named - optional <= set(TINY)


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
