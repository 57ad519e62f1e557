"""Filter decomposition (2.2): virtual clients, fast and slow rounds, bytes, personal atoms, what it goes with."""

import copy
from itertools import pairwise

import pytest
import torch
from helpers import conv_net, federated, norm_net, play, prepare, settings, small_settings
from torch.nn.functional import cross_entropy

from fedmpi.aggregation import rules
from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.flat import linear
from fedmpi.flat.layout import ATOM, BODY, COEF, HEAD
from fedmpi.method import Travel
from fedmpi.method.base import means_of
from fedmpi.methods.fedatom import FedAtom
from fedmpi.methods.fedld import FedLD
from fedmpi.models.atoms import decompose

CNN = {"cohort": {"fraction": 1.0}}


def atoms(net="cnn", rounds=3, method="fedatom", **options):
    return prepare(small_settings(method, net, rounds=rounds, options=options, **CNN))


def pieces(it, w):
    """[(alpha, D)] of every decomposed layer at flat weights (d,), in float64."""
    tensors = {name: x.double() for name, x in it.made.model.layout.tensors(w).items()}
    return [(tensors[n.replace("atoms", "coef")], tensors[n]) for n in tensors if n.endswith("atoms")]


def kernels(alpha, D):
    return torch.einsum("oia,auv->oiuv", alpha, D)


def clients_of(it):
    """p and the clients' [(alpha, D)] of the last round, from what they uploaded."""
    n = torch.tensor([float(it.made.data.train_sizes[k]) for k in it.rows[-1]["cohort"]], dtype=torch.float64)
    return n / n.sum(), [pieces(it, it.start + row) for row in it.uploads.dw]


@pytest.fixture(scope="module")
def one_round():
    it = atoms(rounds=1)
    it.start = it.w.clone()
    it.fed.run()
    return it


# ---- (a), (b): what averaging alpha and D apart means for W ----
def test_the_aggregate_is_the_mean_of_all_clients_and_virtual_clients(one_round):
    """(a) sum_i sum_j p_i p_j alpha_i D_j = (sum p alpha)(sum p D), which is the server's model."""
    p, clients = clients_of(one_round)
    for layer, (alpha, D) in enumerate(pieces(one_round, one_round.w)):
        virtual = sum(
            p[i] * p[j] * kernels(a[layer][0], b[layer][1])
            for i, a in enumerate(clients)
            for j, b in enumerate(clients)
        )
        torch.testing.assert_close(kernels(alpha, D), virtual, rtol=0, atol=1e-6)


# ---- (d): fast and slow ----
def test_with_period_one_it_is_fedavg_on_the_decomposed_model():
    """Bit for bit, over rounds, personal atoms or not."""
    mine = play(small_settings("fedatom", "norm"))
    personal = play(small_settings("fedatom_personal", "norm"))
    theirs = play(small_settings("fedavg", "norm", model={"name": f"{__file__}:decomposed"}))
    assert mine.hashes == theirs.hashes == personal.hashes
    assert torch.equal(mine.b, theirs.b)
    assert mine.rows[-1]["train_loss"] == theirs.rows[-1]["train_loss"]


def decomposed(input_shape, classes):
    net = norm_net(input_shape, classes)
    with seeds.scoped(0, "prepare"):
        return decompose(net)


def test_coefficients_change_in_slow_rounds_alone():
    """period 5: after rounds 0 and 5, not after 1 to 4 and 6; atoms and theta_h move in every round."""
    it = atoms("mlp", rounds=7, period=5)
    seen = [it.w.clone()]
    sink = it.fed.reporter.callbacks.round
    it.fed.reporter.callbacks.round = lambda row: (sink(row), seen.append(it.w.clone()))
    it.fed.run()
    groups = {g: it.made.model.layout.select({g}).ranges for g in (ATOM, COEF, BODY, HEAD)}
    moved = {g: [not same(a, b, r) for a, b in pairwise(seen)] for g, r in groups.items()}
    assert moved[COEF] == [True, False, False, False, False, True, False]
    assert all(all(moved[g]) for g in (ATOM, BODY, HEAD))


def same(a, b, ranges):
    return all(torch.equal(a[x:y], b[x:y]) for x, y in ranges)


