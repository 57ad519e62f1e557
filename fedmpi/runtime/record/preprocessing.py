"""preprocessing.json: how a run's rows were prepared, by which new rows are prepared for its model.

    {"format": 1, "kind": "table", ..., "augment": [...], "client_sites": [...], "targets": {...}}

The fields of the kind are those of its class (`fedmpi.data.preparation`). augment: the config's `data.augment`, of
which new rows go through what draws nothing, as test rows do. client_sites: the site of each client, where clients are
sites; `--client` takes these names. Of more than MANY clients they are there only where sites prepare their rows by
their own. targets: mean and deviation of the training targets by the name of each
site, or under "" for all, where the config standardises them: then the outputs of the model are standardised. The file
lies beside the model; with data.silos in state/SITE, where the site's rank writes it: what a site's rows say of their
columns stays there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.target_scale import TargetScale
from fedmpi.common.text import brief
from fedmpi.config.schema import Settings
from fedmpi.data.augment.chosen import operation
from fedmpi.data.augment.operation import Operation
from fedmpi.data.federated import Federated
from fedmpi.data.preparation import Preparation, from_facts
from fedmpi.runtime.record import durable
from fedmpi.runtime.record.lines import plain
from fedmpi.runtime.record.partition_file import MANY

NAME, FORMAT = "preprocessing.json", 1


@dataclass(frozen=True)
class Preprocessing:
    """How a run's rows were prepared."""

    preparation: Preparation
    augment: Sequence[Any] = ()
    client_sites: tuple[str, ...] = ()
    targets: Mapping[str, TargetScale] = field(default_factory=dict)

    @property
    def target_sites(self) -> tuple[str, ...]:
        """The sites that standardise targets by their own; () where none does, or all do alike."""
        return tuple(name for name in self.targets if name)

    def scales(self, sites: Sequence[str], rows: int) -> list[TargetScale] | None:
        """The scale of the targets of each of so many rows; None where targets are not standardised.

        sites: the site of each row, or of all of them; () where that is not known.
        """
        if not self.targets:
            return None
        if not self.target_sites:
            return [self.targets[""]] * rows
        allowed = f"sites: {brief(', '.join(self.target_sites), 200)}"
        if not len(sites):
            raise UserError(
                "targets are standardised by each site's own training rows (data.standardise_target: site): say whose "
                f"rows these are: --site NAME, in Python site=; {allowed}"
            )
        odd = next((name for name in sites if name not in self.targets), None)
        if odd is not None:
            raise UserError(f"there is no site {odd!r} in this run; {allowed}")
        found = [self.targets[name] for name in sites]
        return found * rows if len(found) == 1 else found

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of data.augment."""
        pairs = [(item, None) if isinstance(item, str) else next(iter(item.items())) for item in self.augment]
        return tuple(operation(name, given, f"data.augment.{i}", {}) for i, (name, given) in enumerate(pairs))

    def content(self) -> bytes:
        """What the file holds."""
        facts = {"format": FORMAT, **self.preparation.facts(), "augment": list(self.augment)}
        facts |= {"client_sites": list(self.client_sites)} if self.client_sites else {}
        facts |= {"targets": {name: asdict(scale) for name, scale in self.targets.items()}} if self.targets else {}
        return (json.dumps(plain(facts), indent=2, allow_nan=False) + "\n").encode()


def read(path: Path) -> Preprocessing:
    """Raises UserError for a file that is missing or damaged."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        form, augment, sites = facts.pop("format"), facts.pop("augment"), facts.pop("client_sites", [])
        if form != FORMAT:
            raise ValueError(f"its format is {form}, and this version of fedmpi reads {FORMAT}")
        targets = {name: TargetScale.from_facts(each) for name, each in facts.pop("targets", {}).items()}
        return Preprocessing(from_facts(facts), tuple(augment), tuple(sites), targets)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as the preprocessing of a run: {error}") from error


def of_run(settings: Settings, data: Federated) -> Preprocessing | None:
    """What rank 0 writes; None with data.silos, where each site writes its own."""
    if data.preparation is None:
        return None
    needed = data.preparation.site_names or any(data.target_scales)
    sites = data.site_names if needed or data.clients <= MANY else ()
    return Preprocessing(data.preparation, _augment(settings), sites, data.target_scales)


def write_own(folder: Path, settings: Settings, data: Federated) -> None:
    """Write what the sites that this rank opens have fitted, each into its folder of state/.

    Raises UserError where it cannot be written.
    """
    private = settings.output_mode == "private"
    for client, preparation in data.own_preparation.items():
        path = site_file(folder, data.site_names[client])
        try:
            path.parent.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)
            scale = data.target_scales.get("", data.target_scales.get(data.site_names[client]))
            targets = {} if scale is None else {"": scale}
            own = Preprocessing(preparation, _augment(settings), targets=targets)
            durable.write(path, own.content(), private)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}; free some space there") from error


def site_file(run: Path, site: str) -> Path:
    """Where a site's rank writes how the site's rows were prepared."""
    return run / "state" / site / NAME


def find_own(run: Path, silos: Sequence[str], site: str | None) -> Path:
    """The file by which a site's rows are prepared; without a name that of any, where all sites prepare theirs alike.

    Raises UserError where there is none, or sites differ and none is named.
    """
    if site is not None and site not in silos:
        raise UserError(f"there is no site {site!r} in this run; sites: {', '.join(silos)}")
    found = _there([site_file(run, name) for name in silos if site in (None, name)])
    if len({path.read_bytes() for path in found}) > 1:
        raise UserError(
            f"each site of this run prepares its rows by its own training rows; say whose these are: --client K or "
            f"--site NAME, in Python client= or site=; sites: {', '.join(silos)}"
        )
    return found[0]


def _there(paths: Iterable[Path]) -> list[Path]:
    paths = list(paths)
    found = [path for path in paths if path.is_file()]
    if not found:
        raise UserError(
            f"{paths[0]} is not here: how a site prepares its rows stays with the site, on the host that trained it; "
            "predict there, or copy the file from there"
        )
    return found


def _augment(settings: Settings) -> tuple[Any, ...]:
    return tuple(settings.data.augment)
