"""Build the objects of an experiment (model, task, method, trainer, ...) from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedmpi import tasks
from fedmpi.aggregation import rules
from fedmpi.aggregation.lora import LoraAggregation
from fedmpi.aggregation.server_optimizers import ServerOptimizer
from fedmpi.comm import Communicator
from fedmpi.common import registry, seeds
from fedmpi.common.errors import UserError
from fedmpi.common.text import locate_key
from fedmpi.common.user_code_errors import add_error_context
from fedmpi.config import Settings, resources
from fedmpi.data.federated import FederatedData
from fedmpi.engine import scheduler
from fedmpi.engine.base_weights import BaseWeights, adapter_shapes
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.federation import Federation
from fedmpi.engine.federation_config import FederationConfig, RunCallbacks
from fedmpi.engine.hook_checks import are_finite
from fedmpi.engine.local.client_optimizers import optimizer_slot_shapes
from fedmpi.engine.local.local_training_config import LocalTrainingConfig, learning_rate
from fedmpi.engine.messages import CLIP, UNCLIPPED, MessageLayouts
from fedmpi.engine.model_selection import SelectionCriterion
from fedmpi.engine.private_release import PrivateRelease
from fedmpi.engine.server import ServerRule
from fedmpi.flat.formats import Format, HalfPrecision, Int8
from fedmpi.flat.model import FlatModel
from fedmpi.method.base import Method, overrides
from fedmpi.models.gradient_checkpointing import enable_gradient_checkpointing
from fedmpi.models.lora import AdaptedLayer, iter_adapted_layers
from fedmpi.models.net import FeaturesAndHead
from fedmpi.models.pretrained import PretrainedWeights
from fedmpi.runtime import compatibility, private_runs
from fedmpi.runtime.adapter_checks import check_adapters
from fedmpi.runtime.build_method import make_method
from fedmpi.runtime.build_model import find_pretrained_weights, make_prepared_module
from fedmpi.runtime.clients_per_pass import choose_clients_per_pass
from fedmpi.runtime.privacy_checks import check_client_level_privacy
from fedmpi.runtime.record.saved_model import InitialWeights, load_initial_weights
from fedmpi.runtime.sample_privacy import make_private_steps
from fedmpi.runtime.secure_aggregation import check_secure_aggregation, make_secure_aggregation
from fedmpi.tasks import validation
from fedmpi.tasks.regression import StandardisedRegression

TRAIN_FIELDS = (  # fields with the same name in the section `train` and in LocalTrainingConfig
    *("epochs", "steps", "accumulate", "drop_last", "optim", "momentum", "nesterov", "weight_decay"),
    "clip_norm",
)


@dataclass(frozen=True, eq=False)
class Experiment:
    """The data, model, task, method and other objects of an experiment on one rank, without the communicator."""

    settings: Settings
    data: FederatedData
    method: Method
    task: Any
    net: FeaturesAndHead
    model: FlatModel
    messages: MessageLayouts
    local_training: LocalTrainingConfig
    rule: ServerRule | None  # the configured aggregation rule, which replaces the method's own
    initial: InitialWeights | None = None  # initial weights from a file (init.from)
    best: SelectionCriterion | None = None  # how the best model is selected (evaluate.best); None: it is not selected
    clients_per_pass: int = 1  # number of clients that a rank trains at once
    pretrained: PretrainedWeights | None = None  # trained weights of the model (model.pretrained, or of its folder)
    lora: LoraAggregation | None = None  # the aggregation of adapters (server.lora); None: the model has none
    private_steps: Any = None  # the PrivateSteps of the clients (privacy.dp.unit: sample); None: not configured

    @property
    def initial_lines(self) -> list[str]:
        """For the console: which tensors of the model have been loaded from files."""
        return [line for source in (self.pretrained, self.initial) if source is not None for line in source.lines]

    @property
    def base_layers(self) -> list[AdaptedLayer]:
        """The layers whose base weights the server changes in each round (server.lora: exact or stack)."""
        return list(iter_adapted_layers(self.model.module)) if self.lora and self.lora.state else []

    def saved_tensors(self, w: Tensor, b: Tensor) -> dict[str, Tensor]:
        """Return the tensors that a model file contains, by state_dict name, for weights w (d,) and float buffers b.

        With adapters these are only the trained parameters, the buffers, and the base weights that the server changes.
        """
        tensors = self.model.state_dict(w, b)
        if self.settings.model.lora is None:
            return tensors
        changed = {layer.base_name for layer in self.base_layers}
        return {name: x for name, x in tensors.items() if name not in self.model.frozen or name in changed}

    @property
    def itemsize(self) -> int:
        """The number of bytes of one model parameter."""
        return self.model.w.element_size()

    @property
    def cohort_size(self) -> int:
        """The number m of clients in the cohort of a round."""
        cohort = self.settings.cohort
        return scheduler.cohort_size(self.data.clients, cohort.fraction, cohort.size)

    @property
    def max_states_in_memory(self) -> int | None:
        """The maximum number of client states that a rank keeps in memory (client_state.max_gib); None: no limit."""
        limit, row = self.settings.client_state.max_gib, self.itemsize * self.messages.client_state.size
        return None if limit is None or not row else max(int(limit * 2**30) // row, 1)

    @property
    def tolerates_missing_uploads(self) -> bool:
        """Whether the section `faults` lets a round continue without some clients' uploads, or lets it be repeated."""
        faults = self.settings.faults
        return (faults.on_bad_update, faults.on_client_error, faults.on_lost_rank) != ("abort",) * 3

    @property
    def needs_undo(self) -> bool:
        """Whether ranks copy the states of the cohort before they train, so that a round can be undone.

        If a checkpoint is written after every round and `tolerates_missing_uploads` is false, no copy is needed: the
        checkpoint contains the previous states.
        """
        return self.tolerates_missing_uploads or self.settings.checkpoint.every > 1

    def can_stream_sums(self, ranks: int) -> bool:
        """Return whether rank 0 can add up uploads as they arrive instead of storing them, in a job of `ranks` ranks.

        This requires a method that uses only means of uploads. Rank 0 must store all uploads if the config sets an
        aggregation rule, a wire format (comm.compression) or record.updates: gram, or if uploads may be left out. It
        must also store them if it trains clients in a job of several ranks, because it cannot receive uploads while it
        trains.
        """
        reads_rows = (
            any(each is not None for each in (self.rule, self.lora, self.messages.upload_format))
            or self.settings.record.updates == "gram"
        ) and private_runs.client_level_dp(self.settings) is None
        return (
            not self.tolerates_missing_uploads
            and not reads_rows
            and (ranks == 1 or not self.settings.server.trains_clients)
        )


