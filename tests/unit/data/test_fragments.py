"""configs/data/*.yaml name sources, schemes and options that exist."""

from pathlib import Path

import pytest
import yaml

from fedmpi.common.options import check
from fedmpi.common.registry import load
from fedmpi.data import partitions
from fedmpi.data.sources import registry

FRAGMENTS = sorted((Path(__file__).parents[3] / "configs" / "data").glob("*.yaml"))


def test_there_are_fragments():
    assert len(FRAGMENTS) >= 6


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.stem)
def test_fragment(path):
    (section, data), *others = yaml.safe_load(path.read_text()).items()
    assert (section, others) == ("data", [])
    source = load(data.pop("source"), registry, "data source")
    division = data.pop("partition", None)
    silos = data.pop("silos", None)
    assert (division is None) != (silos is None)
    data.pop("client_test", None)
    check(source, data, "data", supplied=("root", "site", "download"))
    if division:
        cut = load(division.pop("scheme"), partitions.registry, "partition")
        division.pop("clients", None)
        check(cut, division, "data.partition", supplied=("labels", "clients", "rng"))
