"""Summarise the audit file of a site (comm/audit.py): which messages left it, by content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmpi.common.host_memory import size_text
from fedmpi.reports.page import Part, Section, Table, Text, Value
from fedmpi.reports.run_data import Row, Run
from fedmpi.reports.sites import Site

COUNTS = "label counts"
NO_CLASSES = f"zeros in place of {COUNTS}: its targets are no classes"
MEANING = {
    "_loss": "its mean training loss",
    "_seconds": "the seconds that it took",
    "_flag": "whether it could train",
    "_b": "batch statistics of the model, where it has some",
    "dw": "the change of the model's weights",
    "n_train": "its number of training samples",
    "n_test": "its number of test samples",
    "client": "its number among the sites",
    "classes": "the number of classes",
    COUNTS: "how many samples it has of each class",
    "validation samples": "how many of its training samples it keeps for validation",
    "digest of names": "63 bits of a hash of its columns' names",
    "shapes and types of a sample and its target": "shape and type of a sample",
    "text": "host, versions, and hashes of settings and code",
    "client state": "what the method keeps for the site",
    "heard": "that it has heard of a round in which it does not take part",
    "loss": "loss on its test samples",
    "accuracy": "accuracy on its test samples",
    "local model": "all of its local model, as its training left it (analysis)",
    "figures of analysis": "figures of models on its samples (analysis)",
}
FORMATS = {
    "fp32": "as the model holds its numbers (32 bits each, mostly)",
    "bf16": "bf16: 16 bits a number",
    "fp16": "fp16: 16 bits a number",
    "int8": "int8: 8 bits a number",
    "topk": "topk: the largest entries alone",
}
HASHES = 400  # lines of a page


@dataclass(frozen=True)
class Audit:
    """The audit file of a rank. uploads: its lines on updates; shared: other sites that the same rank serves."""

    path: Path
    lines: list[Row]
    uploads: list[Row]
    total: int  # bytes
    sha256: str
    shared: tuple[str, ...]


def rank_of(run: Run, site: Site) -> int | None:
    """Return the rank that opened the site's files: sites are assigned to the training ranks in turn."""
    size = len(run.environment.get("ranks") or ())
    first = 0 if size == 1 or run.config.get("server.trains") else 1
    return first + site.client % (size - first) if size > first else None


def read_audit(run: Run, site: Site, everybody: Sequence[Site]) -> Audit | None:
    """Read the audit file of a site; None if it is not in the run directory."""
    rank = rank_of(run, site)
    path = Path("audit") / f"rank-{rank}.jsonl"
    if rank is None or not (run.path / path).is_file():
        return None
    shared = tuple(each.name for each in everybody if each is not site and rank_of(run, each) == rank)
    lines, digest = run.lines(str(path), rounds=False), hashlib.sha256((run.path / path).read_bytes()).hexdigest()
    uploads = [line for line in lines if isinstance(line.get("round"), int) and "_flag" in _what(line)]
    return Audit(path, lines, uploads, sum(map(_bytes, lines)), digest, shared)


def section(run: Run, site: Site, audit: Audit | None) -> Section:
    """Make the section with names, formats, bytes and hashes of all messages that left the site."""
    if audit is None:
        return Section("left", "What left the site", [Text(_why_none(run, site), warning=True)])
    form, method = str(run.config.get("comm.wire.up.name")), str(run.config.get("method.name"))
    samples = "Samples are in none of them." if ":" not in method else (
        f"fedmpi sends no samples; what else is sent is named by the method, code of the consortium's own ({method})."
    )  # fmt: skip
    contents = ("what", "messages", "rounds", "bytes each", "bytes in all", "to")
    parts: list[Part] = [
        Text(
            f"{len(audit.lines)} messages left the rank that opens the site's files, {size_text(audit.total)} in all. "
            f"Each is a line, with its hash, of the record that is written on the site's own host. {samples}",
            main=True,
        ),
        Table(contents, _by_content(audit, site), "Messages by content"),
        Text(
            f"Changes of the model travel {FORMATS.get(form, 'in the type of its numbers')}. They are not encrypted by "
            "fedmpi, and tell something of the samples behind them: there is neither secure aggregation nor "
            "differential privacy.",
            main=True,
        ),
    ]
    if missing := set(site.took_part) - {line["round"] for line in audit.uploads}:
        text = f"The record lacks {len(missing)} of the {len(site.took_part)} rounds in which the site took part"
        parts.append(Text(f"{text}, round {min(missing)} first: it is not whole.", warning=True))
    if audit.shared:
        text = f"The same rank answers for {', '.join(audit.shared)}; the figures are for all of them."
        parts.append(Text(text, warning=True))
    hashes: list[list[Value]] = [
        [line["round"], str(line.get("time", "")), _bytes(line), str(line.get("sha256", ""))]
        for line in audit.uploads[-HASHES:]
    ]
    folded = f"{len(audit.uploads)} uploads{f', the last {HASHES}' if len(audit.uploads) > HASHES else ''}"
    head = ("round", "time (UTC)", "bytes", "SHA-256")
    parts.append(Table(head, hashes, "Hashes of what was sent for training", folded=folded))
    note = "A site that keeps a copy can tell that this page speaks of the same one."
    parts.append(Table(("file", "SHA-256"), [[str(audit.path), audit.sha256]], "The record itself", note))
    return Section("left", "What left the site", parts)


def _by_content(audit: Audit, site: Site) -> list[list[Value]]:
    kinds: dict[tuple[tuple[str, ...], str], list[Row]] = {}
    for line in audit.lines:
        kinds.setdefault((_what(line), str(line.get("to"))), []).append(line)
    rows = list[list[Value]]()
    for (what, to), lines in kinds.items():
        sizes, rounds = [*map(_bytes, lines)], [t for line in lines if isinstance(t := line.get("round"), int)]
        when, each = (
            "start" if not of else f"{min(of):,}" if min(of) == max(of) else f"{min(of):,} to {max(of):,}"
            for of in (rounds, sizes)
        )  # fmt: skip
        contents = "; ".join(NO_CLASSES if name == COUNTS and site.counts is None else _meaning(name) for name in what)
        whom = {"0": "server", "all": "all ranks"}.get(to, f"rank {to}")
        rows.append([contents, len(lines), when, each, sum(sizes), whom])
    return rows


def _meaning(name: str) -> str:
    """Return the meaning of a name in the audit file, with the name itself where it says more."""
    known = MEANING.get(name)
    return name if known is None else known if name.startswith("_") or name in known else f"{known} ({name})"


def _what(line: Row) -> tuple[str, ...]:
    what = line.get("what")
    return tuple(map(str, what)) if isinstance(what, list) else ()


def _bytes(line: Row) -> int:
    return int(line.get("bytes") or 0)


def _why_none(run: Run, site: Site) -> str:
    if not run.config.get("data.silos"):
        return "Nothing left it: all sites' samples lay on every rank's host. This was a rehearsal, not a federation."
    if len(run.environment.get("ranks") or ()) == 1:
        return "Nothing left it: one process opened the files of all sites. This was a rehearsal, not a federation."
    if run.config.get("data.audit") is False:
        return "No record was kept of what left the sites (data.audit: false)."
    rank = rank_of(run, site)
    if rank == 0:
        return "The server itself opened this site's files (server.trains): what it sends to itself leaves no host."
    return (
        f"The record lies on the site's own host: audit/rank-{rank}.jsonl in its copy of this run directory. Put it "
        "there beside the others, and make this page once more."
    )
