"""The evaluation protocols (personal, personal_on_global, ft(e), global) equal their definitions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import federated, images, run_experiment, settings
from naive import loss_of, module_of, rows_of, train_epochs

from fedmpi.common.errors import RankWarning, UserError
from fedmpi.data.federated import split

ALL = {"evaluate": {"protocol": ["global", "personal", "personal_on_global", "ft(2)"]}}


def accuracy(module, x, y):
    """Return the accuracy in per cent, by a loop; the lowest class wins if logits are equal."""
    module.eval()
    with torch.no_grad():
        outputs = module(x).numpy()
    hits = sum(int(min(np.flatnonzero(row == row.max()))) == int(label) for row, label in zip(outputs, y, strict=True))
    return 100 * hits / len(y)


def evaluated_module(it, client_of, k, round_):
    """Return the module with which client k is evaluated, including batch statistics."""
    client = client_of(it, k, round_)
    return module_of(it, it.experiment.method.personal_weights(client), it.experiment.method.personal_buffers(client))


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedbn", "ditto", "local"])
def test_personal_includes_clients_that_were_not_sampled(client_of, method):
    """Each client uses its own split. The mean is unweighted, the standard deviation that of the population.

    The worst tenth of seven clients is the worst client.
    """
    data = federated(client_test="aligned")
    it = run_experiment(settings(method, "norm", **ALL), data)
    assert len(it.rows[-1]["cohort"]) < 7
    assert len(set(data.test_sizes.tolist())) > 1, "or weights would not show"
    everything, last = (data.global_test.x, data.global_test.y), it.rows[-1]
    modules = [evaluated_module(it, client_of, k, 2) for k in range(7)]
    expected = {
        "personal": [accuracy(module, *rows_of(it, k, "test")) for k, module in enumerate(modules)],
        "personal_on_global": [accuracy(module, *everything) for module in modules],
    }
    for protocol, each in expected.items():
        assert last[f"{protocol}_accuracy"] == pytest.approx(np.mean(each), abs=1e-4)
        assert last[f"{protocol}_accuracy_std"] == pytest.approx(np.std(each), abs=1e-4)
        assert last[f"{protocol}_accuracy_worst_decile"] == pytest.approx(min(each), abs=1e-4)
        lines = [line for line in it.lines if line["round"] == 2 and line["protocol"] == protocol]
        assert [line["accuracy"] for line in lines] == pytest.approx(each, abs=1e-4)
    if it.experiment.messages.shared.selects_all:
        assert last["accuracy"] == pytest.approx(accuracy(module_of(it, it.w, it.b), *everything), abs=1e-4)
    else:
        assert "accuracy" not in last, "a global model of which parts have their initial values"


def test_global_is_left_out_if_parts_stay_with_clients():
    """There is a warning if `global` is listed in addition to protocols of the clients' own models."""
    with pytest.warns(
        RankWarning, match=r"global is not evaluated, because method FedPer has no global model: clients keep head"
    ):
        it = run_experiment(settings("fedper", evaluate={"protocol": ["global", "personal"]}), federated())
    assert "personal_accuracy" in it.rows[-1]
    assert not {"accuracy", "loss"} & it.rows[-1].keys()
    it = run_experiment(settings("fedper", evaluate={"protocol": ["global"]}), federated())
    assert "accuracy" in it.rows[-1]


def test_sites_are_those_of_the_data_set():
    """The global model is evaluated on each site's test rows, whoever the clients are; the round does not change."""
    data = images()
    site = torch.arange(len(data.test_y)) % 3
    data = replace(data, site=torch.arange(len(data.train_y)) % 2, test_site=site, site_names=("a", "b", "c"))
    fed = split(data, "iid", 7, seed=0)
    it = run_experiment(settings("fedper", "norm", evaluate={"protocol": ["sites", "global"]}), fed)
    module, last = module_of(it, it.w, it.b), it.rows[-1]
    expected = [accuracy(module, data.test_x[site == k], data.test_y[site == k]) for k in range(3)]
    assert [last[f"accuracy@{name}"] for name in "abc"] == pytest.approx(expected)
    assert last["sites_accuracy"] == pytest.approx(np.mean(expected))
    assert last["sites_accuracy_std"] == pytest.approx(np.std(expected))
    assert it.lines == []
    plain = run_experiment(settings("fedper", "norm", evaluate={"protocol": ["global"]}), fed)
    assert plain.hashes == it.hashes
    assert plain.rows[-1]["accuracy"] == last["accuracy"]
    with pytest.raises(
        UserError, match=r"evaluate\.protocol: sites needs a data set that assigns its test rows to sites"
    ):
        run_experiment(settings("fedavg", evaluate={"protocol": ["sites"]}), federated())


def test_fine_tuning_follows_the_last_round_with_its_learning_rate():
    """It starts from the final global model, with a new optimiser, and trains all parameters on the client's split."""
    train = {"schedule": "exponential", "decay": 0.5, "weight_decay": 1e-3}
    it = run_experiment(settings("fedprox", options={"mu": 1.0}, train=train, **ALL), federated(client_test="aligned"))
    assert all("ft(2)_accuracy" not in row for row in it.rows[:-1])
    lines = [line for line in it.lines if line["protocol"] == "ft(2)"]
    assert [(line["round"], line["client"]) for line in lines] == [(2, k) for k in range(7)]
    losses = []
    for k in range(7):
        module = module_of(it, it.w, it.b).train()
        train_epochs(module, rows_of(it, k), (2, k, 0), 0.05 / 4, 2, weight_decay=1e-3)
        losses.append(loss_of(module, rows_of(it, k, "test")))
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
    assert it.rows[-1]["ft(2)_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
