"""Two weights: what the paths come to, from closed forms and from the specification's numbers."""

import json

import pytest
import torch

from fedmpi.analysis import toy


def test_the_gradient_is_that_of_the_loss():
    w = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(toy.loss(w), w)
    torch.testing.assert_close(toy.local(w.detach()), g)


def test_fedprox_has_a_closed_form_at_every_step():
    """Linear descent: w_t = w* (1 - (1 - lr (curvature + mu))^t)."""
    rate = 1 - toy.LR * (toy.CURVED + toy.MU)
    rest = toy.MINIMUM * toy.CURVED / (toy.CURVED + toy.MU)
    t = torch.arange(toy.STEPS + 1)[:, None]
    torch.testing.assert_close(toy.path(toy.fedprox), rest * (1 - rate**t))


def test_fedsol_rests_on_the_line_to_the_minimum():
    end = toy.path(toy.fedsol)[-1]
    assert end.tolist() == pytest.approx([0.645397, 0.642035], abs=5e-7)  # after 4000 steps
    rest = toy.MINIMUM * (1 - toy.RHO / toy.MINIMUM.norm())
    assert rest.tolist() == pytest.approx([0.6464466, 0.6464466], abs=5e-8)
    assert toy.fedsol(rest).norm() < 1e-12
    assert toy.fedprox(rest).norm() > 0.1


def test_the_first_step_is_that_of_the_local_loss():
    """At the global model g_p = 0, and nothing is perturbed."""
    zero = torch.zeros(2, dtype=torch.float64)
    assert torch.equal(toy.fedsol(zero), toy.local(zero))


def test_what_is_written(tmp_path):
    said = []
    toy.analyse(tmp_path / "new", said.append)
    facts = json.loads((tmp_path / "new" / "toy.json").read_text())
    assert [each["method"] for each in facts["methods"]] == ["FedProx", "FedSOL"]
    prox, sol = facts["methods"]
    assert (prox["cosine"], sol["cosine"]) == (pytest.approx(0.8222, abs=1e-4), pytest.approx(1, abs=1e-5))
    for each in facts["methods"]:
        assert facts["paths"][each["method"]][-1] == each["end"]
        assert facts["paths"][each["method"]][0] == [0, 0]
    assert said[0].split()[:3] == ["method", "u", "v"]
    assert (tmp_path / "new" / "toy.png").stat().st_size > 10_000
