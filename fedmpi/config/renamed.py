"""Renamed config keys and augmentations. A config with an old name causes an error that states the new name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Old dotted key -> new key.
RENAMED_KEYS = {
    "best": "tune",
    "best.over": "tune.grid",
    "cohort.draw": "cohort.sampling",
    "comm.wire": "comm.compression",
    "compute.pack": "compute.clients_per_pass",
    "leave_out": "exclude",
    "only": "include",
    "over": "grid",
    "server.trains": "server.trains_clients",
    "state.memory": "client_state.max_gib",
    "timeline": "trace",
    "track": "loggers",
    "train.keep_optim": "train.persist_optimizer",
}
# Items of data.augment: old name -> new name.
RENAMED_AUGMENTATIONS = {
    "centre_crop": "center_crop",
    "colour": "color_jitter",
    "crop": "random_crop",
    "flip": "horizontal_flip",
    "normalise": "normalize",
    "resized_crop": "random_resized_crop",
    "rotate": "random_rotation",
}


def find_old_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return {old key: new key} for those dotted keys in `keys` that were renamed."""
    return {key: RENAMED_KEYS[key] for key in keys if key in RENAMED_KEYS}


def find_old_names(data: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Return a message for each old name in a config, in the order of the config.

    Args:
        data: The settings. In a sweep file, settings are also nested in the axes and in include, exclude and tune.
        origins: Dotted key -> file and line (or override) in which it was set.
    """
    messages = []
    for key in _iterate_keys(data, ""):
        names, first = {}, key.partition(".")[0]
        for old, new in RENAMED_KEYS.items():
            # A key without a section may also be the name of an option elsewhere, except in the axes of a sweep.
            nested = "." in old or (old in ("timeline", "track") and first in ("over", "grid", "best", "tune"))
            if key == old or (nested and key.endswith(f".{old}")):
                names[old] = new
        if match := re.search(r"(?:^|\.)data\.augment\.\d+\.(\w+)$", key):
            names |= {old: new for old, new in RENAMED_AUGMENTATIONS.items() if old == match[1]}
        for old, new in names.items():
            set_key = key
            while set_key and set_key not in origins:  # the items of a list have the origin of the list
                set_key = set_key.rpartition(".")[0]
            messages.append(f"{origins.get(set_key, '')}: {old} was renamed to {new}")
    return messages


def _iterate_keys(tree: Any, prefix: str) -> Iterator[str]:
    """Yield the dotted keys of nested settings; for a string at position i of a list, also yield `i.STRING`."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        yield f"{prefix}{name}"
        if isinstance(tree, list) and isinstance(value, str):
            yield f"{prefix}{name}.{value}"
        yield from _iterate_keys(value, f"{prefix}{name}.")
