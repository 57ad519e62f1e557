"""`fedmpi report RUN_DIR --sites`: a page for each site, and the model card; HTML that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fedmpi.analysis.pages.consortium import about as statements
from fedmpi.analysis.pages.consortium import alone as baseline
from fedmpi.analysis.pages.consortium import card, page_of_site
from fedmpi.analysis.pages.consortium.sites import Site, sites
from fedmpi.analysis.pages.drawing.svg import draw
from fedmpi.analysis.pages.page import page
from fedmpi.analysis.pages.run import Run
from fedmpi.analysis.pages.runs import Runs, read
from fedmpi.common.errors import UserError
from fedmpi.runtime.record import durable

FOLDER, CARD = "sites", "model-card"


def analyse(directory: Path, alone: Path | None, about: Path | None, say: Callable[[str], None]) -> None:
    """Write DIRECTORY/sites/*.html.

    Raises:
        UserError: no run, several runs, no sites; a baseline or statements that are none; no place to write to.
    """
    run = _one(read([directory]))
    everybody = sites(run)
    other = baseline.given(run, alone) if alone is not None else baseline.found(run)
    said = statements.read(about) if about is not None else {}
    folder, private = run.path / FOLDER, run.config.get("output_mode") == "private"
    of = f"{run.name}: {run.config.get('method.name')} on {run.config.get('data.source')}"
    pages = {f"{CARD}.html": page(f"Model card: {run.name}", [of], card.sections(run, everybody, other, said), draw)}
    for site, name in zip(everybody, _files(everybody), strict=True):
        own = page_of_site.sections(run, site, everybody, other)
        pages[name] = page(f"{site.name} in {run.name}", [of, "For this site; it names no other."], own, draw)
    try:
        folder.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
        for name, content in pages.items():
            durable.write(folder / name, content.encode(), private)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}; the pages were not written") from error
    if other is None:
        say(f"no run in which the sites train alone was found beside this one. To make one: {baseline.how_to(run)}")
    else:
        say(f"compared with sites that train alone: {other.run.path}")
    say(f"written: {folder}/{CARD}.html, and a page for each of {len(everybody)} sites")


def _one(runs: Runs) -> Run:
    if runs.alone is None:
        names = ", ".join(run.path.name for run in runs.all[:5])
        raise UserError(f"--sites tells of one run, and there are {len(runs.all)} ({names}); name one of them")
    return runs.alone


def _files(everybody: list[Site]) -> list[str]:
    """Names of files that any system can have, no two alike."""
    found = list[str]()
    for site in everybody:
        plain = re.sub(r"[^a-z0-9_-]+", "-", site.name.lower()).strip("-")[:60] or f"site-{site.client}"
        found.append(f"{plain}-{site.client}.html" if plain == CARD or f"{plain}.html" in found else f"{plain}.html")
    return found
