"""Frozen parameters: on every rank once, in no message; a head on a backbone, and LoRA, are models like any."""

import json
import shutil
import subprocess

import pytest
import torch
from helpers import BIN, NETS, NETS_OF, clean_env, launcher, play, settings, small_settings
from safetensors.torch import load_file
from torch import nn

import fedmpi
from fedmpi.common import registry
from fedmpi.common.errors import UserError
from fedmpi.methods import registry as methods
from fedmpi.models import KIND
from fedmpi.runtime import consistency

HERE = __file__


def on_backbone(input_shape, classes, width: int = 1000, inner: dict | None = None):
    """A linear layer that is frozen, with about 1000 weights a pixel, behind it a small network that is trained."""
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(input_shape).numel(), width), nn.Tanh())
    backbone.requires_grad_(False)
    if inner is None:
        return nn.Sequential(backbone, nn.Linear(width, classes))
    options = {k: v for k, v in inner.items() if k != "name"}
    made = registry.make(KIND, registry.Chosen(inner["name"], options))
    shape = (1, 8, 8)
    return nn.Sequential(backbone, nn.Unflatten(1, shape), *layers(made(shape, classes)))


def layers(module):
    return module if isinstance(module, nn.Sequential) else [module]


@pytest.mark.parametrize("method", sorted(methods))
def test_every_method_leaves_it_alone(method):
    inner = NETS_OF.get(method, NETS)["mlp"]
    model = {"name": f"{HERE}:on_backbone", "width": 64, "inner": inner}
    it = play(small_settings(method, rounds=2, model=model))
    frozen = it.made.model.frozen
    assert sum(p.numel() for p in frozen.values()) == 64 * 64 + 64
    fresh = play(small_settings(method, rounds=0, model=model)).made.model.frozen
    assert list(fresh) == list(frozen)
    assert all(torch.equal(p, fresh[name]) for name, p in frozen.items())
    assert not any("backbone" in s.name or s.stop - s.start == 4096 for s in it.made.model.layout.segments)
    assert it.made.model.w.numel() == it.made.model.layout.size < 4096 + 2000
    assert not torch.equal(it.w, it.w0) or method in ("local", "fedproto", "fedfomo")


def tall(input_shape, classes):
    """1.2 million frozen weights below 964 that are trained."""
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 4000), nn.ReLU(), nn.Linear(4000, 240), nn.ReLU())
    return nn.Sequential(backbone.requires_grad_(False), nn.Linear(240, classes))


def test_a_million_weights_below_a_thousand_that_travel():
    """Counted are the bytes that the server's communicator sends and receives in a round."""
    it = play(settings(rounds=2, model={"name": f"{HERE}:tall"}, cohort={"fraction": 0.5}))
    assert sum(p.numel() for p in it.made.model.frozen.values()) == 64 * 4000 + 4000 + 4000 * 240 + 240
    assert it.made.model.layout.size == 964
    members = len(it.rows[0]["cohort"])
    for row in it.rows:
        assert row["up_parameters"] == row["down_parameters"] == members * 964
        for bytes_ in (row["sent_bytes"], row["received_bytes"]):
            assert 0 < bytes_ <= (members + 1) * (4 * 964 + 64)  # beside them a word, a loss, a flag, seconds


class Lora(nn.Module):
    """W x + B A x: W is frozen, A and B of rank r are trained."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def lora(input_shape, classes, rank: int = 2):
    inputs = torch.Size(input_shape).numel()
    return nn.Sequential(nn.Flatten(), Lora(nn.Linear(inputs, 32), rank), nn.ReLU(), Lora(nn.Linear(32, classes), rank))


def test_lora_trains():
    it = play(settings(rounds=6, model={"name": f"{HERE}:lora"}, cohort={"fraction": 1.0}, train={"lr": 0.2}))
    assert it.made.model.layout.size == 2 * (64 + 32) + 2 * (32 + 4)
    assert it.rows[-1]["accuracy"] > it.rows[0]["accuracy"] + 10


def test_clients_are_trained_together_above_a_backbone():
    tree = {"rounds": 2, "model": {"name": f"{HERE}:lora"}}
    together, alone = (play(settings(compute={"pack": pack}, **tree)) for pack in (3, 1))
    torch.testing.assert_close(together.w, alone.w, rtol=1e-4, atol=1e-6)


def half(input_shape, classes):
    """A frozen layer of another type than what is trained."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4).requires_grad_(False).double(), ToFloat(), nn.Linear(4, classes))
    net.insert(1, ToDouble())
    return net


class ToFloat(nn.Module):
    def forward(self, x):
        return x.float()


class ToDouble(nn.Module):
    def forward(self, x):
        return x.double()


