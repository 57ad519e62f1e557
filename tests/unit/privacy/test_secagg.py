"""Secure aggregation: the unmasked sum has the bits of the plain sum, and attacks are refused."""

import hashlib
import random
import re

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from secagg_rounds import SecureSum, make_session

from fedmpi.common.errors import UserError
from fedmpi.privacy.secagg.masking_client import MaskingClient
from fedmpi.privacy.secagg.masks import CHUNK, MaskStreams
from fedmpi.privacy.secagg.secret_sharing import SHARE_BYTES
from fedmpi.privacy.secagg.session import KEYS_MESSAGE_BYTES, SHARES_MESSAGE_BYTES, SIGNED_BYTES

CLIENTS, THRESHOLD, N = (2, 3, 5, 8, 9, 12, 13, 20), 5, 33


def draw_vectors(clients=CLIENTS, seed=0, n=N):
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randint(-(2**62), 2**62, (n,), generator=generator) for k in clients}


def sha256(x):
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()


def make_sum(run_to="", **options):
    identities = options.pop("identities", None)
    secure = SecureSum(make_session(CLIENTS, THRESHOLD, **options), draw_vectors(), identities=identities)
    phases = ("advertise", "share", "mask", "confirm", "reveal")
    for phase in phases[: phases.index(run_to) + 1] if run_to else ():
        getattr(secure, phase)()
    return secure


def make_identities():
    identities = {k: Ed25519PrivateKey.generate() for k in CLIENTS}
    return identities, {k: key.public_key() for k, key in identities.items()}


def test_masked_equals_unmasked_in_200_rounds_with_clients_that_drop_out_in_every_phase():
    draw, completed, phases_of_drops = random.Random(36), 0, set()
    for t in range(200):
        drops = {}
        for k in CLIENTS:
            phase = next((phase for phase in range(5) if draw.random() < 0.1), None)
            if phase is not None:
                drops[k] = phase
        vectors = draw_vectors(seed=t)
        secure = SecureSum(make_session(CLIENTS, THRESHOLD, round=t), vectors, drops)
        survivors = [k for k in CLIENTS if drops.get(k, 5) > 2]
        if sum(drops.get(k, 5) > 4 for k in CLIENTS) < THRESHOLD:
            with pytest.raises(
                UserError, match=rf"round {t}: .*needs at least 5 clients, but only [0-4] clients .*nothing is"
            ):
                secure.run()
            continue
        total = secure.run()
        plain = torch.zeros(N, dtype=torch.int64)
        for k in survivors:
            plain += vectors[k]
        assert sha256(total) == sha256(plain)
        assert not any(torch.equal(secure.masked[k], vectors[k]) for k in survivors)
        completed += 1
        phases_of_drops |= set(drops.values())
    assert 60 < completed < 200
    assert phases_of_drops == set(range(5))


def test_masks_do_not_depend_on_the_pieces_of_the_vector():
    keys = [(bytes([i]) * 32, 1 - 2 * (i % 2)) for i in range(3)]
    n = 2 * CHUNK + 100
    whole, pieces = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    MaskStreams(keys).add_to(whole)
    streams = MaskStreams(keys)
    for a, b in ((0, 10), (10, CHUNK + 11), (CHUNK + 11, n)):
        streams.add_to(pieces[a:b])
    assert torch.equal(whole, pieces)
    MaskStreams([(key, -sign) for key, sign in keys]).add_to(pieces)
    assert not pieces.any()


def test_messages_have_fixed_sizes():
    secure = make_sum("reveal")
    assert {len(message) for message in secure.keys.values()} == {KEYS_MESSAGE_BYTES}
    assert {len(m) for sent in secure.sent.values() for m in sent.values()} == {SHARES_MESSAGE_BYTES}
    assert {len(share) for shares in secure.revealed.values() for share in shares.values()} == {SHARE_BYTES}


def test_keys_are_new_in_each_attempt():
    first, second = make_sum("advertise"), make_sum("advertise", attempt=1)
    assert not {m[:SIGNED_BYTES] for m in first.keys.values()} & {m[:SIGNED_BYTES] for m in second.keys.values()}


@pytest.mark.parametrize(("clients", "threshold"), [((1, 2, 3, 4), 2), (tuple(range(9)), 4)])
def test_a_threshold_of_at_most_half_of_the_clients_is_refused(clients, threshold):
    least = len(clients) // 2 + 1
    with pytest.raises(UserError, match=f"threshold: {threshold} is at most half.*set it to at least {least}"):
        make_session(clients, threshold)
    make_session(clients, least)


def test_fewer_clients_than_the_threshold_are_refused():
    with pytest.raises(UserError, match="needs at least 3 clients, but only 2 clients take part; nothing is released"):
        make_session((1, 2), 3)


# ---- attacks by clients ----
def test_a_wrong_share_of_a_survivor_or_of_a_dropped_client_is_refused():
    for owner in (3, 12):
        secure = SecureSum(make_session(CLIENTS, THRESHOLD), draw_vectors(), drops={12: 2})
        for phase in (secure.advertise, secure.share, secure.mask, secure.confirm, secure.reveal):
            phase()
        share = bytearray(secure.revealed[8][owner])
        share[-1] ^= 1
        secure.revealed[8][owner] = bytes(share)
        with pytest.raises(UserError, match=f"round 3: .*client 8 revealed a wrong share of client {owner}"):
            secure.unmask()


def test_a_wrong_share_of_the_own_seed_is_refused():
    secure = make_sum("reveal")
    secure.revealed[2][2] = bytes(SHARE_BYTES)
    with pytest.raises(UserError, match="client 2 sent the other clients wrong shares of its seed"):
        secure.unmask()


