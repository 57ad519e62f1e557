"""Random partitions: equal parts (iid), or shares drawn from a Dirichlet distribution (dirichlet, quantity)."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.data.partitions.base import Partition, check_class_labels, check_enough_samples, equal_sizes

# The largest number of shares that are drawn, which takes about five seconds: 100,000 draws for 100 clients and 10
# classes, for which FedSOL's alpha of .05 takes 2,000 to 90,000.
MAX_SHARES = 100_000_000
SHARES_PER_BLOCK = 100_000  # shares that are drawn and checked at once
MIN_SINGLE_DRAWS = 50  # draws made one by one before their share of all draws is considered
BLOCK_DRAWS_PER_SINGLE = 20  # draws in a block that take as long as one draw made alone
MIN_MASS = np.finfo(np.float64).tiny  # q / sum(q) is inaccurate for smaller sums, which occur for alpha < .01

Alpha = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1)]


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Partition:
    """Uniformly random samples, in equal parts; the first n mod N clients have one sample more."""
    check_enough_samples(len(labels), clients, "iid")
    sizes = equal_sizes(len(labels), clients)
    return Partition.from_sizes(rng.permutation(len(labels)), sizes).ascending()


def dirichlet(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Alpha = 0.5,
    convention: Literal["class", "class_plain", "client"] = "class",
    min_size: Size = 10,
) -> Partition:
    """Label skew drawn from a Dirichlet distribution; a smaller alpha gives a stronger skew.

    alpha: concentration of the Dirichlet distribution; the largest, 1e6, gives even shares.
    min_size: the least number of samples of a client.
    convention: how shares are drawn, following different papers.
    class:        for each class q ~ Dir(alpha 1_N), with q_k = 0 for clients that already have n/N samples;
                  the shuffled class is cut at floor(cumsum(q) n_c).  Redrawn until every client has min_size
                  samples (Yurochkin 2019; NIID-Bench).
    class_plain:  the same without setting q_k to 0.
    client:       q_k ~ Dir(alpha 1_C) for each client, and equal sizes; one client after the other draws the
                  classes of its samples from q_k; an exhausted class is dropped and q_k renormalised (Hsu 2019).
    """
    check_class_labels(labels, "dirichlet")
    check_enough_samples(len(labels), clients, "dirichlet", min_size)
    if convention == "client":
        return _partition_by_client(labels, clients, rng, alpha)
    return _partition_by_shares(labels, clients, rng, alpha, min_size, "dirichlet", balance=convention == "class")


def quantity(
    labels: np.ndarray, clients: int, rng: np.random.Generator, *, alpha: Alpha = 0.5, min_size: Size = 10
) -> Partition:
    """Quantity skew: random samples in parts of sizes q n; a smaller alpha gives a stronger skew (NIID-Bench, Li 2022).

    q ~ Dir(alpha 1_N) is drawn until every client has min_size samples; the permuted samples are cut at
    floor(cumsum(q) n).
    """
    check_enough_samples(len(labels), clients, "quantity", min_size)
    one_class = np.zeros(len(labels), dtype=np.int64)
    return _partition_by_shares(one_class, clients, rng, alpha, min_size, "quantity", balance=False)


def _partition_by_shares(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    alpha: float,
    min_size: int,
    scheme: str,
    balance: bool,
) -> Partition:
    """Cut each shuffled class by the first draw of shares that gives every client min_size samples."""
    stock = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    totals = np.array([len(rows) for rows in stock])  # (C,)
    counts = _draw_until_accepted(totals, clients, rng, alpha, min_size, scheme, balance)
    owner = np.empty(len(labels), dtype=np.int64)
    for rows, sizes in zip(stock, counts, strict=True):  # samples are drawn only for the accepted sizes
        owner[rng.permutation(rows)] = np.repeat(np.arange(clients), sizes)
    return Partition.from_owners(owner, clients)


def _draw_until_accepted(
    totals: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    alpha: float,
    min_size: int,
    scheme: str,
    balance: bool,
) -> np.ndarray:
    """Return how many samples of class c client k gets, (C, N), in the first draw that gives all clients min_size.

    A draw is one Dir(alpha 1_N) for each class. Many draws are made at once, and the generator is then reset to its
    state after the accepted draw. The result is that of one draw after the other, fifteen times as fast.
    """
    concentration, smallest, tried, slow, many = np.full(clients, alpha), 0, 0, 0, 1
    most = max(MAX_SHARES // (len(totals) * clients), 1)
    while tried + BLOCK_DRAWS_PER_SINGLE * slow < most:
        stop = 0
        if slow < MIN_SINGLE_DRAWS or slow < tried / 8:  # otherwise hardly any draw can be checked in a block
            many = min(many, most - tried, max(SHARES_PER_BLOCK // (len(totals) * clients), 1))
            before = rng.bit_generator.state
            q = rng.dirichlet(concentration, size=(many, len(totals)))  # (many, C, N)
            counts, empty = _counts_from_shares(q, totals, balance)
            least = counts.sum(1).min(1)  # (many,)
            good = np.flatnonzero((least >= min_size) & ~empty)
            stop = int(empty.argmax()) if empty.any() else many  # the first draw that cannot be used
            if len(good) and good[0] < stop:
                rng.bit_generator.state = before
                rng.dirichlet(concentration, size=(int(good[0]) + 1, len(totals)))
                return counts[good[0]]
            smallest = max([smallest, *least[:stop].tolist()])
            tried += stop
            many *= 2
            if stop == len(counts):
                continue
            rng.bit_generator.state = before
            rng.dirichlet(concentration, size=(stop, len(totals)))
        one = _draw_one_balanced(totals, concentration, rng)
        size = int(one.sum(0).min())
        if size >= min_size:
            return one
        smallest, tried, slow, many = max(smallest, size), tried + 1, slow + 1, 1
    other = ", or take convention=client, whose sizes are equal" if scheme == "dirichlet" else ""
    raise UserError(
        f"data.partition: none of {tried} draws of {scheme} (alpha={alpha}, clients={clients}) gave every client "
        f"min_size={min_size} of the {totals.sum()} samples (the best gave {smallest}); raise alpha, lower "
        f"`clients` or min_size{other}"
    )


def _counts_from_shares(q: np.ndarray, totals: np.ndarray, balance: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts (D, C, N) of draws q (D, C, N), and (D,) whether all mass of a class is on full clients."""
    draws, _, clients = q.shape
    sizes, counts = np.zeros((draws, clients), dtype=np.int64), np.empty(q.shape, dtype=np.int64)
    empty = np.zeros(draws, dtype=bool)
    for c, total in enumerate(totals):
        free = sizes < totals.sum() / clients if balance else np.ones_like(sizes, dtype=bool)
        share = q[:, c] * free
        mass = share.sum(1)
        empty |= mass < MIN_MASS
        counts[:, c] = _cut_by_shares(share / np.where(mass < MIN_MASS, 1.0, mass)[:, None], free, total)
        sizes += counts[:, c]
    return counts, empty


