"""What the loop is told: its settings, where results go, how far it has come in a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from torch import Tensor

from fedmpi.engine.best import Best, Choice

# Rank 0's word at the start of a round. ENOUGH: as DONE, before all rounds are made.
GO, DONE, STOPPED, ABANDONED, APART, ENOUGH = 0.0, 1.0, 2.0, 3.0, 4.0, 5.0
UNDO, PACE = 8.0, 16.0  # added to the word: whose round is undone follows; by what clients are placed

SERVERS = {"global", "sites"}  # protocols of evaluation for which rank 0 asks no client, but in silo mode


@dataclass(frozen=True)
class Plan:
    """What the loop needs to know of the settings."""

    rounds: int
    seed: int
    learning_rate: Callable[[int], float]  # round -> eta_t
    fraction: float = 1.0
    draw: str = "uniform"  # uniform | cycles
    placement: str = "balanced"  # balanced | pinned
    measured: bool = True  # balanced by what ranks took; else by samples alone
    weighting: str = "samples"  # samples | uniform
    server_trains: bool = False
    sharded: bool = False  # all ranks hold columns of the uploads, not rank 0 the whole of them
    adds_up: bool = False  # rank 0 may add uploads up as they come: none is left out, clipped, or sent once more
    reduce: bool = False  # each rank adds up its own clients' uploads before it sends them
    every: int = 1
    protocol: Sequence[str] = ("global",)
    eval_batch: int = 100
    probes: Sequence[str] = ()  # what else is measured of rounds that are evaluated (engine/probes)
    max_norm: float | str | None = "auto"  # of an update; "auto", a number, or no bound
    drop: bool = False  # do without bad uploads, rather than end the run
    clip: bool = False  # take updates that are too long at the bound
    stop_apart: bool = False  # end a run that has come apart
    undo: bool = False  # a round that is abandoned leaves no trace in what clients keep
    on_lost: str = "abort"  # abort | drop | redo: what becomes of a round in which a rank is lost
    best: Choice | None = None  # by which figure a best model is chosen; None: none is
    timeout_s: float = inf  # in which a rank that is alive comes to its next message
    updates: str | bool = False  # what is said of each round's updates: False, "norms" or "gram"
    replay: bool = False  # the losses are given, and nobody is lost


@dataclass
class Sink:
    """Where results go, at rank 0; and, on every rank, the state when a round t is over: keep(fed, t, memory, last)."""

    round: Callable[[dict[str, Any]], None] = field(default=lambda row: None)
    clients: Callable[[list[dict[str, Any]]], None] = field(default=lambda rows: None)
    keep: Callable[[Any, int, dict[str, Any], bool], None] = field(default=lambda *_: None)
    best: Callable[[Best], None] = field(default=lambda best: None)  # there is a new one
    loss: Callable[[dict[str, Any]], None] = field(default=lambda row: None)  # of ranks: engine/faults/losses.py
    updates: Callable[[dict[str, Any]], None] = field(default=lambda row: None)  # aggregation/agreement.py
    placement: Callable[[dict[str, Any]], None] = field(default=lambda row: None)  # engine/pace.py
    analysis: Callable[[dict[str, Any]], None] = field(default=lambda row: None)  # engine/probes


@dataclass
class Begun:
    """How far a rank has come in a round that may have to begin once more."""

    began: float = field(default_factory=time.perf_counter)
    word: float | None = None
    settled: bool = False
    kept: bool = False
    reported: bool = False  # whether the line of the round before is out
    uploads: dict[int, Tensor] = field(default_factory=dict)  # client -> its row in memory that the next round reuses
    made: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)  # before the cut: upload, state
