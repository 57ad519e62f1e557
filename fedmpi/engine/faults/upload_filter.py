"""The filter of bad uploads at rank 0: values that are not finite, and updates far longer than those of others.

    bound = max(1000 median_k ||dw_k||, ||w||)                                   faults.max_norm: auto

The median is over the cohort's updates that are not zero; if there are fewer than ENOUGH, there is no bound. An update
that is no longer than the model (its shared part) is never refused: if the other clients have converged, the update of
a client with new data is far from their median.

With on_bad_update: drop a refused client counts as absent: the weights of the others sum to 1, `aggregate` sees nothing
of its upload, and its state is reset to that before the round. With on_client_error: drop a client whose code raised an
error is treated in the same way. Three rounds in a row without an upload that counts end the run in any case.
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

NORM_FACTOR = 1000.0
MIN_NORMS = 3  # least number of norms for a median
MAX_IDLE_ROUNDS = 3  # number of rounds in a row without a good upload after which the run ends
MAX_CLIENTS_SHOWN = 5  # largest number of clients in a message
NOT_FINITE = "values that are not finite (nan or inf)"
REMEDY = "The usual cause is divergence: lower train.lr, or the weights of the method's own terms"
# client, norm (nan: a value is not finite), bound (None: no bound); "error" if the client's code raised an error
RefusedUploads = list[dict[str, Any]]


class UpdateFilter:
    """Decides which uploads of a round count; `norms` has the norms of the latest updates, by client."""

    def __init__(self, max_norm: float | str | None = "auto", drop: bool = False) -> None:
        """Args:
        max_norm: the bound; "auto": computed in each round; None: no bound.
        drop: leave bad uploads out; otherwise they end the run.
        """
        self.max_norm, self.drop = max_norm, drop
        self.norms = dict[int, float]()
        self.idle_since: int | None = None  # the first of the latest rounds in a row without a good upload

    def find_refused(
        self, t: int, cohort: Sequence[int], received: GatheredUploads, w: Tensor, failed: Collection[int] = ()
    ) -> RefusedUploads:
        """Return the uploads that do not count in round t, and issue one warning about them.

        Args:
            members: the clients of the round, ascending.
            received: their uploads.
            w: the shared part of the global model, (s,).
            failed: clients whose code raised an error, which have no upload.

        Raises:
            UserError: bad uploads are not dropped, or this is the third round in a row without a good one.
        """
        norms = received.update_norms().tolist()
        if self.drop:  # otherwise the server step ends the run if a result is not finite
            norms = [n if finite else torch.nan for n, finite in zip(norms, received.finite_rows(), strict=True)]
        self.norms = dict(zip(cohort, norms, strict=True))
        bound, source = self._bound(norms, w)
        limit = torch.inf if bound is None else bound
        refused: RefusedUploads = [
            {"client": k, "norm": norm, "bound": bound}
            for k, norm in self.norms.items()
            if not (norm <= limit and norm < torch.inf)
        ]
        text = _describe_refused(refused, source)
        if refused and not self.drop:
            end = f"the round was dropped. {REMEDY}; faults.on_bad_update: drop goes on without"
            raise UserError(f"round {t}: {text}; {end}")
        key = "on_bad_update" if refused else "on_client_error" if failed else "on_lost_rank"
        if failed:
            text += f"{'; ' if text else ''}client {', '.join(map(str, sorted(failed)))} came to an error"
            refused += [{"client": k, "norm": torch.nan, "bound": bound, "error": True} for k in failed]
        if len(refused) < len(cohort):
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = t
        idle = self.idle_since is not None
        text = text or "all its clients were lost with the ranks that had them"
        if self.idle_since is not None and t - self.idle_since >= MAX_IDLE_ROUNDS - 1:
            raise UserError(
                f"round {t}: {text}; for {MAX_IDLE_ROUNDS} rounds not one upload was good, and the run ends. {REMEDY}"
            )
        if key == "on_bad_update" or idle:
            every = ", which are all of it: nothing changes" if idle else ""
            warnings.warn(f"round {t}: {text}; left out of the round{every} (faults.{key}: drop)", stacklevel=2)
        return sorted(refused, key=lambda each: int(each["client"]))

    def _bound(self, norms: Sequence[float], w: Tensor) -> tuple[float | None, str]:
        """Return the bound of this round, None if there is none, and a text about its origin."""
        if not isinstance(self.max_norm, str):
            return self.max_norm, "faults.max_norm"
        nonzero_norms = [norm for norm in norms if 0 < norm < torch.inf]
        if len(nonzero_norms) < MIN_NORMS:
            return None, ""
        median = median_low(nonzero_norms)
        bound = NORM_FACTOR * median
        if any(norm > bound for norm in norms):
            bound = max(bound, float(linear.row_norms(linear.block_norms(w[None]))))
        return bound, f"faults.max_norm: auto; the median norm is {median:.3g}"


def _describe_refused(bad: RefusedUploads, source: str) -> str:
    """Return a text such as `client 1, 2 sent values that are not finite (nan or inf); client 4 sent an ...`."""
    broken = ", ".join(str(each["client"]) for each in bad if each["norm"] != each["norm"])
    long = [each for each in bad if each["norm"] == each["norm"]]
    text = [f"client {broken} sent {NOT_FINITE}"] if broken else []
    text += [f"client {each['client']} sent an update of norm {each['norm']:.3g}" for each in long[:MAX_CLIENTS_SHOWN]]
    if long:
        others = " (and others)" if len(long) > MAX_CLIENTS_SHOWN else ""
        text[-1] += f"{others}, beyond the bound of {long[0]['bound']:.4g} ({source})"
    return "; ".join(text)
