"""The import of torchvision with another torch; see also tests/jobs/test_process_setup.py."""

import importlib
import sys

import pytest

from fedmpi.common import torchvision_compat


def test_another_error_of_the_import_keeps_its_own_message(monkeypatch):
    def fail(name):
        raise RuntimeError("compiled with different CUDA major versions")

    monkeypatch.setattr(importlib, "import_module", fail)
    declared = list(torchvision_compat._declared)
    with pytest.raises(RuntimeError, match="CUDA major"):
        torchvision_compat._import_torchvision()
    assert torchvision_compat._declared == declared
    assert sys.modules["torchvision"] is torchvision_compat.torchvision
