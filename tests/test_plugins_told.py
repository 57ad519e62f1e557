"""Whatever a source, model, task, partition, rule or hook raises or returns is told: its line, what was expected, what
came. Or it works. Each is written here as a user would write it, and named in a config as path/to/file.py:name.
"""

import copy
import inspect
import json
import re
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import prepare
from torch import nn
from torch.nn import functional

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.config.schema import Settings
from fedmpi.method import FLAT, SCALAR, SHARED, Row, Slots, State, Travel
from fedmpi.runtime import build_data
from fedmpi.runtime.record.run_dir import plain

HERE = __file__


def table(n=40):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=g)
    return x, (x[:, 0] > 0).long()


def play(**sections):
    """Two rounds of three clients with 13 or 14 rows each; sections replace those of the config."""
    tree = {
        "rounds": 2,
        "data": {"source": f"{HERE}:good_source", "partition": {"scheme": "iid", "clients": 3}},
        "model": {"name": "mlp", "hidden": [4]},
        "method": {"name": "fedavg"},
        "train": {"batch_size": 5, "lr": 0.1, "momentum": 0.0},
        "evaluate": {"protocol": ["global", "personal"]},
    }
    tree |= {key: value for key, value in sections.items() if value is not None}
    settings = Settings.model_validate(tree)
    it = prepare(settings, build_data.partitioned(settings))
    it.reason = it.fed.run()
    return it


def sections_of(kind, name):
    named = f"{HERE}:{name}"
    return {
        "source": {"data": {"source": named, "partition": {"scheme": "iid", "clients": 3}}},
        "partition": {"data": {"source": f"{HERE}:good_source", "partition": {"scheme": named, "clients": 3}}},
        "model": {"model": {"name": named}},
        "task": {"task": {"name": named}},
        "rule": {"server": {"rule": {"name": named}}},
        "method": {"method": {"name": named}},
    }[kind]


# ---- sources ----
def good_source(root):
    x, y = table(60)
    return fedmpi.Dataset(x[:40], y[:40], x[40:], y[40:], 2)


def changed(**parts):
    x, y = table(60)
    whole = {"train_x": x[:40], "train_y": y[:40], "test_x": x[40:], "test_y": y[40:], "classes": 2}
    return fedmpi.Dataset(**{**whole, **parts})


def source_none(root):
    return None


def source_generator(root):
    yield good_source(root)


def source_tuple(root):
    return table()


def source_numpy(root):
    return changed(train_x=table()[0].numpy())


def source_float64(root):
    return changed(train_x=table()[0].double(), test_x=table()[0].double(), test_y=table()[1])


def source_overflow(root):
    return changed(train_x=(table()[0].double() * 1e300).float())


def source_complex(root):
    return changed(train_x=table()[0] + 0j)


def source_sparse(root):
    return changed(train_x=table()[0].to_sparse())


def source_graph(root):
    return changed(train_x=table()[0].requires_grad_())


def source_meta(root):
    return changed(train_x=table()[0].to("meta"))


def source_empty(root):
    return changed(train_x=torch.empty(0, 3), train_y=torch.empty(0, dtype=torch.int64))


def source_short_labels(root):
    return changed(train_y=table()[1][:-1])


def source_negative(root):
    return changed(train_y=table()[1] - 1)


def source_float_labels(root):
    return changed(train_y=table()[1].float())


def source_exits(root):
    raise SystemExit(0)


def source_stops(root):
    raise StopIteration


def source_memory(root):
    raise MemoryError


# ---- partitions ----
def part_none(labels, clients, rng):
    return None


def part_text(labels, clients, rng):
    return "abc"


def part_twice(labels, clients, rng):
    return [np.arange(14)] * clients


def part_outside(labels, clients, rng):
    return np.array_split(np.arange(1, len(labels) + 1), clients)


def part_negative(labels, clients, rng):
    return np.array_split(np.arange(-1, len(labels) - 1), clients)


