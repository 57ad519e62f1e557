"""The class `Settings` with all settings of a run, and config sections for communication, devices, faults and files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from fedmpi.common.redaction import redact
from fedmpi.common.text import MAX_INTEGER
from fedmpi.config.field_types import (
    Count,
    DirectoryName,
    ExpandedPath,
    NameWithOptions,
    Rounds,
    Seconds,
    Section,
    flatten,
)
from fedmpi.config.privacy import PrivacySettings
from fedmpi.config.sections import (
    CohortSettings,
    DataSettings,
    EvaluateSettings,
    InitSettings,
    MethodSettings,
    ModelSettings,
    ServerSettings,
    TaskSettings,
    TrainSettings,
)

# Keys that ranks do not compare: paths, whose contents are compared instead, and values that may differ by host.
NOT_COMPARED = (
    *("data.root", "output", "model.pretrained", "init.from", "comm.interface"),
    *("privacy.noise_file", "privacy.repeat", "privacy.keys", "privacy.identity"),
)


Analysis = Literal[  # engine/diagnostics
    "losses", "drift", "knowledge", "contribution", "features", "orthogonality", "layers"
]


class CommSettings(Section):
    """The section `comm`: communication between ranks."""

    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"  # auto: nccl if each rank has its own GPU, otherwise gloo
    # network interface between hosts, for gloo, NCCL and rank 0's store (docs/hpc.md): a name, a pattern such as ib*,
    # or a list, from which each host uses the first one that it has; null: gloo and NCCL choose
    interface: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)] | None = None
    start_timeout_s: Seconds = 300  # how long ranks wait for all ranks to connect
    round_timeout_s: Seconds = 1800  # how long a rank waits for a message during a round
    compression: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"  # number format of uploads (docs/compression.md)


class FaultSettings(Section):
    """How a run reacts to faults during a round."""

    prerequisites = {"replay": ("on_lost_rank", ("abort",))}
    # largest norm of a valid update; auto: 1,000 times the median of the cohort; null: no limit
    max_norm: Annotated[float, Field(gt=0)] | Literal["auto"] | None = "auto"
    # what to do about an update that is not finite or exceeds max_norm. drop: the round continues as if the client had
    # not taken part
    on_bad_update: Literal["abort", "drop"] = "abort"
    on_client_error: Literal["abort", "drop"] = (
        "abort"  # what to do about an error in a client: out of memory, a bad sample, or a plug-in
    )
    on_divergence: Literal["warn", "stop"] = (
        "warn"  # what to do if training diverges; stop: the run ends with exit code 1
    )
    # what to do if a rank dies or hangs. drop: the round continues without the clients of that rank; redo: other ranks
    # train them, and the results have the bits of a run without the failure
    on_lost_rank: Literal["abort", "drop", "redo"] = "abort"
    replay: ExpandedPath | None = None  # the faults.jsonl of a run whose faults are repeated


class ComputeSettings(Section):
    """The section `compute`: devices, precision and speed."""

    prerequisites = {
        "cudnn_benchmark": ("deterministic", (False,)),
        "compile": ("graphs", (False, "auto")),
        "gradient_checkpointing": ("graphs", (False, "auto")),
    }
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    precision: Literal["fp32", "bf16"] = "fp32"  # of forward and backward passes; bf16: autocast, weights stay fp32
    # store only the inputs of blocks of layers, and compute their activations again in the backward pass, which saves
    # memory; for models that offer it, such as those of transformers and timm. It does not change the bits
    gradient_checkpointing: bool = False
    channels_last: bool = True  # memory layout of images and convolutions
    compile: bool = (
        False  # use torch.compile, which changes the last bits; passes that return features are not compiled
    )
    # on GPUs: run forward and backward passes as CUDA graphs, which makes small models several times as fast with the
    # same bits. Methods with their own loss or step do not use them. auto: if model and task consist of modules of
    # PyTorch and fedmpi, and compile is false; true: always; a model that cannot be captured is an error
    graphs: bool | Literal["auto"] = "auto"
    # on GPUs: round the factors of fp32 products to TF32 (10 mantissa bits). PyTorch's default is true for convolutions
    # and recurrent layers, and false for matrix products
    tf32: bool = False
    cudnn_benchmark: bool = (
        False  # on GPUs: use the fastest of cuDNN's convolution kernels; the last bits differ between runs
    )
    deterministic: bool = False  # on GPUs: use deterministic kernels only
    # number of clients that a rank trains at once, if method and model support it; auto: the fastest number. It changes
    # the last bits of uploads (docs/packing.md)
    clients_per_pass: Annotated[int, Field(ge=1, le=100_000)] | Literal["auto"] = 1
    threads: Count = 1  # threads per rank, at most the number of cores; the number changes the last bits of sums


class CheckpointSettings(Section):
    """The section `checkpoint`: how often checkpoints are written, and whether a run is resumed."""

    every: Annotated[int, Field(ge=0, le=1_000_000)] = (
        1  # rounds between checkpoints; 0: no checkpoints, so the run cannot be resumed
    )
    keep: Count = 2  # number of newest checkpoints to keep (one more while a new one is written)
    resume: Literal["never", "auto", "must"] = "never"  # resume the run in output/name; auto: if it exists
    changes: Literal["refuse", "accept"] = (
        "refuse"  # whether settings, code or data may differ from those at the start of the run
    )


class RecordSettings(Section):
    """The section `record`: the update statistics that a run records."""

    # contents of update_stats.jsonl. norms: the norms of each round's updates, and cosines and spectrum if the server
    # rule computes their Gram matrix; gram: cosines and spectrum for every rule, for which rank 0 (with
    # server.placement: sharded, all ranks) stores the rows of all clients
    updates: Literal[False, "norms", "gram"] = "norms"


class ClientStateSettings(Section):
    """The section `client_state`: how much client state is kept in memory."""

    # GiB of client state that a rank keeps in memory; the rest is stored in files; null: all in memory
    max_gib: Annotated[float, Field(gt=0)] | None = None


class Settings(Section):
    """The settings of a run, as returned by `fedmpi.config.load`."""

    name: DirectoryName = "run"  # the run directory is output/name
    seed: Annotated[int, Field(ge=0, le=MAX_INTEGER)] = (
        0  # seed of all random numbers: partition, initial weights, cohorts, batches
    )
    rounds: Rounds = 20  # number of rounds; 0: only evaluate the initial model
    output: ExpandedPath = Path("runs")  # folder of the run directories
    trace: bool = True  # record the times of each rank's work (fedmpi analyse timeline)
    record: RecordSettings = RecordSettings()  # what is recorded about updates
    report: bool = True  # write report.html at the end (fedmpi report)
    loggers: tuple[NameWithOptions, ...] = ()  # loggers that receive the metrics of each round (`fedmpi list loggers`)
    callbacks: tuple[NameWithOptions, ...] = ()  # file.py:Class: your own code that receives them (docs/campaigns.md)
    data: DataSettings  # source, partition and preparation of the samples
    model: ModelSettings  # the architecture
    init: InitSettings = InitSettings()  # initial weights from a file
    task: TaskSettings = TaskSettings()  # the loss and the metrics
    method: MethodSettings  # the federated method
    train: TrainSettings = TrainSettings()  # local training (docs/training.md)
    cohort: CohortSettings = CohortSettings()  # which clients take part, on which rank, with which weight
    server: ServerSettings = ServerSettings()  # how the server turns uploads into a step
    privacy: PrivacySettings = PrivacySettings()  # differential privacy and secure aggregation (docs/privacy.md)
    evaluate: EvaluateSettings = EvaluateSettings()  # evaluation, selection of the best model, early stopping
    analysis: tuple[Analysis, ...] = ()  # further diagnostics in evaluated rounds (docs/analysis.md)
    comm: CommSettings = CommSettings()  # communication between ranks
    compute: ComputeSettings = ComputeSettings()  # devices, precision, speed
    faults: FaultSettings = FaultSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()  # checkpoints and resuming
    client_state: ClientStateSettings = ClientStateSettings()  # storage of client state

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _start_dir: str = PrivateAttr("")  # the working directory in which the run began

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.train.warmup_rounds >= self.rounds > 0:
            raise ValueError(
                f"train.warmup_rounds: {self.train.warmup_rounds} is not allowed; must be less than rounds "
                f"({self.rounds}), because otherwise train.lr is never reached; lower train.warmup_rounds, or "
                "raise rounds"
            )
        if self.train.accumulate > 1 and self.compute.graphs is True:
            raise ValueError(
                f"compute.graphs: true is not allowed with train.accumulate: {self.train.accumulate}, because a CUDA "
                "graph computes the gradient of a whole batch; set compute.graphs: auto, or remove train.accumulate"
            )
        if self.evaluate.best.metric is not None and not self.data.validation:
            raise ValueError(
                f"evaluate.best.metric: {self.evaluate.best.metric} needs validation rows, but data.validation is 0; "
                "set data.validation to a fraction such as 0.1"
            )
        if self.model.lora is None and self.server.lora != "separate":
            raise ValueError(
                f"server.lora: {self.server.lora} averages the adapters of model.lora, but model.lora is not set; set "
                "model.lora, or remove server.lora"
            )
        if self.data.silos and self.faults.on_lost_rank == "redo":
            raise ValueError(
                "faults.on_lost_rank: redo is not allowed with data.silos, because no other rank has the data of a "
                "lost rank; set it to drop (the run continues without that site) or abort"
            )
        return self

    def with_working_dir(self, directory: str | Path) -> Settings:
        """Return a copy of these settings whose relative paths refer to `directory`."""
        copy = self.model_copy()
        copy._start_dir = str(directory)
        return copy

    @property
    def working_dir(self) -> Path:
        """The base directory of relative paths, in which the run began; Path() if it is the current directory."""
        try:
            moved = self._start_dir and os.getcwd() != self._start_dir
        except FileNotFoundError:  # the current directory was deleted
            moved = True
        return Path(self._start_dir) if moved else Path()

    def origin(self, key: str) -> str:
        """Return where a dotted key was set: "run.yaml:7" or "command line: train.lr=1"; "" if it was not set.

        If only the section of the key was set, the origin of the section is returned.
        """
        return self._origins.get(key) or self._origins.get(key.rpartition(".")[0], "")

    def key_origins(self, dotted: str) -> dict[str, str]:
        """Return where the keys of the section `dotted` were set, for example {"mu": "run.yaml:9"}.

        The key "" stands for the key that selects the section's component, such as `method.name`.
        """
        start, selector = f"{dotted}.", getattr(section_class(tuple(dotted.split("."))), "selector", "name")
        keys = {key[len(start) :]: where for key, where in self._origins.items() if key.startswith(start)}
        return keys | {"": self.origin(start + selector)}

    def identity(self) -> dict[str, str]:
        """Return {dotted key: text of its value}; a value that may be secret is replaced by its SHA-256 digest."""
        items = flatten(redact(self.model_dump(mode="json")), "")
        return {
            key: text if repr(items.get(key)) == text else hashlib.sha256(text.encode()).hexdigest()
            for key, text in self.digest_items().items()
        }

    def digest_items(self) -> dict[str, str]:
        """Return {dotted key: repr(value)} without the keys that may differ between ranks, such as some paths."""
        items = flatten(self.model_dump(mode="json"), "")
        return {key: repr(value) for key, value in items.items() if key not in NOT_COMPARED}


def section_class(path: tuple[str | int, ...], root: type[BaseModel] = Settings) -> type[BaseModel] | None:
    """Return the class of the section that the keys `path` lead to, starting at `root`.

    The result is `root` itself if `path` is empty, and None if there is no such section.
    """
    known: Any = root
    for part in path:
        if known is None or part not in known.model_fields:
            return None
        hint = known.model_fields[part].annotation
        known = next((each for each in (hint, *get_args(hint)) if isinstance(each, type(BaseModel))), None)
    return known
