"""Filter decomposition (2.2): virtual clients, fast and slow rounds, bytes, personal atoms, other local steps."""

from itertools import pairwise

import pytest
import torch
from helpers import federated, norm_net, prepare, run_experiment, settings, small_settings
from naive import NET, module_of, rows_of, train_epochs
from torch.nn.functional import cross_entropy

from fedmpi.common import seeds
from fedmpi.flat.layout import ATOM, BODY, COEF, HEAD
from fedmpi.method.base import get_mean_only_slots
from fedmpi.methods.fedatom import FedAtom
from fedmpi.methods.fedld import FedLD
from fedmpi.models.filter_atoms import decompose_convolutions


def config(net="mlp", method="fedatom", options=None, **changes):
    """Return the settings of a run with filter decomposition."""
    return small_settings(method, net, options=options or {}, **{"cohort": {"fraction": 1.0}, **changes})


def atoms(net="cnn", rounds=3, method="fedatom", **options):
    """Return a network with atoms in each layer."""
    return prepare(config(net, method, options, rounds=rounds))


def factors(it, w):
    """Return [(alpha, D)] of every decomposed layer at flat weights (d,), in float64."""
    tensors = {name: x.double() for name, x in it.experiment.model.layout.named_views(w).items()}
    return [(tensors[n.replace("atoms", "coef")], tensors[n]) for n in tensors if n.endswith("atoms")]


def kernels(alpha, D):
    """Return the kernels alpha D."""
    return torch.einsum("oia,auv->oiuv", alpha, D)


def cohort_weights(it):
    """Return the weights (m,) of the last round's cohort, proportional to samples."""
    n = torch.tensor([float(it.experiment.data.train_sizes[k]) for k in it.rows[-1]["cohort"]], dtype=torch.float64)
    return n / n.sum()


# ---- (a), (b): what averaging alpha and D apart means for W ----
def test_the_aggregate_is_the_mean_of_all_clients_and_virtual_clients():
    """(a) sum_i sum_j p_i p_j alpha_i D_j = (sum p alpha)(sum p D), which is the server's model."""
    it = atoms(rounds=1)
    it.fed.run()
    p, clients = cohort_weights(it), [factors(it, it.w0 + row) for row in it.uploads.dw]
    for layer, (alpha, D) in enumerate(factors(it, it.w)):
        virtual = sum(
            p[i] * p[j] * kernels(a[layer][0], b[layer][1])
            for i, a in enumerate(clients)
            for j, b in enumerate(clients)
        )
        torch.testing.assert_close(kernels(alpha, D), virtual, rtol=0, atol=1e-6)


# ---- (d): fast and slow ----
def test_with_period_one_it_is_fedavg_on_the_decomposed_model():
    """The bits are equal over rounds, with and without personal atoms."""
    mine = run_experiment(small_settings("fedatom", "norm"))
    personal = run_experiment(small_settings("fedatom_personal", "norm"))
    theirs = run_experiment(small_settings("fedavg", "norm", model={"name": f"{__file__}:decomposed"}))
    assert mine.hashes == theirs.hashes == personal.hashes
    assert torch.equal(mine.b, theirs.b)
    assert mine.rows[-1]["train_loss"] == theirs.rows[-1]["train_loss"]


def decomposed(input_shape, classes):
    """Build the decomposed model."""
    net = norm_net(input_shape, classes)
    with seeds.temporary_seed(0, "prepare"):
        return decompose_convolutions(net)


def test_coefficients_change_in_slow_rounds_only():
    """With period 5 they change in rounds 0 and 5, not in 1 to 4 and 6; atoms and theta_h change in every round."""
    it = atoms("mlp", rounds=7, period=5)
    models = [it.w.clone()]
    it.fed.reporter.callbacks.record_round = lambda row: models.append(it.w.clone())
    it.fed.run()
    for group in (ATOM, COEF, BODY, HEAD):
        part = it.experiment.model.layout.select({group})
        moved = [not torch.equal(part.take(a), part.take(b)) for a, b in pairwise(models)]
        assert moved == [group != COEF or t in (0, 5) for t in range(7)], group