def make_experiment(settings: Settings, data: FederatedData, device: torch.device) -> Experiment:
    """Make the model, task and method, check that they suit each other and the data, and move data to the device."""
    method, local_training, name = make_method(settings), make_local_training(settings), settings.model.name
    task = make_task(settings, data)
    weights, start = find_pretrained_weights(settings), None
    module = make_prepared_module(settings, method, data.input_shape, data.classes, data.x_dtype, weights).to(device)
    if settings.compute.gradient_checkpointing:
        enable_gradient_checkpointing(module, name)
    if settings.init.source is not None:
        if settings.model.lora is not None:
            raise UserError(
                f"{locate_key(settings.origin('init.from'), 'init.from')}: not possible with model.lora, whose layers "
                "have other names than in the file; set model.pretrained to the file with the base weights"
            )
        start = load_initial_weights(module, settings.working_dir / settings.init.source, settings.init.strict)
    with add_error_context(f"model {name}"):
        net = FeaturesAndHead(module, data.input_shape, data.x_dtype)
    task.names = validation.metric_names(task, net.output_shape, data.example_targets())
    with add_error_context(f"model {name}"):
        model = FlatModel(module, net.head_parameter_names(), channels_last=settings.compute.channels_last)
    floats = [p for p in model.frozen.values() if p.is_floating_point()]
    if not all(are_finite([model.w, model.b, *floats])):
        raise UserError(
            f"model.name: {name}: initial weights are not finite; correct the model, or the file in init.from"
        )
    compatibility.check_method(settings, method, task, net, local_training)
    if settings.train.accumulate > 1:
        compatibility.check_accumulation(settings, method, task, data)
    compatibility.check_cohort_and_batch_sizes(settings, data)
    best = compatibility.make_selection_criterion(settings, task, data) if settings.evaluate.best.metric else None
    compatibility.check_targets_and_outputs(settings, data, task, net)
    lora = make_lora_aggregation(settings, method, model, data)
    messages = make_messages(settings, method, model, net, data, lora.state if lora else {})
    if lora is not None:
        check_adapters(settings, method, lora, messages)
    check_secure_aggregation(settings, data, messages)
    compatibility.check_uploads_suit_aggregation(settings, data, messages)
    check_client_level_privacy(settings, data, messages)
    compatibility.check_analysis_and_protocols(settings, method, task, net, data, messages)
    built = Experiment(settings, data, method, task, net, model, messages, local_training, make_rule(settings), start)
    private_steps = make_private_steps(settings, data, method, task, module, local_training)
    built = replace(built, best=best, pretrained=weights, lora=lora, private_steps=private_steps)
    if settings.compute.clients_per_pass != 1:
        number = choose_clients_per_pass(settings, data, method, task, model, local_training)
        built = replace(built, clients_per_pass=number)
    if settings.compute.compile:  # last, so that contradictory settings are reported also on machines without compiler
        resources.check_compiler(gpu=device.type == "cuda")
        module.compile()  # once for all clients of a rank
    return replace(built, data=data.to(device, channels_last=settings.compute.channels_last))


