"""The arguments of a method's hooks, and the types that hooks return.

`Client` is the client that trains or is evaluated, `Uploads` the rows that the cohort sent, `Server` the server's side
of a round.

Samples x can be passed on, and indexed by rows: x[a:b], x.chunk(n), len(x). If a sample has several tensors, x is an
`Inputs` that holds them by name (common/inputs.py). With needs = {CLASSES}, targets are (B,) class numbers; otherwise
targets and outputs have the shape of the task, (B, ...).

Shapes: d parameters without frozen ones, s parameters that are sent in the round, b float buffers, c classes, z
features, N clients, m clients in the cohort, B samples in a batch.
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
    """The upload of a client, one tensor per slot: Row(dw=..., dc=...). The engine adds dw if it is missing."""


class State(dict[str, Tensor]):
    """Values of declared state. Read client.state.c_i or server.state.c; return State(c_i=...) with all slots.

    For slots that do not change return the old state: `client.state`, or State(**client.state, more=...).
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
    """The penalty weight / 2 ||w - anchor||^2 - <slope, w> of the current weights w, as a result of `regularizer`.

    It has the same gradient as that formula under autograd, in a fifth of the time.
    """

    weight: float
    anchor: Tensor  # (d,)
    slope: Tensor | None = None  # (d,)

    def value(self, w: Tensor) -> Tensor:
        """Return the penalty () at w (d,)."""
        value = self.weight / 2 * (w - self.anchor).square().sum()
        return value if self.slope is None else value - self.slope @ w

    def add_gradient(self, g: Tensor, w: Tensor) -> Tensor:
        """Add the gradient at w (d,) to g (d,) in place, and return g."""
        if self.slope is not None:
            g.sub_(self.slope)
        return g.add_(w - self.anchor, alpha=self.weight)


class Fitted(NamedTuple):
    """The result of `Client.fit`."""

    w: Tensor  # (d,) trained weights
    b: Tensor  # (b,) float buffers of the trained model


Loss = Callable[["Client", Tensor, Tensor], Tensor]
Regularizer = Callable[["Client"], Tensor | Quadratic | None]
Batch = tuple[Tensor, Tensor]  # x (B, ...), y (B,)
Part = Literal["train", "validation"]  # of a client's own training rows


