"""What a plug-in may be and return beyond the plainest: it works, seeded, and keeps no graph."""

import copy
import json
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from plugin_play import GOOD, TaskBase, changed, play, sections_of, table
from torch import nn

import fedmpi
from fedmpi.common.jsonl import to_jsonable
from fedmpi.common.metrics_row import CLIENTS_KEYS, METRICS_KEYS
from fedmpi.method import FLAT, SHARED, Row, Slots, State


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
    ("kind", "thing"),
    [
        ("model", Tied),
        ("model", lazy),
        ("model", cumulative),
        ("source", source_subclass),
        ("partition", part_generator),
        ("task", TaskLooseNumbers),
        ("method", Graphs),
    ],
)
def test_works(kind, thing):
    one, two = (play(**sections_of(kind, thing)) for _ in range(2))
    assert one.reason == "finished"
    assert one.w.isfinite().all()
    assert one.hashes == two.hashes  # whatever a model makes later is seeded, too
    json.dumps([to_jsonable(row) for row in one.rows], allow_nan=False)


def test_no_graph_is_kept_alive():
    """A row that keeps one keeps all activations of its round."""
    it, same = play(**sections_of("method", Graphs)), play()
    assert torch.equal(it.w, same.w)
    rows = [*it.fed.states.rows.values(), it.fed.server.state_row, it.w, it.fed.transport.message]
    assert not any(row.requires_grad or row.grad_fn is not None for row in rows)


def test_the_final_model_of_tied_weights_is_the_global_one():
    it = play(**sections_of("model", Tied))
    w = it.w + 1  # not what the module holds at the moment
    saved = it.made.model.state_dict(w, it.b)
    assert torch.equal(saved["a.weight"], saved["b.weight"])
    other = copy.deepcopy(it.made.net.module)
    other.load_state_dict(saved)
    first = next(s for s in it.made.model.layout.segments if s.name == "a.weight")
    assert torch.equal(other.b.weight, first.view(w))


def test_rows_have_the_keys_that_are_listed_in_their_order_with_their_types():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        it = play(data={"source": GOOD, "partition": {"scheme": "iid", "clients": 3}})
    metrics = {"accuracy", "auroc"}
    types = {"integer": int, "number": float, "text": str, "list": list}
    for rows, keys in ((it.rows, METRICS_KEYS), (it.lines, CLIENTS_KEYS)):
        listed = {key.name: types[key.type] for key in keys}
        assert rows
        for row in rows:
            own = [name for name in row if name not in metrics and name != "loss" and not name.startswith("personal_")]
            assert own == [name for name in listed if name in own]
            assert all(type(row[name]) is listed[name] for name in own)
