"""The programs in benchmarks/ run; what they measure is for a quiet machine."""

import re
import runpy
import subprocess
import sys
import warnings

import pytest
import torch
from helpers import ROOT, clean_env, launcher


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        ("small.py", ["--rounds", "2"], r"logistic .* ratio [\d.]+ .*fast\nmlp .* ratio [\d.]+ .*fast\n"),
        ("vectors.py", ["--d", "1000", "--repeats", "2"], r"1 rank\(s\), 1,000 parameters.*\nserver, m=12.*\n"),
        ("methods.py", ["fedavg", "--rounds", "1"], r"method .*\nfedavg .*\n"),
        ("startup.py", ["--repeats", "1", "--ranks", "1"], r"to the first step\n.* x\nto the end\n.* x\n"),
        ("methods.py", ["fedsam", "--passes", "--samples", "10"], r"method .*\nfedsam +2.00 .*perturbs.*\n"),
        (
            "cnn.py",
            ["--threads", "1", "--samples", "5", "--test", "20", "--rounds", "1", "--blocks", "1"],
            r"1 rank\(s\), fp32: fedmpi .* s a round .*, by hand .*ratio [\d.]+ .*\n",
        ),
        ("checkpoint.py", ["--pairs", "1", "--samples", "20"], r"fedavg: 1 rounds with, 1 without.*\n.*ratio [\d.]+\n"),
    ],
)
def test_it_runs(monkeypatch, capsys, program, words, said):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [program, *words])
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(ROOT / "benchmarks" / program), run_name="__main__")
    torch.set_num_threads(threads)
    assert re.fullmatch(said, capsys.readouterr().out, re.S)


def test_vectors_over_ranks():
    program = [sys.executable, str(ROOT / "benchmarks" / "vectors.py"), "--d", "1000", "--repeats", "2"]
    done = subprocess.run(
        [*launcher("mpirun", 3), *program], env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "3 rank(s), 1,000 parameters" in done.stdout
