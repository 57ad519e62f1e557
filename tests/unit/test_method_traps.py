"""A method that its author got wrong says so when its class is made, or in a round with hook, client and round.

Every class here is written as a user would, in a file of its own.
"""

import textwrap

import numpy as np
import pytest
import torch
import yaml
from helpers import prepare

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


@pytest.mark.parametrize("pack", [1, 4])
def test_receive_returns_state_too(method, pack):
    """A number that counts rounds, made where the client receives; k.state stays that of the last round meanwhile."""
    body = """
        client_state = Slots(count=SCALAR, seen=SCALAR)

        def receive(self, k):
            return k.received, State(count=k.state.count + 1)

        def upload(self, k):
            return Row(), State(seen=k.state.count)
    """
    it = run(method(body, rounds=3, cohort={"fraction": 1.0}, compute={"pack": pack}))
    assert [(it.kept(k).count.item(), it.kept(k).seen.item()) for k in sorted(it.fed.states.rows)] == [(3, 2)] * 3


def test_a_method_that_reads_means_is_told_how_to_say_so(method):
    body = "def aggregate(self, s, up): return up.mean(), State()"
    with pytest.raises(
        UserError, match=r'of your own whose aggregate reads updates\.mean alone says so: means = \{"dw": \("p",\)\}'
    ):
        run(method(body, server={"reduce": "local"}))
