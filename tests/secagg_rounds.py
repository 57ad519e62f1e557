"""Runs secure sums in one process, with clients that drop out of any phase; used by tests and by a benchmark."""

import torch

from fedmpi.privacy.secagg.masking_client import MaskingClient
from fedmpi.privacy.secagg.masks import MaskStreams
from fedmpi.privacy.secagg.session import Session
from fedmpi.privacy.secagg.unmasking_server import UnmaskingServer

PHASES = 5


def make_session(clients, threshold, **options):
    options = {"run_id": "run", "round": 3, "attempt": 0} | options
    return Session(clients=tuple(clients), threshold=threshold, **options)


class SecureSum:
    """A secure sum, phase by phase. A test may replace messages of a phase before it runs the next one."""

    def __init__(self, session, vectors, drops=None, identities=None):
        """vectors: client -> int64 (n,). drops: client -> the phase, 0 to 4, before whose message it drops out."""
        self.session, self.vectors, self.drops = session, vectors, drops or {}
        identities = identities or {}
        self.clients = {k: MaskingClient(session, k, identities.get(k)) for k in session.clients}
        self.server = UnmaskingServer(session)
        self.total = torch.zeros_like(next(iter(vectors.values())))

    def present(self, phase, clients):
        return [k for k in clients if self.drops.get(k, PHASES) > phase]

    def advertise(self):
        self.keys = {k: self.clients[k].advertise_keys() for k in self.present(0, self.session.clients)}

    def share(self):
        keys = self.server.collect_keys(self.keys)
        self.sent = {k: self.clients[k].share_keys(keys) for k in self.present(1, keys)}

    def mask(self):
        received = self.server.collect_shares(self.sent)
        self.masked = {}
        for k in self.present(2, received):
            self.masked[k] = self.vectors[k].clone()
            MaskStreams(self.clients[k].make_masks(received[k])).add_to(self.masked[k])

    def confirm(self):
        for vector in self.masked.values():
            self.total += vector
        self.survivors, self.dropped = self.server.choose_survivors(self.masked)
        both = self.survivors, self.dropped
        self.confirmations = {k: self.clients[k].confirm_survivors(*both) for k in self.present(3, self.survivors)}

    def reveal(self):
        confirmations = self.server.collect_confirmations(self.confirmations)
        self.revealed = {k: self.clients[k].reveal_shares(confirmations) for k in self.present(4, confirmations)}

    def unmask(self):
        self.server.make_unmasking(self.revealed).add_to(self.total)
        return self.total

    def run(self):
        for phase in (self.advertise, self.share, self.mask, self.confirm, self.reveal):
            phase()
        return self.unmask()
