"""compute.gradient_checkpointing: the same bits with fewer stored activations."""

import pytest
import torch
from helpers import federated, prepare, settings, small_settings
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedmpi.common.errors import UserError
from fedmpi.common.torchvision_compat import torchvision  # noqa: F401 - before timm and transformers
from fedmpi.models.gradient_checkpointing import enable_gradient_checkpointing
from fedmpi.models.net import FeaturesAndHead


class Blocks(nn.Module):
    """A user's network whose blocks have batch normalisation and dropout, for images (1, 8, 8)."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2)) for c in (1, 6)
        )
        self.head, self.checkpoints = nn.Linear(6 * 64, classes), False

    def set_grad_checkpointing(self, enable=True):
        self.checkpoints = enable

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x.flatten(1))


class Wrapped(nn.Sequential):
    """A network in which only a part offers the switch."""

    def __init__(self, input_shape, classes):
        super().__init__(nn.Identity(), Blocks(input_shape, classes))


class Cumulative(Blocks):
    """Blocks with batch statistics that are means over all batches, which depend on an integer buffer."""

    def __init__(self, input_shape, classes):
        super().__init__(input_shape, classes)
        for block in self.blocks:
            block[1].momentum = None


class Plain(Blocks):
    """Blocks without buffers and random numbers."""

    def __init__(self, input_shape, classes):
        super().__init__(input_shape, classes)
        self.blocks = nn.ModuleList(block[0] for block in self.blocks)


class Refusing(Blocks):
    def set_grad_checkpointing(self, enable=True):
        assert not enable, "gradient checkpointing is not supported"


def run(method, net, on, **changes):
    options = {"options": {"variant": "exact"}} if method == "perfedavg" else {}
    config = small_settings(
        method,
        rounds=2,
        model={"name": f"{__file__}:{net}"},
        compute={"gradient_checkpointing": on},
        **options,
        **changes,
    )
    it = prepare(config, federated())
    it.fed.run()
    return it


@pytest.mark.parametrize("net", ["Blocks", "Wrapped", "Cumulative"])
@pytest.mark.parametrize("method", ["fedavg", "apfl", "fedsol", "moon", "perfedavg"])
def test_runs_have_the_same_bits(method, net):
    """Also batch statistics, which the second forward pass must not change, and the masks of dropout."""
    plain, saving = (run(method, net, on) for on in (False, True))
    assert plain.hashes == saving.hashes
    assert torch.equal(plain.b, saving.b)
    assert not torch.equal(plain.b, plain.b0)
    for k, row in plain.fed.states.rows.items():
        assert torch.equal(row, saving.fed.states.rows[k])


def test_it_can_be_combined_with_accumulation():
    plain, saving = (run("fedavg", "Blocks", on, train={"accumulate": 2, "drop_last": True}) for on in (False, True))
    assert plain.hashes == saving.hashes


def bert(transformers):
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64
        )
    )


def llama(transformers):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=64,
            attention_dropout=0.1,
            use_cache=False,  # the cache changes the last bits
        )
    )


def image_transformer(transformers):
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.1,
        )
    )


def adapted(make):
    """Return a function that adds adapters of rank 2; all other weights are frozen."""

    def with_adapters(transformers):
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(make(transformers), peft.LoraConfig(r=2, target_modules="all-linear"))

    return with_adapters


class Logits(nn.Module):
    """Returns the logits of a model of transformers."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


def gradients_and_bytes(module, x):
    """Return all gradients after one pass in training, and the bytes of the tensors that autograd stored for it."""
    stored, torch_seed = {}, 3

    def record(tensor):
        stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    torch.manual_seed(torch_seed)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss = module.train()(x).square().mean()
    loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    return gradients, sum(tensor.untyped_storage().nbytes() for tensor in stored.values())


def assert_same_gradients_with_fewer_bytes(make, x):
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        module = make()
        if on:
            enable_gradient_checkpointing(module, "tiny")
        results.append(gradients_and_bytes(module, x))
    (plain, most), (saving, least) = results
    assert any(g is not None for g in plain)
    assert all(torch.equal(a, b) if a is not None else b is None for a, b in zip(plain, saving, strict=True))
    assert 2 * least < most


@pytest.mark.filterwarnings("error:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("make", [bert, llama, image_transformer, adapted(bert), adapted(llama)])
def test_models_of_transformers(make):
    """With frozen weights the inputs of the first blocks need no gradient."""
    transformers = pytest.importorskip("transformers")
    is_text = make is not image_transformer
    x = torch.randint(50, (4, 10)) if is_text else torch.randn(4, 3, 32, 32)
    assert_same_gradients_with_fewer_bytes(lambda: Logits(make(transformers)), x)


@pytest.mark.parametrize("name", ["resnet10t", "test_vit", "test_convnext"])
def test_models_of_timm(name):
    timm = pytest.importorskip("timm")
    options = {"drop_path_rate": 0.1} if name != "resnet10t" else {}
    x = torch.randn(2, 3, 160, 160)
    assert_same_gradients_with_fewer_bytes(lambda: timm.create_model(name, num_classes=3, **options), x)


def test_fewer_activation_bytes_per_sample():
    net = Blocks((1, 8, 8), 4)
    before = FeaturesAndHead(net, (1, 8, 8)).activation_bytes()
    enable_gradient_checkpointing(net, "blocks")
    assert FeaturesAndHead(net, (1, 8, 8)).activation_bytes() < before / 2


# ---- messages ----
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {},
            r"gradient_checkpointing: true is not possible with model mlp: it offers none\. Models of transformers and",
        ),
        (
            {"model": {"name": f"{__file__}:Refusing"}},
            r"Refusing: gradient checkpointing is not supported\. .*\(Refusing at .*_checkpointing\.py:\d+\)",
        ),
        (
            {"model": {"name": f"{__file__}:Plain"}, "compute": {"clients_per_pass": 3}},
            r"clients_per_pass: 3 is not possible: .* because compute\.gradient_checkpointing is true",
        ),
    ],
)
def test_models_without_checkpointing_are_refused(changes, message):
    compute = {"gradient_checkpointing": True, **changes.get("compute", {})}
    with pytest.raises(UserError, match=message):
        prepare(settings(**{**changes, "compute": compute}))


def test_captured_passes_are_refused():
    with pytest.raises(ValueError, match=r"gradient_checkpointing: true has no effect, because .*graphs is true"):
        settings(compute={"gradient_checkpointing": True, "graphs": True})
