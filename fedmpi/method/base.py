"""The base class of all methods: the hooks that a method may override, and the attributes that it may declare.

Together, the default hooks implement FedAvg. A method overrides the first of these hooks that can express its equation,
    loss, regularizer, correct_gradient, step, train, upload
and declares which state it keeps, sends and receives. Hooks map tensors to tensors (context.py describes their
arguments); only the engine writes, stores and sends. A method derives from `Method` and from nothing else, is a frozen
dataclass (its fields are the hyperparameters), and never calls super(). Obvious mistakes, such as a misspelled hook
name, raise a TypeError when the class is defined.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor, nn

from fedmpi.flat.layout import ALL_GROUPS
from fedmpi.method.context import Client, Quadratic, Server, SlotValues, State, Uploads
from fedmpi.method.slots import SHARED, SharedParts, Slots

# Requirements that a method may have of an experiment (`needs`). They are checked before training.

PLAIN_SGD = "plain SGD"  # SGD_STEPS without momentum
SGD_STEPS = "SGD (train.optim: sgd) with neither train.clip_norm nor train.persist_optimizer"
FEATURES = "a model with features and a last linear layer"
LAST_LAYER = "a model with a last linear layer"  # if the method does not read the inputs of that layer
CLASSES = "a classification task"
PLAIN_SERVER = "a plain server step (server.optim: sgd, server.lr: 1, server.rule: auto)"
LABEL_COUNTS = "the label counts of all clients"
ONE_CLASS = "targets of one class each"  # no label smoothing: the method removes absent classes from the softmax
VALIDATION = "validation rows"


class Method:
    """Base class of all methods; its default hooks implement FedAvg.

    Its public functions are the hooks, and its annotated attributes are the declarations.
    """

    # State that each client keeps between rounds, and that moves with it from rank to rank. Hooks read it as
    # client.state.NAME; `train` and `upload` return its new values.
    client_state: ClassVar[Slots] = Slots()
    # State of the server, on rank 0. Hooks read it as server.state.NAME; `aggregate` returns its new values.
    server_state: ClassVar[Slots] = Slots()
    # Names of slots of server_state that all clients receive with the weights, as client.downloads.NAME.
    receives: ClassVar[tuple[str, ...]] = ()
    # Values that differ between clients. The hook `download` computes them, and the client reads them as
    # client.downloads.NAME. In evaluations they are computed if the method overrides `personal_weights`, `predict` or
    # `finetune`, and are zero otherwise.
    per_client_download: ClassVar[Slots] = Slots()
    # Slots of an upload, which `aggregate` reads as updates.NAME. The engine computes dw = w - w0 if it is declared.
    sends: ClassVar[Slots] = Slots(dw=SHARED)
    # Large slots that `aggregate` reads only through updates.mean, with the weights of that mean ("p" or "uniform"), so
    # that the engine need not store single rows. None: `aggregate` reads single rows, which is also assumed of a class
    # that overrides `aggregate` and does not declare this.
    mean_only_slots: ClassVar[Mapping[str, tuple[str, ...]] | None] = {"dw": ("p",)}
    # Tensors that the hooks of one client may write to during a round, for example sums over batches.
    accumulators: ClassVar[Slots] = Slots()
    trains: ClassVar[tuple[str, ...]] = (ALL_GROUPS,)  # layout groups that local training updates; "*": all
    # Whether a step can process its batch in parts (train.accumulate): whether the losses of this class, returned by
    # `loss` or passed to client.grad, are means over samples of terms that depend on one sample each. None: assumed of
    # a class that overrides neither `loss` nor `step`, and of no other.
    loss_is_sample_mean: ClassVar[bool | None] = None
    # Number of batches per step, concatenated in x and y (Per-FedAvg needs b1, b2, b3).
    batches_per_step: ClassVar[int] = 1
    # Whether the method's own options, and not train.epochs and train.steps, decide how long a client trains.
    sets_training_length: ClassVar[bool] = False
    # Requirements of the experiment: FEATURES, CLASSES, ... (below). If one is not met, the run ends at its start.
    needs: ClassVar[frozenset[str]] = frozenset()
    # Hyperparameters at which the method gives the same bits as FedAvg; None: there are none.
    equals_fedavg_at: ClassVar[Mapping[str, Any] | None] = None

    def __init_subclass__(cls) -> None:
        """Raise TypeError if the class defines an unknown hook, a hook with wrong arguments, or a wrong declaration."""
        members, prefix = vars(cls), f"method {cls.__name__}: "
        options = members.get("__annotations__", {})
        for name in {*options} & {*HOOKS, *DECLARATIONS}:
            if "ClassVar" not in str(options[name]):
                raise TypeError(
                    f"{prefix}{name!r} is a declaration, not an option; write it without a type: {name} = ..."
                )
        for name, value in members.items():
            if name.startswith("_") or name in options or name in DECLARATIONS:
                continue
            if name not in HOOKS:
                close = difflib.get_close_matches(name, (*HOOKS, *DECLARATIONS), n=1, cutoff=0.75)
                if close:
                    hint = f"did you mean {close[0]!r}? (a helper of your own must start with an underscore: _{name})"
                    raise TypeError(f"{prefix}{name!r} is not a hook; {hint}")
                continue
            if isinstance(value, property):
                continue
            if not inspect.isfunction(value):
                raise TypeError(f"{prefix}{name!r} is a hook, so it must be a function, not {value!r}")
            arguments = [*inspect.signature(getattr(Method, name)).parameters]
            if len(inspect.signature(value).parameters) != len(arguments):
                raise TypeError(f"{prefix}hook {name} must have the arguments ({', '.join(arguments)})")
        for name in {*(members.get("equals_fedavg_at") or ())} - {*options}:
            raise TypeError(f"{prefix}equals_fedavg_at names {name!r}, which is not an option of the method")

    def __new__(cls, *_: Any, **__: Any) -> Method:
        """Raise TypeError if the class is not a frozen dataclass."""
        parameters = cls.__dict__.get("__dataclass_params__")
        if cls is not Method and (parameters is None or not parameters.frozen):
            raise TypeError(
                f"method {cls.__name__} is not a frozen dataclass; write @dataclass(frozen=True) above the class"
            )
        return super().__new__(cls)

    def prepare_model(self, module: nn.Module, classes: int) -> nn.Module:
        """Return the configured model with the changes to its architecture that the method needs.

        Called on every rank at the start of a run, and whenever a saved model is loaded, before the parameters are
        copied into one flat vector.

        Args:
            module: the configured model, which may be modified in place.
            classes: the number of classes.
        """
        return module

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        """Return the layout groups of the model and the slots that clients upload in round t.

        Called often, on every rank and for any round, so the result must depend only on t and `rounds`.

        Args:
            t: the round, from 0.
            rounds: the number of rounds of the run.
        """
        return SharedParts()

    # ---- client ----
    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch at the current weights.

        Called for each batch; if the method overrides `step`, client.grad calls it. The loss may also depend on
        client.w directly. A term that depends only on the weights belongs in `regularizer`, which is not part of the
        recorded loss.

        Args:
            client: the client that trains.
            x: (B, ...) samples.
            y: (B,) targets.

        Returns:
            The loss (), with its autograd graph.
        """
        return client.task_loss(client.logits(x), x, y)

    def regularizer(self, client: Client) -> Tensor | Quadratic | None:
        """Return a penalty on the weights client.w, for example mu / 2 ||w - w0||^2.

        Called in each step at the current weights. The gradient of the penalty with respect to client.w is added to
        that of `loss`, or to the result of `step`, before `correct_gradient` is called. Autograd computes this
        gradient, except for a `Quadratic`, which has a faster formula. The recorded loss excludes the penalty.

        Returns:
            The penalty (), a `Quadratic`, or None for no penalty.
        """
        return None

    def correct_gradient(self, client: Client, g: Tensor) -> Tensor:
        """Return the corrected gradient of a batch; g may be modified in place.

        Called in each step before clipping.

        Args:
            client: the client that trains.
            g: (d,) the gradient of `loss`, or the result of `step`, plus the gradient of `regularizer`.

        Returns:
            The gradient (d,) that is clipped and passed to the optimiser.
        """
        return g

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of one optimiser step, for rules that need more than one gradient per step.

        Called once per step in place of `loss`.

        Args:
            client: the client that trains.
            x: (B, ...) samples.
            y: (B,) targets.

        Returns:
            The direction (d,) that the optimiser uses in place of a gradient.
        """
        return client.grad(x, y)

    def initial_weights(self, client: Client) -> Tensor:
        """Return the weights (d,) from which local training starts.

        Called before a client trains, but not before an evaluation; client.w then equals client.received. The hook
        changes only the weights: training always starts with the received buffers.
        """
        return client.received

    def train(self, client: Client) -> State:
        """Train a client for one round, in one or several phases, and return its new state.

        Called when client.w equals client.w0. client.state holds the values that the hooks returned when the client was
        last in the cohort, and client.downloads holds values computed from the server state before this round.

        Args:
            client: the client; client.fit trains it.

        Returns:
            State(...) with the slots of client_state that `upload` does not return.
        """
        client.fit()
        return State()

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        """Return a client's upload and its new client state.

        The engine adds dw = w - w0 to the upload if `sends` contains dw. Each slot of client_state must be returned by
        exactly one of `train` and `upload`. If no slot changes, return `client.state`.

        Args:
            client: the client, after its training.

        Returns:
            SlotValues(...) with the slots of `sends`, and State(...).
        """
        return SlotValues(), State()

    def personal_weights(self, client: Client) -> Tensor:
        """Return the weights (d,) that are evaluated as this client's model.

        Called in the evaluation after round t for the protocols personal, personal_on_global and ft(e), for every
        client, whether it took part in the round or not. client.round is t; client.received, client.downloads and
        client.state hold the values from AFTER round t. client.w0 is client.received, client.accumulators is zero and
        client.steps is 0. Do not read client.w and client.b, which may belong to another client.
        """
        return client.received

    def personal_buffers(self, client: Client) -> Tensor:
        """Return the float buffers (b,) with which `personal_weights` are evaluated; called after that hook."""
        return client.b0

    def finetune(self, client: Client, epochs: int) -> None:
        """Fine-tune a client's model before it is evaluated, for the protocol ft(epochs); the result is not stored.

        Called after the last round, with the weights and buffers that `personal_weights` and `personal_buffers`
        returned. client.w0 is client.received.

        Args:
            client: the client; client.fit trains it.
            epochs: passes over the client's training rows.
        """
        client.fit(epochs, fedavg_steps=True)

    def predict(self, client: Client) -> Callable[[Tensor], Tensor] | None:
        """Return a function that replaces the forward pass of the client's model in evaluations, or None.

        Called after `finetune`, when client.w holds the weights to be evaluated. Override this hook if predictions
        depend on more than the model, for example on the neighbours of a sample (kNN-Per). The protocols that evaluate
        the global model (global, sites) do not call it.

        Returns:
            A function from samples x (B, ...) to outputs (B, c), which is called for each batch in evaluation and
            inference mode; None to use the model.
        """
        return None

    # ---- server ----
    def download(self, server: Server, client: int) -> SlotValues:
        """Return the values of the slots in `per_client_download` for one client.

        Called on rank 0 before round t, for each client of the cohort in ascending order; server.w and server.state
        then hold the values from before the round. It is also called in the evaluation after round t, for every client;
        server.w and server.state then hold the values from after the round. server.round is t in both cases.

        The hook does not know the cohort. It must not use server.shared, server.segments, server.train_lr and
        server.log_metrics, which are available in `aggregate` only.

        Args:
            server: the server's weights and state.
            client: the id of the client.
        """
        return SlotValues()

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        """Return the direction of the server's step, w <- server_optim(w, direction), and the new server state.

        Called on rank 0 once per round when all uploads have arrived, unless all of them were rejected. server.w and
        server.state hold the values from before the step. The engine averages float buffers, with weights updates.p.

        Args:
            server: the server's weights and state.
            updates: the uploads of the cohort.

        Returns:
            The direction (s,), in the same order as the columns of updates.dw; the new server state, or server.state
            if it does not change.
        """
        return updates.mean("dw"), server.state


HOOKS = tuple(name for name, value in vars(Method).items() if inspect.isfunction(value) and not name.startswith("_"))
DECLARATIONS = tuple(Method.__annotations__)


def overrides(method: Method, hook: str) -> bool:
    """Return whether a method overrides the hook with this name."""
    return getattr(method, hook).__func__ is not getattr(Method, hook)


def get_mean_only_slots(method: Method) -> Mapping[str, tuple[str, ...]] | None:
    """Return the method's `mean_only_slots`, or None if a subclass overrides `aggregate` without declaring it again.

    Such a subclass does not inherit the declaration, because its `aggregate` may read single rows.
    """
    for owner in type(method).__mro__:
        if "mean_only_slots" in vars(owner):
            return method.mean_only_slots
        if "aggregate" in vars(owner):
            return None
    return None


def has_sample_mean_loss(method: Method) -> bool:
    """Return whether a method's steps can process a batch in parts: see `Method.loss_is_sample_mean`."""
    declared = method.loss_is_sample_mean
    return not (overrides(method, "loss") or overrides(method, "step")) if declared is None else declared


