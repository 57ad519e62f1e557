"""FedProto: prototypes are class means, the term pulls towards them, models stay apart."""

import copy

import pytest
import torch
from helpers import play, prepare, settings
from torch.nn.functional import cross_entropy

ONE_BATCH = {"batch_size": "full", "epochs": 1, "momentum": 0.0}


def rows_of(it, k):
    shard = it.made.data.train[k]
    return shard.x[shard.index], shard.y[shard.index]


def test_a_client_sends_its_class_means(trained):
    """One full batch: the means of z at the received weights; absent classes are zero rows and not held."""
    it = prepare(settings("fedproto", train=ONE_BATCH))
    module = copy.deepcopy(it.made.net.module)
    absent = 0
    for k in range(7):
        x, y = rows_of(it, k)
        z = module.features(x).detach()
        _, up = trained(it, k)
        for c in range(4):
            assert up.held[c] == float((y == c).any())
            expected = z[y == c].mean(0) if (y == c).any() else torch.zeros(16)
            absent += not (y == c).any()
            torch.testing.assert_close(up.protos[c], expected, rtol=0, atol=1e-6)
    assert absent > 0


def test_prototypes_are_those_of_the_last_epoch(trained):
    """With two full-batch epochs, z is taken at the weights after the first step."""
    it = prepare(settings("fedproto", train={**ONE_BATCH, "epochs": 2}))
    module = copy.deepcopy(it.made.net.module)
    x, y = rows_of(it, 0)
    early = module.features(x).detach()
    cross_entropy(module(x), y).backward()
    with torch.no_grad():
        for p in module.parameters():
            p -= 0.05 * p.grad
    late = module.features(x).detach()
    _, up = trained(it)
    c = int(y.mode().values)
    torch.testing.assert_close(up.protos[c], late[y == c].mean(0), rtol=0, atol=1e-6)
    assert (early[y == c].mean(0) - up.protos[c]).abs().max() > 1e-4


def test_prototypes_are_of_as_many_steps_as_make_a_pass(trained):
    """Also where train.steps ends the round one step into a pass: it would be that step's batch alone."""
    full = prepare(settings("fedproto"))
    steps = -(-len(rows_of(full, 0)[0]) // 10) + 1
    it = prepare(settings("fedproto", train={"epochs": None, "steps": steps}))
    _, up = trained(it)
    held = it.made.data.label_counts[0] > 0
    assert torch.equal(up.held > 0, held if torch.is_tensor(held) else torch.from_numpy(held))


def test_the_server_takes_the_unweighted_mean_over_owners():
    it = play(settings("fedproto", rounds=1, cohort={"fraction": 1.0}, train=ONE_BATCH))
    up = it.uploads
    for c in range(4):
        owners = [k for k in range(7) if it.made.data.label_counts[k, c]]
        expected = sum(up.protos[k, c] for k in owners) / len(owners)
        torch.testing.assert_close(it.fed.server.state.protos[c], expected, rtol=0, atol=1e-6)
    assert {len(set(it.made.data.label_counts[:, c])) for c in range(4)} != {1}  # or weights by counts would do as well


@pytest.mark.parametrize("known", [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
def test_one_step_against_autograd(client_of, known):
    """L = CE + lam / (B d) sum_b [class of b has a prototype] ||z_b - P_y||^2."""
    lam, known = 0.7, torch.tensor(known)
    it = prepare(settings("fedproto", options={"lam": lam}, train=ONE_BATCH))
    protos = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)) * known[:, None]
    it.fed.server.state.protos.copy_(protos)
    it.fed.server.state.known.copy_(known)
    module = copy.deepcopy(it.made.net.module)
    x, y = rows_of(it, 0)
    z = module.features(x)
    term = sum(((z[b] - protos[y[b]]) ** 2).sum() for b in range(len(y)) if known[y[b]]) / (len(y) * 16)
    (cross_entropy(module.head(z), y) + lam * term).backward()
    client = client_of(it)
    it.made.method.train(client)
    g = torch.cat([p.grad.flatten() for p in module.parameters()])
    torch.testing.assert_close((client.w0 - client.w) / 0.05, g, rtol=0, atol=1e-5)
    assert torch.stack(client.losses).mean().item() == pytest.approx(
        cross_entropy(module(x), y).item() + lam * term.item(), rel=1e-5
    )


def test_no_prototypes_in_round_0_and_fedavg_without_the_term():
    """lam = 0 with shared weights is FedAvg; lam > 0 is so for the one round that has no prototypes yet."""
    fedavg = play(settings("fedavg"))
    plain = play(settings("fedproto", options={"lam": 0.0, "share_weights": True}))
    assert plain.hashes == fedavg.hashes
    term = play(settings("fedproto", options={"lam": 1.0, "share_weights": True}))
    assert (term.w - plain.w).abs().max() > 1e-4
    one = [
        play(settings(name, rounds=1, options=o)) for name, o in (("fedproto", {"share_weights": True}), ("fedavg", {}))
    ]
    torch.testing.assert_close(one[0].w, one[1].w, rtol=0, atol=1e-6)
