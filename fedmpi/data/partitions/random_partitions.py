"""Random partitions: equal parts (iid), or fractions drawn from a Dirichlet distribution (dirichlet, quantity)."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.data.partitions.base import Partition, check_class_labels, check_enough_samples, equal_sizes

# The largest number of fractions that are drawn before the partition is given up, which takes about five seconds: it
# allows 100,000 draws for 100 clients and 10 classes, of which FedSOL's alpha of .05 needs 2,000 to 90,000
MAX_SHARES = 100_000_000
SHARES_PER_BLOCK = 100_000  # number of fractions that are drawn and checked at once
MIN_SINGLE_DRAWS = 50  # draws that are made singly before blocks may be given up
BLOCK_DRAWS_PER_SINGLE = 20  # number of draws in a block that take as long as a single one
MIN_MASS = np.finfo(np.float64).tiny  # q / sum(q) would be inaccurate for smaller sums, which occur for alpha < .01

Alpha = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1)]


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Partition:
    """Random parts of equal size. For n samples and N clients, the first n mod N clients have one more sample."""
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

    alpha: concentration of the Dirichlet distribution; the largest value, 1e6, gives equal fractions.
    min_size: the smallest allowed number of samples of a client.
    convention: how the fractions q are drawn, which differs between papers. There are N clients, C classes and n
    samples, of which n_c are in class c.
    class:        For each class q ~ Dir(alpha 1_N), with q_k = 0 for clients that already have n/N samples; the
                  shuffled class is cut at floor(cumsum(q) n_c). All classes are drawn again until every client has
                  min_size samples (Yurochkin 2019; NIID-Bench).
    class_plain:  The same without setting q_k to 0.
    client:       For each client q_k ~ Dir(alpha 1_C); all clients have equal sizes. The clients, one after another,
                  draw the classes of their samples from q_k; an exhausted class is dropped, and q_k is renormalised
                  (Hsu 2019).
    """
    check_class_labels(labels, "dirichlet")
    check_enough_samples(len(labels), clients, "dirichlet", min_size)
    if convention == "client":
        return _partition_by_client(labels, clients, rng, alpha)
    return _partition_by_shares(labels, clients, rng, alpha, min_size, "dirichlet", balance=convention == "class")


