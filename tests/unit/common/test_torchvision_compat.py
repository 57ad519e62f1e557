"""torchvision beside a torch that it was not built for."""

import importlib
import subprocess
import sys

import pytest

from fedmpi.common import torchvision_compat

FAILED_BEFORE = """
try:
    import torchvision
except RuntimeError:
    pass
"""

FORWARD = """
import torch
from fedmpi.common.torchvision_compat import torchvision
model = torchvision.models.resnet18(weights=None, num_classes=3).eval()
assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
import torchvision as again
assert again is torchvision
"""

HEALTHY = """
import sys
import torch
try:
    import torchvision
except RuntimeError:  # make it healthy: somebody else declares the operators
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from fedmpi.common import torchvision_compat
assert not torchvision_compat._declared
assert torchvision_compat.torchvision.models.resnet18
"""


@pytest.mark.parametrize("code", [FORWARD, FAILED_BEFORE + FORWARD, HEALTHY], ids=["plain", "failed before", "healthy"])
def test_import(code):
    """In processes of their own: operators are declared once per process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_another_ailment_keeps_its_own_message(monkeypatch):
    def ill(name):
        raise RuntimeError("compiled with different CUDA major versions")

    monkeypatch.setattr(importlib, "import_module", ill)
    declared = list(torchvision_compat._declared)
    with pytest.raises(RuntimeError, match="CUDA major"):
        torchvision_compat._import()
    assert torchvision_compat._declared == declared
    assert sys.modules["torchvision"] is torchvision_compat.torchvision
