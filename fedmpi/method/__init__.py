"""The contract between a method and the engine: the hooks, what they see, what they declare.

All that the author of a method needs stands here: `from fedmpi.method import Client, Method, Row, State, Uploads`.
"""

from fedmpi.method.base import (
    CLASSES,
    FEATURES,
    LABEL_COUNTS,
    LAST_LAYER,
    ONE_CLASS,
    PLAIN_SERVER,
    PLAIN_SGD,
    SGD_STEPS,
    VALIDATION,
    Method,
    borrows,
    declared,
    overrides,
)
from fedmpi.method.context import Client, Loss, Server, Uploads
from fedmpi.method.slots import (
    BUFFERS,
    CHANGE,
    FLAT,
    HEAD_FLAT,
    INITIAL,
    INITIAL_BUFFERS,
    PER_CLASS,
    PROTOTYPES,
    SCALAR,
    SHARED,
    Slot,
    Slots,
    Travel,
)
from fedmpi.method.values import Fitted, Row, State

__all__ = [
    "BUFFERS",
    "CHANGE",
    "CLASSES",
    "LABEL_COUNTS",
    "LAST_LAYER",
    "ONE_CLASS",
    "FEATURES",
    "FLAT",
    "HEAD_FLAT",
    "INITIAL",
    "INITIAL_BUFFERS",
    "PER_CLASS",
    "PLAIN_SERVER",
    "PLAIN_SGD",
    "SGD_STEPS",
    "PROTOTYPES",
    "SCALAR",
    "SHARED",
    "VALIDATION",
    "Client",
    "Fitted",
    "Loss",
    "Method",
    "Row",
    "Server",
    "Slot",
    "Slots",
    "State",
    "Travel",
    "Uploads",
    "borrows",
    "declared",
    "overrides",
]
