"""Run pfl-research (`pfl`, tested with 0.6.0) on the task of many_clients.py.

    python FILE CLIENTS ROWS ROUNDS

Two arrays describe which rows a client has; a client's rows are selected when the client is drawn.
"""

import sys

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from task import BATCH, CLASSES, COHORT, FEATURES, LR, numbers, report_peak
from torch import nn
from torch.nn.functional import cross_entropy


class Model(nn.Module):
    """A logistic model with the functions that pfl-research calls."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)

    def loss(self, x, y):
        return cross_entropy(self.net(x), y)

    def metrics(self, x, y):
        return {"loss": Weighted(0.0, len(x))}


def main():
    """Train the task of the command line, and report the seconds of each round."""
    torch.set_num_threads(1)
    clients, rows, rounds = map(int, sys.argv[1:])
    x, y = numbers(rows)
    order, each = torch.randperm(rows), rows // clients

    def dataset(client):
        own = order[client * each : (client + 1) * each]
        return Dataset((x[own], y[own]))

    data = FederatedDataset(dataset, get_user_sampler("random", list(range(clients))))
    net = Model()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=COHORT, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=None, local_num_steps=1, local_learning_rate=LR, local_batch_size=BATCH
        ),
    )
    report_peak()


if __name__ == "__main__":
    main()
