"""One folder with one bad config, and what a command about it must leave."""

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
# what a case adds stands below
"""
DIGITS = "source: digits, partition: {scheme: iid, clients: 4}"


class Case(NamedTuple):
    says: str  # a regular expression
    overrides: tuple[str, ...] = ()
    data: str = DIGITS
    behind: str = ""  # in the file, behind CONFIG
    prepare: Callable[[Path], Any] | None = None  # of the folder


def _all() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for table in (config_cases.UNKNOWN, config_cases.NAMES, config_cases.VALUES, config_cases.TOGETHER):
        cases |= {label: Case(says, tuple(label.split(";;"))) for label, says in table.items()}
    cases |= {
        label: Case(says, behind=text, prepare=prepare) for label, (text, prepare, says) in file_cases.FILES.items()
    }
    pictures = (data_cases.PICTURES, data_cases.TABLE_OF_FILES)
    for files in (data_cases.TABLES, data_cases.IDX, data_cases.HEART, *pictures, *spreadsheet_cases.ALL):
        for label, (data, prepare, says) in files.items():
            clients = "" if "partition" in data or "silos" in data else ", partition: {scheme: iid, clients: 4}"
            cases[label] = Case(says, data=data + clients, prepare=prepare)
    picky = ("model.name=mcmahan_cnn",)
    cases["a model for other data"] = cases["x twice"]._replace(
        prepare=data_cases.table()[1],
        overrides=picky,
        says=r"a sample has the shape \(3,\), but .* needs images",
    )
    return cases


CASES = _all()


def write(case: Case, folder: Path) -> list[str]:
    """The case's files, and the arguments of `fedmpi run` or `validate`."""
    text = CONFIG.replace("DATA", case.data).replace("OUTPUT", str(folder))
    if "root: run.yaml" in case.data:  # a root of its own
        text = text.replace(f", root: {folder}", "")
    (folder / "run.yaml").write_bytes((text + case.behind).encode())
    if case.prepare:
        case.prepare(folder)
    return [str(folder / "run.yaml"), *case.overrides]


def check(case: Case, code: int, out: str, err: str) -> None:
    said = err + out
    assert code == 2, said
    assert re.search(case.says, said, re.S), said
    assert len(re.findall(r"^fedmpi: error: ", said, re.M)) == 1, said
    assert "fedmpi [rank" not in said, said
    assert "Traceback" not in said, said
    assert "defect" not in said, said