def part_float(labels, clients, rng):
    return [part.astype(float) for part in np.array_split(np.arange(len(labels)), clients)]


def part_masks(labels, clients, rng):
    return [np.arange(len(labels)) % clients == k for k in range(clients)]


def part_columns(labels, clients, rng):
    return [part[:, None] for part in np.array_split(np.arange(len(labels)), clients)]


def part_empty(labels, clients, rng):
    return [np.arange(len(labels)), *[[]] * (clients - 1)]


def part_few(labels, clients, rng):
    return np.array_split(np.arange(len(labels)), clients - 1)


def part_objects(labels, clients, rng):
    return [None] * clients


def part_raises(labels, clients, rng):
    for k in range(clients):
        yield np.arange(k, len(labels), clients)
    raise MemoryError("no more")


# ---- models ----
class Base(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.head = nn.Linear(input_shape[0], classes)

    def forward(self, x):
        return self.head(x)


def model_none(input_shape, classes):
    return None


def model_no_parameters(input_shape, classes):
    return nn.ReLU()


def model_frozen(input_shape, classes):
    return Base(input_shape, classes).requires_grad_(False)


def model_mixed(input_shape, classes):
    return nn.Sequential(nn.Linear(3, 4).half(), nn.Linear(4, classes))


def model_half(input_shape, classes):
    return Base(input_shape, classes).half()


def model_double(input_shape, classes):
    return Base(input_shape, classes).double()


def model_complex(input_shape, classes):
    return Base(input_shape, classes).to(torch.complex64)


def model_meta(input_shape, classes):
    return Base(input_shape, classes).to("meta")


def model_nan(input_shape, classes):
    net = Base(input_shape, classes)
    nn.init.constant_(net.head.weight, torch.nan)
    return net


class ModelTuple(Base):
    def forward(self, x):
        return self.head(x), x


class ModelDict(Base):
    def forward(self, x):
        return {"logits": self.head(x)}


class ModelFlat(Base):
    def forward(self, x):
        return self.head(x)[:, 0]


class ModelWritesX(Base):
    def forward(self, x):
        return self.head(x.sub_(1))


class ModelWritesXInTraining(Base):
    def forward(self, x):
        return self.head(x.mul_(2) if self.training else x)


class ModelExits(Base):
    def forward(self, x):
        raise SystemExit(0) if self.training else StopIteration


class ModelNarrow(Base):
    def forward(self, x):
        return self.head(x[:, :1] if self.training else x)


class ModelShrinks(Base):
    def forward(self, x):
        return self.head(x) if len(x) == 2 else self.head(x)[:, :1]


class ModelDetached(Base):
    def forward(self, x):
        return self.head(x).detach()


# ---- tasks ----
class TaskBase:
    names = ("hits",)

    def __init__(self, classes):
        pass

    def loss(self, model, x, y):
        return functional.cross_entropy(model(x), y)

    def metrics(self, outputs, y):
        return {"hits": 1.0}


def task_none(classes):
    return None


class TaskNoLoss:
    def __init__(self, classes):
        pass

    def metrics(self, outputs, y):
        return {"hits": 1.0}


class TaskLossNone(TaskBase):
    def loss(self, model, x, y):
        model(x)


class TaskLossRows(TaskBase):
    def loss(self, model, x, y):
        return functional.cross_entropy(model(x), y, reduction="none")


class TaskLossItem(TaskBase):
    def loss(self, model, x, y):
        return functional.cross_entropy(model(x), y).item()


class TaskLossRowsLater(TaskBase):
    def loss(self, model, x, y):
        return functional.cross_entropy(model(x), y, reduction="mean" if torch.is_grad_enabled() else "none")


class TaskRound(TaskBase):
    names = ("round",)


class TaskLossName(TaskBase):
    names = ("loss",)


class TaskSeconds(TaskBase):
    names = ("hits", "wall_s")


class TaskTwice(TaskBase):
    names = ("hits", "hits")


class TaskStd(TaskBase):
    names = ("hits", "hits_std")


class TaskText(TaskBase):
    names = "hits"


class TaskNumberName(TaskBase):
    names = (1,)


class TaskMetricsNone(TaskBase):
    def metrics(self, outputs, y):
        pass


class TaskMetricsGenerator(TaskBase):
    def metrics(self, outputs, y):
        yield "hits", 1.0


class TaskMetricsOther(TaskBase):
    def metrics(self, outputs, y):
        return {"hits": 1.0, "round": 7}


class TaskMetricsMissing(TaskBase):
    def metrics(self, outputs, y):
        return {}


class TaskMetricsVector(TaskBase):
    def metrics(self, outputs, y):
        return {"hits": torch.ones(2)}


class TaskMetricsObject(TaskBase):
    def metrics(self, outputs, y):
        return {"hits": object()}


class TaskMetricsComplex(TaskBase):
    def metrics(self, outputs, y):
        return {"hits": 1j}


class TaskMetricsExit(TaskBase):
    names = ()

    def metrics(self, outputs, y):
        raise SystemExit(0)


# ---- server rules ----
def rule_none(up, s):
    return None


def rule_one(up, s):
    return up.mean("dw")[:1]


def rule_rows(up, s):
    return up.dw


def rule_whole_numbers(up, s):
    return torch.ones_like(up.mean("dw"), dtype=torch.int64)


def rule_numpy(up, s):
    return up.mean("dw").numpy()


def rule_complex(up, s):
    return up.mean("dw") + 0j


def rule_sparse(up, s):
    return up.mean("dw").to_sparse()


def rule_meta(up, s):
    return up.mean("dw").to("meta")


def rule_writes(up, s):
    return up.dw.mul_(2).mean(0)


def rule_exits(up, s):
    raise SystemExit(0)


# ---- methods ----


@dataclass(frozen=True)
class MethodWritesW(fedmpi.Method):
    def upload(self, k):
        k.w.zero_()
        return Row(), State()


@dataclass(frozen=True)
class MethodWritesWInGradient(fedmpi.Method):
    def gradient(self, k, g):
        k.w.mul_(0.9)
        return g


@dataclass(frozen=True)
class MethodWritesB(fedmpi.Method):
    def receive(self, k):
        k.w[0] = 1
        return k.received


@dataclass(frozen=True)
class MethodWritesCounts(fedmpi.Method):
    def loss(self, k, x, y):
        k.label_counts.add_(1)
        return k.task_loss(k.logits(x), x, y)


@dataclass(frozen=True)
class MethodWritesX(fedmpi.Method):
    def loss(self, k, x, y):
        return k.task_loss(k.logits(x.mul_(2)), x, y)


@dataclass(frozen=True)
class MethodWritesWeights(fedmpi.Method):
    def weights(self, k):
        return k.received.mul_(2)


@dataclass(frozen=True)
class MethodWritesP(fedmpi.Method):
    def aggregate(self, s, up):
        up.p.fill_(1)
        return up.mean("dw"), State()


@dataclass(frozen=True)
class MethodDetached(fedmpi.Method):
    def loss(self, k, x, y):
        return k.task_loss(k.logits(x).detach(), x, y)


@dataclass(frozen=True)
class MethodDetachedInFit(fedmpi.Method):
    def train(self, k):
        k.fit(loss=lambda k, x, y: k.logits(x).sum().detach())
        return State()


@dataclass(frozen=True)
class MethodInteger(fedmpi.Method):
    def gradient(self, k, g):
        return torch.ones_like(g, dtype=torch.int64)


@dataclass(frozen=True)
class MethodNumpy(fedmpi.Method):
    def gradient(self, k, g):
        return g.numpy()


@dataclass(frozen=True)
class MethodSparse(fedmpi.Method):
    def step(self, k, x, y):
        return k.grad(x, y).to_sparse()


@dataclass(frozen=True)
class MethodComplex(fedmpi.Method):
    def weights(self, k):
        return k.received + 0j


@dataclass(frozen=True)
class MethodMeta(fedmpi.Method):
    def receive(self, k):
        return k.received.to("meta")


@dataclass(frozen=True)
class MethodSlotNumpy(fedmpi.Method):
    sends = Slots(dw=SHARED, c=SCALAR)

    def upload(self, k):
        return Row(c=np.ones(())), State()


@dataclass(frozen=True)
class MethodSlotComplex(fedmpi.Method):
    sends = Slots(dw=SHARED, c=FLAT)

    def upload(self, k):
        return Row(c=k.w + 0j), State()


@dataclass(frozen=True)
class MethodSlotOverflow(fedmpi.Method):
    client_state = Slots(c=FLAT)

    def upload(self, k):
        return Row(), State(c=k.w.double() + 1e300)


@dataclass(frozen=True)
class MethodServerOverflow(fedmpi.Method):
    def aggregate(self, s, up):
        return up.mean("dw").double() * 1e300, State()


@dataclass(frozen=True)
class MethodDownloadNan(fedmpi.Method):
    per_client_download = Slots(c=SCALAR)

    def download(self, s, client):
        return Row(c=torch.tensor(torch.nan))


@dataclass(frozen=True)
class MethodPredict(fedmpi.Method):
    def predict(self, k):
        return k.w


@dataclass(frozen=True)
class MethodPredictNarrow(fedmpi.Method):
    def predict(self, k):
        return lambda x: k.logits(x)[:, :1]


@dataclass(frozen=True)
class MethodTravels(fedmpi.Method):
    def travels(self, t, rounds):
        return ("head",)


@dataclass(frozen=True)
class MethodTravelsText(fedmpi.Method):
    def travels(self, t, rounds):
        return Travel(groups="head")


@dataclass(frozen=True)
class MethodPrepare(fedmpi.Method):
    def prepare(self, module, classes):
        module.head = None


@dataclass(frozen=True)
class MethodFitText(fedmpi.Method):
    def train(self, k):
        k.fit(groups="hea")
        return State()


@dataclass(frozen=True)
class MethodFitGroup(fedmpi.Method):
    def train(self, k):
        k.fit(groups=("haed",))
        return State()


@dataclass(frozen=True)
class MethodFitEpochs(fedmpi.Method):
    def train(self, k):
        k.fit(epochs=-1)
        return State()


@dataclass(frozen=True)
class MethodFitStart(fedmpi.Method):
    def train(self, k):
        k.fit(start=k.w[:1])
        return State()


@dataclass(frozen=True)
class MethodGradAt(fedmpi.Method):
    def step(self, k, x, y):
        return k.grad(x, y, at=k.w[:1])


@dataclass(frozen=True)
class MethodLift(fedmpi.Method):
    def weights(self, k):
        return k.lift("head", k.w[:1], into=k.received)


@dataclass(frozen=True)
class MethodTake(fedmpi.Method):
    def weights(self, k):
        return k.take("haed", k.received)


@dataclass(frozen=True)
class MethodKeepsItself(fedmpi.Method):
    def upload(self, k):
        self.last = k.w
        return Row(), State()


@dataclass(frozen=True)
class MethodStops(fedmpi.Method):
    def loss(self, k, x, y):
        raise StopIteration


@dataclass(frozen=True)
class MethodOutOfMemory(fedmpi.Method):
    def aggregate(self, s, up):
        raise MemoryError


@dataclass(frozen=True)
class MethodState(fedmpi.Method):
    client_state = Slots(c=SCALAR)

    def upload(self, k):
        return Row(), State(c=k.state.d)


TOLD = [
    # kind, plug-in, what the message says
    ("source", source_none, "source source_none returned NoneType; it must return fedmpi.Dataset"),
    ("source", source_generator, "returned generator; it must return fedmpi.Dataset"),
    ("source", source_tuple, "returned tuple"),
    ("source", source_numpy, r"train_x is ndarray; a torch.Tensor is needed: torch.from_numpy"),
    ("source", source_float64, r"train_x is torch.float64; float32 .* is needed"),
    ("source", source_overflow, "train_x holds a value that is not finite, first in row 0"),
    ("source", source_complex, "train_x is a complex tensor"),
    ("source", source_sparse, "train_x is a sparse tensor"),
    ("source", source_graph, "train_x is a tensor that requires gradients"),
    ("source", source_meta, "train_x is a tensor on meta"),
    ("source", source_empty, "there is no training sample"),
    ("source", source_short_labels, r"train_x has 40 rows, train_y the shape \(39,\)"),
    ("source", source_negative, r"train_y holds labels -1..0; with classes=2 0..1 is allowed"),
    ("source", source_float_labels, "train_y is torch.float32; int64 class numbers"),
    ("source", source_exits, "SystemExit: 0"),
    ("source", source_stops, "StopIteration"),
    ("source", source_memory, "MemoryError"),
    ("partition", part_none, "returned NoneType; it must return a list of 3 index arrays"),
    ("partition", part_text, "returned str; it must return"),
    ("partition", part_twice, "handed out sample 0 more than once"),
    ("partition", part_outside, r"gave client 2 indices 28..40 \(int64\); whole numbers 0..39 are allowed"),
    ("partition", part_negative, r"gave client 0 indices -1..12"),
    ("partition", part_float, r"gave client 0 indices 0.0..13.0 \(float64\); whole numbers"),
    ("partition", part_masks, r"gave client 0 a mask of bool; .*np.flatnonzero\(mask\)"),
    ("partition", part_columns, r"gave client 0 ndarray of shape \(14, 1\)"),
    ("partition", part_empty, "left client 1 without a training sample"),
    ("partition", part_few, "returned 2 index arrays for clients=3"),
    ("partition", part_objects, r"gave client 0 NoneType of shape \(\)"),
    ("partition", part_raises, r"out of memory \(no more\); lower"),
    ("model", model_none, "must return a torch.nn.Module with trainable parameters; it returned NoneType"),
    ("model", model_no_parameters, "it returned a module without any"),
    ("model", model_frozen, "it returned a module without any"),
    ("model", model_mixed, "parameters of torch.float16, torch.float32; all must be of one type"),
    ("model", model_complex, "parameters of torch.complex64"),
    ("model", model_meta, "head.weight is on the device meta"),
    ("model", ModelTuple, r"returns tuple for a batch of 2 samples; it must return one tensor of shape \(2, outputs\)"),
    ("model", ModelDict, "returns dict for a batch of 2 samples"),
    ("model", ModelFlat, r"returns shape \(2,\) for a batch of 2"),
    ("model", ModelWritesX, "writes to its input"),
    ("model", ModelWritesXInTraining, "round 0, client 0: the model .* wrote to its batch, x or y"),
    ("model", ModelExits, "fails on a batch of two samples"),
    ("model", ModelNarrow, "round 0, client 0: ModelNarrow.forward at .*RuntimeError: mat1 and mat2"),
    ("model", ModelDetached, "hook loss returned a loss that depends on no weight"),
    ("task", task_none, "NoneType, which has no function loss"),
    ("task", TaskNoLoss, "TaskNoLoss, which has no function loss"),
    ("task", TaskLossNone, r"hook loss returned NoneType; it must return a tensor \(\)"),
    ("task", TaskLossRows, r"hook loss returned shape \(5,\)"),
    ("task", TaskLossItem, "hook loss returned float"),
    ("task", TaskLossRowsLater, r"evaluation after round 0: task TaskLossRowsLater: loss returned shape \(20,\)"),
    ("task", TaskRound, "a metric is called 'round', which is the name of something else"),
    ("task", TaskLossName, "a metric is called 'loss'"),
    ("task", TaskSeconds, "a metric is called 'wall_s'"),
    ("task", TaskTwice, "a metric is called 'hits'"),
    ("task", TaskStd, "a metric is called 'hits_std'"),
    ("task", TaskText, r"names is the text 'hits'; it must be a tuple of names: \('hits',\)"),
    ("task", TaskNumberName, "a metric is called 1; a name is a text"),
    ("task", TaskMetricsNone, r"metrics returned NoneType; it must return \{name: number\}"),
    ("task", TaskMetricsGenerator, "metrics returned generator"),
    (
        "task",
        TaskMetricsOther,
        r"metrics returned 'hits', 'round', but names is .*: they must agree in 'round'",
    ),
    ("task", TaskMetricsMissing, "metrics returned nothing, but names is"),
    ("task", TaskMetricsVector, r"returned Tensor of shape \(2,\) for 'hits'; a number is needed"),
    ("task", TaskMetricsObject, "returned object for 'hits'"),
    ("task", TaskMetricsComplex, "returned complex for 'hits'"),
    ("task", TaskMetricsExit, "SystemExit: 0"),
    ("rule", rule_none, r"round 0: the server rule returned NoneType; it must return a tensor \(26,\) of floats"),
    ("rule", rule_one, r"returned shape \(1,\); it must return a tensor \(26,\)"),
    ("rule", rule_rows, r"returned shape \(3, 26\)"),
    ("rule", rule_whole_numbers, "returned a tensor of torch.int64"),
    ("rule", rule_numpy, "returned ndarray"),
    ("rule", rule_complex, "returned a tensor of torch.complex64"),
    ("rule", rule_sparse, "returned a sparse_coo tensor"),
    ("rule", rule_meta, "returned a tensor on meta"),
    ("rule", rule_writes, "the server rule wrote to up, which hooks may only read"),
    ("rule", rule_exits, "round 0: rule_exits at .*SystemExit"),
    ("method", MethodWritesW, "client 0: a hook of method MethodWritesW wrote to k.w, which.* It was upload"),
    ("method", MethodWritesWInGradient, "wrote to k.w, which.* It was gradient"),
    ("method", MethodWritesB, "wrote to k.w, which.* It was receive"),
    ("method", MethodWritesCounts, "wrote to k.label_counts, which.* It was loss"),
    ("method", MethodWritesX, "wrote to its batch, x or y"),
    ("method", MethodWritesWeights, r"wrote to k.w0 \(k.received\) or k.down, which.* It was weights"),
    ("method", MethodWritesP, "round 0: a hook of method MethodWritesP wrote to up.p, which.* It was aggregate"),
    (
        "method",
        MethodDetached,
        "round 0, client 0: method MethodDetached, hook loss returned a loss that",
    ),
    ("method", MethodDetachedInFit, "hook loss returned a loss that depends on no weight"),
    ("method", MethodInteger, "hook gradient returned a tensor of torch.int64"),
    ("method", MethodNumpy, "hook gradient returned ndarray"),
    ("method", MethodSparse, "hook step returned a sparse_coo tensor"),
    ("method", MethodComplex, "hook weights returned a tensor of torch.complex64"),
    ("method", MethodMeta, "hook receive returned a tensor on meta"),
    ("method", MethodSlotNumpy, r"hook upload: slot 'c' is \(\), but it returned ndarray"),
    ("method", MethodSlotComplex, r"slot 'c' is \(26,\), but it returned a tensor of torch.complex64"),
    ("method", MethodSlotOverflow, r"not finite \(nan or inf\) in torch.float32: slot 'c' is"),
    ("method", MethodDownloadNan, r"hook download gave values that are not finite .*slot 'c'"),
    ("method", MethodPredict, "hook predict returned Tensor; it must return None or a function"),
    (
        "method",
        MethodPredictNarrow,
        r"the function that hook predict gave returned torch.float32 \(\d+, 1\) for \d+",
    ),
    ("method", MethodTravels, r"hook travels, round 0 returned tuple; it must return Travel\(...\)"),
    ("method", MethodPrepare, "hook prepare must return a torch.nn.Module.*it returned NoneType"),
    ("method", MethodFitText, "k.fit, groups: 'hea' is text"),
    ("method", MethodFitGroup, "there is no layout group 'haed'; this model has body, head"),
    ("method", MethodFitEpochs, "k.fit: epochs is -1; a whole number >= 0"),
    ("method", MethodFitStart, r"ValueError: weights of shape \(1,\) for a model of \(26,\)"),
    ("method", MethodGradAt, r"ValueError: weights of shape \(1,\) for a model of \(26,\)"),
    ("method", MethodLift, r"ValueError: a tensor of shape \(1,\) where \d+ entries are needed"),
    ("method", MethodTake, "there is no layout group 'haed'"),
    ("method", MethodKeepsItself, "FrozenInstanceError"),
    ("method", MethodStops, "round 0, client 0: MethodStops.loss at .*StopIteration"),
    ("method", MethodOutOfMemory, "round 0: MethodOutOfMemory.aggregate at .*MemoryError"),
    ("method", MethodState, r"no state 'd' is declared here \(declared: c\)"),
]


def lines_of(thing):
    """The lines of this file in which a plug-in stands."""
    text, first = inspect.getsourcelines(thing)
    return range(first, first + len(text))


@pytest.mark.parametrize(("kind", "thing", "message"), TOLD, ids=[case[1].__name__ for case in TOLD])
def test_told(kind, thing, message):
    """One UserError: what is expected, what came, and a line of the plug-in itself."""
    with pytest.raises(UserError) as caught:
        play(**sections_of(kind, thing.__name__))
    said = str(caught.value)
    assert re.search(message, said), said
    if (kind, thing) in PLACELESS:
        return
    named = [int(line) for line in re.findall(rf"{re.escape(HERE)}:(\d+)", said)]
    own = [*lines_of(thing), *(lines_of(changed) if kind == "source" else ())]
    assert any(line in own for line in named), said


# The loss that these give is that of FedAvg's own hook; the model's own line says nothing about it.
PLACELESS = [("model", ModelDetached), *(("task", t) for t in (task_none, TaskLossNone, TaskLossRows, TaskLossItem))]
PLACELESS += [("method", MethodTravelsText)]


def test_values_that_nobody_made_are_told():
    with pytest.raises(UserError, match="round 0: the server's direction or state has values that are not finite"):
        play(**sections_of("method", "MethodServerOverflow"))
    with pytest.raises(UserError, match=r"model .*: its initial weights hold values that are not finite"):
        play(**sections_of("model", "model_nan"))
    with pytest.raises(UserError, match="hook travels, round 0: 'head' is text"):
        play(**sections_of("method", "MethodTravelsText"))
    for name in ("model_half", "model_double"):
        with pytest.raises(UserError, match=r"fails on a batch of two samples .* torch.float32: .*dtype"):
            play(**sections_of("model", name))


def test_a_rule_for_some_groups_is_checked_there():
    """One number was spread over the group."""
    with pytest.raises(
        UserError, match=r"server.rule for the groups head returned \(1,\); it must return a tensor \(10,"
    ):
        play(server={"rule": {"name": f"{HERE}:rule_one", "groups": ["head"]}})


def test_samples_that_a_partition_forgets_are_counted():
    with pytest.warns(UserWarning, match="leaves 10 of 40 training samples with nobody"):
        play(**sections_of("partition", "part_forgets"))


def part_forgets(labels, clients, rng):
    return np.array_split(np.arange(30), clients)


# ---- a batch of one sample ----
def normed(input_shape, classes):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))


