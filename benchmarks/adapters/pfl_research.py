"""Run pfl-research (`pfl`, tested with 0.6.0) on a task."""

import sys
import time
from itertools import pairwise

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from task import images, model, parse_arguments, report
from torch import nn
from torch.nn.functional import cross_entropy


class Model(nn.Module):
    """The model of the task with the functions that pfl-research calls."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def loss(self, x, y):
        return cross_entropy(self.net(x), y)

    def metrics(self, x, y):
        return {"loss": Weighted(0.0, len(x))}


class Watch(TrainingProcessCallback):
    """A callback that records the time after each round."""

    def __init__(self):
        self.stamps = [time.perf_counter()]

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.stamps.append(time.perf_counter())
        return False, Metrics()


def main():
    """Train the task of the command line, and report the seconds of each round."""
    task, rounds = parse_arguments()
    x, y = images(task)
    users = list(range(task["clients"]))
    data = FederatedDataset(lambda k: Dataset((x[k], y[k])), get_user_sampler("random", users))
    net, watch = Model(model(sys.argv[1])), Watch()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**6,
            train_cohort_size=task["cohort"],
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=task["lr"], local_batch_size=task["batch"]
        ),
        callbacks=[watch],
    )
    report([b - a for a, b in pairwise(watch.stamps)])


if __name__ == "__main__":
    main()
