"""The sections of a config on data, model, task, method and training.

Sections are frozen. An open section has a key that selects a component by name (`selector`). Besides the keys declared
here, an open section takes the options of that component. They are checked against the component's signature when the
component is built (common/options.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from fedmpi.config.field_types import (
    Count,
    EitherSection,
    Fading,
    Name,
    NameWithOptions,
    NonNegative,
    OpenSection,
    Place,
    Protocol,
    Rounds,
    Section,
    ShortSection,
    each_once,
)


class PartitionSettings(OpenSection):
    selector = "scheme"
    scheme: Name  # the partition: see `fedmpi list partitions`, or file.py:function; other keys are its options
    clients: Annotated[int, Field(ge=1, le=1_000_000)] | None = None  # N; schemes site and file take it from the data

    @model_validator(mode="after")
    def _check(self) -> PartitionSettings:
        if self.clients is None and self.scheme not in ("site", "file"):
            raise ValueError(f"clients is missing; scheme {self.scheme} needs it (`site` and `file` know it)")
        return self


class DataSettings(OpenSection):
    selector = "source"
    goes_with = {"share_ranks": ("silos", None)}
    source: Name  # see `fedmpi list datasets`, or file.py:function; keys that are not listed here are its options
    # folder of the files, relative to the working directory
    root: Place = Field(
        default_factory=lambda: Path(os.environ.get("FEDMPI_DATA") or "data"),
        json_schema_extra={"default": "$FEDMPI_DATA, else data"},
    )
    download: bool = False  # download files that are missing in root, if the source supports it
    client_test: Literal["auto", "site", "aligned", "shards", "class_match", "global"] = (
        "auto"  # the test rows of each client (docs/data.md)
    )
    stream: bool | Literal["auto"] = "auto"  # read images from disk for each batch; auto: sets larger than 2 GiB
    augment: tuple[NameWithOptions, ...] = ()  # operations on training images, in order: `fedmpi list augmentations`
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of each client's training samples that is held out
    # standardise regression targets by mean and deviation of the training rows of each site, or of all sites; metrics
    # and predictions stay in the unit of the targets
    standardise_target: Literal[False, "site", "pooled"] = False
    partition: PartitionSettings | None = None  # how samples are divided among clients; or use silos
    silos: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(each_once)] | None = (
        None  # names of sites: one client per site, whose files only its own rank opens
    )
    share_label_counts: bool = True  # share the label counts of each site with all ranks; false: only its sample count
    audit: bool = True  # with silos: each rank except the server records what has left it, with its SHA-256
    share_ranks: bool = False  # allow a rank to open the files of several silos; a single process opens all

    @model_validator(mode="after")
    def _check(self) -> DataSettings:
        if (self.partition is None) == (self.silos is None):
            got = "got neither" if self.partition is None else "got both (set one to null)"
            raise ValueError(f"needs either partition: {{scheme, clients}} or silos: [names]; {got}")
        if self.silos and self.client_test != "auto":
            raise ValueError(
                f"client_test: {self.client_test} does not go with silos, whose files say it; leave it out"
            )
        return self


class ModelSettings(OpenSection):
    name: Name  # see `fedmpi list models`, or file.py:function; other keys are its options


FROM = "a run directory, or a safetensors file with state_dict names; null: random initial weights"


class Init(Section):
    """Initial weights from a run directory or a safetensors file, which the key `from` names."""

    goes_with = {"strict": ("from", None)}
    strict: bool = False  # require that file and model have the same tensors

    @property
    def source(self) -> Path | None:
        path: Path | None = getattr(self, "from")
        return path


if TYPE_CHECKING:
    InitSettings = Init
else:
    InitSettings = create_model(
        "InitSettings", __base__=Init, **{"from": (Place | None, Field(None, description=FROM))}
    )


class TaskSettings(OpenSection):
    name: Name = "classification"  # see `fedmpi list tasks`, or file.py:Class; other keys are its options

    @model_validator(mode="before")
    @classmethod
    def _nan_as_a_word(cls, value: Any) -> Any:
        """Return YAML's .nan as the text "nan", which is valid JSON and equals itself when a run is resumed."""
        given = value.get("ignore") if isinstance(value, dict) else None
        nan = isinstance(given, (float, str)) and str(given).lower() == "nan"
        return {**value, "ignore": "nan"} if nan else value


