"""How ranks find each other and exchange flat tensors: `detect` the job, `connect` to the others.

Modules that need torch are imported at first use, so that a mistake in a config is reported before torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedmpi.comm.launchers import Job, detect
from fedmpi.comm.timeouts import Timeouts

if TYPE_CHECKING:
    from fedmpi.comm.base import Communicator, Lost
    from fedmpi.comm.connection import connect

__all__ = ["Communicator", "Job", "Lost", "Timeouts", "connect", "detect"]

_PLACES = {"Communicator": "base", "Lost": "base", "connect": "connection"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fedmpi.comm' has no attribute {name!r}")
    return getattr(import_module(f"fedmpi.comm.{_PLACES[name]}"), name)
