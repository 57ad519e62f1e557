"""FedGH (3.4): the rule in a federation, as a method and under other clients, and the hierarchical variant's state."""

import numpy as np
from helpers import play, prepare, settings
from naive_conflicts import literal_hierarchy, literal_pairs


def test_a_round_of_the_server():
    it = play(settings("fedgh", rounds=1, train={"epochs": 3}, cohort={"fraction": 1.0}))
    G, n = it.uploads.dw.double().numpy(), it.made.data.train_sizes
    assert (G @ G.T < 0).any(), "or no pair conflicts"
    expected = it.w0.double().numpy() + n / n.sum() @ np.array(literal_pairs(G))
    np.testing.assert_allclose(it.w.double().numpy(), expected, rtol=0, atol=1e-6)


def test_it_is_fedavg_with_the_rule_harmonize():
    rule, train = {"rule": "harmonize"}, {"epochs": 3}
    mine, plain = play(settings("fedgh", train=train)), play(settings("fedavg", train=train))
    assert play(settings("fedavg", server=rule, train=train)).hashes == mine.hashes != plain.hashes
    assert play(settings("scaffold", server=rule)).reason == "finished"


def test_the_hierarchical_variant_over_three_rounds():
    """Tensor by tensor against vectors; round 0 is the plain unweighted mean, the history follows with .99."""
    it = prepare(settings("fedgh", options={"variant": "hierarchical"}, train={"epochs": 2}))
    tensors = [(s.start, s.stop) for s in it.made.model.layout.segments]
    history, changes = None, []
    step = it.fed.server.step

    def checked(t, lr, updates, *rest):
        nonlocal history
        before, G = it.w.double().clone(), updates.dw.double().numpy().copy()
        metrics = step(t, lr, updates, *rest)
        if history is None:
            direction = history = G.mean(0)
        else:
            direction = np.concatenate([literal_hierarchy(G[:, a:b], history[a:b]) for a, b in tensors])
            history = 0.99 * history + 0.01 * direction
        np.testing.assert_allclose((it.w.double() - before).numpy(), direction, rtol=0, atol=1e-6)
        np.testing.assert_allclose(it.fed.server.state.history.double().numpy(), history, rtol=0, atol=1e-6)
        changes.append(np.abs(direction - G.mean(0)).max())
        return metrics

    it.fed.server.step = checked
    it.fed.run()
    assert len(changes) == 3
    assert min(changes[1:]) > 1e-4, "or nothing conflicted"
