"""APFL: the mixture of a client's own model and the global one, by hand and against a loop."""

import copy

import pytest
import torch
from helpers import play, prepare, settings
from naive import NET, assert_is_fedavg, batches, flat, loss_of, module_of, rows_of
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedmpi.common import seeds
from fedmpi.data.dataset import Dataset
from fedmpi.runtime import build_data


def centres(root, *, c):
    """A data source: one sample a bowl; client k has the bowls 1 (x - c_kj)^2 / 2."""
    site = torch.arange(len(c)).repeat_interleave(torch.tensor([len(row) for row in c]))
    x = torch.tensor([[1.0, value] for row in c for value in row])
    return Dataset(x, 0 * x[:, 0], x, 0 * x[:, 0], classes=1, site=site, test_site=site)


OWN = {  # v_1, v_2, alpha_1, alpha_2 after either round of the test below; computed in fractions
    "never": ([0.14625, -0.04625, 0.5, 0.5], [0.28059140625, -0.09490390625, 0.5, 0.5]),
    "round": ([0.14625, -0.04625, 0.5, 0.5], [0.28132542205943, -0.09475536389417, 0.504055546875, 0.515018046875]),
    "step": ([0.14625, -0.04625, 0.490375, 0.500375], [0.27878169584, -0.094786425863, 0.494300736765, 0.51490884909]),
}


@pytest.mark.parametrize("adapt", OWN)
def test_two_clients_two_rounds(quadratic, adapt):
    """Client 1 steps towards 1, then 2, client 2 towards -1, then 0, by a seed that draws them so. lr .1, alpha 1/2.

    w = .1, then .181. A client uses alpha v + (1 - alpha) w with the w that comes out of the round.
    """

    def order(seed, t, k):
        return torch.randperm(2, generator=seeds.generator(seed, "batches", t, k, 0)).tolist()

    seed = next(s for s in range(1000) if all(order(s, t, k) == [0, 1] for t in (0, 1) for k in (0, 1)))
    data = {"source": f"{__file__}:centres", "c": [[1.0, 2.0], [-1.0, 0.0]]}
    data["partition"] = {"scheme": "site", "clients": 2}
    changes = {"data": data, "train": {"epochs": 1, "batch_size": 1, "lr": 0.1}, "evaluate": {"protocol": ["personal"]}}
    for rounds, w, (v1, v2, a1, a2) in zip((1, 2), (0.1, 0.181), OWN[adapt], strict=True):
        config = quadratic("apfl", start=(0.0,), seed=seed, rounds=rounds, options={"adapt": adapt}, **changes)
        it = prepare(config, build_data.partitioned(config))
        it.fed.run()
        states = [it.kept(k) for k in (0, 1)]
        assert [state.v.item() for state in states] == pytest.approx([v1, v2], abs=1e-11)
        assert [state.alpha.item() for state in states] == pytest.approx([a1, a2], abs=1e-11)
        assert it.w.item() == pytest.approx(w, abs=1e-11)
        assert it.rows[-1]["alpha"] == pytest.approx((a1 + a2) / 2, abs=1e-11)
        shown = {line["client"]: line["x0"] for line in it.lines if line["round"] == rounds - 1}
        assert shown == pytest.approx({0: a1 * v1 + (1 - a1) * w, 1: a2 * v2 + (1 - a2) * w}, abs=1e-11)


def round_by_hand(module, steps, v, v_b, alpha, lr, adapt):
    """A client's steps with torch: changes module, v (a list) and v_b (its buffers by name), returns alpha."""
    names = [name for name, _ in module.named_parameters()]
    for step, (x, y) in enumerate(steps):
        w = list(module.parameters())
        u = [alpha * a + (1 - alpha) * b for a, b in zip(v, w, strict=True)]
        f = functional_call(module, dict(zip(names, u, strict=True)) | v_b, x)  # which moves v_b in place
        at_u = torch.autograd.grad(cross_entropy(f, y), u)
        at_w = torch.autograd.grad(cross_entropy(module(x), y), w)
        slope = sum(((a - b) * g).sum().item() for a, b, g in zip(v, w, at_u, strict=True))
        for a, b, g, h in zip(v, w, at_w, at_u, strict=True):
            b.data -= lr * g
            a -= lr * alpha * h
        if adapt == "step" or (adapt == "round" and step == 0):
            alpha = min(max(alpha - lr * slope, 0.0), 1.0)
    return alpha


@pytest.mark.parametrize(
    ("adapt", "alpha", "drop_last", "fraction"),
    [
        ("round", 0.5, False, 0.6),
        ("step", 0.3, True, 0.6),
        ("never", 0.7, True, 0.6),
        ("step", 0.5, False, 0.15),
        ("round", 1.0, False, 0.6),
    ],
)
def test_three_rounds_against_a_loop(adapt, alpha, drop_last, fraction):
    """Batches of one, or with drop_last clients that make no step; cohorts of one; who is absent keeps v and alpha."""
    train = {"batch_size": 22 if drop_last else 11, "drop_last": drop_last, "epochs": 2}
    train |= {"lr": 0.5, "schedule": "exponential", "decay": 0.8}
    options, cohort = {"alpha": alpha, "adapt": adapt}, {"fraction": fraction}
    it = play(settings("apfl", "norm", model=NET, options=options, cohort=cohort, train=train))
    module = module_of(it, it.w0, it.b0).train()
    own = {
        k: [[p.detach().clone() for p in module.parameters()], dict(copy.deepcopy(module).named_buffers()), alpha]
        for k in range(7)
    }
    for t, row in enumerate(it.rows):
        before, n, mean = copy.deepcopy(module.state_dict()), 0, {}
        for k in row["cohort"]:
            module.load_state_dict(before)
            own[k][2] = round_by_hand(module, batches(it, k, t), *own[k], 0.5 * 0.8**t, adapt)
            size = len(it.made.data.train[k])
            n += size
            mean = {name: mean.get(name, 0) + size * value for name, value in module.state_dict().items()}
        module.load_state_dict({name: value / n for name, value in mean.items()})
        assert row["alpha"] == pytest.approx(sum(own[k][2] for k in row["cohort"]) / len(row["cohort"]), abs=1e-11)
    w, b = flat(module), dict(copy.deepcopy(module).named_buffers())
    torch.testing.assert_close(it.w, w, rtol=0, atol=1e-11)
    losses = {line["client"]: line["loss"] for line in it.lines if line["round"] == 2}
    for k in it.fed.states.rows:
        v, share = it.kept(k).v, it.kept(k).alpha.item()
        torch.testing.assert_close(v, parameters_to_vector(own[k][0]), rtol=0, atol=1e-11)
        assert share == pytest.approx(own[k][2], abs=1e-11)
        vector_to_parameters(share * v + (1 - share) * w, module.parameters())
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(share * own[k][1][name] + (1 - share) * b[name])
        assert losses[k] == pytest.approx(loss_of(module, rows_of(it, k, "test")), abs=1e-9)


@pytest.mark.parametrize(("adapt", "model"), [("round", {}), ("step", {"model": NET}), ("never", {"model": NET})])
def test_the_global_model_is_fedavg_bit_for_bit(adapt, model):
    """Whatever alpha is, as long as the net does not draw: the gradient at u leaves batch statistics alone."""
    assert_is_fedavg("apfl", options={"adapt": adapt}, train={"momentum": 0.0}, **model)
