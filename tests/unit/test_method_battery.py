"""Properties of every registered method; a new method is included by its line in the registry."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from helpers import NETS, SPECIAL, digest, federated, images, prepare, run_experiment, small_settings
from torch import nn

from fedmpi.common import seeds
from fedmpi.common.registry import load_object
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import Shard, hold_out_validation, split
from fedmpi.data.partitions.base import Partition
from fedmpi.methods import registry

METHODS = sorted(registry)
NEUTRAL = [name for name in METHODS if load_object(name, registry, "method").equals_fedavg_at is not None]
# What follows clients' ids by its nature, and how to do without: noise is drawn for an id, FedGH takes pairs in order.
WITHOUT_IDS = {
    "fedsr": {"probabilistic": False, "cmi": 0.0},
    "fedgh": {"variant": "hierarchical"},
    "fedala": {"share": 1.0},
    "fedfomo": {"models": 6, "explore": 0.0},
    "ccvr": {"lr": 0.0},
    "perfedavg": {"alpha": 0.0},  # what a batch is cut up into
}
# What a method trains at a rate of its own, on the server.
OWN_RATES = {"ccvr": {"lr": 0.0}}
every_method = pytest.mark.parametrize("method", METHODS)
every_net = pytest.mark.parametrize("net", NETS)


@lru_cache
def fedavg(net, momentum):
    """Run FedAvg."""
    return run_experiment(small_settings("fedavg", net, train={"momentum": momentum}))


def options_equal_to_fedavg(method):
    """Return the options at which a method equals FedAvg."""
    return {**SPECIAL.get(method, {}), **load_object(method, registry, "method").equals_fedavg_at}


# ---- what it becomes ----
@every_net
@pytest.mark.parametrize("method", NEUTRAL)
def test_methods_have_the_bits_of_fedavg_at_equals_fedavg_at(method, net):
    config = small_settings(method, net, options=options_equal_to_fedavg(method))
    mine, theirs = run_experiment(config), fedavg(net, config.train.momentum)
    assert mine.hashes == theirs.hashes
    assert torch.equal(mine.b, theirs.b)
    assert [row["train_loss"] for row in mine.rows] == [row["train_loss"] for row in theirs.rows]


@pytest.mark.parametrize("net", ["mlp", "norm"])
@pytest.mark.parametrize("method", NEUTRAL)
def test_one_client_equals_plain_sgd(method, net):
    """The tolerance is for w + (w' - w), which equals w' up to two roundings of float32 per round."""
    config = small_settings(
        method, net, options=options_equal_to_fedavg(method), cohort={"fraction": 1.0}, train={"weight_decay": 1e-3}
    )
    data = split(images(), "iid", 1, 0)
    it = run_experiment(config, data)
    w = run_by_hand(it)
    assert not torch.equal(w, it.w0)
    torch.testing.assert_close(it.w, w, rtol=1e-4, atol=2e-6)


def run_by_hand(it):
    """Run the same rounds with plain torch on a module with the same start and random numbers."""
    config, shard = it.experiment.settings, it.experiment.data.train[0]
    x, y = shard.x[shard.index], shard.y[shard.index]
    train = config.train
    module = it.experiment.net.module
    with torch.no_grad():
        it.experiment.model.load(it.w0, it.b0)
    for t in range(config.rounds):
        sgd = torch.optim.SGD(module.parameters(), train.lr, train.momentum, weight_decay=train.weight_decay)
        order = torch.randperm(len(x), generator=seeds.torch_generator(config.seed, "batches", t, 0, 0))
        module.train()
        with seeds.temporary_seed(config.seed, "torch", t, 0):
            for rows in order.split(train.batch_size):
                sgd.zero_grad()
                nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
                sgd.step()
    return it.experiment.model.w  # which the module's parameters are views of


# ---- what it must not depend on ----
@every_method
def test_results_do_not_depend_on_client_ids(method):
    """With full batches of all clients, ids determine neither batches nor cohorts, only the order of sums."""
    options = WITHOUT_IDS.get(method, SPECIAL.get(method, {}))
    config = small_settings(method, options=options, cohort={"fraction": 1.0}, train={"batch_size": "full"})
    data = federated(client_test="global")
    data = hold_out_validation(data, config.data.validation, 0)
    new = [3, 0, 6, 1, 5, 2, 4]  # client k of the second run is client new[k] of the first
    renamed = replace(
        data,
        train_sizes=data.train_sizes[new],
        test_sizes=data.test_sizes[new],
        label_counts=data.label_counts[new],
        train={k: data.train[j] for k, j in enumerate(new)},
        test={k: data.test[j] for k, j in enumerate(new)},
        validation={k: data.validation[j] for k, j in enumerate(new) if data.validation},
        parts=Partition.from_parts(data.parts[j] for j in new),
    )
    one, other = run_experiment(config, data), run_experiment(config, renamed)
    moved = (one.w - one.w0).abs().max()
    torch.testing.assert_close(one.w, other.w, rtol=0, atol=float(1e-4 * moved) + 1e-12)
    losses = [{line["client"]: line["loss"] for line in it.lines if line["round"] == 2} for it in (one, other)]
    assert [losses[1][k] for k in range(7)] == pytest.approx([losses[0][j] for j in new], rel=1e-4)


@pytest.mark.parametrize("net", ["mlp", "norm"])
@every_method
def test_training_does_not_depend_on_the_client_trained_before(method, net):
    """Other clients' states, the message and the data keep their bits: nothing leaks through the shared model."""
    it = run_experiment(small_settings(method, net))
    fed = it.fed
    before = {k: digest(row) for k, row in fed.states.rows.items()}
    received, x = digest(fed.transport.broadcast_copy), digest(it.experiment.data.train[0].x)
    downloads = fed.transport.send_downloads(3, range(7), fed.states.owners, fed.server)
    packing = it.experiment.messages.upload_layout(3).packing

    def train(order):
        rows = {k: torch.zeros(packing.size) for k in order}
        for k in order:
            fed.states.client_context(
                k, 3, fed.config.learning_rate(3), fed.transport.broadcast_copy, downloads[k]
            ).run_round(rows[k])
        a, b = packing.spans["_seconds"]
        for row in rows.values():
            row[a:b] = 0  # a time, not a result
        return {k: digest(row) for k, row in rows.items()}

    kept = {k: row.clone() for k, row in fed.states.rows.items()}
    assert len(kept) == 7
    alone = train([4])
    assert {k for k in before if digest(fed.states.rows[k]) != before[k]} == (
        {4} if _changes_client_state(it.experiment) else set()
    )
    for k, row in kept.items():
        fed.states.rows[k].copy_(row)
    first = train([0, 4, 2])
    for k, row in kept.items():
        fed.states.rows[k].copy_(row)
    last = train([2, 0, 4])
    assert first == last
    assert first[4] == alone[4]
    assert (digest(fed.transport.broadcast_copy), digest(it.experiment.data.train[0].x)) == (received, x)


def _changes_client_state(made):
    """Return whether a client's round changes its declared state, or own parts that are trained."""
    method, groups = made.method, made.model.layout.groups()
    own = groups - _shared_groups(made)
    return bool(method.client_state) or bool(own & (groups if "*" in method.trains else set(method.trains)))


def _shared_groups(made, round_=None):
    """Return the layout groups that the method sends in a round, or in any round if none is given."""
    method, rounds, found = made.method, made.settings.rounds, set()
    for t in range(rounds) if round_ is None else [round_]:
        said, groups = method.shared_parts(t, rounds), made.model.layout.groups() | made.model.buffer_layout.groups()
        found |= (groups if "*" in said.groups else groups & set(said.groups)) - set(said.exclude)
    return found


@pytest.mark.parametrize("net", ["mlp", "norm"])
@every_method
def test_evaluation_changes_nothing(method, net):
    plain = run_experiment(small_settings(method, net, evaluate={"protocol": ["global"], "every": 100}))
    busy = run_experiment(
        small_settings(method, net, evaluate={"protocol": ["personal_on_global", "global", "personal"]})
    )
    assert plain.hashes == busy.hashes
    assert torch.equal(plain.b, busy.b)
    assert torch.equal(plain.fed.server.state_row, busy.fed.server.state_row)


# ---- what it sends ----
@every_method
def test_sent_bytes_equal_the_declared_bytes(method):
    """One process: the download once, and each client's own download and upload; 4 bytes per entry."""
    it = run_experiment(small_settings(method))
    messages = it.experiment.messages
    for row in it.rows:
        m, t = len(row["cohort"]), row["round"]
        told = messages.broadcast_layout(messages.groups_in_round(t - 1) if t else None).packing.size
        each = messages.per_client_download.size + messages.upload_layout(t).packing.size
        assert row["sent_bytes"] == 4 * (told + m * each)
        assert row["received_bytes"] == 4 * m * each


@every_method
def test_declared_bytes_are_the_sum_of_the_declared_parts(method):
    """Sent are the shared weights and float buffers, the declared slots, and four numbers of the engine."""
    it = prepare(small_settings(method, "norm"))
    made, messages, method = it.experiment, it.experiment.messages, it.experiment.method
    travelling = _shared_groups(made)
    shared, all_weights = _count_entries(travelling, made.model.layout), made.model.layout.size
    buffers, all_buffers = _count_entries(travelling, made.model.buffer_layout), 2 * 6  # mean, variance of the six maps

    def entries(slots, s=shared):
        sizes = {**messages.sizes, "s": s}
        return sum(int(np.prod([sizes.get(d, d) for d in slot.dims])) for slot in slots.values())

    received = sum(entries({n: method.server_state[n]}) for n in method.receives)
    assert messages.broadcast_layout().packing.size == shared + buffers + received + 1
    for t in range(made.settings.rounds):
        groups, named = _shared_groups(made, t), method.shared_parts(t, made.settings.rounds).slots
        slots = {n: slot for n, slot in method.sends.items() if named is None or n in named}
        of_w, of_b = (_count_entries(groups, layout) for layout in (made.model.layout, made.model.buffer_layout))
        assert messages.upload_layout(t).packing.size == entries(slots, of_w) + of_b + 3
    assert messages.per_client_download.size == entries(method.per_client_download)
    kept = (all_weights - shared) + (all_buffers - buffers)
    assert messages.client_state.size == kept + entries(method.client_state)
    assert all_weights == sum(p.numel() for p in made.net.module.parameters())


def _count_entries(groups, layout):
    """Return the number of entries of the tensors of these groups."""
    return sum(int(np.prod(s.shape)) for s in layout.segments if s.group in groups)


# ---- the edges ----
@pytest.mark.parametrize("net", ["mlp", "norm"])
@every_method
def test_learning_rate_zero_changes_no_shared_weights(method, net):
    """Server rules give zero for zero updates.

    Batch statistics change all the same, and head phases may have their own learning rate, but that part is not sent.
    """
    options = OWN_RATES.get(method, SPECIAL.get(method, {}))
    it = prepare(small_settings(method, net, options=options, train={"lr": 0.0, "weight_decay": 1e-3}))
    before = it.w.clone()
    it.fed.run()
    assert torch.equal(it.w, before)


def clients_of(*parts):
    """Return a function that makes clients with these of thirty samples, which are the same ten three times."""
    data = images()
    rows = torch.arange(10).repeat(3)
    data = Dataset(data.train_x[rows], data.train_y[rows], data.test_x, data.test_y, data.classes)
    cut = [np.asarray(part) for part in parts]
    y = data.train_y.numpy()
    return replace(
        split(data, "iid", len(cut), 0, "global"),
        train_sizes=np.array([len(part) for part in cut]),
        label_counts=np.stack([np.bincount(y[part], minlength=data.classes) for part in cut]),
        train={k: Shard(data.train_x, data.train_y, torch.from_numpy(part)) for k, part in enumerate(cut)},
        parts=Partition.from_parts(cut),
    )


@every_method
def test_identical_clients_equal_one_client(method):
    """Every sensible server rule returns the update on which all clients agree."""
    options = WITHOUT_IDS.get(method, SPECIAL.get(method, {}))
    config = small_settings(method, options=options, cohort={"fraction": 1.0}, train={"batch_size": "full"})
    three = run_experiment(config, clients_of(range(10), range(10, 20), range(20, 30)))
    one = run_experiment(config, clients_of(range(10)))
    moved = float((one.w - one.w0).abs().max())
    torch.testing.assert_close(three.w, one.w, rtol=0, atol=1e-4 * moved + 1e-12)


@every_method
def test_clients_with_one_sample_give_a_finite_model(method):
    config = small_settings(method, "mlp", options=SPECIAL.get(method, {}), cohort={"fraction": 1.0})
    it = run_experiment(config, clients_of([5], range(10, 20), [7]))
    assert it.w.isfinite().all()
