"""Losses at full precision: what no change may move without saying so and showing why.

    pytest tests/unit/test_golden.py [-k METHOD] --write-golden        write tests/unit/golden/METHOD.jsonl anew

On the machine that wrote a file (same torch, same processor) every digit must agree; kernels of others sum in another
order, and there four digits must.
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


def machine():
    """What decides the last digits: torch's kernels are chosen by the processor's abilities and caches."""
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
    """The metrics of every round on two nets."""
    rows = []
    for net in ("mlp", "norm"):
        for row in run_experiment(small_settings(method, net, train={"epochs": 2})).rows:
            rows.append({"net": net, **{name: row[name] for name in ("round", *METRICS, "sha256") if name in row}})
    return rows


@pytest.mark.parametrize("method", sorted(registry))
def test_golden_losses(method, request):
    """The file's first line is the machine that wrote it; one line a round follows."""
    file = FOLDER / f"{method}.jsonl"
    if request.config.getoption("--write-golden"):
        file.write_text("".join(json.dumps(line) + "\n" for line in (machine(), *measure(method))))
    assert file.exists(), f"write it: pytest tests/unit/test_golden.py -k {method} --write-golden"
    writer, *golden = map(json.loads, file.read_text().splitlines())
    for row, expected in zip(measure(method), golden, strict=True):
        if writer == machine():
            assert row == expected
        else:
            assert row.keys() == expected.keys()
            for name in {*METRICS} & {*row} - {"accuracy", "personal_accuracy"}:  # near ties one sample may tip
                assert row[name] == pytest.approx(expected[name], rel=1e-4), f"{row}: {name}"


def test_no_golden_file_without_its_method():
    assert {file.stem for file in FOLDER.glob("*.jsonl")} <= set(registry)