@pytest.mark.parametrize("drop", [False, True])
def test_shares_of_another_secret_are_refused(drop):
    secure = SecureSum(make_session(CLIENTS, THRESHOLD), draw_vectors(), drops={5: 2} if drop else None)
    secure.advertise()
    other = MaskingClient(secure.session, 5)  # the shares are consistent, but those of another seed and key
    secure.clients[5]._seed, advertised_key = other._seed, secure.clients[5]._masking_key
    secure.clients[5]._masking_key = other._masking_key
    secure.share()
    secure.clients[5]._masking_key = advertised_key
    secure.mask()
    secure.confirm()
    secure.reveal()
    what = "masking key" if drop else "seed"
    with pytest.raises(UserError, match=f"client 5 sent the other clients wrong shares of its {what}"):
        secure.unmask()


def test_altered_shares_and_shares_that_differ_from_their_commitments_are_refused(monkeypatch):
    secure = make_sum("share")
    message = bytearray(secure.sent[9][3])
    message[-1] ^= 1
    secure.sent[9][3] = bytes(message)
    with pytest.raises(UserError, match="client 9 sent shares to client 3 that are not authentic"):
        secure.mask()
    secure = make_sum("advertise")
    monkeypatch.setattr("fedmpi.privacy.secagg.masking_client.commit_shares", lambda *_: bytes(64))
    secure.share()
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"client \d+ sent client \d+ shares that differ from its commitments"):
        secure.mask()


@pytest.mark.parametrize("change", [{"attempt": 1}, {"round": 4}, {"run_id": "other"}])
def test_an_old_message_is_refused(change):
    old, secure = make_sum("share"), make_sum("share", **change)
    secure.sent[9] = old.sent[9]
    with pytest.raises(UserError, match=r"client 9 sent shares to client 2 .* authentic.*another round or attempt"):
        secure.mask()


def test_a_message_for_another_recipient_is_refused():
    secure = make_sum("share")
    secure.sent[9][2] = secure.sent[9][3]
    with pytest.raises(UserError, match=r"client 9 sent shares to client 2 .* authentic.*another recipient"):
        secure.mask()


def test_keys_of_another_client_and_invalid_keys_are_refused():
    secure = make_sum("advertise")
    secure.keys[13] = secure.keys[9]
    with pytest.raises(UserError, match="client 13 advertised a key of client 9"):
        secure.share()
    secure = make_sum("advertise")
    secure.keys[13] = bytes(KEYS_MESSAGE_BYTES)
    with pytest.raises(UserError, match="client 13 advertised an invalid public key"):
        secure.share()


# ---- attacks by the server ----
def test_a_client_answers_each_step_once():
    secure = make_sum("reveal")
    for step, arguments in (("reveal_shares", [{}]), ("confirm_survivors", [CLIENTS, ()]), ("advertise_keys", [])):
        with pytest.raises(UserError, match=f"client 2 refuses the step {step}, because it answers each step once"):
            getattr(secure.clients[2], step)(*arguments)


@pytest.mark.parametrize(
    ("survivors", "dropped", "message"),
    [
        (CLIENTS, (3,), "client 2 refuses to reveal both secrets of client 3"),
        (CLIENTS[:4], CLIENTS[4:], "only 4 clients have sent an upload"),
        (CLIENTS[:6], (), "client 2 refuses a list of clients that are not those that have shared keys"),
        ((*CLIENTS, 99), (), "client 2 refuses a list of clients that are not those that have shared keys"),
        (CLIENTS[1:], CLIENTS[:1], "client 2 has sent its vector, but the server says that it has dropped out"),
    ],
)
def test_a_client_refuses_lists_that_would_give_the_server_both_secrets(survivors, dropped, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make_sum("mask").clients[2].confirm_survivors(survivors, dropped)


def test_a_client_refuses_keys_that_the_server_has_replaced():
    secure, other = make_sum("advertise"), make_sum("advertise")
    with pytest.raises(UserError, match="client 2 did not advertise the keys that the server sends under its name"):
        secure.clients[2].share_keys(secure.keys | {2: other.keys[2]})


# ---- signatures ----
def test_signed_messages_give_the_same_sum():
    identities, public = make_identities()
    secure = make_sum(identities=identities, public_keys=public)
    assert sha256(secure.run()) == sha256(sum(draw_vectors().values()))


def test_keys_without_the_right_signature_are_refused():
    identities, public = make_identities()
    names = {k: f"hospital_{k}" for k in CLIENTS}
    options = {"public_keys": public, "site_names": names}
    text = "round 3: secure aggregation: site hospital_5 has not signed its keys for this round and attempt"
    old = make_sum("advertise", identities=identities, **options)
    replay = make_sum("advertise", identities=identities, attempt=1, **options)
    replay.keys[5] = old.keys[5]
    stranger = make_sum("advertise", identities=identities | {5: Ed25519PrivateKey.generate()}, **options)
    unsigned = make_sum("advertise", **options)
    for secure in (replay, stranger):
        with pytest.raises(UserError, match=text):
            secure.share()
        with pytest.raises(UserError, match=text):
            secure.clients[2].share_keys(secure.keys)
    with pytest.raises(UserError, match="site hospital_2 has not signed its keys"):
        unsigned.share()


def test_a_server_that_shows_clients_different_lists_of_survivors_is_refused():
    identities, public = make_identities()
    secure = make_sum("mask", identities=identities, public_keys=public)
    one, two = (CLIENTS, ()), (CLIENTS[:-1], CLIENTS[-1:])
    confirmations = {k: secure.clients[k].confirm_survivors(*(two if k == 9 else one)) for k in CLIENTS}
    with pytest.raises(UserError, match="client 9 has not signed the list of clients in the sum"):
        secure.clients[2].reveal_shares(confirmations)
