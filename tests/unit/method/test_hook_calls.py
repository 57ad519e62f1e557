"""Hooks are called when docs/hooks.md says so, and see the rounds, states and types that it describes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers import small_settings

from fedmpi.method import FLAT, INITIAL, SCALAR, Method, Slot, Slots, SlotValues, State
from fedmpi.runtime import build, build_model
from fedmpi.runtime.execute import execute_run
from fedmpi.runtime.record.atomic_files import read_tensors


@dataclass(frozen=True)
class RecordingMethod(Method):
    """A method that records (hook, client, round, the state that it sees)."""

    seen: ClassVar[list] = []
    server_state = Slots(count=SCALAR, table=INITIAL.with_leading_dim("N"), last=Slot(("N",)))
    receives = ("count",)
    per_client_download = Slots(mine=SCALAR)
    client_state = Slots(rounds=SCALAR, at=FLAT)

    def _record(self, hook, client, t, *more):
        """Record the call of a hook, and check the types that it sees."""
        assert torch.is_grad_enabled(), hook
        self.seen.append((hook, client, t, *more))

    def download(self, s, client):
        self._record("download", client, s.round, s.state.count.item())
        return SlotValues(mine=s.state.count + 100 * client)

    def initial_weights(self, k):
        self._record("initial_weights", k.id, k.round, k.downloads.count.item(), k.downloads.mine.item())
        return k.received

    def upload(self, k):
        assert not k.w.requires_grad
        return SlotValues(), State(rounds=k.state.rounds + 1, at=k.w)

    def aggregate(self, s, up):
        self._record("aggregate", None, s.round, s.state.count.item())
        leaf = s.state.last.clone().requires_grad_()
        (grad,) = torch.autograd.grad(leaf.sum() * 3, leaf)
        assert not any(x.requires_grad for x in (s.w, s.state.last, up.dw))
        return up.mean(), State(count=s.state.count + 1, table=s.state.table, last=leaf + grad)

    def personal_weights(self, k):
        self._record(
            "personal_weights", k.id, k.round, k.downloads.count.item(), k.downloads.mine.item(), k.state.rounds.item()
        )
        assert k.w0 is k.received
        return k.received


@pytest.fixture
def run_method(tmp_path, monkeypatch):
    """Return a function (method class, **changes) -> run directory of two rounds with two of three clients."""
    monkeypatch.chdir(tmp_path)
    g = np.random.default_rng(0)
    y = np.arange(60) % 4
    np.savez(tmp_path / "a.npz", x=g.normal(size=(60, 1, 8, 8)), y=y, test_x=g.normal(size=(8, 1, 8, 8)), test_y=y[:8])

    def run(method, double=False, **changes):
        module = build_model.make_module
        if double:
            monkeypatch.setattr(build_model, "make_module", lambda *a, **k: DoublePrecision(module(*a, **k)))
        monkeypatch.setattr(build, "make_method", lambda *_: method())
        data = {"source": "npz", "path": "a.npz", "root": str(tmp_path), "client_test": "global"}
        more = {"rounds": 2, "output": str(tmp_path), "name": "it", "cohort": {"fraction": 0.67}, **changes}
        more = {"evaluate": {"protocol": ["global", "personal"]}, **more}
        execute_run(
            small_settings("fedavg", "mlp", data={**data, "partition": {"scheme": "iid", "clients": 3}}, **more)
        )
        return tmp_path / more["name"]

    return run


class DoublePrecision(torch.nn.Module):
    """A model in float64."""

    def __init__(self, module):
        super().__init__()
        self.module = module.double()

    def forward(self, x):
        return self.module(x.double())


def test_each_hook_sees_the_documented_round_and_state(run_method):
    RecordingMethod.seen.clear()
    run_method(RecordingMethod)
    rounds = [[each for each in RecordingMethod.seen if each[2] == t] for t in (0, 1)]
    for t, seen in enumerate(rounds):
        cohort = [k for hook, k, *_ in seen if hook == "initial_weights"]
        assert len(cohort) == 2
        before, after = float(t), t + 1.0
        expected = [("download", k, t, before) for k in cohort]
        expected += [("initial_weights", k, t, before, before + 100 * k) for k in cohort]
        expected += [("aggregate", None, t, before)]
        expected += [("download", k, t, after) for k in range(3)]
        assert seen[: len(expected)] == expected
        assert [each[:5] for each in seen[len(expected) :]] == [
            ("personal_weights", k, t, after, after + 100 * k) for k in range(3)
        ]
    assert sum(each[5] for each in rounds[1][-3:]) == 4  # client state of after the round: two rounds of two clients


@pytest.mark.parametrize(("double", "kind"), [(False, torch.float32), (True, torch.float64)])
def test_a_checkpoint_holds_flat_state_in_declaration_order_and_the_models_dtype(run_method, double, kind):
    folder = run_method(RecordingMethod, double)
    tensors, _ = read_tensors(folder / "checkpoints" / "000001.safetensors")
    d, state = len(tensors["w"]), tensors["state"]
    assert state.dtype is tensors["w"].dtype is kind
    assert state.shape == (1 + 3 * d + 3,)
    assert state[0] == 2
    assert torch.equal(state[1 : 1 + d], state[1 + d : 1 + 2 * d])
    assert state[-3:].tolist() == [6, 6, 6]
    named = RecordingMethod.server_state.to_packing({"d": d, "N": 3}).views(state)
    assert torch.equal(named.table, state[1 : 1 + 3 * d].view(3, d))
    rows = [read_tensors(path)[0]["row"] for path in (folder / "state").iterdir()]
    assert {len(row) for row in rows} == {1 + d}
    assert all(row[0] in (1, 2) for row in rows)
