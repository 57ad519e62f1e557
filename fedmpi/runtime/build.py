"""Settings -> objects. Only this module and run.py know all the other packages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedmpi import methods, models, tasks
from fedmpi.aggregation import rules
from fedmpi.aggregation.optimizers import ServerOptimizer
from fedmpi.comm import Communicator, Job
from fedmpi.common import registry, seeds
from fedmpi.common.blame import blaming
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Shape, Type, call, zeros
from fedmpi.config import Settings, machine
from fedmpi.data.federated import Federated
from fedmpi.engine import scheduler
from fedmpi.engine.checks import are_finite
from fedmpi.engine.federation import Federation
from fedmpi.engine.local.optimizers import state_shapes
from fedmpi.engine.local.recipe import learning_rate
from fedmpi.engine.messages import Messages
from fedmpi.engine.plan import SERVERS, Plan, Sink
from fedmpi.engine.server import Rule
from fedmpi.engine.travel.gathering import Cuts, pinned, rows_held
from fedmpi.engine.worker import Worker
from fedmpi.flat import linear
from fedmpi.flat.model import FlatModel
from fedmpi.method.base import Method, means_of, overrides
from fedmpi.method.slots import Travel
from fedmpi.models.net import Net
from fedmpi.runtime import fitting, measuring, memory, wire
from fedmpi.runtime.build_data import training_ranks
from fedmpi.runtime.recipe import clients_at_once, recipe
from fedmpi.runtime.resuming import initial
from fedmpi.runtime.resuming.initial import Initial
from fedmpi.tasks import contract
from fedmpi.tasks.regression import StandardisedRegression


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
    initial: Initial | None = None  # what the model starts from, where it is given
    pack: int = 1  # clients that a rank trains at once

    @property
    def room(self) -> int | None:
        """The most client rows that a rank holds in memory, at least one (state.memory); None: all of its clients'."""
        limit, row = self.settings.state.memory, self.itemsize * self.messages.client_state.size
        return None if limit is None or not row else max(int(limit * 2**30) // row, 1)

    @property
    def itemsize(self) -> int:
        return self.model.w.element_size()


def make_method(settings: Settings) -> Method:
    """The method with its checked hyperparameters."""
    with seeds.scoped(settings.seed, "method"):
        return _method(settings.method, settings.origins("method"), "method")


def _method(choice: registry.Choice, origins: Mapping[str, str], where: str) -> Method:
    """A method by name. An option that is itself a method is written like one: a name, or {name, ...options}."""
    kind = registry.Kind(methods.KIND.label, methods.registry, where)
    found = registry.load(choice.chosen, kind.registry, kind.label, origins.get("", ""))
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"{where}: {choice.chosen} is no subclass of fedmpi.Method")
    inner: set[str] = {f.name for f in fields(found) if f.metadata.get("method")} if is_dataclass(found) else set()
    plain = {key: value for key, value in choice.options.items() if key not in inner}
    made = registry.make(kind, registry.Chosen(choice.chosen, plain, ("name", *inner)), origins)
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


def make_module(settings: Settings, input_shape: Shape, classes: int, dtype: Type = torch.float32) -> nn.Module:
    """The architecture with its initial weights, a function of the seed alone. dtype: of the samples."""
    made = registry.make(models.KIND, settings.model, settings.origins("model"))
    if isinstance(input_shape, dict) and settings.model.name in models.registry:
        named = ", ".join(input_shape)
        raise UserError(
            f"model {settings.model.name} takes one tensor a sample, and the data set has several ({named}); write a "
            f"model with forward(self, {named}): model.name=file.py:Name"
        )
    with blaming(f"model {settings.model.name}"), seeds.scoped(settings.seed, "init"):
        module = made(input_shape, classes)
        fitting.check_module(f"model.name: {settings.model.name}", module, made)
        if any(is_lazy(p) for p in (*module.parameters(), *module.buffers())):  # made by the first pass: here, seeded
            training = module.training
            with torch.no_grad():
                call(module.eval(), zeros(2, input_shape, dtype))
            module.train(training)
    return module


