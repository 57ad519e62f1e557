"""Class weights and label smoothing equal those of torch, and apply only in training."""

import numpy as np
import pytest
import torch
from helpers import federated, prepare, settings

from fedmpi.common import seeds
from fedmpi.tasks.classification import balanced_class_weights

GIVEN = [0.5, 1.0, 2.0, 4.0]


def test_balanced_weights_equal_those_of_scikit_learn():
    from sklearn.utils.class_weight import compute_class_weight

    y = np.repeat([0, 1, 2], [5, 1, 14])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=y)
    np.testing.assert_allclose(balanced_class_weights(torch.bincount(torch.from_numpy(y))), expected, rtol=1e-15)
    assert balanced_class_weights(torch.tensor([4, 0])).tolist() == [
        0.5,
        1.0,
    ]  # no sample has the second class; this must not divide by 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, "balanced", GIVEN])
def test_the_training_loss_equals_that_of_torch(weights, smoothing):
    config = settings("fedavg", "mlp", rounds=1, task={"class_weights": weights, "label_smoothing": smoothing})
    data = federated()
    it = prepare(config, data)
    fed = it.fed
    k = fed.states.client_context(
        0, 0, fed.config.learning_rate(0), fed.transport.broadcast_copy, fed.transport.empty_download
    )
    x, y = (getattr(data.train[0], name)[data.train[0].index] for name in "xy")
    counts = data.label_counts.sum(0)
    w = {"balanced": counts.sum() / (4 * counts), None: np.ones(4)}.get(weights if weights != GIVEN else "", GIVEN)
    module = it.experiment.net.module
    sgd = torch.optim.SGD(module.parameters(), 0.05, 0.9)
    criterion = torch.nn.CrossEntropyLoss(torch.as_tensor(w, dtype=torch.float32), label_smoothing=smoothing)
    for rows in torch.randperm(len(x), generator=seeds.torch_generator(0, "batches", 0, 0, 0)).split(10):
        sgd.zero_grad()
        criterion(module(x[rows]), y[rows]).backward()
        sgd.step()
    expected = it.experiment.model.w.clone()
    it.experiment.model.drop_gradient()
    it.experiment.model.load(k.received)
    k.fit()
    torch.testing.assert_close(k.w, expected, rtol=1e-5, atol=1e-6)
