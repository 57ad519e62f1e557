"""Models of transformers by name: class by task and data, weights of a folder, outputs, and messages."""

import json

import pytest
import torch
from helpers import run_experiment, settings

from fedmpi import models
from fedmpi.common import registry
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs
from fedmpi.common.registry import Selection
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.models.libraries import import_library
from fedmpi.models.net import FeaturesAndHead
from fedmpi.runtime import build, build_model
from fedmpi.runtime.record.metadata import resolve_settings

import_library("torchvision", "")  # before transformers, which needs it
transformers = pytest.importorskip("transformers")

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {"input_ids": (8,), "attention_mask": (8,)}


def make(name, input_shape, classes, task="classification", weights=None, **options):
    torch.manual_seed(0)
    construct = registry.make_component(models.KIND, Selection(name, options))
    return construct(input_shape, classes, task=task, weights=weights)


def texts(n=90, vocabulary=50):
    """Return texts of 3 to 8 tokens; the class is whether the first token is in the upper half of the vocabulary."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, (n, 8), generator=g)
    mask = (torch.arange(8) < torch.randint(3, 9, (n, 1), generator=g)).long()
    x, y = Inputs({"input_ids": ids * mask, "attention_mask": mask}), (ids[:, 0] > vocabulary // 2).long()
    return Dataset(x[: n - 30], y[: n - 30], x[n - 30 :], y[n - 30 :], 2)


def experiment(data=None, **model):
    s = settings("fedavg", model=model, rounds=1, train={"lr": 0.05})
    return build.make_experiment(s, split(data or texts(), "iid", 3, 0), torch.device("cpu"))


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the configuration and weights of a tiny BERT without head."""
    torch.manual_seed(5)
    config = transformers.BertConfig(vocab_size=50, **TINY)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_the_logits_are_those_of_the_library():
    module = make("hf:bert", TEXT, 3, vocab_size=50, **TINY).eval()
    x = dict(texts().train_x.items())
    assert type(module.model).__name__ == "BertForSequenceClassification"
    assert torch.equal(module(**x), module.model(**x).logits)
    names = {name for name, _ in module.named_parameters()}
    assert (
        module.head_names == {"model.classifier.weight", "model.classifier.bias"} == {n for n in names if "class" in n}
    )
    assert all(name.startswith(module.peft_prefix) for name in names)


@pytest.mark.parametrize("padding", [0, 7])
def test_padding_does_not_change_the_class_of_a_text(padding):
    """Llama classifies the last token that is not padding: the logits are those of the text without padding."""
    module = make("hf:llama", TEXT, 3, vocab_size=50, **TINY).eval()
    ids = torch.tensor([[5, 9, 3]])
    padded = torch.cat([ids, torch.full((1, 5), padding)], dim=1)
    mask = torch.tensor([[1] * 3 + [0] * 5])
    alone = module(input_ids=ids, attention_mask=torch.ones_like(ids))
    torch.testing.assert_close(module(input_ids=padded, attention_mask=mask), alone)
    assert module.head_names == {"model.score.weight"}
    net = FeaturesAndHead(module, TEXT, torch.int64)
    assert net.head_parameter_names() == {"model.score.weight"}  # although its output is not the model's


@pytest.mark.parametrize("task", ["next_symbol", "language_model"])
def test_a_language_model_has_one_output_per_symbol_and_position(task):
    module = make("hf:llama", (8,), 30, task, **TINY).eval()
    ids = torch.arange(16).view(2, 8)
    assert module(ids).shape == (2, 8, 30)
    assert module.num_embeddings == 30  # taken from the data
    larger = make("hf:llama", (8,), 30, task, vocab_size=40, **TINY).eval()
    assert torch.equal(larger(ids), larger.model(input_ids=ids).logits[..., :30])
    assert larger.head_names == set()
    later = ids.clone()
    later[:, 5:] = 1
    assert torch.equal(module(later)[:, :5], module(ids)[:, :5])  # no position sees later ones


def test_an_image_model_gets_channels_and_size_from_the_data():
    module = make("hf:vit", (1, 8, 8), 3, patch_size=4, **TINY).eval()
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    assert module.head_names == {"model.classifier.weight", "model.classifier.bias"}


