"""On what it ran, and the hashes by which another can tell the same run."""

from __future__ import annotations

from typing import Any

from fedmpi.analysis.pages.run import Run
from fedmpi.analysis.pages.runs import Runs
from fedmpi.analysis.pages.section import Section, Table, Value

FACTS = (
    "started",
    "command",
    "directory",
    "launcher",
    "backend",
    "threads",
    "slurm_job_id",
    "python",
    "platform",
    "cuda",
    "mpi",
)


def environment(runs: Runs) -> Section | None:
    """environment.json: what is the same in all runs, and beside it what differs."""
    found = [(run, _facts(run.environment)) for run in runs.all if run.environment]
    if not found:
        return None
    parts = list[Table]()
    keys = dict.fromkeys(key for _, facts in found for key in facts)
    same = [key for key in keys if len({facts.get(key) for _, facts in found}) == 1]
    parts.append(Table(("what", "value"), [[key, found[0][1][key]] for key in same]))
    if other := [key for key in keys if key not in same]:
        rows: list[list[Value]] = [[runs.label(run), *(facts.get(key, "-") for key in other)] for run, facts in found]
        parts.append(Table(("run", *other), rows, folded=f"What differs: {', '.join(other)}"))
    return Section("environment", "Environment", parts)


def _facts(environment: dict[str, Any]) -> dict[str, str]:
    facts = {key.replace("_", " "): str(environment[key]) for key in FACTS if environment.get(key) is not None}
    git = environment.get("git") or {}
    if git:
        facts["code"] = f"{git.get('commit')}{', modified' if git.get('modified') else ''}"
    for each in environment.get("ranks") or ():
        where = f"{each.get('device')} on {each.get('host')}"
        facts[where] = ", ".join(filter(None, (facts.get(where), f"rank {each.get('rank')}")))
    facts |= {name: str(version) for name, version in (environment.get("packages") or {}).items() if version}
    return facts


def hashes(runs: Runs) -> Section | None:
    """SHA-256 of the global model after the last round, and of code, data and plug-ins."""
    head = ("run", "seed", "rounds", "model after the last round")
    rows: list[list[Value]] = [
        [runs.label(run), run.seed, len([r for r in run.rows if r["round"] >= 0]), _last(run)] for run in runs.all
    ]
    if not any(row[-1] for row in rows):
        return None
    parts = [Table(head, rows, note="SHA-256. `fedmpi replay RUN_DIR` trains again and compares every round's.")]
    for run in runs.all[:1]:
        settings = set(run.config)
        own: list[list[Value]] = [[k, str(v)] for k, v in run.identity.items() if k not in settings and _is_digest(v)]
        own += [[str(p.get("file")), str(p.get("sha256"))] for p in run.environment.get("plugins") or ()]
        if own:
            of = "" if runs.alone else f" of {runs.label(run)}"
            parts.append(Table(("what", "SHA-256"), own, folded=f"{len(own)} digests of code and data{of}"))
    return Section("hashes", "Hashes", parts)


def _last(run: Run) -> str:
    return next((str(row["sha256"]) for row in reversed(run.rows) if row.get("sha256")), "")


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) >= 32 and not value.startswith(("'", "["))