def quantity(
    labels: np.ndarray, clients: int, rng: np.random.Generator, *, alpha: Alpha = 0.5, min_size: Size = 10
) -> Partition:
    """Quantity skew: clients have different numbers of random samples (NIID-Bench, Li 2022).

    The fractions q ~ Dir(alpha 1_N) of the N clients are redrawn until every client has at least min_size samples; the
    n shuffled samples are cut at floor(cumsum(q) n).

    alpha: concentration of the Dirichlet distribution; a smaller value gives a stronger skew.
    min_size: the smallest allowed number of samples of a client.
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
    """Shuffle the samples of each class, and cut them into parts of sizes drawn by `_draw_until_accepted`."""
    rows_by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    totals = np.array([len(rows) for rows in rows_by_class])  # (C,)
    counts = _draw_until_accepted(totals, clients, rng, alpha, min_size, scheme, balance)
    owner = np.empty(len(labels), dtype=np.int64)
    for rows, sizes in zip(rows_by_class, counts, strict=True):  # samples are drawn only for the accepted sizes
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
    """Draw fractions until every client has min_size samples; return sample counts by class and client, (C, N).

    A draw consists of one sample of Dir(alpha 1_N) for each class. Many draws are made at once; then the generator is
    set to its state after the accepted draw. The result is the same as with one draw at a time, but this is about 15
    times as fast.

    Args:
        totals: number of samples of each class, (C,).
        clients: number of clients N.
        rng: draws the fractions.
        alpha: concentration of the Dirichlet distribution.
        min_size: smallest allowed number of samples of a client.
        scheme: the name of the scheme, for the message.
        balance: whether a client that already has n/N samples gets no samples of the remaining classes.

    Raises:
        UserError: no draw was accepted; at most MAX_SHARES fractions are drawn in total.
    """
    concentration, smallest, tried, single_draws, draws = np.full(clients, alpha), 0, 0, 0, 1
    max_draws = max(MAX_SHARES // (len(totals) * clients), 1)
    while tried + BLOCK_DRAWS_PER_SINGLE * single_draws < max_draws:
        stop = 0
        if (
            single_draws < MIN_SINGLE_DRAWS or single_draws < tried / 8
        ):  # otherwise hardly any draw can be checked in a block
            draws = min(draws, max_draws - tried, max(SHARES_PER_BLOCK // (len(totals) * clients), 1))
            before = rng.bit_generator.state
            q = rng.dirichlet(concentration, size=(draws, len(totals)))  # (draws, C, N)
            counts, empty = _counts_from_shares(q, totals, balance)
            smallest_sizes = counts.sum(1).min(1)  # (draws,)
            accepted = np.flatnonzero((smallest_sizes >= min_size) & ~empty)
            stop = int(empty.argmax()) if empty.any() else draws  # the first draw that cannot be used
            if len(accepted) and accepted[0] < stop:
                rng.bit_generator.state = before
                rng.dirichlet(concentration, size=(int(accepted[0]) + 1, len(totals)))
                return counts[accepted[0]]
            smallest = max([smallest, *smallest_sizes[:stop].tolist()])
            tried += stop
            draws *= 2
            if stop == len(counts):
                continue
            rng.bit_generator.state = before
            rng.dirichlet(concentration, size=(stop, len(totals)))
        counts = _draw_balanced_sizes_once(totals, concentration, rng)
        size = int(counts.sum(0).min())
        if size >= min_size:
            return counts
        smallest, tried, single_draws, draws = max(smallest, size), tried + 1, single_draws + 1, 1
    remedy = "raise alpha, or lower clients or min_size"
    remedy += ", or set data.partition.convention: client, which gives equal sizes" if scheme == "dirichlet" else ""
    raise UserError(
        f"data.partition: none of {tried} draws of {scheme} (alpha={alpha}, clients={clients}) gave every client at "
        "least "
        f"min_size={min_size} of the {totals.sum()} samples (in the best draw, the smallest client has {smallest}); "
        f"{remedy}"
    )


def _counts_from_shares(q: np.ndarray, totals: np.ndarray, balance: bool) -> tuple[np.ndarray, np.ndarray]:
    """Convert the fractions of D draws to sample counts.

    Args:
        q: the fraction of each class that each client gets in each draw, (D, C, N).
        totals: the number of samples of each class, (C,).
        balance: whether clients that already have n/N samples get no samples of the remaining classes.

    Returns:
        The numbers of samples, (D, C, N), and whether each draw is invalid, (D,). A draw is invalid if, for some class,
        the fractions of all clients that may still get samples are practically 0.
    """
    draws, _, clients = q.shape
    sizes, counts = np.zeros((draws, clients), dtype=np.int64), np.empty(q.shape, dtype=np.int64)
    empty = np.zeros(draws, dtype=bool)
    for c, total in enumerate(totals):
        free = sizes < totals.sum() / clients if balance else np.ones_like(sizes, dtype=bool)
        share = q[:, c] * free
        mass = share.sum(1)
        empty |= mass < MIN_MASS
        counts[:, c] = _sizes_from_shares(share / np.where(mass < MIN_MASS, 1.0, mass)[:, None], free, total)
        sizes += counts[:, c]
    return counts, empty


def _sizes_from_shares(share: np.ndarray, free: np.ndarray, total: int) -> np.ndarray:
    """Cut `total` samples at the cumulative fractions, rounded down; return the sizes of the parts, (D, N).

    share: the fractions of the N clients in D draws, (D, N); free: whether a client may get samples, (D, N).
    """
    ends = np.floor(np.cumsum(share, axis=1) * total).astype(np.int64)
    # The sum of fractions may be slightly below 1; the remaining samples go to the last client that is not full.
    last = free.shape[1] - 1 - free[:, ::-1].argmax(1)
    ends[np.arange(free.shape[1]) >= last[:, None]] = total
    return np.diff(ends, axis=1, prepend=0)


def _draw_balanced_sizes_once(totals: np.ndarray, concentration: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Make one draw with `balance`; return sample counts by class and client, (C, N).

    A client is full if it has n/N samples. The fractions of full clients are set to 0. If this leaves a class without
    fractions above 0, its fractions are drawn again for the other clients only: Dir(alpha 1_N), restricted to some
    clients and renormalised, is the Dirichlet distribution on these clients.
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
        ends[c, clients - int(free[::-1].argmax()) :] = total  # as in _sizes_from_shares
        sizes += np.diff(ends[c])
        free = sizes < full
    return np.diff(ends, axis=1)


def _partition_by_client(labels: np.ndarray, clients: int, rng: np.random.Generator, alpha: float) -> Partition:
    """Return parts of equal size; each client draws the classes of its samples from its own fractions (Hsu 2019).

    Several samples are drawn at once, and samples of exhausted classes are rejected. The result has exactly the same
    distribution as if samples were drawn one at a time, with q renormalised whenever a class is exhausted.
    """
    rows_by_class = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    remaining = np.array([len(rows) for rows in rows_by_class])  # (C,)
    parts = []
    for piece in np.array_split(np.arange(len(labels)), clients):
        taken = np.zeros_like(remaining)
        q = rng.dirichlet(np.full(len(rows_by_class), alpha))
        while (need := len(piece) - int(taken.sum())) > 0:
            q = np.where(taken < remaining, q, 0.0)
            if q.sum() < MIN_MASS:  # no mass on the remaining classes: draw Dir on these
                q[taken < remaining] = rng.dirichlet(np.full(int((taken < remaining).sum()), alpha))
            q = q / q.sum()
            taken = np.minimum(taken + rng.multinomial(need, q), remaining)
        parts.append(
            np.concatenate([rows[n - t : n] for rows, n, t in zip(rows_by_class, remaining, taken, strict=True)])
        )
        remaining = remaining - taken
    return Partition.from_parts(parts).ascending()
