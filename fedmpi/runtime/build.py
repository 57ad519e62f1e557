"""Settings -> objects. Only this module and launch.py know all the other packages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from fedmpi import methods, models, tasks
from fedmpi.aggregation import rules
from fedmpi.aggregation.optimizers import ServerOptimizer
from fedmpi.comm import Communicator, Job
from fedmpi.common import registry, seeds
from fedmpi.common.blame import blaming
from fedmpi.common.errors import UserError
from fedmpi.config.schema import Settings
from fedmpi.data.federated import Federated
from fedmpi.engine.federation import Federation, Plan, Sink
from fedmpi.engine.messages import Messages
from fedmpi.engine.schedule import learning_rate
from fedmpi.engine.server import Rule
from fedmpi.engine.worker import LocalSGD, Worker
from fedmpi.flat.model import NORM_LAYERS, FlatModel
from fedmpi.method.base import CLASSES, FEATURES, PLAIN_SERVER, PLAIN_SGD, VALIDATION, Method, overrides
from fedmpi.method.slots import Travel
from fedmpi.models.net import Net
from fedmpi.runtime import memory
from fedmpi.runtime.build_data import training_ranks


@dataclass(frozen=True, eq=False)
class Experiment:
    """Everything of an experiment on one rank but its communicator."""

    settings: Settings
    data: Federated
    method: Method
    task: Any
    net: Net
    model: FlatModel
    messages: Messages
    rule: Rule | None  # a server rule that replaces the method's own

    @property
    def itemsize(self) -> int:
        return self.model.w.element_size()


def make_method(settings: Settings) -> Method:
    """The method with its checked hyperparameters."""
    return _method(settings.method, settings.origins("method"), "method")


def _method(choice: registry.Choice, origins: Mapping[str, str], where: str) -> Method:
    """A method by name. An option that is itself a method is written like one: a name, or {name, ...options}."""
    kind = registry.Kind(methods.KIND.label, methods.registry, where)
    found = registry.load(choice.chosen, kind.registry, kind.label, origins.get("", ""))
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"{where}: {choice.chosen} is no subclass of fedmpi.Method")
    inner: set[str] = {f.name for f in fields(found) if f.metadata.get("method")} if is_dataclass(found) else set()
    plain = {key: value for key, value in choice.options.items() if key not in inner}
    made = registry.make(kind, registry.Chosen(choice.chosen, plain), origins)
    held = {key: _inner_method(key, choice.options[key], origins, where) for key in inner & set(choice.options)}
    try:
        with blaming(f"{where}: {choice.chosen}"):
            method: Method = made(**{key: value for key, value in held.items() if value is not None})
    except RuntimeError as error:  # the class itself is wrong (Method.__new__)
        raise UserError(str(error)) from error
    return method


def _inner_method(key: str, given: Any, origins: Mapping[str, str], where: str) -> Method | None:
    """The method given as option `key` of another method; None where it is null."""
    said = given if isinstance(given, dict) else {"name": given}
    options = {k: v for k, v in said.items() if k != "name"}
    own = {k.removeprefix(f"{key}."): v for k, v in origins.items() if k.startswith(f"{key}.")}
    at = origins.get(key, "")
    if said.get("name") is not None:
        chosen = registry.Chosen(str(said["name"]), options)
        return _method(chosen, own | {"": own.get("name", at)}, f"{where}.{key}")
    if options:
        prefix = f"{at}: " if at else ""
        raise UserError(f"{prefix}{where}.{key}: name is missing: of the method whose {', '.join(options)} this is")
    return None


def make_module(settings: Settings, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The architecture with its initial weights, a function of the seed alone."""
    made = registry.make(models.KIND, settings.model, settings.origins("model"))
    with blaming(f"model {settings.model.name}"), seeds.scoped(settings.seed, "init"):
        module = made(input_shape, classes)
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        raise UserError(f"model.name: {settings.model.name} must return a torch.nn.Module with trainable parameters")
    return module


