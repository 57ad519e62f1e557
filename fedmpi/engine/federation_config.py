"""The settings of the round loop, and the callbacks that receive the results of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedmpi.engine.model_selection import BestModel, SelectionCriterion

if TYPE_CHECKING:
    from fedmpi.engine.transport.gather_secure import SecureAggregation

SERVER_PROTOCOLS = {"global", "sites"}  # evaluation protocols that rank 0 computes alone, except in silo mode


@dataclass(frozen=True)
class FederationConfig:
    """The settings of the round loop."""

    rounds: int
    seed: int
    learning_rate: Callable[[int], float]  # of local training, as a function of the round
    fraction: float | None = 1.0  # fraction of the clients that take part in a round
    cohort_size: int | None = None  # number of clients that take part in a round; replaces `fraction`
    sampling: str = "uniform"  # uniform | cyclic | fixed_cycle | poisson: how cohorts are drawn
    placement: str = "balanced"  # balanced | pinned: how clients are assigned to ranks
    # whether clients are balanced by measured speeds of ranks; otherwise only by their numbers of samples
    measures_speed: bool = True
    client_weights: Tensor | None = None  # (N,) float64, fixed weights of all clients in place of `weighting`
    weighting: str = "samples"  # samples | uniform: weights of clients in the aggregate
    server_trains: bool = False  # whether rank 0 trains clients, too
    # rows | streaming | sharded | reducing (transport/gather.py); rows if a round does not permit it
    gather: str = "rows"
    evaluate_every: int = 1
    protocol: Sequence[str] = ("global",)
    eval_batch: int = 100
    probes: Sequence[str] = ()  # diagnostics of evaluated rounds (engine/diagnostics)
    # largest accepted norm of an update; "auto": relative to those of other clients; None: no bound
    max_norm: float | str | None = "auto"
    drops_bad_updates: bool = False  # whether bad uploads are left out of a round; otherwise they end the run
    stops_on_divergence: bool = False  # whether a run that has diverged ends
    needs_undo: bool = False  # whether client states must be restored if a round is aborted or an upload refused
    on_lost_rank: str = "abort"  # abort | drop | redo: the key faults.on_lost_rank
    best: SelectionCriterion | None = None  # selects the best model; None: no selection
    timeout_s: float = inf  # a rank that is silent for longer is considered to have failed
    update_stats: str | bool = False  # statistics of updates to record in each round: False, "norms" or "gram"
    replays_failures: bool = False  # whether recorded rank failures of another run are replayed
    secure_aggregation: SecureAggregation | None = None  # rank 0 learns only sums of uploads; None: it learns uploads
    withholds_participation: bool = False  # whether rows of metrics must not tell which clients took part
    withholds_evaluation: bool = False  # whether no model is evaluated
    acknowledges: bool = False  # whether ranks without clients in a round confirm its broadcast


@dataclass
class RunCallbacks:
    """Callbacks for the results of a run: metrics on rank 0, and the state after each round on every rank.

    This class passes the rows of metrics.jsonl to `on_round` and discards all other results; subclasses write files.
    """

    on_round: Callable[[dict[str, Any]], object] | None = None

    def record_round(self, row: dict[str, Any]) -> None:
        """Handle the row of metrics.jsonl of a completed round, which has been evaluated if an evaluation was due."""
        if self.on_round is not None:
            self.on_round(row)

    def append_rows(self, file: str, *rows: dict[str, Any]) -> None:
        """Handle rows for one of the other files: clients.jsonl, update_stats.jsonl or analysis.jsonl."""

    def save_state(self, fed: Any, t: int, memory: dict[str, Any], last: bool) -> None:
        """Save the state after round t.

        Args:
            memory: the part of rank 0's state that is not in tensors (`Federation.rank0_state`).
            last: whether the run ends with this round.
        """

    def save_best_model(self, best: BestModel) -> None:
        """Save the best model so far."""

    def record_lost_ranks(self, row: dict[str, Any]) -> None:
        """Record a rank failure, as a row of faults.jsonl (engine/faults/lost_ranks.py)."""