def test_bytes_of_fast_rounds_are_atoms_and_theta_h():
    """Measured by the communicator: what seven clients sent, less three numbers each of the engine's. The broadcast
    leaves out alpha where the round before was fast."""
    it = atoms("mlp", rounds=6, period=5)
    it.fed.run()
    fast = 9 * 9 + (45 * 12 + 12) + (12 * 4 + 4)  # atoms, hidden layer, head
    full = fast + (4 * 9 + 4) + (5 * 4 + 5)  # + alpha of 1 -> 4 channels and bias, the 1x1 convolution and bias
    assert it.made.messages.sizes["d"] == full
    assert [row["received_bytes"] // 4 - 7 * 3 for row in it.rows] == [7 * full] + [7 * fast] * 4 + [7 * full]
    down = [
        (row["sent_bytes"] - row["received_bytes"]) // 4 - 1 for row in it.rows
    ]  # one process: uploads pass here too
    assert down == [full, full, fast, fast, fast, fast]
    assert [row["up_parameters"] for row in it.rows] == [7 * full] + [7 * fast] * 4 + [7 * full]
    assert [row["down_parameters"] for row in it.rows] == [7 * full, 7 * full, 7 * fast, 7 * fast, 7 * fast, 7 * fast]


def test_a_client_gets_coefficients_that_it_does_not_have():
    """down_parameters by hand: all at the first visit and after each slow round, else atoms and theta_h."""
    config = small_settings("fedatom", "mlp", rounds=9, options={"period": 4}, cohort={"fraction": 0.6})
    it = play(config)
    fast = it.made.messages.sizes["d"] - it.made.messages.sizes[COEF]
    version, has = 0, {}
    for row in it.rows:
        expected = 0
        for k in row["cohort"]:
            expected += fast if has.get(k) == version else fast + it.made.messages.sizes[COEF]
            has[k] = version
        assert row["down_parameters"] == expected, row["round"]
        version += row["round"] % 4 == 0
    assert len({row["down_parameters"] for row in it.rows}) > 2


def test_fast_rounds_discard_freeze_keep(client, trained):
    """Where a client's alpha starts and ends: rounds 1 and 2 are fast, 3 is slow."""
    found = {}
    for mode in ("discard", "freeze", "keep"):
        it = atoms("mlp", period=3, alpha_fast=mode)
        took = {}
        for t in (1, 2, 3):
            k, row = trained(it, 0, t)
            took[t] = (k.take(COEF, k.received).clone(), k.take(COEF, k.w0).clone(), k.take(COEF, k.w).clone(), row.dw)
        found[mode] = took
    for mode, took in found.items():
        for t, (received, start, end, dw) in took.items():
            moved = not torch.equal(start, end)
            assert moved == (mode != "freeze" or t == 3), (mode, t)
            if mode != "keep" or t == 1:
                assert torch.equal(received, start), (mode, t)
            else:
                assert torch.equal(start, took[t - 1][2]), (mode, t)
            if t == 3:
                torch.testing.assert_close(
                    it.made.model.layout.select({COEF}).take(dw), end - received, rtol=0, atol=1e-7
                )
    assert not torch.equal(found["keep"][3][3], found["discard"][3][3])


def test_a_kept_alpha_does_not_outlive_a_slow_round(client, trained):
    """It was made from coefficients that are no more: after the slow round 3 a client starts from the server's."""
    it = atoms("mlp", period=3, alpha_fast="keep")

    def starts_from_the_servers(k, round_):
        one = client(it, k, round_)
        return torch.equal(it.made.method.receive(one), one.received)

    trained(it, 0, 2)
    assert not starts_from_the_servers(0, 3)
    assert starts_from_the_servers(0, 4)
    trained(it, 0, 3)  # itself: what it sent is in the server's mean
    assert starts_from_the_servers(0, 4)
    assert starts_from_the_servers(1, 0)


def test_clients_are_evaluated_with_the_servers_alpha():
    """alpha_k is what a client trains from, not what it uses: without personal atoms all use the global model."""
    it = play(small_settings("fedatom", "mlp", rounds=7, options={"period": 3, "alpha_fast": "keep"}))
    for row in it.rows:
        lines = [line for line in it.lines if line["round"] == row["round"]]
        assert len(lines) == 7
    used = [
        it.made.method.weights(it.fed.states.view(k, 6, 0.1, it.fed.transport.inbox, it.fed.transport.no_download))
        for k in range(7)
    ]
    assert all(torch.equal(w, it.w) for w in used)


def test_freeze_trains_groups_that_the_model_declares(trained):
    it = prepare(
        small_settings("fedatom", model={"name": f"{__file__}:adapted"}, options={"alpha_fast": "freeze", "period": 2})
    )
    k, _ = trained(it, 0, 1)
    assert it.made.model.layout.groups() == {ATOM, COEF, BODY, HEAD, "adapter"}
    assert k.take("adapter", k.w - k.w0).any()
    assert not k.take(COEF, k.w - k.w0).any()


def adapted(input_shape, classes):
    net = conv_net(input_shape, classes)
    net.parameter_groups = lambda: {"5.bias": "adapter"}
    return net


# ---- (f) ----
@pytest.mark.parametrize("period", [1, 4])
def test_one_client_one_step_is_sgd_on_the_factors(period):
    """(f) dF/dalpha[o,i,a] = sum_uv dF/dW D[a], dF/dD[a] = sum_oi dF/dW alpha[o,i,a], by hand from the dense kernel."""
    config = settings(
        "fedatom", model={"name": "helpers:conv_net"}, options={"period": period}, rounds=2,
        train={"batch_size": "full", "momentum": 0.0, "lr": 0.1}, cohort={"fraction": 1.0},
    )  # fmt: skip
    it = prepare(config, federated(clients=1))
    module = copy.deepcopy(it.made.net.module)
    shard = it.made.data.train[0]
    x, y = shard.x[shard.index], shard.y[shard.index]
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
    for name, value in it.made.model.layout.tensors(it.w).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)


