"""Secure aggregation in the engine: the bits of the plain integer sum, on any ranks, with clients that drop out."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from helpers import federated, prepare, record, run_experiment, small_settings
from thread_ranks import run_in_threads

from fedmpi.common.errors import UserError
from fedmpi.engine.local import training_loop
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.engine.transport import gather_secure
from fedmpi.engine.transport.gather_secure import SecureAggregation
from fedmpi.flat import linear
from fedmpi.methods import registry
from fedmpi.privacy.secagg.masks import MaskStreams

BAD, SIZE = 2, 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Make blocks so small that slots of a tiny model are large, and are sent in several pieces."""
    monkeypatch.setattr(linear, "CHUNK", 64)
    monkeypatch.setattr(linear, "BLOCK", 128)
    monkeypatch.setattr(gather_secure, "PIECE_ENTRIES", 100)


def secure_settings(method="fedavg", net="mlp", threshold=3, **changes):
    return small_settings(method, net, privacy={"secagg": {"threshold": threshold}}, **changes)


def all_clients(method="fedavg", net="mlp", **changes):
    cohort = {"fraction": 1.0, **changes.pop("cohort", {})}
    return secure_settings(method, net, threshold=5, cohort=cohort, **changes)


def run_on_ranks(config, size=SIZE, dies=None, setup=lambda it: None, data=None):
    """Run on ranks that are threads; return rank 0's run."""

    def make(comm):
        it = prepare(config, data, comm)
        setup(it)
        return it

    def run(it):
        it.reason = it.fed.run()
        return it

    runs = run_in_threads(size, dies or {}, make, run)
    for it in runs.values():
        if isinstance(it, Exception):
            raise it
    return runs[0]


def run_unmasked(config, monkeypatch):
    """Run in one process without masks."""
    with monkeypatch.context() as patch:
        patch.setattr(MaskStreams, "add_to", lambda self, piece: None)
        return run_experiment(config)


def spoil(monkeypatch, change, rounds=(1,)):
    """Call change(fields of the upload) for client BAD in these rounds."""
    honest = ClientContext.run_round

    def spoiled(self, row):
        done = honest(self, row)
        if self.id == BAD and self.round in rounds:
            change(self.trainer.messages.upload_layout(self.round).packing.views(row))
        return done

    monkeypatch.setattr(ClientContext, "run_round", spoiled)


# ---- the bits ----
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedsam"])
def test_hashes_equal_those_of_local_reduction(method):
    plain = run_experiment(small_settings(method, server={"reduce": "local"}))
    secure = run_experiment(secure_settings(method))
    assert secure.hashes == plain.hashes
    for mine, other in zip(secure.rows, plain.rows, strict=True):
        assert mine["train_loss"] == pytest.approx(other["train_loss"], abs=1e-8)
        assert mine["accuracy"] == other["accuracy"]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {}),
        ("scaffold", {"cohort": {"weighting": "uniform"}}),
        ("fedavg", {"server": {"optim": "adam", "lr": 0.01}}),
    ],
)
def test_masked_equals_unmasked_on_any_ranks(monkeypatch, method, changes):
    config = secure_settings(method, **changes)
    plain = record(run_unmasked(config, monkeypatch))
    assert record(run_experiment(config)) == plain
    assert record(run_on_ranks(config)) == plain
    server = {**changes.get("server", {}), "trains_clients": True}
    config = secure_settings(method, **{**changes, "server": server})
    assert record(run_on_ranks(config, 3)) == plain


def test_masked_equals_unmasked_with_batch_statistics_which_are_a_small_slot(monkeypatch):
    config = secure_settings("fedavg", "norm")
    assert record(run_experiment(config)) == record(run_unmasked(config, monkeypatch))


def test_rank_0_receives_nothing_but_masked_vectors(monkeypatch):
    seen = []
    mask = MaskStreams.add_to
    monkeypatch.setattr(MaskStreams, "add_to", lambda self, x: (mask(self, x), seen.append(x.clone()))[0])
    run_experiment(secure_settings(rounds=1))
    masked, total = torch.cat(seen[:12]), torch.cat(seen[12:])  # 12 pieces
    assert len(masked) == len(total)
    assert 0.45 < (masked.abs() > 2**62).double().mean() < 0.55  # uniform integers
    assert not (total[1:].abs() > 2**54).any()


