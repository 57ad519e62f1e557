"""The arguments of a method's hooks, and the types that hooks return.

`Client` is the client that trains or is evaluated, `Uploads` are the uploads of the cohort in a round, and `Server` is
the server.

Hooks may pass samples x on to other functions, and may use x[a:b], x.chunk(n) and len(x), which act on rows. If a
sample consists of several tensors, x is an `Inputs` object that holds them by name (common/inputs.py). With needs =
{CLASSES}, targets are (B,) class indices; otherwise the task determines the shape (B, ...) of targets and outputs.

Shapes: d parameters, excluding frozen ones; s parameters that are sent in the round; b float buffers; c classes; z
features; N clients; m clients in the cohort; B samples in a batch.
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


class SlotValues(dict[str, Tensor]):
    """Values of declared slots, as `upload` and `download` return them: SlotValues(dw=..., dc=...).

    The engine adds dw = w - w0 to an upload if it is declared and missing.
    """


class State(dict[str, Tensor]):
    """Values of the declared state of a client or of the server.

    Hooks read a slot as client.state.c_i or server.state.c, and return State(c_i=...) with all slots. To keep all slots
    unchanged, return `client.state`.
    """

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            declared = ", ".join(self) or "none"
            raise AttributeError(f"state {name!r} is not declared; declared: {declared}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"state {name!r} is read-only; return its new value from the hook, and the engine stores it"
        )


@dataclass(frozen=True)
class Quadratic:
    """A quadratic penalty, weight / 2 ||w - anchor||^2 - <slope, w>, that the hook `regularizer` may return.

    Its gradient is computed without autograd, which is five times as fast.
    """

    weight: float
    anchor: Tensor  # (d,)
    slope: Tensor | None = None  # (d,)

    def value(self, w: Tensor) -> Tensor:
        """Return the penalty () at the weights w (d,)."""
        value = self.weight / 2 * (w - self.anchor).square().sum()
        return value if self.slope is None else value - self.slope @ w

    def add_gradient(self, g: Tensor, w: Tensor) -> Tensor:
        """Add the gradient of the penalty at the weights w (d,) to g (d,) in place, and return g."""
        if self.slope is not None:
            g.sub_(self.slope)
        return g.add_(w - self.anchor, alpha=self.weight)


class FitResult(NamedTuple):
    """The result of `Client.fit`."""

    w: Tensor  # (d,) trained weights
    b: Tensor  # (b,) float buffers of the trained model


Loss = Callable[["Client", Tensor, Tensor], Tensor]
Regularizer = Callable[["Client"], Tensor | Quadratic | None]
Batch = tuple[Tensor, Tensor]  # x (B, ...), y (B,)
Part = Literal["train", "validation"]  # of a client's own training rows


class Client(Protocol):
    """The client that trains or is evaluated; the first argument of most hooks.

    Do not write to its tensors, and do not store them: the engine reuses them in the next round. To keep a value
    between rounds, declare it in client_state, which the engine moves to the rank that trains the client.
    """

    id: int  # from 0 to N - 1
    clients: int  # N, the number of clients
    round: int  # from 0; in the evaluation after round t it is t
    rounds: int  # rounds of the whole run
    n: int  # number of training samples, without validation samples
    label_counts: Tensor  # (c,) int64, number of training samples of each class
    classes: int  # c, the number of classes
    lr: float  # eta_t, the learning rate of this round
    batch_size: int | None  # samples in a batch; None: all samples
    accumulate: int  # number of parts in which `grad` and `hessian_vector_product` process a batch (train.accumulate)
    epoch: int  # index of the current pass of `fit` over the samples, from 0
    last_epoch: bool  # whether the current step belongs to the last pass of `fit`
    steps: int  # K, the number of optimiser steps that `fit` has made on client.w
    # Sum of the weights with which a constant gradient enters w (FedNova's a_k): K without momentum. It is nan if
    # w - w0 is not a weighted sum of gradients, so declare needs = {SGD_STEPS}.
    gradient_weight: float
    w: Tensor  # (d,) current weights; in `loss` and `regularizer` a leaf tensor that requires a gradient
    b: Tensor  # (b,) current float buffers (batch statistics)
    received: Tensor  # (d,) the weights received, with the client's own parts
    b0: Tensor  # (b,) the float buffers received
    w0: Tensor  # (d,) weights at the start of local training: `received`, or the result of the hook `initial_weights`
    at_w0: bool  # whether w equals w0 because no step has been made yet; does not synchronise the device
    state: State  # client_state, as client.state.NAME; return new values from `train` or `upload`
    downloads: Views  # the slots named in `receives` or declared in per_client_download: client.downloads.NAME
    # Zero at the start of each round, and not stored; hooks may write to them: client.accumulators.NAME.add_(...)
    accumulators: Views

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits f(x) (B, c) of samples x (B, ...) at the current weights."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features z(x) (B, z), which are the inputs of the head, and the logits f(x) (B, c), from one pass.

        The pass uses the current weights. A method that calls this function declares needs = {FEATURES}.
        """

    def reference_forward(
        self, x: Tensor, at: Tensor | None = None, buffers: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return features and logits of a fixed reference model, in evaluation mode and without a gradient.

        Args:
            x: (B, ...) samples.
            at: (d,) weights of the reference model, which must not change during the round; default w0.
            buffers: (b,) float buffers of the reference model; default b0.

        Returns:
            (B, z) features and (B, c) logits; the logits twice if the model has no features.
        """

    def task_loss(self, f: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the task's loss () for outputs f (B, c), samples x (B, ...) and targets y (B,)."""

    def mean_loss(self, at: Tensor, part: Part = "validation") -> Tensor:
        """Return the mean task loss, () float64, at weights `at` (d,) over the client's training or validation rows.

        The loss is computed in evaluation mode, without a gradient, with the current buffers; it is nan if there are no
        rows. The current model does not change.

        Args:
            at: (d,) the weights.
            part: which rows are used, "train" or "validation". With "validation" the method must declare
                needs = {VALIDATION}.
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

        Only the first pass of a step updates the current batch statistics; passes outside of steps and passes with
        `buffers` never do.

        Args:
            x: (B, ...) samples.
            y: (B,) targets.
            at: (d,) weights; default the current ones.
            loss: a function (client, x, y) -> (); default the method's `loss`, without its regularizer.
            buffers: (b,) float buffers that belong to the weights `at`, for example a slot of client.accumulators;
                the pass updates them in place. Default: the current ones.

        Returns:
            (d,) gradient.
        """

    def regularizer_grad(self, regularizer: Regularizer) -> Tensor:
        """Return the gradient (d,) of a regularizer with respect to client.w.

        Args:
            regularizer: a function client -> () or `Quadratic`, for example the hook of another method.
        """

    def hessian_vector_product(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Return the exact product H v (d,) of a vector v (d,) and the Hessian H of the method's loss on a batch x, y.

        H is taken at the current weights.
        """

    def head_grad(self, z: Tensor, loss: Callable[[Tensor], Tensor], *, at: Tensor | None = None) -> Tensor:
        """Return the gradient of loss(head(z)) without another pass through the body.

        Args:
            z: (B, z) features. If they have an autograd graph, the gradient includes the body, and the loss is recorded
                as the loss of the step. With `z.detach()` only the head has a gradient, and no loss is recorded.
            loss: a function logits (B, c) -> ().
            at: (d,) weights from which the head is taken; default the current ones.

        Returns:
            (d,) gradient.
        """

    def extract_group(self, group: str, flat: Tensor) -> Tensor:
        """Return the entries of a vector `flat` (d,) that belong to a layout group, such as "head" (see `segments`)."""

    def replace_group(self, group: str, part: Tensor, into: Tensor) -> Tensor:
        """Return a copy of the vector `into` (d,) in which the entries of a layout group are replaced by `part`.

        `part` has the form that `extract_group` returns.
        """

    def segments(self, groups: Sequence[str] | None = None) -> Sequence[Segment]:
        """Return the positions of the parameter tensors in the flat vector.

        Each segment has .name (as in the state_dict), .group, .shape, .start and .stop; segment.view(flat) is the
        tensor as a view of the vector `flat`. The layout groups are body, norm (normalisation layers), head (the last
        layer), atom and coef (filter decomposition), and the groups that the model's parameter_groups() defines.

        Args:
            groups: the layout groups whose segments are returned; default all.
        """

    def batches(self, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """Yield batches of the client's training rows without augmentation, for hooks that read data outside of steps.

        Args:
            generator: a random generator that draws the order of the rows; None: the rows are not shuffled.

        Yields:
            (B, ...) samples and (B,) targets with B = train.batch_size; the last batch may be smaller.
        """

    def forward_batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Run the current model on the training rows, in evaluation mode and without a gradient.

        Yields:
            Features (B, z), logits (B, c) and targets (B,) of each batch.
        """

    def fit(
        self,
        epochs: int | None = None,
        *,
        groups: Sequence[str] | None = None,
        lr: float | None = None,
        start: Tensor | None = None,
        buffers: Tensor | None = None,
        regularizer: Regularizer | None = None,
        fedavg_steps: bool = False,
        plain_sgd: bool = False,
    ) -> FitResult:
        """Train the client with the optimiser train.optim, and return the trained weights and buffers.

        The optimiser starts without state, unless train.persist_optimizer has stored its state in an earlier round.

        Args:
            epochs: passes over the training rows; default train.epochs, or as many as train.steps needs.
            groups: layout groups to train; default the method's `trains`.
            lr: learning rate; default eta_t.
            start: (d,) weights of another model to train in place of client.w. client.w, its buffers, counters and
                recorded loss do not change, and the optimiser starts without state.
            buffers: (b,) float buffers of that model; default the current ones.
            regularizer: a function that is used in place of the hook `regularizer`.
            fedavg_steps: take FedAvg's steps on all parameters, without the method's hooks, and with an optimiser that
                starts without state.
            plain_sgd: like fedavg_steps, but with steps w <- w - lr g; train.optim, momentum, weight decay and clipping
                are not used.
        """

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return a random generator on the CPU, seeded with the run's seed, this client's id and a purpose.

        It draws the same numbers in every round, unless `purpose` includes the round number.

        Args:
            purpose: words and numbers that distinguish this generator from others of the client.
        """


Span = tuple[int, int]


class Uploads:
    """The uploads of the cohort in one round.

    Each slot in `sends` is an attribute with one row per client, for example updates.dw (m, s).
    """

    clients: tuple[int, ...]  # ids of the clients whose uploads are used, ascending, in the order of the rows
    n: Tensor  # (m,) float64 numbers of training samples
    p: Tensor  # (m,) float64 weights with sum 1 (cohort.weighting)

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, views: Views) -> None:
        self.clients, self.n, self.p = tuple(clients), n, p
        self._views = views

    def __getattr__(self, name: str) -> Tensor:
        return getattr(self._views, name)

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def uniform(self) -> Tensor:
        """The weight 1/m for each client of the cohort, (m,) float64."""
        return torch.full((len(self),), 1 / len(self), dtype=torch.float64)

    def mean(self, slot: str = "dw", p: Tensor | None = None) -> Tensor:
        """Return the weighted mean of a slot over the cohort, sum_i p_i slot_i, summed in float64.

        Args:
            slot: the name of the slot.
            p: (m,) weights; default updates.p.
        """
        return self.combine(self.p if p is None else p, slot)

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        """Return sum_i c_i slot_i over the cohort, in the shape of the slot.

        Args:
            coefficients: (m,) the coefficients c.
            slot: the name of the slot.
            span: (a, b) to combine only columns a to b - 1 of the flattened rows; the result is then (b - a,).
        """
        x = getattr(self, slot)
        columns, start, width = _select_columns(x, span)
        combined = linear.weighted_sum(columns, coefficients, start, width)
        return combined if span else combined.view(x.shape[1:])

    def gram(self, slot: str = "dw", span: Span | None = None) -> Tensor:
        """Return the inner products of all pairs of the clients' rows of a slot, (m, m) float64.

        Args:
            slot: the name of the slot.
            span: (a, b) to use only columns a to b - 1 of the flattened rows.
        """
        return linear.sum_blocks(linear.gram_by_block(*_select_columns(getattr(self, slot), span)))

    def inner_products(self, v: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        """Return the inner product of each client's row of a slot with a vector v, (m,) float64.

        Args:
            v: the vector, in the shape of the slot, or (b - a,) with a span.
            slot: the name of the slot.
            span: (a, b) to use only columns a to b - 1 of the flattened rows.
        """
        columns, start, _ = _select_columns(getattr(self, slot), span)
        return linear.inner_products(columns, v.flatten(), start)

    def trimmed_mean(self, trim: float, slot: str = "dw") -> Tensor:
        """Return the trimmed mean of each entry over the clients, in the shape of the slot.

        Args:
            trim: fraction; the floor(trim m) smallest and floor(trim m) largest of m values are left out (1/2: median).
            slot: the name of the slot.
        """
        x = getattr(self, slot)
        return linear.trimmed_mean(_select_columns(x)[0], trim).view(x.shape[1:])


def _select_columns(x: Tensor, span: Span | None = None) -> tuple[Tensor, int, int]:
    """Return columns a to b - 1 of the flattened rows of a slot, the number a, and the number of columns of a row.

    x (m, ...): the rows of the slot. span: the columns (a, b); None: all columns.
    """
    rows = x.flatten(1) if x.dim() > 1 else x[:, None]
    a, b = span or (0, rows.shape[1])
    return rows[:, a:b], a, rows.shape[1]


class Server(Protocol):
    """The server, as passed to the hooks `download` and `aggregate`.

    Do not write to its tensors: the engine reuses them in the next round.
    """

    clients: int  # N, the number of clients
    classes: int  # c, the number of classes
    # (N, c) int64, number of training samples of each client and class. Declare needs = {LABEL_COUNTS}.
    label_counts: Tensor
    round: int  # from 0; in the evaluation after round t it is t
    rounds: int  # rounds of the whole run
    lr: float  # server.lr of the config
    train_lr: float  # eta_t, the clients' learning rate of this round; only in `aggregate`
    w: Tensor  # (d,) the global model: in `aggregate` before the step, in `download` as it will be broadcast
    shared: Tensor  # (s,) the entries of w that are sent in this round, in the columns of dw; only in `aggregate`
    # The positions of the parameter tensors in the columns of dw: .name, .group, .start, .stop, .shape,
    # segment.view(updates.dw[i]); only in `aggregate`
    segments: Sequence[Segment]
    state: State  # server_state, as server.state.NAME; return new values from `aggregate`

    def log_metrics(self, **values: float | Tensor) -> None:
        """Add metrics of the method to this round's row of metrics.jsonl and to the console output.

        May only be called in `aggregate`, for example server.log_metrics(step=1.5).

        Args:
            values: the metrics by name.
        """

    def generator(self, *purpose: str | int) -> torch.Generator:
        """Return a random generator on the CPU, seeded with the run's seed and a purpose.

        It draws the same numbers in every round, unless `purpose` includes the round number.

        Args:
            purpose: words and numbers that distinguish this generator from others of the server.
        """
