"""Losses at full precision: what no change may move without saying so and showing why.

    python tests/test_golden.py [METHOD ...]        writes tests/golden/METHOD.json anew (default: of all methods)

On the machine that wrote a file (same torch, same processor) every digit must agree; kernels of others sum in another
order, and there four digits must.
"""

import json
import platform
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, play, trial

from fedmpi.methods import registry

FOLDER = ROOT / "tests" / "golden"
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
    return {net: rounds(play(trial(method, net, train={"epochs": 2}))) for net in ("mlp", "norm")}


def rounds(it):
    return [{name: row[name] for name in FIGURES if name in row} | {"sha256": row["sha256"]} for row in it.rows]


@pytest.mark.parametrize("method", sorted(registry))
def test_golden_losses(method):
    file = FOLDER / f"{method}.json"
    assert file.exists(), f"write it: python tests/test_golden.py {method}"
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


def main():
    FOLDER.mkdir(exist_ok=True)
    for method in sys.argv[1:] or sorted(registry):
        text = json.dumps({"machine": machine(), "rounds": measure(method)}, indent=1)
        (FOLDER / f"{method}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
