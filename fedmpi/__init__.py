"""fedmpi: federated learning under data heterogeneity, on HPC clusters.

    fedmpi.run(config, overrides=()) -> Summary      one experiment in this process (or this rank)
    fedmpi.load(run_dir, client=None) -> nn.Module   the final global model of a run, or a client's own
    fedmpi.Method, fedmpi.Task, fedmpi.Dataset       base classes of methods and tasks, and the class of data sets
    fedmpi.methods.registry, fedmpi.models.registry, fedmpi.datasets.registry, fedmpi.partitions.registry
Names are imported when they are first used: importing fedmpi does not import torch and has no side effects.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedmpi.common.version import __version__

__all__ = ["Dataset", "Method", "Summary", "Task", "__version__", "load", "run"]

_PLACES = {
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
    if name not in _PLACES:
        raise AttributeError(f"module 'fedmpi' has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    imported = import_module(module)
    return getattr(imported, attribute) if attribute else imported