# ---- personal atoms, (g) ----
@pytest.mark.parametrize("head", ["global", "local"])
def test_the_personal_pass_changes_personal_parts_alone(trained, client, head):
    """(g) The upload is that without a personal pass, bit for bit; the personal model has alpha, normalisation and,
    unless it is local, theta_h as received."""
    mine = prepare(small_settings("fedatom_personal", "norm", options={"pers_head": head}, **CNN))
    plain = prepare(small_settings("fedatom", "norm", **CNN))
    k, row = trained(mine)
    _, other = trained(plain)
    assert torch.equal(row.dw, other.dw)
    assert torch.equal(row._b, other._b)
    used = mine.made.method.weights(client(mine))
    for s in mine.made.model.layout.segments:
        own = s.group == ATOM or (head == "local" and s.group == HEAD)
        assert torch.equal(s.view(used), s.view(k.received)) != own, s.name


def test_personal_atoms_by_hand(trained, client):
    """(4): from the atoms received, SGD with momentum on the atoms alone, in the second of the client's batch orders;
    the next time from where they were."""
    it = atoms("mlp", method="fedatom_personal")
    module, shard = copy.deepcopy(it.made.net.module), it.made.data.train[0]
    x, y = shard.x[shard.index], shard.y[shard.index]
    for t in (0, 1):
        trained(it, 0, t)
        sgd = torch.optim.SGD([module[0].atoms], 0.05, 0.9)
        for rows in torch.randperm(len(x), generator=seeds.generator(0, "batches", t, 0, 1)).split(10):
            sgd.zero_grad()
            cross_entropy(module(x[rows]), y[rows]).backward()
            sgd.step()
        used = it.made.method.weights(client(it, 0, t + 1))
        torch.testing.assert_close(it.made.model.layout.tensors(used)["0.atoms"], module[0].atoms.detach())


def test_a_client_that_never_trained_uses_the_global_model(client):
    it = atoms("mlp", method="fedatom_personal")
    with torch.no_grad():
        it.w.add_(1.0)  # no longer the initial model
    k = client(it)
    assert torch.equal(it.made.method.weights(k), k.received)


# ---- with other methods, with other rules ----
def test_a_client_side_of_another_method():
    plain = play(small_settings("fedatom", "mlp"))
    for neutral in (
        {"name": "fedprox", "mu": 0.0},
        {"name": "fedsol", "rho": 0.0},
        {"name": "moon", "mu": 0.0},
        "fedavg",
    ):
        assert play(small_settings("fedatom", "mlp", options={"client": neutral})).hashes == plain.hashes
    for other in ("fedprox", "fedsol", "scaffold", "fedld", "moon", "fedcm"):
        it = play(small_settings("fedatom", "mlp", options={"client": other}, train={"momentum": 0.0}))
        assert it.reason == "finished"
        assert it.hashes[0] != plain.hashes[0], other
    principal = play(
        small_settings("fedatom", "mlp", options={"client": {"name": "fedld", "margin": 0.0}, "period": 2})
    )
    rule = play(small_settings("fedatom", "mlp", options={"period": 2}, server={"rule": "principal"}))
    assert principal.hashes == rule.hashes


