"""Set up differential privacy of clients in a run: its noise, its account of releases, and the files about both.

    privacy.json      the guarantee, and the identifier of the run, on which its noise depends besides a secret key
    releases.jsonl    round and attempt of each release, written before the noise is drawn

The key itself is in privacy.noise_file, outside of the run directory.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
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
from fedmpi.engine.messages import MessageLayouts
from fedmpi.engine.private_release import PrivateRelease
from fedmpi.privacy.client_level import AdaptiveClip, ClientMechanism
from fedmpi.runtime.inspection.run_files import read_json_object
from fedmpi.runtime.record.run_dir import PRIVACY, RELEASES, RunDirectory

if TYPE_CHECKING:  # these modules need optional packages
    from fedmpi.engine.federation import Federation
    from fedmpi.engine.transport.gather_secure import MakeNoise
    from fedmpi.privacy.accountant import Sampling
    from fedmpi.privacy.budget import Guarantee, PrivacyBudget
    from fedmpi.privacy.noise import NoiseKey


def client_level_dp(settings: Settings) -> DpSettings | None:
    """Return the settings of differential privacy of clients; None if a run has none."""
    dp = settings.privacy.dp
    return dp if dp is not None and dp.unit == "client" else None


def check_packages() -> None:
    """Raise UserError if the packages that differential privacy needs are not installed."""
    missing = [name for name in ("cryptography", "dp_accounting") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"privacy.dp needs the package {missing[0]}, which is not installed; run: pip install 'fedmpi[privacy]'"
        )


# ---- the mechanism ----
def make_mechanism(settings: Settings, data: FederatedData, guarantee: Guarantee) -> ClientMechanism:
    """Make the mechanism of a run with this guarantee."""
    dp = client_level_dp(settings)
    assert dp is not None
    members, adaptive = expected_cohort_size(settings, data.clients), None
    total = members * float(client_weights(settings, data).mean())
    multiplier = guarantee.noise_multiplier
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


def make_client_noise(settings: Settings, data: FederatedData) -> MakeNoise | None:
    """Return what draws each client's share of the noise, with secure aggregation; None if rank 0 draws the noise.

    The shares of any `threshold` clients have the variance of the whole noise. They come from random keys that are not
    kept.
    """
    dp, secagg = client_level_dp(settings), settings.privacy.secagg
    if dp is None or secagg is None:
        return None
    from fedmpi.privacy.noise import draw_gaussian

    mechanism = make_mechanism(settings, data, make_guarantee(settings, data))
    std = mechanism.noise_multiplier * mechanism.clip / mechanism.total_weight / secagg.threshold**0.5

    def make_noise(t: int, attempt: int, client: int, n: int) -> Tensor:
        return draw_gaussian(secrets.token_bytes(32), n, std)

    return make_noise


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
    from fedmpi.privacy.budget import Guarantee

    dp, cohort = client_level_dp(settings), settings.cohort
    assert dp is not None
    m = scheduler.cohort_size(data.clients, cohort.fraction, cohort.size)
    cycle = -(-data.clients // m) if cohort.sampling == "cyclic" else 1
    bands = cycle if dp.mechanism == "banded" else 1
    sampling = make_sampling(settings, data.clients)
    guarantee = Guarantee(dp.noise_multiplier or 1.0, dp.delta, sampling, dp.accountant, cycle, bands)
    if dp.epsilon is None:
        return guarantee
    return replace(guarantee, noise_multiplier=guarantee.find_noise_multiplier(dp.epsilon, max(settings.rounds, 1)))


def engine_sampling(settings: Settings) -> str:
    """Return how the engine draws cohorts: as configured, but correlated noise needs the same order in all cycles."""
    dp = client_level_dp(settings)
    return "fixed_cycle" if dp is not None and dp.mechanism == "banded" else settings.cohort.sampling


def hides_participation(settings: Settings, clients: int) -> bool:
    """Return whether the guarantee depends on that nobody knows which clients took part in a round."""
    if client_level_dp(settings) is None:
        return False
    return make_sampling(settings, clients).kind != "none"


# ---- the run ----
def make_release(
    settings: Settings,
    data: FederatedData,
    messages: MessageLayouts,
    key: NoiseKey | None = None,
    budget: PrivacyBudget | None = None,
) -> PrivateRelease:
    """Make what adds noise to the uploads of a run, on rank 0.

    Args:
        messages: the layouts of the messages.
        key: the key of the noise; None: a random key, with which no run can be repeated.
        budget: the releases of the run so far; None: there are none.
    """
    from fedmpi.privacy.banded import BandedNoise
    from fedmpi.privacy.budget import PrivacyBudget
    from fedmpi.privacy.noise import NoiseKey, new_run_id

    key = key or NoiseKey(secrets.token_bytes(32), new_run_id())
    budget = budget or PrivacyBudget(make_guarantee(settings, data))
    mechanism, banded = make_mechanism(settings, data, budget.guarantee), None
    if budget.guarantee.bands > 1:
        upload = messages.upload_layout(0)
        size = upload.packing.size - upload.payload_start

        def draw(t: int) -> Tensor:
            return key.gaussian(size, 1.0, "clients", t, budget.last_attempt(t))

        banded = BandedNoise(budget.guarantee.coefficients, draw)
    buffers = messages.model.buffer_layout
    return PrivateRelease(mechanism, budget, key, buffers, banded, draws_noise=settings.privacy.secagg is None)


def open_release(
    settings: Settings,
    data: FederatedData,
    messages: MessageLayouts,
    directory: RunDirectory,
    identity: Mapping[str, str],
) -> PrivateRelease | None:
    """Make what adds noise to the uploads of a run with this directory; None without differential privacy of clients.

    Args:
        identity: the settings of the run, and digests of its code and data.

    Raises:
        UserError: the key is missing, or key or guarantee differ from those of the run that is resumed or repeated.
    """
    dp = client_level_dp(settings)
    if dp is None:
        return None
    from fedmpi.privacy.budget import PrivacyBudget, RepeatedBudget
    from fedmpi.privacy.noise import NoiseKey, new_run_id

    repeated = None if settings.privacy.repeat is None else settings.working_dir / settings.privacy.repeat
    before = read_json_object((repeated or directory.path) / PRIVACY) or {}
    if repeated is not None and not before:
        raise UserError(
            f"privacy.repeat: {repeated} is no directory of a run with differential privacy of clients; set it to such "
            "a directory, or remove it"
        )
    if repeated is not None:
        check_same_computation(repeated, identity, settings)
    if before:
        key = load_key(settings, before, repeated or directory.path)
    else:
        key = NoiseKey.load(settings.privacy.noise_file, new_run_id())
    guarantee = make_guarantee(settings, data)
    if repeated is not None:
        rows = RunDirectory(repeated).read_rows(RELEASES)
        return make_release(settings, data, messages, key, RepeatedBudget(guarantee, [row["round"] for row in rows]))

    def write(t: int, attempt: int) -> None:
        directory.append(RELEASES, {"round": t, "attempt": attempt})

    rounds = [row["round"] for row in directory.read_rows(RELEASES)]
    budget = PrivacyBudget(guarantee, dp.max_epsilon or dp.epsilon, rounds, write)
    release = make_release(settings, data, messages, key, budget)
    now = describe_guarantee(release)
    if not before:
        directory.write_json(PRIVACY, {"run_id": key.run_id, "key_check": key.fingerprint, **now})
    elif changed := [name for name, value in now.items() if before.get(name) != value]:
        raise UserError(
            f"privacy.dp: {directory.path} began with another {changed[0]} ({before.get(changed[0])}, now "
            f"{now[changed[0]]}), and epsilon is only known for releases with the same noise; undo the change of "
            "privacy.dp, cohort or rounds, or start a new run"
        )
    return release


def choose_cohort_draws(settings: Settings, fed: Federation) -> dict[str, Any]:
    """Return what determines the cohorts of a run besides its settings, as JSON values for all ranks.

    If nobody may know who takes part, the seed is secret, and a round that is repeated has another cohort, because
    epsilon holds for releases whose cohorts are drawn independently.
    """
    privacy = fed.server.privacy if fed.server else None
    if privacy is None or not fed.config.withholds_participation:
        return {"cohort_seed": settings.seed, "releases": [], "repeats_run": False}
    from fedmpi.privacy.budget import RepeatedBudget

    budget = privacy.budget
    draws = {"cohort_seed": privacy.key.seed("cohorts"), "releases": budget.rounds, "repeats_run": False}
    return draws | ({"releases": budget.recorded, "repeats_run": True} if isinstance(budget, RepeatedBudget) else {})


def set_cohort_draws(fed: Federation, draws: Mapping[str, Any]) -> None:
    """Make a rank draw the cohorts that `choose_cohort_draws` has determined on rank 0."""
    scheduler = fed.scheduler
    scheduler.cohort_seed, scheduler.earlier_releases = draws["cohort_seed"], Counter(draws["releases"])
    if draws["repeats_run"]:
        scheduler.first_round = math.inf


def find_key_problem(run: Path, settings: Settings) -> str:
    """Return why the noise of a finished run cannot be drawn again; "" if it can, or if the run has no noise."""
    recorded = read_json_object(run / PRIVACY)
    if recorded is None:
        return ""
    if settings.privacy.secagg is not None:
        return "with privacy.secagg, every client has added noise from a random key that was not kept"
    if recorded.get("keys_differ"):
        return "the ranks have drawn the noise of their clients from different keys"
    try:
        load_key(settings, recorded, run)
    except UserError as error:
        return str(error)
    return ""


def load_key(settings: Settings, recorded: Mapping[str, Any], run: Path) -> NoiseKey:
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


def check_same_computation(repeated: Path, identity: Mapping[str, str], settings: Settings) -> None:
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
        "members": mechanism.members,
        "cycle": guarantee.cycle,
        "bands": guarantee.bands,
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