def prepared_module(
    settings: Settings, method: Method, input_shape: Shape, classes: int, dtype: Type = torch.float32
) -> nn.Module:
    """The architecture as the method needs it, with its initial weights."""
    module = make_module(settings, input_shape, classes, dtype)
    where = f"method {settings.method.name}, hook prepare"
    with blaming(where), seeds.scoped(settings.seed, "prepare"):
        module = method.prepare(module, classes)
        fitting.check_module(where, module, method.prepare)
    return module


def experiment(settings: Settings, data: Federated, device: torch.device) -> Experiment:
    """Model, task and method for the data at hand; what they need of each other is checked."""
    method = make_method(settings)
    make_task = registry.make(tasks.KIND, settings.task, settings.origins("task"))
    with blaming(f"task {settings.task.name}"), seeds.scoped(settings.seed, "task"):
        task = make_task(data.classes)
        if data.target_scales:
            task = StandardisedRegression(data.classes, *make_task.args, **make_task.keywords)
        contract.check_task(task)
    module = prepared_module(settings, method, data.input_shape, data.classes, data.x_dtype).to(device)
    source = settings.init.source
    given = initial.fill(module, source and settings.working_dir / source, settings.init.strict)
    with blaming(f"model {settings.model.name}"):
        net = Net(module, data.input_shape, data.x_dtype)
    task.names = contract.metric_names(task, net.output_shape, data.two_targets())
    fitting.check_buffers(settings, module)
    with blaming(f"model {settings.model.name}"):
        model = FlatModel(module, net.head_names(), channels_last=settings.compute.channels_last)
    floats = [p for p in model.frozen.values() if p.is_floating_point()]
    if not all(are_finite([model.w, model.b, *floats])):
        raise UserError(f"model {settings.model.name}: its initial weights hold values that are not finite")
    fitting.check_needs(settings, method, task, net, module)
    fitting.check_sense(settings, method, data, task, net)
    messages = make_messages(settings, method, model, net, data)
    wire.check(settings, messages)
    fitting.check_rule(settings, data, messages)
    measuring.check(settings, method, task, net, data, messages)
    first = messages.travel(0)
    if (first.groups, first.but) != (Travel().groups, ()) and messages.shared.whole:
        travels = f"all of model {settings.model.name} travels"
        warnings.warn(f"method {settings.method.name} keeps parts with the client, but {travels}", stacklevel=2)
    if settings.method.name != "local" and not messages.shared.size and {*method.sends} <= {"dw"}:
        fitting.warn_of_nothing_shared(settings, messages)
    moved = data.to(device, channels_last=settings.compute.channels_last)
    rule = make_rule(settings, method, messages.shared_groups)
    pack = clients_at_once(settings, method, task, model, net, recipe(settings), data)
    if settings.compute.compile:  # last: settings that contradict each other are to be reported on every machine
        machine.compiler(gpu=device.type == "cuda")
        module.compile()  # one compilation for all clients of a rank
    return Experiment(settings, moved, method, task, net, model, messages, rule, given, pack)


def make_messages(settings: Settings, method: Method, model: FlatModel, net: Net, data: Federated) -> Messages:
    """The layouts of all messages between server and clients, and of what clients keep."""
    with blaming(f"method {settings.method.name}"):
        formats = wire.formats(settings, model.w.dtype)
        sizes = (data.classes, net.feature_dim or 0, data.clients, settings.rounds)
        return Messages(method, model, *sizes, formats, state_shapes(recipe(settings), model.layout))


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
    s = made.settings
    what = (made.model, made.net, made.task, made.method, made.data, made.messages, recipe(s), s.seed)
    drop, spares = s.faults.on_bad_update != "abort", s.faults.on_client_error == "drop"
    packing: dict[str, Any] = {"pack": made.pack, "strict": s.compute.pack != "auto"}
    packing["graphs"] = s.compute.graphs and made.model.w.is_cuda
    return Worker(*what, bf16=s.compute.precision == "bf16", drop=drop, spares=spares, **packing, stop=stop)


