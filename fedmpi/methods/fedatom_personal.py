"""Filter decomposition with personal atoms. Chen, Qiu. 2025. https://arxiv.org/abs/2503.08652

FedAtom (its file has equations 1 to 3), and beside it atoms of each client's own, which never travel. After (1), with
alpha and theta_h as received:
    D_l,k <- SGD on F_k, from the atoms D received at first, by FedAvg's steps                                      (4)
Client k uses (alpha, D_l,k, theta_h); with pers_head: local a theta_h of its own, which is trained along with D_l,k.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.flat.layout import ATOM, BODY, HEAD
from fedmpi.method import BUFFERS, SCALAR, Client, Method, Slot, Slots, State, borrows, declared, option, overrides
from fedmpi.methods.fedatom import FedAtom


@final
@borrows("fedatom", step=True)
@dataclass(frozen=True)
class FedAtomPersonal(Method):
    atoms: int = option(9, "m_a, atoms of a layer", ge=1)
    init: str = option("he", "start of alpha and D, as of fedatom", choices=("he", "dcf", "from_conv"))
    period: int = option(1, "1 / beta, rounds from one slow round to the next", ge=1)
    alpha_fast: str = option("discard", "alpha_k in fast rounds (3)", choices=("discard", "freeze", "keep"))
    pers_head: str = option("global", "theta_h of the personal model (4)", choices=("global", "local"))
    client: Method | None = field(default=None, metadata={"doc": "method behind (1), null: FedAvg", "method": True})

    paper = "Chen, Qiu, 2025"

    def __post_init__(self) -> None:
        inner = self.fedatom.inner
        if overrides(inner, "weights") or overrides(inner, "predict"):
            raise UserError(
                f"method.client: fedatom_personal says what its clients use, and so does {type(inner).__name__}; "
                "method fedatom takes it"
            )

    @cached_property
    def fedatom(self) -> FedAtom:
        return FedAtom(self.atoms, self.init, self.period, self.alpha_fast, self.client)

    @property
    def own(self) -> tuple[str, ...]:
        """Groups of the personal model that are the client's."""
        return (ATOM,) if self.pers_head == "global" else (ATOM, BODY, HEAD)

    @declared
    def client_state(self) -> Slots:
        own = Slots(own_atom=Slot((ATOM,)), own_b=BUFFERS, began=SCALAR)
        head = Slots(own_body=Slot((BODY,)), own_head=Slot((HEAD,))) if HEAD in self.own else Slots()
        return Slots(**self.fedatom.client_state, **own, **head)

    def train(self, k: Client) -> State:
        state = self.fedatom.train(k)
        own = k.fit(start=self.weights(k), groups=self.own, plain=True)  # (4)
        parts = {f"own_{group}": k.take(group, own.w) for group in self.own}
        return State(**state, began=k.w.new_ones(()), own_b=own.b, **parts)

    def weights(self, k: Client) -> Tensor:
        w = k.received
        for group in self.own:
            own = torch.where(k.state.began > 0, getattr(k.state, f"own_{group}"), k.take(group, w))
            w = k.lift(group, own, into=w)
        return w

    def buffers(self, k: Client) -> Tensor:
        return torch.where(k.state.began > 0, k.state.own_b, k.b0)
