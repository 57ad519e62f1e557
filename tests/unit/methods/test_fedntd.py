"""FedNTD: distillation of the received model's logits of the classes that are not true."""

import pytest
import torch
from naive import assert_trains_along, experiment, gradient, rows_of
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from fedmpi.methods._terms import distillation
from fedmpi.methods.fedntd import not_true

F = torch.tensor([[2.0, 0, 0], [0, 1, 0]], dtype=torch.float64)  # labels 0, 1; numbers below: computed in numpy
TEACHER = torch.tensor([[1.0, 1, 0], [0, 0, 2]], dtype=torch.float64)
Y = torch.tensor([0, 1])


def term(f, tau):
    return tau**2 * distillation(not_true(f, Y), not_true(TEACHER, Y), tau)


@pytest.mark.parametrize(("tau", "value"), [(1.0, 0.2193787), (3.0, 0.2984086)])
def test_by_hand(tau, value):
    assert term(F, tau).item() == pytest.approx(value, abs=5e-8)


def test_the_true_logit_has_no_gradient():
    f = F.clone().requires_grad_()
    (g,) = torch.autograd.grad(term(f, 2.0), f)
    assert g[[0, 1], Y].tolist() == [0, 0]
    assert g.abs().sum() > 0.01


def test_not_true_keeps_the_order():
    f = torch.tensor([[5.0, 6, 7, 8]]).repeat(4, 1)
    assert not_true(f, torch.arange(4)).tolist() == [[6, 7, 8], [5, 7, 8], [5, 6, 8], [5, 6, 7]]


@pytest.mark.parametrize(("beta", "tau"), [(1.0, 1.0), (0.5, 3.0)])
def test_five_steps_against_the_formula(client_of, beta, tau):
    it = experiment("fedntd", {"beta": beta, "tau": tau})

    def direction(module, received, x, y):
        others = torch.ones(len(y), 4).scatter_(1, y[:, None], 0).bool()
        f = module(x)
        q = softmax(received(x)[others].view(-1, 3) / tau, 1)
        distilled = kl_div(log_softmax(f[others].view(-1, 3) / tau, 1), q, reduction="batchmean")
        return gradient(module, cross_entropy(f, y) + beta * tau**2 * distilled)

    assert_trains_along(it, client_of(it), direction)


def test_no_gradient_at_the_received_model(client_of):
    it = experiment("fedntd")
    x, y = rows_of(it)
    client = client_of(it)
    it.made.net.module.eval()  # the teacher's mode, or batch statistics would differ

    def task_loss(client, x, y):
        return client.task_loss(client.logits(x), x, y)

    torch.testing.assert_close(client.grad(x, y), client.grad(x, y, loss=task_loss), rtol=0, atol=1e-15)
    client.w.add_(0.1)
    assert (client.grad(x, y) - client.grad(x, y, loss=task_loss)).abs().max() > 1e-4
