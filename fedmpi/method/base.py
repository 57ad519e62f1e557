"""The base class of all methods: its hooks, and what a method may declare.

The defaults of all hooks together are FedAvg. A method overrides the smallest hook that can express its equation,
    loss, regularizer < gradient < step < train < upload
and declares what it keeps, sends and receives. Hooks map tensors to tensors (context.py describes their arguments);
only the engine writes, stores and sends. Methods derive from `Method` and from nothing else, are frozen dataclasses
(fields are hyperparameters), and never call super(). An obvious mistake, such as a hook with a misspelled name, is a
TypeError when the class is defined.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor, nn

from fedmpi.flat.layout import EVERYTHING
from fedmpi.method.context import Client, Quadratic, Row, Server, State, Uploads
from fedmpi.method.slots import SHARED, Slots, Travel

# Requirements that a method may have of an experiment. They are checked before training.

PLAIN_SGD = "plain SGD"  # SGD_STEPS without momentum
SGD_STEPS = "steps of SGD (train.optim: sgd; without train.clip_norm, train.persist_optimizer)"
FEATURES = "a model with features and a last linear layer"
LAST_LAYER = "a model with a last linear layer"  # whose inputs the method does not read
CLASSES = "a classification task"
PLAIN_SERVER = "a plain server step (server.optim: sgd, server.lr: 1, server.rule: auto)"
LABEL_COUNTS = "the label counts of all clients"
ONE_CLASS = "targets of one class each"  # no smoothing: a method that takes absent classes out of the softmax
VALIDATION = "validation rows"


class Method:
    """FedAvg, and the base of every method. Its public functions are the hooks, its annotations the declarations."""

    # State that each client keeps between its rounds, on whichever rank it trains. Hooks read it as client.state.NAME;
    # `train` and `upload` return its new values.
    client_state: ClassVar[Slots] = Slots()
    # State that rank 0 keeps. Hooks read it as server.state.NAME; `aggregate` returns its new values.
    server_state: ClassVar[Slots] = Slots()
    # Names of server_state that all clients receive with the weights, as client.down.NAME.
    receives: ClassVar[tuple[str, ...]] = ()
    # Values that differ from client to client, which the hook `download` computes: client.down.NAME. In evaluations,
    # clients receive them if the method overrides `weights`, `predict` or `tune`; otherwise client.down.NAME is zero.
    per_client_download: ClassVar[Slots] = Slots()
    # The slots of an upload: updates.NAME in `aggregate`. The engine computes dw = w - w0 if it is declared.
    sends: ClassVar[Slots] = Slots(dw=SHARED)
    # Large slots of which `aggregate` uses only updates.mean, with the weights of that mean ("p" or "uniform"). None:
    # it reads single rows. A class that overrides `aggregate` without `means` reads rows.
    means: ClassVar[Mapping[str, tuple[str, ...]] | None] = {"dw": ("p",)}
    # Accumulators that the hooks of one client may write to during a round, such as sums over batches.
    scratch: ClassVar[Slots] = Slots()
    trains: ClassVar[tuple[str, ...]] = (EVERYTHING,)  # layout groups that local training changes; "*": all
    # Number of batches that one step gets, concatenated in x and y (Per-FedAvg needs b1, b2, b3).
    batches_a_step: ClassVar[int] = 1
    # Whether the method's own options decide how long a client trains, and not train.epochs and train.steps.
    own_length: ClassVar[bool] = False
    # Requirements of the experiment, a set of the names below. A run that lacks one ends with an error at its start.
    needs: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, Any] | None] = None  # hyperparameters for which the method equals FedAvg, to the bit

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a declaration or hook that would not have the effect that its author expects."""
        written, mistake = vars(cls), f"method {cls.__name__}: "
        options = written.get("__annotations__", {})
        for name in {*options} & {*HOOKS, *DECLARATIONS}:
            if "ClassVar" not in str(options[name]):
                raise TypeError(f"{mistake}{name!r} is a declaration, not an option; write {name} = ...")
        for name, value in written.items():
            if name.startswith("_") or name in options or name in DECLARATIONS:
                continue
            if name not in HOOKS:
                close = difflib.get_close_matches(name, (*HOOKS, *DECLARATIONS), n=1, cutoff=0.75)
                if close:
                    meant = f"did you mean {close[0]!r}? (call a helper of your own _{name})"
                    raise TypeError(f"{mistake}{name!r} is no hook; {meant}")
                continue
            if isinstance(value, property):
                continue
            if not inspect.isfunction(value):
                raise TypeError(f"{mistake}{name!r} is a hook: a function, not {value!r}")
            wanted = [*inspect.signature(getattr(Method, name)).parameters]
            if len(inspect.signature(value).parameters) != len(wanted):
                raise TypeError(f"{mistake}hook {name} takes ({', '.join(wanted)})")
        for name in {*(written.get("neutral") or ())} - {*options}:
            raise TypeError(f"{mistake}neutral names {name!r}, which is no option")

    def __new__(cls, *_: Any, **__: Any) -> Method:
        parameters = cls.__dict__.get("__dataclass_params__")
        if cls is not Method and (parameters is None or not parameters.frozen):
            raise TypeError(f"method {cls.__name__}: write @dataclass(frozen=True) above the class")
        return super().__new__(cls)

    def prepare(self, module: nn.Module, classes: int) -> nn.Module:
        """Return the architecture that the method needs, made from the configured model.

        Called on every rank at the start of a run, and whenever a saved model is loaded, before the parameters are
        packed into one flat vector.
        """
        return module

    def travels(self, t: int, rounds: int) -> Travel:
        """Return which layout groups and slots clients upload in round t of `rounds`.

        Called often, on every rank and for any round, so it must depend on t and `rounds` only.
        """
        return Travel()

    # ---- client ----
    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch at the current weights.   x (B, ...), y (B,) -> ()

        Called for each batch; if the method has its own `step`, called by client.grad. Gradients also flow through
        client.w. A term that depends on the weights only belongs in `regularizer`, which is not part of the recorded
        loss.
        """
        return client.task_loss(client.logits(x), x, y)

    def regularizer(self, client: Client) -> Tensor | Quadratic | None:
        """Return a penalty on the weights client.w, such as mu / 2 ||w - w0||^2, or None.   -> ()

        Called in each step at the current weights. Its gradient with respect to client.w is added to that of `loss`, or
        to the result of `step`, before `gradient` is called: by autograd, or, for a `Quadratic`, by one kernel. The
        penalty is not part of the recorded loss.
        """
        return None

    def gradient(self, client: Client, g: Tensor) -> Tensor:
        """Correct the flat gradient of a batch; may change g in place.   (d,) -> (d,)

        Called before clipping, with the sum of the gradients of `loss` (or the result of `step`) and `regularizer`.
        """
        return g

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        """Return the direction that the optimiser descends, for rules with more than one gradient per step.   -> (d,)

        Called once per step in place of `loss`.
        """
        return client.grad(x, y)

    def receive(self, client: Client) -> Tensor:
        """Return the weights from which local training starts.   -> (d,)

        Called after the download, with client.w = client.received. Buffers start as received. Not called in evaluation.
        """
        return client.received

    def train(self, client: Client) -> State:
        """Train one client for one round, in one or several phases; return new client state.

        Called with client.w = client.w0. client.state is what the client's previous round returned; client.down holds
        server state from before this round's `aggregate`.
        """
        client.fit()
        return State()

    def upload(self, client: Client) -> tuple[Row, State]:
        """Return the client's upload and its new client state.

        The engine adds dw = w - w0 to the upload if it is declared. Each slot of client_state is returned by exactly
        one of `train` and `upload`. Return `client.state` for slots that do not change.
        """
        return Row(), State()

    def weights(self, client: Client) -> Tensor:
        """Return the weights that are evaluated as this client's model.   -> (d,)

        Called in the evaluation after round t for the protocols personal, personal_on_global and ft(e), for every
        client, whether it took part or not. client.round is t; client.received, client.down and client.state are those
        AFTER round t. client.w0 is client.received, client.scratch is zero and client.steps is 0. Do not read client.w
        and client.b, which may belong to another client.
        """
        return client.received

    def buffers(self, client: Client) -> Tensor:
        """Return the batch statistics that are evaluated with `weights`, after which this is called.   -> (b,)"""
        return client.b0

    def tune(self, client: Client, epochs: int) -> None:
        """Fine-tune a client's model before it is evaluated, for the protocol ft(epochs). The result is not stored.

        Called after the last round, at the weights and buffers that `weights` and `buffers` returned. client.w0 is
        client.received.
        """
        client.fit(epochs, plain=True)

    def predict(self, client: Client) -> Callable[[Tensor], Tensor] | None:
        """Return a function x (B, ...) -> (B, c) that replaces the outputs of the client's model, or None.

        For methods whose predictions use more than the model, such as kNN-Per's neighbours. Called at the weights that
        are evaluated, after `tune`. The function is called for each batch in evaluation and inference mode. The
        protocols of the global model (global, sites) do not call it.
        """
        return None

    # ---- server ----
    def download(self, server: Server, client: int) -> Row:
        """Return the values of `per_client_download` for one client.

        Called on rank 0: before round t for each client of the cohort, in ascending order, with server.w and
        server.state from before the round; and in the evaluation after round t for every client, with those after it.
        server.round is t in both cases. The cohort is not known here, and server.shared, server.segments,
        server.train_lr and server.figures may be used in `aggregate` only.
        """
        return Row()

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        """Return the direction of the server's step, w <- server_optim(w, direction), and the new server state.

        Called on rank 0 once per round when all uploads have arrived, unless no upload counts. server.w and
        server.state are those before the step. The engine averages float buffers itself, with weights updates.p.

        Returns:
            The direction (s,), with columns as in updates.dw; the new server state, server.state if nothing changes.
        """
        return updates.mean("dw"), server.state


HOOKS = tuple(name for name, value in vars(Method).items() if inspect.isfunction(value) and not name.startswith("_"))
DECLARATIONS = tuple(Method.__annotations__)


def overrides(method: Method, hook: str) -> bool:
    """Return whether a method overrides a hook."""
    return getattr(method, hook).__func__ is not getattr(Method, hook)


def means_of(method: Method) -> Mapping[str, tuple[str, ...]] | None:
    """Return the `means` that belong to the method's `aggregate`; None if a subclass has replaced `aggregate` only."""
    for owner in type(method).__mro__:
        if "means" in vars(owner):
            return method.means
        if "aggregate" in vars(owner):
            return None
    return None


class declared(property):  # noqa: N801 - written where `property` would be
    """A declaration that depends on hyperparameters. Read on the class, it has the value for the default options."""

    def __get__(self, method: Any, owner: type | None = None) -> Any:
        return super().__get__(owner() if method is None and owner else method, owner)


STEP = ("loss", "regularizer", "gradient", "step", "batches_a_step", "needs")  # members that define a local step


def borrows(option: str, step: bool = False) -> Callable[[type], type]:
    """Class decorator: take hooks and declarations from another method, which an option of this one holds.

    If the option is None they are those of FedAvg. Members that the class defines itself are kept.

    Args:
        option: the name of the option.
        step: whether to take the members that define a local step, too.
    """

    def borrowed(name: str) -> declared:
        get: Callable[[Any], Any] = means_of if name == "means" else attrgetter(name)
        return declared(lambda method: get(getattr(method, option) or Method()))

    def decorate(cls: type) -> type:
        own = {"neutral", *vars(cls)} | ({"means"} if "aggregate" in vars(cls) else set())
        for name in (*HOOKS, *DECLARATIONS):
            if name not in own and (step or name not in STEP):
                setattr(cls, name, borrowed(name))
        return cls

    return decorate
