"""FedAtom: filter decomposition, in which clients train coefficients and atoms that the server averages separately.

Chen, Qiu. Extra Clients at No Extra Cost: Overcome Data Heterogeneity in Federated Learning with Filter Decomposition.
2025. https://arxiv.org/abs/2503.08652

Convolution kernels are products W = alpha D of coefficients and atoms (models/filter_atoms.py); theta_h denotes the
linear layers. Client k:
    (alpha, D, theta_h)_k <- SGD on F_k, jointly, with the local steps of the method `client`                   (1)
    alpha <- sum_k p_k alpha_k,   D <- sum_k p_k D_k,   theta_h <- sum_k p_k theta_h,k;   W is never averaged   (2)
A round is slow if its number is a multiple of `period` = 1 / beta, and fast otherwise. In fast rounds only D and
theta_h are sent, and the server's alpha does not change. alpha_fast determines what happens to the clients' own alpha_k
in fast rounds:                                                                                                 (3)
    discard: clients train alpha_k, but the result is not used (Algorithm 2)
    freeze: clients do not train alpha_k
    keep: clients continue from their alpha_k until they upload it in the next slow round, as in the proof in A.4.2
Batch normalisation is sent in every round.

In method fedatom_personal each client also has its own atoms D_l,k, which are never sent. After (1), with alpha and
theta_h as received:
    D_l,k <- SGD on F_k by FedAvg's steps; starts from the atoms D that the client received first               (4)
Client k is evaluated with (alpha, D_l,k, theta_h). With personal_head: local it also has its own theta_h, which is
trained together with D_l,k.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.flat.layout import ALL_GROUPS, ATOM, BODY, COEF, HEAD
from fedmpi.method import Client, Method, SlotValues, State, declared_property, delegates_to, option, overrides
from fedmpi.method.slots import BUFFERS, SCALAR, SharedParts, Slot, Slots
from fedmpi.models.filter_atoms import decompose_convolutions


@delegates_to("client", step=True)
@dataclass(frozen=True)
class FedAtom(Method):
    """FedAtom: FedAvg, or another method that shares the whole model, on convolutions decomposed into atoms."""

    atoms: int = option(9, "m_a, number of atoms per layer", ge=1)
    init: str = option(
        "he",
        "initialisation of alpha and D (models/filter_atoms.py); from_conv: keep the model's kernels",
        choices=("he", "dcf", "from_conv"),
    )
    period: int = option(1, "1 / beta, number of rounds from one slow round to the next", ge=1)
    alpha_fast: str = option(
        "discard", "what happens to alpha_k in fast rounds (3)", choices=("discard", "freeze", "keep")
    )
    client: Method | None = field(
        default=None, metadata={"doc": "method whose local steps (1) uses; null: FedAvg", "method": True}
    )

    REPLACED_OPTIONS = {
        "personal": "was replaced by method fedatom_personal; fedatom has no personal atoms",
        "personal_head": "belongs to method fedatom_personal; set method.name: fedatom_personal, or remove it",
    }

    def __post_init__(self) -> None:
        inner, phases = self.inner, ("train", "initial_weights", "upload")
        shares_all = inner.shared_parts(0, 1) == SharedParts() and ALL_GROUPS in inner.trains
        only_dw = set(inner.sends) == {"dw"} and not inner.server_state
        standard_phases = self.alpha_fast == "discard" or not any(overrides(inner, hook) for hook in phases)
        for requirement, is_met in {
            "a method that shares and trains the whole model": shares_all,
            "a method that does not change the architecture": not overrides(inner, "prepare_model"),
            "method.period: 1 for a method that sends more than dw or has server state": self.period == 1 or only_dw,
            "method.alpha_fast: discard for a method that overrides train, initial_weights or upload": standard_phases,
        }.items():
            if not is_met:
                name = type(inner).__name__
                raise UserError(f"method.client: {name} is not allowed; fedatom needs {requirement}")

    @property
    def inner(self) -> Method:
        return self.client or Method()

    @declared_property
    def client_state(self) -> Slots:
        own = Slots(alpha=Slot((COEF,)), trained=SCALAR) if self.alpha_fast == "keep" else Slots()
        return Slots(**self.inner.client_state, **own)

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(exclude=(COEF,)) if t % self.period else SharedParts()  # (3)

    def prepare_model(self, module: nn.Module, classes: int) -> nn.Module:
        return decompose_convolutions(module, self.atoms, self.init)  # type: ignore[arg-type]

    def initial_weights(self, client: Client) -> Tensor:
        if self.alpha_fast != "keep":
            return self.inner.initial_weights(client)
        slow = max(client.round - 1, 0) // self.period * self.period  # the last slow round before this one
        keeps = client.state.trained > slow + 1  # `trained` is the round + 1; 0: never trained
        alpha = torch.where(keeps, client.state.alpha, client.extract_group(COEF, client.received))
        return client.replace_group(COEF, alpha, into=client.received)

    def train(self, client: Client) -> State:
        if self.alpha_fast == "freeze" and client.round % self.period:
            client.fit(groups=sorted({s.group for s in client.segments()} - {COEF}))
            return State()
        return self.inner.train(client)  # (1)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        if self.alpha_fast != "keep":
            return self.inner.upload(client)
        # dw is the difference to the server's alpha, not to the client's own, from which training started.
        row = SlotValues() if client.round % self.period else SlotValues(dw=client.w - client.received)
        return row, State(alpha=client.extract_group(COEF, client.w), trained=client.w.new_full((), client.round + 1))


@delegates_to("global_method", step=True)
@dataclass(frozen=True)
class FedAtomPersonal(Method):
    """FedAtom with personal atoms, which each client trains by (4) after it has trained the global model."""

    atoms: int = option(9, "m_a, number of atoms per layer", ge=1)
    init: str = option("he", "initialisation of alpha and D, as in fedatom", choices=("he", "dcf", "from_conv"))
    period: int = option(1, "1 / beta, number of rounds from one slow round to the next", ge=1)
    alpha_fast: str = option(
        "discard", "what happens to alpha_k in fast rounds (3)", choices=("discard", "freeze", "keep")
    )
    personal_head: str = option("global", "which theta_h the personal model uses (4)", choices=("global", "local"))
    client: Method | None = field(
        default=None, metadata={"doc": "method whose local steps (1) uses; null: FedAvg", "method": True}
    )

    def __post_init__(self) -> None:
        inner = self.global_method.inner
        if overrides(inner, "personal_weights") or overrides(inner, "predict"):
            raise UserError(
                f"method.client: {type(inner).__name__} has its own personal models, and so has fedatom_personal; "
                "use method fedatom instead"
            )

    @cached_property
    def global_method(self) -> FedAtom:
        return FedAtom(self.atoms, self.init, self.period, self.alpha_fast, self.client)

    @property
    def personal_groups(self) -> tuple[str, ...]:
        """The layout groups for which each client has its own values."""
        return (ATOM,) if self.personal_head == "global" else (ATOM, BODY, HEAD)

    @declared_property
    def client_state(self) -> Slots:
        own = Slots(own_atom=Slot((ATOM,)), own_b=BUFFERS, began=SCALAR)
        head = Slots(own_body=Slot((BODY,)), own_head=Slot((HEAD,))) if HEAD in self.personal_groups else Slots()
        return Slots(**self.global_method.client_state, **own, **head)

    def train(self, client: Client) -> State:
        state = self.global_method.train(client)
        own = client.fit(start=self.personal_weights(client), groups=self.personal_groups, fedavg_steps=True)  # (4)
        parts = {f"own_{group}": client.extract_group(group, own.w) for group in self.personal_groups}
        return State(**state, began=client.w.new_ones(()), own_b=own.b, **parts)

    def personal_weights(self, client: Client) -> Tensor:
        w = client.received
        for group in self.personal_groups:
            own = torch.where(
                client.state.began > 0, getattr(client.state, f"own_{group}"), client.extract_group(group, w)
            )
            w = client.replace_group(group, own, into=w)
        return w

    def personal_buffers(self, client: Client) -> Tensor:
        return torch.where(client.state.began > 0, client.state.own_b, client.b0)
