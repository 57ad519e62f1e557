"""The examples in the docstrings of fedmpi give the documented results."""

import doctest
import importlib

import pytest
import torch
from helpers import ROOT
from torch import nn

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "fedmpi").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    result = doctest.testmod(
        importlib.import_module(name.removesuffix(".__init__")), extraglobs={"nn": nn, "torch": torch}
    )
    assert (result.failed, result.attempted > 0) == (0, True)