def test_a_batch_of_one_sample_is_found_before_round_0():
    model = {"model": {"name": f"{HERE}:normed"}}
    said = r"train.batch_size: 13 leaves client 0 with 14 samples a batch of one sample.*drop_last: true, or another"
    with pytest.raises(UserError, match=said):
        prepare_only(**model, train={"batch_size": 13})
    assert play(**model, train={"batch_size": 13, "drop_last": True}).reason == "finished"
    assert play(**model, train={"batch_size": 5}).reason == "finished"


def prepare_only(**sections):
    play(rounds=0, **sections)


@dataclass(frozen=True)
class OneSample(fedmpi.Method):
    def train(self, k):
        for x, y in k.batches():
            k.task_loss(k.logits(x[:1]), x[:1], y[:1])
        return State()


def test_a_batch_of_one_sample_later_is_no_defect():
    with pytest.raises(UserError, match=r"round 0, client 0: .*OneSample.train at .*a batch of one sample"):
        play(model={"name": f"{HERE}:normed"}, **sections_of("method", "OneSample"))


# ---- what works ----
class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.head = nn.Linear(3, classes)

    def forward(self, x):
        return self.head(self.b(self.a(x).relu()))


def lazy(input_shape, classes):
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(classes))


def cumulative(input_shape, classes):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, classes))


