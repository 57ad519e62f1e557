"""The keys of the rows of metrics.jsonl (one per round) and clients.jsonl (one per evaluated client), in order."""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """One key of a row of metrics.jsonl or clients.jsonl.

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
    Key("round", "integer", "", "counted from 0; -1: the model before training"),
    # In an evaluated round the metrics of the task stand beside `loss`.
    Key("loss", "number", "", "of the global model on the global test set", True),
    Key("train_loss", "number", "", "mean over the clients while they trained, by their weights", True),
    Key("cohort", "list", "", "the clients that trained"),
    Key("refused", "list", "", "uploads that did not count: client and reason of each"),
    Key("lost", "list", "", "clients that were drawn and were on a lost rank, if there are any"),
    Key("up_parameters", "integer", "parameters", "sent by all clients"),
    Key("down_parameters", "integer", "parameters", "received by all clients"),
    Key("wall_s", "number", "s", "the round on rank 0, until the server's step is done"),
    Key("train_s", "number", "s", "training on the busiest rank"),
    Key("wait_s", "number", "s", "how long rank 0 waited for uploads when it had no client to train"),
    Key("server_s", "number", "s", "checking the uploads, and the server's step"),
    # Metrics that the method reports with `server.figures(...)` stand here.
    Key("sent_bytes", "integer", "bytes", "sent by rank 0"),
    Key("received_bytes", "integer", "bytes", "received by rank 0"),
    Key("sha256", "text", "", "of the global model after the round"),
    # Metrics of the other evaluation protocols stand here.
    Key("evaluate_s", "number", "s", "the evaluation of the round"),
    Key("class_accuracy", "list", "%", "of the test samples of each class, the share that is recognised", True),
    Key("diverged", "integer", "", "the round since which a loss has been far above its best, if it is"),
)
CLIENTS_KEYS = (
    Key("round", "integer", "", "as in metrics.jsonl"),
    Key("client", "integer", "", "counted from 0"),
    Key("site", "text", "", "its name, where clients are sites"),
    Key("protocol", "text", "", "of the evaluation"),
    Key("samples", "integer", "", "on which the client was evaluated"),
    # The loss and the metrics of the task follow.
)

NAMES = tuple(key.name for key in METRICS_KEYS)
CLIENT_NAMES = tuple(key.name for key in CLIENTS_KEYS)
SECONDS = tuple(key.name for key in METRICS_KEYS if key.unit == "s")
VARIES_WITH_RANKS = tuple(key.name for key in METRICS_KEYS if key.unit in ("s", "bytes"))  # all others are results
SUMMED = (
    "wall_s",
    *(key.name for key in METRICS_KEYS if key.unit in ("bytes", "parameters")),
)  # summary.json has their sums
NOT_METRICS = frozenset(key.name for key in METRICS_KEYS if not key.is_metric)
# Names that metrics of tasks and methods must not have. `updates` is the part of a row that updates.jsonl takes.
RESERVED = frozenset((*NAMES, *CLIENT_NAMES, "updates"))
