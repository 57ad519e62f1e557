"""The round loop, compared with a naive loop; how a run ends, and which configs are refused."""

import hashlib

import numpy as np
import pytest
import torch
from helpers import CPU, federated, prepare, run_experiment, settings
from torch.nn.functional import cross_entropy

from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.engine import scheduler
from fedmpi.runtime import build


# ---- comparison with a naive loop ----
def naive_fedavg(config, data):
    """Run FedAvg with state dicts; return the global state after each round, and the mean training losses."""
    experiment = build.make_experiment(config, data, CPU)
    module, train = experiment.net.module, config.train
    state = {name: value.clone() for name, value in module.state_dict().items()}
    states, losses = [], []
    for t in range(config.rounds):
        members = scheduler.draw_cohort(config.seed, t, data.clients, config.cohort.fraction, config.cohort.sampling)
        ends, means = [], []
        for k in members:
            module.load_state_dict(state)
            module.train()
            x, y = data.train[k].x[data.train[k].index], data.train[k].y[data.train[k].index]
            sgd = torch.optim.SGD(module.parameters(), train.lr, train.momentum, weight_decay=train.weight_decay)
            g, seen = seeds.torch_generator(config.seed, "batches", t, k, 0), []
            with seeds.temporary_seed(config.seed, "torch", t, k):
                for _ in range(train.epochs):
                    for rows in torch.randperm(len(x), generator=g).split(train.batch_size):
                        sgd.zero_grad()
                        loss = cross_entropy(module(x[rows]), y[rows])
                        loss.backward()
                        sgd.step()
                        seen.append(loss.item())
            ends.append({name: value.clone() for name, value in module.state_dict().items()})
            means.append(sum(seen) / len(seen))
        n = data.train_sizes[members]
        p = n / n.sum() if config.cohort.weighting == "samples" else np.full(len(n), 1 / len(n))
        for name, old in state.items():
            if old.is_floating_point():
                mean = sum(pk * end[name].double() for pk, end in zip(p, ends, strict=True))
                lr = 1.0 if "running" in name else config.server.lr  # batch statistics are averaged
                state[name] = (old.double() + lr * (mean - old.double())).float()
        states.append(dict(state))
        losses.append(float(p @ np.array(means)))
    return module, states, losses


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("net", ["mlp", "norm", "cnn"])
def test_rounds_equal_those_of_a_naive_loop(net, weighting):
    """Up to float32 rounding, because sums have another order and convolutions another memory format."""
    data = federated()
    changes = {"train": {"epochs": 2, "weight_decay": 1e-3, "lr": 0.02}, "server": {"lr": 0.7}}
    config = settings("fedavg", net, cohort={"weighting": weighting}, evaluate={"protocol": ["global"]}, **changes)
    it = run_experiment(config, data)
    module, states, losses = naive_fedavg(config, data)
    final = it.experiment.model.state_dict(it.w, it.b)
    for name, value in states[-1].items():
        if value.is_floating_point():
            torch.testing.assert_close(final[name], value, rtol=1e-3, atol=2e-5)
    assert [row["train_loss"] for row in it.rows] == pytest.approx(losses, rel=1e-4)
    for row, state in zip(it.rows, states, strict=True):
        module.load_state_dict(state)
        module.eval()
        logits = module(data.global_test.x)
        assert row["loss"] == pytest.approx(cross_entropy(logits, data.global_test.y).item(), rel=1e-4)
        share = (logits.argmax(1) == data.global_test.y).double().mean().item()
        # one of the 60 samples may change its class
        assert row["accuracy"] == pytest.approx(100 * share, abs=100 / 60 + 1e-9)


