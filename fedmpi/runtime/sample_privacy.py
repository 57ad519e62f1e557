"""Differential privacy of samples (privacy.dp.unit: sample): checks of the experiment, and the steps of the clients."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from inspect import isfunction, signature
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import nn

from fedmpi.comm import Communicator
from fedmpi.common import registry
from fedmpi.common.errors import UserError
from fedmpi.common.text import locate_key
from fedmpi.common.user_code_errors import make_located_error
from fedmpi.config import Settings
from fedmpi.data import sources
from fedmpi.data.federated import FederatedData
from fedmpi.engine import scheduler
from fedmpi.engine.hook_checks import METHODS_WITH_PRIVATE_STEPS
from fedmpi.engine.local.local_training_config import LocalTrainingConfig
from fedmpi.method.base import LABEL_COUNTS, VALIDATION, Method, overrides
from fedmpi.runtime import private_runs
from fedmpi.runtime.inspection.run_files import read_json_object
from fedmpi.runtime.record.run_dir import PRIVACY, RELEASES, RunDirectory
from fedmpi.tasks.base import Task
from fedmpi.tasks.classification import Classification

if TYPE_CHECKING:  # needs the packages of fedmpi[privacy]
    from fedmpi.engine.local.private_steps import PrivateSteps
    from fedmpi.privacy.sample_level import SampleGuarantee

SERVER_HOOKS = {"prepare_model", "shared_parts", "download", "aggregate"}
# Members of a hook's `client` that read the client's samples outside of steps.
SAMPLE_READERS = {
    *("batches", "forward_batches", "label_counts", "mean_loss"),
    *("hessian_vector_product", "head_grad"),
}
REMEDY = f"choose {METHODS_WITH_PRIVATE_STEPS}, or set privacy.dp.unit: client"


def make_private_steps(
    settings: Settings,
    data: FederatedData,
    method: Method,
    task: Any,
    module: nn.Module,
    local_training: LocalTrainingConfig,
) -> PrivateSteps | None:
    """Make the steps by which clients train with differential privacy of their samples; None if it is not configured.

    Raises:
        UserError: a setting, the method, the task or the model would release more than the steps with noise do.
    """
    dp = settings.privacy.dp
    if dp is None or dp.unit != "sample":
        return None
    for package in ("cryptography", "dp_accounting"):
        if find_spec(package) is None:
            raise UserError(f"privacy.dp needs the package {package}; run: pip install 'fedmpi[privacy]'")
    _check_settings(settings)
    _check_method(settings, method)
    _check_task(settings, task, data)
    _check_module(settings, module)
    warn_of_fitted_preparation(settings)
    from fedmpi.engine.local.private_steps import PrivateSteps
    from fedmpi.privacy.sample_level import SampleMechanism, check_delta

    sizes = [int(n) for n in data.train_sizes]
    if not dp.allow_large_delta:
        key = locate_key(settings.origin("privacy.dp.delta"), "privacy.dp.delta")
        check_delta(dp.delta, sizes, data.site_names, key)
    rounds = Counter(k for t in range(settings.rounds) for k in _draw_cohort(settings, data.clients, t))
    size = local_training.batch_size
    return PrivateSteps(
        SampleMechanism(
            clip=dp.clip,
            delta=dp.delta,
            rates=[1.0 if size is None or not n else min(size / n, 1.0) for n in sizes],
            steps=[local_training.passes_and_steps(n)[1] for n in sizes],
            participations=[rounds[k] for k in range(data.clients)],
            noise_multiplier=dp.noise_multiplier,
            epsilon=dp.epsilon,
            accountant=dp.accountant,
        )
    )


def make_guarantee(settings: Settings, steps: PrivateSteps) -> SampleGuarantee:
    """Make the guarantee of a run, which computes the epsilon of its rounds."""
    from fedmpi.privacy.sample_level import SampleGuarantee

    return SampleGuarantee(steps.mechanism, partial(_draw_cohort, settings, len(steps.mechanism.rates)))


def describe_guarantee(
    guarantee: SampleGuarantee, rounds: Sequence[int], names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the guarantee of a run as JSON values: the mechanism, and the epsilon of each client after some rounds.

    Args:
        rounds: the rounds that have been run; a repeated round occurs several times.
        names: the names of the clients' sites, if they have names.
    """
    mechanism, epsilons = guarantee.mechanism, guarantee.epsilons(rounds)
    return {
        "unit": "sample",
        "clip": mechanism.clip,
        "delta": mechanism.delta,
        "accountant": mechanism.accountant,
        "epsilon": max(epsilons.values(), default=0.0),
        "clients": {
            names[k] if names else str(k): {
                "epsilon": epsilon,
                "noise_multiplier": mechanism.noise_multiplier_of(k),
                "sampling_rate": mechanism.rates[k],
                "steps_per_round": mechanism.steps[k],
            }
            for k, epsilon in epsilons.items()
        },
    }


