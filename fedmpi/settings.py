"""All settings of a run, and where each of them was written."""

import inspect
import re
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, Field, PrivateAttr

from fedmpi.sections import (
    Cohort,
    Comm,
    Compute,
    Data,
    Evaluate,
    Method,
    Model,
    Place,
    Section,
    Server,
    Task,
    Train,
)


def _directory_name(name: str) -> str:
    if not re.fullmatch(r"[^/\\\s.][^/\\\s]*", name):
        raise ValueError(f"{name!r} cannot name a directory; no spaces or slashes, no dot in front")
    return name


class Settings(Section):
    """All of a run's settings; made by `fedmpi.config.load`."""

    name: Annotated[str, AfterValidator(_directory_name)] = "run"  # the run directory is output/name
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    rounds: Annotated[int, Field(ge=0)] = 20  # 0 = only initialise
    output: Place = Path("runs")
    data: Data
    model: Model
    task: Task = Task()
    method: Method
    train: Train = Train()
    cohort: Cohort = Cohort()
    server: Server = Server()
    evaluate: Evaluate = Evaluate()
    comm: Comm = Comm()
    compute: Compute = Compute()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def origin(self, key: str) -> str:
        """Where a dotted key, else its section, was written: "run.yaml:7", "command line: train.lr=1"; or ""."""
        return self._origins.get(key) or self._origins.get(key.rpartition(".")[0], "")

    def origins(self, section: str) -> dict[str, str]:
        """The same for the keys of one section, `options.check` asks for it: {"mu": "run.yaml:9"}."""
        start = f"{section}."
        return {key[len(start) :]: where for key, where in self._origins.items() if key.startswith(start)}

    def resolved(self) -> dict[str, Any]:
        """All settings, defaults included, as plain values that YAML can hold; loading them gives the same settings."""
        return self.model_dump(mode="json")

    def digest_items(self) -> dict[str, str]:
        """Dotted key -> repr(value): what ranks compare. Not data.root and output: hosts may have their own."""
        items = _flat(self.resolved(), "")
        return {key: text for key, text in items.items() if key not in ("data.root", "output")}


def section(path: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The class of the section at a path of keys, () for all; None where there is no section."""
    known: Any = Settings
    for part in path:
        fields = getattr(known, "model_fields", {})
        if part not in fields:
            return None
        kind = fields[part].annotation
        known = next((each for each in (kind, *get_args(kind)) if inspect.isclass(each)), None)
    return known if inspect.isclass(known) and issubclass(known, BaseModel) else None


def _flat(tree: dict[str, Any], path: str) -> dict[str, str]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{path}{key}."))
        else:
            flat[f"{path}{key}"] = repr(value)
    return flat
