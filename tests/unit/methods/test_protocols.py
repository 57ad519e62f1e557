"""The protocols (algorithms: personal, personal_on_global, ft(e), global) against their definitions."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import federated, images, play, settings

from fedmpi.common import seeds
from fedmpi.common.errors import RankWarning, UserError
from fedmpi.data.federated import split

ALL = {"evaluate": {"protocol": ["global", "personal", "personal_on_global", "ft(2)"]}}


def accuracy(module, x, y):
    """Percent, by a loop; of equal logits the lowest class."""
    module.eval()
    with torch.no_grad():
        outputs = module(x).numpy()
    hits = sum(int(min(np.flatnonzero(row == row.max()))) == int(label) for row, label in zip(outputs, y, strict=True))
    return 100 * hits / len(y)


def used(it, client, k, round_):
    """A module that holds what client k is evaluated with, batch statistics included."""
    view = client(it, k, round_)
    module = copy.deepcopy(it.made.net.module)
    module.load_state_dict(it.made.model.state_dict(it.made.method.weights(view), it.made.method.buffers(view)))
    return module


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto", "local"])
def test_personal_is_over_all_clients_sampled_or_not(client, method):
    """Each its own split; the mean unweighted, the standard deviation that of the population, the worst tenth of seven
    clients the worst one."""
    data = federated(client_test="aligned")
    it = play(settings(method, "norm", **ALL), data)
    assert len(it.rows[-1]["cohort"]) < 7
    assert len(set(data.test_sizes.tolist())) > 1, "or weights would not show"
    x, y, last = data.global_test.x, data.global_test.y, it.rows[-1]
    own, everybody = [], []
    for k in range(7):
        module, mine = used(it, client, k, 2), data.test[k].index
        own.append(accuracy(module, x[mine], y[mine]))
        everybody.append(accuracy(module, x, y))
    for protocol, figures in (("personal", own), ("personal_on_global", everybody)):
        assert last[f"{protocol}_accuracy"] == pytest.approx(np.mean(figures), abs=1e-4)
        assert last[f"{protocol}_accuracy_std"] == pytest.approx(np.std(figures), abs=1e-4)
        assert last[f"{protocol}_accuracy_worst_decile"] == pytest.approx(min(figures), abs=1e-4)
        lines = [line for line in it.lines if line["round"] == 2 and line["protocol"] == protocol]
        assert [line["accuracy"] for line in lines] == pytest.approx(figures, abs=1e-4)
    if not it.made.messages.shared.whole:
        assert "accuracy" not in last, "of a model of which parts are as they began: nobody's"
        return
    module = copy.deepcopy(it.made.net.module)
    module.load_state_dict(it.made.model.state_dict(it.w, it.b))
    assert last["accuracy"] == pytest.approx(accuracy(module, x, y), abs=1e-4)


def test_a_model_of_which_parts_stay_with_clients_is_nobodys():
    """What asks for it is left out beside what asks for the clients' own, and said."""
    with pytest.warns(RankWarning, match=r"global is left out: method FedPer keeps head with each client"):
        it = play(settings("fedper", evaluate={"protocol": ["global", "personal"]}), federated())
    assert "personal_accuracy" in it.rows[-1]
    assert not {"accuracy", "loss"} & it.rows[-1].keys()
    it = play(settings("fedper", evaluate={"protocol": ["global"]}), federated())
    assert "accuracy" in it.rows[-1]


def test_sites_are_those_of_the_data_set():
    """Whoever the clients are: the global model on each site's test rows; nothing else of the round changes."""
    data = images()
    of = torch.arange(len(data.test_y)) % 3
    data = replace(data, site=torch.arange(len(data.train_y)) % 2, test_site=of, site_names=("a", "b", "c"))
    fed = split(data, "iid", 7, seed=0)
    it = play(settings("fedper", "norm", evaluate={"protocol": ["sites", "global"]}), fed)
    module = copy.deepcopy(it.made.net.module)
    module.load_state_dict(it.made.model.state_dict(it.w, it.b))
    last = it.rows[-1]
    found = [accuracy(module, data.test_x[of == k], data.test_y[of == k]) for k in range(3)]
    assert [last[f"accuracy@{name}"] for name in "abc"] == pytest.approx(found)
    assert last["sites_accuracy"] == pytest.approx(np.mean(found))
    assert last["sites_accuracy_std"] == pytest.approx(np.std(found))
    assert it.lines == []
    plain = play(settings("fedper", "norm", evaluate={"protocol": ["global"]}), fed)
    assert plain.hashes == it.hashes
    assert plain.rows[-1]["accuracy"] == last["accuracy"]
    with pytest.raises(UserError, match=r"evaluate\.protocol: sites needs a data set that says whose each test row is"):
        play(settings("fedavg", evaluate={"protocol": ["sites"]}), federated())


def test_fine_tuning_comes_after_the_last_round_with_its_rate():
    """From the final global model, a fresh optimiser, cross-entropy, all parameters; each client on its own split."""
    train = {"schedule": "exponential", "decay": 0.5, "weight_decay": 1e-3}
    data = federated(client_test="aligned")
    it = play(settings("fedprox", options={"mu": 1.0}, train=train, **ALL), data)
    assert all("ft(2)_accuracy" not in row for row in it.rows[:-1])
    lines = [line for line in it.lines if line["protocol"] == "ft(2)"]
    assert [(line["round"], line["client"]) for line in lines] == [(2, k) for k in range(7)]
    losses = []
    for k in range(7):
        module = copy.deepcopy(it.made.net.module)
        module.load_state_dict(it.made.model.state_dict(it.w, it.b))
        module.train()
        shard = data.train[k]
        x, y = shard.x[shard.index], shard.y[shard.index]
        sgd = torch.optim.SGD(module.parameters(), 0.05 / 4, 0.9, weight_decay=1e-3)
        generator = seeds.generator(0, "batches", 2, k, 0)
        for _ in range(2):
            for rows in torch.randperm(len(x), generator=generator).split(10):
                sgd.zero_grad()
                torch.nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
                sgd.step()
        test = data.test[k]
        with torch.no_grad():
            losses.append(torch.nn.functional.cross_entropy(module(test.x[test.index]), test.y[test.index]).item())
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
    assert it.rows[-1]["ft(2)_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
