"""Frozen parameters exist once on every rank and are part of no message; any method can train a head on a backbone."""

import pytest
import torch
from helpers import NETS, NETS_OF, run_experiment, settings, small_settings
from torch import nn

from fedmpi.common import registry
from fedmpi.methods import registry as methods
from fedmpi.models import KIND
from fedmpi.runtime import rank_agreement

HERE = __file__


def with_backbone(input_shape, classes, width: int = 1000, inner: dict | None = None):
    """Build a frozen linear layer with about 1000 weights per pixel, followed by a small network that is trained."""
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(input_shape).numel(), width), nn.Tanh())
    backbone.requires_grad_(False)
    if inner is None:
        return nn.Sequential(backbone, nn.Linear(width, classes))
    options = {k: v for k, v in inner.items() if k != "name"}
    made = registry.make_component(KIND, registry.Selection(inner["name"], options))
    shape = (1, 8, 8)
    return nn.Sequential(backbone, nn.Unflatten(1, shape), *layers(made(shape, classes)))


def layers(module):
    return module if isinstance(module, nn.Sequential) else [module]


@pytest.mark.parametrize("method", sorted(methods))
def test_no_method_changes_frozen_parameters(method):
    inner = NETS_OF.get(method, NETS)["mlp"]
    model = {"name": f"{HERE}:with_backbone", "width": 64, "inner": inner}
    it = run_experiment(small_settings(method, rounds=2, model=model))
    frozen = it.experiment.model.frozen
    assert sum(p.numel() for p in frozen.values()) == 64 * 64 + 64
    fresh = run_experiment(small_settings(method, rounds=0, model=model)).experiment.model.frozen
    assert list(fresh) == list(frozen)
    assert all(torch.equal(p, fresh[name]) for name, p in frozen.items())
    assert not any("backbone" in s.name or s.stop - s.start == 4096 for s in it.experiment.model.layout.segments)
    assert it.experiment.model.w.numel() == it.experiment.model.layout.size < 4096 + 2000
    assert not torch.equal(it.w, it.w0) or method in ("local", "fedproto", "fedfomo")


def test_clients_with_a_frozen_backbone_are_trained_at_once():
    tree = {"rounds": 2, "model": {"name": f"{HERE}:with_backbone", "width": 64}}
    together, alone = (run_experiment(settings(compute={"clients_per_pass": pack}, **tree)) for pack in (3, 1))
    torch.testing.assert_close(together.w, alone.w, rtol=1e-4, atol=1e-6)


def test_the_digest_depends_on_names_shapes_dtypes_and_values():
    x = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.0)}
    same = rank_agreement.compute_frozen_digest(x)
    assert set(same) == {"(frozen parameters)"}
    assert rank_agreement.compute_frozen_digest({k: v.clone() for k, v in x.items()}) == same
    assert rank_agreement.compute_frozen_digest({}) == {}
    others = [
        {**x, "b": torch.tensor(1.0).nextafter(torch.tensor(2.0))},
        {**x, "a": x["a"].view(3, 2)},
        {"c": x["a"], "b": x["b"]},
        {**x, "b": torch.tensor(1.0, dtype=torch.bfloat16)},
        {"b": x["b"]},
    ]
    assert (
        len({*same.values(), *(v for other in others for v in rank_agreement.compute_frozen_digest(other).values())})
        == 6
    )
