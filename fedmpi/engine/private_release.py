"""The release of a round under differential privacy of clients: noisy means in place of the uploads.

Rank 0 reads single uploads only here. Rules, methods, statistics and records get the result, a `ReleasedMeans`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.engine.messages import ENGINE_UPLOAD_NAMES, UNCLIPPED, UploadLayout
from fedmpi.engine.transport.gather import GatheredUploads
from fedmpi.flat.layout import Layout
from fedmpi.method.context import Span, Uploads
from fedmpi.privacy.client_level import ClientMechanism

if TYPE_CHECKING:  # these modules need optional packages
    from fedmpi.privacy.banded import BandedNoise
    from fedmpi.privacy.budget import PrivacyBudget
    from fedmpi.privacy.noise import NoiseKey

MIN_VARIANCE = 1e-5  # smallest running variance of normalisation layers after noise was added


class ReleasedMeans(Uploads):
    """Uploads of which only the means are known, as hooks see them."""

    def __init__(self, means: Mapping[str, Tensor], members: int) -> None:
        """Wrap the means of all slots.

        Args:
            means: slot -> its mean over the cohort, with the weights of the clients.
            members: the expected number of clients, which hooks see as the size of the cohort.
        """
        self.means, self.members = means, members
        self.p = self.uniform

    def __len__(self) -> int:
        return self.members

    def __getattr__(self, name: str) -> Any:
        return _refuse_single_uploads(f"updates.{name}")

    def combine(self, coefficients: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        if slot not in self.means or len(coefficients) != len(self.p) or not torch.equal(coefficients, self.p):
            _refuse_single_uploads(f"a sum of {slot} with other weights than updates.p")
        mean = self.means[slot]
        return mean if span is None else mean.flatten()[slice(*span)]

    def gram(self, slot: str = "dw", span: Span | None = None) -> Tensor:
        return _refuse_single_uploads("updates.gram")

    def inner_products(self, v: Tensor, slot: str = "dw", span: Span | None = None) -> Tensor:
        return _refuse_single_uploads("updates.inner_products")

    def trimmed_mean(self, trim: float, slot: str = "dw") -> Tensor:
        return _refuse_single_uploads("updates.trimmed_mean")


def _refuse_single_uploads(what: str) -> NoReturn:
    """Raise the error for a method that reads more than the means of uploads."""
    raise UserError(
        f"the method reads {what}, but with the section privacy the server has only the mean of each slot; use "
        "updates.mean(slot), or another method"
    )


class PrivateRelease:
    """Makes the noisy means of each round on rank 0, and keeps account of what they cost."""

    def __init__(
        self,
        mechanism: ClientMechanism,
        budget: PrivacyBudget,
        key: NoiseKey,
        buffers: Layout,
        banded: BandedNoise | None = None,
        *,
        draws_noise: bool = True,
    ) -> None:
        """Create the release.

        Args:
            key: the key from which noise is derived.
            buffers: the layout of the model's float buffers.
            banded: noise with standard deviation 1 that is correlated between rounds; None: it is independent.
            draws_noise: whether rank 0 draws the noise; otherwise the clients have added it (privacy.secagg).
        """
        self.mechanism, self.budget, self.key, self.banded = mechanism, budget, key, banded
        self.draws_noise = draws_noise
        self.variances = [each for each in buffers.segments if each.name.endswith("running_var")]

    def release(
        self, t: int, upload: UploadLayout, received: GatheredUploads, weights: Tensor, b: Tensor, clip: float
    ) -> tuple[ReleasedMeans, float]:
        """Return the noisy means of a round's uploads, and the clip norm of the next round.

        Args:
            upload: the layout of the uploads.
            received: the uploads, which the clients have clipped.
            weights: (m,) the weights a_k / W of the clients.
            b: the uploaded part of the global float buffers.
            clip: the clip norm of this round.
        """
        mechanism, packing = self.mechanism, upload.packing
        uploads = received.as_uploads(range(len(weights)), weights, weights)
        slots = [name for name in packing.shapes if name not in ENGINE_UPLOAD_NAMES]
        unclipped = [UNCLIPPED] if mechanism.adaptive is not None else []
        if len(weights):
            means = {name: uploads.combine(weights, name) for name in (*slots, *unclipped)}
        else:  # no client was drawn
            means = {name: b.new_zeros(packing.shapes[name]) for name in (*slots, *unclipped)}
        attempt = self.budget.record_release(t)  # after the last message, and before any noise is drawn
        if self.draws_noise:
            self._add_noise(t, attempt, {name: means[name] for name in slots}, clip)
        means["_b"] = b + means["_b"]  # clients send the change of buffers (bound_upload in local/client_round.py)
        if mechanism.adaptive is not None:
            std = mechanism.adaptive.count_noise / mechanism.total_weight
            noisy = float(means[UNCLIPPED]) + float(self.key.gaussian(1, std, "clip", t, attempt))
            clip = mechanism.adaptive.next_clip(clip, noisy)
        return ReleasedMeans(means, mechanism.members), clip

    def _add_noise(self, t: int, attempt: int, means: Mapping[str, Tensor], clip: float) -> None:
        """Add the noise of a round to the means, in place."""
        sizes = [mean.numel() for mean in means.values()]
        std = self.mechanism.update_noise_multiplier * clip / self.mechanism.total_weight
        if self.banded is None:
            noise = self.key.gaussian(sum(sizes), std, "clients", t, attempt)
        else:
            noise = std * self.banded.compute(t)
        for mean, added in zip(means.values(), noise.split(sizes), strict=True):
            mean.add_(added.to(mean.device).view(mean.shape))

    def raise_variances(self, b: Tensor) -> None:
        """Raise the running variances of normalisation layers, which noise may have made negative, to a small value."""
        for segment in self.variances:
            segment.view(b).clamp_(min=MIN_VARIANCE)
