"""FedProto: prototypes are class means, the term pulls towards them, models stay apart."""

import pytest
import torch
from helpers import play, prepare, settings
from naive import gradient, module_of, rows_of, train_epochs
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

ONE_BATCH = {"batch_size": "full", "epochs": 1, "momentum": 0.0}


def test_a_client_sends_its_class_means(trained):
    """One full batch: the means of z at the received weights; absent classes are zero rows and not present."""
    it = prepare(settings("fedproto", train=ONE_BATCH))
    received, absent = module_of(it), 0
    for k in range(7):
        x, y = rows_of(it, k)
        z = received.features(x).detach()
        _, sent = trained(it, k)
        for c in range(4):
            present = (y == c).any()
            absent += not present
            assert sent.present[c] == float(present)
            expected = z[y == c].mean(0) if present else torch.zeros(16)
            torch.testing.assert_close(sent.protos[c], expected, rtol=0, atol=1e-6)
    assert absent > 0


def test_prototypes_are_those_of_the_last_epoch(trained):
    """With two full-batch epochs, z is taken at the weights after the first step. Where train.steps ends the round one
    step into a pass, of as many steps as make a pass: it would be that step's batch alone."""
    steps = -(-len(rows_of(prepare(settings("fedproto")))[0]) // 10) + 1
    it = prepare(settings("fedproto", train={"epochs": None, "steps": steps}))
    assert (trained(it)[1].present > 0).tolist() == (it.made.data.label_counts[0] > 0).tolist()
    it = prepare(settings("fedproto", train={**ONE_BATCH, "epochs": 2}))
    module, (x, y) = module_of(it), rows_of(it)
    early = module.features(x).detach()
    train_epochs(module, (x, y), (0, 0, 0), momentum=0.0, batch_size=len(x))
    late = module.features(x).detach()
    _, sent = trained(it)
    c = int(y.mode().values)
    torch.testing.assert_close(sent.protos[c], late[y == c].mean(0), rtol=0, atol=1e-6)
    assert (early[y == c].mean(0) - sent.protos[c]).abs().max() > 1e-4


def test_the_server_takes_the_unweighted_mean_over_owners():
    it = play(settings("fedproto", rounds=1, cohort={"fraction": 1.0}, train=ONE_BATCH))
    counts = it.made.data.label_counts
    for c in range(4):
        owners = [k for k in range(7) if counts[k, c]]
        expected = it.uploads.protos[owners, c].mean(0)
        torch.testing.assert_close(it.fed.server.state.protos[c], expected, rtol=0, atol=1e-6)
    assert {len(set(counts[:, c])) for c in range(4)} != {1}  # or weights by counts would do as well


@pytest.mark.parametrize("known", [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
def test_one_step_against_autograd(client_of, known):
    """L = CE + lam / (B d) sum_b [class of b has a prototype] ||z_b - P_y||^2."""
    lam, known = 0.7, torch.tensor(known)
    it = prepare(settings("fedproto", options={"lam": lam}, train=ONE_BATCH))
    protos = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)) * known[:, None]
    it.fed.server.state.protos.copy_(protos)
    it.fed.server.state.known.copy_(known)
    module, client, (x, y) = module_of(it), client_of(it), rows_of(it)
    z = module.features(x)
    term = sum(((z[b] - protos[y[b]]) ** 2).sum() for b in range(len(y)) if known[y[b]]) / (len(y) * 16)
    loss = cross_entropy(module.head(z), y) + lam * term
    it.made.method.train(client)
    g = parameters_to_vector(gradient(module, loss))
    torch.testing.assert_close((client.w0 - client.w) / 0.05, g, rtol=0, atol=1e-5)
    assert torch.stack(client.losses).mean().item() == pytest.approx(loss.item(), rel=1e-5)


def test_no_prototypes_in_round_0():
    """With shared weights the one round that has no prototypes yet is FedAvg; later ones are not."""
    options = {"lam": 1.0, "share_weights": True}
    mine, theirs = (play(settings(name, options=o)) for name, o in (("fedproto", options), ("fedavg", {})))
    assert mine.hashes[0] == theirs.hashes[0]
    assert (mine.w - theirs.w).abs().max() > 1e-4
