"""Run Flower's aggregation rules (`flwr`, tested with 1.42.0) on models that clients of fedmpi have trained.

    python by_flower.py FOLDER ...

options: {"strategy": a class of flwr.serverapp.strategy such as "FedAdam", "options": {...}}. Nothing is trained here:
the strategy gets the uploads of each round's clients, with their numbers of samples as weights if "weighted" is true.
"""

import logging

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as strategies
from flwr.supercore.task_identity import TaskIdentity
from task import serve


class Grid:
    """A grid of nodes with the methods that a strategy calls."""

    def __init__(self, m):
        self.m = m

    def get_node_ids(self):
        return range(1, self.m + 1)


def run(task):
    """Train the task with the other program, and record the results."""
    asked = task.options
    strategy = getattr(strategies, asked["strategy"])(**asked.get("options", {}))
    w, out = ArrayRecord({"w": Array(task.w0.numpy())}), []
    for t, cohort in enumerate(task.cohorts.tolist()):
        list(strategy.configure_train(t + 1, w, ConfigRecord(), Grid(len(cohort))))
        replies = []
        for i, k in enumerate(cohort):
            record = ArrayRecord({"w": Array(np.asarray(task.trained[t, i]))})
            metrics = MetricRecord({"num-examples": int(task.sizes[k]) if asked.get("weighted", True) else 1})
            content = RecordDict({"arrays": record, "metrics": metrics})
            replies.append(Message(content, dst_node_id=i + 1, message_type="train"))
        w, _ = strategy.aggregate_train(t + 1, replies)
        out.append(torch.from_numpy(np.array(w["w"].numpy())))
    task.orders.clear()
    task.finish(w=out)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # messages need them
    serve(run)
