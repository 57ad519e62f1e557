"""Check whether several runs were made with the same code and data, by the digests in identity.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath
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
    >>> [list(shared_digests(identity | {"data.partition.scheme": repr(s)})) for s in ("iid", "file", "feature_noise")]
    [['(training data)'], ['(partition)', '(training data)'], []]
    """
    scheme = identity.get("data.partition.scheme")
    drawn = set() if scheme == "'file'" else {PARTITION}
    drawn |= {DATA} if scheme == "'feature_noise'" else set()
    drawn |= {DATA, TEST} if ":" in str(identity.get("data.source")) else set()
    shared = {PARTITION, DATA, TEST, "(initial weights)"} - drawn
    return {key: str(value) for key, value in identity.items() if key in shared or key.startswith("(plug-in ")}


def differences(runs: Iterable[tuple[Settings, Identity]]) -> dict[str, Pair]:
    """Return digest -> names of two runs that should have the same one, and do not."""
    first: dict[tuple[str, ...], tuple[str, str]] = {}
    differing: dict[str, Pair] = {}
    for settings, identity in runs:
        same_for_seeds = shared_digests(identity)
        for item in identity:
            if not (item in same_for_seeds or item in (CODE, TORCH, PARTITION, DATA, TEST)):
                continue
            seed = "" if item in same_for_seeds else str(identity.get("seed"))
            name, digest = first.setdefault(
                (item, *_of(item, settings, identity, seed)), (settings.name, identity[item])
            )
            if digest != identity[item]:
                differing.setdefault(item, (name, settings.name))
    return differing


def _of(item: str, settings: Settings, identity: Identity, seed: str) -> tuple[str, ...]:
    """Return the settings on which a digest depends."""
    if item in (CODE, TORCH):
        return ()
    if item.startswith("(plug-in "):
        places = sorted({name.rpartition(":")[0] for name in trust.foreign(settings.model_dump(mode="json")).values()})
        of_name = [place for place in places if _file(place) == item[9:-1]]
        return tuple(of_name or places)  # else it is a file that one of them imports
    if item == "(initial weights)":
        return (str(settings.init.source),)
    cut = item == DATA and not seed  # then the same whoever holds it
    data = [
        f"{k}: {identity[k]}"
        for k in identity
        if k.startswith("data.") and not (cut and k.startswith("data.partition."))
    ]
    return (seed, str(settings.data.root), *data)


def _file(place: str) -> str:
    """
    >>> _file("/home/me/mine.py"), _file("package.mine")
    ('mine.py', 'mine.py')
    """
    return PurePath(place).name if place.endswith(".py") else f"{place.rpartition('.')[2]}.py"
