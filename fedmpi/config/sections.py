"""Config sections for data, model, task, method and training.

Sections are immutable. An `OpenSection` selects a component by name; its other keys are options of that component,
which are checked against the component's signature when the component is built (common/options.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from fedmpi.common.type_descriptions import describe_value
from fedmpi.config.field_types import (
    Count,
    DecayFactor,
    ExclusiveKeysSection,
    ExpandedPath,
    Name,
    NameWithOptions,
    NonNegative,
    OpenSection,
    Protocol,
    Rounds,
    Section,
    ShortFormSection,
    check_unique,
)


class PartitionSettings(OpenSection):
    """The section `data.partition`: how samples are divided among clients."""

    selector = "scheme"
    scheme: Name  # the partition: see `fedmpi list partitions`, or file.py:function; other keys are its options
    clients: Annotated[int, Field(ge=1, le=1_000_000)] | None = (
        None  # number; schemes site and file take it from the data
    )

    @model_validator(mode="after")
    def _check(self) -> PartitionSettings:
        if self.clients is None and self.scheme not in ("site", "file"):
            raise ValueError(
                f"clients: not set; scheme {self.scheme} needs the number of clients, such as 10 (only the schemes "
                "site and file take it from the data)"
            )
        return self


class DataSettings(OpenSection):
    """The section `data`: the data source, and the partition and preparation of its samples."""

    selector = "source"
    prerequisites = {"share_ranks": ("silos", None)}
    source: Name  # see `fedmpi list datasets`, or file.py:function; keys that are not listed here are its options
    # folder of the files, relative to the working directory
    root: ExpandedPath = Field(
        default_factory=lambda: Path(os.environ.get("FEDMPI_DATA") or "data"),
        json_schema_extra={"default": "$FEDMPI_DATA, else data"},
    )
    download: bool = False  # download files that are missing in root, if the source supports it
    client_test: Literal["auto", "site", "aligned", "shards", "class_match", "global"] = (
        "auto"  # how test rows are assigned to clients (docs/data.md)
    )
    stream: bool | Literal["auto"] = "auto"  # read images from disk for each batch; auto: if they take more than 2 GiB
    augment: tuple[
        NameWithOptions, ...
    ] = ()  # operations on training images, in this order; see `fedmpi list augmentations`
    validation: Annotated[float, Field(ge=0, lt=1)] = (
        0.0  # share of each client's training samples that is held out for validation
    )
    # standardise regression targets by mean and deviation of the training rows of each site, or of all sites; metrics
    # and predictions stay in the unit of the targets
    standardise_target: Literal[False, "site", "pooled"] = False
    partition: PartitionSettings | None = None  # how samples are divided among clients; alternatively, set silos
    silos: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(check_unique)] | None = (
        None  # names of sites; each site is a client, and only its own rank opens its files
    )
    share_label_counts: bool = True  # share the label counts of each site with all ranks; false: only its sample count
    audit: bool = True  # with silos: each rank except the server records all data that it sends, with SHA-256 digests
    share_ranks: bool = False  # allow a rank to open the files of several silos; a single process opens all

    @model_validator(mode="after")
    def _check(self) -> DataSettings:
        if (self.partition is None) == (self.silos is None):
            raise ValueError(
                "neither partition nor silos is set; set one of them, for example partition: {scheme: iid, clients: 10}"
                if self.partition is None
                else "partition and silos are both set; set one of them to null"
            )
        if self.silos and self.client_test != "auto":
            raise ValueError(
                f"client_test: {self.client_test} is not allowed with data.silos, because the files of a silo define "
                "its test set; remove data.client_test"
            )
        return self


class LoraSettings(Section):
    """The section `model.lora`: low-rank adapters, which are trained in place of the model (docs/finetune.md)."""

    r: Annotated[int, Field(ge=1, le=100_000)] = 8  # rank of the adapters
    alpha: Annotated[float, Field(gt=0)] = 16.0  # the product B A of an adapter is scaled by alpha / r
    # names of the layers that get an adapter, or ends of their names; null: all linear layers except the head
    targets: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(check_unique)] | None = None
    rslora: bool = False  # scale by alpha / sqrt(r)
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # dropout rate of an adapter's input
    # train the head, too; false: only the adapters; null: false for tasks that predict the next token, otherwise true
    head: bool | None = None
    base_precision: Literal["fp32", "bf16"] = "fp32"  # number format of all parameters that are not trained


class ModelSettings(OpenSection):
    """The section `model`: the name of the model, and its options."""

    name: Name  # see `fedmpi list models`, library:NAME, or file.py:function; other keys are its options
    # file or folder of trained weights, loaded before the method changes the model (docs/models.md); null: those in
    # FOLDER if the name is hf:FOLDER; otherwise, and if false, random weights
    pretrained: ExpandedPath | Literal[False] | None = None
    lora: LoraSettings | None = None  # train low-rank adapters of the model's layers (LoRA); null: train the model


INIT_FROM_MEANING = "a run directory, or a safetensors file with state_dict names; null: random initial weights"


class Init(Section):
    """The section `init`: initial weights from the run directory or safetensors file that the key `from` names."""

    prerequisites = {"strict": ("from", None)}
    strict: bool = False  # require that file and model have the same tensors

    @property
    def source(self) -> Path | None:
        """The value of the key `from`. No attribute can have this name, because it is a Python keyword."""
        path: Path | None = getattr(self, "from")
        return path


if TYPE_CHECKING:
    InitSettings = Init
else:
    InitSettings = create_model(
        "InitSettings", __base__=Init, **{"from": (ExpandedPath | None, Field(None, description=INIT_FROM_MEANING))}
    )


class TaskSettings(OpenSection):
    """The section `task`: the name of the task, which defines loss and metrics, and its options."""

    name: Name = "classification"  # see `fedmpi list tasks`, or file.py:Class; other keys are its options

    @model_validator(mode="before")
    @classmethod
    def _convert_nan(cls, value: Any) -> Any:
        """Convert `ignore: .nan` to the string "nan", because NaN is not valid JSON and is not equal to itself."""
        given = value.get("ignore") if isinstance(value, dict) else None
        nan = isinstance(given, (float, str)) and str(given).lower() == "nan"
        return {**value, "ignore": "nan"} if nan else value


class MethodSettings(OpenSection):
    """The section `method`: the name of the federated method, and its options."""

    name: Name  # see `fedmpi list methods`, or file.py:Class; other keys are its options


# Defaults that depend on the optimiser; the values are those of torch.optim.
ADAM_DEFAULTS = {"momentum": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
OPTIMISER_DEFAULTS: dict[str, dict[str, Any]] = {"adam": ADAM_DEFAULTS, "adamw": ADAM_DEFAULTS | {"weight_decay": 0.01}}


class TrainSettings(ExclusiveKeysSection):
    """The section `train`: local training at the clients."""

    prerequisites = {
        **dict.fromkeys(("momentum", "nesterov"), ("optim", ("sgd",))),
        **dict.fromkeys(("betas", "eps"), ("optim", ("adam", "adamw"))),
        "decay": ("schedule", ("exponential", "step")),
    }
    exclusive_keys = ("steps", "epochs")
    epochs: Annotated[int, Field(ge=0, le=100_000)] | None = 1  # passes over a client's samples per round
    # optimiser steps per client and round, instead of epochs; samples are reshuffled for each pass
    steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    batch_size: Count | Literal["full"] = 50  # samples; full: all samples of the client
    # number of parts in which a batch is processed, one after another, to save memory; their gradients are added up to
    # that of the batch (docs/training.md)
    accumulate: Count = 1
    optim: Literal["sgd", "adam", "adamw"] = "sgd"  # optimiser, as in torch.optim
    lr: NonNegative = 0.01  # learning rate
    momentum: DecayFactor = 0.9  # for sgd
    nesterov: bool = False  # Nesterov momentum for sgd
    betas: Annotated[list[DecayFactor], Field(min_length=2, max_length=2)] | None = (
        None  # for adam and adamw; null: [0.9, 0.999]
    )
    eps: Annotated[float, Field(gt=0, le=1)] | None = None  # for adam and adamw; null: 1e-8
    # weight_decay * w is added to the gradient; for adamw it is decoupled, with a default of 0.01
    weight_decay: NonNegative = 0.0
    # largest norm of the gradient of all trained parameters; larger gradients are scaled down to it; null: no limit
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    schedule: Literal["constant", "exponential", "cosine", "step"] = "constant"  # of lr as a function of the round
    # factor by which lr is multiplied: exponential: after each round (null: 0.99); step: after 1/2 and 3/4 of the
    # rounds (null: 0.1)
    decay: Annotated[float, Field(gt=0, le=1)] | None = None
    warmup_rounds: Rounds = 0  # number of rounds in which lr rises linearly from 0
    drop_last: bool = False  # leave out the last batch of an epoch if it is smaller
    # store the optimiser's state (velocities, moments) of each client between its rounds
    persist_optimizer: bool = False

    @model_validator(mode="before")
    @classmethod
    def _fill_optimiser_defaults(cls, value: Any) -> Any:
        """Set keys that are missing or null to defaults that depend on the optimiser."""
        if not isinstance(value, dict):
            return value
        own = ("momentum", "nesterov", "betas", "eps", "weight_decay")
        given = {key: each for key, each in value.items() if each is not None or key not in own}
        return OPTIMISER_DEFAULTS.get(str(given.get("optim")), {}) | given

    @model_validator(mode="after")
    def _check(self) -> TrainSettings:
        if self.nesterov and not self.momentum:
            raise ValueError(
                "nesterov: true needs train.momentum > 0, but train.momentum is 0; set train.momentum, or "
                "train.nesterov: false"
            )
        if self.persist_optimizer and self.optim == "sgd" and not self.momentum:
            raise ValueError(
                "persist_optimizer: true has no effect, because sgd without momentum (train.momentum: 0) keeps no "
                "state; remove train.persist_optimizer"
            )
        if self.batch_size != "full" and self.accumulate > self.batch_size:
            raise ValueError(
                f"accumulate: {self.accumulate} is not allowed; must be at most train.batch_size ({self.batch_size}), "
                "because a part of a batch has at least one sample; lower train.accumulate"
            )
        return self


class CohortSettings(ExclusiveKeysSection):
    """The section `cohort`: the clients that take part in a round, their ranks and their weights."""

    exclusive_keys = ("size", "fraction")
    # share of the clients that is drawn each round, rounded down to at least one client; null if `size` is set
    fraction: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    size: Count | None = None  # number of clients that are drawn each round, instead of fraction
    # how clients are drawn. cyclic: every client once before one is drawn again; with fraction 1 / N the model passes
    # from client to client. poisson: each client with the same probability, independently of the others
    sampling: Literal["uniform", "cyclic", "poisson"] = "uniform"
    placement: Literal["balanced", "pinned"] = (
        "balanced"  # assignment of clients to ranks; balanced: by measured times; pinned: fixed
    )
    weighting: Literal["samples", "uniform"] = (
        "samples"  # weights p_k in the aggregate: proportional to training samples, or equal
    )


class RuleSettings(ShortFormSection, OpenSection):
    """The section `server.rule`: the name of the aggregation rule, and its options."""

    short_key = "name"
    # see `fedmpi list rules`, or file.py:function; auto: the method's rule. A text instead of the section is the name
    name: Name = "auto"

    @model_validator(mode="after")
    def _check(self) -> RuleSettings:
        if self.name == "auto" and self.options:
            key, value = next(iter(self.options.items()))
            raise ValueError(
                f"{key}: {describe_value(value)} has no effect, because server.rule.name is auto; set server.rule.name "
                f"to a rule with the option {key}"
            )
        return self


ADAPTIVE_OPTIMISERS = (
    "adam",
    "yogi",
    "adagrad",
)  # adagrad ignores beta2, which is accepted so that a sweep can compare all three


class ServerSettings(Section):
    """The section `server`: the server's aggregation and optimiser."""

    prerequisites = {
        "momentum": ("optim", ("momentum",)),
        **dict.fromkeys(("beta1", "beta2", "eps"), ("optim", ADAPTIVE_OPTIMISERS)),
        "reduce": ("placement", ("root",)),
    }
    rule: RuleSettings = RuleSettings()  # aggregation rule for the updates of the cohort
    optim: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = "sgd"  # server optimiser
    lr: NonNegative = 1.0  # learning rate of the server; with sgd and lr 1 the step is the aggregate
    momentum: DecayFactor = 0.9  # for optim: momentum
    nesterov: bool = False  # for optim: momentum: the step is direction + momentum x velocity
    beta1: DecayFactor = 0.9  # for adam, yogi and adagrad: decay of the first moment
    beta2: DecayFactor = 0.99  # for adam and yogi: decay of the second moment
    eps: Annotated[float, Field(gt=0, le=1)] = (
        1e-3  # for adam, yogi and adagrad: added to the square root (tau in Reddi et al. 2021)
    )
    trains_clients: bool = False  # whether rank 0 trains clients, too
    placement: Literal["root", "sharded"] = (
        "root"  # where uploads are stored: all on rank 0, or some columns of each on every rank
    )
    # for methods that use only means of uploads. root: rank 0 sums all uploads; local: each rank sums those of its own
    # clients first (with the same bits for any number of ranks)
    reduce: Literal["root", "local"] = "root"
    # with model.lora: how the adapters B A are averaged. separate: A and B each by their mean; freeze_a: A is not
    # trained; exact: as separate, and what the mean of the products B A has in addition is added to the base weights;
    # svd: the best approximation of the mean of the products with the same rank; stack: the mean of the products is
    # added to the base weights, and the adapters start again
    lora: Literal["separate", "freeze_a", "exact", "svd", "stack"] = "separate"

    @model_validator(mode="after")
    def _check(self) -> ServerSettings:
        if self.nesterov and (self.optim != "momentum" or not self.momentum):
            wrong = f"server.optim is {self.optim}" if self.optim != "momentum" else "server.momentum is 0"
            raise ValueError(
                f"nesterov: true needs server.optim: momentum and server.momentum > 0, but {wrong}; set these, or "
                "server.nesterov: false"
            )
        return self


