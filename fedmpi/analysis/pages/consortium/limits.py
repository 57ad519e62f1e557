"""What a model card must not leave unsaid: limits that the record of a run shows."""

from __future__ import annotations

from collections.abc import Sequence

from fedmpi.analysis.pages.consortium.alone import Alone
from fedmpi.analysis.pages.consortium.sites import Site
from fedmpi.analysis.pages.run import Run

FEW = 100  # test samples


def limits(run: Run, sites: Sequence[Site], alone: Alone | None) -> list[str]:
    """One sentence each; those that hold for every model first."""
    said = [
        "It was tested on samples of the sites that trained it. How it does elsewhere is not known; a site that took "
        "no part should test it first.",
        "It is one run with one seed: another one would have somewhat other figures.",
        "Whether its settings were chosen by looking at these very test samples the record cannot tell; if so, the "
        "figures are too good.",
    ]
    few = [
        f"{s.name} ({s.own.samples}, one is {100 / s.own.samples:.1f} %)"
        for s in sites
        if s.own and 0 < s.own.samples < FEW
    ]
    if few:
        said.append(f"Few test samples, so that figures are coarse: {', '.join(few)}.")
    single = [s.name for s in sites if s.counts and sum(n > 0 for n in s.counts) == 1]
    if single:
        said.append(f"Training samples of one class alone: {', '.join(single)}.")
    rare = [
        f"class {c} at {s.name} ({n})"
        for s in sites
        for c, n in enumerate(s.counts or ())
        if 0 < n < 10 and sum(s.counts or ()) > 0
    ]
    if rare:
        said.append(f"Fewer than 10 training samples: {', '.join(rare[:8])}{' and more' if len(rare) > 8 else ''}.")
    largest = max(sites, key=lambda s: s.share or 0.0)
    if len(sites) > 2 and (largest.share or 0) > 0.5:
        said.append(f"More than half of the weight was {largest.name}'s.")
    absent = [s.name for s in sites if not s.took_part]
    if absent:
        said.append(f"Never took part in a round: {', '.join(absent)}.")
    said += _of_the_run(run, sites)
    if alone is None:
        said.append("Nobody has trained alone for comparison, so it is not known who is better off by taking part.")
    said.append(
        "Figures are means over a site's samples. Whether it serves all groups of people alike within a site (sex, "
        "age, device) was not looked at."
    )
    return said


def _of_the_run(run: Run, sites: Sequence[Site]) -> list[str]:
    summary, said = run.summary, list[str]()
    if not run.complete:
        said.append(f"The run did not end as planned: {run.state}.")
    if (t := summary.get("diverged")) is not None:
        said.append(f"Training came apart from round {t} on.")
    refused = [f"{s.name} ({len(s.refused)})" for s in sites if s.refused]
    if refused:
        said.append(f"Uploads that did not count, as they could not be meant: {', '.join(refused)}.")
    clipped = [f"{s.name} ({len(s.clipped)})" for s in sites if s.clipped]
    if clipped:
        said.append(f"Uploads that were taken at a bound, as they were far longer than others: {', '.join(clipped)}.")
    if run.faults:
        said.append(f"Ranks were lost on the way ({len(run.faults)} times); faults.jsonl says which rounds lack whom.")
    if (best := summary.get("best_model")) and isinstance(best, dict):
        said.append(
            f"{best.get('file')} was chosen by {best.get('figure')} (round {best.get('round')}); the figures here are "
            "those of the last round's model."
        )
    if isinstance(run.environment.get("git"), dict) and run.environment["git"].get("modified"):
        said.append("The code had changes that no commit holds.")
    return said
