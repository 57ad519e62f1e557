"""Who holds what under a config, before anything is trained: sizes, classes, how far clients are from the whole.

The distance of a client is the total variation between its distribution of labels and that of all samples,
1/2 sum_c |n_kc / n_k - n_c / n|: 0 for the same mixture, towards 1 for classes that nobody else holds.

The pictures are FedUV's (supplement, Figs. 1-6): label_counts, and for each client the histogram of its samples' mean
values, which tells where inputs differ rather than labels.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from fedmpi.analysis import report
from fedmpi.common import formatting
from fedmpi.common.errors import UserError
from fedmpi.config import Settings
from fedmpi.data.batches import Shard, batches
from fedmpi.data.federated import Federated
from fedmpi.runtime import build_data

CLIENTS, CLASSES = 40, 12  # at most, of a map on the console
DRAWN = 150  # clients at most of a picture, which has a row for each
BINS, PASS = 30, 1024  # of the histograms of sample means; samples read at once


def analyse(settings: Settings, write: Path | None, draw: Path | None, say: Callable[[str], None]) -> None:
    """`fedmpi partition`: the division on the console, in a file that scheme `file` reads, and as pictures."""
    if settings.data.silos:
        raise UserError("partition: data.silos has no common pool to divide; `fedmpi validate` shows the sites")
    for option, path, endings in (("--write", write, (".csv",)), ("--draw", draw, (".png", ".svg", ".pdf"))):
        if path is not None and path.suffix not in endings:
            raise UserError(f"{option}: {path}: a name that ends in {', '.join(endings)} is needed")
        if path is not None:
            report.folder(path.parent, option)
    data = build_data.partitioned(settings)
    for line in lines(data):
        say(line)
    assert data.parts is not None
    try:
        if write is not None:
            owner = np.full(len(data.train[0].y), -1)
            for rows in (data.parts, getattr(data.validation, "rows", None)):  # what is held out is of a client's part
                if rows is not None:
                    owner[rows.order] = rows.owner
            with write.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([["client"], *([k] for k in owner.tolist())])
            say(f"written: {write}")
        for path in _draw(data, draw) if draw is not None else ():
            say(f"written: {path}")
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}; choose another file") from error


def _draw(data: Federated, path: Path) -> Iterator[Path]:
    """Draw the samples by client and class, and where samples have means their histograms; yield the files."""
    from fedmpi.analysis import charts

    names = data.site_names or tuple(map(str, range(data.clients)))
    some = range(0, data.clients, -(-data.clients // DRAWN))
    rows = [f"{names[k]} ({data.train_sizes[k]})" for k in some]
    if data.label_counts.any():
        classes = [str(c) for c in range(data.classes)]
        counts = data.label_counts[some].tolist()
        chart = charts.Grid(rows, classes, counts, "client (samples)", "class", "samples", written=True)
        yield charts.write(chart, path, "training samples by client and class")
    edges, histogram = histograms(data)
    if len(edges):
        shares = (100 * histogram / histogram.sum(1, keepdims=True).clip(1))[some].tolist()
        bins = [f"{edge:.3g}" for edge in edges[:-1]]
        chart = charts.Grid(rows, bins, shares, "client (samples)", "mean value of a sample", "% of its samples")
        features = path.with_name(f"{path.stem}-features{path.suffix}")
        yield charts.write(chart, features, "mean values of samples by client")


def lines(data: Federated) -> list[str]:
    """What is said of a division."""
    sizes, counts = data.train_sizes, data.label_counts
    text = [f"{data.clients:,} clients, {sizes.sum():,} training samples", _spread("samples a client", sizes)]
    if data.test_sizes.any():
        text.append(_spread("test samples a client", data.test_sizes))
    if not counts.any():
        return text
    text.append(_spread("classes a client", (counts > 0).sum(1)))
    text.append(_spread("distance to all samples", distances(counts)))
    if data.clients <= CLIENTS and data.classes <= CLASSES:
        names = data.site_names or tuple(map(str, range(data.clients)))
        rows = [("client", "samples", *(f"class {c}" for c in range(data.classes)))]
        rows += [(name, str(n), *map(str, row)) for name, n, row in zip(names, sizes, counts.tolist(), strict=True)]
        text += ["", *formatting.table(rows)]
    return text


def _spread(name: str, values: np.ndarray) -> str:
    low, middle, high = np.quantile(values, (0, 0.5, 1))
    return f"{name:<25} {values.mean():.4g} on average; least {low:.4g}, median {middle:.4g}, most {high:.4g}"


def distances(counts: np.ndarray) -> np.ndarray:
    """(N, C) label counts -> (N,) total variation between each client and all samples.

    >>> distances(np.array([[4, 0], [2, 2]])).tolist()
    [0.25, 0.25]
    """
    shares = counts / counts.sum(1, keepdims=True)
    return np.abs(shares - counts.sum(0) / counts.sum()).sum(1) / 2


def histograms(data: Federated) -> tuple[np.ndarray, np.ndarray]:
    """Of each training sample the mean of its numbers, as models see them: (BINS + 1,) edges from least to most, and
    (N, BINS) samples by client. Both are empty where samples are symbols, or several tensors."""
    if not isinstance(data.x_dtype, torch.dtype) or not data.x_dtype.is_floating_point:
        return np.empty(0), np.empty((data.clients, 0))
    means = [_means(data.train[k]) for k in range(data.clients)]
    every = np.concatenate(means)
    edges = np.histogram_bin_edges(every, BINS)
    return edges, np.stack([np.histogram(each, edges)[0] for each in means])


def _means(shard: Shard) -> np.ndarray:
    """(n,) of a client's samples, in passes of PASS."""
    means = [x.flatten(1).double().mean(1).cpu() for x, _ in batches(shard, PASS, None)]
    return torch.cat(means).numpy()
