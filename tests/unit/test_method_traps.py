"""A method that its author got wrong says so when its class is made, or in a round with hook, client and round.

Every class here is written as a user would, in a file of its own.
"""

import textwrap

import numpy as np
import pytest
import torch
import yaml
from helpers import fedmpi, prepare

from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.runtime import build, build_data

HEAD = """
import torch
from dataclasses import dataclass
from typing import ClassVar
import fedmpi
from fedmpi.method import FLAT, SCALAR, SHARED, Row, Slot, Slots, State, Travel, option
"""


@pytest.fixture
def method(tmp_path):
    """method(class body) -> settings of a small run with it; method.line(text): where that text stands in the file."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(40, 3)).astype("float32"), y=rng.integers(2, size=40))

    def make(body, decorator="@dataclass(frozen=True)", more="", **changes):
        text = f"{HEAD}{textwrap.dedent(more)}\n{decorator}\nclass Mine(fedmpi.Method):\n"
        text += textwrap.indent(textwrap.dedent(body).strip() or "pass", "    ") + "\n"
        (tmp_path / "mine.py").write_text(text)
        tree = {
            "rounds": 2,
            "output": str(tmp_path / "runs"),
            "data": {
                "source": "npz",
                "path": "d.npz",
                "root": str(tmp_path),
                "partition": {"scheme": "iid", "clients": 3},
            },
            "model": {"name": "mlp", "hidden": [4]},
            "method": {"name": "mine.py:Mine"},
            "train": {"batch_size": 5, "lr": 0.1},
            **changes,
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
        return config.load(tmp_path / "run.yaml")

    def line(text):
        lines = (tmp_path / "mine.py").read_text().splitlines()
        return next(i for i, each in enumerate(lines, 1) if text in each)

    make.line, make.file, make.config = line, tmp_path / "mine.py", tmp_path / "run.yaml"
    return make


def run(settings):
    it = prepare(settings, build_data.partitioned(settings))
    it.reason = it.fed.run()
    return it


# ---- when the class is made ----
NOT_MEANT = {
    "a hook with a name almost right": ("def upolad(self, k): return Row(), State()", "did you mean 'upload'?"),
    "a declaration with a name almost right": ("client_sate = Slots(c=FLAT)", "did you mean 'client_state'?"),
    "a hook in the plural": ("def aggregates(self, s, up): return up.mean(), State()", "did you mean 'aggregate'?"),
    "a hook that takes other things": ("def loss(self, x, y): return 0", "hook loss takes (self, k, x, y)"),
    "a hook that is no function": ("gradient = 3", "'gradient' is a hook: a function, not 3"),
    "an annotated declaration": ("sends: Slots = Slots(dw=SHARED, c=FLAT)", "'sends' is a declaration, not an option"),
    "a slot that is none": ("client_state = Slots(c=5)", "slot 'c' is 5; it must be a Slot"),
    "neutral that is no option": ("mu: float = 1.0\nneutral = {'nu': 0.0}", "neutral names 'nu', which is no option"),
    **{
        f"a slot called {name}": (f"sends = Slots(dw=SHARED, {name}=FLAT)", f"a slot cannot be called {name!r}")
        for name in ("n", "p", "mean", "gram", "clients", "combine", "uniform", "items", "_w")
    },
}


@pytest.mark.parametrize("case", NOT_MEANT)
def test_what_cannot_be_meant_is_refused_when_the_class_is_made(method, case):
    body, message = NOT_MEANT[case]
    with pytest.raises(UserError) as caught:
        build.make_method(method(body))
    assert message in str(caught.value)
    assert str(method.file) in str(caught.value)  # with its line
    assert "mine.py:Mine" in str(caught.value)


@pytest.mark.parametrize("decorator", ["", "@dataclass"])
def test_a_method_without_its_decorator_is_refused(method, decorator):
    """Without it an option would be the class's default for ever."""
    with pytest.raises(UserError, match=r"write @dataclass\(frozen=True\) above the class"):
        build.make_method(method("mu: float = option(0.5, 'weight')", decorator=decorator))


def test_what_is_meant_is_taken(method):
    """Helpers of other names, private ones of any, ClassVars, options that resemble a hook, properties."""
    body = """
        share: float = option(1.0, 'an option')
        table: ClassVar[dict] = {}
        sends = Slots(dw=SHARED, note=SCALAR)

        def upload(self, k):
            return Row(note=self._losses() + self.helper), State()

        def _losses(self):
            return torch.zeros(())

        @property
        def helper(self):
            return 1
    """
    assert len(run(method(body)).rows) == 2