def federation(
    made: Experiment, comm: Communicator, stop: Callable[[], bool], sink: Sink | None = None, regroups: bool = True
) -> Federation:
    """The experiment, ready to run on this rank. regroups: whether the job can go on without a rank."""
    s = made.settings
    plan = Plan(
        rounds=s.rounds,
        seed=s.seed,
        learning_rate=lambda t: learning_rate(
            s.train.lr, s.train.schedule, t, max(s.rounds, 1), s.train.decay, s.train.warmup_rounds
        ),
        fraction=s.cohort.fraction,
        members=s.cohort.size,
        draw=s.cohort.draw,
        placement="pinned" if s.data.silos else s.cohort.placement,
        measured=made.pack == 1,  # whom a client is trained with moves its last bits: that must not be a matter of time
        weighting=s.cohort.weighting,
        server_trains=s.server.trains,
        sharded=s.server.placement == "sharded",
        adds_up=adds_up(made, comm.size),
        reduce=s.server.reduce == "local",
        every=s.evaluate.every,
        protocol=s.evaluate.protocol,
        eval_batch=s.evaluate.batch_size,
        probes=s.analysis,
        max_norm=s.faults.max_norm,
        drop=s.faults.on_bad_update != "abort",
        clip=s.faults.on_bad_update == "clip",
        stop_apart=s.faults.on_divergence == "stop",
        on_lost=s.faults.on_lost_rank if regroups else "abort",
        replay=s.faults.replay is not None,
        best=fitting.choice(s, made.task, made.data),
        timeout_s=s.comm.round_timeout_s,
        updates=s.record.updates,
        undo=undoes(s),
        acknowledge=bool(s.checkpoint.every and made.messages.client_state.size),
    )
    beta1 = s.server.momentum if s.server.optim == "momentum" else s.server.beta1
    like = torch.empty(0 if comm.rank else made.model.layout.size, dtype=made.model.w.dtype, device=comm.device)
    constants = (s.server.lr, beta1, s.server.beta2, s.server.eps, s.server.nesterov)
    optimizer = ServerOptimizer(s.server.optim, like, *constants)
    return Federation(plan, comm, make_worker(made, stop), optimizer, made.rule, sink)


def adds_up(made: Experiment, ranks: int) -> bool:
    """Whether rank 0 may add uploads up as they come, where the method reads means of them alone.

    It holds rows where some may be left out, clipped or sent once more; where the config has a rule of its own, or has
    their products recorded; and where it trains beside others, for whose turn it would have to wait.
    """
    faults, server = made.settings.faults, made.settings.server
    all_count = faults.on_bad_update == "abort" and faults.on_client_error != "drop" and faults.on_lost_rank == "abort"
    reads = made.rule is not None or made.settings.record.updates == "gram"
    return all_count and not reads and (ranks == 1 or not server.trains)


def undoes(s: Settings) -> bool:
    """Whether the state of those who train is kept twice: their round may have to be undone.

    With a checkpoint a round, the last one is all that an abandoned round needs.
    """
    faults = s.faults
    drops = faults.on_bad_update != "abort" or faults.on_client_error == "drop" or faults.on_lost_rank != "abort"
    return drops or s.checkpoint.every > 1