class Sub(torch.Tensor):
    pass


def source_subclass(root):
    return changed(train_x=table()[0].as_subclass(Sub), classes=np.int64(2))


def part_generator(labels, clients, rng):
    for part in np.array_split(np.arange(len(labels)), clients):
        yield part.tolist()


class TaskLooseNumbers(TaskBase):
    names = ("a", "b", "c", "d")

    def metrics(self, outputs, y):
        return {"a": torch.tensor(1.5), "b": np.float32(2), "c": True, "d": float("nan")}


@dataclass(frozen=True)
class Graphs(fedmpi.Method):
    """Every value comes with the graph that made it."""

    client_state = Slots(c=FLAT)
    server_state = Slots(d=FLAT)
    sends = Slots(dw=SHARED, e=FLAT)

    def receive(self, k):
        return graphed(k.received)

    def gradient(self, k, g):
        return graphed(g)

    def upload(self, k):
        return Row(dw=graphed(k.w - k.w0), e=graphed(k.w)), State(c=graphed(k.w))

    def weights(self, k):
        return graphed(k.received)

    def aggregate(self, s, up):
        return graphed(up.mean("dw")), State(d=graphed(up.mean("e")))


def graphed(x):
    return x.clone().requires_grad_() * 1.0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("model", "Tied"),
        ("model", "lazy"),
        ("model", "cumulative"),
        ("source", "source_subclass"),
        ("partition", "part_generator"),
        ("task", "TaskLooseNumbers"),
        ("method", "Graphs"),
    ],
)
def test_works(kind, name):
    one, two = (play(**sections_of(kind, name)) for _ in range(2))
    assert one.reason == "finished"
    assert one.w.isfinite().all()
    assert one.hashes == two.hashes  # whatever a model makes later is seeded, too
    json.dumps([plain(row) for row in one.rows], allow_nan=False)


