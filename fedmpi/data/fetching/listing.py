"""What is known of a data set that can be named: its files, their checksums and addresses, home, licence, reference."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A file, or a folder with so many files below it, relative to data.root; any of `paths` will do."""

    paths: tuple[str, ...]
    md5: str = ""  # of the first path, where it is known
    files: int = 0  # of a folder: how many files lie below it; 0: any number


@dataclass(frozen=True)
class Download:
    """One file to fetch. `into`: it is an archive, whose content goes to that folder; it is deleted afterwards."""

    urls: tuple[str, ...]  # the first that answers is taken
    path: str  # relative to data.root
    md5: str = ""  # "" where nobody has published one
    into: str = ""

    @property
    def gives(self) -> str:
        """The file or folder under data.root that it provides."""
        return self.into or self.path


@dataclass(frozen=True)
class Listing:
    """A data set of `fedmpi data`."""

    samples: str  # "60,000 + 10,000"
    what: str  # "grey 28x28 digits, 10 classes"
    megabytes: int  # of what is fetched, about; 0 where it is not known
    config: str  # under `data:` in a config
    home: str
    licence: str
    reference: str
    parts: tuple[Part, ...]
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""  # what to do where there is no download: sites that ask for an account or a click


def one(path: str, md5: str = "", *also: str) -> Part:
    return Part((path, *also), md5)
