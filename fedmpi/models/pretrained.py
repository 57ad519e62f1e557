"""Read trained weights from local files, and copy them into a model (model.pretrained, init.from)."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten

CHUNK_BYTES = 1 << 24  # bytes of a file that are read at a time
MAX_NAMES_LENGTH = 200  # largest number of characters for a list of names
PICKLE_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
# File names of weights in a folder, in the order of preference; an index lists the files of a divided checkpoint.
FILE_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
NESTED_KEYS = ("state_dict", "model_state_dict", "model")  # keys under which checkpoints store the state_dict
PARALLEL_PREFIX = "module."  # nn.DataParallel puts it in front of all names


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file by name, each of which is read when it is used."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


ShapePair = tuple[tuple[int, ...], tuple[int, ...], str]  # of the model's tensor and of the file's, and its dtype


@dataclass(frozen=True)
class TensorMatch:
    """Which tensors of a file fit a model, by name.

    Attributes:
        fitting: names of the tensors with the same name, shape and kind of number (float or integer) in both.
        other_shape: name -> the two shapes, for tensors of both that differ in shape or kind of number.
        only_in_file: names of tensors that the model does not have.
        random: names of the model's tensors that are not loaded.
        total: the number of tensors of the model.
    """

    fitting: list[str]
    other_shape: dict[str, ShapePair]
    only_in_file: list[str]
    random: list[str]
    total: int

    def describe_differences(self) -> list[str]:
        """Return a line for each kind of difference between file and model; [] if there is none."""
        parts: dict[str, Iterable[str]] = {
            "with another shape or type": [
                f"{name} {own}, in the file {kind} {given}" for name, (own, given, kind) in self.other_shape.items()
            ],
            "only in the file": self.only_in_file,
            "with random initial values": self.random,
        }
        return [f"{what}: {shorten(', '.join(names), MAX_NAMES_LENGTH)}" for what, names in parts.items() if names]


def copy_matching_tensors(module: nn.Module, tensors: Mapping[str, Tensor], where: str) -> TensorMatch:
    """Copy tensors into those tensors of a module that have the same name and shape.

    Args:
        where: the config key and the file, for messages: "init.from: PATH".

    Raises:
        UserError: a tensor contains values that are not finite.
    """
    own, fitting, other_shape = module.state_dict(), list[str](), dict[str, ShapePair]()
    for name, target in own.items():
        if name not in tensors:
            continue
        given = tensors[name]
        if target.shape != given.shape or target.is_floating_point() != given.is_floating_point():
            other_shape[name] = (tuple(target.shape), tuple(given.shape), str(given.dtype))
            continue
        if not bool(given.isfinite().all()):
            raise UserError(f"{where}: {name} contains values that are not finite; use another file")
        with torch.no_grad():
            target.copy_(given)
        fitting.append(name)
    copied = set(fitting)
    return TensorMatch(
        fitting,
        other_shape,
        [name for name in tensors if name not in own],
        [name for name in own if name not in copied],
        len(own),
    )


@dataclass(frozen=True)
class PretrainedWeights:
    """Trained weights of a model in a local file or folder.

    Attributes:
        key: the config key that names them, for messages: "model.pretrained" or "model.name".
        path: the file or folder.
        files: the files that contain the weights, and the configuration of the model if the folder has one.
        lines: for the console: which tensors of the model are loaded. Filled when the weights are loaded.
    """

    key: str
    path: Path
    files: tuple[Path, ...]
    lines: list[str] = field(default_factory=list)

    def compute_digests(self) -> dict[str, str]:
        """Return {name: SHA-256 of the files}, to be compared between ranks; the files are read in chunks."""
        sums = [_hash_file(path) for path in self.files]
        if len(sums) == 1:
            return {f"({self.key})": sums[0]}
        listing = "".join(f"{each}  {path.name}\n" for each, path in zip(sums, self.files, strict=True))
        return {f"({self.key})": hashlib.sha256(listing.encode()).hexdigest()}

    def read_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of all files by name. Those of safetensors files are read when they are used.

        Raises:
            UserError: a file is damaged, or contains anything but tensors.
        """
        tensors = dict[str, Tensor]()
        weights = [path for path in self.files if path.suffix != ".json"]
        for path in weights:
            try:
                if path.suffix == ".safetensors":
                    file = TensorFile(path)
                    if len(weights) == 1:
                        return file
                    tensors |= file
                else:
                    tensors |= _read_pickle(path)
            except Exception as error:  # damaged files raise errors of many types
                has_objects = type(error).__name__ == "UnpicklingError"
                text = "it does not contain tensors alone" if has_objects else (str(error).splitlines() or [""])[0]
                text = "it is in another format" if isinstance(error, KeyError) else text  # an unknown opcode
                raise UserError(
                    f"{self.key}: {path} cannot be read ({shorten(text, MAX_NAMES_LENGTH)}); must be a .safetensors "
                    "file, or a file that torch.load(PATH, weights_only=True) can read; if it is damaged, copy it "
                    "again, or write it with safetensors.torch.save_file(model.state_dict(), PATH)"
                ) from error
        return tensors

    def load_into(self, module: nn.Module, head: Collection[str]) -> None:
        """Copy the weights into a module; the head keeps its random values if the file has another number of classes.

        Args:
            head: names of the parameters of the head.

        Raises:
            UserError: see `check`.
        """
        match = copy_matching_tensors(module, self.read_tensors(), f"{self.key}: {self.path}")
        self.check(match, head)

    def check(self, match: TensorMatch, head: Collection[str]) -> None:
        """Check that the weights fit the model except for its head, and fill `lines`.

        Raises:
            UserError: no tensor fits, or a tensor of the model's body has another shape in the file.
        """
        body = {name: shapes for name, shapes in match.other_shape.items() if name not in head}
        if body:
            name, (own, given, _) = next(iter(body.items()))
            more = f" ({len(body) - 1} more tensors differ)" if len(body) > 1 else ""
            remedy = "use options of the model, and images of a size, for which the weights were trained"
            if len(own) >= 4 and own[:1] + own[2:] == given[:1] + given[2:]:
                remedy = (
                    f"the weights are for images with {given[1]} channels, but the data have {own[1]}; set "
                    f"data.channels={given[1]} if the data source has this option"
                )
            raise UserError(
                f"{self.key}: {self.path} does not fit the model: {name} has the shape {own} in the model, and {given} "
                f"in the file{more}; {remedy}"
            )
        if not match.fitting:
            differences = "; ".join(match.describe_differences())
            raise UserError(
                f"{self.key}: no tensor in {self.path} matches; {differences}; use the weights of this model, with the "
                "names of its state_dict"
            )
        loaded = f"{len(match.fitting)} of {match.total} tensors of the model are loaded from {self.path}"
        if set(match.random) <= set(head) and not match.random:
            self.lines[:] = [loaded]
        elif set(match.random) <= set(head):
            names = shorten(", ".join(match.random), MAX_NAMES_LENGTH)
            self.lines[:] = [f"{loaded}; the head ({names}) starts with random values"]
        else:
            self.lines[:] = [loaded, *match.describe_differences()]


