"""Prototypes and features: FedProto, FedPAC and kNN-Per equal naive loops."""

import math

import pytest
import torch
from helpers import prepare, run_experiment, settings
from naive import assert_is_fedavg, gradient, module_of, rows_of, train_epochs
from torch.nn.functional import cross_entropy, nll_loss
from torch.nn.utils import parameters_to_vector

from fedmpi.engine.evaluate import evaluate_model
from fedmpi.methods._prototypes import head_mixing_weights

# ---- FedProto ----
ONE_BATCH = {"batch_size": "full", "epochs": 1, "momentum": 0.0}


def test_a_client_sends_its_class_means(trained):
    """With one full batch, they are the means of z at the received weights; absent classes have zero rows."""
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


def test_prototypes_come_from_the_last_epoch(trained):
    """With two full-batch epochs, z is computed with the weights after the first step.

    If train.steps ends within a pass, the last epoch consists of as many steps as make a pass, not of one batch.
    """
    steps = -(-len(rows_of(prepare(settings("fedproto")))[0]) // 10) + 1
    it = prepare(settings("fedproto", train={"epochs": None, "steps": steps}))
    assert (trained(it)[1].present > 0).tolist() == (it.experiment.data.label_counts[0] > 0).tolist()
    it = prepare(settings("fedproto", train={**ONE_BATCH, "epochs": 2}))
    module, (x, y) = module_of(it), rows_of(it)
    early = module.features(x).detach()
    train_epochs(module, (x, y), (0, 0, 0), momentum=0.0, batch_size=len(x))
    late = module.features(x).detach()
    _, sent = trained(it)
    c = int(y.mode().values)
    torch.testing.assert_close(sent.protos[c], late[y == c].mean(0), rtol=0, atol=1e-6)
    assert (early[y == c].mean(0) - sent.protos[c]).abs().max() > 1e-4


def test_the_server_averages_prototypes_without_weights():
    it = run_experiment(settings("fedproto", rounds=1, cohort={"fraction": 1.0}, train=ONE_BATCH))
    counts = it.experiment.data.label_counts
    for c in range(4):
        owners = [k for k in range(7) if counts[k, c]]
        expected = it.uploads.protos[owners, c].mean(0)
        torch.testing.assert_close(it.fed.server.state.protos[c], expected, rtol=0, atol=1e-6)
    assert {len(set(counts[:, c])) for c in range(4)} != {1}  # or weights by counts would do as well


@pytest.mark.parametrize("known", [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
def test_one_step_of_fedproto_equals_autograd(client_of, known):
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
    it.experiment.method.train(client)
    g = parameters_to_vector(gradient(module, loss))
    torch.testing.assert_close((client.w0 - client.w) / 0.05, g, rtol=0, atol=1e-5)
    assert torch.stack(client.losses).mean().item() == pytest.approx(loss.item(), rel=1e-5)


def test_round_0_without_prototypes_equals_fedavg():
    """With shared weights only round 0, which has no prototypes yet, equals FedAvg."""
    options = {"lam": 1.0, "share_weights": True}
    mine, theirs = (run_experiment(settings(name, options=o)) for name, o in (("fedproto", options), ("fedavg", {})))
    assert mine.hashes[0] == theirs.hashes[0]
    assert (mine.w - theirs.w).abs().max() > 1e-4


# ---- FedPAC ----
def naive_statistics(z, y, classes):
    """Return h (c, z) and V of (1), class by class, in float64."""
    z, n = z.double(), len(y)
    h, V = torch.zeros(classes, z.shape[1], dtype=torch.float64), 0.0
    for c in range(classes):
        mine = z[y == c]
        if not len(mine):
            continue
        pi, mu = len(mine) / n, mine.mean(0)
        h[c] = pi * mu
        V += pi * sum((row @ row).item() for row in mine) / len(mine) - pi**2 * (mu @ mu).item()
    return h, V / n


def test_statistics_are_computed_with_the_received_body(trained):
    it = prepare(settings("fedpac"))
    received = module_of(it)
    for k in range(7):
        x, y = rows_of(it, k)
        h, V = naive_statistics(received.features(x).detach(), y, 4)
        client, sent = trained(it, k)
        torch.testing.assert_close(sent.h.double(), h, rtol=0, atol=1e-6)
        assert sent.V.item() == pytest.approx(V, rel=1e-5)
        # prototypes after training, with the trained body
        z = module_of(it, client.w).features(x).detach()
        for c in range(4):
            expected = z[y == c].mean(0) if (y == c).any() else torch.zeros(16)
            torch.testing.assert_close(sent.protos[c], expected, rtol=0, atol=1e-5)
        assert sent.counts.tolist() == it.experiment.data.label_counts[k].tolist()


@pytest.mark.parametrize(
    ("h", "V", "client", "mixture"),
    [
        # h_0 - h_1 = (sqrt .5), V = (1, .5):  P^0 = diag(1, .5) + [[0, 0], [0, .5]] = I, so a_0 = (1/2, 1/2);
        # P^1 = diag(1.5, .5), so a_1 is proportional to (1/1.5, 1/.5) = (1/4, 3/4)
        ([0, 0.5**0.5], [1, 0.5], 0, [0.5, 0.5]),
        ([0, 0.5**0.5], [1, 0.5], 1, [0.25, 0.75]),
        ([0, 0], [1, 2000], 0, [1, 0]),  # a = (2000, 1) / 2001, and 1/2001 < 1e-3 is cut
        ([0, 0], [1, 900], 0, [900 / 901, 1 / 901]),
    ],
)
def test_head_mixtures_equal_values_by_hand(h, V, client, mixture):
    h, V = (torch.tensor(values, dtype=torch.float64) for values in (h, V))
    assert head_mixing_weights(h[:, None, None], V, client).tolist() == pytest.approx(mixture)


def test_a_server_round_of_fedpac():
    """Prototypes are averaged by counts; clients that took part get a mixture, others keep their old head."""
    it = run_experiment(settings("fedpac", rounds=1))
    sent, cohort, state = it.uploads, it.rows[0]["cohort"], it.fed.server.state
    assert 1 < len(cohort) < 7
    means = (sent.counts[:, :, None] * sent.protos).sum(0) / sent.counts.sum(0)[:, None]
    torch.testing.assert_close(state.protos, means, rtol=0, atol=1e-5)
    for k in range(7):
        if k in cohort:
            i = cohort.index(k)
            expected = head_mixing_weights(sent.h, sent.V, i).double() @ sent.head.double()
            torch.testing.assert_close(state.heads[k].double(), expected, rtol=0, atol=1e-6)
            assert (state.heads[k] - sent.head[i]).abs().max() > 1e-4
        else:
            assert torch.equal(state.heads[k], it.experiment.messages.head.take(it.w0))


def test_one_step_of_the_body_equals_autograd(client_of):
    """(2) uses the server's class prototypes, and the client's own for classes without one."""
    options = {"lam": 0.7, "head_epochs": 0}
    it = prepare(settings("fedpac", options=options, train={"batch_size": "full", "momentum": 0.0}))
    known = torch.tensor([0.0, 1.0, 1.0, 0.0])
    protos = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)) * known[:, None]
    it.fed.server.state.protos.copy_(protos)
    it.fed.server.state.known.copy_(known)
    module, client = module_of(it), client_of(it, 0, round_=1)
    x, y = rows_of(it)
    assert set(y.tolist()) & {0, 3}, "or no class falls back on the client's own"
    z = module.features(x)
    means = {c: z[y == c].mean(0).detach() for c in set(y.tolist())}
    targets = torch.stack([protos[c] if known[c] else means[c] for c in y.tolist()])
    g = parameters_to_vector(gradient(module, cross_entropy(module.head(z), y) + 0.7 * (z - targets).square().mean()))
    it.experiment.method.train(client)
    body = it.experiment.messages.shared
    torch.testing.assert_close(body.take(client.w0 - client.w) / 0.05, body.take(g), rtol=0, atol=1e-5)


def test_the_head_phase_has_its_own_learning_rate(client_of):
    """It is head_lr in every round, whatever the schedule of train.lr; the body does not change."""
    train = {"batch_size": "full", "momentum": 0.0, "epochs": 0, "schedule": "exponential", "decay": 0.1}
    it = prepare(settings("fedpac", options={"head_lr": 0.3}, train=train))
    module, client = module_of(it), client_of(it, 0, round_=2)
    x, y = rows_of(it)
    g = parameters_to_vector(gradient(module, cross_entropy(module(x), y)))
    it.experiment.method.train(client)
    head, body = it.experiment.messages.head, it.experiment.messages.shared
    torch.testing.assert_close(head.take(client.w0 - client.w) / 0.3, head.take(g), rtol=0, atol=1e-5)
    assert torch.equal(body.take(client.w), body.take(client.w0))


# ---- kNN-Per ----
def naive_neighbours(z, memory, labels, k, classes, scale, similarity="code"):
    """Return p_knn (classes,) of one z, in float64."""
    d2 = sorted((float((z - m).double().square().sum()), j) for j, m in enumerate(memory))[:k]
    votes = [0.0] * classes
    for d, j in d2:
        votes[int(labels[j])] += math.exp(-d / (len(z) * scale) if similarity == "code" else -math.sqrt(d) / scale)
    return [v / sum(votes) for v in votes]


@pytest.mark.parametrize(("mix", "similarity"), [("softmax", "code"), ("logits", "code"), ("softmax", "paper")])
def test_predictions_equal_values_by_hand(client_of, mix, similarity):
    """(3) is computed sample by sample; outputs are log p, so that the cross-entropy is -log p[y].

    The paper's kernel is the exponential of the negative distance, the code's that of its negative square.
    """
    options = {"k": 3, "lam": 0.3, "scale": 0.02, "mix": mix, "similarity": similarity}
    it = prepare(settings("knnper", "norm", options=options))
    client, net, test = client_of(it, 1), it.experiment.net, it.experiment.data.global_test
    client.fine_tune(1)
    net.module.eval()
    x, labels = rows_of(it, 1)
    with torch.no_grad():
        memory, _ = net.forward(x)
        z, f = net.forward(test.x)
    predict = it.experiment.method.predict(client)
    net.module.eval()
    with torch.inference_mode():
        outputs = predict(test.x)
    for i in range(len(z)):
        p_knn = torch.tensor(naive_neighbours(z[i], memory, labels, 3, 4, 0.02, similarity))
        expected = 0.3 * p_knn + 0.7 * (f[i].softmax(0) if mix == "softmax" else f[i])
        torch.testing.assert_close(outputs[i].exp() if mix == "softmax" else outputs[i], expected, rtol=0, atol=1e-5)
    if mix == "softmax":
        loss = evaluate_model(it.fed.trainer, test, 100, predict).metrics["loss"]
        assert loss == pytest.approx(nll_loss(outputs.double(), test.y).item(), rel=1e-5)


def test_memory_is_a_uniform_subset_and_the_same_in_every_round(client_of):
    it = prepare(settings("knnper", options={"capacity": 4, "k": 1, "lam": 1.0}))
    x, _ = rows_of(it, 2)
    assert len(x) > 8

    def remembered(k, round_):
        """Rows that are at distance zero from their own memory: those with similarity to nothing nearer."""
        client = client_of(it, k, round_)
        z, y = next((z, y) for z, _, y in client.forward_batches())
        chosen = torch.randperm(len(y), generator=client.generator("memory"))[:4]
        labels = it.experiment.method.predict(client)(rows_of(it, k)[0]).argmax(1)
        assert torch.equal(labels, y[chosen][torch.cdist(z, z[chosen]).argmin(1)])
        return chosen.tolist()

    assert remembered(2, 0) == remembered(2, 5) != remembered(3, 0)


def test_knnper_trains_as_fedavg_and_uses_its_memory_if_lam_is_positive():
    changes = {"evaluate": {"protocol": ["global", "personal", "ft(2)"]}}
    off, theirs = assert_is_fedavg("knnper", "norm", {"lam": 0.0}, **changes)
    assert off.lines == theirs.lines
    mine, _ = assert_is_fedavg("knnper", "norm", **changes)
    assert [row["loss"] for row in mine.rows] == [row["loss"] for row in theirs.rows]
    for protocol in ("personal", "ft(2)"):
        assert mine.rows[-1][f"{protocol}_loss"] != theirs.rows[-1][f"{protocol}_loss"]