class MethodSettings(OpenSection):
    name: Name  # see `fedmpi list methods`, or file.py:Class; other keys are its options


# Defaults that depend on the optimiser, with the values of torch.optim.
ADAM = {"momentum": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
BY_OPTIMISER: dict[str, dict[str, Any]] = {"adam": ADAM, "adamw": ADAM | {"weight_decay": 0.01}}


class TrainSettings(EitherSection):
    goes_with = {
        **dict.fromkeys(("momentum", "nesterov"), ("optim", ("sgd",))),
        **dict.fromkeys(("betas", "eps"), ("optim", ("adam", "adamw"))),
        "decay": ("schedule", ("exponential", "step")),
    }
    either = ("steps", "epochs")
    epochs: Annotated[int, Field(ge=0, le=100_000)] | None = 1  # passes over a client's samples in a round
    # optimiser steps per client and round, in place of epochs; each pass over the samples has its own random order
    steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    batch_size: Count | Literal["full"] = 50  # samples; full: all samples of the client
    optim: Literal["sgd", "adam", "adamw"] = "sgd"  # optimiser, as in torch.optim
    lr: NonNegative = 0.01  # learning rate
    momentum: Fading = 0.9  # of sgd
    nesterov: bool = False  # Nesterov momentum for sgd
    betas: Annotated[list[Fading], Field(min_length=2, max_length=2)] | None = (
        None  # of adam and adamw; null: [0.9, 0.999]
    )
    eps: Annotated[float, Field(gt=0, le=1)] | None = None  # of adam and adamw; null: 1e-8
    # weight_decay x w is added to the gradient; for adamw it is decoupled, with a default of 0.01
    weight_decay: NonNegative = 0.0
    # largest norm of the gradient of all trained parameters; a larger gradient is scaled to it; null: no limit
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    schedule: Literal["constant", "exponential", "cosine", "step"] = "constant"  # of lr over rounds
    # factor of lr: exponential in each round (null: 0.99), step at 1/2 and 3/4 of the rounds (null: 0.1)
    decay: Annotated[float, Field(gt=0, le=1)] | None = None
    warmup_rounds: Rounds = 0  # number of rounds in which lr rises linearly from 0
    drop_last: bool = False  # leave out the last batch of an epoch if it is smaller
    # store the optimiser's state (velocities, moments) of each client between its rounds
    persist_optimizer: bool = False

    @model_validator(mode="before")
    @classmethod
    def _by_optimiser(cls, value: Any) -> Any:
        """Fill in defaults that depend on the optimiser, for keys that are missing or null."""
        if not isinstance(value, dict):
            return value
        own = ("momentum", "nesterov", "betas", "eps", "weight_decay")
        given = {key: each for key, each in value.items() if each is not None or key not in own}
        return BY_OPTIMISER.get(str(given.get("optim")), {}) | given

    @model_validator(mode="after")
    def _check(self) -> TrainSettings:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: true needs momentum > 0; set nesterov to false, or momentum")
        if self.persist_optimizer and self.optim == "sgd" and not self.momentum:
            raise ValueError(
                "persist_optimizer: true has no effect with sgd and momentum: 0, which keep nothing; leave it out"
            )
        return self


class CohortSettings(EitherSection):
    either = ("size", "fraction")
    # share of the clients that is drawn each round, rounded down, at least one; null if `size` is given
    fraction: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    size: Count | None = None  # number of clients that are drawn each round, in place of fraction
    # how clients are drawn. cyclic: every client once before one is drawn again; with fraction 1 / N the model passes
    # from client to client
    sampling: Literal["uniform", "cyclic"] = "uniform"
    placement: Literal["balanced", "pinned"] = "balanced"  # ranks of the clients; balanced: by measured time
    weighting: Literal["samples", "uniform"] = "samples"  # weights p_k in the aggregate: by training samples, or equal


class RuleSettings(ShortSection, OpenSection):
    short = "name"
    # see `fedmpi list rules`, or file.py:function; auto: that of the method. A text in place of the section is the name
    name: Name = "auto"

    @model_validator(mode="after")
    def _check(self) -> RuleSettings:
        if self.name == "auto" and self.options:
            key = next(iter(self.options))
            raise ValueError(f"{key}: is an option of no rule: server.rule.name is auto; name the rule")
        return self


ADAPTIVE = ("adam", "yogi", "adagrad")  # adagrad does not use beta2, but accepts it, for sweeps over the three


class ServerSettings(Section):
    goes_with = {
        "momentum": ("optim", ("momentum",)),
        **dict.fromkeys(("beta1", "beta2", "eps"), ("optim", ADAPTIVE)),
        "reduce": ("placement", ("root",)),
    }
    rule: RuleSettings = RuleSettings()  # aggregation rule for the updates of the cohort
    optim: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = "sgd"  # server optimiser
    lr: NonNegative = 1.0  # learning rate of the server; 1 with sgd: the step is the aggregate
    momentum: Fading = 0.9  # for optim: momentum
    nesterov: bool = False  # for optim: momentum: the step is direction + momentum x velocity
    beta1: Fading = 0.9  # of adam, yogi and adagrad: decay of the first moment
    beta2: Fading = 0.99  # of adam and yogi: decay of the second moment
    eps: Annotated[float, Field(gt=0, le=1)] = (
        1e-3  # of adam, yogi and adagrad: added to the square root (tau in Reddi et al. 2021)
    )
    trains_clients: bool = False  # whether rank 0 trains clients, too
    placement: Literal["root", "sharded"] = "root"  # uploads are held by rank 0, or each rank holds some columns
    # for methods that use only means of uploads: rank 0 adds up all rows, or each rank first those of its clients (with
    # the same bits for any number of ranks)
    reduce: Literal["root", "local"] = "root"

    @model_validator(mode="after")
    def _check(self) -> ServerSettings:
        if self.nesterov and (self.optim != "momentum" or not self.momentum):
            have = f"optim: {self.optim}, momentum: {self.momentum:g}"
            raise ValueError(f"nesterov: true needs optim: momentum with momentum > 0, not {have}; or set it to false")
        return self


class BestSettings(ShortSection):
    """Selection of the best model on validation rows. A text in place of the section is the metric."""

    short = "metric"
    goes_with = dict.fromkeys(("goal", "patience", "min_delta"), ("metric", None))
    # "loss" or a metric of the task, of the global model on the rows that data.validation holds out at all clients, in
    # each evaluation. If clients keep parts of the model, or have models of their own and no protocol evaluates the
    # global one: the mean over clients, each with its own model on its own rows
    metric: Name | None = None
    goal: Literal["auto", "lowest", "highest"] = "auto"  # auto: lowest if the name contains loss or mse
    patience: Count | None = None  # the run ends after so many evaluations without a better model; null: never
    min_delta: NonNegative = 0.0  # improvement that a better model must exceed


class EvaluateSettings(Section):
    every: Count = 1  # rounds between evaluations; the last round is always evaluated
    # global: the global model on the whole test set; sites: the global model on the test rows of each site; personal:
    # each client's model on its own test rows; personal_on_global: these models on the whole test set; ft(EPOCHS):
    # personal after so many epochs of fine-tuning, after the last round only
    protocol: Annotated[tuple[Protocol, ...], Field(min_length=1), AfterValidator(each_once)] = ("global",)
    batch_size: Count = 100  # samples
    best: BestSettings = BestSettings()  # selection of model-best.safetensors on validation rows
