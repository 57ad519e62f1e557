"""The contract between a method and the engine: the hooks, what they see, what they declare.

The author of a method imports everything from here: `from fedmpi.method import Client, Method, Row, State, option`.

What a method cannot do:

- Exchange messages twice in one round. A round is one download and one upload per client. A method with two exchanges
  uses two rounds, and distinguishes them in `travels` and the other hooks by their numbers.
- Broadcast something other than w. Every rank receives all parts of w that are sent in any round, and the server state
  named in `receives`; `download` adds to it. With Travel(groups=()) in all rounds, no part of w is sent.
- Choose the cohort, or know it before the uploads arrive: it is drawn according to `cohort` in the config. `aggregate`
  has updates.clients.
- Choose the buffers from which local training starts: `receive` returns weights only. client.fit(start=...,
  buffers=...) trains another model beside the current one.
- Change how float buffers are aggregated: always by updates.p.
- Keep state whose shape changes, or that is not a tensor: a slot has one shape for the whole run.
"""

from fedmpi.common.options import option
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
from fedmpi.method.context import Client, Fitted, Loss, Quadratic, Row, Server, State, Uploads
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
