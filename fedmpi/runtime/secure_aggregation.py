"""Checks and objects of secure aggregation (privacy.secagg) for one run."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from fedmpi.common.errors import UserError
from fedmpi.common.text import locate_key
from fedmpi.config import Settings
from fedmpi.data.federated import FederatedData
from fedmpi.engine import scheduler
from fedmpi.engine.messages import MessageLayouts
from fedmpi.method.base import get_mean_only_slots
from fedmpi.runtime.rank_agreement import compute_short_digest

if TYPE_CHECKING:
    from fedmpi.engine.transport.gather_secure import MakeNoise, SecureAggregation


def check_secure_aggregation(settings: Settings, data: FederatedData, messages: MessageLayouts) -> None:
    """Check that a run with secure aggregation needs nothing but sums of uploads, and has enough clients.

    Raises:
        UserError: a setting or the method needs single uploads, the threshold does not suit the number of clients per
            round, or the package cryptography is missing.
    """
    secagg = settings.privacy.secagg
    if secagg is None:
        return
    if find_spec("cryptography") is None:
        raise UserError("privacy.secagg needs the package cryptography; run: pip install 'fedmpi[privacy]'")
    if reason := _reason_against_sums(settings, messages):
        raise UserError(f"privacy.secagg: the server learns only the sum of all uploads, but {reason}")
    if settings.privacy.keys is not None and not settings.data.silos:
        raise UserError(
            "privacy.keys: the keys of sites need data.silos, with which each rank has the data of one site; remove "
            "privacy.keys and privacy.identity, or set data.silos"
        )
    threshold, cohort = secagg.threshold, settings.cohort
    size = scheduler.cohort_size(data.clients, cohort.fraction, cohort.size)
    # Poisson cohorts vary, and the engine raises the threshold of a round above half of its clients.
    if size < threshold or (2 * threshold <= size and cohort.sampling != "poisson"):
        key = locate_key(settings.origin("privacy.secagg.threshold"), "privacy.secagg.threshold")
        reason = (
            "so no round would have enough"
            if size < threshold
            else "and must be above half of this number: otherwise two groups of clients could each unmask the uploads "
            "of the others"
        )
        allowed = f"{max(size // 2 + 1, 2)} to {size}" if size > 1 else "none; use more clients per round"
        raise UserError(f"{key}: {threshold}; a round has {size} clients, {reason}. Allowed: {allowed}")


def _reason_against_sums(settings: Settings, messages: MessageLayouts) -> str:
    """Return why the settings or the method need single uploads, with the remedy; "" if sums suffice."""
    method, name, server, faults = messages.method, settings.method.name, settings.server, settings.faults
    means, kinds = get_mean_only_slots(method) or {}, {"p"}
    if settings.cohort.weighting == "uniform":
        kinds = {"p", "uniform"}
    single = sorted(slot for slot in method.sends if not {*means.get(slot, ("",))} <= kinds)
    uniform = [slot for slot in single if {*means.get(slot, ("",))} <= {"p", "uniform"}]
    reasons = (
        uniform
        and f"method {name} needs the mean of {', '.join(uniform)} with equal weights; set cohort.weighting: uniform",
        single
        and f"method {name} uses single uploads of {', '.join(single)}; use another method (a method of your own whose "
        'aggregate only uses updates.mean can declare it with mean_only_slots = {"dw": ("p",)})',
        server.rule.name != "auto" and f"server.rule: {server.rule.name} uses single uploads; remove server.rule",
        settings.model.lora is not None and "model.lora: server.lora uses single uploads; remove model.lora",
        server.placement == "sharded"
        and "server.placement: sharded distributes single uploads; set server.placement: root",
        messages.upload_format is not None
        and f"comm.compression: {settings.comm.compression} encodes single uploads; remove comm.compression",
        settings.record.updates == "gram" and "record.updates: gram compares single uploads; set record.updates: false",
        not isinstance(faults.max_norm, str | None)
        and f"faults.max_norm: {faults.max_norm:g} needs the norms of single uploads; remove faults.max_norm",
        settings.analysis
        and f"analysis: {', '.join(settings.analysis)} sends single models to the server; remove analysis",
    )
    return str(next(filter(None, reasons), ""))


def compute_key_digests(settings: Settings, data: FederatedData) -> dict[str, str]:
    """Return a digest of the public keys of all sites, which all ranks must have in common; {} without keys.

    Raises:
        UserError: a key of a site is missing or wrong.
    """
    if settings.privacy.keys is None:
        return {}
    from fedmpi.privacy.site_keys import load_public_keys

    keys = load_public_keys(settings.privacy.keys, data.site_names)
    return {"(privacy.keys)": compute_short_digest(*(keys[k].public_bytes_raw() for k in sorted(keys)))}


def make_secure_aggregation(
    settings: Settings, data: FederatedData, make_noise: MakeNoise | None = None
) -> SecureAggregation | None:
    """Make the settings of secure aggregation for this rank, with the keys of sites; None if it is not configured.

    Args:
        make_noise: draws the noise that a client adds to its upload (differential privacy); None: no noise.

    Raises:
        UserError: a key of a site is missing or wrong.
    """
    privacy = settings.privacy
    if privacy.secagg is None:
        return None
    from fedmpi.engine.transport.gather_secure import SecureAggregation

    public, identity, drops = None, None, settings.faults.on_bad_update != "abort"
    if privacy.keys is not None:
        from fedmpi.privacy.site_keys import load_identity, load_public_keys

        public = load_public_keys(privacy.keys, data.site_names)
        for k in data.train:  # the sites whose data this rank has
            if privacy.identity is None:
                raise UserError(
                    f"privacy.identity is missing; privacy.keys is set, so site {data.site_names[k]} needs its private "
                    "key to sign its messages; set privacy.identity to the file with this key"
                )
            identity = load_identity(privacy.identity, data.site_names[k], public[k])
    names = dict(enumerate(data.site_names))
    return SecureAggregation(privacy.secagg.threshold, drops, names, public, identity, make_noise)
