"""The sections of a config on data, model, task, method and training.

Sections are frozen. An open section has one key that names something (`selector`) and, beside the keys declared here,
takes that thing's own options; they are checked against its signature when it is built (see common/options.py).
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
    scheme: Name  # how samples are divided: `fedmpi list partitions`, or file.py:function; other keys are its options
    clients: Annotated[int, Field(ge=1, le=1_000_000)] | None = None  # N; schemes site and file find it in the data

    @model_validator(mode="after")
    def _check(self) -> PartitionSettings:
        if self.clients is None and self.scheme not in ("site", "file"):
            raise ValueError(f"clients is missing; scheme {self.scheme} needs it (`site` and `file` know it)")
        return self


class DataSettings(OpenSection):
    selector = "source"
    goes_with = {"share_ranks": ("silos", None)}
    source: Name  # `fedmpi list datasets`, or file.py:function; the keys that are not listed here are its own options
    # where files are looked for, relative to the working directory
    root: Place = Field(
        default_factory=lambda: Path(os.environ.get("FEDMPI_DATA") or "data"),
        json_schema_extra={"default": "$FEDMPI_DATA, else data"},
    )
    download: bool = False  # fetch files missing in root, if the source can
    client_test: Literal["auto", "site", "aligned", "shards", "class_match", "global"] = (
        "auto"  # which rows a client is tested on (docs/data.md)
    )
    stream: bool | Literal["auto"] = "auto"  # read pictures from disk when they are asked for; auto: those beyond 2 GiB
    augment: tuple[NameWithOptions, ...] = ()  # `fedmpi list augmentations`: what training pictures go through, in turn
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of each client's training samples that is held out
    # regression targets less their mean over training rows, over their deviation: of each site's own, or of all sites';
    # metrics and predictions stay in the unit of the targets
    standardise_target: Literal[False, "site", "pooled"] = False
    partition: PartitionSettings | None = None  # one pool of samples, divided among clients; or silos
    silos: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(each_once)] | None = (
        None  # one client per site; only the rank of a client opens its files
    )
    share_label_counts: bool = True  # label counts of each site, with all ranks; false: its number of samples alone
    audit: bool = True  # of silos: each rank but the server writes what has left it, with its SHA-256
    share_ranks: bool = False  # whether a rank may open the files of several silos; one process alone opens all

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
    name: Name  # `fedmpi list models`, or file.py:function; the other keys are its own options


FROM = "a run directory, or a file of safetensors under state_dict names; null: weights are drawn"


class Init(Section):
    """Given weights to start from, `from`: a run directory, or a file of safetensors under state_dict names."""

    goes_with = {"strict": ("from", None)}
    strict: bool = False  # whether all tensors of the file and of the model must match

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
    name: Name = "classification"  # `fedmpi list tasks`, or file.py:Class; the other keys are its own options

    @model_validator(mode="before")
    @classmethod
    def _nan_as_a_word(cls, value: Any) -> Any:
        """YAML's .nan as "nan", which equals itself when a run is resumed, and is JSON."""
        given = value.get("ignore") if isinstance(value, dict) else None
        nan = isinstance(given, (float, str)) and str(given).lower() == "nan"
        return {**value, "ignore": "nan"} if nan else value


class MethodSettings(OpenSection):
    name: Name  # `fedmpi list methods`, or file.py:Class; the other keys are its own options


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
    # in place of epochs: steps of the optimiser in a round, as many for every client; passes follow one another, each
    # in an order of its own
    steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    batch_size: Count | Literal["full"] = 50  # samples; full: all of a client's
    optim: Literal["sgd", "adam", "adamw"] = "sgd"  # each as in torch.optim
    lr: NonNegative = 0.01  # learning rate
    momentum: Fading = 0.9  # of sgd
    nesterov: bool = False  # of sgd's momentum: the step looks ahead
    betas: Annotated[list[Fading], Field(min_length=2, max_length=2)] | None = (
        None  # of adam, adamw; null: [0.9, 0.999]
    )
    eps: Annotated[float, Field(gt=0, le=1)] | None = None  # of adam, adamw; null: 1e-8
    # times w is added to the gradient; of adamw: lr times it is taken off w (decoupled), 0.01 unless given
    weight_decay: NonNegative = 0.0
    # norm beyond which the gradient of all that is being trained is scaled to it; null: any
    clip_norm: Annotated[float, Field(gt=0)] | None = None
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
        """Fill in the keys that are not given, or null, and whose defaults depend on the optimiser."""
        if not isinstance(value, dict):
            return value
        own = ("momentum", "nesterov", "betas", "eps", "weight_decay")
        given = {key: each for key, each in value.items() if each is not None or key not in own}
        return BY_OPTIMISER.get(str(given.get("optim")), {}) | given

    @model_validator(mode="after")
    def _check(self) -> TrainSettings:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: true needs momentum > 0; set nesterov to false, or momentum")
        if self.keep_optim and self.optim == "sgd" and not self.momentum:
            raise ValueError(
                "keep_optim: true has no effect with sgd and momentum: 0, which keep nothing; leave it out"
            )
        return self


