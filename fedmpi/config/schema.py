"""The settings of a run: the sections on communication, devices, faults and files, and the class `Settings`."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from fedmpi.common.redaction import redacted
from fedmpi.common.text import LARGEST
from fedmpi.config.field_types import (
    Count,
    DirectoryName,
    NameWithOptions,
    Place,
    Rounds,
    Seconds,
    Section,
    flat,
)
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

# Places, of which what lies there is compared; and what hosts may have of their own.
NOT_COMPARED = ("data.root", "output", "init.from", "comm.interface")


Analysis = Literal[  # engine/probes
    "losses", "drift", "knowledge", "contribution", "features", "orthogonality", "layers"
]


class CommSettings(Section):
    backend: Literal["auto", "nccl", "gloo", "mpi"] = (
        "auto"  # auto: nccl where each rank has a GPU of its own, else gloo
    )
    # network interface between hosts, for gloo, NCCL and rank 0's store (docs/hpc.md): a name, a pattern such as ib*,
    # or a list of them, of which each host takes the first that it has; null: gloo's and NCCL's own choice
    interface: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)] | None = None
    start_timeout_s: Seconds = 300  # how long ranks wait for all to come
    round_timeout_s: Seconds = 1800  # how long a rank waits for a message within a round
    wire: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"  # the format of uploads (docs/wire.md)


class FaultSettings(Section):
    """How a round continues in which something goes wrong (engine/faults)."""

    goes_with = {"replay": ("on_lost_rank", ("abort",))}
    # norm of an update beyond which it is bad; auto: 1,000 x the median of the cohort's; null: any
    max_norm: Annotated[float, Field(gt=0)] | Literal["auto"] | None = "auto"
    # drop: the round goes on without that client, as if it had not taken part; not finite is bad, too
    on_bad_update: Literal["abort", "drop"] = "abort"
    on_client_error: Literal["abort", "drop"] = "abort"  # out of memory, a bad sample, an error in a plug-in
    on_divergence: Literal["warn", "stop"] = "warn"  # stop: exit code 1 (engine/faults/divergence.py)
    # a rank that dies or freezes. drop: the round closes without the clients that it had to train; redo: the others
    # train them, with the bits of a run without the fault (engine/faults/policy.py)
    on_lost_rank: Literal["abort", "drop", "redo"] = "abort"
    replay: Place | None = None  # the faults.jsonl of a run, whose losses this one is given


class ComputeSettings(Section):
    goes_with = {"cudnn_benchmark": ("deterministic", (False,)), "compile": ("graphs", (False, "auto"))}
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU where there is one
    precision: Literal["fp32", "bf16"] = "fp32"  # of passes; bf16: autocast, the weights stay as they are
    channels_last: bool = True  # layout of pictures and convolutions in memory
    compile: bool = False  # by torch.compile; other last bits; passes that give features stay as they are
    # Forward and backward passes as CUDA graphs, on GPUs: small models are several times as fast, with the same bits.
    # Where a method has a loss or steps of its own its passes stay as they are. auto: where model and task consist of
    # parts of PyTorch and fedmpi, unless compile is true; true: for all, and one that cannot be captured is an error
    graphs: bool | Literal["auto"] = "auto"
    # on GPUs: round the factors of fp32 products to TF32, mantissas of 10 bits. PyTorch's own default is true for
    # convolutions and recurrent layers, false for matrix products
    tf32: bool = False
    cudnn_benchmark: bool = False  # on GPUs: try cuDNN's convolution kernels, take the fastest; bits differ by run
    deterministic: bool = False  # deterministic kernels only, on GPUs
    # clients that a rank trains at once, where method and model allow it; auto: as many as the device runs fastest.
    # They change the last bits of what clients send (docs/packing.md)
    pack: Annotated[int, Field(ge=1, le=100_000)] | Literal["auto"] = 1
    threads: Count = 1  # per rank; they change the last bits of sums; at most the cores (config/resources.py)


class CheckpointSettings(Section):
    every: Annotated[int, Field(ge=0, le=1_000_000)] = 1  # rounds; the last one always; 0: none, and no resuming
    keep: Count = 2  # checkpoints, the newest, and at most one more
    resume: Literal["never", "auto", "must"] = "never"  # go on with the run in output/name; auto: if there is one
    changes: Literal["refuse", "accept"] = "refuse"  # to settings, code or data, when a run goes on; for one start


class RecordSettings(Section):
    # what updates.jsonl says of each round's updates. norms: how long they are, which is known anyway, and, where the
    # server's rule forms their Gram matrix, cosines and spectrum; gram: these in any case: rank 0 (or with
    # server.placement: sharded all ranks) then holds all rows, and forms the matrix
    updates: Literal[False, "norms", "gram"] = "norms"


class StateSettings(Section):
    # GiB of client state that a rank holds; the rest lies in files. null: all of it
    memory: Annotated[float, Field(gt=0)] | None = None


class Settings(Section):
    """The settings of a run, as `fedmpi.config.load` returns them."""

    name: DirectoryName = "run"  # the run directory is output/name
    seed: Annotated[int, Field(ge=0, le=LARGEST)] = (
        0  # of everything that is drawn: partition, weights, cohorts, batches
    )
    rounds: Rounds = 20  # 0: only evaluate the initial model
    output: Place = Path("runs")  # where run directories are made
    timeline: bool = True  # each rank writes what it did when (fedmpi analyse timeline)
    record: RecordSettings = RecordSettings()  # what is written down of the training itself
    report: bool = True  # rank 0 ends with report.html, a page of all that was recorded (fedmpi report)
    track: tuple[NameWithOptions, ...] = ()  # `fedmpi list trackers`: who else hears of each round
    callbacks: tuple[NameWithOptions, ...] = ()  # file.py:Class: your own code hears of each round (docs/campaigns.md)
    data: DataSettings  # where samples come from, and whose they are
    model: ModelSettings  # the architecture
    init: InitSettings = InitSettings()  # given weights to start from
    task: TaskSettings = TaskSettings()  # what is learned: the loss and the metrics
    method: MethodSettings  # what clients and server do
    train: TrainSettings = TrainSettings()  # what a client does in a round (docs/training.md)
    cohort: CohortSettings = CohortSettings()  # who takes part, where, with which weight
    server: ServerSettings = ServerSettings()  # how uploads become a step
    evaluate: EvaluateSettings = EvaluateSettings()  # how good the model is, and which one is the best
    analysis: tuple[Analysis, ...] = ()  # what else is measured in rounds that are evaluated (docs/analysis.md)
    comm: CommSettings = CommSettings()  # how ranks talk
    compute: ComputeSettings = ComputeSettings()  # on what, and how
    faults: FaultSettings = FaultSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()  # what it takes to go on
    state: StateSettings = StateSettings()  # where what clients keep lies

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _began_in: str = PrivateAttr("")  # the working directory in which the run began

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.train.warmup_rounds >= self.rounds > 0:
            raise ValueError(
                f"train.warmup_rounds: {self.train.warmup_rounds} are not fewer than rounds: {self.rounds}, so lr "
                "would never be reached; lower one or raise the other"
            )
        if self.evaluate.best.metric is not None and not self.data.validation:
            raise ValueError(
                f"evaluate.best.metric: {self.evaluate.best.metric} is measured on validation rows; there are none: "
                "set data.validation: 0.1, say"
            )
        if self.data.silos and self.faults.on_lost_rank == "redo":
            raise ValueError(
                "faults.on_lost_rank: redo has other ranks train the clients of a lost one, and with data.silos nobody "
                "else has their data; use drop (the run goes on without that site) or abort"
            )
        return self

    def begun_in(self, directory: str | Path) -> Settings:
        """Return a copy of these settings whose relative paths refer to `directory`, where the run is started."""
        copy = self.model_copy()
        copy._began_in = str(directory)
        return copy

    @property
    def working_dir(self) -> Path:
        """The directory of relative paths: Path(), or the original one where a plug-in has changed the current one."""
        try:
            moved = self._began_in and os.getcwd() != self._began_in
        except FileNotFoundError:  # a temporary one, which is gone
            moved = True
        return Path(self._began_in) if moved else Path()

    def origin(self, key: str) -> str:
        """Return where a dotted key, else its section, was written: "run.yaml:7", "command line: train.lr=1"; or ""."""
        return self._origins.get(key) or self._origins.get(key.rpartition(".")[0], "")

    def origins(self, dotted: str) -> dict[str, str]:
        """Return where the keys of a section were written: {"mu": "run.yaml:9"}; the key "" stands for its selector."""
        start, selector = f"{dotted}.", getattr(section(tuple(dotted.split("."))), "selector", "name")
        keys = {key[len(start) :]: where for key, where in self._origins.items() if key.startswith(start)}
        return keys | {"": self.origin(start + selector)}

    def identity(self) -> dict[str, str]:
        """Return `digest_items` with the SHA-256 of each value that may be a secret."""
        items = flat(redacted(self.model_dump(mode="json")), "")
        return {
            key: text if repr(items.get(key)) == text else hashlib.sha256(text.encode()).hexdigest()
            for key, text in self.digest_items().items()
        }

    def digest_items(self) -> dict[str, str]:
        """Return {dotted key: repr(value)}, which ranks compare, without paths, which may differ by host."""
        items = flat(self.model_dump(mode="json"), "")
        return {key: repr(value) for key, value in items.items() if key not in NOT_COMPARED}


def section(path: tuple[str | int, ...], root: type[BaseModel] = Settings) -> type[BaseModel] | None:
    """Return the class of the section at a path of keys, () for the whole; None where there is no section."""
    known: Any = root
    for part in path:
        if known is None or part not in known.model_fields:
            return None
        hint = known.model_fields[part].annotation
        known = next((each for each in (hint, *get_args(hint)) if isinstance(each, type(BaseModel))), None)
    return known
