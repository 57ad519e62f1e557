"""The sections of a config: every key with its type, unit, bounds and default.

Sections are frozen. An open section has one key that names something (`selector`) and, beside the keys declared here,
takes that thing's own options; they are checked against its signature when it is built (see common/options.py).
"""

import hashlib
import inspect
import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field, PrivateAttr, model_validator

from fedmpi.common.redaction import redacted
from fedmpi.common.text import LARGEST
from fedmpi.config.sections import InitSettings, OpenSection, Section
from fedmpi.config.values import (
    Count,
    DirectoryName,
    Fading,
    Name,
    NonNegative,
    Place,
    Protocol,
    Rounds,
    Seconds,
    each_once,
    flat,
)
from fedmpi.config.wire import WireSettings

NOT_COMPARED = ("data.root", "output", "init.from")  # places: what lies there is compared


class PartitionSettings(OpenSection):
    selector = "scheme"
    scheme: Name  # iid | shards | dirichlet | site, or a plug-in
    clients: Annotated[int, Field(ge=1, le=1_000_000)] | None = None  # N; scheme site finds it in the data

    @model_validator(mode="after")
    def _number_of_clients(self) -> "PartitionSettings":
        if self.clients is None and self.scheme != "site":
            raise ValueError(f"clients is missing; scheme {self.scheme} needs it (only `site` finds it in the data)")
        return self


class DataSettings(OpenSection):
    selector = "source"
    source: Name  # where the samples come from
    root: Place = Field(default_factory=lambda: Path(os.environ.get("FEDMPI_DATA") or "data"))  # relative to the cwd
    download: bool = False  # fetch files missing in root, if the source can
    client_test: Literal["auto", "site", "aligned", "shards", "class_match", "global"] = "auto"  # a client's test rows
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of each client's training samples that is held out
    partition: PartitionSettings | None = None  # one pool of samples, divided among clients; or
    silos: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(each_once)] | None = (
        None  # one client per site; only the rank of a client opens its files
    )
    share_label_counts: bool = True  # of each site, with all ranks; false: its number of samples alone
    audit: bool = True  # of silos: each rank but the server writes what has left it, with its SHA-256
    share_ranks: bool = False  # whether a rank may open the files of several silos; one process alone opens all

    @model_validator(mode="after")
    def _one_origin_of_clients(self) -> "DataSettings":
        if (self.partition is None) == (self.silos is None):
            got = "got neither" if self.partition is None else "got both (set one to null)"
            raise ValueError(f"needs either partition: {{scheme, clients}} or silos: [names]; {got}")
        if not self.silos and not self.share_label_counts:
            raise ValueError(
                "share_label_counts: false goes with silos; with a partition all ranks hold all data; leave it out"
            )
        if self.silos and self.client_test != "auto":
            raise ValueError(
                f"client_test: {self.client_test} does not go with silos, whose files say it; leave it out"
            )
        return self


class ModelSettings(OpenSection):
    name: Name


class TaskSettings(OpenSection):
    name: Name = "classification"


class MethodSettings(OpenSection):
    name: Name


class TrainSettings(Section):
    epochs: Annotated[int, Field(ge=0, le=100_000)] = 1  # passes over a client's samples in a round
    batch_size: Count | Literal["full"] = 50  # samples
    lr: NonNegative = 0.01
    momentum: Fading = 0.9
    weight_decay: NonNegative = 0.0  # coupled, as in SGD
    schedule: Literal["constant", "exponential", "cosine", "step"] = "constant"  # of lr, over rounds
    # factor of exponential (per round) and step (at 1/2 and 3/4); null: 0.99 and 0.1
    decay: Annotated[float, Field(gt=0, le=1)] | None = None
    warmup_rounds: Rounds = 0  # lr rises linearly from 0 over so many rounds
    drop_last: bool = False  # leave out the last batch of an epoch if it is smaller

    @model_validator(mode="after")
    def _decay_of_what(self) -> "TrainSettings":
        if self.decay is not None and self.schedule not in ("exponential", "step"):
            raise ValueError(
                f"decay: {self.decay:g} has no effect with schedule: {self.schedule}; take schedule: exponential or "
                "step, or leave decay out"
            )
        return self


