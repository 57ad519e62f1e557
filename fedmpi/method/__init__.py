"""The contract between a method and the engine: the hooks, what they see, what they declare.

All that the author of a method needs stands here: `from fedmpi.method import Client, Method, Row, State, option`.

What a method cannot say:

- Two exchanges in one round. A round is one download and one upload a client. What takes two takes two rounds, which
  `travels` and the other hooks tell apart by their numbers.
- That something else than w is announced. All of w that travels in any round goes to every rank, and server state that
  `receives` names beside it; `download` adds to that and takes nothing away. Travel(groups=()) in all rounds: no w.
- Who takes part, and who is in the cohort before uploads are there: `cohort` of the config draws it; `download` and the
  client's hooks are not told. `aggregate` has updates.clients.
- The buffers that local training starts from: `receive` gives weights alone. client.fit(start=..., buffers=...) trains
  another model beside the live one.
- How float buffers are aggregated: by updates.p, whatever `aggregate` does.
- State whose shape changes, or that is no tensor: a slot has one shape for the whole run.
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
