"""Uploads that cannot be meant: numbers that are not finite, updates far longer than the others'. Judged at rank 0.

    bound = max(1000 median_k ||dw_k||, ||w||)                                   faults.max_norm: auto
The median is that of the cohort's updates that are not zero: a client that made no step says nothing about the others.
Of one or two none is the middle; then the latest norms of earlier rounds stand beside them, and while all of these are
fewer than ENOUGH there is no bound. An update no longer than the model itself (what travels of it) is never refused:
where the others have nothing left to learn, a client with something new is far from their median.
Beyond it an update is bad; on_bad_update: clip takes it at the bound, dw <- dw * bound / ||dw||, and the rest of the
upload as it came (other slots, buffers, what the client keeps). What is not finite cannot be clipped: there clip is
drop. With on_client_error: drop a client that an error has kept from training is refused like one that sent what is not
finite; three rounds in a row in which nobody's upload counts end the run in any case.
A client whose upload is refused is, with faults.on_bad_update: drop, as if it had not taken part: the weights of the
others sum to 1, nothing that it sent reaches `aggregate`, and its own state is that of before the round.
"""

from __future__ import annotations

import warnings
from collections import deque
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
LATEST = 30  # norms of earlier rounds that are kept
IDLE = 3  # rounds in a row without a good upload, of which the last one ends the run
SHOWN = 5  # clients in a message
NOT_FINITE = "values that are not finite (nan or inf)"
REMEDY = "The usual cause is divergence: lower train.lr, or the weights of the method's own terms"
# client, norm (nan: something is not finite), bound (None: there is none); "error" where it came to no upload
Refused = list[dict[str, Any]]


class UpdateFilter:
    """max_norm: "auto", a number or None (no bound). drop: do without bad uploads, rather than end the run; clip: take
    those that are too long at the bound. `clipped`: which ones, in the round that was judged last."""

    def __init__(self, max_norm: float | str | None = "auto", drop: bool = False, clip: bool = False) -> None:
        self.max_norm, self.drop, self.clip = max_norm, drop, clip
        self.clipped: Refused = []
        self.norms = dict[int, float]()  # client -> norm of its update as it counts, in that round
        self.latest: deque[float] = deque(maxlen=LATEST)
        self.idle = 0
        self.judged = -1, self.memory()  # the latest round, and what was known before it

    def refused(
        self, t: int, members: Sequence[int], came: GatheredUploads, w: Tensor, failed: Collection[int] = ()
    ) -> Refused:
        """Whose uploads do not count in round t; one warning line names them, but for those who failed.

        w: (s,) what travels of the global model. failed: of whom there are none.
        Raises UserError where they are not to be dropped, and in the third round in a row in which none is good.
        """
        if t == self.judged[0]:  # a loss has cut the round: it is judged once more
            self.recall(self.judged[1])
        self.judged = t, self.memory()
        norms = came.norms().tolist()
        if self.drop:  # else the step looks whether anything that it makes is not finite, and ends the run
            norms = [n if whole else torch.nan for n, whole in zip(norms, came.finite(), strict=True)]
        self.norms = dict(zip(members, norms, strict=True))
        bound, source = self._bound(norms, w)
        bad = [
            {"client": k, "norm": norm, "bound": bound}
            for k, norm in zip(members, norms, strict=True)
            if not norm < torch.inf or (bound is not None and norm > bound)
        ]
        if self.clip:
            self.clipped = [each for each in bad if each["norm"] < torch.inf]
            bad = [each for each in bad if each not in self.clipped]
            for each in self.clipped:
                came.scale(members.index(each["client"]), each["bound"] / each["norm"])
            if self.clipped:
                self.norms |= {each["client"]: each["bound"] for each in self.clipped}
                said = f"round {t}: {_told(self.clipped, source)}; taken at the bound (faults.on_bad_update: clip)"
                warnings.warn(said, stacklevel=2)
        self.latest.extend(n for n in norms if 0 < n <= (torch.inf if bound is None else bound))
        errors = [{"client": k, "norm": torch.nan, "bound": bound, "error": True} for k in members if k in failed]
        self.idle = self.idle + 1 if len(bad) + len(errors) == len(members) else 0
        if bad or self.idle:
            lost = [f"client {', '.join(str(each['client']) for each in errors)} came to an error"] if errors else []
            lost += [] if members else ["all its clients were lost with the ranks that had them"]
            said = f"round {t}: {'; '.join(([_told(bad, source)] if bad else []) + lost)}"
            if bad and not self.drop:
                raise UserError(f"{said}; the round was dropped. {REMEDY}; faults.on_bad_update: drop goes on without")
            if self.idle == IDLE:
                remedy = f". {REMEDY}" if members else ""
                raise UserError(f"{said}; for {IDLE} rounds not one upload was good, and the run ends{remedy}")
            if not members:
                warnings.warn(f"{said}; nothing changes (faults.on_lost_rank: drop)", stacklevel=2)
                return []
            all_ = ", which are all of it: nothing changes" if self.idle else ""
            key = "faults.on_bad_update" if bad else "faults.on_client_error"
            warnings.warn(f"{said}; left out of the round{all_} ({key}: drop)", stacklevel=2)
        return sorted(bad + errors, key=lambda each: members.index(each["client"]))

    def memory(self) -> dict[str, Any]:
        """What earlier rounds have left, for `recall` when a run goes on."""
        return {"latest": list(self.latest), "idle": self.idle}

    def recall(self, memory: dict[str, Any]) -> None:
        self.latest.clear()
        self.latest.extend(memory["latest"])
        self.idle = memory["idle"]

    def _bound(self, norms: Sequence[float], w: Tensor) -> tuple[float | None, str]:
        """The bound of this round, None where there is none, and what it comes from."""
        if not isinstance(self.max_norm, str):
            return self.max_norm, "faults.max_norm"
        known = [norm for norm in norms if 0 < norm < torch.inf]
        if len(known) < ENOUGH:
            known += self.latest
        if len(known) < ENOUGH:
            return None, ""
        middle = median_low(known)
        bound = TIMES * middle
        if any(norm > bound for norm in norms):  # else its own length does not matter
            bound = max(bound, float(linear.row_norms(linear.block_norms(w[None]))))
        return bound, f"faults.max_norm: auto; the median norm is {middle:.3g}"


def _told(bad: Refused, source: str) -> str:
    """`client 1, 2 sent values that are not finite (nan or inf); client 4 sent an update of norm 1e+30, beyond ...`"""
    broken = [str(each["client"]) for each in bad if each["norm"] != each["norm"]]
    long = [each for each in bad if each["norm"] == each["norm"]]
    said = [f"client {', '.join(broken)} sent {NOT_FINITE}"] if broken else []
    if long:
        of = ", ".join(f"client {each['client']} of norm {each['norm']:.3g}" for each in long[:SHOWN])
        more = f" and {len(long) - SHOWN} more" if len(long) > SHOWN else ""
        of = f"{of}{more}".replace(" of norm", " sent an update of norm", 1)
        said.append(f"{of}, beyond the bound of {long[0]['bound']:.4g} ({source})")
    return "; ".join(said)
