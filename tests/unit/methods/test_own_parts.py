"""Parts of the model, and models, that stay with their clients: heads, bodies, normalisation, factors, memories."""

from itertools import combinations

import pytest
import torch
from helpers import NETS, fedmpi, prepare, run_experiment, settings
from naive import (
    NET,
    assert_is_fedavg,
    flat,
    loss_of,
    module_of,
    rows_of,
    train_epochs,
)
from torch import nn

from fedmpi.models.fedpara import PERSONAL_GROUP
from fedmpi.runtime import build_data

MOVING = {"momentum": 0.9, "weight_decay": 1e-2}  # either would move weights that a careless optimiser still holds
HEAD = {"head.weight", "head.bias"}
LAST_TWO = {*HEAD, "body.7.weight", "body.7.bias"}
ALL_CLIENTS = {"fraction": 1.0}


@pytest.mark.parametrize(
    ("method", "net", "options", "is_own"),
    [
        ("fedper", "mlp", {}, lambda s: s.name in HEAD),
        ("fedrep", "mlp", {"head_epochs": 1}, lambda s: s.name in HEAD),
        ("lg_fedavg", "cnn", {"n_shared": 1}, lambda s: s.name not in HEAD),
        ("lg_fedavg", "cnn", {"n_shared": 2}, lambda s: s.name not in LAST_TWO),
        ("fedbn", "norm", {}, lambda s: s.name in ("1.weight", "1.bias")),
        ("pfedpara", "cnn", {}, lambda s: s.group == PERSONAL_GROUP),
        ("fedsr", "mlp", {}, lambda s: s.name in ("r_mu", "r_sigma", "C")),
        ("local", "mlp", {}, lambda s: True),
    ],
)
def test_own_tensors_stay_with_their_client(client_of, method, net, options, is_own):
    """No two of the seven clients use the same own tensors, which are never sent and never change on the server.

    All other tensors are the server's for all clients.
    """
    it = run_experiment(settings(method, net, options=options, cohort=ALL_CLIENTS, rounds=2))
    used = [it.experiment.method.personal_weights(client_of(it, k)).clone() for k in range(7)]
    for s in it.experiment.model.layout.segments:
        values = [s.view(w) for w in used]
        if is_own(s):
            assert all((a - b).abs().max() > 1e-6 for a, b in combinations(values, 2)), s.name
            assert torch.equal(s.view(it.w), s.view(it.w0)), s.name
        else:
            assert all(torch.equal(value, s.view(it.w)) for value in values), s.name
            assert not torch.equal(s.view(it.w), s.view(it.w0)), s.name
    shared = sum(s.stop - s.start for s in it.experiment.model.layout.segments if not is_own(s))
    assert it.experiment.messages.upload_layout(1).packing.shapes["dw"] == (shared,)


@pytest.mark.parametrize("net", NETS)
def test_an_untrained_head_keeps_its_initial_weights(net):
    """This holds for Freeze, and for FedBABU, which trains in the same way until it is fine-tuned."""
    mine, theirs = (run_experiment(settings(method, net, train=MOVING)) for method in ("freeze", "fedbabu"))
    assert mine.hashes == theirs.hashes
    assert torch.equal(mine.b, theirs.b)
    head, shared = mine.experiment.messages.head, mine.experiment.messages.shared
    assert torch.equal(head.take(mine.w), head.take(mine.w0))
    assert not torch.equal(shared.take(mine.w), shared.take(mine.w0))
    for it in (mine, theirs):
        assert it.fed.states.rows
        assert all(torch.equal(it.client_state(k)._w, head.take(it.w0)) for k in it.fed.states.rows)


# ---- FedPer, LG-FedAvg, FedRep ----


@pytest.mark.parametrize("method", ["fedper", "lg_fedavg"])
def test_head_and_body_are_trained_jointly(method):
    """In round 0 the shared part equals FedAvg's."""
    config = {"rounds": 1, "cohort": {"fraction": 1.0, "weighting": "uniform"}}
    mine, theirs = (
        run_experiment(settings(method, "norm", **config)),
        run_experiment(settings("fedavg", "norm", **config)),
    )
    assert torch.equal(mine.experiment.messages.shared.take(mine.w), mine.experiment.messages.shared.take(theirs.w))