def test_a_client_receives_only_coefficients_that_it_lacks():
    """By hand: everything at the first visit and after a slow round, else atoms and theta_h."""
    it = run_experiment(config(rounds=9, options={"period": 4}, cohort={"fraction": 0.6}))
    full, coefficients = it.experiment.messages.sizes["d"], it.experiment.messages.sizes[COEF]
    version, seen = 0, {}
    for row in it.rows:
        current = sum(seen.get(k) == version for k in row["cohort"])
        assert row["down_parameters"] == full * len(row["cohort"]) - coefficients * current, row["round"]
        seen |= dict.fromkeys(row["cohort"], version)
        version += row["round"] % 4 == 0
    assert len({row["down_parameters"] for row in it.rows}) > 2


def test_alpha_fast_discard_freeze_and_keep(trained):
    """Checks where a client's alpha starts and ends: rounds 1 and 2 are fast, 3 is slow."""
    sent = {}
    for mode in ("discard", "freeze", "keep"):
        it, before = atoms("mlp", period=3, alpha_fast=mode), None
        for t in (1, 2, 3):
            client, row = trained(it, 0, t)
            received, start, end = (
                client.extract_group(COEF, w).clone() for w in (client.received, client.w0, client.w)
            )
            assert torch.equal(start, end) == (mode == "freeze" and t < 3), (mode, t)
            assert torch.equal(start, received if mode != "keep" or t == 1 else before), (mode, t)
            before = end
        sent[mode] = it.experiment.model.layout.select({COEF}).take(row.dw)
        torch.testing.assert_close(sent[mode], end - received, rtol=0, atol=1e-7)
    assert not torch.equal(sent["keep"], sent["discard"])


def test_a_kept_alpha_does_not_outlive_a_slow_round(client_of, trained):
    """After the slow round 3 a client starts from the server's coefficients, which replace those it has kept."""
    it = atoms("mlp", period=3, alpha_fast="keep")

    def starts_from_the_servers(k, round_):
        client = client_of(it, k, round_)
        return torch.equal(it.experiment.method.initial_weights(client), client.received)

    trained(it, 0, 2)
    assert not starts_from_the_servers(0, 3)
    assert starts_from_the_servers(0, 4)
    trained(it, 0, 3)  # the slow round itself: the server's mean holds what it sent
    assert starts_from_the_servers(0, 4)
    assert starts_from_the_servers(1, 0)


# ---- (f) ----
@pytest.mark.parametrize("period", [1, 4])
def test_one_client_one_step_is_sgd_on_the_factors(period):
    """(f) dF/dalpha[o,i,a] = sum_uv dF/dW D[a], dF/dD[a] = sum_oi dF/dW alpha[o,i,a], by hand from the dense kernel."""
    train = {"batch_size": "full", "momentum": 0.0, "lr": 0.1}
    it = prepare(config(options={"period": period}, rounds=2, train=train), federated(clients=1))
    module, (x, y) = module_of(it), rows_of(it)
    it.fed.run()
    for t in range(2):
        conv = module[0]
        W = conv.kernels.detach().requires_grad_()
        z = torch.nn.functional.conv2d(x, W, conv.bias, stride=2)
        rest = [conv.bias, *module[2].parameters(), *module[5].parameters(), *module[7].parameters()]
        g, *others = torch.autograd.grad(cross_entropy(module[1:](z), y), [W, *rest])
        with torch.no_grad():
            alpha, D = conv.coef.clone(), conv.atoms.clone()
            conv.atoms -= 0.1 * torch.einsum("oiuv,oia->auv", g, alpha)
            if t % period == 0:
                conv.coef -= 0.1 * torch.einsum("oiuv,auv->oia", g, D)
            for i, (p, q) in enumerate(zip(rest, others, strict=True)):
                if t % period == 0 or i > 2:  # biases and the 1x1 convolution are among the coefficients
                    p -= 0.1 * q
    expected = {n: p.detach() for n, p in module.named_parameters()}
    torch.testing.assert_close(dict(it.experiment.model.layout.named_views(it.w)), expected, rtol=1e-4, atol=1e-6)


