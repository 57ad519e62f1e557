"""privacy.dp.unit: sample: the gradients, batches and noise of DP-SGD, and what it does not permit."""

import json
import math
from dataclasses import dataclass

import pytest
import torch
from helpers import fedmpi, prepare, settings
from scipy.stats import binom, chi2
from thread_ranks import run_in_threads
from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.engine.local import private_steps
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.engine.local.private_steps import clip_factors
from fedmpi.method import Method, State
from fedmpi.privacy.accountant import Sampling, compute_epsilon
from fedmpi.privacy.noise import NoiseKey
from fedmpi.privacy.sample_level import SampleGuarantee, SampleMechanism, check_delta, round_up
from fedmpi.runtime import sample_privacy

KEY = b"k" * 32
DP = {"unit": "sample", "clip": 0.5, "noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"}


def group_norm_net(input_shape, classes):
    """Return a network with a convolution, group normalisation and a linear layer."""
    size = input_shape[1] * input_shape[2]
    layers = [nn.Conv2d(input_shape[0], 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * size, classes))


def dropout_net(input_shape, classes):
    """Return a network with dropout."""
    inputs = math.prod(input_shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, classes))


def counting_net(input_shape, classes):
    """Return a network that adds up its inputs in a buffer, which would be uploaded."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(math.prod(input_shape), classes)
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            self.total += x.detach().sum()
            return self.head(x.flatten(1))

    return Counting()


NETS = {
    "mlp": {"name": "mlp", "hidden": [16]},
    "cnn": {"name": "mcmahan_cnn"},
    "group": {"name": f"{__file__}:group_norm_net"},
    "dropout": {"name": f"{__file__}:dropout_net"},
    "logistic": {"name": "logistic", "reference": True},
}


def private(method="fedavg", net="mlp", dp=None, data=None, comm=None, **changes):
    """Prepare an experiment with a fixed noise key."""
    merged = {"model": NETS[net] if isinstance(net, str) else net, "evaluate": {"protocol": ["global"]}, **changes}
    it = prepare(settings(method, **merged, privacy={"dp": DP | (dp or {})}), data, comm)
    it.steps = it.experiment.private_steps
    it.steps.key = NoiseKey(KEY, "run")
    return it


def client_of(it, k=0):
    """Return client k at the start of round 0, with the weights loaded."""
    trainer = it.fed.trainer
    broadcast = torch.zeros(trainer.messages.broadcast_layout().packing.size)
    trainer.messages.broadcast_layout().packing.write(broadcast, {"_w": it.w0})
    empty = torch.zeros(trainer.messages.per_client_download.size)
    state = trainer.messages.initial_state("client_state", it.w0, it.b0)
    client = ClientContext(trainer, k, 0, 0.05, broadcast, empty, state)
    trainer.model.load(client.received)
    trainer.model.module.train()
    return client


def naive_sum(it, x, y, clip, loss=None):
    """Return the sum of the clipped gradients of samples, each computed by a separate backward pass."""
    module, task, model = it.experiment.net.module, it.fed.trainer.task, it.experiment.model
    total = torch.zeros(model.layout.size, dtype=torch.float64)
    for i in range(len(y)):
        module.zero_grad()
        model.drop_gradient()
        (loss or task.loss)(module, x[i : i + 1], y[i : i + 1]).backward()
        g = torch.zeros(model.layout.size)
        for segment, p in model.segment_parameters:
            segment.view(g).copy_(p.grad)
        g = g.double()
        total += g * min(1.0, clip / float(g.norm()))
    return total


def choose(it, way, monkeypatch):
    """Compute gradients by torch.vmap or sample by sample, even if the model permits another way."""
    if way != "default":
        monkeypatch.setattr(private_steps.LinearGradients, "create", lambda *_: None)
        it.steps._vmap_works = None if way == "vmap" else False


def step_gradient(it, client, x, y):
    """Return the gradient of one private step of a client, (d,)."""
    trainer = it.fed.trainer
    with trainer.model.train_only(trainer.method.trains) as parameters:
        it.steps.make_gradient_function(client, trainer.method, parameters)(x, y)
    return trainer.model.attach_gradient().clone()


def rows_of(it, k, n=12):
    shard = it.fed.trainer.data.train[k]
    return shard.x[shard.index[:n]], shard.y[shard.index[:n]]


# ---- gradients ----
@pytest.mark.parametrize("way", ["default", "vmap", "loop"])
@pytest.mark.parametrize("net", ["mlp", "cnn", "group", "logistic"])
def test_gradients_equal_those_of_single_backward_passes(net, way, monkeypatch):
    monkeypatch.setattr(private_steps, "MAX_GRADIENT_ENTRIES", 6000)  # several chunks
    monkeypatch.setattr(private_steps, "MAX_VMAP_ENTRIES_ON_CPU", 10**9)
    side = 28 if net == "cnn" else 8
    rows = torch.randn(40, 1, side, side), torch.arange(40) % 4
    data = split(Dataset(*rows, *rows, 4), "iid", 2, 0, "aligned")
    it = private(net=net, dp={"noise_multiplier": 1e-12}, data=data)
    choose(it, way, monkeypatch)
    client = client_of(it)
    x, y = rows_of(it, 0)
    naive = naive_sum(it, x, y, 0.5) / 10  # the expected batch size is train.batch_size
    torch.testing.assert_close(step_gradient(it, client, x, y).double(), naive, rtol=1e-4, atol=1e-7)
    assert it.steps._vmap_works is {"loop": False, "vmap": True}.get(way, None if net in ("mlp", "logistic") else True)


def test_losses_of_methods_and_constant_class_weights_are_those_of_single_samples(monkeypatch):
    it = private("fedntd", dp={"noise_multiplier": 1e-12})
    client, (x, y) = client_of(it), rows_of(it, 0)
    by_vmap = step_gradient(it, client, x, y)
    it.steps._vmap_works = False
    torch.testing.assert_close(step_gradient(it, client, x, y), by_vmap, rtol=1e-4, atol=1e-7)
    weights = [1.0, 2.0, 0.5, 4.0]
    it = private(
        dp={"noise_multiplier": 1e-12, "clip": 100.0}, task={"name": "classification", "class_weights": weights}
    )
    (x, y), w = rows_of(it, 0), torch.tensor(weights)
    naive = naive_sum(
        it, x, y, 100.0, lambda module, x, y: w[y] @ nn.functional.cross_entropy(module(x), y, reduction="none")
    )
    for way in ("default", "vmap", "loop"):
        choose(it, way, monkeypatch)
        torch.testing.assert_close(step_gradient(it, client_of(it), x, y).double(), naive / 10, rtol=1e-4, atol=1e-6)


def test_recurrent_and_several_input_models_are_trained_sample_by_sample():
    x = torch.randint(0, 5, (30, 7))
    it = private(
        net={"name": "char_lstm", "hidden": 4, "layers": 1},
        data=split(Dataset(x, x, x[:5], x[:5], 5), "iid", 2, 0, "global"),
        dp={"noise_multiplier": 1e-12},
        task={"name": "next_symbol"},
    )
    x, y = rows_of(it, 0)
    gradient = step_gradient(it, client_of(it), x, y)
    torch.testing.assert_close(gradient.double(), naive_sum(it, x, y, 0.5) / 10, rtol=1e-4, atol=1e-7)
    assert it.steps._vmap_works is False


@pytest.mark.parametrize("way", ["default", "vmap", "loop"])
def test_removing_a_sample_with_a_huge_gradient_moves_the_sum_by_at_most_the_clip_norm(way, monkeypatch):
    for scale in (1e6, 1e30, float("inf")):
        it = private(net="logistic", dp={"noise_multiplier": 1e-12})
        choose(it, way, monkeypatch)
        client, (x, y) = client_of(it), rows_of(it, 0)
        x = x.clone()
        x[3] *= scale
        others = [i for i in range(len(y)) if i != 3]
        full, without = step_gradient(it, client, x, y), step_gradient(it, client, x[others], y[others])
        assert full.isfinite().all()
        moved = float((full - without).double().norm()) * 10
        assert moved <= 0.5 + 1e-6
        assert moved > 0.49 or scale > 1e6


def test_clip_factors_never_leave_a_norm_above_the_clip_norm():
    g = torch.randn(2000, 37) * torch.logspace(-3, 3, 2000)[:, None]
    g[5], g[6, 0], g[7] = 0, math.nan, 0
    clipped = clip_factors(g, 1.0)[:, None] * g
    assert float(clipped.double().norm(dim=1).max()) <= 1
    assert not clipped[6].any()
    torch.testing.assert_close(
        clipped[:500], torch.where(g[:500].norm(dim=1, keepdim=True) <= 1, g[:500], clipped[:500])
    )


# ---- noise and batches ----
def test_the_noise_has_the_stated_variance_and_is_that_of_trained_entries():
    it = private(dp={"noise_multiplier": 3.0, "clip": 0.2})
    client, (x, y) = client_of(it), rows_of(it, 0, 0)
    g = step_gradient(it, client, x, y).double() * 10
    n = len(g)
    assert chi2.ppf(1e-6, n) < float((g / (3.0 * 0.2)).square().sum()) < chi2.ppf(1 - 1e-6, n)
    client.private_steps = 1
    other = step_gradient(it, client, x, y).double() * 10
    assert abs(float(g @ other)) / float(g.norm() * other.norm()) < 6 / math.sqrt(n)
    with it.experiment.model.train_only(["head"]) as parameters:
        it.steps.make_gradient_function(client, Method(), parameters)(x, y)
    model = it.experiment.model
    head = model.layout.select({"head"})
    noisy = model.attach_gradient().clone()
    assert head.take(noisy).count_nonzero() == head.size == noisy.count_nonzero()


def test_each_step_of_each_client_round_attempt_and_run_has_its_own_noise():
    it = private()
    client, (x, y) = client_of(it), rows_of(it, 0, 0)
    seen = [step_gradient(it, client, x, y)]
    assert torch.equal(step_gradient(it, client, x, y), seen[0]), "the noise is a function of the step"
    for change in ("private_steps", "round", "id", "num_fits"):
        setattr(client, change, getattr(client, change) + 1)
        seen.append(step_gradient(it, client, x, y))
    it.steps.attempts[client.round] += 1
    seen.append(step_gradient(it, client, x, y))
    it.steps.key = NoiseKey(KEY, "another run")
    seen.append(step_gradient(it, client, x, y))
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_batches_are_poisson_samples():
    it = private(train={"steps": 400, "epochs": None}, rounds=1)
    client = client_of(it)
    rate = 10 / client.n
    x, y = it.fed.trainer.data.train[0].x, it.fed.trainer.data.train[0].index
    batches = list(it.steps.iterate_batches(client, None))
    sizes = torch.tensor([len(b) for _, b in batches])
    assert len(batches) == 400
    assert sizes.unique().numel() > 3
    low, high = binom.ppf([1e-6, 1 - 1e-6], 400 * client.n, rate)
    assert low <= int(sizes.sum()) <= high
    drawn = torch.zeros(client.n)
    for each, _ in batches:
        for row in each:
            drawn[(x[y] == row).flatten(1).all(1).nonzero()[0, 0]] += 1
    low, high = binom.ppf([1e-7, 1 - 1e-7], 400, rate)
    assert low <= drawn.min()
    assert drawn.max() <= high


def test_an_empty_batch_takes_a_step_with_noise_alone():
    it = private(train={"batch_size": 1, "steps": 60, "epochs": None, "momentum": 0.0}, rounds=1)
    client, sizes = client_of(it), []
    for x, y in it.steps.iterate_batches(client, None):
        sizes.append(len(y))
        if not len(y):
            assert step_gradient(it, client, x, y).count_nonzero() == it.experiment.model.layout.size
    assert 0 in sizes
    client = client_of(it)
    client.fit()
    assert client.steps == 60
    assert not client.losses


def test_full_batches_use_every_sample_in_each_step():
    it = private(train={"batch_size": "full", "epochs": 3}, rounds=1)
    client = client_of(it)
    assert [len(y) for _, y in it.steps.iterate_batches(client, None)] == [client.n] * 3
    assert it.steps.mechanism.rates == [1.0] * 7


# ---- runs ----
def run(it):
    it.reason = it.fed.run()
    return it


def test_without_noise_a_run_equals_dp_sgd_written_out():
    it = private(
        dp={"noise_multiplier": 1e-12},
        rounds=2,
        cohort={"fraction": 1.0},
        train={"momentum": 0.0, "lr": 0.1, "epochs": 2},
    )
    data, w = it.fed.trainer.data, it.w0.double()
    key, sizes = NoiseKey(KEY, "run"), data.train_sizes
    model = it.experiment.model
    for t in range(2):
        total = torch.zeros_like(w)
        for k in range(7):
            local, n = w.clone(), int(sizes[k])
            for step in range(2 * math.ceil(n / 10)):
                u = key.uniform(64 * n, "sample batch", t, 1, k, 1, 0).view(64, n)[step]
                index = data.train[k].index[u < min(10 / n, 1.0)]
                model.load(local.float())
                local -= 0.1 * naive_sum(it, data.train[k].x[index], data.train[k].y[index], 0.5) / min(10, n)
            total += (local - w) * n / int(sizes.sum())
        w += total
    model.load(it.w0)
    torch.testing.assert_close(run(it).w.double(), w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("net", ["dropout", "group"])
def test_runs_repeat_with_the_same_key(net):
    one, same = run(private("scaffold", net)), run(private("scaffold", net))
    assert one.hashes == same.hashes
    assert all("train_loss" not in row for row in one.rows), "the training loss has no noise, so it is not sent"


@pytest.mark.parametrize("net", ["mlp", "group"])  # dropout would draw from a generator that threads share
def test_results_do_not_depend_on_the_number_of_ranks(net):
    alone = run(private("scaffold", net, rounds=2))
    ranks = run_in_threads(3, {}, lambda comm: private("scaffold", net, comm=comm, rounds=2), run)
    assert ranks[0].hashes == alone.hashes


def test_a_round_that_is_repeated_after_a_rank_failure_has_other_noise():
    changes = {"rounds": 3, "faults": {"on_lost_rank": "redo"}, "cohort": {"fraction": 1.0}}
    alone = run(private(**changes))
    ranks = run_in_threads(3, {2: [8]}, lambda comm: private(comm=comm, **changes), run)
    repeated = next(row["round"] for row in ranks[0].fed.scheduler.lost_ranks.rows)
    assert ranks[0].reason == "finished"
    assert ranks[0].steps.attempts == {t: 1 + (t == repeated) for t in range(3)}
    assert ranks[0].hashes[:repeated] == alone.hashes[:repeated]
    assert ranks[0].hashes[repeated] != alone.hashes[repeated]


def test_two_fits_of_a_round_have_different_noise():
    it = private(train={"epochs": 2, "batch_size": "full"}, rounds=1)
    client, trainer = client_of(it), it.fed.trainer
    gradients = []
    client.on_step = lambda x, y: gradients.append(trainer.model.attach_gradient().clone())
    for _ in range(2):
        trainer.model.load(client.w0)
        client.fit(1)
    assert len(gradients) == 2
    assert not torch.equal(*gradients)


def test_dropout_differs_between_samples():
    it = private(net="dropout", dp={"noise_multiplier": 1e-12})
    x, y = rows_of(it, 0, 1)
    gradients = it.steps._make_vmapped(client_of(it), Method())(x.repeat(6, 1, 1, 1), y.repeat(6))
    assert len({tuple(g.tolist()) for g in gradients}) == 6


@pytest.mark.parametrize("method", ["fedprox", "feddyn", "fedper", "moon", "fedgh"])
def test_methods_that_read_samples_in_steps_only_are_permitted(method):
    it = run(private(method, rounds=2))
    assert it.fed.server.w.isfinite().all()


CONFIG = """\
rounds: 3
data: {source: digits, partition: {scheme: iid, clients: 4}}
model: {name: mlp, hidden: [8]}
method: {name: scaffold}
train: {batch_size: 32, lr: 0.1, momentum: 0.0}
privacy: {dp: {unit: sample, clip: 1.0, epsilon: 8, delta: 1.0e-4, accountant: rdp}}
"""


def command(*words):
    """Run a command of fedmpi, and return what it printed."""
    result = fedmpi(*words)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_a_run_states_epsilon_and_can_be_verified_with_its_key(tmp_path):
    config, place = tmp_path / "run.yaml", [f"output={tmp_path}", f"privacy.noise_file={tmp_path / 'noise'}"]
    config.write_text(CONFIG)
    assert "privacy: epsilon 7.9" in command("run", config, *place)
    directory = tmp_path / "run"
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((directory / "summary.json").read_text())
    assert rows[0]["epsilon"] < rows[1]["epsilon"] < rows[2]["epsilon"] == summary["epsilon"] <= 8
    assert summary["privacy"]["epsilon"] == summary["epsilon"]
    assert [client["steps_per_round"] for client in summary["privacy"]["clients"].values()] == [12] * 4
    assert "train_loss" not in rows[0]
    assert "3 rounds replayed: the same bits" in command("verify", directory, "--rounds", "all")
    command("run", config, *place, "name=short", "privacy.dp.max_epsilon=7")
    short = json.loads((tmp_path / "short" / "summary.json").read_text())
    assert short["exit_reason"] == "budget_spent: a further round would exceed epsilon 7"
    assert short["rounds"] < 3
    assert short["epsilon"] <= 7


def test_a_resumed_run_has_other_noise_in_rounds_that_it_repeats(tmp_path):
    config, place = tmp_path / "run.yaml", [f"output={tmp_path}", f"privacy.noise_file={tmp_path / 'noise'}"]
    config.write_text(CONFIG.replace("epsilon: 8", "noise_multiplier: 1.0"))
    command("run", config, *place)
    directory = tmp_path / "run"
    before = json.loads((directory / "summary.json").read_text())["epsilon"]
    (directory / "releases.jsonl").open("a").write('{"round": 3, "attempt": 0}\n')  # the run was killed in round 3
    command("resume", directory, "rounds=4")
    rows = [json.loads(line) for line in (directory / "releases.jsonl").read_text().splitlines()]
    assert rows[-2:] == [{"round": 3, "attempt": 0}, {"round": 3, "attempt": 1}]
    guarantee = json.loads((directory / "summary.json").read_text())["privacy"]
    q, n = guarantee["clients"]["0"]["sampling_rate"], 5 * 12  # both attempts count
    assert guarantee["epsilon"] > before
    assert guarantee["clients"]["0"]["epsilon"] == pytest.approx(
        compute_epsilon(1.0, 1e-4, Sampling("poisson", q), n, "rdp"), rel=0.02
    )


def test_the_noise_of_a_run_cannot_change_when_it_is_resumed(tmp_path):
    config, place = tmp_path / "run.yaml", [f"output={tmp_path}", f"privacy.noise_file={tmp_path / 'noise'}"]
    config.write_text(CONFIG)
    command("run", config, *place)
    result = fedmpi("resume", tmp_path / "run", "rounds=4")
    assert result.returncode == 2
    assert "the noise that reaches privacy.dp.epsilon depends on the total number of rounds" in result.stderr
    result = fedmpi("resume", tmp_path / "run", "rounds=4", "checkpoint.changes=accept")
    assert result.returncode == 2
    assert "began with noise for another number of rounds" in result.stderr


# ---- refusals ----
@pytest.mark.parametrize(
    ("method", "words"),
    {
        "fedpac": "accumulators|label counts",
        "ccvr": "label counts",
        "fedlc": "client.label_counts",
        "fedala": "client.batches",
        "knnper": "client.forward_batches",
        "perfedavg": "hook step",
        "feddecorr": "loss_is_sample_mean",
        "fedproto": "accumulators",
        "fedrep": "length of local training",
    }.items(),
)
def test_methods_that_read_samples_otherwise_are_refused_at_the_start(method, words):
    with pytest.raises(UserError, match=f"method {method} is not allowed with privacy.dp.unit: sample: it .*({words})"):
        private(method)


def test_a_method_that_takes_more_steps_than_configured_is_refused():
    with pytest.raises(UserError, match="round 0, client 0: method Ditto takes more steps in a round than"):
        run(private("ditto"))


@dataclass(frozen=True)
class Reading(Method):
    """A method that hides from the check at the start that it reads samples."""

    member: str = "batches"

    def train(self, client):
        """Read samples."""
        x, y = client.w.new_zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64)
        arguments = {"mean_loss": [client.w], "grad": [x, y], "hessian_vector_product": [x, y, client.w]}
        value = getattr(client, self.member)
        if callable(value):
            list(value(*arguments.get(self.member, [])))
        client.fit()
        return State()


@pytest.mark.parametrize(
    "member", ["batches", "forward_batches", "label_counts", "grad", "mean_loss", "hessian_vector_product"]
)
def test_members_that_read_samples_outside_of_steps_raise(member):
    with pytest.raises(
        UserError, match=f"client 0: method Reading uses client.{member}, which reads the client's samples"
    ):
        run(private(f"{__file__}:Reading", options={"member": member}, cohort={"fraction": 1.0}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"accumulate": 2}}, "train.accumulate: 2"),
        ({"compute": {"graphs": True}}, "compute.graphs: true"),
        ({"compute": {"clients_per_pass": 3}}, "compute.clients_per_pass: 3"),
        ({"analysis": ["drift"]}, "analysis: drift"),
        ({"evaluate": {"protocol": ["global", "ft(1)"]}}, r"evaluate.protocol: ft\(1\)"),
        ({"evaluate": {"best": "loss"}, "data": {"validation": 0.2}}, "evaluate.best.metric: loss"),
        ({"task": {"name": "classification", "class_weights": "balanced"}}, "task.class_weights: balanced"),
        ({"model": {"name": "resnet18"}}, "layer .* mixes the samples of a batch.*set model.norm: gn|model.norm: gn"),
        ({"privacy": {"dp": DP | {"delta": 0.1}}}, "delta: 0.1 is not allowed; must be below 1 /"),
    ],
)
def test_settings_that_release_more_are_refused(changes, words):
    tree = {"model": NETS["mlp"], "evaluate": {"protocol": ["global"]}, "privacy": {"dp": DP}, **changes}
    with pytest.raises(UserError, match=words):
        prepare(settings("fedavg", **tree))


def test_a_module_that_changes_buffers_is_refused():
    with pytest.raises(UserError, match="model Counting has changed its float buffers"):
        run(private(net={"name": f"{__file__}:counting_net"}))


# ---- accounting ----
def test_epsilon_counts_the_steps_of_all_rounds_in_which_a_client_takes_part():
    it = private(rounds=6, dp={"noise_multiplier": 2.0})
    mechanism = it.steps.mechanism
    cohorts = [it.fed.scheduler.cohort(t) for t in range(6)]
    assert [sum(k in each for each in cohorts) for k in range(7)] == list(mechanism.participations)
    guarantee = SampleGuarantee(mechanism, cohorts.__getitem__)
    rounds = [0, 1, 1, 3]  # round 1 was repeated
    naive = {}
    for k in sorted({k for t in rounds for k in cohorts[t]}):
        n = int(it.fed.trainer.data.train_sizes[k])
        steps = math.ceil(n / 10) * sum(k in cohorts[t] for t in rounds)
        naive[k] = compute_epsilon(2.0, 1e-3, Sampling("poisson", min(10 / n, 1.0)), steps, "rdp")
    stated = guarantee.epsilons(rounds)
    assert stated.keys() == naive.keys()
    assert all(naive[k] - 1e-9 <= stated[k] <= naive[k] * 1.02 for k in naive)
    assert guarantee.epsilon(rounds) == max(stated.values())
    assert guarantee.epsilon([]) == 0
    made = sample_privacy.make_guarantee(it.experiment.settings, it.steps)
    assert made.epsilons(rounds) == stated
    described = sample_privacy.describe_guarantee(made, rounds)
    assert {int(k): client["epsilon"] for k, client in described["clients"].items()} == stated
    assert described["epsilon"] == max(stated.values())


def test_epsilon_determines_the_noise_of_each_client():
    mechanism = SampleMechanism(1.0, 1e-4, [0.02, 0.5, 1.0], [50, 2, 1], [10, 10, 5], epsilon=2.0, accountant="rdp")
    multipliers = [mechanism.noise_multiplier_of(k) for k in range(3)]
    assert len({*multipliers}) == 3
    for k, rounds in enumerate((10, 10, 5)):
        assert 1.98 <= mechanism.epsilon_of(k, rounds) <= 2.0
    assert mechanism.largest_epsilon({0: 10, 1: 10, 2: 6}) > 2.0, "one round was repeated"


def test_rates_are_rounded_up():
    assert [round_up(q) for q in (0.0300699, 0.123, 0.12301, 1.0, 0.9999, 1 / 3)] == [
        0.0301,
        0.123,
        0.124,
        1.0,
        1.0,
        0.334,
    ]


def test_delta_must_be_below_the_inverse_of_the_number_of_samples():
    check_delta(1 / 1001, [10, 1000])
    with pytest.raises(UserError, match=r"delta: 0.001 is not allowed; must be below .* and site b has 1000; set"):
        check_delta(0.001, [10, 1000], ["site a", "site b"])
