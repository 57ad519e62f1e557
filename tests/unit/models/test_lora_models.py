"""Adapters in a model (model.lora): what is trained and saved, and that PEFT reads the files of a run."""

import importlib.util
import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedmpi as package
from fedmpi import config
from fedmpi.common import torchvision_compat  # noqa: F401  (before peft imports torchvision)
from fedmpi.common.errors import UserError
from fedmpi.models.lora import LoraConfig, add_adapters
from fedmpi.runtime import build_model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="pip install 'fedmpi[lora]'")

CONFIG = """
name: adapted
rounds: 2
data: {source: digits, partition: {scheme: iid, clients: 3}}
model: {name: mlp, hidden: [30, 20], lora: {r: 3, alpha: 6}}
method: {name: fedavg}
train: {batch_size: 100, lr: 0.1}
"""


def options(**changes):
    values = {"r": 2, "alpha": 4.0, "targets": None, "rslora": False, "dropout": 0.0, "head": True}
    return LoraConfig(**(values | {"base_precision": "fp32"} | changes))


def small():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def trained_names(module):
    return {name.replace(".default", "") for name, p in module.named_parameters() if p.requires_grad}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that trains with these overrides, and returns the run directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)

    def train(*overrides):
        package.run("run.yaml", overrides)
        return tmp_path / "runs" / "adapted"

    return train


def test_adapters_do_not_change_the_outputs_at_first_and_only_they_and_the_head_are_trained():
    module, x = small(), torch.randn(7, 6)
    before = module(x)
    adapted = add_adapters(module, options(), (6,), torch.float32)
    torch.testing.assert_close(adapted(x), before, rtol=0, atol=0)
    adapters = {f"{layer}.lora_{part}.weight" for layer in (0, 2) for part in "AB"}
    assert trained_names(adapted) == adapters | {"4.weight", "4.bias"}
    assert trained_names(add_adapters(small(), options(head=False), (6,), torch.float32)) == adapters
    assert trained_names(add_adapters(small(), options(targets=("2",), freeze_a=True), (6,), torch.float32)) == {
        *("2.lora_B.weight", "4.weight", "4.bias")
    }


@pytest.mark.parametrize(("rslora", "scale"), [(False, 6 / 4), (True, 6 / 2)])
def test_the_scale_is_applied_once(rslora, scale):
    module, x = small(), torch.randn(7, 6)
    adapted = add_adapters(module, options(r=4, alpha=6.0, targets=("0",), rslora=rslora), (6,), torch.float32)
    layer = adapted[0]
    nn.init.normal_(layer.lora_B["default"].weight)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    w, bias = layer.base_layer.weight, layer.base_layer.bias
    torch.testing.assert_close(layer(x), x @ (w + scale * b @ a).T + bias)


def test_a_base_in_bfloat16_computes_with_rounded_weights_and_the_type_of_the_others():
    module, x = small(), torch.randn(7, 6)
    rounded = [layer.weight.detach().to(torch.bfloat16) for layer in module if isinstance(layer, nn.Linear)]
    adapted = add_adapters(module, options(base_precision="bf16"), (6,), torch.float32)
    assert adapted[0].base_layer.weight.dtype == torch.bfloat16
    assert torch.equal(adapted[0].base_layer.weight, rounded[0])
    assert adapted[4].weight.dtype == torch.float32  # the head is trained
    assert adapted(x).dtype == torch.float32
    adapted(x).sum().backward()
    assert adapted[0].lora_B["default"].weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ("fc",)}, r"model\.lora\.targets: layer 'fc' does not exist; .* the nearest are 0, 2, 4"),
        ({"targets": ("Head",)}, r"layer 'Head' does not exist; .* the nearest are 0, 2, 4"),
        ({"targets": ("1",)}, r"model\.lora\.targets: layer '1' is a ReLU; must be the name"),
        ({"targets": ("4",)}, r"model\.lora\.targets: '4' is the head, which is trained itself; remove it"),
        ({"r": 5}, r"model\.lora\.r: 5 is larger than layer 2 with a weight of \(4, 5\); must be at most 4"),
    ],
    ids=["no such layer", "no similar layer", "no weights", "head", "rank"],
)
def test_a_wrong_option_is_one_message(changes, message):
    with pytest.raises(UserError, match=message):
        add_adapters(small(), options(**changes), (6,), torch.float32)