# ---- personal atoms, (g) ----
@pytest.mark.parametrize("head", ["global", "local"])
def test_the_personal_pass_changes_personal_parts_only(trained, client_of, head):
    """(g) The upload has the bits of one without a personal pass.

    The personal model has alpha, normalisation and, unless it is local, theta_h as received.
    """
    mine, plain = atoms("norm", method="fedatom_personal", personal_head=head), atoms("norm")
    client, row = trained(mine)
    _, other = trained(plain)
    assert torch.equal(row.dw, other.dw)
    assert torch.equal(row._b, other._b)
    used = mine.experiment.method.personal_weights(client_of(mine))
    for s in mine.experiment.model.layout.segments:
        own = s.group == ATOM or (head == "local" and s.group == HEAD)
        assert torch.equal(s.view(used), s.view(client.received)) != own, s.name


def test_personal_atoms_by_hand(trained, client_of):
    """(4): SGD with momentum on the atoms only, from the received atoms, in the second of the client's batch orders.

    The next time it starts where they were.
    """
    it = atoms("mlp", method="fedatom_personal")
    module = module_of(it).requires_grad_(False)
    module[0].atoms.requires_grad_()
    for t in (0, 1):
        trained(it, 0, t)
        train_epochs(module, rows_of(it), (t, 0, 1))
        used = it.experiment.method.personal_weights(client_of(it, 0, t + 1))
        torch.testing.assert_close(it.experiment.model.layout.named_views(used)["0.atoms"], module[0].atoms.detach())


def test_the_personal_model_has_its_own_statistics_once_it_was_trained(client_of):
    """A client that has never taken part uses the global model."""
    it = run_experiment(
        settings("fedatom_personal", options={"atoms": 3, "personal_head": "local"}, rounds=1, model=NET)
    )
    for k in range(7):
        if k in it.rows[0]["cohort"]:
            assert not torch.equal(it.client_state(k).own_b, it.b)
        else:
            client = client_of(it, k)
            assert torch.equal(it.experiment.method.personal_weights(client), it.w)
            assert torch.equal(it.experiment.method.personal_buffers(client), it.b)


# ---- with other methods, with other rules ----
def test_local_steps_of_another_method():
    plain = run_experiment(small_settings("fedatom", "mlp"))
    for client in ({"name": "fedprox", "mu": 0.0}, {"name": "fedsol", "rho": 0.0}, "fedavg"):
        assert run_experiment(small_settings("fedatom", "mlp", options={"client": client})).hashes == plain.hashes
    for client in ("fedprox", "fedsol", "scaffold", "moon"):
        it = run_experiment(small_settings("fedatom", "mlp", options={"client": client}, train={"momentum": 0.0}))
        assert it.reason == "finished"
        assert it.hashes[0] != plain.hashes[0], client
    principal = {"client": {"name": "fedld", "margin": 0.0}, "period": 2}
    mine = run_experiment(small_settings("fedatom", "mlp", options=principal))
    rule = run_experiment(small_settings("fedatom", "mlp", options={"period": 2}, server={"rule": "principal"}))
    assert mine.hashes == rule.hashes


@pytest.mark.parametrize("optim", ["momentum", "adam"])
def test_fast_rounds_leave_the_server_optimisers_state_of_coefficients(optim):
    """The optimiser's state of the coefficients changes in slow rounds only."""
    server, period = {"optim": optim, "lr": 0.01}, 3
    it = prepare(small_settings("fedatom", "mlp", rounds=period, options={"period": period}, server=server))
    after = []
    it.fed.reporter.callbacks.record_round = lambda row: after.append(
        (it.fed.server.optimizer.state.clone(), it.w.clone())
    )
    it.fed.run()
    layout = it.experiment.model.layout
    rest, others = layout.select({COEF}), layout.select(layout.groups() - {COEF})
    (first_state, first_w), *later = after
    for state, w in later:
        assert torch.equal(rest.take(state), rest.take(first_state))
        assert torch.equal(rest.take(w), rest.take(first_w))
        assert not torch.equal(others.take(state), others.take(first_state))


def test_mean_only_slots_follow_the_clients_method():
    """They are those of FedAvg; for a method with its own aggregate there are none, delegated or not."""
    assert get_mean_only_slots(FedAtom()) == {"dw": ("p",)}
    assert get_mean_only_slots(FedAtom(client=FedLD())) is None