def test_a_method_around_it_has_its_fast_rounds():
    """fedsol along fedatom's clients: whatever does not make the step is fedatom's, fast rounds included."""
    inner = {"name": "fedatom", "client": "fedprox", "period": 5}
    it = play(small_settings("fedsol", model={"name": "helpers:conv_net"}, options={"prox": inner, "layers": "all"}))
    full, coef = it.made.messages.sizes["d"], it.made.messages.sizes[COEF]
    assert [row["up_parameters"] // len(row["cohort"]) for row in it.rows] == [full, full - coef, full - coef]


def test_principal_directions_of_the_coefficients_alone():
    """server.rule.groups: atoms and theta_h by the mean, coefficients by the rule; in fast rounds there are none."""
    mean = play(small_settings("fedatom", "mlp", options={"period": 2}, rounds=2))
    it = play(
        small_settings(
            "fedatom", "mlp", options={"period": 2}, rounds=2, server={"rule": {"name": "principal", "groups": [COEF]}}
        )
    )
    config = small_settings("fedatom", "mlp", options={"period": 2}, rounds=1)
    one = play(config)
    first = play(config.model_copy(update={"server": it.made.settings.server}))
    layout = it.made.model.layout
    for s in layout.segments:
        assert torch.equal(s.view(first.w), s.view(one.w)) == (s.group != COEF), s.name
    coefficients = layout.select({COEF})
    moved = coefficients.take(first.w - first.w0)
    rows = coefficients.take(one.uploads.dw)
    n = torch.tensor([float(one.made.data.train_sizes[k]) for k in one.rows[0]["cohort"]], dtype=torch.float64)
    torch.testing.assert_close(
        moved, linear.combine(rows, rules.principal_coefficients(linear.gram(rows), n / n.sum())), rtol=1e-4, atol=1e-7
    )
    assert it.hashes[0] != mean.hashes[0]


@pytest.mark.parametrize(("optim", "period"), [("momentum", 2), ("adam", 3)])
def test_server_optimisers_rest_with_the_coefficients(optim, period):
    """Their memory of the coefficients is untouched by fast rounds: it is that of slow rounds alone."""
    it = prepare(
        small_settings("fedatom", "mlp", rounds=period, options={"period": period}, server={"optim": optim, "lr": 0.01})
    )
    after = []
    it.fed.reporter.callbacks.round = lambda row: after.append((it.fed.server.optimizer.state.clone(), it.w.clone()))
    it.fed.run()
    layout = it.made.model.layout
    rest, others = layout.select({COEF}), layout.select(layout.groups() - {COEF})
    assert rest.size == it.made.messages.sizes[COEF]
    assert len(after) == period
    for state, w in after[1:]:
        assert torch.equal(rest.take(state), rest.take(after[0][0]))
        assert torch.equal(rest.take(w), rest.take(after[0][1]))
        assert not torch.equal(others.take(state), others.take(after[0][0]))


REFUSED = {
    "fedper": ({}, "shares and trains the whole model; FedPer"),
    "fedrep": ({}, "shares and trains the whole model; FedRep"),
    "fedatom": ({}, "leaves the architecture alone; FedAtom"),
    "fedatom_personal": ({}, "leaves the architecture alone; FedAtomPersonal"),
    "fedpara": ({}, "leaves the architecture alone; FedPara"),
    "scaffold": ({"period": 5}, "period: 1"),
    "fedcm": ({"period": 2}, "period: 1"),
    "feddyn": ({"period": 5}, "period: 1"),
}


@pytest.mark.parametrize("client", REFUSED)
def test_refused(client):
    options, words = REFUSED[client]
    with pytest.raises(UserError, match=words):
        prepare(small_settings("fedatom", "mlp", options={"client": client, **options}))


@pytest.mark.parametrize("client", ["ditto", "knnper"])
def test_one_personal_model_a_client(client):
    prepare(small_settings("fedatom", "mlp", options={"client": client}))
    with pytest.raises(UserError, match="fedatom_personal says what its clients use, and so does"):
        prepare(small_settings("fedatom_personal", "mlp", options={"client": client}))


def test_the_old_keys_name_the_new_method():
    with pytest.raises(UserError, match=r"method\.personal: personal atoms are method fedatom_personal"):
        prepare(small_settings("fedatom", "mlp", options={"personal": True}))


def test_groups_that_are_not_there():
    with pytest.raises(UserError, match=r"server.rule.groups: there is no group atoms; .* has atom, coef, head, norm"):
        prepare(small_settings("fedatom", "norm", server={"rule": {"name": "krum", "groups": ["atoms"]}}))
    with pytest.raises(UserError, match=r"server.rule.groups needs server.rule.name"):
        prepare(small_settings("fedatom", "norm", server={"rule": {"groups": ["atom"]}}))
    rule = {"rule": {"name": "median", "groups": ["coef"]}}
    with pytest.raises(UserError, match=r"server.rule.groups: method fedatom has a server rule of its own"):
        prepare(small_settings("fedatom", "norm", options={"client": "fednova"}, server=rule))


@pytest.mark.parametrize("travel", [Travel(but=("coefs",)), Travel(groups=(ATOM, "coefs"))])
def test_only_groups_of_the_model_can_rest_or_travel(monkeypatch, travel):
    monkeypatch.setattr(FedAtom, "travels", lambda self, t, rounds: travel if t else Travel())
    words = "hook travels, round 1: there is no layout group 'coefs'; this model has atom, body, coef, head$"
    with pytest.raises(UserError, match=words):
        atoms("mlp")


def test_what_its_clients_method_replaces_is_replaced_here():
    """means is FedAvg's: of a method with an aggregate of its own it is nobody's, borrowed or not."""
    assert means_of(FedAtom()) == {"dw": ("p",)}
    assert means_of(FedAtom(client=FedLD())) is None
