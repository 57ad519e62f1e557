"""The config section `privacy`: differential privacy and secure aggregation (docs/privacy.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedmpi.config.field_types import Count, ExclusiveKeysSection, ExpandedPath, Section

Positive = Annotated[float, Field(gt=0)]


class AdaptiveClipSettings(Section):
    """The section `privacy.dp.adaptive`: the clip norm follows a quantile of the norms (Andrew et al. 2021)."""

    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5  # share of the clients whose uploads shall not be clipped
    lr: Positive = 0.2  # rate at which the clip norm adapts: clip <- clip exp(-lr (share of unclipped - quantile))
    # standard deviation of the noise that is added to the number of unclipped uploads; null: 1/20 of the mean cohort
    count_noise: Positive | None = None


class DpSettings(ExclusiveKeysSection):
    """The section `privacy.dp`: differential privacy of clients, or of the samples of each client."""

    exclusive_keys = ("epsilon", "noise_multiplier")
    unit: Literal["client", "sample"]  # what is protected: all data of a client, or a single sample of a client
    # largest norm of a client's upload as a whole (unit: client), or of a sample's gradient (unit: sample)
    clip: Positive
    # standard deviation of the noise, divided by clip; null: the smallest with which all rounds together stay below
    # `epsilon`
    noise_multiplier: Positive | None = None
    epsilon: Positive | None = None  # the epsilon of the whole run, from which the noise is computed
    delta: Annotated[float, Field(gt=0, lt=1)]  # must be below 1 / (number of clients, or of samples of a client)
    # accept a larger delta, at which the guarantee means little: a mechanism that publishes one unit in full would
    # have it, too. Only to repeat published experiments
    allow_large_delta: bool = False
    # the run ends before a round after which epsilon would be larger; null: `epsilon` if it is set, otherwise no limit
    max_epsilon: Positive | None = None
    accountant: Literal["pld", "rdp"] = "pld"  # privacy loss distributions, or the looser Renyi differential privacy
    # gaussian: independent noise in each round. banded: noise that is correlated between rounds, for unit: client and
    # cohort.sampling: cyclic (DP-FTRL)
    mechanism: Literal["gaussian", "banded"] = "gaussian"
    adaptive: AdaptiveClipSettings | None = None  # adapt clip during the run, for unit: client
    # number of samples from which a client has the full weight, for unit: client and cohort.weighting: samples
    weight_cap: Count | None = None


class SecaggSettings(Section):
    """The section `privacy.secagg`: secure aggregation, by which the server learns only the sum of all uploads."""

    # smallest number of clients whose uploads are summed; a round with fewer clients ends the run
    threshold: Annotated[int, Field(ge=2, le=1_000_000)]


class PrivacySettings(Section):
    """The section `privacy`: what the server, and readers of the run directory, may learn about clients."""

    prerequisites = {"identity": ("keys", None), "keys": ("secagg", None), "repeat": ("dp", None)}
    dp: DpSettings | None = None  # differential privacy; null: none
    secagg: SecaggSettings | None = None  # secure aggregation; null: none
    # file with the secret from which noise is derived. It is created if it is missing; keep it out of run directories
    noise_file: Path = Path("~/.fedmpi/noise_file")
    # a run directory whose noise is drawn again, to verify that run; null: the run draws noise of its own
    repeat: ExpandedPath | None = None
    keys: ExpandedPath | None = None  # folder with the public key of each site, SITE.pub, for privacy.secagg
    identity: ExpandedPath | None = None  # file with the private key of this site, which belongs to SITE.pub

    @model_validator(mode="after")
    def _check(self) -> PrivacySettings:
        if self.dp is not None and self.dp.unit == "sample":
            for key in ("adaptive", "weight_cap"):
                if getattr(self.dp, key) is not None:
                    raise ValueError(
                        f"dp.{key} has no effect with dp.unit: sample; remove privacy.dp.{key}, or set "
                        "privacy.dp.unit: client"
                    )
            if self.dp.mechanism != "gaussian":
                raise ValueError(
                    f"dp.mechanism: {self.dp.mechanism} is not allowed with dp.unit: sample; set privacy.dp.mechanism: "
                    "gaussian"
                )
        return self
