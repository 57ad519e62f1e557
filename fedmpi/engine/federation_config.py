"""The settings of the round loop, and the callbacks that receive its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from fedmpi.engine.model_selection import BestModel, SelectionCriterion

SERVER_PROTOCOLS = {"global", "sites"}  # evaluation protocols that rank 0 computes alone, except in silo mode


@dataclass(frozen=True)
class FederationConfig:
    """The settings that the round loop reads."""

    rounds: int
    seed: int
    learning_rate: Callable[[int], float]  # of clients: round -> eta_t
    fraction: float | None = 1.0  # share of the clients in a cohort
    cohort_size: int | None = None  # number of clients in a cohort, in place of fraction
    sampling: str = "uniform"  # uniform | cyclic: how cohorts are drawn
    placement: str = "balanced"  # balanced | pinned: how clients are assigned to ranks
    measures_speed: bool = True  # balance clients by measured seconds; otherwise by their numbers of samples
    weighting: str = "samples"  # samples | uniform: weights of clients in the aggregate
    server_trains: bool = False  # whether rank 0 trains clients, too
    # rows | streaming | sharded | reducing (transport/gather.py); rows if a round does not permit it
    gather: str = "rows"
    evaluate_every: int = 1
    protocol: Sequence[str] = ("global",)
    eval_batch: int = 100
    probes: Sequence[str] = ()  # analyses of evaluated rounds (engine/diagnostics)
    # largest permitted norm of an update; "auto": relative to the others; None: no bound
    max_norm: float | str | None = "auto"
    drops_bad_updates: bool = False  # leave bad uploads out of the round; otherwise they end the run
    stops_on_divergence: bool = False  # end a run that has diverged
    needs_undo: bool = False  # restore client states if a round is aborted or an upload refused
    on_lost_rank: str = "abort"  # abort | drop | redo: the key faults.on_lost_rank
    best: SelectionCriterion | None = None  # selects the best model; None: no selection
    timeout_s: float = inf  # a rank that is silent for longer has failed
    update_stats: str | bool = False  # statistics that are recorded of each round's updates: False, "norms" or "gram"
    replays_failures: bool = False  # repeat the rank failures that another run has recorded
    acknowledges: bool = False  # ranks without clients in a round confirm its broadcast


@dataclass
class RunCallbacks:
    """Callbacks for the results of a run: metrics at rank 0, and on every rank the state after each round.

    This class passes rows of metrics.jsonl to `on_round` and discards everything else; subclasses write files.
    """

    on_round: Callable[[dict[str, Any]], object] | None = None

    def record_round(self, row: dict[str, Any]) -> None:
        """Process a row of metrics.jsonl, after a round was completed and, if it was due, evaluated."""
        if self.on_round is not None:
            self.on_round(row)

    def append_rows(self, file: str, *rows: dict[str, Any]) -> None:
        """Process rows of another file: clients.jsonl, update_stats.jsonl or analysis.jsonl."""

    def save_state(self, fed: Any, t: int, memory: dict[str, Any], last: bool) -> None:
        """Save the state after round t.

        Args:
            memory: rank 0's state beside tensors (`Federation.memory`).
            last: whether the run ends with this round.
        """

    def save_best_model(self, best: BestModel) -> None:
        """Save a new best model."""

    def record_lost_ranks(self, row: dict[str, Any]) -> None:
        """Record a rank failure, as a row of faults.jsonl (engine/faults/lost_ranks.py)."""
