"""Server rules that a config selects."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import prepare, run_experiment, settings
from naive_fedld import principal_mean as literal

from fedmpi.aggregation import gradient_harmonization, rules
from fedmpi.common.errors import UserError
from fedmpi.flat import linear
from fedmpi.flat.layout import Segment
from fedmpi.flat.packing import Views
from fedmpi.method.context import Uploads
from fedmpi.runtime import compatibility


def gathered(m=5, d=14, seed=0):
    g = torch.Generator().manual_seed(seed)
    n = torch.randint(5, 50, (m,), generator=g).double()
    return Uploads(range(m), n, n / n.sum(), Views({"dw": torch.randn(m, d, generator=g, dtype=torch.float64)}))


SERVER = SimpleNamespace(
    segments=[Segment("a", (6,), 0, "body"), Segment("b", (1,), 6, "body"), Segment("c", (7,), 7, "head")]
)


@pytest.mark.parametrize(("share", "correction"), [("l2", "text"), ("sum", "axis"), ("l2", "axis")])
@pytest.mark.parametrize("keep", [0.3, 1.0])
def test_principal_with_scope_tensor_treats_each_tensor_alone(keep, share, correction):
    """A tensor with one entry has one direction, its sign."""
    updates = gathered()
    direction = rules.principal(updates, SERVER, keep, share, "tensor", correction).numpy()
    for a, b in ((0, 6), (6, 7), (7, 14)):
        expected = literal(updates.dw[:, a:b].numpy(), updates.p.numpy(), keep, share, correction)
        np.testing.assert_allclose(direction[a:b], expected, rtol=0, atol=1e-12)


def test_a_rule_replaces_the_aggregation_of_the_method():
    """FedLD consists of its margin and `principal`, so FedAvg with this rule equals FedLD without a margin."""
    fedavg = run_experiment(settings("fedavg", rounds=2)).hashes
    fedld = run_experiment(settings("fedld", rounds=2, options={"margin": 0.0})).hashes
    assert fedavg != fedld
    assert run_experiment(settings("fedavg", rounds=2, server={"rule": "principal"})).hashes == fedld
    assert (
        run_experiment(settings("fedld", rounds=2, options={"margin": 0.0}, server={"rule": "mean"})).hashes == fedavg
    )
    other = {"rule": {"name": "principal", "keep": 0.3}}
    assert run_experiment(settings("fedavg", rounds=2, server=other)).hashes not in (fedavg, fedld)


def test_uploads_combine_any_slot():
    """Vectors, matrices and scalars, with the cohort's weights or with given ones."""
    g = torch.Generator().manual_seed(0)
    slots = {name: torch.randn(3, *shape, generator=g) for name, shape in {"dw": (4,), "h": (2, 5), "V": ()}.items()}
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    updates = Uploads([2, 5, 7], torch.tensor([4.0, 6, 10]), p, Views(slots))
    for name, value in slots.items():
        weighted = sum(p[i] * value[i].double() for i in range(3)).float()
        torch.testing.assert_close(updates.mean(name), weighted)
        torch.testing.assert_close(updates.mean(name, updates.uniform), value.double().mean(0).float())
    wide = slots["dw"][:, 1:3].double()
    torch.testing.assert_close(updates.gram("dw", (1, 3)), wide @ wide.T)
    assert len(updates) == 3


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        ("median", {}, lambda G, K, p: linear.trimmed_mean(G, 0.5)),
        ("trimmed_mean", {"trim": 0.3}, lambda G, K, p: linear.trimmed_mean(G, 0.3)),
        ("krum", {"byzantine": 2, "select": 2}, lambda G, K, p: rules.krum_coefficients(K, 2, 2) @ G),
        ("geometric_median", {}, lambda G, K, p: rules.geometric_median_coefficients(K, p, 100, 1e-6) @ G),
        ("harmonize", {}, lambda G, K, p: gradient_harmonization.harmonize_pairs(K, p) @ G),
    ],
)
@pytest.mark.parametrize("m", [1, 2, 5])
def test_configured_rules_call_their_functions_with_their_options(rule, options, expected, m):
    """The result differs from the mean; cohorts of one and of two clients give finite directions."""
    updates = gathered(m)
    direction = getattr(rules, rule)(updates, SERVER, **options)
    G, p = updates.dw, updates.p
    torch.testing.assert_close(direction, expected(G, G @ G.T, p), rtol=0, atol=1e-12)
    assert direction.isfinite().all()
    if m == 5:
        assert (direction - updates.mean("dw")).abs().max() > 1e-3


@pytest.mark.parametrize(
    "rule",
    [*(name for name in rules.registry if name != "mean"), {"name": "principal", "scope": "tensor"}],
    ids=str,
)
@pytest.mark.parametrize(("method", "fraction"), [("scaffold", 0.15), ("fedper", 0.6)])
def test_rules_work_with_any_method(rule, method, fraction):
    """Also if only parts of an update are sent, and with a cohort of one client."""
    it = run_experiment(settings(method, "norm", rounds=2, server={"rule": rule}, cohort={"fraction": fraction}))
    assert it.reason == "finished"
    assert it.w.isfinite().all()


@pytest.mark.parametrize(
    ("rule", "options", "members", "message"),
    [
        ("trimmed_mean", {}, 9, r"trim 0\.1 excludes none of 9 clients per round"),
        ("trimmed_mean", {}, 10, None),
        ("krum", {}, 4, "byzantine 1 needs 5 clients per round for its guarantee, but there are 4"),
        ("krum", {"select": 5}, 5, "select 5 of 5 clients per round is the plain mean"),
    ],
)
def test_cohorts_too_small_for_a_robust_rule_are_warned_about(rule, options, members, message):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compatibility.check_robust_rule(rule, options, members, [])
    assert [bool(re.search(message, str(each.message))) for each in caught] == [True] if message else not caught


def test_krum_refuses_methods_without_local_steps():
    """Otherwise Krum would select their zero updates, and the model would never change."""
    message = r"krum would use the zero updates of clients 0, 3, which make no step \(train\.drop_last\)"
    with pytest.raises(UserError, match=message):
        compatibility.check_robust_rule("krum", {}, 5, [0, 3])
    train = {"batch_size": 20, "drop_last": True}
    with pytest.warns(UserWarning, match="will not train"), pytest.raises(UserError, match="which make no step"):
        prepare(settings(train=train, server={"rule": "krum"}))