def test_fedrep_trains_the_head_first(client_of):
    """The hook `train` runs the two phases one after the other."""
    it = prepare(settings("fedrep", options={"head_epochs": 2, "body_epochs": 1}, train=MOVING))
    it.experiment.method.train(client_of(it))
    whole = it.experiment.model.w.clone()
    client = client_of(it)
    client.fit(2, groups=("head",))
    middle = client.w.clone()
    client.fit(1, groups=("body",))
    assert torch.equal(client.w, whole)
    assert not torch.equal(middle, whole)


def test_fine_tuning_is_in_training_mode_and_independent_of_other_clients(client_of):
    """Dropout draws, and batch statistics change, with the client's own random numbers."""
    it = prepare(settings("fedbabu", "norm"))

    def tuned():
        client = client_of(it, 2)
        it.experiment.net.module.eval()  # as the evaluation of another client leaves it
        torch.manual_seed(torch.seed())
        client.fine_tune(1)
        return client.w.clone(), client.b.clone(), client.b0

    (w, b, b0), (again, b_again, _) = tuned(), tuned()
    assert torch.equal(w, again)
    assert torch.equal(b, b_again)
    assert not torch.equal(b, b0)


# ---- FedBN ----
class NamedNorms(nn.Module):
    """A model with a layer norm, and batch norms with and without bn in their names, as in torchvision."""

    def __init__(self):
        super().__init__()
        self.bn1 = nn.BatchNorm1d(64)
        self.downsample = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(self.downsample(self.bn1(x.flatten(1)))))


def named_norms(input_shape, classes):
    """Build a NamedNorms."""
    return NamedNorms()


@pytest.mark.parametrize(
    ("bn_match", "stays"),
    [("type", {"bn1", "downsample.1"}), ("any", {"bn1", "downsample.1", "norm"}), ("name", {"bn1"})],
)
def test_bn_match_selects_the_layers_that_stay(bn_match, stays):
    net = {
        "model": {"name": f"{__file__}:named_norms"},
        "train": {"batch_size": "full"},
    }  # a batch of one has no variance
    it = run_experiment(settings("fedbn", "norm", options={"bn_match": bn_match}, **net))
    for layout in (it.experiment.model.layout, it.experiment.model.buffer_layout):
        own = {s.name.rsplit(".", 1)[0] for s in layout.segments if s.group not in it.experiment.messages.shared_groups}
        assert own == {name for name in stays if name != "norm" or layout is it.experiment.model.layout}
    assert it.hashes != run_experiment(settings("fedavg", "norm", **net)).hashes


def test_fedbn_without_normalisation_equals_fedavg():
    with pytest.warns(UserWarning, match="but model mlp has none of them"):
        assert_is_fedavg("fedbn")


# ---- FedPara, pFedPara ----


def test_layers_that_would_grow_stay_dense():
    with pytest.warns(UserWarning, match="no layer"):
        assert_is_fedavg("fedpara", model={"name": "mlp", "hidden": [4]})


def test_personal_factors_multiply_the_shared_ones():
    """W = W_1 . (W_2 + 1): with W_2 = 0 a client uses W_1."""
    made = prepare(settings("pfedpara", "cnn")).experiment
    own = {s.name.split(".two.")[1] for s in made.model.layout.segments if s.group == PERSONAL_GROUP}
    assert own == {"T", "O", "I", "X", "Y"}
    layer = made.net.module.body[3]
    with torch.no_grad():
        for factor in layer.two.parameters():
            factor.zero_()
    assert torch.equal(layer.weight(), layer.one())