class declared_property(property):  # noqa: N801 - written where `property` would be
    """Decorator for a declaration that depends on hyperparameters.

    On the class itself, the declaration has the value for the default hyperparameters.
    """

    def __get__(self, method: Any, owner: type | None = None) -> Any:
        return super().__get__(owner() if method is None and owner else method, owner)


# Members that define a local step.
STEP_MEMBERS = (
    *("loss", "regularizer", "correct_gradient", "step", "loss_is_sample_mean", "batches_per_step"),
    "needs",
)


def delegates_to(option: str, step: bool = False) -> Callable[[type], type]:
    """Class decorator by which a method takes hooks and declarations from the method that is the value of an option.

    If the value is None, they are taken from FedAvg. Members that the class defines itself take precedence.

    Args:
        option: the name of the option.
        step: whether the members that define a local step (STEP_MEMBERS), such as `loss`, are also taken.
    """

    def delegate(name: str) -> declared_property:
        get: Callable[[Any], Any] = get_mean_only_slots if name == "mean_only_slots" else attrgetter(name)
        return declared_property(lambda method: get(getattr(method, option) or Method()))

    def decorate(cls: type) -> type:
        own = {"equals_fedavg_at", *vars(cls)} | ({"mean_only_slots"} if "aggregate" in vars(cls) else set())
        for name in (*HOOKS, *DECLARATIONS):
            if name not in own and (step or name not in STEP_MEMBERS):
                setattr(cls, name, delegate(name))
        return cls

    return decorate
