"""The uploads of a round on rank 0 when it has only their sum: means with the weights of the cohort."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.engine.messages import ENGINE_UPLOAD_FIELDS, FAILED, NO_STEPS
from fedmpi.engine.transport.gather import ChunkPlan, GatherContext, GatheredUploads
from fedmpi.engine.transport.gather_sums import UNIT
from fedmpi.flat.packing import Packing, Views
from fedmpi.method.context import Span, Uploads

LOSS_UNIT = 2.0**-30  # the loss is counted in multiples of this number, because it may be larger than entries of slots
LOSS, SECONDS, FLAG = range(ENGINE_UPLOAD_FIELDS)  # positions of the engine's own fields in an upload row
HEADER = Packing({"_seconds": (), "_flag": ()})


class SecureSum(GatheredUploads):
    """The sum of the uploads of a round, and for each client only the flag and the seconds."""

    def __init__(self, context: GatherContext, headers: Tensor, p: Tensor, total: Tensor | None) -> None:
        """Wrap a sum.

        Args:
            headers: (m, 2), seconds and flag of each client.
            p: (m,), the weights of the cohort.
            total: (row,) int64, the sum over the clients that have not dropped out; None if a rank was asked to stop.
        """
        super().__init__(headers, ChunkPlan(HEADER, split=False))
        self.packing, self.total, self.p, self.dtype = context.upload.packing, total, p, context.buffers.like.dtype
        survives = headers[:, 1].cpu() != FAILED
        self.divisor = 1.0 if survives.all() else float(p[survives].sum())

    def keep_rows(self, indices: Sequence[int]) -> None:
        super().keep_rows(indices)
        self.p = self.p[list(indices)]

    def mean(self, slot: str) -> Tensor:
        """Return the weighted mean of a slot over the clients in the sum, in the shape of the slot."""
        assert self.total is not None
        a, b = self.packing.spans[slot]
        mean = self.total[a:b].double().mul_(UNIT)
        if self.divisor != 1:
            mean /= self.divisor
        return mean.to(self.dtype).view(self.packing.shapes[slot])

    def as_uploads(self, clients: Sequence[int], n: Tensor, p: Tensor) -> Uploads:
        return MeanUploads(clients, n, p, self)

    def mean_train_loss(self, p: Tensor) -> dict[str, float]:
        assert self.total is not None
        steps = (self.small._flag != NO_STEPS).cpu()
        return {"train_loss": float(self.total[LOSS]) * LOSS_UNIT / float(self.p[steps].sum())} if steps.any() else {}


class MeanUploads(Uploads):
    """The uploads as hooks see them when rank 0 has only their sum: means with the weights of the cohort."""

    def __init__(self, clients: Sequence[int], n: Tensor, p: Tensor, secure_sum: SecureSum) -> None:
        """Wrap a sum; n and p (m,) are the sample counts and weights of the clients."""
        super().__init__(clients, n, p, Views({}, tuple(secure_sum.packing.shapes), _refuse_row))
        self.secure_sum = secure_sum

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        if span is not None or not torch.equal(coefficients, self.p):
            raise _single_uploads_error(f"another sum of slot {slot!r} than updates.mean")
        return self.secure_sum.mean(slot)


def _refuse_row(name: str) -> Tensor:
    raise _single_uploads_error(f"the single uploads in updates.{name}")


def _single_uploads_error(what: str) -> UserError:
    """Return the error for a method or rule that reads more than the mean; `what` is what it reads."""
    return UserError(
        f"privacy.secagg: the server knows only the mean of the uploads, but the method or rule uses {what}; remove "
        "privacy.secagg, or use a method that reads uploads only through updates.mean"
    )
