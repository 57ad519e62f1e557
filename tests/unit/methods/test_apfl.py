"""APFL: the mixture of a client's own model and the global one equals computations by hand and in a loop."""

import copy

import pytest
import torch
from helpers import run_experiment, settings
from naive import NET, assert_is_fedavg, batches, flat, loss_of, module_of, rows_of
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def round_by_hand(module, steps, v, v_b, alpha, lr, adapt):
    """Make a client's steps with torch: change module, v (a list) and v_b (its buffers by name), and return alpha."""
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
def test_three_rounds_equal_a_loop(adapt, alpha, drop_last, fraction):
    """Batches have one sample, or with drop_last some clients make no step; absent clients keep v and alpha."""
    train = {"batch_size": 22 if drop_last else 11, "drop_last": drop_last, "epochs": 2}
    train |= {"lr": 0.5, "schedule": "exponential", "decay": 0.8}
    options, cohort = {"alpha": alpha, "adapt": adapt}, {"fraction": fraction}
    it = run_experiment(settings("apfl", "norm", model=NET, options=options, cohort=cohort, train=train))
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
            size = len(it.experiment.data.train[k])
            n += size
            mean = {name: mean.get(name, 0) + size * value for name, value in module.state_dict().items()}
        module.load_state_dict({name: value / n for name, value in mean.items()})
        assert row["alpha"] == pytest.approx(sum(own[k][2] for k in row["cohort"]) / len(row["cohort"]), abs=1e-11)
    w, b = flat(module), dict(copy.deepcopy(module).named_buffers())
    torch.testing.assert_close(it.w, w, rtol=0, atol=1e-11)
    losses = {line["client"]: line["loss"] for line in it.lines if line["round"] == 2}
    for k in it.fed.states.rows:
        v, share = it.client_state(k).v, it.client_state(k).alpha.item()
        torch.testing.assert_close(v, parameters_to_vector(own[k][0]), rtol=0, atol=1e-11)
        assert share == pytest.approx(own[k][2], abs=1e-11)
        vector_to_parameters(share * v + (1 - share) * w, module.parameters())
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(share * own[k][1][name] + (1 - share) * b[name])
        assert losses[k] == pytest.approx(loss_of(module, rows_of(it, k, "test")), abs=1e-9)


@pytest.mark.parametrize(("adapt", "model"), [("round", {}), ("step", {"model": NET}), ("never", {"model": NET})])
def test_the_global_model_has_the_bits_of_fedavg(adapt, model):
    """This holds for any alpha without dropout: the gradient at u leaves batch statistics alone."""
    assert_is_fedavg("apfl", options={"adapt": adapt}, train={"momentum": 0.0}, **model)
