"""Load the models of a run directory as modules: the global model, and the models with which clients were evaluated.

The method's hooks for the evaluation protocol `personal` compute a client's model from the global model, the server's
state in the checkpoint and the client's state (in the folder state/). Data are read only if these hooks may need them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.comm.base import SingleProcess
from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.common.text import suggest_name
from fedmpi.common.user_code_errors import add_error_context
from fedmpi.config.schema import Settings
from fedmpi.config.sections import BestSettings
from fedmpi.data.federated import FederatedData
from fedmpi.data.preprocessing import READING_OPTIONS
from fedmpi.engine.evaluate import PERSONAL_MODEL_HOOKS, load_own_model
from fedmpi.engine.faults.lost_ranks import LostRanks
from fedmpi.engine.federation import Federation
from fedmpi.flat.model import FlatModel
from fedmpi.method.base import Method, overrides
from fedmpi.models.net import FeaturesAndHead
from fedmpi.runtime import build, build_data, build_method, build_model, checkpoints, code_trust, rank_agreement
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.checkpoints import ClientStateFiles
from fedmpi.runtime.device import configure_numerics
from fedmpi.runtime.record.atomic_files import CorruptFileError, read_tensors
from fedmpi.runtime.record.data_files import PREPROCESSING, read_client_sizes, read_preprocessing
from fedmpi.runtime.record.run_dir import BEST, INITIAL, MODEL, RunDirectory
from fedmpi.runtime.record.saved_model import (
    format_personal_notice,
    load_initial_weights,
    parse_input_shape,
    read_model,
    read_model_metadata,
)

# Overrides of the run's settings for a process that does not train.
NO_TRAINING_OVERRIDES = (
    "compute.compile=false",
    "compute.gradient_checkpointing=false",
    "compute.device=cpu",
    "compute.clients_per_pass=1",
    "analysis=[]",
    "checkpoint.resume=never",
)


class _PlaceholderTask:
    """Placeholder for the task in an experiment that computes no loss and no metric."""

    names, loss = (), None


class ClientPredictor(nn.Module):
    """A client's model whose predictions need more than a network, such as the client's training data in kNN-Per.

    `network` is the network that the predictions use. The outputs do not carry gradients.
    """

    def __init__(self, network: nn.Module, predict: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self._predict = network.eval(), predict

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self._predict(x)


def load_global_model(run_dir: Path, settings: Settings, name: str = MODEL) -> nn.Module:
    """Return the global model of a run directory, in evaluation mode.

    Args:
        settings: the settings of the run, from `load_run_settings`. Call this function within `forbid_external_code`.
        name: the file name of the final model or of the best model.

    Raises:
        UserError: the run has not ended yet, or the file is damaged or does not match the model in the settings.
    """
    weights = run_dir / name
    if not weights.exists():
        why = "no best model was selected (evaluate.best)" if name == BEST else "the run has not ended yet"
        raise UserError(f"{run_dir} contains no {name}: {why}")
    tensors, (shape, dtype), classes = read_model(weights)
    # Model files with adapters contain only what training has changed, so the base is made as for the run.
    base = build_model.find_pretrained_weights(settings) if settings.model.lora is not None else None
    if settings.model.lora is not None and base is None and "(model.name)" in _read_identity(run_dir):
        folder = Path(settings.model.name.partition(":")[2]).expanduser().absolute()
        raise UserError(
            f"{run_dir}: its model file contains adapters only, and the folder {folder} with the base model does not "
            "exist; start in the folder in which the run was started, or override model.name=hf:FOLDER"
        )
    module = build_model.make_prepared_module(settings, build_method.make_method(settings), shape, classes, dtype, base)
    if settings.model.lora is not None:
        frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        check_base_model(run_dir, frozen)
        tensors = {**{name: p.detach() for name, p in frozen.items()}, **tensors}
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:  # names or shapes of tensors differ
        raise UserError(f"{weights} does not match the model in config.yaml: {error}") from error
    return module.eval()


def check_base_model(run_dir: Path, frozen: Mapping[str, Tensor]) -> None:
    """Raise UserError if the frozen parameters differ from those at the start of the run, whose files lack them."""
    recorded = _read_identity(run_dir)
    for key, digest in rank_agreement.compute_frozen_digest(frozen).items():
        if recorded.get(key, digest) != digest:
            raise UserError(
                f"{run_dir}: its model file contains adapters only, and the base model made here differs from that of "
                "the run; use the same pretrained weights (model.pretrained) and version of torch"
            )


def _read_identity(run_dir: Path) -> dict[str, str]:
    identity: dict[str, str] = json.loads((run_dir / "identity.json").read_text(encoding="utf-8"))
    return identity


@dataclass(frozen=True)
class RunModel:
    """A reference to the final or the best model of a run, either the global model or that of a client.

    Attributes:
        run_dir: the run directory.
        trusted: whether code outside fedmpi that the config names may be executed.
        overrides: changes to the run's settings, such as `data.root=DIR`.
        best: whether to use the best model (evaluate.best) instead of the final one.
        client: the client's number, or the name of its site if clients are sites; None: the global model.
    """

    run_dir: Path
    trusted: bool = False
    overrides: Sequence[str] = ()
    best: bool = False
    client: int | str | None = None

    @property
    def file_name(self) -> str:
        """The file name of the global model."""
        return BEST if self.best else MODEL

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata in the file of the global model."""
        return read_model_metadata(self.run_dir / self.file_name)

    def load_settings(self, *overrides: str) -> Settings:
        return code_trust.load_run_settings(self.run_dir, self.trusted, [*self.overrides, *overrides])

    def load(self, settings: Settings) -> nn.Module:
        """Return the model in evaluation mode; warn if it is the global one although clients use models of their own.

        Raises UserError if the client does not exist, the run has not ended, or the client's state is missing.
        """
        with code_trust.forbid_external_code(self.trusted):
            if self.client is not None:
                return _load_client_model(self)
            module = load_global_model(self.run_dir, settings, self.file_name)
        if notice := format_personal_notice(self.metadata):
            warnings.warn(notice, stacklevel=3)
        return module


