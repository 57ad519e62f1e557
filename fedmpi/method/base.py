"""A method is its equations: hooks with neutral defaults (what they are given and give back: context.py).

The defaults of all hooks together are FedAvg. A method overrides the smallest hook that can express its equation,
    loss, regularizer < gradient < step < train < upload
and declares what it keeps, sends and receives. Hooks map tensors to tensors; only the engine writes, stores and sends.
Methods derive from `Method` and from nothing else, are frozen dataclasses (fields = hyperparameters), and never call
super(). What cannot be meant, such as a hook with a name that is almost right, is a TypeError when the class is made.
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

# What a method may need of the experiment; checked before anything runs.

PLAIN_SGD = "plain SGD"  # SGD_STEPS without momentum
SGD_STEPS = "steps of SGD (train.optim: sgd; without train.clip_norm, train.keep_optim)"
FEATURES = "a model with features and a last linear layer"
LAST_LAYER = "a model with a last linear layer"  # of which nobody asks what it is given
CLASSES = "a classification task"
PLAIN_SERVER = "a plain server step (server.optim: sgd, server.lr: 1, server.rule: auto)"
LABEL_COUNTS = "the label counts of all clients"
ONE_CLASS = "targets of one class each"  # no smoothing: a method that takes absent classes out of the softmax
VALIDATION = "validation rows"


class Method:
    """FedAvg, and the base of every method. Its public functions are the hooks, its annotations the declarations."""

    # Kept with the client, wherever it trains; `train` and `upload` return it, client.state has it.
    client_state: ClassVar[Slots] = Slots()
    server_state: ClassVar[Slots] = Slots()  # kept by rank 0; `aggregate` returns it, server.state has it
    # Names of server_state that travel with the weights, the same for all: client.down.NAME.
    receives: ClassVar[tuple[str, ...]] = ()
    # A download of its own for each client, which the hook `download` fills: client.down.NAME. Clients that are
    # evaluated are sent it where the method has `weights`, `predict` or `tune` of its own; else client.down.NAME is
    # zero there.
    per_client_download: ClassVar[Slots] = Slots()
    # What an upload holds: updates.NAME in `aggregate`. The engine forms dw = w - w0 where it is declared.
    sends: ClassVar[Slots] = Slots(dw=SHARED)
    # Large slots that `aggregate` reads through updates.mean alone, and with which weights; None: it reads rows. It
    # goes with the `aggregate` beside it: one that a class writes without it reads rows.
    means: ClassVar[Mapping[str, tuple[str, ...]] | None] = {"dw": ("p",)}  # weights: "p", "uniform"
    scratch: ClassVar[Slots] = Slots()  # what hooks of one client and round may write to: sums over its batches
    trains: ClassVar[tuple[str, ...]] = (EVERYTHING,)  # layout groups that local training changes; "*": all
    batches_a_step: ClassVar[int] = 1  # batches given to one step as one x, y to cut up (Per-FedAvg's b1, b2, b3)
    own_length: ClassVar[bool] = False  # its options say how long a client trains, not train.epochs and train.steps
    # What it needs of the experiment: a set of the names below. Without it a run ends before it begins.
    needs: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, Any] | None] = None  # hyperparameters at which it is FedAvg, bit for bit

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a class that would quietly be another method than its author thinks."""
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
        """The architecture that the method needs, made of the configured one before anything is laid out.

        Called on every rank when the run begins, and where a saved model is made again.
        """
        return module

    def travels(self, t: int, rounds: int) -> Travel:
        """What goes up in round t of `rounds`: layout groups of the model, and declared slots.

        Called on every rank, for any round at any time, often: a function of t and `rounds` alone.
        """
        return Travel()

    # ---- client ----
    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        """What a step descends on.   x (B, ...), y (B,) -> ()

        Called for each batch, at the live weights; from `step`, wherever that asks client.grad for a gradient. client.w
        has a gradient here, too. A term of the weights alone belongs into `regularizer`, which is no part of the
        recorded loss, and which FedSOL can perturb along.
        """
        return client.task_loss(client.logits(x), x, y)

    def regularizer(self, client: Client) -> Tensor | Quadratic | None:
        """A penalty on the weights client.w, such as mu / 2 ||w - w0||^2; None: there is none.   -> ()

        Called in each step at the live weights. Its gradient with respect to client.w is added to that of `loss`, or to
        what `step` returned, before `gradient`: by autograd, or of a `Quadratic`, in one kernel. It is no part of the
        recorded loss.
        """
        return None

    def gradient(self, client: Client, g: Tensor) -> Tensor:
        """Correction of a batch's flat gradient; may write to g.   (d,) -> (d,)

        Called after `loss` (or `step`) and `regularizer` with the sum of their gradients, and before clipping.
        """
        return g

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        """The direction that the optimiser descends along, for rules that need more than one gradient.   -> (d,)

        Called in place of `loss`, once a step.
        """
        return client.grad(x, y)

    def receive(self, client: Client) -> Tensor:
        """Weights that local training starts from.   -> (d,)

        Called when the client receives, with client.w = client.received. It gives weights, not buffers: these start as
        received. Not called in evaluation.
        """
        return client.received

    def train(self, client: Client) -> State:
        """The client's round, in phases; returns new client state.

        Called with client.w = client.w0. client.state is what the client's last round returned, client.down what round
        t told: server state as it was before this round's `aggregate`.
        """
        client.fit()
        return State()

    def upload(self, client: Client) -> tuple[Row, State]:
        """What the client sends besides dw = w - w0 (formed by the engine where declared), and new client state.

        `train` and `upload` together return all of client_state, each slot one of them; `client.state` stands for what
        stays as it was.
        """
        return Row(), State()

    def weights(self, client: Client) -> Tensor:
        """What is evaluated as this client's model.   -> (d,)

        Called for every client, also those that did not take part, in the evaluation after round t, where client.round
        is t and client.received, client.down and client.state are those AFTER round t. client.w0 is client.received;
        client.w and client.b are of whoever was there before, client.scratch is zero, client.steps 0. The protocols
        personal, personal_on_global and ft(e) ask for it.
        """
        return client.received

    def buffers(self, client: Client) -> Tensor:
        """The batch statistics that are evaluated with them; called after `weights`, and sees the same.   -> (b,)"""
        return client.b0

    def tune(self, client: Client, epochs: int) -> None:
        """Fine-tuning before evaluation, ft(epochs), from the weights evaluated; nothing of it is kept.

        Called after the last round, at what `weights` and `buffers` gave; client.w0 is client.received, not that.
        """
        client.fit(epochs, plain=True)

    def predict(self, client: Client) -> Callable[[Tensor], Tensor] | None:
        """x (B, ...) -> (B, c), the client's outputs where they are more than its model's own (kNN-Per's neighbours).

        Called at the weights evaluated, after `tune` where there is one; what it gives is called batch after batch, in
        evaluation mode and inference mode. Not for protocols that judge the global model (global, sites).
        """
        return None

    # ---- server ----
    def download(self, server: Server, client: int) -> Row:
        """Values of `per_client_download` for one client.

        Called on rank 0: before round t for each client of the cohort, in ascending order, and in the evaluation after
        round t for every client. server.round is t both times; server.w and server.state are those before round t, and
        after it. It is told nothing of the cohort; server.shared, server.segments, server.train_lr and server.figures
        are for `aggregate` alone.
        """
        return Row()

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        """Compute the direction of the server's step, w <- server_optim(w, direction), and the new server state.

        Called on rank 0 once a round, when the uploads are there; not in a round of which no upload counts. server.w
        and server.state are those before the step. Float buffers are averaged beside it, by updates.p.

        Returns:
            (direction, of shape (s,) as a row of updates.dw; the new server state, server.state if nothing changes).
        """
        return updates.mean("dw"), server.state


HOOKS = tuple(name for name, value in vars(Method).items() if inspect.isfunction(value) and not name.startswith("_"))
DECLARATIONS = tuple(Method.__annotations__)


def overrides(method: Method, hook: str) -> bool:
    """Whether a method has its own version of a hook."""
    return getattr(method, hook).__func__ is not getattr(Method, hook)


def means_of(method: Method) -> Mapping[str, tuple[str, ...]] | None:
    """`means` where it is that of the method's `aggregate`, not of one that a class further down has replaced."""
    for owner in type(method).__mro__:
        if "means" in vars(owner):
            return method.means
        if "aggregate" in vars(owner):
            return None
    return None


class declared(property):  # noqa: N801 - written where `property` would be
    """A declaration that depends on hyperparameters. Read on the class it is that of the defaults."""

    def __get__(self, method: Any, owner: type | None = None) -> Any:
        return super().__get__(owner() if method is None and owner else method, owner)


STEP = ("loss", "regularizer", "gradient", "step", "batches_a_step", "needs")  # what makes a local step


def borrows(option: str, step: bool = False) -> Callable[[type], type]:
    """Class decorator: whatever does not make the step, or with `step` that too, is as in the method that the option
    holds, as in FedAvg where it holds None. What the class says itself comes first.
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
