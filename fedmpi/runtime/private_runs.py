"""Set up differential privacy of clients in a run: its noise, its account of releases, and the files about both.

    privacy.json      the guarantee, and the identifier of the run, on which its noise depends besides a secret key
    releases.jsonl    round and attempt of each release, written before the noise is drawn

The key itself is in privacy.noise_file, outside of the run directory.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.text import locate_key, pluralize
from fedmpi.config import Settings
from fedmpi.config.privacy import DpSettings
from fedmpi.config.resume_rules import may_change_on_resume, normalize_identity
from fedmpi.data.federated import FederatedData
from fedmpi.engine import scheduler
from fedmpi.engine.private_release import PrivateRelease
from fedmpi.privacy.client_level import AdaptiveClip, ClientMechanism
from fedmpi.runtime.inspection.run_files import read_json_object
from fedmpi.runtime.record.run_dir import PRIVACY, RELEASES, RunDirectory

if TYPE_CHECKING:
    from fedmpi.engine.federation import Federation
    from fedmpi.privacy.accountant import Sampling
    from fedmpi.privacy.budget import Guarantee
    from fedmpi.privacy.noise import NoiseKey
    from fedmpi.runtime.build import Experiment


def client_level_dp(settings: Settings) -> DpSettings | None:
    """Return the settings of differential privacy of clients; None if a run has none."""
    dp = settings.privacy.dp
    return dp if dp is not None and dp.unit == "client" else None


def import_privacy() -> None:
    """Raise UserError if the packages that the section `privacy` needs are not installed."""
    try:
        import cryptography  # noqa: F401
        import dp_accounting  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"privacy: the package {error.name} is not installed; install it with pip install 'fedmpi[privacy]'"
        ) from error


# ---- the mechanism ----
def make_mechanism(settings: Settings, data: FederatedData) -> ClientMechanism:
    """Make the mechanism of a run; `epsilon` is converted to the noise multiplier."""
    dp = client_level_dp(settings)
    assert dp is not None
    members, adaptive = expected_cohort_size(settings, data.clients), None
    total = members * float(client_weights(settings, data).mean())
    multiplier = make_guarantee(settings, data).noise_multiplier
    if dp.adaptive is not None:
        noise = dp.adaptive.count_noise or members / 20
        adaptive = AdaptiveClip(dp.adaptive.quantile, dp.adaptive.lr, noise)
        if 2 * noise <= multiplier:
            raise UserError(
                f"privacy.dp.adaptive.count_noise: {noise:.3g} is too small for noise_multiplier {multiplier:.3g}: the "
                f"number of unclipped uploads alone would use up the budget; set it above {multiplier / 2:.3g}"
            )
    return ClientMechanism(dp.clip, multiplier, members, total, adaptive)


def expected_cohort_size(settings: Settings, clients: int) -> int:
    """Return the expected number of clients in a cohort, rounded to an integer."""
    cohort = settings.cohort
    if cohort.sampling == "poisson" and cohort.size is None and cohort.fraction is not None:
        return max(round(cohort.fraction * clients), 1)
    return scheduler.cohort_size(clients, cohort.fraction, cohort.size)


def client_weights(settings: Settings, data: FederatedData) -> Tensor:
    """Return the weights a_k of all clients, (N,) float64 from 0 to 1: equal, or their capped numbers of samples."""
    dp = client_level_dp(settings)
    if dp is None or dp.weight_cap is None:
        return torch.ones(data.clients, dtype=torch.float64)
    return torch.as_tensor(data.train_sizes, dtype=torch.float64).clamp(max=dp.weight_cap) / dp.weight_cap


def released_weights(settings: Settings, data: FederatedData) -> Tensor | None:
    """Return a_k / W for all clients, (N,) float64; None without differential privacy of clients."""
    if client_level_dp(settings) is None:
        return None
    weights = client_weights(settings, data)
    return weights / (expected_cohort_size(settings, data.clients) * float(weights.mean()))


def make_sampling(settings: Settings, clients: int) -> Sampling:
    """Return how clients are drawn, as the accountant needs it."""
    from fedmpi.privacy.accountant import Sampling

    cohort = settings.cohort
    m = scheduler.cohort_size(clients, cohort.fraction, cohort.size)
    if cohort.sampling == "poisson":
        rate = cohort.size / clients if cohort.size is not None else cohort.fraction or 0.0
        return Sampling("poisson", rate=rate) if rate < 1 else Sampling("none")
    if cohort.sampling == "cyclic" or m == clients:
        return Sampling("none")
    return Sampling("without_replacement", size=m, population=clients)


def make_guarantee(settings: Settings, data: FederatedData) -> Guarantee:
    """Make the guarantee of a run, with the given noise multiplier or the smallest one that reaches `epsilon`."""
    from fedmpi.privacy.accountant import find_noise_multiplier
    from fedmpi.privacy.budget import Guarantee

    dp, cohort = client_level_dp(settings), settings.cohort
    assert dp is not None
    sampling, m = (
        make_sampling(settings, data.clients),
        scheduler.cohort_size(data.clients, cohort.fraction, cohort.size),
    )
    cycle = -(-data.clients // m) if cohort.sampling == "cyclic" else 1
    guarantee = Guarantee(dp.noise_multiplier or 1.0, dp.delta, sampling, dp.accountant, cycle)
    if dp.epsilon is None:
        return guarantee
    steps = max(guarantee.count_steps(range(settings.rounds)), 1)
    multiplier = find_noise_multiplier(dp.epsilon, dp.delta, sampling, steps, dp.accountant)
    return Guarantee(multiplier, dp.delta, sampling, dp.accountant, cycle)


def hides_participation(settings: Settings, clients: int) -> bool:
    """Return whether the guarantee depends on that nobody knows which clients took part in a round."""
    if client_level_dp(settings) is None:
        return False
    return make_sampling(settings, clients).kind != "none"


# ---- the run ----
def make_release(experiment: Experiment, key: NoiseKey | None = None, budget: Any = None) -> PrivateRelease:
    """Make what adds noise to the uploads of a run, on rank 0.

    Args:
        key: the key of the noise; None: a random key, with which no run can be repeated.
        budget: the releases of the run so far; None: there are none.
    """
    from fedmpi.privacy.budget import PrivacyBudget
    from fedmpi.privacy.noise import NoiseKey, new_run_id

    settings, data = experiment.settings, experiment.data
    key = key or NoiseKey(secrets.token_bytes(32), new_run_id())
    budget = budget or PrivacyBudget(make_guarantee(settings, data))
    return PrivateRelease(make_mechanism(settings, data), budget, key, experiment.model.buffer_layout)


def open_release(experiment: Experiment, directory: RunDirectory, identity: Mapping[str, str]) -> PrivateRelease | None:
    """Make what adds noise to the uploads of a run with this directory; None without differential privacy of clients.

    Args:
        identity: the settings of the run, and digests of its code and data.

    Raises:
        UserError: the key is missing or is another one than in the run that is resumed or repeated.
    """
    from fedmpi.privacy.budget import PrivacyBudget, RepeatedBudget
    from fedmpi.privacy.noise import NoiseKey, new_run_id

    settings, dp = experiment.settings, client_level_dp(experiment.settings)
    if dp is None:
        return None
    repeated = None if settings.privacy.repeat is None else settings.working_dir / settings.privacy.repeat
    before = read_json_object((repeated or directory.path) / PRIVACY) or {}
    if repeated is not None:
        _check_same_computation(repeated, identity, settings)
    if before:
        key = _load_key(settings, before, repeated or directory.path)
    else:
        key = NoiseKey.load(settings.privacy.noise_file, new_run_id())
    guarantee = make_guarantee(settings, experiment.data)
    if repeated is not None:
        rows = RunDirectory(repeated).read_rows(RELEASES)
        return make_release(experiment, key, RepeatedBudget(guarantee, [row["round"] for row in rows]))

    def write(t: int, attempt: int) -> None:
        directory.append(RELEASES, {"round": t, "attempt": attempt})

    rounds = [row["round"] for row in directory.read_rows(RELEASES)]
    release = make_release(experiment, key, PrivacyBudget(guarantee, dp.max_epsilon or dp.epsilon, rounds, write))
    if not before:
        directory.write_json(
            PRIVACY, {"run_id": key.run_id, "key_check": key.fingerprint, **describe_guarantee(release)}
        )
    return release


def choose_cohort_seed(settings: Settings, fed: Federation) -> int:
    """Return the seed of the cohorts: that of the run, or a secret one if nobody may know who takes part."""
    privacy = fed.server.privacy if fed.server else None
    return privacy.key.seed("cohorts") if privacy and fed.config.withholds_participation else settings.seed


def find_key_problem(run: Path, settings: Settings) -> str:
    """Return why the noise of a finished run cannot be drawn again; "" if it can, or if the run has no noise."""
    recorded = read_json_object(run / PRIVACY)
    if recorded is None:
        return ""
    try:
        _load_key(settings, recorded, run)
    except UserError as error:
        return str(error)
    return ""


def _load_key(settings: Settings, recorded: Mapping[str, Any], run: Path) -> NoiseKey:
    """Load the key of a run that exists already; raise UserError if the file contains another key.

    Args:
        recorded: the content of the run's privacy.json.
        run: the directory of the run.
    """
    from fedmpi.privacy.noise import NoiseKey

    key = NoiseKey.load(settings.privacy.noise_file, str(recorded.get("run_id")), create=False)
    if recorded.get("key_check") != key.fingerprint:
        raise UserError(
            f"privacy.noise_file: {settings.privacy.noise_file} does not contain the key with which {run} began; set "
            "privacy.noise_file to the file with that key"
        )
    return key


def _check_same_computation(repeated: Path, identity: Mapping[str, str], settings: Settings) -> None:
    """Raise UserError if settings, code or data differ from those of the run whose noise is drawn again.

    The same noise with other data would reveal the difference between the two results.
    """
    recorded = read_json_object(repeated / "identity.json") or {}
    now, before = normalize_identity(identity), normalize_identity(recorded)
    free = ("output", "faults.", "privacy.repeat")
    changed = [
        key
        for key in {**before, **now}
        if before.get(key) != now.get(key) and not may_change_on_resume(key, settings) and not key.startswith(free)
    ]
    if changed:
        raise UserError(
            f"privacy.repeat: the noise of {repeated} is drawn again only for the same settings, code and data, "
            f"because two different results with the same noise would reveal data; {', '.join(sorted(changed))} differ"
        )


# ---- words ----
def describe_guarantee(release: PrivateRelease) -> dict[str, Any]:
    """Return the guarantee of a run as JSON values."""
    guarantee, mechanism = release.budget.guarantee, release.mechanism
    return {
        "unit": "client",
        "clip": mechanism.clip,
        "noise_multiplier": guarantee.noise_multiplier,
        "delta": guarantee.delta,
        "sampling": guarantee.sampling.kind,
        "accountant": guarantee.accountant,
    }


NEIGHBOURS = {
    "poisson": "the data of one client are added or removed",
    "without_replacement": "the data of one client are replaced by other data",
    "none": "the upload of one client is replaced by zero",
}


def describe_plan(settings: Settings, data: FederatedData) -> str:
    """Return a line on the guarantee that a run will have after all of its rounds."""
    guarantee = make_guarantee(settings, data)
    epsilon = guarantee.epsilon(range(settings.rounds)) if settings.rounds else 0.0
    return (
        f"privacy: epsilon {epsilon:.4g} at delta {guarantee.delta:g} for each client after "
        f"{pluralize(settings.rounds, 'round')} (noise multiplier {guarantee.noise_multiplier:.4g}, neighbours: "
        f"{NEIGHBOURS[guarantee.sampling.kind]})"
    )


def check_delta(settings: Settings, units: int, where: str) -> None:
    """Raise UserError if delta is not below 1 / (number of clients or samples).

    Args:
        units: the number of clients or samples.
        where: the units in words, such as "clients".
    """
    dp = settings.privacy.dp
    if dp is not None and dp.delta >= 1 / units:
        raise UserError(
            f"{locate_key(settings.origin('privacy.dp.delta'), 'privacy.dp.delta')}: {dp.delta:g} is not allowed with "
            f"{units} {where}; must be below 1 / {units} = {1 / units:.3g}, because otherwise a mechanism that "
            "publishes the data of one of them would satisfy the guarantee"
        )
