"""The guarantee of a run in words, for its model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEIGHBOURS = {
    "poisson": "added or removed",
    "without_replacement": "replaced by other data",
    "none": "replaced by an upload of zero",
}
NOT_COVERED = "not covered are durations, state/, the partition files and metrics on rows of the sites"


def describe_privacy(
    privacy: Mapping[str, Any], epsilon: float | None, rounds: int, secure_aggregation: bool
) -> tuple[str, str]:
    """Return a sentence about differential privacy, and a sentence about what the server receives.

    Args:
        privacy: the content of privacy.json; {} for a run without differential privacy.
        epsilon: epsilon after the last round; None if no round was released.
        rounds: the number of rounds.
    """
    hidden = (
        "Secure aggregation hides the updates of single sites from the server, which learns their sum."
        if secure_aggregation
        else "The server receives the update of each site; there is no secure aggregation."
    )
    if not privacy:
        return "The run has no differential privacy.", hidden
    if epsilon is None:
        return "The run has released nothing yet.", hidden
    who, change = "each site", NEIGHBOURS.get(str(privacy.get("sampling")), "")
    if privacy.get("unit") == "sample":
        who, change = "each training sample", "added or removed"
    return (
        f"All models of the run together have differential privacy for {who}: epsilon {epsilon:.4g} at delta "
        f"{privacy['delta']:g} after {rounds} rounds, where two data sets differ in the data of one "
        f"{'sample' if who.endswith('sample') else 'site'}, which are {change}; {NOT_COVERED}.",
        hidden,
    )
