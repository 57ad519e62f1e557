"""The data source `digits`: the handwritten digits of scikit-learn, which need no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.arrays import ArrayOptions
from fedmpi.data.sources.named_arrays import ArrayPreparation
from fedmpi.data.sources.source_utils import split_train_test


def digits(root: Path, *, test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2) -> Dataset:
    """The handwritten digits of UCI, from scikit-learn: 1,797 grey 8x8 images, 10 classes; no download.

    Pixels 0..16 are scaled to 0..1.

    test_fraction: the fraction of each class that is held out as the test part, with the same rows for every seed.
    """
    # The file is read directly, because importing scikit-learn takes one second on every rank.
    package = find_spec("sklearn")
    assert package is not None, "fedmpi needs scikit-learn"
    assert package.submodule_search_locations
    table = np.loadtxt(Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    x = torch.from_numpy(table[:, :-1] / 16).float().view(-1, 1, 8, 8)  # (1797, 1, 8, 8)
    y = torch.from_numpy(table[:, -1].astype(np.int64))
    train, test = (torch.from_numpy(rows) for rows in split_train_test(y.numpy(), test_fraction))
    preparation = ArrayPreparation((8, 8), False, ArrayOptions(axes="NHW", pixel_range=(0, 16)))
    return Dataset(x[train], y[train], x[test], y[test], classes=10, preparation=preparation)
