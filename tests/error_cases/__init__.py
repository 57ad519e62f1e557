"""Cases of mistakes: a folder with an invalid config or invalid data, and the message that a command must print."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from error_cases import config_cases, data_cases, file_cases, spreadsheet_cases

CONFIG = """\
rounds: 1
output: OUTPUT/runs
data: {DATA, root: OUTPUT}
model: {name: logistic}
method: {name: fedavg}
train:
  lr: 0.1
compute:
  threads: 1
# a case appends its text below
"""
DIGITS = "source: digits, partition: {scheme: iid, clients: 4}"


class Case(NamedTuple):
    """A mistake: what is wrong in the folder and the config, and the message."""

    pattern: str  # a regular expression
    overrides: tuple[str, ...] = ()
    data: str = DIGITS
    appended: str = ""  # text that is appended to CONFIG
    prepare: Callable[[Path], Any] | None = None  # changes the folder


def _all() -> dict[str, Case]:
    """Return all cases by label."""
    cases: dict[str, Case] = {}
    for table in (config_cases.UNKNOWN, config_cases.NAMES, config_cases.VALUES, config_cases.TOGETHER):
        cases |= {label: Case(pattern, tuple(label.split(";;"))) for label, pattern in table.items()}
    cases |= {
        label: Case(pattern, appended=text, prepare=prepare)
        for label, (text, prepare, pattern) in file_cases.FILES.items()
    }
    pictures = (data_cases.PICTURES, data_cases.TABLE_OF_FILES)
    for files in (data_cases.TABLES, data_cases.IDX, data_cases.HEART, *pictures, *spreadsheet_cases.ALL):
        for label, (data, prepare, pattern) in files.items():
            clients = "" if "partition" in data or "silos" in data else ", partition: {scheme: iid, clients: 4}"
            cases[label] = Case(pattern, data=data + clients, prepare=prepare)
    picky = ("model.name=mcmahan_cnn",)
    cases["a model for other data"] = cases["x twice"]._replace(
        prepare=data_cases.table()[1],
        overrides=picky,
        pattern=r"a sample has the shape \(3,\), but .* needs images",
    )
    return cases


CASES = _all()


def write(case: Case, folder: Path) -> list[str]:
    """Write the files of a case; return the arguments of `fedmpi run` or `validate`."""
    text = CONFIG.replace("DATA", case.data).replace("OUTPUT", str(folder))
    if "root: run.yaml" in case.data:  # a root of its own
        text = text.replace(f", root: {folder}", "")
    (folder / "run.yaml").write_bytes((text + case.appended).encode())
    if case.prepare:
        case.prepare(folder)
    return [str(folder / "run.yaml"), *case.overrides]


def check(case: Case, code: int, out: str, err: str) -> None:
    """Check that a command ended with exit code 2 and the message of the case only."""
    output = err + out
    assert code == 2, output
    assert re.search(case.pattern, output, re.S), output
    assert len(re.findall(r"^fedmpi: error: ", output, re.M)) == 1, output
    assert "fedmpi [rank" not in output, output
    assert "Traceback" not in output, output
    assert "defect" not in output, output