def test_clients_that_train_together_are_masked_too(monkeypatch):
    config = secure_settings(compute={"clients_per_pass": 2})
    assert record(run_experiment(config)) == record(run_unmasked(config, monkeypatch))


def test_a_round_in_which_a_rank_is_asked_to_stop_releases_nothing(monkeypatch):
    it = prepare(secure_settings(), stop=lambda: len(it.rows) == 1)
    unmask = []
    monkeypatch.setattr(gather_secure.SecureGather, "_unmask", lambda *_: unmask.append(len(it.rows)))
    assert it.fed.run() == "stopped"
    assert unmask == [0]


def test_a_server_that_repeats_old_headers_is_refused(monkeypatch):
    """Otherwise the session would have the identifier of an old one, and old signatures would be valid."""
    send, old = gather_secure.SecureGather._send_to_all, []

    def replay(self, what, text, size):
        old.append(text)
        return send(self, what, old[0] if what == "headers" else text, size)

    monkeypatch.setattr(gather_secure.SecureGather, "_send_to_all", replay)
    it = prepare(secure_settings(seed=1, cohort={"fraction": 1.0}, threshold=5))
    with pytest.raises(UserError, match=r"round 1: .* the server has not passed on the header of client 0"):
        it.fed.run()


# ---- clients that drop out ----
@pytest.mark.parametrize("ranks", [1, SIZE])
def test_a_client_whose_code_fails_drops_out(monkeypatch, ranks):
    honest = training_loop.iterate_batches

    def failing(self, *arguments):
        if self.id == BAD and self.round == 1:
            raise MemoryError
        yield from honest(self, *arguments)

    monkeypatch.setattr(training_loop, "iterate_batches", failing)
    config = all_clients("scaffold", cohort={"weighting": "uniform"}, faults={"on_client_error": "drop"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        it = run_experiment(config) if ranks == 1 else run_on_ranks(config, ranks)
        plain = run_unmasked(config, monkeypatch)
    assert it.hashes == plain.hashes
    assert [[each["client"] for each in row["refused"]] for row in it.rows] == [[], [BAD], []]
    assert all(math.isfinite(row["train_loss"]) for row in it.rows)


def test_the_mean_is_that_over_the_survivors(monkeypatch):
    spoil(monkeypatch, lambda fields: fields.dw.fill_(torch.nan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        it = run_experiment(all_clients("fedavg", "norm", faults={"on_bad_update": "drop"}))
        plain = run_experiment(
            small_settings("fedavg", "norm", cohort={"fraction": 1.0}, faults={"on_bad_update": "drop"})
        )
    assert [[each["client"] for each in row["refused"]] for row in it.rows] == [[], [BAD], []]
    assert torch.allclose(it.w, plain.w, atol=1e-6)
    assert torch.allclose(it.b, plain.b, atol=1e-5)
    losses = [row["train_loss"] for row in plain.rows]
    assert [row["train_loss"] for row in it.rows] == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields.dw.fill_(torch.inf), "values that are not finite"),
        (lambda fields: fields.dw.fill_(5000.0), "values up to 5000; privacy.secagg is limited to 4096"),
        (lambda fields: fields._loss.fill_(1e10), "a loss of 1e\\+10; privacy.secagg is limited to 4.29497e\\+09"),
        (lambda fields: fields._loss.fill_(torch.nan), "values that are not finite"),
    ],
)
def test_an_upload_out_of_range_ends_the_run(monkeypatch, change, message):
    spoil(monkeypatch, change)
    with pytest.raises(UserError, match=f"round 1: client 2 would send {message}.*faults.on_bad_update: drop"):
        run_experiment(all_clients())


@pytest.mark.filterwarnings("ignore:training has diverged")
def test_a_client_with_another_weight_changes_the_mean_by_at_most_the_bound_on_entries(monkeypatch):
    """Weights follow from the partition, so a client cannot state one; scaling its update has a bounded effect."""
    config = all_clients(rounds=1)
    honest = run_experiment(config)
    with monkeypatch.context() as patch:
        spoil(patch, lambda fields: fields.dw.copy_(4096 * fields.dw.sign()), rounds=(0,))
        scaled = run_experiment(config)
    weight = float(honest.fed.scheduler.cohort_weights(list(range(7)))[1][BAD])
    assert 0 < float((scaled.w - honest.w).abs().max()) <= weight * 4096 * 1.001
    spoil(monkeypatch, lambda fields: fields.dw.mul_(1e9), rounds=(0,))
    with pytest.raises(UserError, match="round 0: client 2 would send values up to"):
        run_experiment(config)


def test_a_vector_that_is_not_masked_as_agreed_is_detected_by_the_range_of_the_sum(monkeypatch):
    """As for the vector of an old round, or one to which a client has added other numbers."""
    make_masks, wrong = gather_secure.MaskingClient.make_masks, [(bytes(32), 1)]
    monkeypatch.setattr(
        gather_secure.MaskingClient,
        "make_masks",
        lambda self, received: (make_masks(self, received), wrong)[self.client == BAD],
    )
    with pytest.raises(UserError, match=r"round 0: privacy.secagg: the sum of the uploads is outside of its range"):
        run_experiment(all_clients())


def test_too_few_survivors_release_nothing(monkeypatch):
    monkeypatch.setattr(ClientContext, "run_round", fail_three_clients(ClientContext.run_round))
    it = prepare(all_clients(faults={"on_client_error": "drop"}))
    message = "privacy.secagg needs at least 5 clients, but only 4 clients have an upload to send; nothing is released"
    with pytest.raises(UserError, match=message):
        it.fed.run()
    assert [row["round"] for row in it.rows] == [0]


def test_poisson_cohorts_are_summed_until_one_is_too_small():
    it = prepare(secure_settings(threshold=2, rounds=50, cohort={"fraction": 0.5, "sampling": "poisson"}))
    sizes = [len(it.fed.scheduler.cohort(t)) for t in range(50)]
    assert max(sizes) > 4  # the threshold is then above half of the clients
    end = next(t for t, m in enumerate(sizes) if m < 2)
    message = f"round {end}: privacy.secagg needs at least 2 clients, but only {sizes[end]} clients take part"
    with pytest.raises(UserError, match=message):
        it.fed.run()
    it = prepare(secure_settings(threshold=2, rounds=1, cohort={"fraction": 0.5, "sampling": "poisson"}))
    it.fed.scheduler.cohort = lambda t: []
    with pytest.raises(UserError, match="only 0 clients take part"):
        it.fed.run()


def fail_three_clients(honest):
    def run_round(self, row):
        done = honest(self, row)
        if self.id < 3 and self.round == 1:
            row[2] = gather_secure.FAILED
        return done

    return run_round


# ---- ranks that fail ----
def test_a_round_is_repeated_with_new_keys_after_a_rank_failure(monkeypatch):
    config = secure_settings(faults={"on_lost_rank": "redo"}, evaluate={"protocol": ["global"]})
    whole = run_on_ranks(config)
    sessions, make = [], gather_secure.Session
    monkeypatch.setattr(gather_secure, "Session", lambda *a: (made := make(*a), sessions.append(made))[0])
    for message in range(6, 34, 2):
        assert run_on_ranks(config, dies={2: [message]}).hashes == whole.hashes
    repeated = [session for session in sessions if session.attempt == 1]
    assert repeated
    assert len({session.run_id for session in repeated}) > 1


def test_a_round_continues_without_the_clients_of_a_lost_rank():
    config = all_clients(faults={"on_lost_rank": "drop"}, evaluate={"protocol": ["global"]})
    it = run_on_ranks(config, size=6, dies={2: [12]})
    sizes = [len(row["cohort"]) for row in it.rows]
    assert min(sizes) < 7
    assert len(it.rows) == 3


# ---- keys of sites ----
def test_signed_messages_and_a_wrong_key():
    config, data = all_clients(), federated()
    identities = {k: Ed25519PrivateKey.generate() for k in range(data.clients)}
    public = {k: key.public_key() for k, key in identities.items()}
    names = {k: f"site_{k}" for k in public}

    def use_keys(identity_of):
        def setup(it):
            # each of the ranks 1 to 7 trains one client, since the ranks are equally fast
            k = (it.fed.comm.rank - 1) % 7
            secure = SecureAggregation(5, False, names, public, identity_of.get(k))
            it.fed.transport.secure_aggregation = secure
            it.fed.scheduler.config = replace(it.fed.scheduler.config, placement="pinned")

        return setup

    plain = run_on_ranks(config, size=8)
    assert run_on_ranks(config, size=8, setup=use_keys(identities)).hashes == plain.hashes
    with pytest.raises(UserError, match="site site_3 has not signed its keys for this round and attempt"):
        run_on_ranks(config, size=8, setup=use_keys(identities | {3: identities[4]}))


# ---- noise ----
def test_each_client_adds_its_noise_and_withholds_its_loss():
    calls = []

    def make_noise(t, attempt, client, n):
        calls.append((t, attempt, client))
        return torch.full((n,), 0.25 * client, dtype=torch.float64)

    it = prepare(all_clients(rounds=1))
    it.fed.transport.secure_aggregation = replace(it.fed.transport.secure_aggregation, make_noise=make_noise)
    it.fed.run()
    plain = run_experiment(all_clients(rounds=1))
    assert torch.allclose(it.w, plain.w + 0.25 * 21, atol=1e-5)
    assert calls == [(0, 0, k) for k in range(7)]
    assert it.rows[0]["train_loss"] == 0


# ---- what is refused ----
SINGLE = {"apfl", "ccvr", "fedcm", "feddisco", "fedexp", "fedfomo", "fedgh", "fedld", "fednova", "fedpac", "fedproto"}


@pytest.mark.parametrize("method", registry)
def test_every_method_gives_the_model_of_a_plain_run_or_is_refused(method):
    changes = {"rounds": 2, "cohort": {"weighting": "uniform"}, "evaluate": {"protocol": ["global"]}}
    if method in SINGLE:
        with pytest.raises(UserError, match=f"method {method} uses single uploads of .*; use another method"):
            prepare(secure_settings(method, **changes))
        return
    secure, plain = (
        run_experiment(secure_settings(method, **changes)),
        run_experiment(small_settings(method, **changes)),
    )
    assert torch.allclose(secure.w, plain.w, atol=1e-5)
    assert secure.reason == "finished"


REFUSED = [
    ({"method": "fedgh"}, "method fedgh uses single uploads of"),
    ({"method": "scaffold"}, "method scaffold needs the mean of dc with equal weights; set cohort.weighting: uniform"),
    ({"server": {"rule": {"name": "median"}}}, "server.rule: median uses single uploads; remove server.rule"),
    ({"server": {"placement": "sharded"}}, "server.placement: sharded distributes single uploads"),
    ({"comm": {"compression": "bf16"}}, "comm.compression: bf16 encodes single uploads; remove comm.compression"),
    ({"record": {"updates": "gram"}}, "record.updates: gram compares single uploads; set record.updates: false"),
    ({"faults": {"max_norm": 3.5}}, "faults.max_norm: 3.5 needs the norms of single uploads; remove faults.max_norm"),
    ({"analysis": ["drift"]}, "analysis: drift sends single models to the server; remove analysis"),
    ({"threshold": 2}, r"threshold: 2; a round has 4 clients, and must be above half of .*\. Allowed: 3 to 4"),
    ({"threshold": 5}, r"threshold: 5; a round has 4 clients, so no round would have enough\. Allowed: 3 to 4"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_needs_single_uploads_is_refused(changes, message):
    with pytest.raises(UserError, match=rf"privacy.secagg.*{message}"):
        prepare(secure_settings(**changes))


def test_keys_need_silos(tmp_path):
    config = small_settings("fedavg", privacy={"secagg": {"threshold": 3}, "keys": str(tmp_path)})
    with pytest.raises(UserError, match=r"privacy.keys: the keys of sites need data.silos"):
        prepare(config)


def test_a_method_that_reads_single_uploads_in_spite_of_its_declaration_is_refused():
    it = prepare(secure_settings())
    it.fed.server.rule = lambda updates, server: updates.dw[0]
    with pytest.raises(UserError, match=r"the method or rule uses the single uploads in updates.dw"):
        it.fed.run()
    it = prepare(secure_settings())
    it.fed.server.rule = lambda updates, server: updates.mean("dw", updates.uniform)
    with pytest.raises(UserError, match=r"uses another sum of slot 'dw' than updates.mean"):
        it.fed.run()