def _load_client_model(run_model: RunModel) -> nn.Module:
    """Return the model with which a client was evaluated: after the last round or the round of the best model."""
    run_dir, start = run_model.run_dir, run_model.run_dir / INITIAL
    start_from = [f"init.from={json.dumps(str(start.absolute()))}"] if start.is_file() else []
    # Training files are read with the options of the run; overrides of reading options apply only to new files.
    own = [text for text in run_model.overrides if text.partition("=")[0].removeprefix("data.") not in READING_OPTIONS]
    settings = replace(run_model, overrides=own).load_settings(*start_from, *NO_TRAINING_OVERRIDES)
    evaluate = settings.evaluate.model_copy(update={"protocol": ["personal"], "best": BestSettings()})
    settings = settings.model_copy(update={"evaluate": evaluate})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has already shown these warnings
        configure_numerics(settings)
        module, facts = load_global_model(run_dir, settings, run_model.file_name), run_model.metadata
        try:
            partition = json.loads((run_dir / "partition.json").read_text(encoding="utf-8"))
            sizes = np.array(read_client_sizes(run_dir, partition)[0], dtype=np.int64)  # (N,) training samples
        except (OSError, ValueError) as error:
            raise UserError(f"{run_dir / 'partition.json'} cannot be read: {error}") from error
        number = _client_number(run_model, settings, len(sizes))
        experiment = _rebuild_experiment(run_dir, settings, facts, number, sizes)
        fed = build.make_federation(experiment, SingleProcess(torch.device("cpu")), lambda: False)
        row = facts if run_model.best else RunDirectory(run_dir).read_rows("metrics.jsonl")[-1]
        t = int(row["round"])
        _restore_state(fed, experiment, run_dir, t)
        return _compute_client_model(fed, experiment, module, number, t)


def _client_number(run_model: RunModel, settings: Settings, clients: int) -> int:
    """Return the number of a client, given its number or site name. Raises UserError if there is no such client."""
    client, sites = run_model.client, list(settings.data.silos or ())
    if not sites and (run_model.run_dir / PREPROCESSING).is_file():
        sites = list(read_preprocessing(run_model.run_dir / PREPROCESSING).client_sites)
    if isinstance(client, str) and client in sites:
        return sites.index(client)
    if isinstance(client, bool) or not str(client).isdecimal() or int(str(client)) >= clients:
        names = f", or site names: {suggest_name(str(client), sites)}" if sites else ""
        raise UserError(f"client: {client!r} does not exist in this run; must be 0 to {clients - 1}{names}")
    return int(str(client))


# ---- the experiment ----
def _rebuild_experiment(
    run_dir: Path, settings: Settings, facts: dict[str, Any], client: int, sizes: np.ndarray
) -> Experiment:
    """Build the experiment of a run; data are read only if the method's hooks for client models may use them."""
    method, device = build_method.make_method(settings), torch.device("cpu")
    is_foreign = any(
        where.startswith("method") for where in code_trust.find_external_code(settings.model_dump(mode="json"))
    )
    if not overrides(method, "predict") and not (
        is_foreign and any(overrides(method, hook) for hook in PERSONAL_MODEL_HOOKS)
    ):
        return _build_experiment_without_data(settings, method, facts, sizes)
    if settings.data.silos:  # the data of other sites may not be here
        return build.make_experiment(settings, build_data.build_one_site_data(settings, client), device)
    data = build_data.build_partitioned_data(settings)
    recorded = json.loads((run_dir / "identity.json").read_text(encoding="utf-8"))
    digests = rank_agreement.compute_data_digests(data)
    if different := [key[1:-1] for key, digest in digests.items() if recorded.get(key, digest) != digest]:
        raise UserError(
            f"{' and '.join(different)} in {settings.data.root} differ from those of the run, but method "
            f"{settings.method.name} needs the client's data to predict; set data.root to their directory"
        )
    return build.make_experiment(settings, data, device)


