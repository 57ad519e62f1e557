"""What the engine hands to a method's hooks, and what they give back.

Client: the client that trains or is evaluated. Uploads: the cohort's gathered rows. Server: the server's side of a
round. Hooks map tensors to tensors; only the engine writes, stores and sends.
Samples x are handed on, and cut by rows: x[a:b], x.chunk(n), len(x). Where the data have several tensors a sample, x is
an `Inputs` of them by name (common/inputs.py), else a tensor. Targets are (B,) class numbers where a method has needs =
{CLASSES}; without that they have the task's own shape, (B, ...), and so have outputs.
Shapes: d parameters (frozen ones are none of them), s those of them that travel in the round, b float buffers, c
classes, z features, N clients, m of them in the cohort, B samples in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fedmpi.flat import linear
from fedmpi.flat.layout import Segment
from fedmpi.flat.packing import Views


class Row(dict[str, Tensor]):
    """What a client uploads, one entry a declared slot: Row(dw=..., dc=...). The engine adds dw where it is missing."""


class State(dict[str, Tensor]):
    """Values of declared state: client.state.c_i, server.state.c to read; State(c_i=...) with all of it to return.

    What stays as it was is returned as it was: `client.state`, `server.state`, or State(**client.state, more=...).
    """

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            declared = ", ".join(self) or "none"
            raise AttributeError(f"no state {name!r} is declared here (declared: {declared})") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"state {name!r} is read-only: return the new value, the engine stores it")


@dataclass(frozen=True)
class Quadratic:
    """weight / 2 ||w - anchor||^2 - <slope, w> of the live weights w, as `regularizer` may return it.

    The same as that formula in tensors, of which autograd takes the gradient, in a fifth of the time.
    """

    weight: float
    anchor: Tensor  # (d,)
    slope: Tensor | None = None  # (d,)

    def value(self, w: Tensor) -> Tensor:
        """Return the term at w (d,), ()."""
        value = self.weight / 2 * (w - self.anchor).square().sum()
        return value if self.slope is None else value - self.slope @ w

    def add_gradient(self, g: Tensor, w: Tensor) -> Tensor:
        """Add the gradient at w (d,) to g (d,), in place, and return that."""
        if self.slope is not None:
            g.sub_(self.slope)
        return g.add_(w - self.anchor, alpha=self.weight)


class Fitted(NamedTuple):
    """What `Client.fit` returns."""

    w: Tensor  # (d,) trained weights
    b: Tensor  # (b,) the float buffers that go with them


Loss = Callable[["Client", Tensor, Tensor], Tensor]
Regularizer = Callable[["Client"], Tensor | Quadratic | None]
Batch = tuple[Tensor, Tensor]  # x (B, ...), y (B,)
Part = Literal["train", "validation"]  # of a client's own training rows


class Client(Protocol):
    """What a hook sees of the client that trains or is evaluated.

    Tensors are the engine's: read, do not write. They are used again in the next round; what a client is to keep is
    declared state, which follows it to whichever rank trains it.
    """

    id: int  # from 0 to N - 1
    clients: int  # N, the number of clients
    round: int  # from 0; in the evaluation after round t it is t
    rounds: int  # rounds of the whole run
    n: int  # training samples, without those held out for validation
    label_counts: Tensor  # (c,) int64, of the training samples
    classes: int  # c, the number of classes
    lr: float  # eta_t, the learning rate of this round
    batch_size: int | None  # samples of a batch; None: all at once
    epoch: int  # pass of the running `fit`, from 0
    last_epoch: bool  # whether the step at hand is one of the last ones of `fit`, as many as make a pass
    steps: int  # K, optimiser steps made by `fit` on client.w
    # sum of the weights with which a constant gradient enters w: K without momentum (FedNova's a_k); nan where steps
    # are not such sums. Declare needs = {SGD_STEPS}
    a: float
    w: Tensor  # (d,) live weights; in `loss` and `regularizer` a leaf of which autograd takes the gradient
    b: Tensor  # (b,) live float buffers (batch statistics)
    received: Tensor  # (d,) what was received, and the client's own parts
    b0: Tensor  # (b,) float buffers received
    w0: Tensor  # (d,) weights at the start of local training: `received`, or what the hook `receive` made of it
    at_w0: bool  # whether w is still w0: no step has been made. Known without asking the device
    state: State  # client_state, client.state.NAME: read it, and return what is new
    down: Views  # client.down.NAME: what came down, of `receives` and of per_client_download
    # client.scratch.NAME: accumulators of this client and round, zero at its start and not kept. The one thing that
    # hooks may write to, in place: client.scratch.NAME.add_(...)
    scratch: Views

    def logits(self, x: Tensor) -> Tensor:
        """f(x) at the live weights.

        Args:
            x: (B, ...) samples.

        Returns:
            (B, c) logits.
        """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z(x) and f(x) at the live weights in one pass. Declare needs = {FEATURES}.

        Returns:
            (B, z) what the head is given, (B, c) logits.
        """

    def frozen(self, x: Tensor, at: Tensor | None = None, buffers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """z(x) and f(x) of another model, in evaluation mode and without gradient.

        Args:
            x: (B, ...) samples.
            at: (d,) weights that stay the same for the whole round; default w0.
            buffers: (b,) float buffers; default those received.

        Returns:
            (B, z), (B, c); for a model without features f twice.
        """

    def task_loss(self, f: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The task's loss of outputs f (B, c) that there are already, ()."""

    def mean_loss(self, at: Tensor, part: Part = "validation") -> Tensor:
        """Mean task loss of the weights `at` (d,) over a part of the client's rows, () float64.

        Evaluation mode, no gradient, the live buffers; nan where there are no rows. The live model stays what it is.
        Declare needs = {VALIDATION} for the validation part: a run that holds nothing out has no such rows.
        """

    def grad(
        self,
        x: Tensor,
        y: Tensor,
        *,
        at: Tensor | None = None,
        loss: Loss | None = None,
        buffers: Tensor | None = None,
    ) -> Tensor:
        """Gradient of a loss on one batch.

        Args:
            x, y: (B, ...) samples, (B,) targets.
            at: (d,) weights; default the live ones.
            loss: (client, x, y) -> (); default the method's, without its regularizer.
            buffers: (b,) float buffers of `at`, such as client.scratch's, which the pass writes to; default the live
            ones.

        Returns:
            (d,) gradient. Of a step's passes the first moves the live batch-norm statistics, the others leave them
            alone; so do passes outside of steps, and those with `buffers`.
        """

    def regularizer_grad(self, regularizer: Regularizer) -> Tensor:
        """(d,) gradient of a regularizer, such as the hook of another method, with respect to client.w."""

    def hessian_vector(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """(d,) exact H v of the method's loss at the live weights, v (d,); for second-order steps (Per-FedAvg)."""

    def head_grad(self, z: Tensor, loss: Callable[[Tensor], Tensor], *, at: Tensor | None = None) -> Tensor:
        """Gradient of loss(head(z)) without another pass through the body.

        Args:
            z: (B, z) features. With a graph behind them the gradient goes on into the body and the loss is the step's;
                `z.detach()` leaves the head's gradient alone, and no loss is recorded.
            loss: logits (B, c) -> ().
            at: (d,) weights that the head takes; default the live ones.

        Returns:
            (d,) gradient.
        """

    def take(self, group: str, flat: Tensor) -> Tensor:
        """The entries of a (d,) vector that belong to a group ("head", "body", ...)."""

    def lift(self, group: str, part: Tensor, into: Tensor) -> Tensor:
        """A copy of the (d,) vector `into` with a group's entries replaced."""

    def segments(self, groups: Sequence[str] | None = None) -> Sequence[Segment]:
        """The parameter tensors' places in the flat vector, of these layout groups; default all.

        Of each .name (as in the state_dict), .group, .shape, .start and .stop; segment.view(flat) has the tensor's
        shape. Groups are body, norm (normalisation layers), head (the last layer), atom and coef (filter
        decomposition), and those that a model's own parameter_groups() names.
        """

    def batches(self, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """x, y of the client's training rows, without augmentation, for hooks that look at the data outside of steps.

        Args:
            generator: draws the order (see `generator`); None: the rows' own order.

        Yields:
            (B, ...), (B,) with B = train.batch_size, the last one smaller.
        """

    def passes(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """z (B, z), f (B, c), y (B,) over the training rows at the live weights: evaluation mode, no gradient."""

    def fit(
        self,
        epochs: int | None = None,
        *,
        groups: Sequence[str] | None = None,
        lr: float | None = None,
        start: Tensor | None = None,
        buffers: Tensor | None = None,
        regularizer: Regularizer | None = None,
        plain: bool = False,
        bare: bool = False,
    ) -> Fitted:
        """The batch loop: steps of train.optim with a fresh optimiser, or with that which train.keep_optim has kept.

        Args:
            epochs: passes; default train.epochs, or as many as make train.steps.
            groups: layout groups to train; default the method's `trains`.
            lr: default eta_t.
            start: (d,) weights of another model to train from there; client.w, its buffers, counters and recorded loss
                stay what they were. The optimiser is fresh.
            buffers: (b,) float buffers of that model; default the live ones.
            regularizer: in place of the hook of that name.
            plain: FedAvg's steps on all parameters, with a fresh optimiser.
            bare: the same by w <- w - lr g, without the momentum, weight decay, clipping and optimiser of `train`.
        """

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return a random generator on the CPU whose seed is derived from the run's seed, this client and `purpose`.

        It draws the same numbers in every round, unless the round is a part of `purpose`.
        """


Span = tuple[int, int]


class Uploads:
    """The cohort's gathered rows, ascending client id.   updates.dw -> (m, s), one attribute a declared slot."""

    clients: tuple[int, ...]  # ids of those whose uploads count, ascending
    n: Tensor  # (m,) float64 training samples
    p: Tensor  # (m,) float64 weights, sum 1 (cohort.weighting)

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, views: Views) -> None:
        self.clients, self.n, self.p = tuple(clients), n, p
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
        """sum_i p_i slot_i, in float64 (very wide slots: flat/linear.py, WIDE); weights default to the cohort's."""
        return self.combine(self.p if p is None else p, slot)

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        """sum_i c_i slot_i.   (m,) -> the slot's shape, or (b - a,) of the columns [a, b) of the flat slot."""
        x = getattr(self, slot)
        columns, start, width = _columns(x, span)
        combined = linear.combine(columns, coefficients, start, width)
        return combined if span else combined.view(x.shape[1:])

    def gram(self, slot: str = "dw", span: Span | None = None) -> Tensor:
        """(m, m) float64 inner products of the clients' rows, over all columns wherever they are (or over one span)."""
        return linear.total(linear.gram_blocks(*_columns(getattr(self, slot), span)))

    def products(self, v: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        """(m,) float64 inner products of the clients' rows with v, over all columns or over one span (v as long)."""
        columns, start, _ = _columns(getattr(self, slot), span)
        return linear.products(columns, v.flatten(), start)

    def trimmed(self, trim: float, slot: str = "dw") -> Tensor:
        """Per entry the mean without the floor(trim m) smallest and as many largest; towards 1/2 the median."""
        x = getattr(self, slot)
        return linear.trimmed_mean(_columns(x)[0], trim).view(x.shape[1:])


def _columns(x: Tensor, span: Span | None = None) -> tuple[Tensor, int, int]:
    """Rows (m, n) of a slot, or of a span of its columns; the first column; the columns of the whole slot."""
    rows = x.flatten(1) if x.dim() > 1 else x[:, None]
    a, b = span or (0, rows.shape[1])
    return rows[:, a:b], a, rows.shape[1]


class Server(Protocol):
    """What a server hook sees. Tensors are the engine's: read, do not write; the next round uses them again."""

    clients: int  # N, the number of clients
    classes: int  # c, the number of classes
    label_counts: Tensor  # (N, c) int64, training samples of all clients. Declare needs = {LABEL_COUNTS}
    round: int  # from 0; in the evaluation after round t it is t
    rounds: int  # rounds of the whole run
    lr: float  # server.lr of the config
    train_lr: float  # eta_t of the round. For `aggregate`; in `download` it is of an earlier round, or 0
    w: Tensor  # (d,) the global model: in `aggregate` before the step, in `download` as it goes out
    # (s,) those of its entries that travel in this round, column for column with dw. For `aggregate`; in `download` of
    # an earlier round, or empty, as after the run went on from a checkpoint
    shared: Tensor
    # this round's tensors as columns of dw: .name, .group, .start, .stop, .shape, segment.view(updates.dw[i]). For
    # `aggregate`, likewise
    segments: Sequence[Segment]
    state: State  # server_state, server.state.NAME: read it, and return what is new

    def figures(self, **values: float | Tensor) -> None:
        """Numbers of the method's own for this round's line of metrics.jsonl and the console: figures(step=1.5).

        For `aggregate`; those of `download` are dropped.
        """

    def generator(self, *purpose: str | int) -> torch.Generator:
        """A generator (CPU) of the server for one purpose, the same in every round unless the purpose names it."""
