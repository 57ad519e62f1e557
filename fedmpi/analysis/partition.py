"""Show how a config divides the training samples among clients, without training: sizes, classes, label skew.

The label skew of client k is the total variation distance between its label distribution and that of all samples,
1/2 sum_c |n_kc / n_k - n_c / n|. It is 0 for equal distributions and approaches 1 if no other client has its classes.

The figure shows the number of samples by client and class, as in FedUV (supplement, Figs. 1-6).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedmpi.analysis import output
from fedmpi.common import formatting
from fedmpi.common.errors import UserError
from fedmpi.config import Settings
from fedmpi.data.federated import FederatedData
from fedmpi.runtime import build_data

MAX_TABLE_CLIENTS, MAX_TABLE_CLASSES = 40, 12  # limits for printing a table of samples by client and class
MAX_CLIENTS_DRAWN = 150  # maximum number of clients, each with a row, in a figure


def analyse_partition(
    settings: Settings, write: Path | None, plot: Path | None, print_line: Callable[[str], None]
) -> None:
    """Print the partition of a config and, if requested, write it to a file and plot it (`fedmpi partition`).

    Args:
        settings: the settings of a run.
        write: a CSV file to which the client of each training sample is written, and which the partition scheme `file`
            can read; None: no file.
        plot: a .png, .svg or .pdf file for a plot of samples by client and class; None: no plot.
        print_line: prints a line of output.

    Raises:
        UserError: if the config has data.silos, the extension of a file is not one of those above, or a file cannot be
            written.
    """
    if settings.data.silos:
        raise UserError("partition: data.silos needs no partition; `fedmpi validate` shows the sites")
    for option, path, endings in (("--write", write, (".csv",)), ("--plot", plot, (".png", ".svg", ".pdf"))):
        if path is not None and path.suffix not in endings:
            raise UserError(f"{option}: {path} is not allowed; must be a file name ending in {', '.join(endings)}")
        if path is not None:
            output.create_output_folder(path.parent, option)
    data = build_data.build_partitioned_data(settings)
    for line in describe_partition(data):
        print_line(line)
    try:
        if write is not None:
            _write_owners(write, data)
            print_line(f"written: {write}")
        if plot is not None:
            print_line(f"written: {_plot_partition(data, plot)}")
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}; choose another file") from error


def _plot_partition(data: FederatedData, path: Path) -> Path:
    """Plot the number of training samples by client and class, and return the path of the file."""
    from fedmpi.analysis import charts

    if not data.label_counts.any():
        raise UserError(
            "--plot: numbers of samples by class are not known: the targets are not classes, or sites do not share them"
        )
    names = data.site_names or tuple(map(str, range(data.clients)))
    some = range(0, data.clients, -(-data.clients // MAX_CLIENTS_DRAWN))
    rows, classes = [f"{names[k]} ({data.train_sizes[k]})" for k in some], [str(c) for c in range(data.classes)]
    counts = data.label_counts[some].tolist()
    chart = charts.HeatMap(rows, classes, counts, "client (samples)", "class", "samples", show_numbers=True)
    return charts.write_chart(chart, path, "training samples by client and class")


def describe_partition(data: FederatedData) -> list[str]:
    """Describe a partition in lines of text: sizes, classes per client, label skew and, if it is small, a table."""
    sizes, counts = data.train_sizes, data.label_counts
    text = [f"{data.clients:,} clients, {sizes.sum():,} training samples", _format_spread("samples per client", sizes)]
    if data.test_sizes.any():
        text.append(_format_spread("test samples per client", data.test_sizes))
    if not counts.any():
        return text
    text.append(_format_spread("classes per client", (counts > 0).sum(1)))
    text.append(_format_spread("label skew", compute_label_skew(counts)))
    if data.clients <= MAX_TABLE_CLIENTS and data.classes <= MAX_TABLE_CLASSES:
        names = data.site_names or tuple(map(str, range(data.clients)))
        rows = [("client", "samples", *(f"class {c}" for c in range(data.classes)))]
        rows += [(name, str(n), *map(str, row)) for name, n, row in zip(names, sizes, counts.tolist(), strict=True)]
        text += ["", *formatting.format_table(rows)]
    return text


def _format_spread(name: str, values: np.ndarray) -> str:
    """Format the mean, minimum, median and maximum over clients of the quantity `name`."""
    low, middle, high = np.quantile(values, (0, 0.5, 1))
    return f"{name:<25} mean {values.mean():.4g}, min {low:.4g}, median {middle:.4g}, max {high:.4g}"


def compute_label_skew(counts: np.ndarray) -> np.ndarray:
    """Return the label skew of each client, (N,), given the numbers of samples by client and class, (N, C).

    This is the total variation distance between the client's class fractions and those of all clients together.

    >>> compute_label_skew(np.array([[4, 0], [2, 2]])).tolist()
    [0.25, 0.25]
    """
    shares = counts / counts.sum(1, keepdims=True)
    return np.abs(shares - counts.sum(0) / counts.sum()).sum(1) / 2


def _write_owners(path: Path, data: FederatedData) -> None:
    """Write the client of each training sample to a file; -1: the sample belongs to no client.

    A validation sample belongs to the client that uses it for validation.
    """
    owner = np.full(len(data.train[0].y), -1)
    for rows in (data.parts, getattr(data.validation, "rows", None)):
        if rows is not None:
            owner[rows.order] = rows.owner
    path.write_text("\n".join(["client", *map(str, owner), ""]), encoding="utf-8")
