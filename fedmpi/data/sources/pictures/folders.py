"""Folders named after classes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.common.text import natural_order
from fedmpi.data.sources.pictures.decode import is_picture
from fedmpi.data.sources.pictures.held_out import Files


def classes_in(folder: Path) -> list[str]:
    """Names of the subfolders in natural order, without hidden ones (.ipynb_checkpoints) and macOS's __MACOSX."""
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}; correct its permissions") from error
    return natural_order(name for name in names if not name.startswith((".", "__MACOSX")))


def files_in(folder: Path, names: Sequence[str], below: str = "", allowed: str = "data.class_names") -> Files:
    """Pictures of folder/CLASS, or folder/CLASS/below, class by class, in the order of their paths.

    Raises UserError for a folder that is no class, and where there is no picture; a class's folder without one is told.
    """
    unknown = [name for name in classes_in(folder) if name not in names]
    if unknown:
        raise UserError(f"{folder} holds the class {unknown[0]!r}; the classes are {', '.join(names)} ({allowed})")
    paths: list[Path] = []
    labels: list[int] = []
    bare: list[Path] = []
    for label, name in enumerate(names):
        there = sorted(file for file in (folder / name / below).rglob("*") if is_picture(file))
        lost = next((file for file in there if file.is_symlink() and not file.exists()), None)
        if lost is not None:
            raise UserError(f"{lost} is a link to {os.readlink(lost)}, which is not there; fetch it, or remove it")
        found = [file for file in there if file.is_file()]
        paths += found
        labels += [label] * len(found)
        if not found and (folder / name).is_dir():
            bare.append(folder / name)
    if not paths:
        raise UserError(
            f"{folder} holds no picture in a folder of its class ({', '.join(names) or 'there is no folder'}); correct "
            "data.root or data.path, or put pictures there"
        )
    for place in bare:
        warnings.warn(f"{place} holds no picture; put some there, or remove the folder", stacklevel=2)
    return Files(paths, labels)