def test_metrics_of_clients_are_those_of_their_own_models():
    """FedRep: the shared body with the client's own head, on the client's test rows; mean, spread and worst tenth."""
    data = federated()
    it = run_experiment(settings("fedrep", "norm", rounds=2), data)
    module, messages = it.experiment.net.module, it.experiment.messages
    losses = {}
    for k in range(7):
        own = messages.client_state.views(it.fed.states.rows[k])
        w = it.w.clone()
        messages.personal.put(own._w, w)
        state = it.experiment.model.layout.named_views(w) | it.experiment.model.buffer_layout.named_views(it.b)
        module.load_state_dict({**module.state_dict(), **{n: v.clone() for n, v in state.items()}})
        module.eval()
        shard = data.test[k]
        losses[k] = cross_entropy(module(shard.x[shard.index]), shard.y[shard.index]).item()
    reported = {line["client"]: line["loss"] for line in it.lines if line["round"] == 1}
    assert reported == pytest.approx(losses, rel=1e-4)
    values = np.array(list(losses.values()))
    assert len({round(v, 3) for v in losses.values()}) > 1
    row = it.rows[1]
    assert row["personal_loss"] == pytest.approx(values.mean(), rel=1e-4)
    assert row["personal_loss_std"] == pytest.approx(values.std(), rel=1e-3)
    # the worst tenth of seven clients is one client
    assert row["personal_loss_worst_decile"] == pytest.approx(values.max(), rel=1e-4)


def test_recorded_sha256_is_that_of_the_parameters_in_state_dict_order():
    it = run_experiment(settings("fedavg", "cnn", rounds=1))
    values = it.experiment.model.state_dict(it.w, it.b)
    content = b"".join(v.contiguous().numpy().astype("<f4").tobytes() for v in values.values())
    assert it.hashes == [hashlib.sha256(content).hexdigest()]


# ---- the end of a run ----
def test_a_run_without_rounds_evaluates_the_initial_model():
    it = run_experiment(settings("fedavg", rounds=0))
    assert (it.reason, [row["round"] for row in it.rows]) == ("finished", [-1])
    assert it.rows[0]["loss"] > 0
    assert it.rows[0]["sha256"] == it.experiment.model.layout.sha256(it.w0)
    assert {line["round"] for line in it.lines} == {-1}
    assert torch.equal(it.w, it.w0)


def test_evaluation_is_every_second_round_and_after_the_last():
    it = run_experiment(settings("fedavg", rounds=5, evaluate={"every": 2}))
    assert [row["round"] for row in it.rows] == [0, 1, 2, 3, 4]
    assert [row["round"] for row in it.rows if "loss" in row] == [1, 3, 4]
    assert sorted({line["round"] for line in it.lines}) == [1, 3, 4]
    always = run_experiment(settings("fedavg", rounds=5))
    assert [always.rows[t]["loss"] for t in (1, 3, 4)] == [it.rows[t]["loss"] for t in (1, 3, 4)]


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedpac"])
def test_a_stop_leaves_only_complete_rounds(method):
    """Whenever the stop comes, the result is the state after the last complete round."""
    complete = run_experiment(settings(method, "norm"))
    stop_calls = [0]
    it = prepare(settings(method, "norm"), stop=lambda: bool(stop_calls.append(0)))
    it.fed.run()
    total = len(stop_calls)
    rounds_done = set()
    for at in range(1, total, max(total // 8, 1)):
        count = iter(range(total + 1000))
        it = prepare(settings(method, "norm"), stop=lambda count=count, at=at: next(count) >= at)
        reason = it.fed.run()
        n = len(it.rows)
        assert reason == "stopped"
        assert it.hashes == complete.hashes[:n]
        expected = run_experiment(settings(method, "norm", rounds=n))
        assert torch.equal(it.w, expected.w)
        assert torch.equal(it.b, expected.b)
        assert torch.equal(it.fed.server.state_row, expected.fed.server.state_row)
        assert all("personal_loss" in row for row in it.rows[:-1])  # the last one may have had no time to be evaluated
        rounds_done.add(n)
    assert rounds_done == {0, 1, 2}


def test_an_error_about_nan_names_round_and_clients():
    with pytest.raises(UserError, match=r"round 0: client \d.* sent values that are not finite.*lower train.lr"):
        run_experiment(settings("fedavg", train={"lr": 1e30}))


def test_class_accuracy_is_that_of_the_global_model():
    it = run_experiment(settings(rounds=2))
    test = it.fed.trainer.data.global_test
    it.experiment.model.load(it.w, it.b)
    predicted, y = it.experiment.model.module.eval()(test.x[test.index]).argmax(1), test.y[test.index]
    expected = [100 * float((predicted[y == c] == c).double().mean()) for c in range(4)]
    assert it.rows[-1]["class_accuracy"] == pytest.approx(expected, abs=1e-3)
