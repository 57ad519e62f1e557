"""Write files atomically, even if the power fails, and write files of tensors with a checksum.

A file is written under a temporary name, synchronised to disk (fsync) and renamed; then its folder is synchronised. The
safetensors metadata of a file of tensors contain {"facts": other values as a JSON string, "sha256": checksum of facts
and of the tensors' names, shapes, dtypes and values}.
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
    """Raised if a file is missing, truncated or changed. The message contains its path and the problem."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically, replacing an existing one. If writing fails, no temporary file remains."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # unique, as other processes may write the file, too
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the list of files in a folder, is on disk (fsync)."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def serialize_tensors(tensors: Mapping[str, Tensor], facts: Any) -> bytes:
    """Return the bytes of a safetensors file with tensors (on the CPU), `facts` (JSON values) and a checksum.

    Equal arguments give equal bytes.
    """
    text = json.dumps(facts, sort_keys=True)
    manifest = {"facts": text, "sha256": _compute_digest(tensors, text)}
    return safetensors.torch.save(dict(tensors), {"fedmpi": json.dumps(manifest)})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read tensors and facts from a file that `serialize_tensors` has created, and verify its checksum.

    Raises:
        CorruptFileError: The file cannot be read, is damaged, or does not match its checksum.
    """
    try:
        content = path.read_bytes()
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        manifest = json.loads(header["__metadata__"]["fedmpi"])
        facts, recorded = manifest["facts"], manifest["sha256"]
    except OSError as error:
        raise CorruptFileError(f"{path}: {error.strerror}") from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(f"{path} is damaged: not a complete file of tensors ({error})") from error
    if _compute_digest(tensors, facts) != recorded:
        raise CorruptFileError(f"{path} is damaged: its content does not match the SHA-256 recorded in it")
    return tensors, json.loads(facts)


def _compute_digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(f"{name} {tuple(x.shape)} {x.dtype} ".encode())
        digest.update(x.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