def make_task(settings: Settings, data: FederatedData) -> Any:
    """Make the configured task; if the data have standardised targets, the task is a regression on these targets."""
    construct = registry.make_component(tasks.KIND, settings.task, settings.key_origins("task"))
    with add_error_context(f"task {settings.task.name}"), seeds.temporary_seed(settings.seed, "task"):
        task = construct(data.classes)
        if data.target_scales:
            task = StandardisedRegression(data.classes, *construct.args, **construct.keywords)
        validation.check_task(task)
    return task


def make_messages(
    settings: Settings,
    method: Method,
    model: FlatModel,
    net: FeaturesAndHead,
    data: FederatedData,
    rule_state: Mapping[str, tuple[int, ...]] = {},
) -> MessageLayouts:
    """Return the layouts of messages and state: the position of each named tensor in a flat vector.

    Raises:
        UserError: Uploads are compressed (comm.compression), but the model is neither in float32 nor in float64.
    """
    wire, dtype = settings.comm.compression, model.w.dtype
    if wire != "fp32" and dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"comm.compression: {wire} needs float32 or float64 parameters, but those of model {settings.model.name} "
            f"are {str(dtype).removeprefix('torch.')}; remove comm.compression"
        )
    form: Format | None = None if wire == "fp32" else Int8() if wire == "int8" else HalfPrecision(wire)
    sizes = (data.classes, net.feature_dim or 0, data.clients, settings.rounds)
    states, fields = optimizer_slot_shapes(make_local_training(settings), model.layout), list[str]()
    if dp := private_runs.client_level_dp(settings):
        rule_state = {**rule_state, CLIP: ()}
        fields = [UNCLIPPED] if dp.adaptive else []
    with add_error_context(f"method {settings.method.name}"):
        return MessageLayouts(method, model, *sizes, form, states, rule_state, fields)


def make_local_training(settings: Settings) -> LocalTrainingConfig:
    """Convert the section `train` of the settings to the engine's configuration of local training."""
    train = settings.train
    options = {name: getattr(train, name) for name in TRAIN_FIELDS}
    options |= {"eps": train.eps} if train.eps is not None else {}
    options |= {"betas": tuple(train.betas)} if train.betas else {}
    batch_size = None if train.batch_size == "full" else train.batch_size
    return LocalTrainingConfig(batch_size=batch_size, persist_optimizer=train.persist_optimizer, **options)


def make_rule(settings: Settings) -> ServerRule | None:
    """Make the aggregation rule that replaces the method's own (server.rule); return None if it is `auto`."""
    rule = settings.server.rule
    chosen: ServerRule | None = None
    if rule.name != "auto":
        chosen = registry.make_component(rules.KIND, rule, settings.key_origins("server.rule"))
    return chosen


def make_lora_aggregation(
    settings: Settings, method: Method, model: FlatModel, data: FederatedData
) -> LoraAggregation | None:
    """Make the aggregation of adapters (server.lora); None if the model has no adapters."""
    if settings.model.lora is None:
        return None
    layers = list(iter_adapted_layers(model.module))
    shapes = adapter_shapes(layers, dict(model.module.named_parameters()))
    m = scheduler.cohort_size(data.clients, settings.cohort.fraction, settings.cohort.size)
    server = settings.server
    # The distance is computed from single uploads, which differential privacy does not permit.
    measures = (server.optim, server.lr) == ("sgd", 1.0) and private_runs.client_level_dp(settings) is None
    if server.lora == "freeze_a":
        measures = measures and server.rule.name == "auto" and not overrides(method, "aggregate")
    return LoraAggregation(server.lora, shapes, m, measures=measures)


