"""Write and read the files of a run directory that describe its data: the partition, and the preprocessing of rows.

partition.json contains the `sizes` (numbers of training samples) and `label_counts` of all clients. If there are more
than 1,000 clients, partition.npz contains them instead: the sizes are the differences of its `offsets`.

preprocessing.json describes how new rows are prepared for the model:

    {"format": 1, "kind": "table", ..., "augment": [...], "client_sites": [...], "targets": {...}}

The other fields depend on `kind`: they are the fields of the class for this kind in `fedmpi.data.preprocessing`.

augment       data.augment of the config. Operations without randomness are applied to new rows, as to test rows
client_sites  the site of each client if clients are sites; the option `--client` takes these names. For more than
              1,000 clients it is written only if each site prepares rows with its own statistics
targets       if the config standardises targets: mean and standard deviation of the training targets, for each site
              name, or for all sites under the key ""; the outputs of the model are then standardised, too

The run directory contains this file next to the model. With data.silos, each site has its own file in state/SITE,
which the site's rank writes, so that statistics of the site's columns do not leave its host.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.target_scale import TargetScale
from fedmpi.common.text import shorten
from fedmpi.config.schema import Settings
from fedmpi.data.batches import ShardsOfAllClients
from fedmpi.data.federated import FederatedData
from fedmpi.data.partitions.base import Partition
from fedmpi.data.preprocessing import Preparation, preparation_from_dict
from fedmpi.data.transforms.base import Transform
from fedmpi.data.transforms.pipeline import make_transform
from fedmpi.runtime.record.run_dir import RunDirectory

MAX_CLIENTS_IN_JSON = 1_000
PREPROCESSING, FORMAT = "preprocessing.json", 1


# ---- partition.json and partition.npz ----
def write_partition(directory: RunDirectory, scheme: str, seed: int, data: FederatedData) -> None:
    """Write partition.json and partition.npz; in silo mode only the former, as samples have no common numbering."""
    sizes = data.train_sizes
    counts = data.label_counts if data.label_counts_shared and data.label_counts.any() else None
    facts: dict[str, Any] = {"scheme": scheme, "seed": seed, "clients": len(sizes)}
    in_json = data.parts is None or len(sizes) <= MAX_CLIENTS_IN_JSON
    directory.write_json("partition.json", facts | ({"sizes": sizes, "label_counts": counts} if in_json else {}))
    if data.parts is None:
        return
    arrays = {"indices": data.parts.order, "offsets": data.parts.offsets}
    if isinstance(data.validation, ShardsOfAllClients):
        rows = data.validation.rows
        assert isinstance(rows, Partition)
        arrays |= {"validation_indices": rows.order, "validation_offsets": rows.offsets}
    if not in_json and counts is not None:
        arrays["label_counts"] = counts.astype(np.min_scalar_type(counts.max()))
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # numpy's stub takes allow_pickle for the first one
    directory.write("partition.npz", buffer.getvalue())


def read_client_sizes(run_dir: Path, facts: dict[str, Any]) -> tuple[Any, Any]:
    """Return the numbers of training samples, and the label counts, of all clients; None for those not recorded.

    facts: the content of partition.json.

    Returns:
        For N clients and c classes, lists of shapes (N,) and (N, c), or arrays if they are read from partition.npz.

    Raises:
        ValueError: The values are in partition.npz, but this file cannot be read.
    """
    if "sizes" in facts or not facts:
        return facts.get("sizes"), facts.get("label_counts")
    try:
        with np.load(run_dir / "partition.npz", allow_pickle=False) as arrays:
            return np.diff(arrays["offsets"]), arrays.get("label_counts")
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"partition.npz cannot be read ({error})") from error


# ---- preprocessing.json ----
@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of a run's rows, as described by preprocessing.json."""

    preparation: Preparation
    augment: Sequence[Any] = ()
    client_sites: tuple[str, ...] = ()
    targets: Mapping[str, TargetScale] = field(default_factory=dict)

    @property
    def target_sites(self) -> tuple[str, ...]:
        """The names of the sites that standardise targets with their own statistics; () if there are none."""
        return tuple(name for name in self.targets if name)

    def find_target_scales(self, sites: Sequence[str], rows: int) -> list[TargetScale] | None:
        """Return the mean and standard deviation of the targets for each row; None if targets are not standardised.

        Args:
            sites: The site of each row, or one site for all rows; () if unknown.
            rows: The number of rows.

        Raises:
            UserError: Sites have their own statistics, but the site of a row is missing or unknown.
        """
        if not self.target_sites:
            return [self.targets[""]] * rows if self.targets else None
        unknown = next((name for name in sites if name not in self.targets), None)
        if unknown is not None or not len(sites):
            problem = (
                f"site {unknown!r} does not exist in this run" if len(sites) else "the site of these rows is missing"
            )
            raise UserError(
                f"{problem}; set --site NAME (in Python site=NAME), because each site standardises its targets with "
                "its own training rows (data.standardise_target: site); sites: "
                f"{shorten(', '.join(self.target_sites), 200)}"
            )
        scales = [self.targets[name] for name in sites]
        return scales * rows if len(scales) == 1 else scales

    @property
    def augmentations(self) -> tuple[Transform, ...]:
        """The augmentation operations of data.augment."""
        pairs = [(item, None) if isinstance(item, str) else next(iter(item.items())) for item in self.augment]
        return tuple(make_transform(name, given, f"data.augment.{i}", {}) for i, (name, given) in enumerate(pairs))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of preprocessing.json."""
        facts = {"format": FORMAT, **self.preparation.to_dict(), "augment": self.augment}
        facts |= {"client_sites": self.client_sites} if self.client_sites else {}
        facts |= {"targets": {name: asdict(scale) for name, scale in self.targets.items()}} if self.targets else {}
        return facts


def read_preprocessing(path: Path) -> Preprocessing:
    """Read a preprocessing.json file. Raises UserError if it is missing or damaged, or has another format."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        form, augment, sites = facts.pop("format"), facts.pop("augment"), facts.pop("client_sites", [])
        if form != FORMAT:
            raise ValueError(f"its format is {form}, but this version of fedmpi reads format {FORMAT}")
        targets = {name: TargetScale.from_dict(each) for name, each in facts.pop("targets", {}).items()}
        return Preprocessing(preparation_from_dict(facts), tuple(augment), tuple(sites), targets)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as the preprocessing of a run: {error}") from error