def test_it_may_be_of_another_type():
    it = play(settings(rounds=1, model={"name": f"{HERE}:half"}))
    assert it.made.model.w.dtype == torch.float32
    assert it.rows[-1]["train_loss"] > 0


def broken(input_shape, classes):
    net = on_backbone(input_shape, classes, 8)
    nn.init.constant_(net[0][1].weight, torch.nan)
    return net


def test_it_is_checked_too():
    with pytest.raises(UserError, match="its initial weights hold values that are not finite"):
        play(settings(model={"name": f"{HERE}:broken"}))


def all_frozen(input_shape, classes):
    return on_backbone(input_shape, classes, 8).requires_grad_(False)


def test_something_must_be_trained():
    with pytest.raises(UserError, match=r"must return a torch\.nn\.Module with trainable parameters"):
        play(settings(model={"name": f"{HERE}:all_frozen"}))


def test_the_digest_tells_names_shapes_types_and_values():
    x = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.0)}
    same = consistency.frozen(x)
    assert set(same) == {"(frozen parameters)"}
    assert consistency.frozen({k: v.clone() for k, v in x.items()}) == same
    assert consistency.frozen({}) == {}
    others = [
        {**x, "b": torch.tensor(1.0).nextafter(torch.tensor(2.0))},
        {**x, "a": x["a"].view(3, 2)},
        {"c": x["a"], "b": x["b"]},
        {**x, "b": torch.tensor(1.0, dtype=torch.bfloat16)},
        {"b": x["b"]},
    ]
    assert len({*same.values(), *(v for other in others for v in consistency.frozen(other).values())}) == 6


RUN = """\
rounds: 2
output: {folder}
name: frozen
data: {{source: digits, partition: {{scheme: iid, clients: 4}}}}
model: {{name: "model.py:net"}}
method: {{name: fedavg}}
checkpoint: {{every: 1}}
compute: {{threads: 1}}
"""
MODEL = """\
import os
import torch
from torch import nn

def net(input_shape, classes):
    backbone = nn.Linear(64, 50).requires_grad_(False)
    nn.init.constant_(backbone.weight, VALUE)
    return nn.Sequential(nn.Flatten(), backbone, nn.Linear(50, classes))
"""


def command(folder, *words, ranks=1):
    start = launcher("mpirun" if ranks > 1 else "alone", ranks)
    line = [*start, str(BIN / "fedmpi"), *words]
    return subprocess.run(line, env=clean_env(), cwd=folder, capture_output=True, text=True, timeout=120)


def write(folder, value="float(open('backbone.txt').read())"):
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    (folder / "model.py").write_text(MODEL.replace("VALUE", value))
    (folder / "backbone.txt").write_text("0.01")


def test_a_run_keeps_it_once_gives_it_back_and_knows_it_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    done = command(tmp_path, "run", "run.yaml")
    assert done.returncode == 0, done.stderr
    assert "510 parameters and 3,250 frozen ones" in done.stdout
    (run,) = tmp_path.glob("frozen*")
    tensors = load_file(run / "model.safetensors")
    assert sorted(tensors) == ["1.bias", "1.weight", "2.bias", "2.weight"]
    assert (tensors["1.weight"] == 0.01).all()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["up_parameters"] == 4 * 510
    checkpoints = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*") if path.is_file())
    assert checkpoints < 4 * 3250 * 2  # they hold what is trained alone
    module = fedmpi.load(run, trust=True)
    assert torch.equal(module.state_dict()["1.weight"], tensors["1.weight"])
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)

    done = command(tmp_path, "resume", str(run), "rounds=4")
    assert done.returncode == 0, done.stderr
    shutil.copy(run / "model.safetensors", tmp_path / "four.safetensors")
    (tmp_path / "backbone.txt").write_text("0.02")  # the model's own file is what it was
    done = command(tmp_path, "resume", str(run), "rounds=5")
    assert done.returncode == 2, done.stderr
    assert "frozen parameters changed" in done.stderr
    whole = tmp_path / "whole"
    whole.mkdir()
    write(whole)
    assert command(whole, "run", "run.yaml", "rounds=4").returncode == 0
    (other,) = whole.glob("frozen*")
    mine, theirs = load_file(tmp_path / "four.safetensors"), load_file(other / "model.safetensors")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_ranks_that_have_others_are_told(tmp_path):
    write(tmp_path, "float(os.environ['OMPI_COMM_WORLD_RANK'])")
    done = command(tmp_path, "run", "run.yaml", ranks=2)
    assert done.returncode == 2, done.stderr
    assert "rank 1 differs from rank 0 in (frozen parameters)" in done.stderr
    assert "Traceback" not in done.stderr
