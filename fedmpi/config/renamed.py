"""Find config keys of earlier versions, and report their new names.

An old key is an error whose message names the new key. All old keys of a config are reported together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fedmpi.config.yaml_source import ConfigLayer

# Old dotted key -> new one. Keys of a section stand before the section.
RENAMED_KEYS = {
    "best.over": "tune.grid",
    "best": "tune",
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
# Key -> {old value: new one}.
RENAMED_VALUES = {"cohort.sampling": {"cycles": "cyclic"}}
# Items of data.augment: old name -> new one.
RENAMED_AUGMENTATIONS = {
    "centre_crop": "center_crop",
    "colour": "color_jitter",
    "crop": "random_crop",
    "flip": "horizontal_flip",
    "normalise": "normalize",
    "resized_crop": "random_resized_crop",
    "rotate": "random_rotation",
}

Tree = dict[str, Any]


def find_old_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return {old key: new key} for those of the given dotted keys that were renamed."""
    return {key: RENAMED_KEYS[key] for key in keys if key in RENAMED_KEYS}


def use_new_names(document: ConfigLayer) -> None:
    """Replace old keys and values of a config by the new ones in place, and add a message on each to its problems.

    Thanks to the new names the rest of the config can be validated, so that one message reports all mistakes. The
    problems make loading fail.
    """
    lines = list(dict.fromkeys(document.origins.values()))
    messages = [*_rename_in_part(document, document.data, "")]
    for tree, start in _iterate_sweep_parts(document.data):
        messages += _rename_in_part(document, tree, start)
    messages.sort(key=lambda message: lines.index(message[0]) if message[0] in lines else -1)
    document.problems += [f"{where}: {text}" for where, text in messages]


def _rename_in_part(document: ConfigLayer, tree: Tree, start: str) -> list[tuple[str, str]]:
    """Rename the keys and values in one part of a config in place.

    Args:
        document: The config.
        tree: The part, {key: value}; keys may be dotted, like the names of axes.
        start: The dotted key of the part, followed by a dot; "" for the entire config.

    Returns:
        For each old name, where it was written, and a message.
    """
    messages = []
    for old, new in RENAMED_KEYS.items():
        holder, last = _find_holder(tree, old)
        if holder is None:
            continue
        value, where = holder.pop(last), document.origins.get(start + old, "")
        messages.append((where, f"{old} was renamed to {new}"))
        _set_key(tree, [new] if last == old else new.split("."), value)
        for key in [key for key in document.origins if f"{key}.".startswith(f"{start}{old}.")]:
            document.origins[start + new + key[len(start + old) :]] = document.origins.pop(key)
        first = old.partition(".")[0]
        if first != new.partition(".")[0] and tree.get(first) == {}:  # the section has no other keys
            del tree[first]
    for key, values in RENAMED_VALUES.items():
        holder, last = _find_holder(tree, key)
        value_or_list = holder[last] if holder is not None else None
        for value in value_or_list if isinstance(value_or_list, list) else [value_or_list]:
            if isinstance(value, str) and value in values:
                where = document.origins.get(start + key, "")
                messages.append((where, f"{key}: {value} was renamed to {values[value]}"))
        if holder is not None and isinstance(value_or_list, str):
            holder[last] = values.get(value_or_list, value_or_list)
    return messages + _rename_augmentations(document, tree, start)


def _rename_augmentations(document: ConfigLayer, tree: Tree, start: str) -> list[tuple[str, str]]:
    """Rename the items of data.augment in one part of a config; for arguments and result see `_rename_in_part`."""
    holder, last = _find_holder(tree, "data.augment")
    augmentations = holder[last] if holder is not None else None
    items: list[Any] = augmentations if isinstance(augmentations, list) else []
    messages, key = [], f"{start}data.augment"
    for i, item in enumerate(items):
        name = next(iter(item), None) if isinstance(item, dict) else item
        if isinstance(name, str) and name in RENAMED_AUGMENTATIONS:
            new = RENAMED_AUGMENTATIONS[name]
            where = document.origins.get(f"{key}.{i}.{name}") or document.origins.get(key, "")
            messages.append((where, f"data.augment: {name} was renamed to {new}"))
            items[i] = {new if old == name else old: value for old, value in item.items()} if item is not name else new
    return messages


def _iterate_sweep_parts(data: Tree) -> Iterator[tuple[Tree, str]]:
    """Yield the parts of a sweep file that contain config keys, with the argument `start` of `_rename_in_part`."""
    tune = data.get("tune")
    tune = tune if isinstance(tune, dict) else {}
    for start, axes in (("grid.", data.get("grid")), ("tune.grid.", tune.get("grid"))):
        if isinstance(axes, dict):
            yield axes, start
            for name, labels in axes.items():
                for label, tree in labels.items() if isinstance(labels, dict) else ():
                    if isinstance(tree, dict):
                        yield tree, f"{start}{name}.{label}."
    excluded = data.get("exclude")
    entries = enumerate(excluded if isinstance(excluded, list) else ())
    chosen = {"include.": data.get("include"), "tune.using.": tune.get("using")}
    for start, tree in [*chosen.items(), *((f"exclude.{i}.", entry) for i, entry in entries)]:
        if isinstance(tree, dict):
            yield tree, start


def _find_holder(tree: Tree, dotted: str) -> tuple[Tree | None, str]:
    """Return the mapping that contains a dotted key, or None, and the last part of the key.

    The axes of a sweep have dotted names, so the tree may contain the entire key as one part.
    """
    if dotted in tree:
        return tree, dotted
    *parents, last = dotted.split(".")
    subtree: Any = tree
    for part in parents:
        subtree = subtree.get(part) if isinstance(subtree, dict) else None
    return (subtree if isinstance(subtree, dict) and last in subtree else None), last


def _set_key(tree: Tree, path: list[str], value: Any) -> None:
    """Set a key of a tree unless it is already set; mappings are merged. path: the parts of the key."""
    *parents, last = path
    for part in parents:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            return
        tree = child
    current = tree.setdefault(last, value)
    if isinstance(current, dict) and isinstance(value, dict):
        tree[last] = value | current
