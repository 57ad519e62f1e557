"""CINIC-10: three folders of class folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from fedmpi.common.errors import MissingDataError
from fedmpi.data.dataset import Dataset
from fedmpi.data.fetching.getting import advice, ready
from fedmpi.data.sources.pictures.decode import DecodeOptions
from fedmpi.data.sources.pictures.folders import files_in
from fedmpi.data.sources.pictures.held_out import parted

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DECODING = DecodeOptions(32, 3, (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))  # of the training pictures


def cinic10(root: Path, *, download: bool = False, val: Literal["join", "leave"] = "leave") -> Dataset:
    """CINIC-10 (Darlow 2018): 90,000 + 90,000 colour 32x32 images, 10 classes, in root/CINIC-10/{train,test}.

    val: its 90,000 of `valid` join the training part, or are left out (FedSOL).
    """
    ready("cinic10", root, download)
    folder = root / "CINIC-10"
    for part in ("train", "valid", "test") if val == "join" else ("train", "test"):
        if not os.path.isdir(folder / part):
            raise MissingDataError(
                f"cinic10: there is no folder {folder / part} (data.root = {root}); {advice('cinic10', root)}"
            )
    train = files_in(folder / "train", CLASSES, allowed="CINIC-10's")
    if val == "join":
        train = train + files_in(folder / "valid", CLASSES, allowed="CINIC-10's")
    return parted(train, files_in(folder / "test", CLASSES, allowed="CINIC-10's"), CLASSES, DECODING)
