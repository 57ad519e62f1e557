"""Statistics of a round's updates: their norms, and how well their directions agree.

    K_ij = <u_i, u_j>          cos_ij = K_ij / (||u_i|| ||u_j||)          K = E diag(lambda) E'

u_i is the update of client i (the part that is sent in the round), and D the direction of the server step. The norms
are known in every round. K is known if the server's rule computes it; otherwise it is computed only with
record.updates: gram. K determines the cosines, the fraction of pairs in conflict (cos < 0), and the spectrum: if
lambda_1 / sum lambda is near 1, all updates lie along one line; if all lambda are equal, the updates have equal norms
and are orthogonal to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from fedmpi.flat import linear
from fedmpi.method.context import Span, Uploads


class GramRecordingUploads(Uploads):
    """The uploads of a round; if a server rule computes the Gram matrix of the updates, it is stored here."""

    def __init__(self, updates: Uploads) -> None:
        """Wrap the uploads of a round."""
        super().__init__(updates.clients, updates.n, updates.p, updates._views)
        self.updates = updates
        self.gram_matrix: Tensor | None = None  # (m, m), of dw; None if it was not computed

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        return self.updates.combine(coefficients, slot, span)

    def gram(self, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot != "dw" or span is not None:
            return self.updates.gram(slot, span)
        if self.gram_matrix is None:
            self.gram_matrix = self.updates.gram()
        return self.gram_matrix.clone()

    def inner_products(self, v: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        return self.updates.inner_products(v, slot, span)

    def trimmed_mean(self, trim: float, slot: str = "dw") -> Tensor:
        return self.updates.trimmed_mean(trim, slot)


def compute_update_stats(
    updates: GramRecordingUploads, norms: Mapping[int, float], direction: Tensor, compute_gram: bool
) -> dict[str, Any]:
    """Return the statistics of one round's updates, rounded to six digits.

    Args:
        norms: client -> ||u_i||, for all clients that sent an update.
        direction: the direction D of the server step, (s,).
        compute_gram: whether to compute the cosines of the updates with D, and the Gram matrix K if the rule has not
            computed it.

    Returns:
        A dict with `clients` (the clients whose updates are aggregated, ascending), `norms` (the norms of these
        updates), `direction` (||D||), and if K is known:
        cosine_mean, cosine_min    over pairs of updates that are not zero
        negative_pairs             the fraction of these pairs with cos < 0
        eigenvalues (m,)           the eigenvalues lambda of K, the largest first
        to_direction (m,)          cos(u_i, D), if `compute_gram` is true
        Cosines with zero vectors, and means over no pairs, are None.
    """
    length = float(linear.row_norms(linear.block_norms(direction.detach()[None])))
    stats: dict[str, Any] = {
        "clients": list(updates.clients),
        "norms": _round_to_six_digits([norms[k] for k in updates.clients]),
        "direction": _round_to_six_digits([length])[0],
    }
    if compute_gram:
        updates.gram()
    K = updates.gram_matrix
    if K is None:
        return stats
    lengths = K.diagonal().clamp(min=0).sqrt()
    lengths = lengths.where(lengths > 0, torch.nan)  # (m,) nan for updates that are zero
    cos = (K / (lengths[:, None] * lengths)).clamp(-1, 1)[torch.ones_like(K).triu(1).bool()]
    cos = cos[~cos.isnan()]
    spectrum = torch.linalg.eigvalsh(K).flip(0)
    # the signs of smaller eigenvalues are arbitrary
    noise = len(K) * torch.finfo(K.dtype).eps * spectrum[:1].clamp(min=0)
    least = float(cos.min()) if len(cos) else torch.nan
    pairs = _round_to_six_digits([float(cos.mean()), least, float((cos < 0).double().mean())])
    stats |= dict(zip(("cosine_mean", "cosine_min", "negative_pairs"), pairs, strict=True))
    stats["eigenvalues"] = _round_to_six_digits(spectrum.where(spectrum > noise, 0.0).tolist())
    if compute_gram:
        along = updates.updates.inner_products(direction.detach())
        stats["to_direction"] = _round_to_six_digits((along / (lengths * length)).clamp(-1, 1).tolist())
    return stats


def _round_to_six_digits(values: Sequence[float]) -> list[float | None]:
    """Round values to six significant digits, and replace NaN and inf with None.

    Six digits suffice for plots and halve the file size.
    """
    return [float(f"{x:.6g}") if isfinite(x) else None for x in values]