# ---- in the first round ----
NOT_DECLARED = {
    "an upload left out": (
        "sends = Slots(dw=SHARED, c=FLAT)",
        "round 0, client 0: method Mine, hook upload left out the declared slot 'c'",
    ),
    "an upload left out by one client": (
        """
        sends = Slots(dw=SHARED, c=SCALAR)
        def upload(self, k):
            return (Row() if k.id == 1 and k.round == 1 else Row(c=torch.ones(()))), State()
        """,
        "round 1, client 1: method Mine, hook upload left out the declared slot 'c'",
    ),
    "an upload not declared": (
        "def upload(self, k): return Row(extra=k.w), State()",
        "round 0, client 0: method Mine, hook upload returned slot 'extra', which is not declared; allowed: dw",
    ),
    "an upload of another shape": (
        "sends = Slots(dw=SHARED, c=SCALAR)\ndef upload(self, k): return Row(c=torch.ones(1)), State()",
        "round 0, client 0: method Mine, hook upload: slot 'c' is (), but it returned (1,)",
    ),
    "a number that would fill a vector": (
        "client_state = Slots(c=FLAT)\ndef train(self, k): return State(c=1.0)",
        "hook train: slot 'c' is (26,), but it returned float",
    ),
    "client state left out": (
        "client_state = Slots(c=FLAT)",
        "hook train, upload left out the declared slot 'c'; return k.state",
    ),
    "client state not declared": (
        "def train(self, k): return State(c=k.w)",
        "hook train returned slot 'c', which is not declared; allowed: none",
    ),
    "server state left out": (
        "server_state = Slots(c=FLAT)\ndef aggregate(self, s, up): return up.mean('dw'), State()",
        "round 0: method Mine, hook aggregate left out the declared slot 'c'; return s.state",
    ),
    "server state not declared": (
        "def aggregate(self, s, up): return up.mean('dw'), State(c=s.w)",
        "round 0: method Mine, hook aggregate returned slot 'c', which is not declared",
    ),
    "a download left out": (
        "per_client_download = Slots(c=SCALAR)",
        "round 0, client 0: method Mine, hook download left out the declared slot 'c'",
    ),
    "a download not declared": (
        "per_client_download = Slots(c=SCALAR)\ndef download(self, s, client): return Row(c=1.0, e=1.0)",
        "round 0, client 0: method Mine, hook download returned slot 'e', which is not declared",
    ),
    "train that returns nothing": (
        "def train(self, k): k.fit()",
        "round 0, client 0: method Mine, hook train returned NoneType; it must return Row(...) or State(...)",
    ),
    "upload that returns one thing": (
        "def upload(self, k): return Row()",
        "hook upload returned Row; it must return the pair Row(...), State(...)",
    ),
    "aggregate that returns one thing": (
        "def aggregate(self, s, up): return up.mean('dw')",
        "hook aggregate returned Tensor; it must return the pair direction, State(...)",
    ),
    "a direction of one element": (
        "def aggregate(self, s, up): return up.mean('dw')[:1], State()",
        "hook aggregate returned shape (1,); it must return a tensor (26,)",
    ),
    "a gradient of one element": (
        "def gradient(self, k, g): return g[:1]",
        "round 0, client 0: method Mine, hook gradient returned shape (1,)",
    ),
    "a gradient forgotten": ("def gradient(self, k, g): g.mul_(2)", "hook gradient returned NoneType"),
    "a step of one element": ("def step(self, k, x, y): return k.grad(x, y)[:1]", "hook step returned shape (1,)"),
    "a loss a sample": (
        "def loss(self, k, x, y): return k.logits(x).square().sum(1)",
        "round 0, client 0: method Mine, hook loss returned shape (5,); it must return a tensor ()",
    ),
    "a start of one element": ("def receive(self, k): return k.received[:1]", "hook receive returned shape (1,)"),
    "a group that is not there": (
        "def travels(self, t, rounds): return Travel(groups=('haed',))",
        "method Mine, hook travels, round 0: there is no layout group 'haed'; this model has body, head",
    ),
    "a slot to travel that is not declared": (
        "def travels(self, t, rounds): return Travel(slots=('dw', 'c'))",
        "method Mine, hook travels, round 0: sends declares no slot 'c'",
    ),
    "a group to train that is not there": (
        "trains = ('haed',)",
        "method Mine, trains: there is no layout group 'haed'",
    ),
    "groups to train as one text": ("trains = 'head'", "trains is the text 'head'; it must be a tuple of names"),
    "a state to receive that is not declared": ("receives = ('g',)", "receives names 'g', which server_state does not"),
    "state that is no Slots": ("client_state = dict(c=FLAT)", "client_state is dict; it must be Slots(...)"),
    "a need that is not known": ("needs = frozenset({'plain sgd'})", "needs holds 'plain sgd'; it takes PLAIN_SGD"),
    "a dimension that is not known": ("client_state = Slots(c=Slot(('q',)))", "slot dimension 'q' is not known"),
    "a figure with a name that is taken": (
        "def aggregate(self, s, up):\n    s.figures(loss=1.0)\n    return up.mean('dw'), State()",
        "hook aggregate: figures(loss=...) has the name of a figure that every round has",
    ),
}