# ---- a model of one's own ----
def test_local_training_sends_no_weights(tmp_path):
    """Rank 0 sends its command; clients send loss, seconds and the stop flag."""
    it = run_experiment(settings("local", "norm"))
    messages = it.experiment.messages
    assert (messages.broadcast_layout().packing.size, messages.upload_layout(0).packing.size) == (1, 3)
    assert torch.equal(it.b, it.b0)
    assert it.rows[-1]["personal_loss"] != it.rows[0]["personal_loss"]
    done = fedmpi("run", "configs/quickstart.yaml", "method.name=local", "rounds=1", f"output={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "clients sent 0 and received 0 parameters\n" in done.stdout


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("method", "options", "fit", "name", "train"),
    [
        ("local", {}, 0, "_w", {}),
        ("ditto", {"lam": 0.0}, 1, "v", {}),  # the second fit of a client's round
        ("apfl", {"alpha": 1.0, "adapt": "never"}, 0, "v", {"momentum": 0.0, "weight_decay": 0.0}),
    ],
    ids=["local", "ditto", "apfl"],
)
def test_personal_models_equal_separate_sgd(method, options, fit, name, train, momentum):
    """SGD has a new optimiser in each round in which a client takes part.

    Batch statistics are those of the client's own passes.
    """
    train = {"epochs": 2, "momentum": 0.9, "weight_decay": 1e-3, "schedule": "exponential", "decay": 0.9, **train}
    it = run_experiment(settings(method, options=options, rounds=4, train=train, model={**NET, "momentum": momentum}))
    modules = {}
    for row in it.rows:
        for k in row["cohort"]:
            module = modules.setdefault(k, module_of(it, it.w0, it.b0)).train()
            if momentum is None:
                module[1].num_batches_tracked.zero_()  # an average over this round's batches
            lr, decay = 0.05 * 0.9 ** row["round"], train["weight_decay"]
            train_epochs(module, rows_of(it, k), (row["round"], k, fit), lr, 2, train["momentum"], decay)
    assert len(modules) >= 5
    losses = {line["client"]: line["loss"] for line in it.lines if line["round"] == 3}
    for k, module in modules.items():
        torch.testing.assert_close(getattr(it.client_state(k), name), flat(module))
        assert losses[k] == pytest.approx(loss_of(module, rows_of(it, k, "test")), rel=1e-6)


def test_one_step_of_dittos_personal_model_by_hand(quadratic, client_of):
    """a = 3, b = 4, v = 2, w_g = 1, eta = .05, lam = .75:  2 - .05 (3 (2 - 4) + .75 (2 - 1)) = 2.2625.

    The global model makes its own step first, 1 - .05 * 3 (1 - 4) = 1.45; a proximal term at 1.45 would give 2.279375.
    """
    config = quadratic("ditto", {"a": [[3.0]], "b": [[4.0]], "copies": [1]}, options={"lam": 0.75}, train={"epochs": 1})
    it = prepare(config, build_data.build_partitioned_data(config))
    client = client_of(it)
    client.state.v.fill_(2.0)
    state = it.experiment.method.train(client)
    assert client.w.item() == pytest.approx(1.45, abs=1e-12)
    assert state["v"].item() == pytest.approx(2.2625, abs=1e-12)


@pytest.mark.parametrize("net", ["mlp", "norm"])
def test_the_first_round_of_moon_has_the_bits_of_fedavg(net):
    """The last model is the initial one, like the received model: exact zeros are added to the gradient."""
    mine, theirs = (run_experiment(settings(name, net, rounds=4)) for name in ("moon", "fedavg"))
    assert mine.hashes[0] == theirs.hashes[0]
    assert mine.hashes[3] != theirs.hashes[3]


def test_moons_last_model_is_the_one_that_was_uploaded(client_of):
    """It has the weights and batch statistics of the client's last round, and before that the initial ones."""
    it = run_experiment(settings("moon", "norm", rounds=1))
    cohort = it.rows[0]["cohort"]
    assert 0 < len(cohort) < 7
    for k in range(7):
        state = client_of(it, k).state
        if k in cohort:
            i = cohort.index(k)
            torch.testing.assert_close(state.last, it.w0 + it.uploads.dw[i], rtol=0, atol=1e-6)
            assert torch.equal(state.last_b, it.uploads._b[i])
            assert not torch.equal(state.last_b, it.b0)
        else:
            assert torch.equal(state.last, it.w0)
            assert torch.equal(state.last_b, it.b0)
