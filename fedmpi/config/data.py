"""The section `data` of a config: where samples come from, and whose they are."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from fedmpi.config.sections import OpenSection
from fedmpi.config.values import Augmentation, Name, Place, each_once


class PartitionSettings(OpenSection):
    selector = "scheme"
    scheme: Name  # how samples are divided: `fedmpi list partitions`, or file.py:function; other keys are its options
    clients: Annotated[int, Field(ge=1, le=1_000_000)] | None = None  # N; schemes site and file find it in the data

    @model_validator(mode="after")
    def _number_of_clients(self) -> "PartitionSettings":
        if self.clients is None and self.scheme not in ("site", "file"):
            raise ValueError(f"clients is missing; scheme {self.scheme} needs it (`site` and `file` know it)")
        return self


class DataSettings(OpenSection):
    selector = "source"
    source: Name  # `fedmpi list datasets`, or file.py:function; the keys that are not listed here are its own options
    # where files are looked for, relative to the working directory
    root: Place = Field(
        default_factory=lambda: Path(os.environ.get("FEDMPI_DATA") or "data"),
        json_schema_extra={"default": "$FEDMPI_DATA, else data"},
    )
    download: bool = False  # fetch files missing in root, if the source can
    client_test: Literal["auto", "site", "aligned", "shards", "class_match", "global"] = (
        "auto"  # which rows a client is tested on (docs/data.md)
    )
    stream: bool | Literal["auto"] = "auto"  # read pictures from disk when they are asked for; auto: those beyond 2 GiB
    augment: tuple[Augmentation, ...] = ()  # `fedmpi list augmentations`: what training pictures go through, in turn
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of each client's training samples that is held out
    # regression targets less their mean over training rows, over their deviation: of each site's own, or of all sites';
    # metrics and predictions stay in the unit of the targets
    standardise_target: Literal[False, "site", "pooled"] = False
    partition: PartitionSettings | None = None  # one pool of samples, divided among clients; or silos
    silos: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(each_once)] | None = (
        None  # one client per site; only the rank of a client opens its files
    )
    share_label_counts: bool = True  # label counts of each site, with all ranks; false: its number of samples alone
    audit: bool = True  # of silos: each rank but the server writes what has left it, with its SHA-256
    share_ranks: bool = False  # whether a rank may open the files of several silos; one process alone opens all

    @model_validator(mode="after")
    def _one_origin_of_clients(self) -> "DataSettings":
        if (self.partition is None) == (self.silos is None):
            got = "got neither" if self.partition is None else "got both (set one to null)"
            raise ValueError(f"needs either partition: {{scheme, clients}} or silos: [names]; {got}")
        given = {"share_label_counts": False, "audit": False, "share_ranks": True}
        idle = next((key for key, value in given.items() if getattr(self, key) is value), None)
        if not self.silos and idle is not None:
            said = f"{idle}: {'true' if given[idle] else 'false'}"
            raise ValueError(f"{said} goes with silos; with a partition all ranks hold all data; leave it out")
        if self.silos and self.client_test != "auto":
            raise ValueError(
                f"client_test: {self.client_test} does not go with silos, whose files say it; leave it out"
            )
        return self
