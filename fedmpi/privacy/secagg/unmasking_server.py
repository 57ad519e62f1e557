"""The server's part of a secure sum: it passes messages on, and removes the masks from the sum of masked vectors.

The server adds up the masked vectors outside of this class. Masks that two clients share cancel in the sum, unless one
of them has dropped out. The server therefore reconstructs the seeds of the clients in the sum, and the masking keys of
those that have dropped out, and derives from them the masks that are left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedmpi.privacy.secagg.masking_client import check_confirmations, commit_share, masking_key
from fedmpi.privacy.secagg.masks import MaskStreams
from fedmpi.privacy.secagg.secret_sharing import combine_shares, combine_weights
from fedmpi.privacy.secagg.session import COMMITMENTS_BYTES, HASH_BYTES, SIGNED_BYTES, Session


class UnmaskingServer:
    """The server in one session. All of its methods raise UserError if fewer clients than the threshold are left."""

    def __init__(self, session: Session) -> None:
        """Start the session."""
        self.session = session
        self._advertised: dict[int, bytes] = {}  # client -> its keys
        self._commitments: dict[int, dict[int, bytes]] = {}  # client -> holder -> commitments to the holder's shares
        self._survivors, self._dropped = frozenset[int](), frozenset[int]()

    def collect_keys(self, advertised: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the keys that each client receives.

        Args:
            advertised: client -> the message from `advertise_keys`, for the clients that have sent one.

        Raises:
            UserError: keys are not signed by their client.
        """
        self.session.check_enough(advertised, "have advertised keys")
        for client, message in advertised.items():
            self.session.check_keys_message(client, message)
        self._advertised = dict(advertised)
        return self._advertised

    def collect_shares(self, sent: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
        """Return recipient -> sender -> the encrypted shares that the recipient receives.

        Args:
            sent: sender -> recipient -> the message from `share_keys`, for the clients that have sent messages.
        """
        self.session.check_enough(sent, "have shared keys")
        self._commitments = {
            sender: {holder: message[:COMMITMENTS_BYTES] for holder, message in messages.items()}
            for sender, messages in sent.items()
        }
        return {k: {sender: messages[k] for sender, messages in sent.items() if sender != k} for k in sent}

    def choose_survivors(self, senders: Collection[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Return the clients whose vectors are in the sum, and those that have shared keys but have dropped out.

        Args:
            senders: the clients whose masked vectors have arrived completely.
        """
        self.session.check_enough(senders, "have sent an upload")
        self._survivors = frozenset(senders)
        self._dropped = frozenset(self._commitments) - self._survivors
        return self._survivors, self._dropped

    def collect_confirmations(self, confirmations: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the signatures under the list of survivors that each client receives.

        Args:
            confirmations: client -> the message from `confirm_survivors`, for the clients that have sent one.

        Raises:
            UserError: a client has signed another list.
        """
        self.session.check_enough(confirmations, "have confirmed the list of clients")
        check_confirmations(self.session, self._survivors, self._dropped, confirmations)
        return dict(confirmations)

    def make_unmasking(self, revealed: Mapping[int, Mapping[int, bytes]]) -> MaskStreams:
        """Return the streams that remove all masks from the sum of the survivors' masked vectors.

        Args:
            revealed: holder -> owner -> the share from `reveal_shares`, for the clients that have answered.

        Raises:
            UserError: a share is wrong.
        """
        session, survivors = self.session, self._survivors
        session.check_enough(revealed, "have revealed shares")
        for holder, shares in revealed.items():
            for owner, share in shares.items():
                self._check_share(owner, holder, share)
        weights = combine_weights([holder + 1 for holder in sorted(revealed)[: session.threshold]])

        def reconstruct(owner: int) -> bytes | None:
            return combine_shares({holder + 1: revealed[holder][owner] for holder in revealed}, weights)

        masks = list[tuple[bytes, int]]()
        for owner in sorted(survivors):
            seed = reconstruct(owner)
            commitment = self._advertised[owner][SIGNED_BYTES - HASH_BYTES : SIGNED_BYTES]
            if seed is None or session.commit(seed, "seed", owner) != commitment:
                raise session.refusal(owner, "sent the other clients wrong shares of its seed")
            masks.append((session.derive_key(seed, "self mask", owner), -1))
        for owner in sorted(self._dropped):
            secret = reconstruct(owner)
            key = None if secret is None else X25519PrivateKey.from_private_bytes(secret)
            if key is None or key.public_key().public_bytes_raw() != masking_key(self._advertised[owner]):
                raise session.refusal(owner, "sent the other clients wrong shares of its masking key")
            for k in sorted(survivors):
                mask = session.mask_key(key, masking_key(self._advertised[k]), k, owner)
                masks.append((mask, -1 if k < owner else 1))
        return MaskStreams(masks)

    def _check_share(self, owner: int, holder: int, share: bytes) -> None:
        """Raise UserError if a share differs from the one that its owner has committed to.

        A client's share of its own secret has no commitment; the reconstructed secret shows whether it is right.
        """
        if owner == holder:
            return
        is_seed = owner in self._survivors
        commitment = self._commitments[owner][holder][is_seed * HASH_BYTES :][:HASH_BYTES]
        if commit_share(self.session, owner, holder, share, is_seed) != commitment:
            raise self.session.refusal(holder, f"revealed a wrong share of {self.session.name(owner)}")
