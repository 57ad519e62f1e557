"""The programs in benchmarks/ run; their measurements are meaningful only on an idle machine."""

import re
import runpy
import sys
import warnings
from importlib import import_module

import pytest
import torch
from helpers import ROOT

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
    "many_clients.py --clients 200 --rows 400 --rounds 1 --turns 1": (
        f"((fedavg|scaffold), (one process|three ranks)(, processor|, memory)?{RATIO}){{12}}"
        f"(pfl: not installed\n|(fedavg, one process, .*{RATIO}){{6}})"
    ),
    "exchange.py --ranks 2 --gib 0.001 --rounds 1 --backend gloo --placement sharded": (
        f"(exchange of 0.001 GiB, 6 clients, 2 ranks, gloo, sharded{RATIO}){{4}}"
    ),
    "augment.py --pictures 60 --workers 0 --repeats 1": f"(augmented epoch, (wall|processor){RATIO}){{8}}",
    "secagg.py phases --clients 4 --entries 1000": f"(.* ms a client\n){{3}}(.*, 4 clients, 0.0 M entries{RATIO}){{2}}",
    "secagg.py round --threads 1 --samples 5 --test 20 --rounds 1 --blocks 1": rf"round of W1, 1 rank\(s\){RATIO}",
    "gpu/rounds.py --device cpu --share 100 --rounds 1": f"cnn, {RATIO}cifar10, .*\npacked, .*\n",
    "gpu/rounds.py profile --device cpu": r"(?s).*aten::.*kernel launches: 0\n.*values that Python read: \d+\n",
}


@pytest.fixture
def from_benchmarks(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), str(ROOT / "benchmarks"), *sys.path])


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.smoke] * each.startswith("rules.py")) for each in COMMANDS]
)
def test_benchmark_program_runs(from_benchmarks, monkeypatch, capsys, command):
    monkeypatch.setattr(sys, "argv", command.split())
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(ROOT / "benchmarks" / sys.argv[0]), run_name="__main__")
    torch.set_num_threads(threads)
    output = re.sub(r"^\[.* UCX .*\n", "", capsys.readouterr().out, flags=re.MULTILINE)  # of an MPI without /sys
    assert re.fullmatch(COMMANDS[command], output)


def test_every_program_of_the_suite_exists_and_is_tested(from_benchmarks):
    suite = import_module("suite")
    named = {file.name for part in suite.PARTS.values() for file in (suite.split(c)[1] for c in part.commands)}
    assert named - {"peers.py"} <= {command.split()[0] for command in COMMANDS}  # which needs other programs
