"""Check that a run with differential privacy of clients reveals nothing outside of its mechanism.

What the noisy means do not cover is withheld (engine/federation.py), or refused here with the reason.
"""

from __future__ import annotations

from fedmpi.common.errors import UserError
from fedmpi.common.text import locate_key
from fedmpi.common.type_descriptions import describe_value
from fedmpi.config import Settings
from fedmpi.data.federated import FederatedData
from fedmpi.engine.messages import MessageLayouts
from fedmpi.method.base import LABEL_COUNTS, get_mean_only_slots
from fedmpi.runtime import private_runs
from fedmpi.runtime.sample_privacy import warn_of_fitted_preparation


def check_client_level_privacy(settings: Settings, data: FederatedData, messages: MessageLayouts) -> None:
    """Raise UserError if settings or method need more than the noisy means of uploads."""
    dp = private_runs.client_level_dp(settings)
    if dp is None:
        return
    private_runs.check_packages()
    private_runs.check_delta(settings, data.clients, "clients")
    _check_method(settings, messages)
    if dp.mechanism == "banded" and len({messages.upload_layout(t).packing.size for t in range(settings.rounds)}) > 1:
        raise UserError(
            f"privacy.dp.mechanism: banded needs uploads of the same size in all rounds, which method "
            f"{settings.method.name} does not have; set privacy.dp.mechanism: gaussian"
        )
    _check_weights(settings, messages)
    warn_of_fitted_preparation(settings)
    for key, value, allowed, reason in _find_revealing_settings(settings, data):
        if value not in allowed:
            raise UserError(
                f"{locate_key(settings.origin(key), key)}: {describe_value(value)} is not allowed with "
                f"privacy.dp.unit: client, because {reason}; set {key}: {describe_value(allowed[0])}"
            )


def _check_method(settings: Settings, messages: MessageLayouts) -> None:
    """Raise UserError if the server part of the method reads single uploads or label counts."""
    name, method = settings.method.name, messages.method
    means = get_mean_only_slots(method)
    remedy = "choose a method that needs only means, such as fedavg, fedprox, feddyn or scaffold"
    if LABEL_COUNTS in method.needs:
        raise UserError(
            f"method.name: {name} needs the label counts of all clients, which the noise of privacy.dp does not cover; "
            f"{remedy}"
        )
    if means is None:
        raise UserError(
            f"method.name: {name} reads single uploads at the server, so the noise on their mean does not protect "
            f"them; {remedy} (a method of your own whose aggregate uses only updates.mean can declare mean_only_slots)"
        )
    single = sorted({*method.sends} - {*means})
    if single:
        raise UserError(
            f"method.name: {name} reads single values of {', '.join(single)} at the server, so the noise on their mean "
            f"does not protect them; {remedy}"
        )


def _check_weights(settings: Settings, messages: MessageLayouts) -> None:
    """Raise UserError if the weight of a client is not bounded, or the method uses two different weights."""
    dp, cohort = private_runs.client_level_dp(settings), settings.cohort
    assert dp is not None
    means = get_mean_only_slots(messages.method) or {}
    if cohort.weighting == "samples" and dp.weight_cap is None:
        raise UserError(
            f"{locate_key(settings.origin('cohort.weighting'), 'cohort.weighting')}: samples gives a client with many "
            "samples an unbounded weight, which privacy.dp.unit: client does not allow; set cohort.weighting: uniform, "
            "or privacy.dp.weight_cap to the number of samples from which a client has the full weight"
        )
    if cohort.weighting == "uniform" and dp.weight_cap is not None:
        raise UserError(
            "privacy.dp.weight_cap has no effect with cohort.weighting: uniform; remove it, or set cohort.weighting: "
            "samples"
        )
    uneven = [slot for slot, kinds in means.items() if "uniform" in kinds]
    if dp.weight_cap is not None and uneven:
        raise UserError(
            f"method.name: {settings.method.name} reads the mean of {uneven[0]} with equal weights, but "
            "privacy.dp.weight_cap gives clients different ones; set cohort.weighting: uniform, and remove weight_cap"
        )


def _find_revealing_settings(
    settings: Settings, data: FederatedData
) -> list[tuple[str, object, tuple[object, ...], str]]:
    """Return settings that may reveal something: key, value, allowed values, and what would be revealed."""
    dp, silos = private_runs.client_level_dp(settings), settings.data.silos
    assert dp is not None
    own = "it is computed from single uploads"
    rows: list[tuple[str, object, tuple[object, ...], str]] = [
        ("server.rule", settings.server.rule.name, ("auto",), own),
        ("server.lora", settings.server.lora, ("separate", "freeze_a"), own),
        ("comm.compression", settings.comm.compression, ("fp32",), "rounding may lift an upload above the clip norm"),
        ("analysis", settings.analysis, ((),), "it is measured on the data and the local models of single clients"),
        ("evaluate.best.metric", settings.evaluate.best.metric, (None,), "it is measured on samples of the clients"),
        ("faults.on_bad_update", settings.faults.on_bad_update, ("abort",), "refusing an upload reveals its norm"),
        ("faults.on_client_error", settings.faults.on_client_error, ("abort",), "a missing upload reveals the error"),
        ("faults.max_norm", settings.faults.max_norm, ("auto",), "the clip norm bounds uploads"),
    ]
    if settings.data.standardise_target == "pooled":
        reason = "the statistics of all clients are exact, and change what every client uploads"
        rows.append(("data.standardise_target", "pooled", (False,), reason))
    if settings.task.options.get("class_weights") == "balanced" and data.label_counts_shared:
        reason = "the label counts of all clients are exact, and change what every client uploads"
        rows.append(("task.class_weights", "balanced", (None,), reason))
    if private_runs.hides_participation(settings, data.clients) and settings.faults.on_lost_rank == "drop":
        reason = "faults.jsonl would tell which clients were to take part in a round"
        rows.append(("faults.on_lost_rank", "drop", ("abort", "redo"), reason))
    if settings.record.updates == "gram":
        rows.append(("record.updates", "gram", (False,), own))
    if silos:
        rows.append(("data.share_label_counts", settings.data.share_label_counts, (False,), "the counts are exact"))
    protocols = settings.evaluate.protocol
    if protocols != ("global",):
        rows.append(("evaluate.protocol", protocols, (("global",),), "the metrics of single clients are exact"))
    if dp.mechanism == "banded" and settings.cohort.sampling != "cyclic":
        rows.append(
            (
                "cohort.sampling",
                settings.cohort.sampling,
                ("cyclic",),
                "dp.mechanism: banded needs a fixed number of rounds between two rounds of the same client",
            )
        )
    if settings.privacy.secagg is not None:
        reason = "with privacy.secagg clients add the noise, whose scale must be fixed"
        rows.append(("privacy.dp.adaptive", dp.adaptive, (None,), reason))
        rows.append(("privacy.dp.mechanism", dp.mechanism, ("gaussian",), reason))
    if dp.mechanism == "banded" and dp.adaptive is not None:
        rows.append(
            ("privacy.dp.adaptive", dp.adaptive, (None,), "the noise of dp.mechanism: banded has a fixed scale")
        )
    return rows
