"""The interface between a method and the engine: hooks, their arguments, and what a method declares.

A method imports everything that it needs from here: `from fedmpi.method import Client, Method, State, option`.

A method cannot

- exchange messages twice in one round. A round is one download and one upload per client. A method with two exchanges
  uses two rounds; its hooks distinguish them by the round number.
- replace the broadcast of w. Every rank receives all parts of w that are sent in at least one round, and the server
  state named in `receives`; the hook `download` adds values for each client. With SharedParts(groups=()) in all rounds,
  no part of w is sent.
- choose the cohort, or know it before the uploads arrive. The section `cohort` of the config determines how it is
  drawn; `aggregate` reads it from updates.clients.
- choose the buffers from which local training starts: `initial_weights` returns weights only. client.fit(start=...,
  buffers=...) trains a second model, with its own buffers.
- change how float buffers are aggregated. They are always averaged with the weights updates.p.
- keep state whose shape changes, or that is not a tensor. A slot has one shape for the whole run.
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
    declared_property,
    delegates_to,
    overrides,
)
from fedmpi.method.context import Client, FitResult, Loss, Quadratic, Server, SlotValues, State, Uploads
from fedmpi.method.slots import (
    BUFFERS,
    FLAT,
    HEAD_FLAT,
    INITIAL,
    INITIAL_BUFFERS,
    PER_CLASS,
    PROTOTYPES,
    SCALAR,
    SHARED,
    UPDATE,
    SharedParts,
    Slot,
    Slots,
)
