"""The section `train`: what a client does in a round."""

from json import dumps
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainSerializer, model_validator

from fedmpi.config.sections import Section
from fedmpi.config.values import Count, Fading, NonNegative, Rounds

# What each optimiser takes beside lr and weight_decay, with the values of torch.optim where the config says nothing.
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "dampening": 0.0, "nesterov": False},
    "adam": {"betas": [0.9, 0.999], "eps": 1e-8},
    "adamw": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    "rmsprop": {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0},
    "adagrad": {"eps": 1e-10},
}
OWN = ("momentum", "dampening", "nesterov", "betas", "eps", "alpha")  # keys that not every optimiser has
NOTHING: dict[str, Any] = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}  # else null


def _whole(number: float) -> float:
    """2.0 as 2: a number of passes is shown as it was meant."""
    return int(number) if number == int(number) else number


class TrainSettings(Section):
    # passes over a client's samples in a round; of 0.5 the first half of the batches, rounded up, at least one
    epochs: Annotated[float, Field(ge=0, le=100_000), AfterValidator(_whole), PlainSerializer(_whole)] | None = 1
    # in place of epochs: steps of the optimiser in a round, as many for every client; passes follow one another, each
    # in an order of its own
    steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    batch_size: Count | Literal["full"] = 50  # samples; full: all of a client's
    optim: Literal["sgd", "adam", "adamw", "rmsprop", "adagrad"] = "sgd"  # each as in torch.optim
    lr: NonNegative = 0.01  # learning rate
    momentum: Fading = 0.9  # of sgd; of rmsprop, where it is 0 unless given
    dampening: Fading = 0.0  # of sgd's momentum: share of a gradient that does not enter it
    nesterov: bool = False  # of sgd's momentum: the step looks ahead
    betas: Annotated[list[Fading], Field(min_length=2, max_length=2)] | None = (
        None  # of adam, adamw; null: [0.9, 0.999]
    )
    eps: Annotated[float, Field(gt=0, le=1)] | None = None  # of adam, adamw, rmsprop; null: 1e-8; adagrad; null: 1e-10
    alpha: Fading | None = None  # of rmsprop: weight of the past in the mean of squares; null: 0.99
    # times w is added to the gradient; of adamw: lr times it is taken off w (decoupled), 0.01 unless given
    weight_decay: NonNegative = 0.0
    # norm beyond which the gradient of all that is being trained is scaled to it, after clip_value; null: any
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    clip_value: Annotated[float, Field(gt=0)] | None = None  # size beyond which a gradient's entry is cut; null: any
    schedule: Literal["constant", "exponential", "cosine", "step"] = "constant"  # what lr does over rounds
    # factor of exponential (per round) and step (at 1/2 and 3/4); null: 0.99 and 0.1
    decay: Annotated[float, Field(gt=0, le=1)] | None = None
    warmup_rounds: Rounds = 0  # lr rises linearly from 0 over so many rounds
    drop_last: bool = False  # leave out the last batch of an epoch if it is smaller
    # whether a client keeps the state of its optimiser (velocities, moments) from one of its rounds to the next
    keep_optim: bool = False

    @model_validator(mode="before")
    @classmethod
    def _by_optimiser(cls, value: Any) -> Any:
        """The values of keys that are not written, where they depend on others: a config shows what is meant."""
        if not isinstance(value, dict):
            return value
        given = {key: each for key, each in value.items() if each is not None or key not in (*OWN, "weight_decay")}
        name = given.get("optim", "sgd")
        meant = NOTHING | (OPTIONS.get(name, {}) if isinstance(name, str) else {})
        return meant | ({"epochs": None} if given.get("steps") is not None else {}) | given

    @model_validator(mode="after")
    def _epochs_or_steps(self) -> "TrainSettings":
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps: {self.steps} does not go with epochs: {self.epochs:g}; a round has a number of steps, or of "
                "passes: set one of them to null"
            )
        if self.steps is None and self.epochs is None:
            raise ValueError("epochs: null leaves nothing to do; give epochs or steps")
        return self

    @model_validator(mode="after")
    def _options_of_the_optimiser(self) -> "TrainSettings":
        own = OPTIONS[self.optim]
        for key in OWN:
            value = getattr(self, key)
            if key not in own and value != NOTHING.get(key):
                whose = ", ".join(name for name, options in OPTIONS.items() if key in options)
                raise ValueError(
                    f"{key}: {dumps(value)} is an option of {whose}, and optim is {self.optim}; set {key} to null, or "
                    "take another optim"
                )
        if self.nesterov and not (self.momentum and not self.dampening):
            raise ValueError("nesterov: true needs momentum > 0 and dampening: 0; set nesterov to false, or these")
        if self.dampening and not self.momentum:
            raise ValueError(f"dampening: {self.dampening:g} has no effect with momentum: 0; leave it out")
        if self.keep_optim and self.optim == "sgd" and not self.momentum:
            raise ValueError(
                "keep_optim: true has no effect with sgd and momentum: 0, which keep nothing; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _decay_of_what(self) -> "TrainSettings":
        if self.decay is not None and self.schedule not in ("exponential", "step"):
            raise ValueError(
                f"decay: {self.decay:g} has no effect with schedule: {self.schedule}; take schedule: exponential or "
                "step, or leave decay out"
            )
        return self
