"""CCVR: the calibration equals the paper's steps."""

import math

import pytest
import torch
from helpers import federated, images, run_experiment, settings
from naive import NET, features, module_of, rows_of
from torch.nn.functional import cross_entropy

from fedmpi.common import seeds
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.methods.ccvr import draw_features


def tensor(*values):
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def near(found, expected, atol=1e-12):
    """Check that two tensors are close."""
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=0, atol=atol)


# ---- (3) ----


def test_drawn_features_do_not_depend_on_the_choice_of_eigenvectors(monkeypatch):
    """The signs of eigenvectors are arbitrary, and so is their basis if eigenvalues are equal."""
    sigma = torch.diag(tensor(2.0, 2.0, 0.5))
    plain = draw_features(torch.zeros(3), sigma, 5, torch.Generator().manual_seed(0))
    C, S = math.cos(0.7), math.sin(0.7)
    rotated = tensor((0, C, S), (0, -S, C), (-1, 0, 0))
    monkeypatch.setattr(torch.linalg, "eigh", lambda _: (tensor(0.5, 2, 2), rotated))
    near(draw_features(torch.zeros(3), sigma, 5, torch.Generator().manual_seed(0)), plain)


# ---- whole runs ----
def scarce_classes():
    """A data set with two samples of class 1, one of class 2, and none of class 3."""
    whole = images()
    keep = [i for c, n in enumerate((99, 2, 1)) for i in (whole.train_y == c).nonzero()[:n, 0].tolist()]
    return split(Dataset(whole.train_x[keep], whole.train_y[keep], whole.test_x, whole.test_y, 4), "iid", 7, 0)


@pytest.mark.parametrize("data", [federated, scarce_classes])
@pytest.mark.parametrize(
    ("rounds", "options"),
    [
        (3, {"samples": 50, "epochs": 3, "lr": 0.05, "momentum": 0.9, "batch_size": 64}),
        (1, {"samples": 30, "epochs": 1, "lr": 0.1, "momentum": 0.0, "batch_size": 7}),
    ],
)
def test_calibration_equals_the_papers_steps(data, rounds, options):
    """FedAvg until the last round; then the features of all samples of the cohort, as if they were in one place.

    drop_last leaves clients without a step, but not without statistics.
    """
    changes = {"model": NET, "cohort": {"fraction": 0.6 if rounds > 1 else 1.0}}
    whole = data()
    changes["train"] = {"batch_size": min(20, int(whole.train_sizes.max())), "drop_last": True}
    it = run_experiment(settings("ccvr", options=options, rounds=rounds, **changes), whole)
    before = run_experiment(settings("fedavg", rounds=rounds - 1, **changes), whole)
    assert it.hashes[:-1] == before.hashes
    module = module_of(it, before.w, before.b).eval().requires_grad_(False)
    rows = [rows_of(it, k) for k in it.rows[-1]["cohort"]]
    z, y = features(module, torch.cat([x for x, _ in rows]))[0], torch.cat([y for _, y in rows])
    g, virtual, labels = seeds.torch_generator(0, "server", "virtual features"), [], []
    for c in range(4):
        if (y == c).sum() > 1:
            lam, E = torch.linalg.eigh(torch.cov(z[y == c].T))
            noise = torch.randn(options["samples"], z.shape[1], generator=g, dtype=torch.float64)
            virtual.append(z[y == c].mean(0) + noise @ E @ torch.diag(lam.clamp(min=0).sqrt()) @ E.T)
            labels += [c] * options["samples"]
    head = module[-1].requires_grad_()
    sgd = torch.optim.SGD(head.parameters(), options["lr"], options["momentum"])
    for _ in range(options["epochs"]):
        for drawn in torch.randperm(len(labels), generator=g).split(options["batch_size"]):
            sgd.zero_grad()
            cross_entropy(head(torch.cat(virtual)[drawn]), torch.tensor(labels)[drawn]).backward()
            sgd.step()
    for segment, p in zip(it.experiment.model.layout.segments, module.parameters(), strict=True):
        near(segment.view(it.w), p.detach(), 1e-7)
    near(it.b, before.b)


@pytest.mark.parametrize("options", [{"samples": 0}, {"epochs": 0}, {"lr": 0.0}])
def test_without_calibration_it_equals_fedavg(options):
    mine, theirs = (
        run_experiment(settings("ccvr", "norm", options=options)),
        run_experiment(settings("fedavg", "norm", rounds=2)),
    )
    assert mine.hashes == [*theirs.hashes, theirs.hashes[-1]]
    near(mine.b, theirs.b, 1e-6)
