"""Local training (section train) equals a loop over torch's own optimisers and torch.nn.utils."""

from itertools import count

import pytest
import torch
from helpers import CPU, federated, run_experiment, settings
from torch.nn.functional import cross_entropy

from fedmpi.common import seeds
from fedmpi.engine import scheduler
from fedmpi.engine.local.local_training_config import LocalTrainingConfig
from fedmpi.runtime import build

ADAMW = {"optim": "adamw", "momentum": None, "lr": 0.003}
TRAIN = {
    "steps": {"steps": 7},
    "more steps than a pass": {"steps": 13, "drop_last": True},
    "two passes": {"epochs": 2, "batch_size": 7},
    "full batch": {"steps": 3, "batch_size": "full"},
    "nesterov": {"nesterov": True, "weight_decay": 1e-3},
    "adam": {"optim": "adam", "momentum": None, "lr": 0.003, "weight_decay": 1e-2, "betas": [0.8, 0.99]},
    "adamw": ADAMW,
    "clip_norm": {"clip_norm": 0.5},
    "clip_norm, adamw": {"clip_norm": 0.1, **ADAMW},
    "adamw, kept": {"persist_optimizer": True, "steps": 4, **ADAMW},
    "sgd, kept": {"persist_optimizer": True},
}


def optimiser(module, train):
    """Return torch's optimiser for these settings."""
    common = {"params": module.parameters(), "lr": train.lr, "weight_decay": train.weight_decay}
    if train.optim == "sgd":
        return torch.optim.SGD(**common, momentum=train.momentum, nesterov=train.nesterov)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[train.optim]
    return kind(**common, betas=tuple(train.betas), eps=train.eps)


def batches(n, train, g):
    """Yield the rows of one client's steps in a round."""
    size = n if train.batch_size == "full" else train.batch_size
    left = train.steps
    for number in count():
        rows = torch.arange(n) if size == n and train.batch_size == "full" else torch.randperm(n, generator=g)
        cut = [each for each in rows.split(size) if len(each) == size or not train.drop_last]
        if left is not None:
            yield from cut[:left]
            left -= len(cut)
            if left <= 0 or not cut:
                return
        else:
            yield from cut
            if number + 1 >= train.epochs:
                return


def run_naive_loop(config, data):
    """Return FedAvg's global weights after the last round, tensor by tensor."""
    made = build.make_experiment(config, data, CPU)
    module, train = made.net.module, config.train
    state = {name: value.clone() for name, value in module.state_dict().items()}
    kept = {}
    for t in range(config.rounds):
        members = scheduler.draw_cohort(config.seed, t, data.clients, config.cohort.fraction)
        ends = []
        for k in members:
            module.load_state_dict(state)
            x, y = data.train[k].x[data.train[k].index], data.train[k].y[data.train[k].index]
            step = optimiser(module, train)
            if train.persist_optimizer and k in kept:
                step.load_state_dict(kept[k])
            for rows in batches(len(x), train, seeds.torch_generator(config.seed, "batches", t, k, 0)):
                step.zero_grad()
                cross_entropy(module(x[rows]), y[rows]).backward()
                if train.clip_norm:
                    torch.nn.utils.clip_grad_norm_(module.parameters(), train.clip_norm)
                step.step()
            kept[k] = step.state_dict()
            ends.append({name: value.clone() for name, value in module.state_dict().items()})
        n = data.train_sizes[members]
        for name in state:
            state[name] = sum(p * end[name].double() for p, end in zip(n / n.sum(), ends, strict=True)).float()
    return state


WHERE = [(name, "mlp") for name in TRAIN] + [(name, "cnn") for name in ("adamw, kept", "clip_norm")]


@pytest.mark.parametrize(("name", "net"), WHERE)
def test_local_training_equals_a_naive_loop(name, net):
    """The tolerance is for sums in a different order, and convolutions in a different memory format."""
    config = settings("fedavg", net, train=TRAIN[name], rounds=4, evaluate={"protocol": ["global"]})
    data = federated()
    it = run_experiment(config, data)
    final = it.experiment.model.state_dict(it.w, it.b)
    for key, value in run_naive_loop(config, data).items():
        torch.testing.assert_close(final[key], value, rtol=1e-3, atol=3e-5)
    assert not torch.equal(it.w, it.w0)


def test_numbers_of_passes_and_steps():
    """(passes, steps) of 25 samples in batches of 10, unless the options say otherwise."""
    for options, asked, expected in [
        ({"epochs": 2}, {}, (2, 6)),
        ({"epochs": 0}, {}, (0, 0)),
        ({"steps": 1}, {}, (1, 1)),
        ({"steps": 3}, {}, (1, 3)),
        ({"steps": 7}, {}, (3, 7)),
        ({"steps": 5, "drop_last": True}, {}, (3, 5)),
        ({"steps": 5, "drop_last": True, "batch_size": 30}, {}, (0, 0)),  # it has no batch
        ({"steps": 5, "batch_size": None}, {}, (5, 5)),
        ({"epochs": 2, "batch_size": 5}, {"batches_per_step": 2}, (2, 4)),  # an incomplete group is left out
        ({"epochs": 2, "batch_size": 20}, {"batches_per_step": 3}, (2, 2)),  # unless it is the only one
        ({"steps": 4}, {"epochs": 1}, (1, 3)),  # what a method asks for comes first
    ]:
        config = LocalTrainingConfig(**{"epochs": None, "batch_size": 10, **options})
        assert config.passes_and_steps(25, **asked) == expected, options


def test_clipping_uses_the_norm_of_trained_parameters():
    """FedBABU trains the body: the norm is that of the body's gradient, and the head does not change."""
    config = settings("fedbabu", "mlp", rounds=1, train={"clip_norm": 0.1, "momentum": 0.0, "steps": 1})
    it = run_experiment(config)
    moved = it.w - it.w0
    assert not it.experiment.model.layout.select({"head"}).take(moved).any()
    fed = it.fed
    k = fed.states.client_context(
        0, 1, fed.config.learning_rate(1), fed.transport.broadcast_copy, fed.transport.empty_download
    )
    k.fit()
    assert float((k.w - k.w0).norm()) == pytest.approx(0.1 * config.train.lr, rel=1e-4)


def test_evaluation_does_not_change_stored_optimiser_state():
    """Fine-tuning before an evaluation has its own optimiser; phases of a round share the stored state."""
    train = {**ADAMW, "persist_optimizer": True}
    plain = run_experiment(settings("fedrep", "mlp", train=train, evaluate={"protocol": ["personal"]}))
    tuned = run_experiment(settings("fedrep", "mlp", train=train, evaluate={"protocol": ["personal", "ft(1)"]}))
    assert plain.hashes == tuned.hashes
    for k in plain.fed.states.rows:
        assert torch.equal(plain.fed.states.rows[k], tuned.fed.states.rows[k])
    kept = plain.client_state(plain.rows[-1]["cohort"][0])
    segments = plain.experiment.model.layout.segments
    steps = {s.group: float(n) for s, n in zip(segments, kept._optim_steps, strict=True)}
    assert steps["head"] == 2 * steps["body"] > 0  # two passes of the head for each of the body
