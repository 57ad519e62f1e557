"""Import torchvision even if its wheel does not match the installed torch.

All modules of fedmpi use `from fedmpi.common.torchvision_compat import torchvision`. torchvision's wheel on the package
index is compiled against CUDA. With a CPU-only torch its operator library cannot be loaded, and `import torchvision`
ends with `RuntimeError: operator torchvision::nms does not exist`, because the package registers shape functions for
two operators (non-maximum suppression) that are then not declared. fedmpi calls neither, and the import needs only
their schemas. This module declares the schemas only after that error, so that a working installation is not affected.
"""

import importlib
import sys
from types import ModuleType

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []  # a Library that is garbage-collected removes its declarations


def _import_torchvision() -> ModuleType:
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise  # another problem, such as two versions of CUDA, with a message of its own
    # The failed import leaves submodules in sys.modules that refer to a package which no longer exists.
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(operator + _SCHEMA)
    _declared.append(library)
    return importlib.import_module("torchvision")


torchvision = _import_torchvision()
