"""fedmpi: federated learning under data heterogeneity, on HPC clusters.

    fedmpi.run(config, overrides=()) -> Summary      run one experiment in this process (or on this rank)
    fedmpi.load(run_dir, client=None) -> nn.Module   load the final global model of a run, or the model of one client
    fedmpi.Method, fedmpi.Task, fedmpi.Dataset       base classes of methods and tasks, and the class of data sets
    fedmpi.methods.registry, fedmpi.models.registry, fedmpi.datasets.registry, fedmpi.partitions.registry
                                                     the components that a config can select
Each name is imported when it is first used: importing fedmpi does not import torch and has no side effects.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedmpi.common.version import __version__

__all__ = ["Dataset", "Method", "Summary", "Task", "__version__", "load", "run"]

_LAZY_IMPORTS = {
    "run": "fedmpi.api:run",
    "load": "fedmpi.api:load",
    "Summary": "fedmpi.api:Summary",
    "Method": "fedmpi.method.base:Method",
    "Task": "fedmpi.tasks.base:Task",
    "Dataset": "fedmpi.data.dataset:Dataset",
    "rules": "fedmpi.aggregation.rules",
    "methods": "fedmpi.methods",
    "models": "fedmpi.models",
    "datasets": "fedmpi.data.sources",
    "partitions": "fedmpi.data.partitions",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module 'fedmpi' has no attribute {name!r}")
    module, _, attribute = _LAZY_IMPORTS[name].partition(":")
    imported = import_module(module)
    return getattr(imported, attribute) if attribute else imported
