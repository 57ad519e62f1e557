"""`fedmpi partition`: what it prints, a file that gives the same division again, a picture, mistakes in one line."""

import numpy as np
import pytest
from helpers import ROOT, fedmpi

from fedmpi.analysis.partition import distances, pairs

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def test_distances_by_hand():
    counts = np.array([[6, 0, 0], [0, 3, 3]])  # of all samples 1/2, 1/4, 1/4 are of each class
    assert distances(counts).tolist() == [0.5, 0.5]
    assert pairs(counts).tolist() == [1.0]
    assert pairs(np.array([[2, 2], [1, 3], [4, 0]])).tolist() == [0.25, 0.5, 0.75]


@pytest.mark.parametrize("ending", ["csv", "json"])
def test_what_is_written_is_the_same_division(tmp_path, ending):
    path, picture = tmp_path / f"parts.{ending}", tmp_path / "parts.svg"
    first = fedmpi("partition", QUICKSTART, "data.validation=0.2", "--write", path, "--draw", picture)
    assert first.returncode == 0, first.stderr
    said = first.stdout.splitlines()
    assert said[0].startswith("4 clients, 1,1")  # a fifth of 1,438 samples is held out
    assert len([line for line in said if line and line[0] in "0123"]) == 4  # a line a client in the map
    assert said[-2:] == [f"written: {path}", f"written: {picture}"]
    assert "<svg" in picture.read_text()
    whole = fedmpi("partition", QUICKSTART)
    again = fedmpi("partition", QUICKSTART, f"data.partition={{scheme: file, path: {path}}}")
    assert again.stdout == whole.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--write", "parts.txt"], "--write: parts.txt: a name that ends in .csv, .json is needed"),
        (["--draw", "/proc/none/a.png"], "cannot create /proc/none"),
        (["data.partition={scheme: file, path: none.csv}"], "data.partition.path: none.csv: No such file"),
        (["data.partition={scheme: file}"], "data.partition.path: missing"),
    ],
)
def test_mistakes(arguments, words):
    done = fedmpi("partition", QUICKSTART, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
