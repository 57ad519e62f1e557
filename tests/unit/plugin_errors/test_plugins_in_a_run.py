"""What a user's own code may be and return beyond the plainest, and mistakes that only show in the course of a run."""

import copy
import inspect
import json
import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from plugin_play import GOOD, TaskBase, changed, run_plugins, sections_of, table
from torch import nn

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.common.jsonl import to_jsonable
from fedmpi.common.metrics_row import CLIENTS_KEYS, METRICS_KEYS
from fedmpi.method import FLAT, SCALAR, SHARED, SharedParts, Slot, Slots, SlotValues, State, option

DATA = {"source": GOOD, "partition": {"scheme": "iid", "clients": 3}}


def run(method, **changes):
    return run_plugins(**sections_of("method", method), **changes)


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

    def initial_weights(self, k):
        return graphed(k.received)

    def correct_gradient(self, k, g):
        return graphed(g)

    def upload(self, k):
        return SlotValues(dw=graphed(k.w - k.w0), e=graphed(k.w)), State(c=graphed(k.w))

    def personal_weights(self, k):
        return graphed(k.received)

    def aggregate(self, s, up):
        return graphed(up.mean("dw")), State(d=graphed(up.mean("e")))


def graphed(x):
    return x.clone().requires_grad_() * 1.0


@dataclass(frozen=True)
class Helpers(fedmpi.Method):
    """Helpers of other names, private ones of any, ClassVars, options that resemble a hook, properties."""

    share: float = option(1.0, "an option")
    table: ClassVar[dict] = {}
    sends = Slots(dw=SHARED, note=SCALAR)

    def upload(self, k):
        return SlotValues(note=self._losses() + self.helper), State()

    def _losses(self):
        return torch.zeros(())

    @property
    def helper(self):
        return 1


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
        ("method", Helpers),
    ],
)
def test_works(kind, thing):
    one, two = (run_plugins(**sections_of(kind, thing)) for _ in range(2))
    assert one.reason == "finished"
    assert one.w.isfinite().all()
    assert one.hashes == two.hashes  # whatever a model makes later is seeded, too
    json.dumps([to_jsonable(row) for row in one.rows], allow_nan=False)


def test_no_graph_is_kept_alive():
    """A row that keeps one keeps all activations of its round."""
    it, same = run(Graphs), run_plugins()
    assert torch.equal(it.w, same.w)
    rows = [*it.fed.states.rows.values(), it.fed.server.state_row, it.w, it.fed.transport.broadcast_row]
    assert not any(row.requires_grad or row.grad_fn is not None for row in rows)


def test_the_final_model_of_tied_weights_is_the_global_one():
    it = run_plugins(**sections_of("model", Tied))
    w = it.w + 1  # not what the module holds at the moment
    saved = it.experiment.model.state_dict(w, it.b)
    assert torch.equal(saved["a.weight"], saved["b.weight"])
    other = copy.deepcopy(it.experiment.net.module)
    other.load_state_dict(saved)
    first = next(s for s in it.experiment.model.layout.segments if s.name == "a.weight")
    assert torch.equal(other.b.weight, first.view(w))


def test_rows_have_the_keys_that_are_listed_in_their_order_with_their_types():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        it = run_plugins(data=DATA)
    metrics = {"accuracy", "auroc"}
    types = {"integer": int, "number": float, "text": str, "list": list}
    for rows, keys in ((it.rows, METRICS_KEYS), (it.lines, CLIENTS_KEYS)):
        listed = {key.name: types[key.type] for key in keys}
        assert rows
        for row in rows:
            own = [name for name in row if name not in metrics and name != "loss" and not name.startswith("personal_")]
            assert own == [name for name in listed if name in own]
            assert all(type(row[name]) is listed[name] for name in own)


# ---- slots ----
@dataclass(frozen=True)
class OddRounds(fedmpi.Method):
    sends = Slots(dw=SHARED, note=SCALAR)

    def shared_parts(self, t, rounds):
        return SharedParts(slots=("dw", "note") if t % 2 else ("dw",))

    def upload(self, k):
        return SlotValues(note=torch.tensor(10.0 * k.round + k.id)), State()

    def aggregate(self, s, up):
        s.log_metrics(note=up.note.sum() if s.round % 2 else -1.0)
        assert hasattr(up, "note") == bool(s.round % 2)
        return up.mean("dw"), State()


def test_rows_hold_what_this_round_sent():
    """A slot that does not travel in a round is not there in it, and what it held before is not seen again."""
    it = run(OddRounds, rounds=4)
    assert [row["note"] for row in it.rows] == [-1.0, 33.0, -1.0, 93.0]  # 3 clients: 3 x 10 t + (0 + 1 + 2)
    d = it.experiment.model.layout.size
    assert [row["up_parameters"] for row in it.rows] == [3 * d, 3 * d + 3, 3 * d, 3 * d + 3]


@dataclass(frozen=True)
class Moving(fedmpi.Method):
    client_state = Slots(last=FLAT, before=FLAT)

    def train(self, k):
        k.fit()
        return State(last=k.w, before=k.state.last)


