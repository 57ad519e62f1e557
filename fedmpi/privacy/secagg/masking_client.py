"""One client's part of a secure sum.

    advertise_keys      send new public keys, and a commitment to the seed of the self mask
    share_keys          send each client a share of the masking key and of the seed, encrypted for it
    make_masks          check the shares that have arrived, and compute the self mask and one mask for each other client
    confirm_survivors   sign the list of the clients whose vectors are in the sum
    reveal_shares       send the server one share for each client: of the seed if its vector is in the sum, otherwise of
                        its masking key

The masks that two clients share have opposite signs, so they cancel in the sum of both vectors. Each client answers
each step once. Since both secrets of a client need more than half of the clients, the server can never learn both.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedmpi.privacy.secagg.masks import MaskKey
from fedmpi.privacy.secagg.secret_sharing import SECRET_BYTES, SHARE_BYTES, split_secret
from fedmpi.privacy.secagg.session import COMMITMENTS_BYTES, KEY_BYTES, SIGNATURE_BYTES, Session

NONCE = bytes(12)  # constant, because each key encrypts a single message
INVALID_KEY = "advertised an invalid public key"
STEPS = ("advertise_keys", "share_keys", "make_masks", "confirm_survivors", "reveal_shares")


class MaskingClient:
    """One client in one session; its secrets never leave this object except as encrypted or revealed shares."""

    def __init__(self, session: Session, client: int, identity: Ed25519PrivateKey | None = None) -> None:
        """Draw new keys.

        Args:
            client: the client's id, one of `session.clients`.
            identity: the key with which the client signs; None: it does not sign.
        """
        self.session, self.client, self._identity = session, client, identity
        self._encryption_key, self._masking_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(SECRET_BYTES)
        self._next_step = 0
        self._keys_message = b""
        self._advertised: dict[int, bytes] = {}  # client -> its keys
        self._shares: dict[int, tuple[bytes, bytes]] = {}  # client -> this client's shares of its key and of its seed
        self._confirmed = frozenset[int](), frozenset[int]()  # the survivors, and the clients that have dropped out

    def advertise_keys(self) -> bytes:
        """Return the public keys, the commitment to the seed, and the signature, KEYS_MESSAGE_BYTES bytes."""
        self._begin("advertise_keys")
        session, public = self.session, [k.public_key() for k in (self._encryption_key, self._masking_key)]
        signed = b"".join(k.public_bytes_raw() for k in public) + session.commit(self._seed, "seed", self.client)
        self._keys_message = signed + self._sign(session.context("keys", self.client) + signed)
        return self._keys_message

    def share_keys(self, advertised: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the encrypted shares for each other client, SHARES_MESSAGE_BYTES bytes each.

        Args:
            advertised: client -> its keys, for all clients that have advertised keys.

        Raises:
            UserError: there are fewer clients than the threshold, keys are not signed, are used by two clients, or are
                not those that this client has advertised.
        """
        self._begin("share_keys")
        session, me = self.session, self.client
        session.check_enough(advertised, "have advertised keys")
        if advertised.get(me) != self._keys_message:
            raise session.refusal(me, "did not advertise the keys that the server sends under its name")
        owners = dict[bytes, int]()
        for other, message in advertised.items():
            session.check_keys_message(other, message)
            for key in (encryption_key(message), masking_key(message)):
                if (owner := owners.setdefault(key, other)) != other:
                    raise session.refusal(other, f"advertised a key of {session.name(owner)}")
        self._advertised, holders = dict(advertised), [k + 1 for k in advertised]
        key_shares = split_secret(self._masking_key.private_bytes_raw(), session.threshold, holders)
        seed_shares = split_secret(self._seed, session.threshold, holders)
        self._shares[me] = key_shares[me + 1], seed_shares[me + 1]
        sent = dict[int, bytes]()
        for other in advertised:
            if other != me:
                both = key_shares[other + 1], seed_shares[other + 1]
                commitments = commit_shares(session, me, other, *both)
                cipher = ChaCha20Poly1305(self._encryption_key_with(other, me, other))
                bound = session.context("shares", me, other) + commitments
                sent[other] = commitments + cipher.encrypt(NONCE, b"".join(both), bound)
        return sent

    def make_masks(self, received: Mapping[int, bytes]) -> list[MaskKey]:
        """Return the keys and signs of the masks for this client's vector (`MaskStreams`).

        Args:
            received: client -> its encrypted shares for this client, for all other clients that have shared keys.

        Raises:
            UserError: there are fewer clients than the threshold, or shares are not authentic.
        """
        self._begin("make_masks")
        session, me = self.session, self.client
        session.check_enough([me, *received], "have shared keys")
        for other, message in received.items():
            self._shares[other] = self._decrypt_shares(other, message)
        masks = [(session.derive_key(self._seed, "self mask", me), 1)]
        for other in received:
            try:
                key = session.mask_key(self._masking_key, masking_key(self._advertised[other]), me, other)
            except ValueError:
                raise session.refusal(other, INVALID_KEY) from None
            masks.append((key, 1 if me < other else -1))
        return masks

    def confirm_survivors(self, survivors: Collection[int], dropped: Collection[int]) -> bytes:
        """Return the signature under the list of clients whose vectors are in the sum, SIGNATURE_BYTES bytes.

        Args:
            survivors: the clients whose vectors are in the sum.
            dropped: the other clients that have shared keys.

        Raises:
            UserError: the lists overlap, are incomplete, or have too few survivors.
        """
        self._begin("confirm_survivors")
        session = self.session
        if both := sorted({*survivors} & {*dropped}):
            raise session.refusal(self.client, f"refuses to reveal both secrets of {session.name(both[0])}")
        if {*survivors} | {*dropped} != {*self._shares}:
            raise session.refusal(self.client, "refuses a list of clients that are not those that have shared keys")
        if self.client not in survivors:
            raise session.refusal(self.client, "has sent its vector, but the server says that it has dropped out")
        session.check_enough(survivors, "have sent an upload")
        self._confirmed = frozenset(survivors), frozenset(dropped)
        return self._sign(session.survivors_message(survivors, dropped))

    def reveal_shares(self, confirmations: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return one share of each client that has shared keys, SHARE_BYTES bytes each.

        Args:
            confirmations: client -> its signature under the list of survivors.

        Raises:
            UserError: too few clients have confirmed the list, or a client has confirmed another one.
        """
        self._begin("reveal_shares")
        session, (survivors, dropped) = self.session, self._confirmed
        session.check_enough(confirmations, "have confirmed the list of clients")
        check_confirmations(session, survivors, dropped, confirmations)
        return {other: shares[other in survivors] for other, shares in self._shares.items()}

    def _begin(self, step: str) -> None:
        """Raise UserError if this is not the next step of the protocol; each client answers each step once."""
        if STEPS.index(step) != self._next_step:
            raise self.session.refusal(self.client, f"refuses the step {step}, because it answers each step once")
        self._next_step += 1

    def _sign(self, message: bytes) -> bytes:
        return bytes(SIGNATURE_BYTES) if self._identity is None else self._identity.sign(message)

    def _encryption_key_with(self, other: int, sender: int, recipient: int) -> bytes:
        """Return the key for messages between this client and another one, in one direction.

        Raises:
            UserError: the other client's public key is invalid.
        """
        try:
            public = encryption_key(self._advertised[other])
            return self.session.agree(self._encryption_key, public, "encryption", sender, recipient)
        except ValueError:
            raise self.session.refusal(other, INVALID_KEY) from None

    def _decrypt_shares(self, sender: int, message: bytes) -> tuple[bytes, bytes]:
        """Return a client's shares of its masking key and of its seed.

        Raises:
            UserError: the message is not authentic, or the shares do not belong to its commitments.
        """
        session, me = self.session, self.client
        commitments, encrypted = message[:COMMITMENTS_BYTES], message[COMMITMENTS_BYTES:]
        try:
            cipher = ChaCha20Poly1305(self._encryption_key_with(sender, sender, me))
            both = cipher.decrypt(NONCE, encrypted, session.context("shares", sender, me) + commitments)
        except InvalidTag:
            text = f"sent shares to {session.name(me)} that are not authentic: they were altered, belong to another "
            raise session.refusal(sender, f"{text}round or attempt, or are for another recipient") from None
        shares = both[:SHARE_BYTES], both[SHARE_BYTES:]
        if commit_shares(session, sender, me, *shares) != commitments:
            raise session.refusal(sender, f"sent {session.name(me)} shares that differ from its commitments")
        return shares


def encryption_key(message: bytes) -> bytes:
    """Return the public key for encryption in a client's advertised keys."""
    return message[:KEY_BYTES]


def masking_key(message: bytes) -> bytes:
    """Return the public key for masks in a client's advertised keys."""
    return message[KEY_BYTES : 2 * KEY_BYTES]


def commit_shares(session: Session, owner: int, holder: int, key_share: bytes, seed_share: bytes) -> bytes:
    """Return the commitments to a holder's shares of the masking key and of the seed of their owner."""
    return b"".join(commit_share(session, owner, holder, share, i) for i, share in enumerate((key_share, seed_share)))


def commit_share(session: Session, owner: int, holder: int, share: bytes, is_seed: int) -> bytes:
    """Return the commitment to a holder's share of its owner's seed (is_seed = 1) or masking key (0)."""
    return session.commit(share, ("key share", "seed share")[is_seed], owner, holder)


def check_confirmations(
    session: Session, survivors: Collection[int], dropped: Collection[int], confirmations: Mapping[int, bytes]
) -> None:
    """Raise UserError if a client that is no survivor, or has signed another list, is among the confirmations."""
    for client, signature in confirmations.items():
        if client not in survivors:
            raise session.refusal(client, "confirms the list of clients, but has dropped out")
        if session.public_keys is not None:
            signed = session.survivors_message(survivors, dropped)
            session.check_signature(client, signature, signed, "the list of clients in the sum")
