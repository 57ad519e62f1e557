"""The clients' optimisers are torch's: to the bit where a kernel of torch is called, else to rounding."""

import copy

import pytest
import torch

from fedmpi.engine.local.local_training_config import LocalTrainingConfig
from fedmpi.engine.local.optimizers import LocalOptimizer, slots_of

SGDS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
}
OTHERS = {
    "adam": {"optim": "adam", "betas": (0.8, 0.95), "eps": 1e-6},
    "adamw": {"optim": "adamw", "betas": (0.9, 0.999), "eps": 1e-8},
    "rmsprop": {"optim": "rmsprop", "alpha": 0.9, "eps": 1e-7},
    "rmsprop, momentum": {"optim": "rmsprop", "alpha": 0.99, "momentum": 0.5},
    "adagrad": {"optim": "adagrad", "eps": 1e-10},
}
TO_THE_BIT = (*SGDS, "adam", "adamw")


def torchs(how, p):
    """torch's own, of one parameter: its fused kernel of SGD wants all of them to begin at once."""
    common = {"lr": 0.01, "weight_decay": how.weight_decay}
    if how.optim == "sgd":
        more = {"momentum": how.momentum, "nesterov": how.nesterov}
        return torch.optim.SGD([p], **common, **more, fused=True)
    if how.optim in ("adam", "adamw"):
        kind = torch.optim.AdamW if how.optim == "adamw" else torch.optim.Adam
        return kind([p], **common, betas=how.betas, eps=how.eps, fused=True)
    if how.optim == "rmsprop":
        return torch.optim.RMSprop([p], **common, alpha=how.alpha, eps=how.eps, momentum=how.momentum)
    return torch.optim.Adagrad([p], **common, eps=how.eps)


@pytest.mark.parametrize("weight_decay", [0.0, 5e-2])
@pytest.mark.parametrize("name", [*SGDS, *OTHERS])
def test_it_is_torchs(name, weight_decay):
    """Over channels-last views of one vector; one has no gradient, and one its first in step 2."""
    torch.manual_seed(0)
    how = LocalTrainingConfig(**{**SGDS, **OTHERS}[name], weight_decay=weight_decay)
    flat = torch.randn(72)
    ours = [torch.nn.Parameter(flat[i : i + 24].view(2, 3, 4, 1).permute(0, 3, 1, 2)) for i in (0, 24, 48)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimiser, references = LocalOptimizer(how, ours, 0.01), [torchs(how, p) for p in theirs]
    for step in range(60):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            g = torch.randn(p.shape).contiguous(memory_format=torch.channels_last)
            q.grad = g if i == 0 or (i == 1 and step >= 2) else None
            p.grad = None if q.grad is None else q.grad.clone()
        optimiser.step()
        for reference in references:
            reference.step()
        for p, q in zip(ours, theirs, strict=True):
            if name in TO_THE_BIT:
                assert torch.equal(p, q)
            else:
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*SGDS, *OTHERS])
def test_what_is_kept_goes_on(name):
    """Ten fits of three steps each with what the one before left are thirty steps of one optimiser, bit for bit."""
    torch.manual_seed(0)
    how = LocalTrainingConfig(**{**SGDS, **OTHERS}[name])
    whole = [torch.nn.Parameter(torch.randn(4, 5)) for _ in range(2)]
    cut = copy.deepcopy(whole)
    kept = [[torch.zeros(4, 5) for _ in cut] for _ in range(slots_of(how))], [torch.zeros(()) for _ in cut]
    one = LocalOptimizer(how, whole, 0.01)
    for fit in range(10):
        again = LocalOptimizer(how, cut, 0.01, kept)
        for _ in range(3):
            for p, q in zip(whole, cut, strict=True):
                p.grad = torch.randn(4, 5)
                q.grad = p.grad.clone()
            if fit < 4:  # its second parameter comes later
                whole[1].grad = cut[1].grad = None
            one.step()
            again.step()
        assert all(torch.equal(p, q) for p, q in zip(whole, cut, strict=True))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SGDS)
def test_models_of_half_a_float_are_trained(name, kind):
    """torch 2.13's fused kernel on a CPU does not move them, but for the last few weights of a tensor."""
    how = SGDS[name]
    ours = torch.nn.Parameter(torch.linspace(1, 2, 40).to(kind))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimiser = LocalOptimizer(LocalTrainingConfig(**how, weight_decay=0.1), [ours], 0.1)
    reference = torch.optim.SGD([theirs], lr=0.1, weight_decay=0.1, foreach=True, **how)
    for step in range(4):
        ours.grad, theirs.grad = (torch.full((40,), 0.25 * (step + 1), dtype=kind) for _ in range(2))
        optimiser.step()
        reference.step()
        assert torch.equal(ours, theirs)
    assert (ours < torch.linspace(1, 2, 40)).all()