def find_weights(key: str, path: Path) -> PretrainedWeights:
    """Return the weights in a file or folder.

    Args:
        key: the config key that names the path, for messages.

    Raises:
        UserError: the path does not exist, or the folder contains no weights.
    """
    if path.is_file():
        return PretrainedWeights(key, path, (path,))
    allowed = f"a file ({', '.join(('.safetensors', *PICKLE_SUFFIXES[:3]))}) or a folder with {FILE_NAMES[0]}"
    if not path.is_dir():
        raise UserError(
            f"{key}: {path} does not exist (in the folder {path.absolute().parent}); must be {allowed}. fedmpi "
            "does not download weights; download them yourself, for example with `hf download NAME --local-dir FOLDER`"
        )
    files = list_weight_files(path)
    if not files:
        raise UserError(f"{key}: {path} contains no weights; must be {allowed} or {FILE_NAMES[2]}")
    if missing := [each.name for each in files if not each.is_file()]:
        raise UserError(f"{key}: {path} lacks {', '.join(missing)}, which its index names; copy all files of the model")
    config = path / "config.json"
    return PretrainedWeights(key, path, (*([config] if config.is_file() else []), *files))


def list_weight_files(folder: Path) -> list[Path]:
    """Return the files in a folder that contain weights, in order of their names; [] if there are none."""
    first = next((folder / name for name in FILE_NAMES if (folder / name).is_file()), None)
    if first is None:
        return []
    if first.suffix != ".json":
        return [first]
    try:
        index = json.loads(first.read_text(encoding="utf-8"))["weight_map"]
        return [folder / Path(name).name for name in sorted(set(index.values()))]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{first} is damaged: it has no `weight_map`; copy it again") from error


def _hash_file(path: Path) -> str:
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            sha256.update(chunk)
    return sha256.hexdigest()


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file written by torch.save, without executing code that it may contain."""
    content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    for key in NESTED_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = {name: x for name, x in content.items() if isinstance(x, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors:
        raise ValueError("it contains no tensors by name")
    if all(name.startswith(PARALLEL_PREFIX) for name in tensors):
        return {name.removeprefix(PARALLEL_PREFIX): x for name, x in tensors.items()}
    return tensors