@pytest.mark.parametrize("case", NOT_DECLARED)
def test_what_a_hook_returns_is_what_is_declared(method, case):
    body, message = NOT_DECLARED[case]
    with pytest.raises(UserError) as caught:
        run(method(body))
    assert message in str(caught.value)


def test_rows_hold_what_this_round_sent(method):
    """A slot that does not travel in a round is not there in it, and what it held before is not seen again."""
    body = """
        sends = Slots(dw=SHARED, note=SCALAR)

        def travels(self, t, rounds):
            return Travel(slots=("dw", "note") if t % 2 else ("dw",))

        def upload(self, k):
            return Row(note=torch.tensor(10.0 * k.round + k.id)), State()

        def aggregate(self, s, up):
            s.figures(note=up.note.sum() if s.round % 2 else -1.0)
            assert hasattr(up, "note") == bool(s.round % 2)
            return up.mean("dw"), State()
    """
    it = run(method(body, rounds=4))
    assert [row["note"] for row in it.rows] == [-1.0, 33.0, -1.0, 93.0]  # 3 clients: 3 x 10 t + (0 + 1 + 2)
    d = it.made.model.layout.size
    assert [row["up_parameters"] for row in it.rows] == [3 * d, 3 * d + 3, 3 * d, 3 * d + 3]


WRITES = {
    "to what was received": (
        "def train(self, k):\n    k.w0.add_(1)\n    return State()",
        "client 0",
        "k.w0 (k.received) or k.down",
    ),
    "to its state": (
        "client_state = Slots(c=FLAT)\ndef train(self, k):\n    k.state.c[0] = 1\n    return k.state",
        "client 0",
        "k.state",
    ),
    "to the global model": ("def aggregate(self, s, up): return s.w.mul_(0), State()", "round 0", "s.w"),
    "to the uploads": ("def aggregate(self, s, up): return up.dw.mul_(2).mean(0), State()", "round 0", "up"),
}


@pytest.mark.parametrize("case", WRITES)
def test_a_hook_that_writes_to_what_it_may_only_read_is_refused(method, case):
    """In one process all clients read the same message: the next one would start elsewhere."""
    body, who, name = WRITES[case]
    with pytest.raises(UserError, match="a hook of method Mine wrote to") as caught:
        run(method(body))
    assert who in str(caught.value)
    assert f"wrote to {name}, which" in str(caught.value)


def test_state_may_be_moved_from_slot_to_slot(method):
    """The values returned are views of the row that they go to; in which order they are named does not matter."""
    body = """
        client_state = Slots(last=FLAT, before=FLAT)

        def train(self, k):
            k.fit()
            return State(last=k.w, before=k.state.last)
    """
    it = run(method(body, rounds=3))
    states = [it.made.messages.client_state.views(row) for row in it.fed.states.rows.values()]
    assert len(states) == 3
    for state in states:
        assert state.before.any()
        assert not torch.equal(state.last, state.before)


def test_a_start_at_the_live_weights_does_not_move_with_them(method):
    """dw = w - w0 would be 0 for ever."""
    plain, aliased = run(method("")), run(method("def receive(self, k): return k.w"))
    assert torch.equal(plain.w, aliased.w)


# ---- whose line it was ----
FAILS = {
    "a hook": ("def loss(self, k, x, y):\n    return helper(k, x)", "Mine.loss", "boom"),
    "the server's hook": ("def aggregate(self, s, up):\n    return helper(s, up)", "Mine.aggregate", "boom"),
    "a wrong name in a hook": (
        "def upload(self, k):\n    return Row(c=k.nothing), State()",
        "Mine.upload",
        "k.n",
    ),
}
HELPER = "def helper(a, b):\n    boom = a.id + [][0] if hasattr(a, 'id') else [][0]\n"


@pytest.mark.parametrize("case", FAILS)
def test_an_error_in_a_users_hook_names_round_client_hook_and_line(method, case):
    body, where, text = FAILS[case]
    with pytest.raises(UserError) as caught:
        run(method(body, more=HELPER))
    said = str(caught.value)
    assert said.startswith("round 0, client 0: " if "server" not in case else "round 0: ")
    assert f"{where} at {method.file}:{method.line(text)}: " in said
    assert "IndexError: list index out of range" in said or "AttributeError" in said