class CohortSettings(EitherSection):
    either = ("size", "fraction")
    # of the clients, drawn each round: rounded down, at least one; null where `size` says how many
    fraction: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    size: Count | None = None  # in place of fraction: clients that are drawn each round
    # cycles: every client once before one comes again; with fraction 1 / N the model goes from client to client
    draw: Literal["uniform", "cycles"] = "uniform"
    placement: Literal["balanced", "pinned"] = "balanced"  # which rank trains whom; balanced: by what they took
    # p_k in the aggregate: by training samples, or all clients of the cohort alike
    weighting: Literal["samples", "uniform"] = "samples"


class RuleSettings(ShortSection, OpenSection):
    short = "name"
    # `fedmpi list rules`, or file.py:function; auto: the method's own. A bare text in place of the section is this name
    name: Name = "auto"

    @model_validator(mode="after")
    def _check(self) -> RuleSettings:
        if self.name == "auto" and self.options:
            key = next(iter(self.options))
            raise ValueError(f"{key}: is an option of no rule: server.rule.name is auto; name the rule")
        return self


ADAPTIVE = ("adam", "yogi", "adagrad")  # adagrad has no use for beta2; sweeps over the three give it all the same


class ServerSettings(Section):
    goes_with = {
        "momentum": ("optim", ("momentum",)),
        **dict.fromkeys(("beta1", "beta2", "eps"), ("optim", ADAPTIVE)),
        "reduce": ("placement", ("root",)),
    }
    rule: RuleSettings = RuleSettings()  # how the cohort's updates become one
    optim: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = "sgd"  # turns the direction into a step
    lr: NonNegative = 1.0  # of the server's step; 1 with sgd: the aggregate itself
    momentum: Fading = 0.9  # of optim: momentum
    nesterov: bool = False  # of optim: momentum: the step looks ahead, along direction + momentum x velocity
    beta1: Fading = 0.9  # of adam, yogi, adagrad: weight of the past in the mean
    beta2: Fading = 0.99  # of adam, yogi: weight of the past in the mean of squares
    eps: Annotated[float, Field(gt=0, le=1)] = (
        1e-3  # of adam, yogi, adagrad: added to the root (tau in Reddi et al. 2021)
    )
    trains: bool = False  # rank 0 trains clients too
    placement: Literal["root", "sharded"] = "root"  # who holds the uploads: rank 0, or every rank some columns of them
    # who adds up where a method reads means: rank 0, or first each rank its clients' (the same bits on any ranks)
    reduce: Literal["root", "local"] = "root"

    @model_validator(mode="after")
    def _check(self) -> ServerSettings:
        if self.nesterov and (self.optim != "momentum" or not self.momentum):
            have = f"optim: {self.optim}, momentum: {self.momentum:g}"
            raise ValueError(f"nesterov: true needs optim: momentum with momentum > 0, not {have}; or set it to false")
        return self


class BestSettings(ShortSection):
    """Selection of the best model on validation rows: model-best.safetensors. A bare text is the metric."""

    short = "metric"
    goes_with = dict.fromkeys(("goal", "patience", "min_delta"), ("metric", None))
    # "loss" or a metric of the task: of the global model on the rows that data.validation holds out at all clients,
    # in each evaluation (where parts of the model stay with clients, or clients have models of their own and no
    # protocol looks at the global one, of what each client uses on its own rows)
    metric: Name | None = None
    goal: Literal["auto", "lowest", "highest"] = "auto"  # auto: lowest of loss, mse and what has these in its name
    patience: Count | None = None  # evaluations in a row without a better model, after which the run ends; null: any
    min_delta: NonNegative = 0.0  # by how much more than that a model must be better than the best one so far


class EvaluateSettings(Section):
    every: Count = 1  # rounds; the last round is always evaluated
    # global model on the whole test set; sites: the global model on the test rows of each site of the data set;
    # personal: each client's model on its own test rows; personal_on_global: these models on the whole test set;
    # ft(EPOCHS): personal after so many epochs of fine-tuning, after the last round only
    protocol: Annotated[tuple[Protocol, ...], Field(min_length=1), AfterValidator(each_once)] = ("global",)
    batch_size: Count = 100  # samples
    best: BestSettings = BestSettings()  # model-best.safetensors, chosen on validation rows; a bare text is the metric
