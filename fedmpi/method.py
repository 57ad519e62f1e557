"""A method is its equations: hooks with neutral defaults, and the views that the engine hands to them.

The defaults of all hooks together are FedAvg. A method overrides the smallest hook that can express its equation,
    loss < gradient < step < train < upload        direction < remember
and declares what it keeps, sends and receives. Hooks map tensors to tensors; only the engine writes, stores and sends.
Methods derive from `Method` and from nothing else, are frozen dataclasses (fields = hyperparameters), and never call
super().
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fedmpi import rules
from fedmpi.layout import EVERYTHING, Segment
from fedmpi.slots import SHARED, Slots, Views

# What a method may need of the experiment; checked before anything runs.
PLAIN_SGD = "plain SGD (train.momentum: 0)"
FEATURES = "a model with features and a last linear layer"
CLASSES = "a classification task"


class Row(dict[str, Tensor]):
    """What a client uploads: Row(dw=..., dc=...)."""


class State(dict[str, Tensor]):
    """New values of declared state: State(c=...). What is not named stays as it was."""


Loss = Callable[["Client", Tensor, Tensor], Tensor]


class Client(Protocol):
    """What a hook sees of the client that trains or is evaluated. Tensors are the engine's: read, do not write."""

    id: int
    round: int
    n: int  # training samples
    label_counts: Tensor  # (c,) int64
    classes: int
    lr: float  # eta_t, the learning rate of this round
    epochs: int
    epoch: int  # of the running `fit`, from 0
    last_epoch: bool
    steps: int  # K, optimiser steps made by `fit` on k.w
    a: float  # sum of the weights with which a constant gradient enters w: K without momentum (FedNova's a_k)
    w: Tensor  # (d,) live weights
    b: Tensor  # (b,) live float buffers (batch statistics)
    received: Tensor  # (d,) what was received, and the client's own parts
    w0: Tensor  # (d,) weights at the start of the round: the same, where the hook `receive` did not change it
    state: Views  # client_state
    down: Views  # receives, receives_own
    scratch: Views  # accumulators of this round, zero at its start; the one thing that hooks may add to

    def logits(self, x: Tensor) -> Tensor:
        """f(x)  (B, c) at the live weights."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z(x), f(x)  (B, z), (B, c) in one pass."""

    def frozen(self, x: Tensor, at: Tensor | None = None, buffers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """z(x), f(x) of the model received (w0), or of another one of this round: evaluation mode, no gradient.

        Buffers are those received where none are given.
        """

    def task_loss(self, f: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The task's loss of given outputs, ()."""

    def grad(self, x: Tensor, y: Tensor, *, at: Tensor | None = None, loss: Loss | None = None) -> Tensor:
        """(d,) gradient of `loss` (default: the method's) at the live weights, or at the weights `at`.

        Of a step's passes the first moves batch-norm statistics, the others leave them alone.
        """

    def hessian_vector(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """(d,) exact H v of the method's loss at the live weights, by differentiating twice."""

    def head_grad(self, z: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """(d,) gradient of loss(f), f = head(z), with respect to the head alone; zero elsewhere. The body is not
        touched.
        """

    def grad_through(self, z: Tensor, loss: Callable[[Tensor], Tensor], *, at: Tensor) -> Tensor:
        """(d,) gradient of loss(head(z)) with the head at the weights `at` (d,), through the graph of z: no second
        body pass.
        """

    def take(self, group: str, flat: Tensor) -> Tensor:
        """The entries of a (d,) vector that belong to a group ("head", "body", ...)."""

    def lift(self, group: str, part: Tensor, into: Tensor) -> Tensor:
        """A copy of the (d,) vector `into` with a group's entries replaced."""

    def segments(self, groups: Sequence[str] | None = None) -> Sequence[Segment]:
        """The parameter tensors' places in the flat vector; segment.view(flat) has the tensor's shape."""

    def passes(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """z, f, y over the client's training rows, batch after batch: evaluation mode, no gradient."""

    def fit(
        self,
        epochs: int | None = None,
        *,
        groups: Sequence[str] | None = None,
        lr: float | None = None,
        start: Tensor | None = None,
        gradient: Callable[[Client, Tensor], Tensor] | None = None,
        plain: bool = False,
    ) -> Tensor:
        """The batch loop: SGD with a fresh optimiser. Returns the trained (d,) weights.

        With `start` it trains another model from there and leaves k.w, its buffers and counters as they were.
        `groups` trains those alone; `gradient` replaces the method's hook; `plain`: FedAvg's steps on all parameters.
        """

    def generator(self, *purpose: str | int) -> torch.Generator:
        """A generator (CPU) of this experiment and client for one purpose, the same in every round."""


class Uploads:
    """The cohort's gathered rows, ascending client id.   up.dw -> (m, s), one attribute a declared slot."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, views: Views) -> None:
        self.clients = tuple(clients)
        self.n = n  # (m,) float64 training samples
        self.p = p  # (m,) float64 weights, sum 1 (cohort.weighting)
        self._views = views

    def __getattr__(self, name: str) -> Tensor:
        return getattr(self._views, name)

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def uniform(self) -> Tensor:
        """(m,) float64, all 1/m."""
        return torch.full((len(self),), 1 / len(self), dtype=torch.float64)

    def mean(self, slot: str = "dw", p: Tensor | None = None) -> Tensor:
        """sum_i p_i slot_i, summed in float64; weights default to the cohort's."""
        return self.combine(self.p if p is None else p, slot)

    def combine(self, coefficients: Tensor, slot: str = "dw") -> Tensor:
        """sum_i c_i slot_i.   (m,) -> the slot's shape."""
        x = getattr(self, slot)
        return rules.combine(x.flatten(1) if x.dim() > 1 else x[:, None], coefficients).view(x.shape[1:])

    def gram(self, slot: str = "dw", span: tuple[int, int] | None = None) -> Tensor:
        """(m, m) float64 inner products of the clients' rows, over all columns wherever they are (or over one span)."""
        x = getattr(self, slot)
        return rules.gram(x if span is None else x[:, span[0] : span[1]])


class Server:
    """What a server hook sees."""

    def __init__(
        self,
        *,
        clients: int,
        classes: int,
        lr: float,
        segments: Sequence[tuple[str, str, int, int]],
        train_lr: float = 0.0,
    ) -> None:
        self.clients = clients  # N
        self.classes = classes
        self.lr = lr  # server.lr
        self.segments = tuple(segments)  # (name, group, start, stop) of this round's tensors, as columns of dw
        self.train_lr = train_lr  # eta_t of the round
        self.round = 0
        self.state: Views = Views({})


class Method:
    """FedAvg, and the base of every method."""

    paper: ClassVar[str] = ""
    client_state: ClassVar[Slots] = Slots()  # kept with the client, wherever it trains
    server_state: ClassVar[Slots] = Slots()
    receives: ClassVar[tuple[str, ...]] = ()  # server_state that travels with the weights, the same for all
    receives_own: ClassVar[Slots] = Slots()  # a different download for each client (hook `download`)
    sends: ClassVar[Slots] = Slots(dw=SHARED)
    scratch: ClassVar[Slots] = Slots()
    shared: ClassVar[tuple[str, ...]] = (EVERYTHING,)  # layout groups that travel; the others are the client's own
    trains: ClassVar[tuple[str, ...]] = (EVERYTHING,)  # layout groups that local training changes
    batches_a_step: ClassVar[int] = 1  # batches that one step is given, as one x, y to cut up (x.chunk)
    needs: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, Any] | None] = None  # hyperparameters at which it is FedAvg, bit for bit

    def prepare(self, module: nn.Module, classes: int) -> nn.Module:
        """The architecture that the method needs, made of the configured one before anything is laid out."""
        return module

    def rests(self, t: int) -> tuple[str, ...]:
        """Layout groups that do not travel up in round t: the server keeps its own, and tells them again only once
        they have changed. Only what lies at the end of the flat vector can rest (layout.COEF).
        """
        return ()

    # ---- client ----
    def loss(self, k: Client, x: Tensor, y: Tensor) -> Tensor:
        """What a step descends on, ()."""
        return k.task_loss(k.logits(x), x, y)

    def gradient(self, k: Client, g: Tensor) -> Tensor:
        """Correction of a batch's flat gradient.   (d,) -> (d,)"""
        return g

    def proximal(self, k: Client, x: Tensor, y: Tensor) -> Tensor | None:
        """Gradient of the term that holds w near the global model, at the live weights; None: there is none.   -> (d,)

        What FedSOL perturbs along. It is already part of `loss` or `gradient`; the engine does not add it.
        """
        return None

    def step(self, k: Client, x: Tensor, y: Tensor) -> Tensor:
        """The direction that the optimiser descends along, for rules that need more than one gradient.   -> (d,)"""
        return k.grad(x, y)

    def receive(self, k: Client) -> Tensor:
        """Weights that the client starts from.   -> (d,)"""
        return k.w0

    def train(self, k: Client) -> State:
        """The client's round, in phases; returns new client state."""
        k.fit()
        return State()

    def upload(self, k: Client) -> tuple[Row, State]:
        """What the client sends besides dw = w - w0 (formed by the engine where declared), and new client state."""
        return Row(), State()

    def weights(self, k: Client) -> Tensor:
        """What is evaluated as this client's model.   -> (d,)"""
        return k.w0

    def tune(self, k: Client, epochs: int) -> None:
        """Fine-tuning before evaluation, ft(epochs), from the weights evaluated; nothing of it is kept."""
        k.fit(epochs, plain=True)

    def predict(self, k: Client) -> Callable[[Tensor], Tensor] | None:
        """x -> outputs of this client where that is more than its model's own; called at the weights evaluated."""
        return None

    # ---- server ----
    def download(self, s: Server, client: int) -> Row:
        """Values of `receives_own` for one client."""
        return Row()

    def direction(self, s: Server, up: Uploads) -> Tensor:
        """The server's step:  w <- server_optim(w, direction).   -> (s,), as wide as up.dw"""
        return up.mean("dw")

    def remember(self, s: Server, up: Uploads) -> State:
        """New server state."""
        return State()


def overrides(method: Method, hook: str) -> bool:
    """Whether a method has its own version of a hook."""
    return getattr(method, hook).__func__ is not getattr(Method, hook)


class declared(property):  # noqa: N801 - written where `property` would be
    """A declaration that depends on hyperparameters. Read on the class it is that of the defaults."""

    def __get__(self, method: Any, owner: type | None = None) -> Any:
        return super().__get__(owner() if method is None and owner else method, owner)


def borrows(option: str, step: bool = False) -> Callable[[type], type]:
    """Class decorator: whatever does not make the step, or with `step` that too, is as in the method that the option
    holds, as in FedAvg where it holds None. What the class says itself comes first.
    """
    data = "client_state server_state receives receives_own sends scratch shared trains"
    hooks = "prepare receive train upload weights tune predict download direction remember"
    hooks += " loss gradient proximal step batches_a_step needs" if step else ""

    def borrowed(name: str) -> declared:
        return declared(lambda method: getattr(getattr(method, option) or Method(), name))

    def decorate(cls: type) -> type:
        for name in f"{data} {hooks}".split():
            if name not in vars(cls):
                setattr(cls, name, borrowed(name))
        return cls

    return decorate