def set_noise_key(
    experiment: Any, comm: Communicator, directory: RunDirectory | None, identity: Mapping[str, str]
) -> None:
    """Load this rank's key for batches and noise, with the identifier of the run; on rank 0 also open the budget.

    Args:
        experiment: the `Experiment` of this rank (build.py, which imports this module).
        directory: the run directory, on rank 0; None on other ranks.
        identity: the settings of the run, and digests of its code and data.

    Raises:
        UserError: this rank's key cannot be read, or rank 0's key is another one than in the run that is resumed or
            repeated.
    """
    settings, steps = experiment.settings, experiment.private_steps
    from fedmpi.privacy.noise import NoiseKey

    start: dict[str, Any] = {}
    if directory is not None:
        start = _open_budget(settings, steps, directory, identity)
    start = comm.broadcast_json(start)
    steps.key = NoiseKey.load(settings.privacy.noise_file, start["run_id"], create=not start["exists"])
    steps.attempts = Counter(dict(map(tuple, start["attempts"])))
    checks = comm.allgather_bytes(steps.key.fingerprint.encode(), settings.comm.start_timeout_s)
    if directory is not None and steps.budget is not None and not start["exists"]:
        keys = {"run_id": steps.key.run_id, "key_check": steps.key.fingerprint, "keys_differ": len({*checks}) > 1}
        rounds, names = range(settings.rounds), experiment.data.site_names
        planned = describe_guarantee(make_guarantee(settings, steps), rounds, names)
        directory.write_json(PRIVACY, {**keys, **planned, "noise_multipliers": _noise_multipliers(steps)})


def _open_budget(
    settings: Settings, steps: PrivateSteps, directory: RunDirectory, identity: Mapping[str, str]
) -> dict[str, Any]:
    """Open the budget on rank 0; return the identifier of the run, whether it existed before, and its attempts."""
    from fedmpi.privacy.budget import PrivacyBudget, RepeatedBudget
    from fedmpi.privacy.noise import new_run_id

    dp = settings.privacy.dp
    assert dp is not None
    guarantee: Any = make_guarantee(settings, steps)  # the budget only asks for the epsilon of rounds
    source, repeat = directory, settings.privacy.repeat
    if repeat is not None:
        source = RunDirectory(settings.working_dir / repeat)
        private_runs.check_same_computation(source.path, identity, settings)
    before = read_json_object(source.path / PRIVACY) or {}
    if before:
        private_runs.load_key(settings, before, source.path)
        if before.get("noise_multipliers") != _noise_multipliers(steps):
            raise UserError(
                f"privacy.dp.epsilon: {source.path} began with noise for another number of rounds, and epsilon is only "
                "known for the noise with which it began; undo the change of rounds, or start a new run"
            )
    rounds = [row["round"] for row in source.read_rows(RELEASES)]
    attempts = Counter(rounds)
    if repeat is not None:
        steps.budget = RepeatedBudget(guarantee, rounds)
        attempts.subtract({*rounds})  # a round is repeated with the noise of its last attempt
    else:

        def write(t: int, attempt: int) -> None:
            directory.append(RELEASES, {"round": t, "attempt": attempt})

        steps.budget = PrivacyBudget(guarantee, dp.max_epsilon or dp.epsilon, rounds, write)
    run_id = before.get("run_id") or new_run_id()
    return {"run_id": run_id, "exists": bool(before), "attempts": [*attempts.items()]}


def _noise_multipliers(steps: PrivateSteps) -> list[float]:
    """Return the noise multiplier of each client."""
    return [steps.mechanism.noise_multiplier_of(k) for k in range(len(steps.mechanism.rates))]


def _draw_cohort(settings: Settings, clients: int, t: int) -> list[int]:
    """Return the clients that take part in round t."""
    cohort = settings.cohort
    return scheduler.draw_cohort(settings.seed, t, clients, cohort.fraction, cohort.sampling, cohort.size)


def _check_settings(settings: Settings) -> None:
    """Raise UserError if a setting contradicts private steps, or releases values of training samples."""
    s, compute, evaluate = settings, settings.compute, settings.evaluate
    tuned = [protocol for protocol in evaluate.protocol if protocol.startswith("ft(")]
    # key -> its value, if that is not allowed; the reason; the remedy
    problems = {
        "train.accumulate": (
            s.train.accumulate > 1 and s.train.accumulate,
            "batches are divided anyway",
            "set it to 1",
        ),
        "compute.graphs": (compute.graphs is True and "true", "batches have random sizes", "set it to auto"),
        "compute.compile": (
            compute.compile and "true",
            "gradients of single samples are not compiled",
            "set it to false",
        ),
        "compute.clients_per_pass": (
            compute.clients_per_pass not in (1, "auto") and compute.clients_per_pass,
            "clients draw batches of different sizes",
            "set it to 1",
        ),
        "evaluate.best.metric": (
            evaluate.best.metric,
            "the choice of the best model on held-out rows of the clients has no noise",
            "remove evaluate.best",
        ),
        "evaluate.protocol": (
            ", ".join(tuned),
            "fine-tuning would use training samples without being part of epsilon",
            "remove it from the list",
        ),
        "analysis": (
            ", ".join(s.analysis),
            "it trains local models a second time and measures them without noise",
            "remove analysis",
        ),
        "data.standardise_target": (
            s.data.standardise_target,
            "mean and standard deviation of the training targets would be stored without noise",
            "remove it, and scale the targets by constants",
        ),
        "data.share_label_counts": (
            s.data.silos and s.data.share_label_counts and "true",
            "the label counts of each site would be sent without noise",
            "set it to false",
        ),
        "task.class_weights": (
            s.task.options.get("class_weights") == "balanced" and "balanced",
            "the weights depend on label counts, which have no noise",
            "set the weights to constants, or remove it",
        ),
    }
    for key, (value, reason, remedy) in problems.items():
        if value:
            where = locate_key(settings.origin(key), key)
            raise UserError(f"{where}: {value} is not allowed with privacy.dp.unit: sample, because {reason}; {remedy}")


