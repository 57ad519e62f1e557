"""The filter of bad uploads at rank 0: numbers that are not finite, updates far longer than the others'.

    bound = max(1000 median_k ||dw_k||, ||w||)                                   faults.max_norm: auto
The median is over the cohort's updates that are not zero; of fewer than ENOUGH of them there is no bound. An update no
longer than the model (its shared part) is never refused: where the other clients have nothing left to learn, one with
new data is far from their median.

With on_bad_update: drop a refused client has not taken part: the weights of the others sum to 1, nothing of its upload
reaches `aggregate`, and its state is that of before the round. With on_client_error: drop a client with an error is
refused likewise. Three rounds in a row without an upload that counts end the run in any case.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.engine.transport.gather import GatheredUploads
from fedmpi.flat import linear

TIMES = 1000.0
ENOUGH = 3  # norms of which one is the middle
IDLE = 3  # rounds in a row without a good upload, of which the last one ends the run
SHOWN = 5  # clients in a message
NOT_FINITE = "values that are not finite (nan or inf)"
REMEDY = "The usual cause is divergence: lower train.lr, or the weights of the method's own terms"
# client, norm (nan: something is not finite), bound (None: there is none); "error" of a client that raised an error
Refused = list[dict[str, Any]]


class UpdateFilter:
    """Decides which uploads of a round count. norms: client -> norm of its update, in the latest round."""

    def __init__(self, max_norm: float | str | None = "auto", drop: bool = False) -> None:
        """max_norm: None for no bound; drop: leave bad uploads out, else they end the run."""
        self.max_norm, self.drop = max_norm, drop
        self.norms = dict[int, float]()
        self.idle_since: int | None = None  # the first of the rounds in a row without a good upload, up to now

    def refused(
        self, t: int, members: Sequence[int], received: GatheredUploads, w: Tensor, failed: Collection[int] = ()
    ) -> Refused:
        """Return the uploads that do not count in round t, and warn of them in one line.

        Args:
            t: the round.
            members: its clients, ascending.
            received: their uploads.
            w: (s,) the shared part of the global model.
            failed: clients with an error, which have no upload.

        Raises:
            UserError: bad uploads are not dropped, or this is the third round in a row without a good one.
        """
        norms = received.norms().tolist()
        if self.drop:  # else the step ends the run if a result is not finite
            norms = [n if finite else torch.nan for n, finite in zip(norms, received.finite(), strict=True)]
        self.norms = dict(zip(members, norms, strict=True))
        bound, source = self._bound(norms, w)
        most = torch.inf if bound is None else bound
        refused: Refused = [
            {"client": k, "norm": norm, "bound": bound}
            for k, norm in self.norms.items()
            if not (norm <= most and norm < torch.inf)
        ]
        text = _describe(refused, source)
        if refused and not self.drop:
            end = f"the round was dropped. {REMEDY}; faults.on_bad_update: drop goes on without"
            raise UserError(f"round {t}: {text}; {end}")
        key = "on_bad_update" if refused else "on_client_error" if failed else "on_lost_rank"
        if failed:
            text += f"{'; ' if text else ''}client {', '.join(map(str, sorted(failed)))} came to an error"
            refused += [{"client": k, "norm": torch.nan, "bound": bound, "error": True} for k in failed]
        if len(refused) < len(members):
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = t
        idle = self.idle_since is not None
        text = text or "all its clients were lost with the ranks that had them"
        if self.idle_since is not None and t - self.idle_since >= IDLE - 1:
            raise UserError(f"round {t}: {text}; for {IDLE} rounds not one upload was good, and the run ends. {REMEDY}")
        if key == "on_bad_update" or idle:
            every = ", which are all of it: nothing changes" if idle else ""
            warnings.warn(f"round {t}: {text}; left out of the round{every} (faults.{key}: drop)", stacklevel=2)
        return sorted(refused, key=lambda each: int(each["client"]))

    def _bound(self, norms: Sequence[float], w: Tensor) -> tuple[float | None, str]:
        """Return the bound of this round, None if there is none, and its origin."""
        if not isinstance(self.max_norm, str):
            return self.max_norm, "faults.max_norm"
        known = [norm for norm in norms if 0 < norm < torch.inf]
        if len(known) < ENOUGH:
            return None, ""
        middle = median_low(known)
        bound = TIMES * middle
        if any(norm > bound for norm in norms):
            bound = max(bound, float(linear.row_norms(linear.block_norms(w[None]))))
        return bound, f"faults.max_norm: auto; the median norm is {middle:.3g}"


def _describe(bad: Refused, source: str) -> str:
    """`client 1, 2 sent values that are not finite (nan or inf); client 4 sent an update of norm 1e+30, beyond ...`"""
    broken = ", ".join(str(each["client"]) for each in bad if each["norm"] != each["norm"])
    long = [each for each in bad if each["norm"] == each["norm"]]
    text = [f"client {broken} sent {NOT_FINITE}"] if broken else []
    text += [f"client {each['client']} sent an update of norm {each['norm']:.3g}" for each in long[:SHOWN]]
    if long:
        others = " (and others)" if len(long) > SHOWN else ""
        text[-1] += f"{others}, beyond the bound of {long[0]['bound']:.4g} ({source})"
    return "; ".join(text)