def experiment(settings: Settings, data: Federated, device: torch.device) -> Experiment:
    """Model, task and method for the data at hand; what they need of each other is checked."""
    method = make_method(settings)
    make_task = registry.make(tasks.KIND, settings.task, settings.origins("task"))
    with blaming(f"task {settings.task.name}"):
        task = make_task(data.classes)
    module = make_module(settings, data.input_shape, data.classes)
    with blaming(f"method {settings.method.name}, hook prepare"), seeds.scoped(settings.seed, "prepare"):
        module = method.prepare(module, data.classes).to(device)
    net = Net(module, data.input_shape)
    task.names = tasks.metric_names(task, net.outputs, data.classes)
    _check_buffers(settings, module)
    model = FlatModel(module, net.head_names(), channels_last=settings.compute.channels_last)
    _check_needs(settings, method, task, net, module)
    _check_sense(settings, data, task, net)
    messages = Messages(method, model, data.classes, net.feature_dim or 0, data.clients, settings.rounds)
    first = method.travels(0, settings.rounds)
    if (first.groups, first.but) != (Travel().groups, ()) and messages.shared.whole:
        travels = f"all of model {settings.model.name} travels"
        warnings.warn(f"method {settings.method.name} keeps parts with the client, but {travels}", stacklevel=2)
    moved = data.to(device, channels_last=settings.compute.channels_last)
    if settings.compute.compile:
        module.compile()
    rule = make_rule(settings, method, messages.shared_groups)
    return Experiment(settings, moved, method, task, net, model, messages, rule)


def _check_needs(settings: Settings, method: Method, task: Any, net: Net, module: nn.Module) -> None:
    name = settings.method.name
    model, momentum, server = settings.model.name, settings.train.momentum, settings.server
    lacking = {
        FEATURES: not net.has_features and f"model {model} does not end in a linear layer that can be split off",
        CLASSES: not getattr(task, "classification", False)
        and f"task {settings.task.name} does not say that it is one (classification = True in the class)",
        PLAIN_SGD: momentum and f"train.momentum is {momentum}",
        PLAIN_SERVER: (server.optim, server.lr, server.rule.name) != ("sgd", 1.0, "auto")
        and f"server is {{optim: {server.optim}, lr: {server.lr:g}, rule: {server.rule.name}}}",
        VALIDATION: not settings.data.validation and "data.validation is 0",
    }
    for needed in sorted(method.needs):
        if needed not in lacking:
            known = "PLAIN_SGD, PLAIN_SERVER, FEATURES, CLASSES, VALIDATION of fedmpi.method"
            raise UserError(f"method {name}: needs holds {needed!r}; it takes {known}")
        if lacking[needed]:
            raise UserError(f"method {name} needs {needed}, but {lacking[needed]}")
    batch_norm = any(isinstance(m, NORM_LAYERS[0]) for m in module.modules())
    if batch_norm and settings.train.batch_size == 1:
        raise UserError("train.batch_size: 1 gives batch normalisation nothing to normalise over; use at least 2")
    if settings.train.drop_last and settings.train.batch_size == "full":
        warnings.warn("train.drop_last has no effect with batch_size: full", stacklevel=2)


def _check_sense(settings: Settings, data: Federated, task: Any, net: Net) -> None:
    """What would run, and mean nothing."""
    train = settings.train
    if getattr(task, "classification", False) and net.outputs != data.classes:
        raise UserError(
            f"model {settings.model.name} has {net.outputs} outputs, but the data have {data.classes} classes; "
            "a classification needs one output a class"
        )
    if train.drop_last and train.batch_size != "full":
        without = int((data.train_sizes < train.batch_size).sum())
        if without == data.clients:
            raise UserError(
                f"train.drop_last: true leaves out every batch: train.batch_size is {train.batch_size}, and the "
                f"largest client has {data.train_sizes.max()} samples; lower train.batch_size, or set drop_last: false"
            )
        if without:
            warnings.warn(
                f"train.drop_last: {without} of {data.clients} clients have fewer than train.batch_size = "
                f"{train.batch_size} samples and will not train",
                stacklevel=3,
            )
    if data.global_test is not None and not len(data.global_test):
        warnings.warn("data: the test set is empty; the global model will have no loss and no metrics", stacklevel=3)


