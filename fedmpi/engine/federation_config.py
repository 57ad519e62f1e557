"""The settings of the round loop, and the callbacks that receive its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from fedmpi.engine.model_selection import BestModel, SelectionCriterion

SERVERS = {"global", "sites"}  # protocols of evaluation for which rank 0 asks no client, but in silo mode


@dataclass(frozen=True)
class FederationConfig:
    """The settings that the round loop reads."""

    rounds: int
    seed: int
    learning_rate: Callable[[int], float]  # round -> eta_t
    fraction: float | None = 1.0
    members: int | None = None  # in place of fraction
    sampling: str = "uniform"  # uniform | cycles
    placement: str = "balanced"  # balanced | pinned
    measures_speed: bool = True  # balanced by what ranks took; else by samples alone
    weighting: str = "samples"  # samples | uniform
    server_trains: bool = False
    sharded: bool = False  # all ranks hold columns of the uploads, not rank 0 the whole of them
    streams_sums: bool = False  # rank 0 may add uploads up as they come: none is left out, clipped, or sent once more
    reduces_locally: bool = False  # each rank adds up its own clients' uploads before it sends them
    evaluate_every: int = 1
    protocol: Sequence[str] = ("global",)
    eval_batch: int = 100
    probes: Sequence[str] = ()  # what else is measured of rounds that are evaluated (engine/probes)
    max_norm: float | str | None = "auto"  # of an update; "auto", a number, or no bound
    drops_bad_updates: bool = False  # do without bad uploads, rather than end the run
    clips_updates: bool = False  # take updates that are too long at the bound
    stops_on_divergence: bool = False  # end a run that has diverged
    needs_undo: bool = False  # a round that is abandoned leaves no trace in what clients keep
    on_lost_rank: str = "abort"  # abort | drop | redo: what becomes of a round in which a rank is lost
    best: SelectionCriterion | None = None  # by which figure a best model is chosen; None: none is
    timeout_s: float = inf  # in which a rank that is alive comes to its next message
    update_stats: str | bool = False  # what is said of each round's updates: False, "norms" or "gram"
    replays_failures: bool = False  # repeat the rank failures that another run has recorded
    acknowledges: bool = False  # ranks without clients in a round tell rank 0 that they have heard of it


@dataclass
class RunCallbacks:
    """Receives the results at rank 0 and, on every rank, the state after each round.

    This one discards all but the rows of metrics.jsonl, with which it calls `on_round`.
    """

    on_round: Callable[[dict[str, Any]], object] | None = None

    def round(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl: a round is complete, and evaluated if it was to be."""
        if self.on_round is not None:
            self.on_round(row)

    def append(self, file: str, *rows: dict[str, Any]) -> None:
        """Rows of another file of the run directory: clients.jsonl, updates.jsonl, placement.jsonl, analysis.jsonl."""

    def save_state(self, fed: Any, t: int, memory: dict[str, Any], last: bool) -> None:
        """Round t is complete. memory: what rank 0 remembers; last: the run ends."""

    def save_best_model(self, best: BestModel) -> None:
        """There is a new best model."""

    def record_lost_ranks(self, row: dict[str, Any]) -> None:
        """Ranks were lost (engine/faults/lost_ranks.py)."""
