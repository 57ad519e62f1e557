"""The 2D sets of MedMNIST."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.getting import advice, ready
from fedmpi.data.fetching.medmnist import TABLE, file_name
from fedmpi.data.sources.arrays import channels_first
from fedmpi.data.sources.common import find, pictures

Names = Literal[
    "pathmnist",
    "chestmnist",
    "dermamnist",
    "octmnist",
    "pneumoniamnist",
    "retinamnist",
    "breastmnist",
    "bloodmnist",
    "tissuemnist",
    "organamnist",
    "organcmnist",
    "organsmnist",
]

Part = tuple[np.ndarray, torch.Tensor]


def medmnist(
    root: Path,
    *,
    set: Names,
    download: bool = False,
    size: Literal[28, 64, 128, 224] = 28,
    channels: Literal[1, 3] | None = None,
    val: Literal["join", "leave"] = "join",
) -> Dataset:
    """MedMNIST v2 (Yang 2023): twelve sets of medical 28x28 images, from root/medmnist/SET.npz or root/SET.npz.

    set: its name; size: 64, 128 and 224 are MedMNIST+'s files SET_64.npz, ... channels: 3 repeats a grey channel; as it
    is otherwise. val: the validation part joins the training part, as in FedSOL's PathMNIST and TissueMNIST, or is left
    out. Normalised with mean .5, deviation .5. chestmnist has 14 labels an image, each there or not (task multi_label);
    retinamnist's five grades are classes.
    """
    classes, own, _, _ = TABLE[set]
    if channels is not None and channels < own:
        raise UserError(f"medmnist: data.channels=1, but {set} is in colour; leave it out")
    listed = file_name(set, size).removesuffix(".npz")
    ready(listed, root, download)
    remedy = advice(listed, root)
    at = find(root, (f"medmnist/{listed}.npz", f"{listed}.npz"), f"medmnist {set}", remedy)
    several = set == "chestmnist"
    wanted = ("train", "val", "test") if val == "join" else ("train", "test")
    parts = _read(at, wanted, (classes,) if several else (1,), remedy)
    for name, (x, y) in parts.items():
        if x.shape[1:] != (own, size, size):
            raise UserError(f"{at}: {name}_images is {x.shape[1:]} an image; {set} has {(own, size, size)}; {remedy}")
        most = 1 if several else classes - 1
        if len(y) and int(y.max()) > most:
            row = int((y > most).nonzero()[0, 0])
            raise UserError(
                f"{at}: {name}_labels holds {int(y[row].max())} in row {row}; {set} has 0..{most}; {remedy}"
            )
    x, y = parts["train"]
    if val == "join":
        x, y = np.concatenate([x, parts["val"][0]]), torch.cat([y, parts["val"][1]])
    return pictures((x, y), parts["test"], classes, (0.5,), (0.5,), channels or own)


def _read(at: Path, parts: tuple[str, ...], shape: tuple[int, ...], remedy: str) -> dict[str, Part]:
    """part -> images (n, C, H, W) uint8 and labels (n,) int64, or (n, 14) float32; shape: of a row of labels."""
    found = {}
    try:
        with np.load(at, allow_pickle=False) as arrays:
            for part in parts:
                x, y = arrays[f"{part}_images"], arrays[f"{part}_labels"]
                if (
                    x.dtype != np.uint8
                    or x.ndim not in (3, 4)
                    or y.dtype.kind not in "iu"
                    or y.shape != (len(x), *shape)
                ):
                    raise ValueError(f"{part}: images {x.dtype} {x.shape}, labels {y.dtype} {y.shape}")
                x = channels_first(x, "NHWC"[: x.ndim])
                found[part] = x, torch.from_numpy(y[:, 0].astype(np.int64) if shape == (1,) else y.astype(np.float32))
    except Exception as error:  # zip, zlib, numpy's header: what a damaged file makes of them is not to be foreseen
        raise UserError(f"{at} is no file of MedMNIST: {error}; delete it, and {remedy}") from error
    return found
