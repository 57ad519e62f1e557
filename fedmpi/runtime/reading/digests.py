"""Check whether several runs were made with the same code and data, by the digests in identity.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedmpi.config import Settings
from fedmpi.runtime import trust

CODE, TORCH, PARTITION = "(code of fedmpi)", "(torch version)", "(partition)"
DATA, TEST = "(training data)", "(test data)"
Identity = Mapping[str, Any]
Pair = tuple[str, str]  # the names of two runs


def shared_digests(identity: Identity) -> dict[str, str]:
    """Return the digests that runs share if their settings differ in the seed alone.

    A data source of the user's own may depend on the seed.

    >>> identity = {"(partition)": "a", "(training data)": "b"}
    >>> [list(shared_digests(identity | {"data.partition.scheme": repr(s)})) for s in ("iid", "file")]
    [['(training data)'], ['(partition)', '(training data)']]
    """
    scheme = identity.get("data.partition.scheme")
    drawn = set() if scheme == "'file'" else {PARTITION}
    drawn |= {DATA, TEST} if ":" in str(identity.get("data.source")) else set()
    shared = {PARTITION, DATA, TEST, "(initial weights)"} - drawn
    return {key: str(value) for key, value in identity.items() if key in shared or key.startswith("(plug-in ")}


def differences(runs: Iterable[tuple[Settings, Identity]]) -> dict[str, Pair]:
    """Return digest -> names of two runs that should have the same one, and do not."""
    first: dict[tuple[str, ...], tuple[str, str]] = {}
    differing: dict[str, Pair] = {}
    for settings, identity in runs:
        same_for_seeds = shared_digests(identity)
        for item in (key for key in identity if key in same_for_seeds or key in (CODE, TORCH, PARTITION, DATA, TEST)):
            seed = "" if item in same_for_seeds else str(identity.get("seed"))
            key = (item, *_depends_on(item, settings, identity, seed))
            name, digest = first.setdefault(key, (settings.name, identity[item]))
            if digest != identity[item]:
                differing.setdefault(item, (name, settings.name))
    return differing


def _depends_on(item: str, settings: Settings, identity: Identity, seed: str) -> tuple[str, ...]:
    """Return the settings on which a digest depends."""
    if item in (CODE, TORCH):
        return ()
    if item.startswith("(plug-in "):
        return tuple(sorted(trust.foreign(settings.model_dump(mode="json")).values()))
    if item == "(initial weights)":
        return (str(settings.init.source),)
    left_out = ("data.partition.",) if item == DATA and not seed else ()  # the same whoever has it
    keys = [key for key in identity if key.startswith("data.") and not key.startswith(left_out)]
    return (seed, str(settings.data.root), *(f"{key}: {identity[key]}" for key in keys))