def test_the_weights_of_a_folder_are_loaded_except_for_the_head(folder):
    it = experiment(name=f"hf:{folder}")
    trained = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).state_dict()
    loaded = it.net.module.model.bert.state_dict()
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], x) for name, x in trained.items())
    assert len(it.initial_lines) == 1
    assert "the head (model.classifier.bias, model.classifier.weight) starts with random values" in it.initial_lines[0]
    assert it.net.module.training
    assert list(it.pretrained.compute_digests()) == ["(model.name)"]
    random = experiment(name=f"hf:{folder}", pretrained=False)
    assert not torch.equal(
        random.net.module.model.bert.state_dict()["pooler.dense.weight"], trained["pooler.dense.weight"]
    )
    assert random.pretrained is None
    # A file with the same tensors, for a model that is named by its type.
    file = folder / "model.safetensors"
    same = experiment(name="hf:bert", vocab_size=50, pretrained=str(file), **TINY)
    assert torch.equal(same.model.w, it.model.w)


def test_weights_in_bf16_are_converted_to_float32(folder):
    model = transformers.BertModel.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    it = experiment(name=f"hf:{folder}")
    assert it.model.w.dtype == torch.float32
    own = it.net.module.model.bert.pooler.dense.weight
    assert torch.equal(own, model.pooler.dense.weight.float())


def test_the_settings_of_a_run_describe_the_model_without_its_folder(folder):
    s = settings("fedavg", model={"name": f"hf:{folder}"})
    resolved = resolve_settings(s)
    before = build_model.make_module(s, TEXT, 2, torch.int64)
    folder.rename(folder.with_name("moved"))
    after = build_model.make_module(resolved, TEXT, 2, torch.int64)
    assert {name: x.shape for name, x in before.state_dict().items()} == {
        name: x.shape for name, x in after.state_dict().items()
    }
    with pytest.raises(UserError, match=r"there is no folder .*bert, and no repository .* downloads no models"):
        build_model.make_module(s, TEXT, 2, torch.int64)


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "my_own"}, r"has the model type 'my_own', which .* install a newer version"),
        ({"quantization_config": {}}, r"describes quantized weights, which cannot be trained"),
        ({"hidden_size": 16, "pretrained": True}, r"does not fit the model: model\.bert\..* in the model, and"),
        ({"max_position_embeddings": 4}, r"texts have 8 tokens, but the model takes at most 4"),
    ],
)
def test_an_unsuitable_folder_is_one_message(changes, text, folder):
    change_config(folder, **{key: value for key, value in changes.items() if key != "pretrained"})
    with pytest.raises(UserError, match=text):
        experiment(name=f"hf:{folder}")


@pytest.mark.parametrize(
    ("name", "input_shape", "task", "options", "text"),
    [
        (
            "hf:bertt",
            TEXT,
            "classification",
            {},
            r"there is no folder .*bertt, and transformers has no such model .*; did you mean .*bert",
        ),
        ("hf:bert", TEXT, "classification", {"hidden_sise": 3}, r"unknown key; did you mean 'hidden_size'\?"),
        ("hf:bert", TEXT, "classification", {"hidden_size": "x"}, r"hidden_size: 'x' is not allowed; must be a whole"),
        ("hf:bert", TEXT, "classification", {**TINY, "num_attention_heads": 3}, r"cannot be made .* attention heads"),
        ("hf:vit", (8,), "next_symbol", {}, r"models of type vit cannot be used as a language model"),
        ("hf:llama", (1, 8, 8), "classification", {}, r"models of type llama cannot be used for images"),
        ("hf:llama", (8,), "next_symbol", {"vocab_size": 20, **TINY}, r"vocabulary of 20 tokens, but the data have 30"),
        ("hf:bert", {"ids": (8,)}, "classification", TINY, r"have the tensor 'ids', which the model does not take"),
    ],
)
def test_a_mistake_is_one_message(name, input_shape, task, options, text):
    with pytest.raises(UserError, match=text):
        make(name, input_shape, 30, task, **options)


@pytest.mark.parametrize("value", [50, -1])
def test_token_ids_that_the_model_does_not_know_are_one_message(value, folder):
    data = texts()
    data.train_x["input_ids"][3, 0] = value
    with pytest.raises(UserError, match=rf"knows the token ids 0 to 49, but the data contain {value}: they were made"):
        experiment(data, name=f"hf:{folder}")


def test_a_tiny_bert_learns(folder):
    s = settings("fedavg", model={"name": f"hf:{folder}"}, rounds=6, train={"optim": "adam", "lr": 0.003, "epochs": 5})
    rows = run_experiment(s, split(texts(300), "iid", 3, 0)).rows
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
