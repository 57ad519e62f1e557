"""Write files atomically, also in case of a power cut, and files of tensors with a checksum.

Written under a temporary name, fsync, rename, fsync of the folder. A file of tensors holds its manifest as safetensors
metadata: {"facts": ..., "sha256": of facts, names, shapes, types and values}.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor


class CorruptFileError(Exception):
    """A file is missing, cut short or changed; the message says which and how."""


def write(path: Path, content: bytes) -> None:
    """Write a file, in place of one of that name if there is one. Raises OSError, leaving no temporary file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # others may write it, too: the last one's stays
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until what was written to a file, or the entries of a folder, are on disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def serialize_tensors(tensors: Mapping[str, Tensor], facts: Any) -> bytes:
    """Serialise tensors (on the CPU) and `facts` (JSON) with their checksum. Equal arguments give equal bytes."""
    text = json.dumps(facts, sort_keys=True)
    manifest = {"facts": text, "sha256": _digest(tensors, text)}
    return safetensors.torch.save(dict(tensors), {"fedmpi": json.dumps(manifest)})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read (tensors, facts) of a file whose content was made by `serialize_tensors`. Raises CorruptFileError."""
    try:
        content = path.read_bytes()
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        manifest = json.loads(header["__metadata__"]["fedmpi"])
        facts, recorded = manifest["facts"], manifest["sha256"]
    except OSError as error:
        raise CorruptFileError(f"{path}: {error.strerror}") from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(f"{path} is damaged: no whole file of tensors ({error})") from error
    if _digest(tensors, facts) != recorded:
        raise CorruptFileError(f"{path} is damaged: its content is not that of the SHA-256 recorded in it")
    return tensors, json.loads(facts)


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(f"{name} {tuple(x.shape)} {x.dtype} ".encode())
        digest.update(x.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
