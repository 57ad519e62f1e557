"""configs/data/*.yaml name sources, schemes and options that exist."""

import pytest
import yaml
from helpers import ROOT

from fedmpi.common.options import check
from fedmpi.common.registry import load
from fedmpi.data import partitions
from fedmpi.data.sources import registry

FRAGMENTS = sorted((ROOT / "configs" / "data").glob("*.yaml"))
assert len(FRAGMENTS) >= 6


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.stem)
def test_fragment(path):
    (section, data), *others = yaml.safe_load(path.read_text()).items()
    assert (section, others) == ("data", [])
    source = load(data.pop("source"), registry, "data source")
    division = data.pop("partition", None)
    assert (division is None) != (data.pop("silos", None) is None)
    data.pop("client_test", None)
    check(source, data, "data", supplied=("root", "site", "download"))
    if division:
        cut = load(division.pop("scheme"), partitions.registry, "partition")
        division.pop("clients", None)
        check(cut, division, "data.partition", supplied=("labels", "clients", "rng"))
