"""Clients as the data have them: a client of each site, or several that share one."""

from __future__ import annotations

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.data.partitions.parts import LEAVE_OUT, Partition, equal_sizes


def site(labels: np.ndarray, clients: int, rng: np.random.Generator, only: tuple[int | str, ...] = ()) -> Partition:
    """One client per natural site; `labels` holds the site 0..N-1 of each sample.

    only: the sites that are clients, by name, or by number where they have none; nobody trains on the others, but they
    stay in the global test set and in evaluate.protocol's `sites`: what one site has alone, or what a site gets from a
    model made without it.
    """
    if only:
        if clients != len(only):
            raise UserError(f"data.partition: only names {len(only)} sites, clients={clients}; {LEAVE_OUT}")
        chosen = np.array(only, dtype=np.int64)
        client = np.full(max(labels.max(), chosen.max()) + 1, -1)
        client[chosen] = np.arange(clients)
        return Partition.from_owners(client[labels], clients)
    present = np.unique(labels)
    if 0 not in present:
        raise UserError(
            f"data.partition: the training samples belong to sites {present.tolist()}, but the numbers of sites begin "
            "at 0; number them 0, 1, 2, ... without a gap"
        )
    if not np.array_equal(present, np.arange(clients)):
        raise UserError(
            f"data.partition: scheme site makes one client of each site, clients={clients}, but the training "
            f"samples belong to sites {present.tolist()}; {LEAVE_OUT}, set it to the number of sites, or take "
            "scheme domain, which divides a site among several clients"
        )
    return Partition.from_owners(labels, clients)


def domain(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Partition:
    """Several clients per natural site, or domain: each site's samples in equal parts at random among its clients.

    `labels` holds the site of each sample. Clients are dealt to sites evenly, in order: with 4 domains and 10 clients
    the first two have three each, the others two.
    """
    present = np.unique(labels)
    if clients < len(present):
        raise UserError(
            f"data.partition: scheme domain needs a client for each of the {len(present)} sites, clients={clients}; "
            "raise `clients`"
        )
    by_site = Partition.from_owners(np.searchsorted(present, labels), len(present))
    clients_of_site = Partition.from_sizes(np.arange(clients), equal_sizes(clients, len(present)))
    owner = np.empty(len(labels), dtype=np.int64)
    for name, rows, own in zip(present, by_site, clients_of_site, strict=True):
        if len(rows) < len(own):
            raise UserError(
                f"data.partition: site {name} has {len(rows)} samples for {len(own)} clients; lower `clients`"
            )
        owner[rng.permutation(rows)] = np.repeat(own, equal_sizes(len(rows), len(own)))
    return Partition.from_owners(owner, clients)
