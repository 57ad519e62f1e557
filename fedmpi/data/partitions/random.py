"""Samples at random: in equal parts (iid), or in shares drawn from a Dirichlet distribution, of each class in the three
conventions that papers use, or of all samples (quantity)."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.data.partitions.parts import Partition, check_classes, check_enough, equal_sizes

# Shares drawn before giving up: 100,000 draws for 100 clients and 10 classes, of which FedSOL's alpha .05 took 2,000 to
# 90,000; some five seconds.
MAX_SHARES = 100_000_000
BLOCK = 100_000  # shares judged at once
TINY = np.finfo(np.float64).tiny  # the quotient q / sum(q) is inaccurate for smaller sums, which alpha < .01 yields

Alpha = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1)]


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Partition:
    """Uniform at random, in equal parts; the first n mod N clients hold one sample more."""
    check_enough(len(labels), clients, "iid")
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
    """Label skew drawn from a Dirichlet distribution; smaller alpha, stronger skew (1e6, the most, is even).

    convention: who draws the shares, by the papers that do so.
    class:        for each class q ~ Dir(alpha 1_N), q_k = 0 for clients that hold n/N samples already; the shuffled
                  class is cut at floor(cumsum(q) n_c).  Redrawn until every client holds min_size samples (Yurochkin
                  2019; NIID-Bench).
    class_plain:  the same without setting q_k to 0.
    client:       q_k ~ Dir(alpha 1_C) for each client, equal sizes; client after client draws its samples' classes
                  from q_k, an exhausted class is dropped and q_k renormalised (Hsu 2019).
    """
    check_classes(labels, "dirichlet")
    check_enough(len(labels), clients, "dirichlet", min_size)
    if convention == "client":
        return _by_client(labels, clients, rng, alpha)
    return _by_shares(labels, clients, rng, alpha, min_size, "dirichlet", balance=convention == "class")


def quantity(
    labels: np.ndarray, clients: int, rng: np.random.Generator, *, alpha: Alpha = 0.5, min_size: Size = 10
) -> Partition:
    """Quantity skew: samples at random, in parts of sizes q n; smaller alpha, stronger skew (NIID-Bench, Li 2022).

    q ~ Dir(alpha 1_N), drawn until every client has min_size samples; the permuted samples are cut at
    floor(cumsum(q) n).
    """
    check_enough(len(labels), clients, "quantity", min_size)
    one_class = np.zeros(len(labels), dtype=np.int64)
    return _by_shares(one_class, clients, rng, alpha, min_size, "quantity", balance=False)


def _by_shares(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    alpha: float,
    min_size: int,
    scheme: str,
    balance: bool,
) -> Partition:
    """Cut each shuffled class by the first draw of shares that gives every client min_size samples.

    A draw is one Dir(alpha 1_N) a class. Many draws are judged at once and the generator is set back to behind the
    accepted one, so that the samples drawn next are those of draws one after another.
    """
    stock = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    totals = np.array([len(rows) for rows in stock])  # (C,)
    concentration, redraws = np.full(clients, alpha), rng.spawn(1)[0]
    shares, best, tried, many = len(totals) * clients, 0, 0, 1
    while tried < max(MAX_SHARES // shares, 1):
        before = rng.bit_generator.state
        q = rng.dirichlet(concentration, size=(many, len(totals)))  # (D, C, N)
        counts = _counts(q, totals, redraws, concentration, balance)
        least = counts.sum(1).min(1)  # (D,)
        if least.max() >= min_size:
            first = int((least >= min_size).argmax())
            rng.bit_generator.state = before
            rng.dirichlet(concentration, size=(first + 1, len(totals)))
            owner = np.empty(len(labels), dtype=np.int64)
            for rows, sizes in zip(stock, counts[first], strict=True):
                owner[rng.permutation(rows)] = np.repeat(np.arange(clients), sizes)
            return Partition.from_owners(owner, clients)
        best, tried = max(best, int(least.max())), tried + many
        many = max(min(2 * many, BLOCK // shares), 1)
    other = ", or take convention=client, whose sizes are equal" if scheme == "dirichlet" else ""
    raise UserError(
        f"data.partition: none of {tried} draws of {scheme} (alpha={alpha}, clients={clients}) gave every client "
        f"min_size={min_size} of the {len(labels)} samples (the best gave {best}); raise alpha, lower `clients` or "
        f"min_size{other}"
    )


def _counts(
    q: np.ndarray, totals: np.ndarray, redraws: np.random.Generator, concentration: np.ndarray, balance: bool
) -> np.ndarray:
    """Whole numbers of samples (D, C, N) for draws q (D, C, N): classes of `totals` samples, cut at the rounded-down
    cumulative shares. balance: whether clients that hold n / N samples already get no more."""
    draws, _, clients = q.shape
    sizes, counts = np.zeros((draws, clients), dtype=np.int64), np.empty(q.shape, dtype=np.int64)
    for c, total in enumerate(totals):
        free = sizes < totals.sum() / clients if balance else np.ones_like(sizes, dtype=bool)
        share = q[:, c] * free
        while len(lost := np.flatnonzero(share.sum(1) < TINY)):  # all mass of the class fell on full clients
            share[lost] = redraws.dirichlet(concentration, size=len(lost)) * free[lost]
        ends = np.floor(np.cumsum(share / share.sum(1, keepdims=True), axis=1) * total).astype(np.int64)
        # The rounded sum may be slightly below 1; the samples left over go to the last free client, not to a full one.
        last = clients - 1 - free[:, ::-1].argmax(1)
        ends[np.arange(clients) >= last[:, None]] = total
        counts[:, c] = np.diff(ends, axis=1, prepend=0)
        sizes += counts[:, c]
    return counts


def _by_client(labels: np.ndarray, clients: int, rng: np.random.Generator, alpha: float) -> Partition:
    """Convention client. Drawing several samples at once and rejecting those of exhausted classes has exactly the
    distribution of drawing sample by sample."""
    stock = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    left = np.array([len(rows) for rows in stock])  # (C,)
    parts = []
    for piece in np.array_split(np.arange(len(labels)), clients):
        taken = np.zeros_like(left)
        q = rng.dirichlet(np.full(len(stock), alpha))
        while (need := len(piece) - int(taken.sum())) > 0:
            q = np.where(taken < left, q, 0.0)
            if q.sum() < TINY:  # no mass on the classes left; Dir restricted to some classes is Dir on them, so draw it
                q[taken < left] = rng.dirichlet(np.full(int((taken < left).sum()), alpha))
            q = q / q.sum()
            taken = np.minimum(taken + rng.multinomial(need, q), left)
        parts.append(np.concatenate([rows[n - t : n] for rows, n, t in zip(stock, left, taken, strict=True)]))
        left = left - taken
    return Partition.from_parts(parts).ascending()
