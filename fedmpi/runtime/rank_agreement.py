"""Check before round 0 that all ranks have the same code, config, data and model, by comparing short digests.

Without this check, a run in which one rank has different code or data would give wrong results without an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmpi.comm import Communicator
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Samples, list_named_tensors
from fedmpi.common.registry import split_library_name
from fedmpi.data.batches import iter_samples_once_if_shared
from fedmpi.data.federated import FederatedData
from fedmpi.data.lazy_images import LazyImages
from fedmpi.data.streaming import Stream
from fedmpi.data.transforms.base import Transform
from fedmpi.flat.model import FlatModel
from fedmpi.models import LIBRARIES
from fedmpi.models.pretrained import PretrainedWeights
from fedmpi.runtime.record.metadata import find_installed_version
from fedmpi.runtime.record.saved_model import InitialWeights

CHUNK_BYTES = 1 << 20  # bytes hashed at a time
LIBRARY_PACKAGES = {"hf": "transformers"}  # prefix of names of models -> package, where they differ
# Names of digests of files -> what messages call these files
COMPARED_FILES = {
    "(model.pretrained)": "the weight files of model.pretrained",
    "(model.name)": "the weight files in the folder of model.name",
    "(tokenizer)": "the files of data.tokenizer",
    "(privacy.keys)": "the public keys in privacy.keys",
}
FROZEN = "(frozen parameters)"
DIGEST_BYTES = 6  # bytes of SHA-256 per item, so that 60 items with their names fit into one allgather_bytes


def compute_short_digest(*parts: str | bytes | Iterable[bytes]) -> str:
    """Return a short digest in hexadecimal: the first bytes of the SHA-256 over all parts.

    A part can also be an iterator over its pieces, so that a large part need not be in memory as a whole.
    """
    sha256 = hashlib.sha256()
    for part in parts:
        for piece in [part.encode()] if isinstance(part, str) else [part] if isinstance(part, bytes) else part:
            sha256.update(piece)
    return sha256.hexdigest()[: 2 * DIGEST_BYTES]


def compute_code_digests(model: str) -> dict[str, str]:
    """Return digests of fedmpi's source files and of the versions of torch and of the model's library, by name.

    Args:
        model: the name of the model, such as timm:resnet18.
    """
    folder = Path(__file__).parents[1]
    own = [part for path in sorted(folder.rglob("*.py")) for part in (str(path.relative_to(folder)), path.read_bytes())]
    versions = {"torch": str(torch.__version__)}
    if parts := split_library_name(model, LIBRARIES):
        package = LIBRARY_PACKAGES.get(parts[0], parts[0])
        versions[package] = find_installed_version(package) or ""
    digests = {f"({name} version)": compute_short_digest(version) for name, version in versions.items()}
    return {"(code of fedmpi)": compute_short_digest(*own), **digests}


def compute_data_digests(federated: FederatedData) -> dict[str, str]:
    """Return digests (short checksums) of the partition, the training data and the test data, by name.

    In silo mode the result is {}, because each rank has different data. For images, the digest covers the stored bytes
    and the names and options of the transforms, but not the resulting floats, which may be rounded differently on each
    device. `FederatedData.to` converts test images to floats, so it must not be called before this function.
    """
    if federated.parts is None or federated.global_test is None:
        return {}
    (_, x, y), test = next(iter_samples_once_if_shared(federated.train)), federated.global_test
    return {
        "(partition)": compute_short_digest(federated.parts.order.tobytes()),
        "(training data)": compute_short_digest(_iter_chunks(x), _iter_chunks(y)),
        "(test data)": compute_short_digest(_iter_chunks(test.x), _iter_chunks(test.y)),
    }


def compute_model_digests(
    model: FlatModel, initial: InitialWeights | None, pretrained: PretrainedWeights | None = None
) -> dict[str, str]:
    """Return digests of the parameters' names and shapes, of frozen parameters, and of files with initial weights.

    Args:
        initial: the weights from init.from.
        pretrained: the weights from model.pretrained, or from the folder of the model.
    """
    given = {} if initial is None else {"(initial weights)": compute_short_digest(initial.content)}
    given |= {} if pretrained is None else pretrained.compute_digests()
    frozen = compute_frozen_digest(model.frozen) if model.frozen else {}
    return {"(layout)": compute_short_digest(repr(model.layout)), **given, **frozen}


def compute_frozen_digest(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return {name: digest} with one digest of all frozen parameters, which are never sent; {} if there are none."""
    pieces = (piece for name, p in parameters.items() for piece in (name.encode(), *_iter_chunks(p.detach())))
    return {FROZEN: compute_short_digest(pieces)} if parameters else {}


def _iter_chunks(x: Samples | LazyImages) -> Iterator[bytes]:
    """Yield the content of samples in chunks of at most 1 MiB: for each tensor its name, shape, dtype and bytes."""
    if isinstance(x, LazyImages):
        operations = [describe_image_operation(operation) for operation in x.pipeline.transforms]
        yield f"{x.pipeline.normal} {x.pipeline.channels} {operations}".encode()
        if isinstance(x.stored, Stream):
            yield from x.stored.fingerprint()
            return
        x = x.stored
    for name, part in list_named_tensors(x, ""):
        yield f"{name}{tuple(part.shape)} {part.dtype}".encode()
        for piece in part.flatten().view(torch.uint8).split(CHUNK_BYTES):
            yield piece.cpu().numpy().tobytes()


def describe_image_operation(operation: Transform) -> tuple[str, dict[str, Any]]:
    """Return the class name and the options of an image operation."""
    names: list[str] = [field.name for field in fields(operation)] if is_dataclass(operation) else []
    return type(operation).__name__, {name: getattr(operation, name) for name in names}


def check_agreement(comm: Communicator, items: Mapping[str, str], timeout_s: float) -> None:
    """Check that all ranks have the same settings, code and data.

    Args:
        items: A dict from name to the value or digest to compare.
        timeout_s: Maximum time in seconds to wait for other ranks.

    Raises:
        UserError: The ranks disagree. Every rank raises the same error, which lists the ranks that differ from rank 0
            and the names of the items that differ.
    """
    mine = "\n".join(f"{name}={value}" for name, value in items.items())
    if len(mine.encode()) > 4000:  # too many items for one message: compare one digest of all
        mine = f"(config)={compute_short_digest(mine)}"
    texts = [payload.decode() for payload in comm.allgather_bytes(mine.encode(), timeout_s)]
    answers = [dict(line.rsplit("=", 1) for line in text.split("\n")) for text in texts]
    problems, different_files = [], False
    for rank, theirs in enumerate(answers):
        keys = [key for key in {**answers[0], **theirs} if answers[0].get(key) != theirs.get(key)]
        if any(key in COMPARED_FILES for key in keys):
            different_files = True
            keys = [COMPARED_FILES.get(key, key) for key in keys if key != FROZEN]  # they differ because the files do
        if keys:
            problems.append(f"rank {rank} differs from rank 0 in {', '.join(keys)}")
    if problems:
        raise UserError(
            "the ranks do not run the same experiment: " + "; ".join(problems) + ". "
            "Start all ranks with the same config, version of fedmpi and data files"
            + (", and copy the same files to all hosts" if different_files else "")
        )