def test_a_model_without_linear_layers_needs_the_names_of_layers():
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(UserError, match=r"targets: null stands for all linear layers .* name the layers: 0, 2"):
        add_adapters(module, options(), (1, 4, 4), torch.float32)
    assert "0.lora_A.weight" in trained_names(add_adapters(module, options(targets=("0",)), (1, 4, 4), torch.float32))


@pytest.mark.parametrize(
    ("option", "message"),
    [({"groups": 2}, "groups=2"), ({"dilation": 2}, r"dilation=\(2, 2\)"), ({"padding_mode": "reflect"}, "'reflect'")],
    ids=["groups", "dilation", "padding"],
)
def test_convolutions_that_peft_cannot_adapt_are_refused(option, message):
    module = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, **option), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    module.append(nn.Linear(4, 2))
    with pytest.raises(UserError, match=rf"model\.lora\.targets: the convolution 0 has .*{message}.*; remove it"):
        add_adapters(module, options(targets=("0",)), (2, 6, 6), torch.float32)


class Encoder(nn.Module):
    """A transformer encoder of torch, whose fused kernels read weights without calling their layers."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def test_adapters_of_a_transformer_encoder_work_in_evaluation():
    module, x = add_adapters(Encoder(), options(), (5, 8), torch.float32), torch.randn(4, 5, 8)
    adapted = {name.split(".lora_B")[0] for name in trained_names(module) if ".lora_B" in name}
    assert adapted == {f"encoder.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}  # and not out_proj
    for name in adapted:
        torch.nn.init.normal_(module.get_submodule(name).lora_B["default"].weight)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), module.train()(x))


def test_layers_that_are_never_called_are_refused():
    with pytest.raises(
        UserError, match=r"model\.lora\.targets: layer encoder\.layers\.0\.\S+ is never called, .*; remove"
    ):
        add_adapters(Encoder(), options(targets=("linear1", "out_proj")), (5, 8), torch.float32)


class Tied(nn.Module):
    """A language model whose head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding(x)).mean(1))


def test_tied_weights_are_refused():
    with pytest.raises(UserError, match=r"the weight of embedding is shared with head\.weight \(tied weights\)"):
        add_adapters(Tied(), options(targets=("embedding",), head=False), (4,), torch.int64)
    with pytest.raises(UserError, match=r"model\.lora\.head: true trains the head, but its weight .* is shared with"):
        add_adapters(Tied(), options(targets=("body",)), (4,), torch.int64)
    for targets in (("body",), None):
        assert trained_names(add_adapters(Tied(), options(targets=targets, head=False), (4,), torch.int64)) == {
            *("body.lora_A.weight", "body.lora_B.weight")
        }


