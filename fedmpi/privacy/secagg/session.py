"""What the clients and the server of one secure sum agree on beforehand: clients, threshold, and sizes of messages.

A session is one attempt to compute the sum of one round. All keys are new in each attempt, because the server may have
reconstructed keys in the attempt before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedmpi.common.errors import UserError
from fedmpi.privacy.secagg.secret_sharing import SHARE_BYTES

KEY_BYTES = HASH_BYTES = 32
SIGNATURE_BYTES, TAG_BYTES = 64, 16
# Advertised keys: public key for encryption, public key for masks, commitment to the seed of the self mask, signature.
SIGNED_BYTES = 2 * KEY_BYTES + HASH_BYTES
KEYS_MESSAGE_BYTES = SIGNED_BYTES + SIGNATURE_BYTES
# Shares for one recipient: commitments to the shares of the masking key and of the seed, and both shares, encrypted.
COMMITMENTS_BYTES = 2 * HASH_BYTES
SHARES_MESSAGE_BYTES = COMMITMENTS_BYTES + 2 * SHARE_BYTES + TAG_BYTES


@dataclass(frozen=True)
class Session:
    """The public parameters of one secure sum."""

    run_id: str  # differs between runs, and between the starts of a run that is resumed
    round: int
    attempt: int  # number of earlier attempts to compute the sum of this round
    clients: tuple[int, ...]  # the clients whose vectors are summed, ascending
    threshold: int  # smallest number of clients whose sum may become known
    site_names: Mapping[int, str] = field(default_factory=dict)  # client -> its name in messages
    # client -> the key that verifies its signatures; None: messages are not signed
    public_keys: Mapping[int, Ed25519PublicKey] | None = None

    def __post_init__(self) -> None:
        """Check the threshold.

        Raises:
            UserError: there are fewer clients than the threshold, or the threshold is at most half of the clients. In
                the second case a server could ask two disjoint groups of clients for different secrets of one client.
        """
        self.check_enough(self.clients, "take part")
        if 2 * self.threshold <= len(self.clients):
            raise UserError(
                f"privacy.secagg.threshold: {self.threshold} is at most half of the {len(self.clients)} clients of "
                f"round {self.round}, so two groups of clients could each unmask the uploads of the others; set it to "
                f"at least {len(self.clients) // 2 + 1}"
            )

    def name(self, client: int) -> str:
        """Return the name of a client in messages."""
        return f"site {self.site_names[client]}" if client in self.site_names else f"client {client}"

    def context(self, purpose: str, *clients: int) -> bytes:
        """Return bytes that identify a purpose within this session, so that no key or message fits another one."""
        return json.dumps(["secagg", self.run_id, self.round, self.attempt, purpose, *clients]).encode()

    def derive_key(self, secret: bytes, purpose: str, *clients: int) -> bytes:
        """Derive a key of 32 bytes from a secret with HKDF-SHA256."""
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=self.context(purpose, *clients)).derive(secret)

    def agree(self, own: X25519PrivateKey, other: bytes, purpose: str, *clients: int) -> bytes:
        """Return the key that the owners of two X25519 keys share, 32 bytes.

        Args:
            other: the public key of the other client, which may be any bytes.

        Raises:
            ValueError: `other` is not a valid public key.
        """
        return self.derive_key(own.exchange(X25519PublicKey.from_public_bytes(other)), purpose, *clients)

    def mask_key(self, own: X25519PrivateKey, other: bytes, one: int, two: int) -> bytes:
        """Return the key of the mask that two clients share; the order of the clients does not matter."""
        return self.agree(own, other, "mask", *sorted((one, two)))

    def commit(self, secret: bytes, purpose: str, *clients: int) -> bytes:
        """Return a commitment to a random secret: its hash, which tells nothing about a secret of 256 random bits."""
        return hashlib.sha256(self.context(purpose, *clients) + secret).digest()

    def survivors_message(self, survivors: Collection[int], dropped: Collection[int]) -> bytes:
        """Return the bytes by which a client confirms which clients' vectors are in the sum."""
        return json.dumps([self.context("survivors").decode(), sorted(survivors), sorted(dropped)]).encode()

    def check_enough(self, clients: Collection[int], did: str) -> None:
        """Raise UserError if these clients are fewer than the threshold; `did` says what they have done."""
        if len(clients) < self.threshold:
            raise UserError(
                f"round {self.round}: privacy.secagg needs at least {self.threshold} clients, but only {len(clients)} "
                f"clients {did}; nothing is released. Use more clients per round, or lower privacy.secagg.threshold"
            )

    def refusal(self, client: int, reason: str) -> UserError:
        """Return the error for a message of a client that is refused."""
        return UserError(f"round {self.round}: secure aggregation: {self.name(client)} {reason}")

    def check_keys_message(self, client: int, message: bytes) -> None:
        """Raise UserError if the keys that a client advertises are not signed by it for this session."""
        if self.public_keys is not None:
            signed, signature = message[:SIGNED_BYTES], message[SIGNED_BYTES:]
            self.check_signature(client, signature, self.context("keys", client) + signed, "its keys")

    def check_signature(self, client: int, signature: bytes, signed: bytes, what: str) -> None:
        """Raise UserError if a signature does not belong to this client and these bytes; `what` has been signed."""
        assert self.public_keys is not None
        try:
            self.public_keys[client].verify(signature, signed)
        except InvalidSignature:
            text = f"has not signed {what} for this round and attempt with the key in privacy.keys; the message was "
            raise self.refusal(client, f"{text}altered or is an old one, or the site uses another key") from None
