"""kNN-Per (4.8): neighbours and mixtures against naive loops; lam = 0 is the fine-tuned model."""

import math

import pytest
import torch
from helpers import prepare, settings
from naive import assert_is_fedavg, rows_of
from torch.nn.functional import nll_loss

from fedmpi.engine.evaluate import evaluate


def naive(z, memory, labels, k, classes, scale, similarity="code"):
    """p_knn (classes,) of one z, in float64."""
    d2 = sorted((float((z - m).double().square().sum()), j) for j, m in enumerate(memory))[:k]
    votes = [0.0] * classes
    for d, j in d2:
        votes[int(labels[j])] += math.exp(-d / (len(z) * scale) if similarity == "code" else -math.sqrt(d) / scale)
    return [v / sum(votes) for v in votes]


@pytest.mark.parametrize(("mix", "similarity"), [("softmax", "code"), ("logits", "code"), ("softmax", "paper")])
def test_prediction_by_hand(client_of, mix, similarity):
    """(3) at the live weights, sample by sample; outputs are log p, so that cross-entropy is -log p[y]. The paper's
    kernel is exp of minus the distance, the code's of minus its square."""
    options = {"k": 3, "lam": 0.3, "scale": 0.02, "mix": mix, "similarity": similarity}
    it = prepare(settings("knnper", "norm", options=options))
    client, net, test = client_of(it, 1), it.made.net, it.made.data.global_test
    client.fine_tune(1)
    net.module.eval()
    x, labels = rows_of(it, 1)
    with torch.no_grad():
        memory, _ = net.forward(x)
        z, f = net.forward(test.x)
    predict = it.made.method.predict(client)
    net.module.eval()
    with torch.inference_mode():
        outputs = predict(test.x)
    for i in range(len(z)):
        p_knn = torch.tensor(naive(z[i], memory, labels, 3, 4, 0.02, similarity))
        expected = 0.3 * p_knn + 0.7 * (f[i].softmax(0) if mix == "softmax" else f[i])
        torch.testing.assert_close(outputs[i].exp() if mix == "softmax" else outputs[i], expected, rtol=0, atol=1e-5)
    if mix == "softmax":
        loss = evaluate(it.fed.trainer, test, 100, predict).figures["loss"]
        assert loss == pytest.approx(nll_loss(outputs.double(), test.y).item(), rel=1e-5)


def test_memory_is_a_uniform_subset_and_the_same_in_every_round(client_of):
    it = prepare(settings("knnper", options={"capacity": 4, "k": 1, "lam": 1.0}))
    x, _ = rows_of(it, 2)
    assert len(x) > 8

    def remembered(k, round_):
        """Rows that are at distance zero from their own memory: those with similarity to nothing nearer."""
        client = client_of(it, k, round_)
        z, y = next((z, y) for z, _, y in client.passes())
        chosen = torch.randperm(len(y), generator=client.generator("memory"))[:4]
        labels = it.made.method.predict(client)(rows_of(it, k)[0]).argmax(1)
        assert torch.equal(labels, y[chosen][torch.cdist(z, z[chosen]).argmin(1)])
        return chosen.tolist()

    assert remembered(2, 0) == remembered(2, 5) != remembered(3, 0)


def test_training_is_fedavgs_and_the_memory_counts_unless_lam_is_zero():
    changes = {"evaluate": {"protocol": ["global", "personal", "ft(2)"]}}
    off, theirs = assert_is_fedavg("knnper", "norm", {"lam": 0.0}, **changes)
    assert off.lines == theirs.lines
    mine, _ = assert_is_fedavg("knnper", "norm", **changes)
    assert [row["loss"] for row in mine.rows] == [row["loss"] for row in theirs.rows]
    for protocol in ("personal", "ft(2)"):
        assert mine.rows[-1][f"{protocol}_loss"] != theirs.rows[-1][f"{protocol}_loss"]