def test_the_head_of_a_language_model_is_only_trained_on_request(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    for task, head, expected in (
        ("classification", None, True),
        ("language_model", None, False),
        ("language_model", True, True),
    ):
        overrides = [f"task.name={task}", f"model.lora.head={'null' if head is None else 'true'}"]
        settings = config.load(path, overrides)
        assert build_model.make_lora_config(settings).head is expected


def test_an_adapter_of_the_head_is_possible_if_the_head_is_not_trained():
    names = trained_names(add_adapters(small(), options(targets=("4",), head=False), (6,), torch.float32))
    assert names == {"4.lora_A.weight", "4.lora_B.weight"}


def test_a_target_that_contains_layers_is_answered_with_their_names():
    module = nn.Sequential()
    module.block, module.out = nn.Sequential(nn.ReLU(), nn.Linear(6, 5)), nn.Linear(5, 3)
    with pytest.raises(UserError, match=r"layer 'block' is a Sequential; .* the nearest are 1$"):
        add_adapters(module, options(targets=("block",)), (6,), torch.float32)


@pytest.mark.parametrize("rule", ["separate", "freeze_a", "exact", "svd", "stack"])
def test_peft_and_fedmpi_load_the_model_of_a_run(run, rule):
    from peft import PeftModel

    folder = run(f"server.lora={rule}")
    saved = load_file(folder / "model.safetensors")
    base_names = [name for name in saved if "base_layer" in name]
    assert bool(base_names) == (rule in ("exact", "stack"))  # the only rules that change the base
    loaded, x = package.load(folder), torch.rand(5, 1, 8, 8)
    plain = config.load(folder / "config.yaml", ["model.lora=null", "server.lora=separate"])
    base = build_model.make_module(plain, (1, 8, 8), 10).eval()
    with torch.no_grad():
        expected, before = loaded(x), base(x)
        by_peft = PeftModel.from_pretrained(base, folder / "adapter").eval()(x)
    torch.testing.assert_close(by_peft, expected, rtol=1e-4, atol=1e-5)
    assert (expected - before).abs().max() > 0.01


@pytest.mark.parametrize(
    "given",
    ["model={name: mcmahan_cnn, lora: {r: 2, targets: ['3']}}", "method.name=fedsr"],
    ids=["weights in channels_last order", "layers that a method renames"],
)
def test_changed_base_weights_are_saved(run, given):
    folder = run("server.lora=exact", given)
    layers = {name for name in load_file(folder / "model.safetensors") if name.endswith("base_layer.weight")}
    resumed = load_file(folder / "checkpoints" / "000001.safetensors")
    assert {name for name in resumed if name.startswith("base ")} == {
        f"base {name.removesuffix('.base_layer.weight')}" for name in layers
    }
    written = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert len([name for name in written if name.endswith("lora_A.weight")]) == len(layers) > 0
    expected, client = package.load(folder).state_dict(), package.load(folder, client=0).state_dict()
    assert all(torch.equal(client[name], expected[name]) for name in layers)


def test_a_run_without_its_base_model_is_not_loaded(run):
    folder = run()
    text = (folder / "identity.json").read_text()
    (folder / "identity.json").write_text(re.sub(r'("\(frozen parameters\)": ")\w+', r"\g<1>0000", text))
    with pytest.raises(UserError, match=r"contains adapters only, and the base model made here differs"):
        package.load(folder)


def test_the_cost_of_exact_aggregation_is_printed_before_the_run(run, capsys):
    run("server.lora=exact")
    # layers (64, 30) and (30, 20), three clients with rank 3: factors of (64 + 30) 9 and (30 + 20) 9 = 450 numbers
    line = r"changes the base weights of 2 layers by a matrix of rank at most 9 per round: 5\.1 KiB of each broadcast"
    assert re.search(line, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("overrides", "measured"),
    [
        ("server.lora=separate", True),
        ("server.lora=separate;;server.rule=median", True),
        ("server.lora=separate;;server.optim=adam", False),
        ("server.lora=separate;;server.lr=0.5", False),
        ("server.lora=freeze_a", True),
        ("server.lora=freeze_a;;server.rule=median", False),
        ("server.lora=freeze_a;;server.optim=momentum", False),
    ],
)
def test_the_distance_is_recorded_only_where_it_is_right(run, overrides, measured):
    lines = (run(*overrides.split(";;")) / "metrics.jsonl").read_text().splitlines()
    assert all(("lora_distance" in line) == measured for line in lines)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("server.lora=svd;;train.persist_optimizer=true", r"train\.persist_optimizer: true is not possible with"),
        ("model.lora=null;;server.lora=svd", r"server\.lora: svd averages the adapters of model\.lora, .* not set"),
        ("server.lora=svd;;server.lr=0.5", r"server\.lr: 0\.5 is not possible with server\.lora: svd"),
        ("server.lora=exact;;method.name=scaffold", r"server\.lora: exact needs a method that averages updates"),
        ("server.lora=svd;;method.name=lg_fedavg", r"keeps \S*lora_A\S* with the clients; set server\.lora: separate"),
        ("server.lora=stack;;model.lora.base_precision=bf16", r"base_precision: bf16 is not possible with .*: stack"),
        ("server.lora=stack;;method.name=ditto", r"stack changes the base .* ditto keeps .*\(client_state: v\)"),
        (
            "model={name: mcmahan_cnn, lora: {targets: ['3']}};;method.name=fedatom",
            r"fedatom is not possible with model\.lora",
        ),
        ("server.reduce=local", r"server\.reduce: local .*, but server\.lora uses individual uploads"),
        ("model.lora.r=0", r"model\.lora\.r: 0 is not allowed; must be a whole number from 1 to 100,000"),
    ],
)
def test_settings_that_contradict_each_other_are_one_message(run, overrides, message):
    with pytest.raises(UserError, match=message):
        run(*overrides.split(";;"))