def test_an_error_in_a_users_model_or_task_is_placed_too(method, tmp_path):
    more = """
    class Net(torch.nn.Module):
        def __init__(self, input_shape, classes):
            super().__init__()
            self.head = torch.nn.Linear(input_shape[0], classes)

        def forward(self, x):
            return self.head(x) if len(x) != 5 else self.head(x[:, :1])  # narrow

    class Task(fedmpi.Task):
        names = ("hits",)

        def loss(self, model, x, y):
            return torch.nn.functional.cross_entropy(model(x), y)

        def metrics(self, outputs, y):
            return {"hits": 1 / 0}  # zero
    """
    with pytest.raises(UserError) as caught:
        run(method("", more=more, model={"name": "mine.py:Net"}))
    assert f"round 0, client 0: Net.forward at {method.file}:{method.line('# narrow')}: RuntimeError" in str(
        caught.value
    )
    with pytest.raises(UserError) as caught:
        run(method("", more=more, task={"name": "mine.py:Task"}))
    assert f"Task.metrics at {method.file}:{method.line('# zero')}: ZeroDivisionError" in str(caught.value)
    assert str(caught.value).startswith("evaluation after round 0")


@pytest.mark.parametrize(("kind", "size"), [("alone", 1), ("mpirun", 3)])
def test_the_command_line_says_it_in_one_line(method, kind, size):
    """No traceback, exit code 2; under a launcher with the rank that trained the client."""
    method("def loss(self, k, x, y):\n    return helper(k, x) if k.round else super().loss(k, x, y)", more=HELPER)
    done = fedmpi("run", method.config, kind=kind, size=size, limit_s=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "defect" not in done.stderr
    said = [line for line in done.stderr.splitlines() if "Mine.loss at" in line]
    assert said
    assert all("round 1, client " in line and "IndexError" in line for line in said)
    if size > 1:
        assert all("[rank " in line for line in said)


# ---- what a server's slot starts at ----
DRAWN = """
    server_state = Slots(models=Slot((2, "d"), start="drawn"), last=FLAT)

    def drawn(self, shape, generator):
        return torch.randn(shape, generator=generator)

    def aggregate(self, s, up):
        return up.mean(), State(models=s.state.models, last=s.w)
"""


def test_a_server_slot_starts_at_what_a_hook_draws(method):
    """From the run's seed, once, and not anew in each round."""
    first, again, other = (run(method(DRAWN, seed=seed)).fed.server.state.models for seed in (1, 1, 2))
    assert first.shape[0] == 2
    assert first.std() > 0.5
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "client_state = Slots(c=Slot(('d',), start='drawn'))\ndef drawn(self, *_): return 0",
            "not an option that is a",
        ),
        ("server_state = Slots(c=Slot(('d',), start='drawm'))", "not an option that is a number, or a hook f(self, "),
        (
            "server_state = Slots(c=Slot((2,), start='drawn'))\ndef drawn(self, *_): return torch.ones(3)",
            "at the start: method Mine, hook drawn: slot 'c' is (2,), but it returned (3,)",
        ),
        (
            "server_state = Slots(c=Slot((2,), start='drawn'))\ndef drawn(self, *_): return torch.ones(2) / 0",
            "hook drawn gave values that are not finite",
        ),
    ],
)
def test_a_start_that_is_none_is_refused(method, body, said):
    with pytest.raises(UserError) as caught:
        run(method(body))
    assert said in str(caught.value)


# ---- nothing is lost, or goes on, without a word ----
@pytest.mark.parametrize(("slot", "value"), [("SCALAR", "1 / torch.tensor(k.id - 1.0)"), ("FLAT", "k.w / (k.id - 1)")])
def test_a_slot_of_an_upload_that_is_not_finite_ends_the_run(method, slot, value):
    """The server's direction may well not have it."""
    body = f"""
        sends = Slots(dw=SHARED, f={slot})

        def upload(self, k):
            return Row(f={value}), State()

        def aggregate(self, s, up):
            s.figures(f=up.f.mean())
            return up.mean(), State()
    """
    with pytest.raises(UserError, match=r"client 1: method Mine, hook upload gave values that are not finite .*'f'"):
        run(method(body))
    it = run(method(body, faults={"on_bad_update": "drop"}))
    assert [[each["client"] for each in row["refused"]] for row in it.rows] == [[1], [1]]


def test_a_slot_that_train_and_upload_return_is_refused(method):
    body = """
        client_state = Slots(count=SCALAR)

        def train(self, k):
            k.fit()
            return State(count=k.state.count + 1)

        def upload(self, k):
            return Row(), State(count=k.state.count + 10)
    """
    with pytest.raises(UserError, match="hook train, upload both returned the slot 'count'; one of them returns it"):
        run(method(body))


def test_a_method_that_reads_means_is_told_how_to_say_so(method):
    body = "def aggregate(self, s, up): return up.mean(), State()"
    with pytest.raises(
        UserError, match=r'of your own whose aggregate reads up\.mean alone says so: means = \{"dw": \("p",\)\}'
    ):
        run(method(body, server={"reduce": "local"}))