def _check_buffers(settings: Settings, module: nn.Module) -> None:
    """Float buffers travel in the type of the parameters."""
    kind = next(module.parameters()).dtype
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.isfinite().all() and not buffer.to(kind).isfinite().all():
            raise UserError(
                f"model {settings.model.name}: buffer {name} ({buffer.dtype}) holds numbers beyond {kind}, the "
                "parameters' type, in which buffers travel"
            )


def make_rule(settings: Settings, method: Method, groups: Collection[str]) -> Rule | None:
    """The server rule by which the config replaces the method's own, for all `groups` or some; None if it does not."""
    rule = settings.server.rule
    for group in rule.groups or ():
        if group not in groups:
            has = f"model {settings.model.name} with method {settings.method.name} has {', '.join(sorted(groups))}"
            raise UserError(f"server.rule.groups: there is no group {group}; {has}")
    if rule.name == "auto":
        if rule.groups:
            raise UserError("server.rule.groups needs server.rule.name: which rule these groups take")
        return None
    if rule.groups and overrides(method, "aggregate"):
        name = settings.method.name
        raise UserError(f"server.rule.groups: method {name} has a server rule of its own, for all groups; leave it out")
    chosen: Rule = registry.make(rules.KIND, rule, settings.origins("server.rule"))
    return rules.over(rule.groups, chosen) if rule.groups else chosen


def make_worker(made: Experiment, stop: Callable[[], bool]) -> Worker:
    """The worker that trains clients on this rank; stop() is true once the run was asked to stop."""
    s, train = made.settings, made.settings.train
    sgd = LocalSGD(
        epochs=train.epochs,
        batch_size=None if train.batch_size == "full" else train.batch_size,
        momentum=train.momentum,
        weight_decay=train.weight_decay,
        drop_last=train.drop_last,
    )
    what = (made.model, made.net, made.task, made.method, made.data, made.messages, sgd, s.seed)
    return Worker(*what, bf16=s.compute.precision == "bf16", stop=stop)


def warm_up() -> None:
    """What torch imports for its first step takes seconds: they belong to no round, and to no round's deadline."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()


def federation(made: Experiment, comm: Communicator, stop: Callable[[], bool], sink: Sink | None = None) -> Federation:
    """The experiment, ready to run on this rank."""
    s = made.settings
    plan = Plan(
        rounds=s.rounds,
        seed=s.seed,
        learning_rate=lambda t: learning_rate(
            s.train.lr, s.train.schedule, t, max(s.rounds, 1), s.train.decay, s.train.warmup_rounds
        ),
        fraction=s.cohort.fraction,
        placement="pinned" if s.data.silos else s.cohort.placement,
        weighting=s.cohort.weighting,
        server_trains=s.server.trains,
        every=s.evaluate.every,
        protocol=s.evaluate.protocol,
        eval_batch=s.evaluate.batch_size,
    )
    beta1 = s.server.momentum if s.server.optim == "momentum" else s.server.beta1
    like = torch.empty(0 if comm.rank else made.model.layout.size, dtype=made.model.w.dtype, device=comm.device)
    optimizer = ServerOptimizer(s.server.optim, like, s.server.lr, beta1, s.server.beta2, s.server.eps)
    return Federation(plan, comm, make_worker(made, stop), optimizer, made.rule, sink)


def check_memory(made: Experiment, job: Job) -> dict[str, int]:
    """What the ranks need, in bytes, as `memory.need` says. Raises UserError if this host has less."""
    s = made.settings
    members = max(int(s.cohort.fraction * made.data.clients + 1e-9), 1)
    ranks = training_ranks(s, job.size)
    needed = memory.need(made.messages, made.itemsize, cohort=members, clients=made.data.clients, trainers=len(ranks))
    memory.check(needed, job.local_size, alone=job.size == 1)
    return needed
