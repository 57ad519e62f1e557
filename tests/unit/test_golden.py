"""Golden losses at full precision, which only a justified change may move.

    pytest tests/unit/test_golden.py [-k METHOD] --write-golden        rewrite tests/unit/golden/METHOD.jsonl

On the machine that wrote a file (same torch, same processor) every digit must agree. Kernels of other machines sum in a
different order, and there four digits must agree.
"""

import json
import platform
from pathlib import Path

import pytest
import torch
from helpers import ROOT, run_experiment, small_settings

from fedmpi.methods import registry

FOLDER = ROOT / "tests" / "unit" / "golden"
METRICS = ("loss", "accuracy", "train_loss", "personal_loss", "personal_accuracy")


def describe_machine():
    """Return what determines the last digits: torch, and the processor's instruction sets and caches."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    named = [facts.get(key, "?") for key in ("model name", "cpu family", "model", "stepping", "cache size")]
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": " ".join([platform.machine(), *named]),
    }


def measure(method):
    """Return the metrics of every round on two networks."""
    rows = []
    for net in ("mlp", "norm"):
        for row in run_experiment(small_settings(method, net, train={"epochs": 2})).rows:
            rows.append({"net": net, **{name: row[name] for name in ("round", *METRICS, "sha256") if name in row}})
    return rows


@pytest.mark.parametrize("method", sorted(registry))
def test_losses_equal_the_golden_files(method, request):
    """The first line of a file describes the machine that wrote it; one line per round follows."""
    file = FOLDER / f"{method}.jsonl"
    if request.config.getoption("--write-golden"):
        file.write_text("".join(json.dumps(line) + "\n" for line in (describe_machine(), *measure(method))))
    assert file.exists(), f"write it: pytest tests/unit/test_golden.py -k {method} --write-golden"
    writer, *golden = map(json.loads, file.read_text().splitlines())
    for row, expected in zip(measure(method), golden, strict=True):
        if writer == describe_machine():
            assert row == expected
        else:
            assert row.keys() == expected.keys()
            for name in {*METRICS} & {*row} - {"accuracy", "personal_accuracy"}:  # near ties one sample may tip
                assert row[name] == pytest.approx(expected[name], rel=1e-4), f"{row}: {name}"


def test_no_golden_file_without_its_method():
    assert {file.stem for file in FOLDER.glob("*.jsonl")} <= set(registry)
