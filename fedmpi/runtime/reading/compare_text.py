"""What `fedmpi compare` shows: the result first, then what the runs were made with; values side by side where they fit,
else one below the other."""

from __future__ import annotations

from typing import Any

from fedmpi.common.text import brief, count

GROUPS = ("settings", "data", "code", "versions", "machine")
MOST, LONG = 20, 400  # differences of a group; letters of a value
Facts = dict[str, Any]


def lines(found: Facts, width: int) -> list[str]:
    return _sweeps(found, width) if "runs" in found else [f"A  {found['a']}", f"B  {found['b']}", *_run(found, width)]


def verdict(found: Facts) -> str:
    """One line on the results."""
    many = found["rounds"]
    if found["same"]:
        return f"the same results in all {count(many[0], 'round')}"
    if found["hash"]:
        return f"the models part in round {found['hash']['round']}"
    if found["figure"]:
        return f"{found['figure']['name']} differs from round {found['figure']['round']} on"
    if found["client"]:
        return f"client {found['client']['client']} differs from round {found['client']['round']} on"
    if found["model"]:
        return "the final models differ, and no round does"
    return f"the same results as far as both go: A has {count(many[0], 'round')}, B {many[1]}"


def _run(found: Facts, width: int) -> list[str]:
    said = [verdict(found)]
    if found["rounds"][0] != found["rounds"][1] and not said[0].startswith("the same"):
        said.insert(0, f"rounds: A has {found['rounds'][0]}, B {found['rounds'][1]}")
    if found["models_same"] and not found["same"]:
        said += [f"  the models have the same SHA-256 in all {count(found['models_same'], 'round')} that both have"]
    if found["hash"]:
        said += _values("  sha256", [value[:12] for value in found["hash"]["values"]], width)
    if found["figure"]:
        one = found["figure"]
        said += _values(f"  {one['name']}, round {one['round']}", one["values"], width)
        said += [brief(f"  and in that round {', '.join(one['others'])}", width)] if one["others"] else []
    if found["client"] and "name" in found["client"]:
        one = found["client"]
        said += _values(f"  client {one['client']}, {one['name']}, round {one['round']}", one["values"], width)
    if found["model"] and not found["hash"]:
        said += _values("  model.safetensors", [value[:12] for value in found["model"]], width)
    alike = [group for group in GROUPS if not found[group]]
    for group in GROUPS:
        rows = list(found[group].items())
        said += [f"{group}: {count(len(rows), 'difference')}"] if rows else []
        for name, values in rows[:MOST]:
            said += _values(f"  {name}", values, width)
        said += [f"  and {len(rows) - MOST} more (--json shows all)"] if len(rows) > MOST else []
    return [*said, *([f"the same: {', '.join(alike)}"] if alike else [])]


def _values(name: str, values: list[Any], width: int) -> list[str]:
    a, b = ("-" if value is None else brief(str(value), LONG) for value in values)
    line = f"{name}: {a} | {b}"
    return [line] if len(line) <= width else [f"{name}:", f"    A  {a}", f"    B  {b}"]


def _sweeps(found: Facts, width: int) -> list[str]:
    said = [f"A  {found['a']}", f"B  {found['b']}"]
    parted = {name: run for name, run in found["runs"].items() if not run["same"]}
    for name, run in parted.items():
        said += [f"{name}: {verdict(run)}"]
        changed = [key for group in GROUPS[:3] for key in run[group]]
        said += [brief(f"  differ: {', '.join(changed)}", width)] if changed else []
    for side, names in zip("AB", found["only"], strict=True):
        said += [f"only in {side}: {', '.join(names)}"] if names else []
    alike = len(found["runs"]) - len(parted)
    return [*said, f"{alike} of {count(len(found['runs']), 'run')} that both have with the same results"]