def test_state_may_be_moved_from_slot_to_slot():
    """The values returned are views of the row that they go to; in which order they are named does not matter."""
    it = run(Moving, rounds=3)
    for k in range(3):
        assert it.client_state(k).before.any()
        assert not torch.equal(it.client_state(k).last, it.client_state(k).before)


@dataclass(frozen=True)
class Aliased(fedmpi.Method):
    def initial_weights(self, k):
        return k.w


def test_a_start_at_the_live_weights_does_not_move_with_them():
    """dw = w - w0 would be 0 for ever."""
    assert torch.equal(run_plugins().w, run(Aliased).w)


@dataclass(frozen=True)
class Drawn(fedmpi.Method):
    server_state = Slots(models=Slot((2, "d"), start="drawn"), last=FLAT)

    def drawn(self, shape, generator):
        return torch.randn(shape, generator=generator)

    def aggregate(self, s, up):
        return up.mean(), State(models=s.state.models, last=s.w)


def test_a_server_slot_starts_at_what_a_hook_draws():
    """From the run's seed, once, and not anew in each round."""
    first, again, other = (run(Drawn, seed=seed).fed.server.state.models for seed in (1, 1, 2))
    assert first.shape[0] == 2
    assert first.std() > 0.5
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# ---- whose line it was ----
def helper(k):
    return [][k.id]


@dataclass(frozen=True)
class FailsAtClients(fedmpi.Method):
    def loss(self, k, x, y):
        return helper(k)


@dataclass(frozen=True)
class FailsAtTheServer(fedmpi.Method):
    def aggregate(self, s, up):
        return [][0]


@dataclass(frozen=True)
class WrongName(fedmpi.Method):
    def upload(self, k):
        return SlotValues(c=k.nothing), State()


@pytest.mark.parametrize(
    ("method", "hook", "code", "place", "error"),
    [
        (FailsAtClients, "loss", helper, "round 0, client 0: ", "IndexError: list index out of range"),
        (FailsAtTheServer, "aggregate", FailsAtTheServer.aggregate, "round 0: ", "IndexError: list index out of range"),
        (WrongName, "upload", WrongName.upload, "round 0, client 0: ", "AttributeError"),
    ],
)
def test_an_error_in_a_users_hook_names_round_client_hook_and_line(method, hook, code, place, error):
    with pytest.raises(UserError) as caught:
        run(method)
    text, line = str(caught.value), inspect.getsourcelines(code)[1] + 1
    assert text.startswith(place)
    assert f"{method.__name__}.{hook} at {__file__}:{line}: " in text
    assert error in text


# ---- mistakes that show later ----
class Undecorated(fedmpi.Method):
    mu: float = option(0.5, "weight")


@pytest.mark.parametrize("method", [Undecorated, dataclass(type("Unfrozen", (Undecorated,), {}))])
def test_a_method_without_its_decorator_is_refused(method):
    """Without it an option would be the class's default for ever."""
    with pytest.raises(TypeError, match=r"write @dataclass\(frozen=True\) above the class"):
        method()


@dataclass(frozen=True)
class Infinite(fedmpi.Method):
    sends = Slots(dw=SHARED, f=SCALAR)

    def upload(self, k):
        return SlotValues(f=1 / torch.tensor(k.id - 1.0)), State()

    def aggregate(self, s, up):
        s.log_metrics(f=up.f.mean())
        return up.mean(), State()


def test_a_slot_of_an_upload_that_is_not_finite_ends_the_run():
    """The server's direction may well not have it."""
    text = r"client 1: method Infinite, hook upload returned values that are not finite .*'f'"
    with pytest.raises(UserError, match=text):
        run(Infinite)
    it = run(Infinite, faults={"on_bad_update": "drop"})
    assert [[each["client"] for each in row["refused"]] for row in it.rows] == [[1], [1]]


@dataclass(frozen=True)
class ReadsMeans(fedmpi.Method):
    def aggregate(self, s, up):
        return up.mean(), State()


def test_a_method_that_reads_means_is_told_how_to_say_so():
    text = (
        r'of your own whose aggregate only uses updates\.mean can declare it with mean_only_slots = \{"dw": \("p",\)\}'
    )
    with pytest.raises(UserError, match=text):
        run(ReadsMeans, server={"reduce": "local"})


def normed(input_shape, classes):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))


@dataclass(frozen=True)
class OneSample(fedmpi.Method):
    def train(self, k):
        for x, y in k.batches():
            k.task_loss(k.logits(x[:1]), x[:1], y[:1])
        return State()


def test_batch_normalisation_needs_two_samples_in_a_batch():
    """The message has client and remedy, and the line of a hook of one's own."""
    model = {"model": {"name": f"{__file__}:normed"}}
    text = r"round 0, client 0: batch normalisation cannot be applied to .* one sample.*drop_last: true, another"
    with pytest.raises(UserError, match=text):
        run_plugins(**model, train={"batch_size": 13})
    assert run_plugins(**model, train={"batch_size": 13, "drop_last": True}).reason == "finished"
    with pytest.raises(UserError, match=r"round 0, client 0: .*OneSample.train at .*a batch of one sample"):
        run(OneSample, **model)