def _cut_by_shares(share: np.ndarray, free: np.ndarray, total: int) -> np.ndarray:
    """Return shares (D, N) of `total` samples as whole numbers, cut at the rounded-down cumulative shares."""
    ends = np.floor(np.cumsum(share, axis=1) * total).astype(np.int64)
    # The rounded sum may be slightly below 1; the remaining samples go to the last client that is not full.
    last = free.shape[1] - 1 - free[:, ::-1].argmax(1)
    ends[np.arange(free.shape[1]) >= last[:, None]] = total
    return np.diff(ends, axis=1, prepend=0)


def _draw_one_balanced(totals: np.ndarray, concentration: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return one balanced draw, in which a class whose mass is all on full clients is redrawn among the others.

    Dir(alpha 1_N) restricted to some clients is the Dirichlet distribution on them.
    """
    clients, full = len(concentration), totals.sum() / len(concentration)
    sizes, free = np.zeros(clients, dtype=np.int64), np.ones(clients, dtype=bool)
    ends = np.zeros((len(totals), clients + 1), dtype=np.int64)
    for c, total in enumerate(totals.tolist()):
        q = rng.dirichlet(concentration)
        q *= free
        mass = q.sum()
        if mass < MIN_MASS:
            q[free] = rng.dirichlet(concentration[free])
            mass = q.sum()
        q /= mass
        ends[c, 1:] = np.cumsum(q) * total  # rounded down
        ends[c, clients - int(free[::-1].argmax()) :] = total  # as in _cut
        sizes += np.diff(ends[c])
        free = sizes < full
    return np.diff(ends, axis=1)


def _partition_by_client(labels: np.ndarray, clients: int, rng: np.random.Generator, alpha: float) -> Partition:
    """Return the partition of the convention client.

    Several samples are drawn at once, and samples of exhausted classes are rejected. This has exactly the distribution
    of drawing one sample after the other.
    """
    stock = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    left = np.array([len(rows) for rows in stock])  # (C,)
    parts = []
    for piece in np.array_split(np.arange(len(labels)), clients):
        taken = np.zeros_like(left)
        q = rng.dirichlet(np.full(len(stock), alpha))
        while (need := len(piece) - int(taken.sum())) > 0:
            q = np.where(taken < left, q, 0.0)
            if q.sum() < MIN_MASS:  # no mass on the remaining classes; Dir restricted to these is Dir on them
                q[taken < left] = rng.dirichlet(np.full(int((taken < left).sum()), alpha))
            q = q / q.sum()
            taken = np.minimum(taken + rng.multinomial(need, q), left)
        parts.append(np.concatenate([rows[n - t : n] for rows, n, t in zip(stock, left, taken, strict=True)]))
        left = left - taken
    return Partition.from_parts(parts).ascending()
