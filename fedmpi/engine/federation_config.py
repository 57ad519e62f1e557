"""The settings of the round loop, and the callbacks that receive its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from fedmpi.engine.model_selection import BestModel, SelectionCriterion

SERVERS = {"global", "sites"}  # evaluation protocols of rank 0 alone, except in silo mode


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
    measures_speed: bool = True  # balance by measured seconds; else by samples alone
    weighting: str = "samples"  # samples | uniform
    server_trains: bool = False
    gather: str = "rows"  # rows | streaming | sharded | reducing: the ways of engine/transport/gather.py, where they go
    evaluate_every: int = 1
    protocol: Sequence[str] = ("global",)
    eval_batch: int = 100
    probes: Sequence[str] = ()  # analyses of evaluated rounds (engine/probes)
    max_norm: float | str | None = "auto"  # of an update; "auto", a number, or no bound
    drops_bad_updates: bool = False  # leave bad uploads out; else they end the run
    stops_on_divergence: bool = False  # end a run that has diverged
    needs_undo: bool = False  # restore client states if a round is aborted
    on_lost_rank: str = "abort"  # abort | drop | redo: faults.on_lost_rank
    best: SelectionCriterion | None = None  # selects the best model; None: no selection
    timeout_s: float = inf  # a rank that is silent for longer has failed
    update_stats: str | bool = False  # recorded of each round's updates: False, "norms" or "gram"
    replays_failures: bool = False  # repeat the rank failures that another run has recorded
    acknowledges: bool = False  # ranks without clients in a round confirm its broadcast


@dataclass
class RunCallbacks:
    """Receives the results at rank 0 and, on every rank, the state after each round.

    This one discards all but the rows of metrics.jsonl, with which it calls `on_round`.
    """

    on_round: Callable[[dict[str, Any]], object] | None = None

    def round(self, row: dict[str, Any]) -> None:
        """Take a row of metrics.jsonl: a round is complete, and evaluated if that was due."""
        if self.on_round is not None:
            self.on_round(row)

    def append(self, file: str, *rows: dict[str, Any]) -> None:
        """Take rows of another file: clients.jsonl, updates.jsonl, analysis.jsonl."""

    def save_state(self, fed: Any, t: int, memory: dict[str, Any], last: bool) -> None:
        """Save the state after round t. memory: of rank 0, beside tensors; last: whether the run ends."""

    def save_best_model(self, best: BestModel) -> None:
        """Save a new best model."""

    def record_lost_ranks(self, row: dict[str, Any]) -> None:
        """Record a rank failure (engine/faults/lost_ranks.py)."""