def _build_experiment_without_data(
    settings: Settings, method: Method, facts: dict[str, Any], sizes: np.ndarray
) -> Experiment:
    """Build the objects of a finished run (model, method, messages) without reading its data.

    The model has its initial weights; all counts of test samples and labels are zero.

    Args:
        facts: the metadata of the model file, which include the input shape and the number of classes.
        sizes: (N,) the number of training samples of each client.
    """
    (shape, dtype), classes, n = parse_input_shape(facts), int(facts["classes"]), len(sizes)
    no_tests, no_counts = np.zeros(n, dtype=np.int64), np.zeros((n, classes), dtype=np.int64)
    targets: tuple[tuple[int, ...], torch.dtype] = (), torch.int64
    sites = tuple(settings.data.silos or ())
    data = FederatedData(
        classes,
        shape,
        dtype,
        *targets,
        n,
        sizes,
        no_tests,
        no_counts,
        {},
        {},
        None,
        None,
        sites,
        label_counts_shared=False,
    )
    weights = build_model.find_pretrained_weights(settings)  # clients that have not trained yet start with them
    module = build_model.make_prepared_module(settings, method, shape, classes, dtype, weights)
    if settings.init.source is not None:
        load_initial_weights(module, settings.init.source, settings.init.strict)
    net = FeaturesAndHead(module, shape, dtype)
    model = FlatModel(module, net.head_parameter_names(), channels_last=settings.compute.channels_last)
    lora = build.make_lora_aggregation(
        settings, method, model, data
    )  # its changes of base weights are in the checkpoint
    messages = build.make_messages(settings, method, model, net, data, lora.state if lora else {})
    training = build.make_local_training(settings)
    return Experiment(settings, data, method, _PlaceholderTask(), net, model, messages, training, None, lora=lora)


# ---- the state of server and clients ----
def _restore_state(fed: Federation, experiment: Experiment, run_dir: Path, t: int) -> None:
    """Restore the state of server and clients after round t; raise UserError if that checkpoint cannot be read."""
    assert fed.server is not None
    path, messages = run_dir / "checkpoints" / f"{t:06}.safetensors", experiment.messages
    if t < 0:  # a run of 0 rounds: all have their initial state
        fed.transport.broadcast(0.0, fed.server)
        return
    try:
        tensors, facts = read_tensors(path)
    except CorruptFileError as error:
        raise UserError(
            f"{error}: the checkpoint of round {t} contains the state of server and clients; repeat the run with "
            "checkpoint.every=1 and a larger checkpoint.keep (`fedmpi replay` gives bitwise identical weights)"
        ) from error
    if messages.client_state.size:
        fed.states.store = ClientStateFiles(run_dir / "state", experiment.settings.data.silos)
        fed.states.max_in_memory = experiment.data.clients
    lost = checkpoints.load_rank_failures(experiment.settings, RunDirectory(run_dir))
    fed.scheduler.lost_ranks = LostRanks(lost).up_to_round(t + 1).for_resume(t + 1)
    fed.restore(t, facts["memory"], tensors)
    fed.transport.broadcast(0.0, fed.server)


def _compute_client_model(fed: Federation, experiment: Experiment, module: nn.Module, client: int, t: int) -> nn.Module:
    """Compute the client's model with the method's hooks, as the evaluation protocol `personal` does."""
    t, method, trainer, sites = max(t, 0), experiment.method, fed.trainer, experiment.settings.data.silos
    try:
        downloads = {client: fed.transport.empty_download}
        if any(overrides(method, hook) for hook in ("personal_weights", "predict", "finetune")):
            downloads = fed.transport.send_downloads(t, [client], fed.states.owners, fed.server)
        view = fed.states.client_context(
            client, t, fed.config.learning_rate(t), fed.transport.broadcast_copy, downloads[client]
        )
    except CorruptFileError as error:
        at = "; it is only in the run directory on the host that trained the site" if sites else ""
        who = f"site {sites[client]} (client {client})" if sites else f"client {client}"
        raise UserError(f"{error}: it contains the state of {who}, which is needed for its model{at}") from error
    seed = experiment.settings.seed
    with seeds.temporary_seed(seed, "evaluate", "personal", t, client), add_error_context(f"client {client}"):
        predict = load_own_model(view)
    if predict is not None:
        return ClientPredictor(trainer.model.module, predict).eval()
    module.load_state_dict(experiment.model.state_dict(trainer.model.w, trainer.model.b))
    return module.eval()