class BestSettings(ShortFormSection):
    """The section `evaluate.best`: selection of the best model on validation rows.

    A string in place of the section sets its key `metric`.
    """

    short_key = "metric"
    prerequisites = dict.fromkeys(("goal", "patience", "min_delta"), ("metric", None))
    # "loss" or a metric of the task, computed in each evaluation for the global model on the rows that data.validation
    # holds out at all clients. If clients keep parts of the model, or have models of their own and no protocol
    # evaluates the global one: the mean over clients, each with its own model on its own rows
    metric: Name | None = None
    goal: Literal["auto", "lowest", "highest"] = "auto"  # auto: lowest if the name contains loss or mse
    patience: Count | None = None  # number of evaluations without a better model after which the run ends; null: never
    min_delta: NonNegative = 0.0  # improvement that a better model must exceed


class EvaluateSettings(Section):
    """The section `evaluate`: evaluation and selection of the best model."""

    every: Count = 1  # rounds between evaluations; the last round is always evaluated
    # global: the global model on the whole test set; sites: the global model on the test rows of each site; personal:
    # each client's model on its own test rows; personal_on_global: these models on the whole test set; ft(EPOCHS):
    # like personal, after EPOCHS epochs of fine-tuning; only after the last round
    protocol: Annotated[tuple[Protocol, ...], Field(min_length=1), AfterValidator(check_unique)] = ("global",)
    batch_size: Count = 100  # samples
    best: BestSettings = BestSettings()  # selection of model-best.safetensors on validation rows
