"""Run PFLlib (github.com/TsingZ0/PFLlib, tested with d832e76) on tasks from fedmpi.

    python by_pfllib.py FOLDER ...

PFLlib is not a package: its folder `system` must be on the interpreter's path. options: {"server":
"serverprox.FedProx", "args": command-line arguments, "kept": the part of a client to compare, "whole": whether a pass
is one batch, so that its order does not matter}. This file replaces the reading of files, the loaders, the choice of
the cohort and the evaluation. Losses are not compared, since PFLlib does not report them.
"""

import importlib
import math
from operator import attrgetter
from types import SimpleNamespace

import torch
from task import Loader, flat, serve
from utils import data_utils

data_utils.read_client_data = lambda *_, **__: []  # before flcore imports it; `run` provides the rows

from flcore.trainmodel.models import BaseHeadSplit  # noqa: E402

USUAL = {  # defaults of main.py
    "algorithm": "",
    "dataset": "",
    "device": "cpu",
    "save_folder_name": "",
    "few_shot": 0,
    "learning_rate_decay": False,
    "learning_rate_decay_gamma": 1.0,
    "join_ratio": 1.0,
    "random_join_ratio": False,
    "time_select": False,
    "goal": "",
    "time_threthold": math.inf,
    "top_cnt": 0,
    "auto_break": False,
    "eval_gap": 1,
    "client_drop_rate": 0.0,
    "train_slow_rate": 0.0,
    "send_slow_rate": 0.0,
    "dlg_eval": False,
    "dlg_gap": 1,
    "batch_num_per_client": 0,
    "num_new_clients": 0,
    "fine_tuning_epoch_new": 0,
}


def nothing(*_, **__):
    """Do nothing; replaces functions of PFLlib that are not needed."""
    pass


def run(task):
    """Train the task with the other program, and record the results."""
    asked = task.options
    module, name = asked["server"].split(".")
    found = importlib.import_module(f"flcore.servers.{module}")
    rounds, m = task.cohorts.shape

    def rows(_, client, is_train=True, **__):
        return [(task.x[i], task.y[i]) for i in range(task.starts[client], task.starts[client + 1])]

    for taken in ("flcore.servers.serverbase", "flcore.clients.clientala"):
        importlib.import_module(taken).read_client_data = rows
    known = {
        "model": BaseHeadSplit(*task.network()),
        "num_classes": task.classes,
        "batch_size": task.batch,
        "local_learning_rate": task.lr,
        "local_epochs": task.epochs,
        "global_rounds": rounds - 1,
        "num_clients": task.clients,
        "join_ratio": m / task.clients,
    }
    server = getattr(found, name)(SimpleNamespace(**USUAL | known | asked["args"]), 0)
    for client in server.clients:
        client.load_train_data = lambda size=None, k=client.id: Loader(task, k, size)
    for each in ("evaluate", "evaluate_personalized", "evaluate_one_step", "save_results", "save_global_model"):
        setattr(server, each, nothing)
    server.rs_test_acc = server.rs_test_acc_per = [0.0]
    w, cohorts = [], iter(task.cohorts.tolist())

    def select():
        w.append(flat(server.global_model.parameters()))
        return [server.clients[k] for k in next(cohorts)]

    server.select_clients = select
    server.train()
    w = [*w[1:], flat(server.global_model.parameters())]
    if asked["whole"]:
        task.orders.clear()
    what = asked["kept"]
    kept = [flat(attrgetter(what)(client).parameters()) for client in server.clients] if what else []
    task.finish(w=[] if name == "FedProto" else w, kept=kept)


if __name__ == "__main__":
    torch.manual_seed(0)
    serve(run)
