"""A run in which every site trained alone: what joint training is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from shlex import quote

from fedmpi.analysis.pages.consortium.sites import Judged, Site, sites
from fedmpi.analysis.pages.run import Run
from fedmpi.analysis.pages.runs import is_run
from fedmpi.common.errors import UserError
from fedmpi.config import yaml_source

METHOD = "local"
SAME = (  # what a fair one shares
    *("data.", "model.", "task.", "train.", "init.", "seed", "rounds"),
    *("cohort.fraction", "cohort.size", "cohort.draw"),
)
PLACES = ("data.root", "data.download", "data.audit", "data.stream", "data.share_ranks")  # which move no figure
CLOSE = "too close to tell"
CLEAR = 2.0  # standard errors beyond which a difference is called one
FEWEST = 20  # test samples that a verdict needs
NOTE = (
    "After the last evaluated round, not the best one. A difference of accuracies below two standard errors is too "
    "close to tell; of other figures the error is not known, and small differences may be chance. With fewer than "
    f"{FEWEST} test samples there is no verdict."
)


@dataclass(frozen=True)
class Alone:
    """The run, and each site's figures in it."""

    run: Run
    judged: Mapping[int, Judged]  # by client
    differs: tuple[str, ...]  # settings that are not those of the joint run


def given(run: Run, path: Path) -> Alone:
    """The run in `path`, as the baseline of `run`. Raises UserError where it cannot be that."""
    if not (path.is_dir() and is_run(path)):
        raise UserError(f"--alone: {path} is no run directory; name one that `fedmpi run` has written")
    other = Run(path)
    method = other.config.get("method.name")
    if method != METHOD:
        raise UserError(
            f"--alone: the method of {path} is {method}; a run of sites that train alone has method.name=local"
        )
    names, theirs = run.client_names, other.client_names
    if names != theirs:
        raise UserError(
            f"--alone: {path} has other sites ({', '.join(theirs.values()) or 'none with a name'}) than {run.path} "
            f"({', '.join(names.values())})"
        )
    judged = {site.client: site.judged["personal"] for site in sites(other) if "personal" in site.judged}
    if not judged:
        raise UserError(
            f"--alone: {path} does not say how good each site's model is; run it with evaluate.protocol=[personal]"
        )
    return Alone(other, judged, tuple(_differing(run, other)))


def found(run: Run) -> Alone | None:
    """The newest run beside this one, of the same folder or sweep, that is its baseline without a difference."""
    around = [path for path in run.path.resolve().parent.iterdir() if _is_local(path)]
    for path in sorted(around, key=lambda each: (-each.stat().st_mtime, each)):
        try:
            alone = given(run, path)
        except UserError:
            continue
        if not alone.differs:
            return alone
    return None


def _is_local(path: Path) -> bool:
    """Whether it is a run of that method; of the many beside it no more than the config is read."""
    try:
        method = yaml_source.read(path / "config.yaml").data.get("method") if is_run(path) else None
    except (UserError, OSError):
        return False
    return isinstance(method, dict) and method.get("name") == METHOD


def _differing(run: Run, other: Run) -> list[str]:
    """Settings by which a figure may differ; and that one of the two was cut short."""
    keys = [key for key in dict.fromkeys([*run.config, *other.config]) if key.startswith(SAME) and key not in PLACES]
    ended = [f"how they ended ({run.state}; {other.state})"] if run.state != other.state else []
    return [*(key for key in keys if run.config.get(key) != other.config.get(key)), *ended]


def how_to(run: Run) -> str:
    """A command that makes one. What has no meaning where nothing travels goes back to its default."""
    words = [quote(f"name={run.name}_alone"), "'method={name: local}'", "evaluate.protocol=[personal]"]
    words += ["server.rule=auto"] if run.config.get("server.rule.name", "auto") != "auto" else []
    words += ["record.updates=norms"] if run.config.get("record.updates") == "gram" else []
    command = f"fedmpi run {quote(str(run.path))}/config.yaml {' '.join(words)}"
    return f"{command} (started as the joint run was, so that each site opens its own files)"


def verdict(site: Site, alone: Judged, name: str) -> str:
    """What the difference of one figure says: "better", "worse", or that there is none to be seen, or nothing where
    there are fewer than FEWEST test samples.

    The standard error of a difference of two shares a, b of n samples is sqrt(a (1 - a) / n + b (1 - b) / n), too much
    where both models err on the same samples; of other figures than accuracy none is known.
    """
    joint = site.own.last(name) if site.own else None
    before = alone.last(name)
    if joint is None or before is None:
        return "-"
    n = min(site.own.samples if site.own else 0, alone.samples)
    if 0 < n < FEWEST:
        return f"too few test samples ({n}) for a verdict"
    if joint == before:
        return "the same"
    better = (joint < before) == site.falls(name)
    if name == "accuracy" and n:
        error = sqrt(sum(a * (100 - a) / n for a in (joint, before)))
        if abs(joint - before) < CLEAR * error:
            return CLOSE
    return "better together" if better else "better alone"
