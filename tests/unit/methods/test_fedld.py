"""FedLD's server in full rounds; the margin term: test_terms.py, test_local_steps.py."""

import numpy as np
import pytest
from helpers import CPU, play, settings
from naive_fedld import principal_mean as literal

from fedmpi.comm.base import Solo
from fedmpi.common.errors import UserError

EVERYONE = {"cohort": {"fraction": 1.0}}


RULE = {"server": {"rule": {"name": "principal", "correction": "axis", "share": "sum"}}}


@pytest.mark.parametrize(
    ("variant", "share", "correction"), [("text", "l2", "text"), ("printed", "l2", "axis"), (None, "sum", "axis")]
)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_full_round_against_the_literal_steps(variant, share, correction, weighting):
    """Two readings of the method, and the rule alone with the authors' weights of directions."""
    cohort = {"fraction": 0.6, "weighting": weighting}
    chosen = {"method": "fedavg", **RULE} if variant is None else {"method": "fedld", "options": {"variant": variant}}
    it = play(settings(net="cnn", rounds=1, cohort=cohort, **chosen))
    G = it.uploads.dw.double().numpy()
    n = it.made.data.train_sizes[it.rows[0]["cohort"]].astype(float)
    p = n / n.sum() if weighting == "samples" else np.full(4, 1 / 4)
    assert G.shape == (4, it.w.numel())
    expected = literal(G, p, 0.8, share, correction)
    moved = (it.w.double() - it.w0.double()).numpy()
    np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-7)
    assert np.abs(expected - p @ G).max() > 1e-4  # not the mean


def test_code_is_the_authors_program():
    """Round 0 is the plain mean; after it the rule is theirs, tensor by tensor."""
    options, fedavg = {"margin": 0.0, "variant": "code"}, play(settings("fedavg", rounds=1, **EVERYONE))
    it = play(settings("fedld", rounds=2, options=options, **EVERYONE))
    assert it.hashes[0] == fedavg.hashes[0]
    G, n, moved = it.uploads.dw.double().numpy(), it.made.data.train_sizes, it.w.double() - fedavg.w.double()
    for s in it.made.model.layout.segments:
        expected = literal(G[:, s.start : s.stop], n / n.sum(), 0.8, "sum", "axis")
        np.testing.assert_allclose(moved[s.start : s.stop].numpy(), expected, rtol=0, atol=1e-7)


def test_divergence_names_the_client():
    """Not an eigenproblem's complaint."""
    config = settings("fedld", train={"lr": 1e30}, **EVERYONE)
    with pytest.raises(UserError, match=r"round 0: client .* sent values that are not finite"):
        play(config, comm=Solo(CPU))
