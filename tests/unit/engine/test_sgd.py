"""The clients' optimisers have the bits of torch's."""

import copy

import pytest
import torch

from fedmpi.engine.local.client_optimizers import LocalOptimizer, num_optimizer_slots
from fedmpi.engine.local.local_training_config import LocalTrainingConfig

SGDS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
}
ALL = {
    **SGDS,
    "adam": {"optim": "adam", "betas": (0.8, 0.95), "eps": 1e-6},
    "adamw": {"optim": "adamw", "betas": (0.9, 0.999), "eps": 1e-8},
}


def torch_optimiser(how, p, **options):
    """Return torch's own optimiser for one parameter; its fused SGD kernel wants all parameters to start at once."""
    options = {"lr": 0.01, "weight_decay": how.weight_decay, "fused": True, **options}
    if how.optim == "sgd":
        return torch.optim.SGD([p], **options, momentum=how.momentum, nesterov=how.nesterov)
    kind = torch.optim.AdamW if how.optim == "adamw" else torch.optim.Adam
    return kind([p], **options, betas=how.betas, eps=how.eps)


@pytest.mark.parametrize("weight_decay", [0.0, 5e-2])
@pytest.mark.parametrize("name", ALL)
def test_steps_have_the_bits_of_torch(name, weight_decay):
    """Parameters are channels-last views of one vector; one has no gradient, and one has its first in step 2."""
    torch.manual_seed(0)
    how, flat = LocalTrainingConfig(**ALL[name], weight_decay=weight_decay), torch.randn(72)
    ours = [torch.nn.Parameter(flat[i : i + 24].view(2, 3, 4, 1).permute(0, 3, 1, 2)) for i in (0, 24, 48)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimiser, references = LocalOptimizer(how, ours, 0.01), [torch_optimiser(how, p) for p in theirs]
    for step in range(60):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            g = torch.randn(p.shape).contiguous(memory_format=torch.channels_last)
            q.grad = g if i == 0 or (i == 1 and step >= 2) else None
            p.grad = None if q.grad is None else q.grad.clone()
        for each in (optimiser, *references):
            each.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_stored_state_is_continued(name):
    """Ten fits of three steps, each with the state of the previous one, have the bits of thirty steps."""
    torch.manual_seed(0)
    how, whole = LocalTrainingConfig(**ALL[name]), [torch.nn.Parameter(torch.randn(4, 5)) for _ in range(2)]
    cut = copy.deepcopy(whole)
    kept = [[torch.zeros(4, 5) for _ in cut] for _ in range(num_optimizer_slots(how))], [torch.zeros(()) for _ in cut]
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
def test_half_precision_models_are_trained(name, kind):
    """torch 2.13's fused kernel on a CPU does not update most of their weights."""
    how = LocalTrainingConfig(**SGDS[name], weight_decay=0.1)
    ours = torch.nn.Parameter(torch.linspace(1, 2, 40).to(kind))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimiser, reference = (
        LocalOptimizer(how, [ours], 0.1),
        torch_optimiser(how, theirs, lr=0.1, fused=False, foreach=True),
    )
    for step in range(4):
        ours.grad, theirs.grad = (torch.full((40,), 0.25 * (step + 1), dtype=kind) for _ in range(2))
        optimiser.step()
        reference.step()
        assert torch.equal(ours, theirs)
    assert (ours < torch.linspace(1, 2, 40)).all()
