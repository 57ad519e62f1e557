"""Run Flower (`flwr[simulation]`, tested with 1.41.0 and ray 2.55.1): its simulation, with one actor of one core.

A client is a call of Ray in that actor's process, which receives a message and replies to it. The client's code follows
Flower's own example for PyTorch.
"""

import os
import sys
import time
from itertools import pairwise

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from task import TASKS, images_of, model, parse_arguments, report
from torch.utils.data import DataLoader, TensorDataset

client, server, stamps = ClientApp(), ServerApp(), []


@client.train()
def train(message, context):
    """Train one client and return its reply."""
    torch.set_num_threads(1)
    name, k = message.content["config"]["task"], int(context.node_config["partition-id"])
    task, net, (x, y) = TASKS[name], model(name), images_of(name)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer, criterion = torch.optim.SGD(net.parameters(), task["lr"]), torch.nn.CrossEntropyLoss()
    for pictures, labels in DataLoader(TensorDataset(x[k], y[k]), task["batch"], shuffle=True):
        optimizer.zero_grad()
        criterion(net(pictures), labels).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": task["samples"]})
    answer = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=answer, reply_to=message)


@server.main()
def main(grid, context):
    """Train the task of the command line, and report the seconds of each round."""
    task, rounds = parse_arguments()
    strategy = FedAvg(task["cohort"] / task["clients"], 0.0)
    start, told = ArrayRecord(model(sys.argv[1]).state_dict()), ConfigRecord({"task": sys.argv[1]})
    strategy.start(grid, start, rounds, train_config=told, evaluate_fn=lambda *_: stamps.append(time.perf_counter()))


if __name__ == "__main__":
    sys.stdout, out = sys.stderr, sys.stdout
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # actors import task.py, too
    one = {"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1}}
    run_simulation(server, client, parse_arguments()[0]["clients"], backend_config=one)
    sys.stdout = out
    report([b - a for a, b in pairwise(stamps)])
