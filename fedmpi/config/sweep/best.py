"""A sweep in which each method has the best of a few settings, chosen on validation rows before its table is made.

    best:
      over: {train.lr: [0.01, 0.1]}     the candidates: axes, as in the sweep's own `over`; each combination is one
      by: accuracy                      validation_accuracy of each run, on the rows that data.validation holds out
      of: last                          after the last round; or mean_last_10, best (a round's)
      per: [method]                     axes whose labels have a choice of their own; default: all but `seed`
      using: {seed: [0]}                the runs by which is chosen, axis -> labels; default: all

The candidate with the best mean over the runs that are chosen by is taken; of equal ones the first. One of whose runs
has diverged, or ended without a number, is not taken. Test rows have no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.text import nearest, show
from fedmpi.config import loading
from fedmpi.config.sweep.axes import SEED, Axis, axis, by_axis
from fedmpi.config.yaml_source import Document

KEYS = ("over", "by", "of", "per", "using")
OF = ("last", "mean_last_10", "best")


@dataclass(frozen=True)
class Best:
    """What is chosen, and how."""

    axes: tuple[Axis, ...]
    by: str
    of: str
    per: tuple[str, ...]
    using: dict[str, list[str]]

    @property
    def figure(self) -> str:
        return f"validation_{self.by}"

    @property
    def candidates(self) -> list[dict[str, str]]:
        names = [axis.name for axis in self.axes]
        return [dict(zip(names, chosen, strict=True)) for chosen in product(*(axis.choices for axis in self.axes))]

    @property
    def measured(self) -> Document:
        """The lowest layer of each run: validation rows are evaluated."""
        return loading.nested("evaluate.best.metric", self.by, "best.by")

    def tunes(self, labels: Mapping[str, str]) -> bool:
        """Whether candidates are tried on a run."""
        return all(labels[name] in chosen for name, chosen in self.using.items())

    def cell(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """What a run shares its choice with."""
        return tuple(labels[name] for name in self.per)


def read(
    path: Path, document: Document, axes: Sequence[Axis], labels: Sequence[Mapping[str, str]], given: Any
) -> Best | None:
    """The section `best`. labels: of the sweep's runs. Raises UserError."""
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("over"), dict) or not given["over"]:
        raise UserError(
            f"{path}: best: {show(given)}; candidates are needed: {{over: {{train.lr: [0.01, 0.1]}}, by: accuracy}}"
        )
    if unknown := [key for key in given if key not in KEYS]:
        raise UserError(f"{path}: best: unknown key '{unknown[0]}'; {nearest(str(unknown[0]), KEYS)}")
    by, of = given.get("by"), given.get("of", "last")
    if not isinstance(by, str) or not by:
        raise UserError(f"{path}: best.by: {show(by)}; loss or a metric of the task is needed: by: accuracy")
    if by.startswith(("validation_", "personal_", "test_")):
        raise UserError(f"{path}: best.by: {by}; the metric alone, such as accuracy: it is that of validation rows")
    if of not in OF:
        raise UserError(f"{path}: best.of: {show(of)}; allowed: {', '.join(OF)}")
    names = [each.name for each in axes]
    for name in given["over"]:
        if name in names or name == SEED:
            raise UserError(f"{path}: best.over.{name}: is an axis of over, or the seed; candidates are of other keys")
    tried = tuple(axis(path, document, name, values, "best.over") for name, values in given["over"].items())
    per = given.get("per", [name for name in names if name != SEED])
    per = [per] if isinstance(per, str) else per
    if not isinstance(per, list) or any(name not in names or name == SEED for name in per):
        allowed = ", ".join(name for name in names if name != SEED)
        raise UserError(f"{path}: best.per: {show(per)}; a list of {allowed or 'axes of over'} is needed")
    made = Best(tried, by, of, tuple(per), by_axis(path, axes, "best.using", given.get("using") or {}))
    without = {made.cell(each) for each in labels} - {made.cell(each) for each in labels if made.tunes(each)}
    if without:
        said = ", ".join(f"{name}: {label}" for name, label in zip(made.per, min(without), strict=True))
        raise UserError(f"{path}: best.using: leaves no run by which to choose for {said or 'the sweep'}")
    return made