def write_preprocessing(directory: RunDirectory, settings: Settings, data: FederatedData) -> None:
    """Write preprocessing.json to the run directory, if one file describes the rows of all sites.

    Only rank 0 calls this.
    """
    if data.preparation is not None:
        by_site = data.preparation.site_names or any(data.target_scales)
        sites = data.site_names if by_site or data.clients <= MAX_CLIENTS_IN_JSON else ()
        prepared = Preprocessing(data.preparation, settings.data.augment, sites, data.target_scales)
        directory.write_json(PREPROCESSING, prepared.to_dict())


def write_own_preprocessing(folder: Path, settings: Settings, data: FederatedData) -> None:
    """Write state/SITE/preprocessing.json for each of this rank's sites (data.silos)."""
    directory = RunDirectory(folder)
    for client, preparation in data.silo_preparations.items():
        site = data.site_names[client]
        scale = data.target_scales.get("", data.target_scales.get(site))
        own = Preprocessing(preparation, settings.data.augment, targets={} if scale is None else {"": scale})
        directory.write_json(str(site_preprocessing_path(Path(), site)), own.to_dict())


def site_preprocessing_path(run: Path, site: str) -> Path:
    """Return the path of a site's own preprocessing.json in a run directory."""
    return run / "state" / site / PREPROCESSING


def find_own_preprocessing(run: Path, silos: Sequence[str], site: str | None) -> Path:
    """Return the path of a site's preprocessing.json.

    If `site` is None, the files of all sites on this host must be equal, and the path of any of them is returned.

    Raises:
        UserError: The site is unknown, the file is not on this host, or `site` is None and the sites' files differ.
    """
    if site is not None and site not in silos:
        raise UserError(f"site {site!r} does not exist in this run; sites: {', '.join(silos)}")
    paths = [site_preprocessing_path(run, name) for name in silos if site in (None, name)]
    existing = [path for path in paths if path.is_file()]
    if not existing:
        raise UserError(
            f"{paths[0]} is missing: the preprocessing of a site is only on the host that trained the site; predict on "
            "that host, or copy the file from there"
        )
    if len({path.read_bytes() for path in existing}) > 1:
        raise UserError(
            f"each site of this run has its own preprocessing; set the site of these rows with --client K or --site "
            f"NAME (in Python client=K or site=NAME); sites: {', '.join(silos)}"
        )
    return existing[0]