def test_no_graph_is_kept_alive():
    """A row that keeps one keeps all activations of its round."""
    it, same = play(**sections_of("method", "Graphs")), play()
    assert torch.equal(it.w, same.w)
    rows = [*it.fed.states.rows.values(), it.fed.server.state_row, it.w, it.fed.exchange.message]
    assert not any(row.requires_grad or row.grad_fn is not None for row in rows)


def test_the_final_model_of_tied_weights_is_the_global_one():
    it = play(**sections_of("model", "Tied"))
    w = it.w + 1  # not what the module holds at the moment
    saved = it.made.model.state_dict(w, it.b)
    assert torch.equal(saved["a.weight"], saved["b.weight"])
    other = copy.deepcopy(it.made.net.module)
    other.load_state_dict(saved)
    first = next(s for s in it.made.model.layout.segments if s.name == "a.weight")
    assert torch.equal(other.b.weight, first.view(w))


def test_the_names_that_a_line_has_are_taken():
    from fedmpi.tasks import TAKEN

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        it = play(data={"source": f"{HERE}:good_source", "partition": {"scheme": "iid", "clients": 3}})
    own = {"accuracy", "auroc"}
    keys = {key for row in (*it.rows, *it.lines) for key in row if not key.startswith("personal_")}
    assert keys - own <= TAKEN
