"""The files of the user's own code that a run is made with: compared by all ranks, copied into the run directory.

They are those that the config names, and those that define its method, task and module. Copies are for people to read,
and for who loads the run when the files themselves are gone (kept_copies.py). Modules that they import from beside them
(common/beside.py) are compared, but not copied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedmpi.common import beside, registry
from fedmpi.common.blame import PACKAGE, is_users_file
from fedmpi.config import Settings
from fedmpi.runtime import rank_agreement, trust


def files(settings: Settings, *made: Any) -> dict[Path, bytes]:
    """Path -> content of each, in the order of the config; `made`: objects whose classes are looked at, too."""
    named = (_file(name) for name in trust.foreign(settings.resolved()).values())
    found = dict.fromkeys(path.resolve() for path in (*named, *_behind(*made)) if path is not None)
    return {path: path.read_bytes() for path in found if path.is_file()}


def digests(found: Mapping[Path, bytes]) -> dict[str, str]:
    """What ranks compare, and a resumed run. Where the files lie may differ."""
    known = copies(found)
    own = {f"(plug-in {name})": rank_agreement.digest(content) for name, content in known.items()}
    for name, path in zip(known, found, strict=True):
        for module, file in beside.imported(path).items():
            if file not in found:
                own[f"(module {module} of plug-in {name})"] = rank_agreement.digest(file.read_bytes())
    return own


def copies(found: Mapping[Path, bytes]) -> dict[str, bytes]:
    """File name -> content; of files of one name the second is NAME-2.py."""
    out: dict[str, bytes] = {}
    for path, content in found.items():
        twins = sum(path.name == other.name for other in list(found)[: list(found).index(path)])
        out[f"{path.stem}-{twins + 1}{path.suffix}" if twins else path.name] = content
    return out


def _file(name: str) -> Path | None:
    place = name.rpartition(":")[0]
    if registry.is_file(name):
        return Path(place)
    found = getattr(sys.modules.get(place), "__file__", None)
    return Path(found) if found and not found.startswith(f"{PACKAGE}/") else None


def _behind(*made: Any) -> Iterator[Path]:
    for each in made:
        found = getattr(sys.modules.get(type(each).__module__), "__file__", None)
        if found and is_users_file(found):
            yield Path(found)
