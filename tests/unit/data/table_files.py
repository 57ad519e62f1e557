"""What the tests of tables share: write a small CSV file, collect the warnings of a call."""

import csv
import warnings

import numpy as np


def write_table(folder, columns, name="a.csv"):
    """Write columns (name -> cells) as CSV."""
    with (folder / name).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def warnings_of(function, *args, **kwargs):
    """The messages of all warnings that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    return [str(each.message) for each in caught]


def noise(n=60, seed=0):
    return np.random.default_rng(seed).normal(size=n).round(3)
