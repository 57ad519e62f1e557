"""Losses at full precision: what no change may move without saying so and showing why.

    pytest tests/unit/test_golden.py [-k METHOD] --write-golden        write tests/unit/golden/METHOD.json anew

On the machine that wrote a file (same torch, same processor) every digit must agree; kernels of others sum in another
order, and there four digits must.
"""

import json
import platform
from pathlib import Path

import pytest
import torch
from helpers import ROOT, play, small_settings

from fedmpi.methods import registry

FOLDER = ROOT / "tests" / "unit" / "golden"
FIGURES = ("loss", "accuracy", "train_loss", "personal_loss", "personal_accuracy")


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
    return {net: rounds(play(small_settings(method, net, train={"epochs": 2}))) for net in ("mlp", "norm")}


def rounds(it):
    return [{name: row[name] for name in FIGURES if name in row} | {"sha256": row["sha256"]} for row in it.rows]


@pytest.mark.parametrize("method", sorted(registry))
def test_golden_losses(method, request):
    file = FOLDER / f"{method}.json"
    if request.config.getoption("--write-golden"):
        file.write_text(json.dumps({"machine": machine(), "rounds": measure(method)}, indent=1) + "\n")
    assert file.exists(), f"write it: pytest tests/unit/test_golden.py -k {method} --write-golden"
    golden, found = json.loads(file.read_text()), measure(method)
    assert golden["rounds"].keys() == found.keys()
    same = golden["machine"] == machine()
    for net, rows in found.items():
        for t, (row, expected) in enumerate(zip(rows, golden["rounds"][net], strict=True)):
            where = f"{method}, {net}, round {t}"
            if same:
                assert row == expected, where
            else:
                assert row.keys() == expected.keys(), where
                for name in {*FIGURES} & {*row} - {"accuracy", "personal_accuracy"}:  # near ties one sample may tip
                    assert row[name] == pytest.approx(expected[name], rel=1e-4), f"{where}: {name}"


def test_no_golden_file_without_its_method():
    assert {file.stem for file in FOLDER.glob("*.json")} <= set(registry)