class CohortSettings(Section):
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the clients, drawn each round
    placement: Literal["balanced", "pinned"] = "balanced"  # which rank trains whom
    weighting: Literal["samples", "uniform"] = "samples"  # p_k in the aggregate


class RuleSettings(OpenSection):
    name: Name = "auto"  # auto = the method's own
    # layout groups to which the rule applies, the others take the mean; null: all groups
    groups: Annotated[list[Name], Field(min_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _options_of_what(self) -> "RuleSettings":
        if self.name == "auto" and self.options:
            key = next(iter(self.options))
            raise ValueError(f"{key}: is an option of no rule: server.rule.name is auto; name the rule")
        return self


class ServerSettings(Section):
    rule: RuleSettings = RuleSettings()
    optim: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = "sgd"  # turns the direction into a step
    lr: NonNegative = 1.0
    momentum: Fading = 0.9  # of optim: momentum
    beta1: Fading = 0.9  # of adam, yogi, adagrad
    beta2: Fading = 0.99  # of adam, yogi
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-3  # of adam, yogi, adagrad (tau in Reddi et al. 2021)
    trains: bool = False  # rank 0 trains clients too
    placement: Literal["root", "sharded"] = "root"  # who holds the uploads: rank 0, or every rank some columns of them


class EvaluateSettings(Section):
    every: Count = 1  # rounds; the last round is always evaluated
    protocol: Annotated[tuple[Protocol, ...], Field(min_length=1), AfterValidator(each_once)] = ("global",)
    batch_size: Count = 100  # samples


class CommSettings(Section):
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    start_timeout_s: Seconds = 300
    round_timeout_s: Seconds = 1800
    wire: WireSettings = WireSettings()  # formats of what travels; `wire: bf16` is that of uploads


class FaultSettings(Section):
    """What becomes of a round in which something goes wrong (engine/faults)."""

    # norm of an update beyond which it is bad; auto: 1,000 x the median of the cohort's; null: any
    max_norm: Annotated[float, Field(gt=0)] | Literal["auto"] | None = "auto"
    # drop: the round goes on without that client, as if it had not taken part; not finite is bad, too
    # clip: dw is scaled to max_norm, the rest of the upload stays as it is; what is not finite is dropped
    on_bad_update: Literal["abort", "drop", "clip"] = "abort"
    on_client_error: Literal["abort", "drop"] = "abort"  # out of memory, a bad sample, an error in a plug-in
    on_divergence: Literal["warn", "stop"] = "warn"  # stop: exit code 1 (engine/faults/divergence.py)
    # a rank that dies or freezes. drop: the round closes without the clients that it had to train; redo: the others
    # train them, with the bits of a run without the fault (engine/faults/recovery.py)
    on_lost_rank: Literal["abort", "drop", "redo"] = "abort"
    replay: Place | None = None  # the faults.jsonl of a run, whose losses this one is given

    @model_validator(mode="after")
    def _loses_or_is_told(self) -> "FaultSettings":
        if self.replay is not None and self.on_lost_rank != "abort":
            raise ValueError(f"replay needs on_lost_rank: abort, not {self.on_lost_rank}: it is told who was lost")
        return self


class ComputeSettings(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    channels_last: bool = True
    compile: bool = False  # by torch.compile; other last bits; passes that give features stay as they are
    deterministic: bool = False  # deterministic kernels only, on GPUs
    # clients that a rank trains at once, where method and model allow it; auto: as many as caches hold. They change the
    # last bits of what clients send (docs/packing.md)
    pack: Annotated[int, Field(ge=1, le=100_000)] | Literal["auto"] = 1
    threads: Count = 1  # per rank; they change the last bits of sums; at most the cores (machine.py)


class CheckpointSettings(Section):
    every: Annotated[int, Field(ge=0, le=1_000_000)] = 1  # rounds; the last one always; 0: none, and no resuming
    keep: Count = 2  # checkpoints, the newest, and at most one more
    resume: Literal["never", "auto", "must"] = "never"  # go on with the run in output/name; auto: if there is one
    changes: Literal["refuse", "accept"] = "refuse"  # to settings, code or data, when a run goes on


class StateSettings(Section):
    # GiB of client state that a rank holds; the rest lies in files. null: all of it
    memory: Annotated[float, Field(gt=0)] | None = None


class Settings(Section):
    """All of a run's settings; made by `fedmpi.config.load`."""

    name: DirectoryName = "run"  # the run directory is output/name
    seed: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    rounds: Rounds = 20  # 0: only evaluate the initial model
    output: Place = Path("runs")
    output_mode: Literal["umask", "private"] = "umask"  # private: nobody else may read the run
    data: DataSettings
    model: ModelSettings
    init: InitSettings = InitSettings()
    task: TaskSettings = TaskSettings()
    method: MethodSettings
    train: TrainSettings = TrainSettings()
    cohort: CohortSettings = CohortSettings()
    server: ServerSettings = ServerSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    comm: CommSettings = CommSettings()
    compute: ComputeSettings = ComputeSettings()
    faults: FaultSettings = FaultSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    state: StateSettings = StateSettings()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _file: str = PrivateAttr("")  # the config itself

    @model_validator(mode="after")
    def _some_round_trains(self) -> "Settings":
        if self.train.warmup_rounds >= self.rounds > 0:
            raise ValueError(
                f"train.warmup_rounds: {self.train.warmup_rounds} are not fewer than rounds: {self.rounds}, so lr "
                "would never be reached; lower one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _sites_stay_alone(self) -> "Settings":
        if self.data.silos and self.faults.on_lost_rank == "redo":
            raise ValueError(
                "faults.on_lost_rank: redo has other ranks train the clients of a lost one, and with data.silos nobody "
                "else has their data; use drop (the run goes on without that site) or abort"
            )
        return self

    def origin(self, key: str) -> str:
        """Where a dotted key, else its section, was written: "run.yaml:7", "command line: train.lr=1"; or ""."""
        return self._origins.get(key) or self._origins.get(key.rpartition(".")[0], "")

    def origins(self, dotted: str) -> dict[str, str]:
        """Where the keys of one section were written: {"mu": "run.yaml:9"}; the key "" stands for its selector."""
        start, selector = f"{dotted}.", getattr(section(tuple(dotted.split("."))), "selector", "name")
        keys = {key[len(start) :]: where for key, where in self._origins.items() if key.startswith(start)}
        return keys | {"": self.origin(start + selector)}

    def fragments(self) -> dict[str, dict[str, Any]]:
        """What the files under `base` brought in and nothing else set: {file: {dotted key: value}}."""
        found: dict[str, dict[str, Any]] = {}
        for key, value in flat(redacted(self.resolved()), "").items():
            origin = self._origins.get(key, "")
            file = origin.rpartition(":")[0]
            if file not in ("", self._file) and not origin.startswith("command line"):
                found.setdefault(file, {})[key] = value
        return found

    def resolved(self) -> dict[str, Any]:
        """All settings, defaults included, as plain values that YAML can hold; loading them gives the same settings."""
        return self.model_dump(mode="json")

    def identity(self) -> dict[str, str]:
        """`digest_items` as they may be written down: of what may be a secret its SHA-256."""
        items = flat(redacted(self.resolved()), "")
        return {
            key: text if repr(items.get(key)) == text else hashlib.sha256(text.encode()).hexdigest()
            for key, text in self.digest_items().items()
        }

    def digest_items(self) -> dict[str, str]:
        """Dotted key -> repr(value), which ranks compare; without the places, which may differ by host."""
        items = flat(self.resolved(), "")
        return {key: repr(value) for key, value in items.items() if key not in NOT_COMPARED}


def section(path: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The class of the section at a path of keys, () for all; None where there is no section."""
    known: Any = Settings
    for part in path:
        fields = getattr(known, "model_fields", {})
        if part not in fields:
            return None
        kind = fields[part].annotation
        known = next((each for each in (kind, *get_args(kind)) if inspect.isclass(each)), None)
    return known if inspect.isclass(known) and issubclass(known, BaseModel) else None