def make_trainer(experiment: Experiment, stop: Callable[[], bool]) -> ClientTrainer:
    """Make the object that trains clients on this rank.

    stop: Function that returns whether the run should stop.
    """
    s = experiment.settings
    e = experiment
    eager = not (s.compute.compile or s.compute.gradient_checkpointing or s.train.accumulate > 1 or e.private_steps)
    return ClientTrainer(
        *(e.model, e.net, e.task, e.method, e.data, e.messages, e.local_training, s.seed),
        bf16=s.compute.precision == "bf16",
        checkpoints_activations=s.compute.gradient_checkpointing,
        drops_bad_updates=s.faults.on_bad_update != "abort",
        drops_failed_clients=s.faults.on_client_error == "drop",
        clients_per_pass=experiment.clients_per_pass,
        strict=s.compute.clients_per_pass != "auto",
        graphs=experiment.model.w.is_cuda and eager and s.compute.graphs,
        stop=stop,
        changing=[layer.base for layer in e.base_layers],
        private_steps=e.private_steps,
        bounds_uploads=private_runs.client_level_dp(s) is not None,
    )


def make_federation(
    experiment: Experiment,
    comm: Communicator,
    stop: Callable[[], bool],
    callbacks: RunCallbacks | None = None,
    regroups: bool = True,
    privacy: PrivateRelease | None = None,
) -> Federation:
    """Make the `Federation` of this rank, which runs the rounds, with its trainer and server optimiser.

    Args:
        stop: Function that returns whether the run should stop.
        callbacks: Functions that the engine calls after each round and on other events.
        regroups: Whether the job can continue after a rank failure; if not, faults.on_lost_rank is treated as `abort`.
        privacy: Adds noise on rank 0 (differential privacy of clients); None: noise from a random key, if there is any.
    """
    s = experiment.settings
    way = "streaming" if experiment.can_stream_sums(comm.size) else "rows"
    way = "reducing" if s.server.reduce == "local" else "sharded" if s.server.placement == "sharded" else way
    config = FederationConfig(
        rounds=s.rounds,
        seed=s.seed,
        learning_rate=lambda t: learning_rate(
            s.train.lr, s.train.schedule, t, max(s.rounds, 1), s.train.decay, s.train.warmup_rounds
        ),
        fraction=s.cohort.fraction,
        cohort_size=s.cohort.size,
        sampling=private_runs.engine_sampling(s),
        placement="pinned" if s.data.silos else s.cohort.placement,
        # A client's last bits depend on the clients it is trained with, so measured times must not decide that.
        measures_speed=experiment.clients_per_pass == 1,
        weighting=s.cohort.weighting,
        server_trains=s.server.trains_clients,
        gather=way,
        evaluate_every=s.evaluate.every,
        protocol=s.evaluate.protocol,
        eval_batch=s.evaluate.batch_size,
        probes=s.analysis,
        max_norm=s.faults.max_norm,
        drops_bad_updates=s.faults.on_bad_update != "abort",
        stops_on_divergence=s.faults.on_divergence == "stop",
        on_lost_rank=s.faults.on_lost_rank if regroups else "abort",
        replays_failures=s.faults.replay is not None,
        best=experiment.best,
        timeout_s=s.comm.round_timeout_s,
        update_stats=s.record.updates if s.privacy.secagg is None and not private_runs.client_level_dp(s) else False,
        secure_aggregation=make_secure_aggregation(
            s, experiment.data, private_runs.make_client_noise(s, experiment.data)
        ),
        needs_undo=experiment.needs_undo,
        acknowledges=bool(s.checkpoint.every and experiment.messages.client_state.size),
        client_weights=private_runs.released_weights(s, experiment.data),
        withholds_participation=private_runs.hides_participation(s, experiment.data.clients),
        withholds_evaluation=private_runs.client_level_dp(s) is not None and s.data.silos is not None,
    )
    beta1 = s.server.momentum if s.server.optim == "momentum" else s.server.beta1
    like = torch.empty(
        0 if comm.rank else experiment.model.layout.size, dtype=experiment.model.w.dtype, device=comm.device
    )
    constants = (s.server.lr, beta1, s.server.beta2, s.server.eps, s.server.nesterov)
    optimizer = ServerOptimizer(s.server.optim, like, *constants)
    lora, base = experiment.lora, None
    if lora is not None and lora.state:
        base = BaseWeights(experiment.base_layers, lora.adapters, lora.cohort_size)
    if privacy is None and comm.rank == 0 and private_runs.client_level_dp(s):
        privacy = private_runs.make_release(s, experiment.data, experiment.messages)
    parts = optimizer, experiment.rule, callbacks, lora, base, privacy
    return Federation(config, comm, make_trainer(experiment, stop), *parts)