def _check_method(settings: Settings, method: Method) -> None:
    """Raise UserError if clients of the method read samples outside of steps, or if their loss needs whole batches."""
    name = settings.method.name
    reason = None
    if overrides(method, "step"):
        reason = "overrides the hook step, whose gradients have no noise"
    elif overrides(method, "loss") and not method.loss_is_sample_mean:
        reason = (
            "overrides the hook loss, and does not declare loss_is_sample_mean = True (a mean of terms that depend "
        )
        reason += "on one sample each)"
    elif overrides(method, "loss") and method.accumulators:
        reason = "overrides the hook loss and declares accumulators, to which it may write values without noise"
    elif needed := sorted(method.needs & {LABEL_COUNTS, VALIDATION}):
        reason = f"needs {needed[0]}, which would be used without noise"
    elif method.sets_training_length:
        reason = "sets the length of local training itself, so that the number of steps of a round is not known"
    elif used := sorted(SAMPLE_READERS & _attributes_of_client_code(type(method))):
        reason = f"uses client.{used[0]}, which reads samples outside of steps"
    if reason is not None:
        raise make_located_error(
            f"method {name} is not allowed with privacy.dp.unit: sample: it {reason}; {REMEDY}", type(method)
        )


def _attributes_of_client_code(method: type) -> set[str]:
    """Return the names of all attributes that the functions of a method's class use, except hooks of the server."""
    owners = [owner for owner in method.__mro__ if owner not in (Method, object)]
    members = {name: member for owner in reversed(owners) for name, member in vars(owner).items()}
    functions = [member for name, member in members.items() if isfunction(member) and name not in SERVER_HOOKS]
    return set[str]().union(*(_attribute_names(function.__code__) for function in functions))


def _attribute_names(code: CodeType) -> set[str]:
    """Return the names of all attributes that a function and the functions inside of it use."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return {*code.co_names}.union(*map(_attribute_names, inner))


def _check_task(settings: Settings, task: Any, data: FederatedData) -> None:
    """Raise UserError if the loss of a batch is no mean over samples, or depends on label counts."""
    name = settings.task.name
    counts = getattr(type(task), "set_class_counts", Task.set_class_counts)
    if task.loss_weight(data.example_targets()) is None:
        reason = "its loss for a batch is no mean of losses of single samples"
    elif counts not in (Task.set_class_counts, Classification.set_class_counts):
        reason = "its loss depends on label counts, which have no noise"
    else:
        return
    raise make_located_error(
        f"task {name} is not allowed with privacy.dp.unit: sample, because {reason}; choose another task, or set "
        "privacy.dp.unit: client",
        type(task),
    )


def _check_module(settings: Settings, module: nn.Module) -> None:
    """Raise UserError if a layer of the model computes statistics over the samples of a batch."""
    for name, layer in module.named_modules():
        mixes = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if mixes or (isinstance(layer, nn.modules.instancenorm._NormBase) and layer.track_running_stats):
            norm = settings.model.options.get("norm", "")
            option = "set model.norm: gn" if str(norm).startswith("bn") or "norm" in settings.model.options else ""
            remedy = option or "choose a model with group normalisation (model.norm: gn if the model has this option)"
            raise UserError(
                f"model {settings.model.name} is not allowed with privacy.dp.unit: sample, because its layer {name} "
                f"({type(layer).__name__}) mixes the samples of a batch, so that there are no gradients of single "
                f"samples; {remedy}, or replace the layer by torch.nn.GroupNorm"
            )


def warn_of_fitted_preparation(settings: Settings) -> None:
    """Warn if inputs are prepared with statistics of the training rows, which epsilon does not cover."""
    options = settings.data.options
    source = registry.load_object(settings.data.source, sources.registry, "data.source")
    for key, unfitted in (("standardise", "none"), ("missing", None)):
        parameter = signature(source).parameters.get(key)
        value = options.get(key, parameter.default if parameter is not None else None)
        if value in ("site", "pooled", "impute"):
            remedy = f"set data.{key}: {unfitted} if the source has this option" if unfitted else f"change data.{key}"
            warnings.warn(
                f"privacy.dp: data.{key}: {value} prepares inputs with statistics of the training rows, which have no "
                f"noise and may be stored with the model; epsilon does not cover them; {remedy}, or prepare the files "
                "with public constants",
                stacklevel=4,
            )
