"""The keys, in order, of the rows of metrics.jsonl and clients.jsonl.

metrics.jsonl has one row per round, and clients.jsonl has one row per evaluated client.
"""

from __future__ import annotations

from typing import NamedTuple


class KeyDescription(NamedTuple):
    """The name, type, unit and meaning of one key of the rows of metrics.jsonl or clients.jsonl.

    Attributes:
        type: type of the value in JSON: integer, number, text or list.
        unit: "s", "bytes", "parameters", "%", or "" for values without a unit.
        is_metric: whether the value measures the quality of training or of the model. The other values are counts,
            times and identifiers.
    """

    name: str
    type: str
    unit: str
    meaning: str
    is_metric: bool = False


METRICS_KEYS = (
    KeyDescription("round", "integer", "", "counted from 0; -1: the model before training"),
    # In an evaluated round the metrics of the task follow `loss`.
    KeyDescription("loss", "number", "", "loss of the global model on the global test set", True),
    KeyDescription("train_loss", "number", "", "weighted mean of the clients' losses during local training", True),
    KeyDescription("epsilon", "number", "", "epsilon of differential privacy after the round"),
    KeyDescription("clip", "number", "", "clip norm of the round under differential privacy of clients"),
    KeyDescription("cohort", "list", "", "clients that trained in this round"),
    KeyDescription("refused", "list", "", "rejected uploads: client and reason of each"),
    KeyDescription("lost", "list", "", "clients of the cohort whose rank failed, if there are any"),
    KeyDescription("up_parameters", "integer", "parameters", "parameters that all clients sent"),
    KeyDescription("down_parameters", "integer", "parameters", "parameters that all clients received"),
    KeyDescription("wall_s", "number", "s", "duration of the round on rank 0, up to and including the server's step"),
    KeyDescription("train_s", "number", "s", "training time of the rank that trained longest"),
    KeyDescription("wait_s", "number", "s", "time that rank 0 waited for uploads while it had no client to train"),
    KeyDescription("server_s", "number", "s", "time for checking the uploads and for the server's step"),
    # Metrics that the method reports with `server.log_metrics(...)` come here.
    KeyDescription("sent_bytes", "integer", "bytes", "bytes that rank 0 sent"),
    KeyDescription("received_bytes", "integer", "bytes", "bytes that rank 0 received"),
    KeyDescription("sha256", "text", "", "hash of the global model after the round"),
    # Metrics of the other evaluation protocols come here.
    KeyDescription("evaluate_s", "number", "s", "time of the evaluation"),
    KeyDescription("class_accuracy", "list", "%", "accuracy on the test samples of each class", True),
    KeyDescription("diverged", "integer", "", "the round in which training began to diverge, if it has"),
)
CLIENTS_KEYS = (
    KeyDescription("round", "integer", "", "as in metrics.jsonl"),
    KeyDescription("client", "integer", "", "counted from 0"),
    KeyDescription("site", "text", "", "name of the site, if clients are sites"),
    KeyDescription("protocol", "text", "", "evaluation protocol"),
    KeyDescription("samples", "integer", "", "number of samples on which the client was evaluated"),
    # The loss and the metrics of the task follow.
)

METRICS_NAMES = tuple(key.name for key in METRICS_KEYS)
CLIENTS_NAMES = tuple(key.name for key in CLIENTS_KEYS)
DURATION_NAMES = tuple(key.name for key in METRICS_KEYS if key.unit == "s")
VARIES_WITH_RANKS = tuple(key.name for key in METRICS_KEYS if key.unit in ("s", "bytes"))  # all others are results
SUMMED_NAMES = (
    "wall_s",
    *(key.name for key in METRICS_KEYS if key.unit in ("bytes", "parameters")),
)  # summary.json has their sums
NON_METRIC_NAMES = frozenset(key.name for key in METRICS_KEYS if not key.is_metric)
# Names that metrics of tasks and methods must not have. `updates` is written to update_stats.jsonl.
RESERVED_NAMES = frozenset((*METRICS_NAMES, *CLIENTS_NAMES, "updates"))