class Client(Protocol):
    """The client that trains or is evaluated, as its hooks see it.

    Do not write to its tensors, and do not keep them: the engine uses them again in the next round. What a client keeps
    is declared state, which moves with it to the rank that trains it.
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
    epoch: int  # number of the current pass of `fit`, from 0
    last_epoch: bool  # whether the current step belongs to the last pass of `fit`
    steps: int  # K, the number of optimiser steps that `fit` has made on client.w
    # Sum of the weights with which a constant gradient enters w: K without momentum (FedNova's a_k); nan if steps are
    # not such sums. Declare needs = {SGD_STEPS}
    a: float
    w: Tensor  # (d,) current weights; in `loss` and `regularizer` a leaf tensor that requires a gradient
    b: Tensor  # (b,) current float buffers (batch statistics)
    received: Tensor  # (d,) the weights received, with the client's own parts
    b0: Tensor  # (b,) the float buffers received
    w0: Tensor  # (d,) weights at the start of local training: `received`, or the result of the hook `receive`
    at_w0: bool  # whether no step has been made, so that w equals w0; known without synchronising the device
    state: State  # client_state, as client.state.NAME; return new values from `train` or `upload`
    down: Views  # the slots of `receives` and per_client_download, as client.down.NAME
    # Accumulators of this client and round, as client.scratch.NAME: zero at the start of the round, not stored. Hooks
    # may write to them in place: client.scratch.NAME.add_(...)
    scratch: Views

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits f(x) at the current weights.

        Args:
            x: (B, ...) samples.

        Returns:
            (B, c) logits.
        """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features z(x) and logits f(x) at the current weights, from one pass. Declare needs = {FEATURES}.

        Returns:
            (B, z) inputs of the head, (B, c) logits.
        """

    def frozen(self, x: Tensor, at: Tensor | None = None, buffers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return features and logits of another model, in evaluation mode and without a gradient.

        Args:
            x: (B, ...) samples.
            at: (d,) weights that do not change during the round; default w0.
            buffers: (b,) float buffers; default those received.

        Returns:
            (B, z) features, (B, c) logits; for a model without features the logits twice.
        """

    def task_loss(self, f: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the task's loss () of given outputs f (B, c)."""

    def mean_loss(self, at: Tensor, part: Part = "validation") -> Tensor:
        """Return the mean task loss of the weights `at` (d,) over a part of the client's rows, () float64.

        The loss is computed in evaluation mode, without a gradient, with the current buffers; it is nan if there are no
        rows. The current model does not change. Declare needs = {VALIDATION} for the validation part.
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
        """Return the gradient of a loss on one batch.

        The first pass of a step updates the current batch statistics. Further passes do not, nor passes outside of
        steps, nor passes with `buffers`.

        Args:
            x, y: (B, ...) samples, (B,) targets.
            at: (d,) weights; default the current ones.
            loss: (client, x, y) -> (); default the method's, without its regularizer.
            buffers: (b,) float buffers of `at`, for example in client.scratch, which the pass writes to; default the
                current ones.

        Returns:
            (d,) gradient.
        """

    def regularizer_grad(self, regularizer: Regularizer) -> Tensor:
        """Return the gradient (d,) of a regularizer, such as that of another method, with respect to client.w."""

    def hessian_vector(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Return the exact Hessian-vector product H v (d,) of the method's loss at the current weights, for v (d,)."""

    def head_grad(self, z: Tensor, loss: Callable[[Tensor], Tensor], *, at: Tensor | None = None) -> Tensor:
        """Return the gradient of loss(head(z)) without another pass through the body.

        Args:
            z: (B, z) features. If they have a graph, the gradient continues into the body, and the loss is recorded as
                that of the step. With `z.detach()` only the head has a gradient, and no loss is recorded.
            loss: logits (B, c) -> ().
            at: (d,) weights of the head; default the current ones.

        Returns:
            (d,) gradient.
        """

    def take(self, group: str, flat: Tensor) -> Tensor:
        """Return the entries of a (d,) vector that belong to a layout group ("head", "body", ...)."""

    def lift(self, group: str, part: Tensor, into: Tensor) -> Tensor:
        """Return a copy of the (d,) vector `into` in which the entries of a layout group are replaced by `part`."""

    def segments(self, groups: Sequence[str] | None = None) -> Sequence[Segment]:
        """Return the positions of parameter tensors in the flat vector, for these layout groups or for all.

        Each segment has .name (as in the state_dict), .group, .shape, .start and .stop; segment.view(flat) is the
        tensor. Groups are body, norm (normalisation layers), head (the last layer), atom and coef (filter
        decomposition), and those that parameter_groups() of a model names.
        """

    def batches(self, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """Yield batches of the client's training rows without augmentation, for hooks that read data outside of steps.

        Args:
            generator: draws the order (see `generator`); None: the order of the rows.

        Yields:
            (B, ...) samples and (B,) targets with B = train.batch_size; the last batch may be smaller.
        """

    def passes(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield features (B, z), logits (B, c), targets (B,) of the training rows; evaluation mode, no gradient."""

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
        """Train with the optimiser train.optim, which is new unless train.persist_optimizer has stored its state.

        Args:
            epochs: passes over the training rows; default train.epochs, or enough for train.steps.
            groups: layout groups to train; default the method's `trains`.
            lr: learning rate; default eta_t.
            start: (d,) weights of another model to train. client.w, its buffers, counters and recorded loss do not
                change, and the optimiser is new.
            buffers: (b,) float buffers of that model; default the current ones.
            regularizer: used in place of the hook of that name.
            plain: make FedAvg's steps on all parameters, with a new optimiser.
            bare: make steps w <- w - lr g, without momentum, weight decay, clipping and optimiser of `train`.
        """

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return a random generator on the CPU, seeded from the run's seed, this client and `purpose`.

        It draws the same numbers in every round, unless `purpose` contains the round.
        """


Span = tuple[int, int]


class Uploads:
    """The uploads of the cohort: one attribute per declared slot, with one row per client, as updates.dw (m, s)."""

    clients: tuple[int, ...]  # ids of the clients whose uploads count, ascending, as the rows
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
        """Equal weights 1/m, (m,) float64."""
        return torch.full((len(self),), 1 / len(self), dtype=torch.float64)

    def mean(self, slot: str = "dw", p: Tensor | None = None) -> Tensor:
        """Return sum_i p_i slot_i, summed in float64; the default of the weights p (m,) is updates.p."""
        return self.combine(self.p if p is None else p, slot)

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        """Return sum_i c_i slot_i in the shape of the slot.

        Args:
            coefficients: (m,) c.
            slot: the name of the slot.
            span: (a, b) restricts the sum to columns a to b - 1 of the flat slot; the result is (b - a,) then.
        """
        x = getattr(self, slot)
        columns, start, width = _columns(x, span)
        combined = linear.combine(columns, coefficients, start, width)
        return combined if span else combined.view(x.shape[1:])

    def gram(self, slot: str = "dw", span: Span | None = None) -> Tensor:
        """Return the inner products of the clients' rows, (m, m) float64, over all columns or a span (a, b)."""
        return linear.total(linear.gram_blocks(*_columns(getattr(self, slot), span)))

    def products(self, v: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        """Return the inner products of the clients' rows with v, (m,) float64, over all columns or those of a span."""
        columns, start, _ = _columns(getattr(self, slot), span)
        return linear.products(columns, v.flatten(), start)

    def trimmed(self, trim: float, slot: str = "dw") -> Tensor:
        """Return the mean of each entry without its floor(trim m) smallest and largest values; 1/2 gives the median."""
        x = getattr(self, slot)
        return linear.trimmed_mean(_columns(x)[0], trim).view(x.shape[1:])


def _columns(x: Tensor, span: Span | None = None) -> tuple[Tensor, int, int]:
    """Return rows (m, n) of a slot or of a span of its columns; the first column; the slot's number of columns."""
    rows = x.flatten(1) if x.dim() > 1 else x[:, None]
    a, b = span or (0, rows.shape[1])
    return rows[:, a:b], a, rows.shape[1]


class Server(Protocol):
    """The server, as its hooks see it. Do not write to its tensors: the engine uses them again in the next round."""

    clients: int  # N, the number of clients
    classes: int  # c, the number of classes
    label_counts: Tensor  # (N, c) int64, training samples of all clients. Declare needs = {LABEL_COUNTS}
    round: int  # from 0; in the evaluation after round t it is t
    rounds: int  # rounds of the whole run
    lr: float  # server.lr of the config
    train_lr: float  # eta_t, the clients' learning rate of this round; only in `aggregate`
    w: Tensor  # (d,) the global model: in `aggregate` before the step, in `download` as it is broadcast
    shared: Tensor  # (s,) the entries of w that are sent in this round, with the columns of dw; only in `aggregate`
    # The parameter tensors as columns of dw: .name, .group, .start, .stop, .shape, segment.view(updates.dw[i]); only in
    # `aggregate`
    segments: Sequence[Segment]
    state: State  # server_state, as server.state.NAME; return new values from `aggregate`

    def figures(self, **values: float | Tensor) -> None:
        """Record numbers of the method in this round's row of metrics.jsonl and on the console: figures(step=1.5).

        Only in `aggregate`.
        """

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return a random generator on the CPU, seeded from the run's seed and `purpose`.

        It draws the same numbers in every round, unless `purpose` contains the round.
        """
