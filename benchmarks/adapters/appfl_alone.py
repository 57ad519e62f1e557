"""Run APPFL (`appfl`, tested with 1.12.0): its simulation, in which the clients' agents train one after another."""

import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from appfl.agent.sim_client import SimClientAgent
from appfl.agent.sim_server import SimServerAgent
from appfl.logger import ServerAgentFileLogger
from appfl.vsim import ClientProfile, SyncSimDriver
from task import images, parse_arguments, report
from torch.utils.data import TensorDataset

LEAN = {"optimize_memory": False}  # otherwise it collects garbage several times per client, which takes seconds


class Driver(SyncSimDriver):
    """APPFL's simulation, which also records the time after each round."""

    stamps = []

    def run(self):
        self.stamps = [time.perf_counter()]
        super().run()

    def _run_round(self):
        result = super()._run_round()
        self.stamps.append(time.perf_counter())
        return result


def accuracy(expected, results):
    """Return the fraction of samples whose class is predicted correctly."""
    return float((results.argmax(1) == expected).mean())


def configs(task, rounds, logs):
    """Return APPFL's configurations of the server and the clients."""
    train = {
        "mode": "epoch",
        "num_local_epochs": 1,
        "optim": "SGD",
        "optim_args": {"lr": task["lr"]},
        "train_batch_size": task["batch"],
        "train_data_shuffle": True,
        "loss_fn": "CrossEntropyLoss",
        "metric_path": __file__,
        "metric_name": "accuracy",
        **LEAN,
    }
    algorithm = {
        "trainer": "VanillaTrainer",
        "trainer_kwargs": train,
        "scheduler": "SyncScheduler",
        "scheduler_kwargs": {"num_clients": task["clients"], "num_clients_per_round": task["cohort"], **LEAN},
        "aggregator": "FedAvgAggregator",
        "aggregator_kwargs": {"client_weights_mode": "sample_size", **LEAN},
        "num_global_epochs": rounds,
    }
    model = {"model_path": str(Path(__file__).with_name("task.py")), "model_name": "model"}
    return {
        "algorithm_configs": algorithm,
        "model_configs": {**model, "model_kwargs": {"name": sys.argv[1]}},
        "log_configs": {"logging_output_dirname": logs},
        "server_configs": LEAN,
    }


def main():
    """Train the task of the command line, and report the seconds of each round."""
    task, rounds = parse_arguments()
    sys.stdout, out = sys.stderr, sys.stdout
    with tempfile.TemporaryDirectory() as logs:
        config = configs(task, rounds, logs)
        server = SimServerAgent(config)
        data = [TensorDataset(*each) for each in zip(*images(task), strict=True)]
        clients = [SimClientAgent(config, str(k), each) for k, each in enumerate(data)]
        for each in clients:
            each.optimize_memory = False
            server.set_sample_size(each.get_id(), task["samples"])
        profiles = {each.get_id(): ClientProfile() for each in clients}
        logger = ServerAgentFileLogger(file_dir=logs)
        driver = Driver(server, clients, profiles, task["cohort"], logger, target_rounds=rounds)
        driver.run()
    sys.stdout = out
    report([b - a for a, b in pairwise(driver.stamps)])


if __name__ == "__main__":
    main()
