"""Run pfl-research (`pfl`, tested with 0.6.0) on tasks from fedmpi.

    python by_pfl.py FOLDER ...

options: {"algorithm": "fedavg" | "fedprox" | "scaffold", "weighting": "samples" | "uniform", "mu": for fedprox,
"central": [name in torch.optim, its options]}. pfl computes updates in float32.
"""

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from task import flat, serve
from torch import nn
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    """The model of the task with the functions that pfl-research calls."""

    def __init__(self, task):
        super().__init__()
        self.body, self.head = task.network()
        self.losses = []

    def loss(self, x, y):
        value = cross_entropy(self.head(self.body(x)), y)
        self.losses.append(value.item())
        return value

    def metrics(self, x, y):
        return {"loss": Weighted(0.0, len(x))}


class User(Dataset):
    """A client's rows, in passes in fedmpi's order."""

    def __init__(self, task, client):
        rows = task.rows(client)
        super().__init__((task.x[rows], task.y[rows]), user_id=str(client))
        self.task, self.client = task, client

    def iter(self, batch_size):
        if batch_size == self.task.batch:
            yield from self.task.passes(self.client)
        else:  # pfl reads all rows before it trains
            yield from super().iter(batch_size)


class Watch(TrainingProcessCallback):
    """A callback that records mean loss and global model after each round."""

    def __init__(self, task, net):
        self.task, self.net, self.w, self.loss = task, net, [], []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        task, t = self.task, len(self.w)
        steps = [task.epochs * -(-int(task.sizes[k]) // task.batch) for k in task.cohorts[t].tolist()]
        means = torch.stack([part.mean() for part in torch.tensor(self.net.losses).split(steps)])
        self.loss.append(task.p[t] @ means)
        self.net.losses = []
        self.w.append(flat(self.net.parameters()))
        return False, Metrics()


def run(task):
    """Train the task with the other program, and record the results."""
    asked, net = task.options, Net(task)
    turn = iter(task.cohorts.flatten().tolist())
    data = FederatedDataset(lambda k: User(task, k), lambda: next(turn))
    common = {
        "central_num_iterations": len(task.cohorts),
        "evaluation_frequency": 10**6,
        "train_cohort_size": task.cohorts.shape[1],
        "val_cohort_size": 0,
    }
    params = {
        "fedavg": (FederatedAveraging, lambda: NNAlgorithmParams(**common)),
        "fedprox": (FedProx, lambda: FedProxParams(mu=asked["mu"], **common)),
        "scaffold": (
            SCAFFOLD,
            lambda: SCAFFOLDParams(
                population=task.clients,
                use_gradient_as_control_variate=False,
                user_state_storage=InMemoryUserStateStorage(),
                **common,
            ),
        ),
    }
    algorithm, make = params[asked["algorithm"]]
    name, more = asked.get("central", ("SGD", {"lr": 1.0}))
    weigh = WeightByDatapoints() if asked["weighting"] == "samples" else WeightByUser()
    watch = Watch(task, net)
    algorithm().run(
        algorithm_params=make(),
        backend=SimulatedBackend(training_data=data, val_data=None, postprocessors=[weigh]),
        model=PyTorchModel(net, torch.optim.SGD, getattr(torch.optim, name)(net.parameters(), **more)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=task.epochs, local_learning_rate=task.lr, local_batch_size=task.batch
        ),
        callbacks=[watch],
    )
    task.finish(w=watch.w, loss=watch.loss)


if __name__ == "__main__":
    serve(run)
