"""How far a round's updates agree: what drift and conflict look like in numbers.

    K_ij = <u_i, u_j>          cos_ij = K_ij / (||u_i|| ||u_j||)          K = E diag(lambda) E'
u_i is the update of client i, as much of it as travels in the round; D the direction that the server's step takes.
Norms are known of any round, K where the server's rule forms it (or where it is asked for, at the price of forming it),
and with K the cosines, the share of pairs in conflict (cos < 0) and the spectrum: lambda_1 / sum lambda near 1 says
that all go along one line, all lambda alike that no two have anything in common.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from fedmpi.flat import lengths
from fedmpi.method.context import Span, Uploads


class Seen(Uploads):
    """The same uploads; what a rule has asked of them need not be formed once more."""

    def __init__(self, up: Uploads) -> None:
        super().__init__(up.clients, up.n, up.p, up._views)
        self.up = up
        self.known: Tensor | None = None  # (m, m) the Gram matrix of dw
        self.sums: list[tuple[weakref.ref[Tensor], Tensor]] = []  # of dw, with their coefficients

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        made = self.up.combine(coefficients, slot, span)
        if slot == "dw" and span is None:
            self.sums.append((weakref.ref(made), coefficients.detach().to("cpu", torch.float64, copy=True)))
        return made

    def gram(self, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot != "dw" or span is not None:
            return self.up.gram(slot, span)
        if self.known is None:
            self.known = self.up.gram()
        return self.known.clone()

    def products(self, v: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        return self.up.products(v, slot, span)

    def trimmed(self, trim: float, slot: str = "dw") -> Tensor:
        return self.up.trimmed(trim, slot)

    def along(self, direction: Tensor, form: bool) -> Tensor | None:
        """(m,) <u_i, D>:  K c  where D was made as the sum with coefficients c; else formed, or unknown."""
        for made, c in self.sums:
            if made() is direction and self.known is not None:
                return self.known @ c
        return self.up.products(direction.detach()) if form else None


def figures(up: Seen, norms: Mapping[int, float], direction: Tensor, form: bool) -> dict[str, Any]:
    """One round's figures, rounded to six digits.

    Args:
        norms: ||u_i|| by client, of all who sent something.
        direction: (s,) D, the very tensor that the rule has returned.
        form: whether to form the Gram matrix, and <u_i, D>, if the rule has not.

    Returns:
        clients, norms (m,)    whose updates counted, ascending, and how long they are
        direction              ||D||
        and where K is known
        cosine_mean, cosine_min, negative_pairs    over pairs of updates that are not zero; the share with cos < 0
        eigenvalues (m,)       lambda, the largest first
        to_direction (m,)      cos(u_i, D), where <u_i, D> is known
        A cosine with a zero vector, or a mean over no pairs, is None.
    """
    length = float(lengths.of_rows(lengths.of_blocks(direction.detach()[None])))
    found: dict[str, Any] = {
        "clients": list(up.clients),
        "norms": _rounded(norms[k] for k in up.clients),
        "direction": _short(length),
    }
    if form:
        up.gram()
    if up.known is None:
        return found
    found |= of_gram(up.known)
    along = up.along(direction, form)
    if along is not None:
        found["to_direction"] = _rounded((along / (_lengths(up.known) * length)).clamp(-1, 1).tolist())
    return found


def of_gram(K: Tensor) -> dict[str, Any]:
    """What a Gram matrix (m, m) says of all pairs, and its spectrum; see `figures`.

    >>> of_gram(torch.tensor([[4.0, -3.0], [-3.0, 9.0]], dtype=torch.float64))
    {'cosine_mean': -0.5, 'cosine_min': -0.5, 'negative_pairs': 1.0, 'eigenvalues': [10.4051, 2.59488]}
    """
    lengths = _lengths(K)
    cos = (K / (lengths[:, None] * lengths)).clamp(-1, 1)[torch.ones_like(K).triu(1).bool()]
    cos = cos[~cos.isnan()]
    spectrum = torch.linalg.eigvalsh(K).flip(0)
    noise = len(K) * torch.finfo(K.dtype).eps * spectrum[:1].clamp(min=0)  # below it the signs are chance
    return {
        "cosine_mean": _short(float(cos.mean())),
        "cosine_min": _short(float(cos.min())) if len(cos) else None,
        "negative_pairs": _short(float((cos < 0).double().mean())),
        "eigenvalues": _rounded(spectrum.where(spectrum > noise, 0.0).tolist()),
    }


def _lengths(K: Tensor) -> Tensor:
    """(m,), nan for a zero update."""
    lengths = K.diagonal().clamp(min=0).sqrt()
    return lengths.where(lengths > 0, torch.nan)


def _short(x: float) -> float | None:
    """Six digits: what is read off a figure, in half the bytes."""
    return float(f"{x:.6g}") if isfinite(x) else None


def _rounded(values: Iterable[float]) -> list[float | None]:
    return [_short(x) for x in values]