def memory_needs(made: Experiment, size: int, gathers_on_gpu: bool, trains_on_gpu: bool = False) -> dict[str, int]:
    """What each of so many ranks needs, in bytes, as `memory.need` says; and what of a training rank's part is on the
    host.

    gathers_on_gpu: whether rank 0 holds the uploads on its GPU, as with NCCL and in a single process; trains_on_gpu:
    whether clients train on one. If only they do, their uploads go from there to the host.
    """
    s, held, messages = made.settings, rows(made, size), made.messages
    apart, on_gpu = trains_on_gpu and not gathers_on_gpu, max(made.pack, 1)  # rows, before they are copied
    needs = memory.need(
        messages,
        made.itemsize,
        cohort=cohort_size(made),
        clients=_stateful_clients(made),
        trainers=len(training_ranks(s, size)),
        undoes=undoes(s),
        room=made.room if s.checkpoint.every else None,
        packed=made.pack if made.pack > 1 else 0,
        chooses=s.evaluate.best.metric is not None,
        held=(held[0], on_gpu) if apart else held,
        scratch=linear.scratch_bytes(round(held[0]), messages.largest_upload(), gathers_on_gpu),
    )
    on_host = 0
    if apart:
        row, news = (made.itemsize * n for n in (messages.largest_upload(), messages.announcement().packing.size))
        coded = made.itemsize * max(messages.upload(t).size for t in range(max(s.rounds, 1))) if messages.wire.up else 0
        root, mine = (int(row * many) for many in held)
        on_host = pinned(mine) + int(coded * held[1]) + pinned(news)
        needs["a training rank"] += on_host
        needs["rank 0"] += pinned(news) - news + (pinned(root) - root if s.server.trains else 0)
    return {**needs, "of which on the host": on_host}


def _stateful_clients(made: Experiment) -> int:
    """The most clients of which a rank may ever hold state: those that can be drawn, or all where all are judged."""
    s, clients = made.settings, made.data.clients
    judged = {*s.evaluate.protocol} - SERVERS or s.evaluate.best.metric is not None or made.data.global_test is None
    return clients if judged else min(clients, max(s.rounds, 1) * cohort_size(made))


def check_memory(made: Experiment, job: Job, devices: Sequence[torch.device] = ()) -> dict[str, int]:
    """Check that this host has the memory that its ranks need, by what one of them knows. Returns `memory_needs`.

    Args:
        job: how many ranks there are, and how many of them here.
        devices: where each of those here computes; default where this one's model lies.

    Raises:
        UserError: the host, or a GPU of it, has less.
    """
    first, places = max(job.rank - job.local_rank, 0), devices or [made.model.w.device] * job.local_size
    gpus = {device for device in places if device.type == "cuda"}
    nccl = made.settings.comm.backend in ("auto", "nccl") and len(gpus) == len(places)
    gathers_on_gpu = nccl if job.size > 1 else bool(gpus)
    here = {
        rank: {
            "host": job.host,
            "gpu": str(device) if device.type == "cuda" else "",
            "needs": memory_needs(made, job.size, gathers_on_gpu, device.type == "cuda"),
            "free": memory.free(device),
        }
        for rank, device in enumerate(places, first)
    }
    memory.check(here, training_ranks(made.settings, job.size), gathers_on_gpu)
    return memory_needs(made, job.size, gathers_on_gpu)


def cohort_size(made: Experiment) -> int:
    """m, the clients of a round."""
    cohort = made.settings.cohort
    return scheduler.cohort_size(made.data.clients, cohort.fraction, cohort.size)


def rows(made: Experiment, size: int) -> tuple[float, float]:
    """How many rows of uploads rank 0 of so many ranks holds, and a rank that trains."""
    s, members = made.settings, cohort_size(made)
    row = made.itemsize * made.messages.largest_upload()
    means, local = means_of(made.method), s.server.reduce == "local"
    # Slots of one block or less are neither added up nor shared out.
    packings = {made.messages.upload(t).packing for t in range(max(s.rounds, 1))}
    large = any(Cuts(packing).large for packing in packings)
    sums = (adds_up(made, size) or local) and means is not None and large
    mine = -(-members // len(training_ranks(s, size)))
    if sums and local:
        return (1 + 2 * max(sum(map(len, (means or {}).values())), 1),) * 2  # one row, sums in 64 bits
    return rows_held(row, members, mine, size, large and s.server.placement == "sharded", sums)
