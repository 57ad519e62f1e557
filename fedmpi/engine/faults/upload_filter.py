"""Filter of bad uploads on rank 0: values that are not finite, and updates far longer than those of other clients.

    bound = max(1000 median_k ||dw_k||, ||w||)                                   faults.max_norm: auto

The median is over the non-zero updates dw_k of the cohort; with fewer than MIN_NORMS such updates there is no bound. w
is the shared part of the model: an update no longer than w is never refused, because the update of a client with new
data may be far longer than the updates of clients that have converged.

With faults.on_bad_update: drop, a refused client is treated as absent: the weights of the other clients sum to 1,
`aggregate` does not see its upload, and the state that it had before the round is restored. With
faults.on_client_error: drop, a client whose code raised an error is treated in the same way. After three consecutive
rounds without any accepted upload, the run ends in any case.
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
MIN_NORMS = 3  # smallest number of norms from which a median is computed
MAX_IDLE_ROUNDS = 3  # number of consecutive rounds without any accepted upload after which the run ends
MAX_CLIENTS_SHOWN = 5  # maximum number of clients with long updates in a message
NOT_FINITE = "values that are not finite (nan or inf)"
REMEDY = "The usual cause is divergence; lower train.lr, or the weights of the method's own terms"
# keys: client; norm (nan: a value is not finite); bound (None: no bound); error (only if the client's code failed)
RefusedUploads = list[dict[str, Any]]


class UpdateFilter:
    """Decides which uploads of a round are aggregated.

    Attributes:
        norms: the norms of the latest round's updates, by client.
    """

    def __init__(self, max_norm: float | str | None = "auto", drop: bool = False) -> None:
        """Create the filter.

        Args:
            max_norm: the maximum accepted norm of an update; "auto": computed in each round (see the module docstring);
                None: no bound.
            drop: whether bad uploads are left out; otherwise they end the run.
        """
        self.max_norm, self.drop = max_norm, drop
        self.norms = dict[int, float]()
        self.idle_since: int | None = None  # the first of the latest consecutive rounds without an accepted upload

    def find_refused(
        self, t: int, cohort: Sequence[int], received: GatheredUploads, w: Tensor, failed: Collection[int] = ()
    ) -> RefusedUploads:
        """Return the uploads that are left out of round t, and warn about them.

        Args:
            cohort: the clients of the round, in ascending order.
            received: the uploads of these clients.
            w: the shared part of the global model, (s,).
            failed: clients without an upload, because their code raised an error.

        Raises:
            UserError: an upload is bad and bad uploads are not dropped, or this is the third consecutive round without
                an accepted upload.
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
            end = (
                f"the round was discarded. {REMEDY}; or set faults.on_bad_update: drop to continue without such uploads"
            )
            raise UserError(f"round {t}: {text}; {end}")
        key = "on_bad_update" if refused else "on_client_error" if failed else "on_lost_rank"
        if failed:
            text += f"{'; ' if text else ''}the code of client {', '.join(map(str, sorted(failed)))} raised an error"
            refused += [{"client": k, "norm": torch.nan, "bound": bound, "error": True} for k in failed]
        if len(refused) < len(cohort):
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = t
        idle = self.idle_since is not None
        text = text or "all clients of the cohort were lost with their ranks"
        if self.idle_since is not None and t - self.idle_since >= MAX_IDLE_ROUNDS - 1:
            raise UserError(
                f"round {t}: {text}; the run ends, because no upload was accepted in {MAX_IDLE_ROUNDS} consecutive "
                f"rounds. {REMEDY}"
            )
        if key == "on_bad_update" or idle:
            effect = "no upload is left, so the model does not change" if idle else "left out of the round"
            warnings.warn(f"round {t}: {text}; {effect} (faults.{key}: drop)", stacklevel=2)
        return sorted(refused, key=lambda each: int(each["client"]))

    def _bound(self, norms: Sequence[float], w: Tensor) -> tuple[float | None, str]:
        """Return the bound on norms in this round (None: no bound), and a phrase for messages that explains it."""
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
    """Describe bad uploads in words, such as `client 1, 2 sent values that are not finite (nan or inf)`."""
    broken = ", ".join(str(each["client"]) for each in bad if each["norm"] != each["norm"])
    long = [each for each in bad if each["norm"] == each["norm"]]
    text = [f"client {broken} sent {NOT_FINITE}"] if broken else []
    text += [f"client {each['client']} sent an update of norm {each['norm']:.3g}" for each in long[:MAX_CLIENTS_SHOWN]]
    if long:
        others = " (and others)" if len(long) > MAX_CLIENTS_SHOWN else ""
        text[-1] += f"{others}, above the bound of {long[0]['bound']:.4g} ({source})"
    return "; ".join(text)
