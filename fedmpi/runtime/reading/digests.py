"""Whether runs that are put together were made with the same code and data, by the digests in identity.json."""

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


def fixed(made: Identity) -> dict[str, str]:
    """Those that runs have in common whose settings differ in the seed alone. A source of the user's own may draw from
    the seed.

    >>> made = {"(partition)": "a", "(training data)": "b"}
    >>> [list(fixed(made | {"data.partition.scheme": repr(s)})) for s in ("iid", "file", "feature_noise")]
    [['(training data)'], ['(partition)', '(training data)'], []]
    """
    scheme = made.get("data.partition.scheme")
    drawn = set() if scheme == "'file'" else {PARTITION}
    drawn |= {DATA} if scheme == "'feature_noise'" else set()
    drawn |= {DATA, TEST} if ":" in str(made.get("data.source")) else set()
    kept = {PARTITION, DATA, TEST, "(initial weights)"} - drawn
    return {key: str(value) for key, value in made.items() if key in kept or key.startswith("(plug-in ")}


def differences(runs: Iterable[tuple[Settings, Identity]]) -> dict[str, Pair]:
    """Digest -> two runs that should have the same one, and have not."""
    first: dict[tuple[str, ...], tuple[str, str]] = {}
    found: dict[str, Pair] = {}
    for settings, made in runs:
        asked = fixed(made)
        for item in made:
            if not (item in asked or item in (CODE, TORCH, PARTITION, DATA, TEST)):
                continue
            seed = "" if item in asked else str(made.get("seed"))
            name, digest = first.setdefault((item, *_of(item, settings, made, seed)), (settings.name, made[item]))
            if digest != made[item]:
                found.setdefault(item, (name, settings.name))
    return found


def _of(item: str, settings: Settings, made: Identity, seed: str) -> tuple[str, ...]:
    """What a digest follows from, in words."""
    if item in (CODE, TORCH):
        return ()
    if item.startswith("(plug-in "):
        places = sorted({name.rpartition(":")[0] for name in trust.foreign(settings.model_dump(mode="json")).values()})
        of_name = [place for place in places if _file(place) == item[9:-1]]
        return tuple(of_name or places)  # else it is a file that one of them imports
    if item == "(initial weights)":
        return (str(settings.init.source),)
    cut = item == DATA and not seed  # then the same whoever holds it
    data = [f"{k}: {made[k]}" for k in made if k.startswith("data.") and not (cut and k.startswith("data.partition."))]
    return (seed, str(settings.data.root), *data)


def _file(place: str) -> str:
    """
    >>> _file("/home/me/mine.py"), _file("package.mine")
    ('mine.py', 'mine.py')
    """
    return PurePath(place).name if place.endswith(".py") else f"{place.rpartition('.')[2]}.py"
