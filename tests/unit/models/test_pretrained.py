"""Trained weights from local files (model.pretrained): which tensors are loaded, digests, and messages."""

import hashlib
import json
from importlib.metadata import version

import pytest
import torch
from helpers import NETS, norm_net, prepare, settings
from safetensors.torch import save_file

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.models import pretrained
from fedmpi.models.libraries import import_library
from fedmpi.runtime.rank_agreement import compute_code_digests, compute_model_digests

HEAD = ["6.weight", "6.bias"]


@pytest.fixture
def state():
    """Return random weights of norm_net for three classes; the experiments have four."""
    torch.manual_seed(5)
    return {name: x.clone() for name, x in norm_net((1, 8, 8), 3).state_dict().items()}


def with_weights(path):
    """Return the state of a model whose weights come from a file, that of a random one, and the experiment."""
    it = prepare(settings("fedavg", "norm", model={**NETS["norm"], "pretrained": str(path)}))
    plain = prepare(settings("fedavg", "norm"))
    return *(x.experiment.model.state_dict(x.fed.server.w, x.fed.server.b) for x in (it, plain)), it.experiment


def check(loaded, random, state):
    """Check that the body is the one in the file, and that the head is random."""
    for name in loaded:
        expected = random[name] if name in HEAD else state[name]
        assert torch.equal(loaded[name], expected), name


def write_safetensors(state, folder):
    save_file(state, folder / "w.safetensors")
    return folder / "w.safetensors"


def write_pickle(state, folder):
    torch.save(state, folder / "w.pth")
    return folder / "w.pth"


def write_checkpoint(state, folder):
    """Write a checkpoint of a training program: the state under a key, with names of DataParallel."""
    content = {"epoch": 3, "state_dict": {f"module.{name}": x for name, x in state.items()}}
    torch.save(content, folder / "w.pt")
    return folder / "w.pt"


def write_folder(state, folder):
    save_file(state, folder / "model.safetensors")
    return folder


def write_shards(state, folder):
    names = list(state)
    parts = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("write", [write_safetensors, write_pickle, write_checkpoint, write_folder, write_shards])
def test_the_body_is_loaded_and_the_head_for_other_classes_stays_random(write, state, tmp_path):
    path = write(state, tmp_path)
    loaded, random, experiment = with_weights(path)
    check(loaded, random, state)
    assert experiment.initial_lines == [
        f"7 of 9 tensors of the model are loaded from {path}; the head (6.weight, 6.bias) starts with random values"
    ]


def test_a_head_for_the_same_classes_is_loaded_too(tmp_path):
    torch.manual_seed(5)
    path = write_safetensors(norm_net((1, 8, 8), 4).state_dict(), tmp_path)
    assert with_weights(path)[2].initial_lines == [f"9 of 9 tensors of the model are loaded from {path}"]


def test_tensors_of_the_body_that_the_file_lacks_are_listed(state, tmp_path):
    state["other"] = state.pop("1.weight")
    path = write_safetensors(state, tmp_path)
    assert with_weights(path)[2].initial_lines == [
        f"6 of 9 tensors of the model are loaded from {path}",
        "with another shape or type: 6.weight (4, 96), in the file torch.float32 (3, 96), 6.bias (4,), in the file "
        "torch.float32 (3,)",
        "only in the file: other",
        "with random initial values: 1.weight, 6.weight, 6.bias",
    ]


def test_the_digest_is_the_sha256_of_the_file(state, tmp_path):
    path = write_safetensors(state, tmp_path)
    experiment = with_weights(path)[2]
    digests = compute_model_digests(experiment.model, experiment.initial, experiment.pretrained)
    assert digests["(model.pretrained)"] == hashlib.sha256(path.read_bytes()).hexdigest()
    shards = tmp_path / "shards"
    shards.mkdir()
    before = pretrained.find_weights("model.pretrained", write_shards(state, shards)).compute_digests()
    state["6.bias"] += 1
    after = pretrained.find_weights("model.pretrained", write_shards(state, shards)).compute_digests()
    assert before != after


def test_a_finished_run_does_not_need_the_file(tmp_path):
    torch.manual_seed(5)
    trained = {"head.weight": torch.randn(10, 64), "head.bias": torch.randn(10)}
    save_file(trained, tmp_path / "w.safetensors")
    (tmp_path / "run.yaml").write_text(
        f"name: run\noutput: {tmp_path}\nrounds: 0\nreport: false\n"
        "data: {source: digits, partition: {scheme: iid, clients: 2}}\n"
        f"model: {{name: logistic, pretrained: {tmp_path}/w.safetensors}}\nmethod: {{name: fedavg}}\n"
    )
    fedmpi.run(tmp_path / "run.yaml")
    (tmp_path / "w.safetensors").unlink()
    state = fedmpi.load(tmp_path / "run").state_dict()
    assert state.keys() == trained.keys()
    assert all(torch.equal(state[name], x) for name, x in trained.items())


def test_the_version_of_the_library_of_a_model_is_compared():
    assert compute_code_digests("logistic").keys() == {"(code of fedmpi)", "(torch version)"}
    digests = compute_code_digests("torchvision:resnet18")
    assert digests["(torchvision version)"] == hashlib.sha256(version("torchvision").encode()).hexdigest()[:12]


def wrong_channels(state, folder):
    state["0.weight"] = torch.zeros(6, 3, 3, 3)
    return write_safetensors(state, folder)


def wrong_body(state, folder):
    state["0.weight"] = torch.zeros(6, 1, 5, 5)
    return write_safetensors(state, folder)


def other_model(state, folder):
    return write_safetensors({"a": torch.zeros(2)}, folder)


def not_finite(state, folder):
    state["0.bias"][0] = torch.nan
    return write_safetensors(state, folder)


def objects(state, folder):
    torch.save(norm_net((1, 8, 8), 3), folder / "w.pth")
    return folder / "w.pth"


def no_tensors(state, folder):
    torch.save([1, 2], folder / "w.pth")
    return folder / "w.pth"


def another_format(state, folder):
    (folder / "w.pth").write_text("hospital,text,label\n")
    return folder / "w.pth"


def damaged(state, folder):
    write_safetensors(state, folder).write_bytes(b"x" * 100)
    return folder / "w.safetensors"


def lost_shard(state, folder):
    (write_shards(state, folder) / "model-2.safetensors").unlink()
    return folder


def bad_index(state, folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (
            wrong_channels,
            r"0\.weight has the shape .* images with 3 channels, but the data have 1; set data\.channels=3",
        ),
        (
            wrong_body,
            r"does not fit the model: 0\.weight has the shape \(6, 1, 3, 3\) in the model, and \(6, 1, 5, 5\)",
        ),
        (other_model, r"no tensor in .* matches; only in the file: a"),
        (not_finite, r"0\.bias contains values that are not finite"),
        (objects, r"w\.pth cannot be read \(it does not contain tensors alone\)"),
        (no_tensors, r"w\.pth cannot be read \(it contains no tensors by name\)"),
        (another_format, r"w\.pth cannot be read \(it is in another format\)"),
        (damaged, r"w\.safetensors cannot be read"),
        (lost_shard, r"lacks model-2\.safetensors, which its index names"),
        (bad_index, r"index\.json is damaged"),
        (
            lambda state, folder: folder / "none.safetensors",
            r"none\.safetensors does not exist .*does not download weights",
        ),
        (lambda state, folder: folder, r"contains no weights; must be a file .* or a folder with model\.safetensors"),
    ],
)
def test_unsuitable_files_are_one_message(write, text, state, tmp_path):
    with pytest.raises(UserError, match=text):
        with_weights(write(state, tmp_path))


def test_a_model_of_timm_gets_the_weights_of_its_own_state_dict(tmp_path):
    import_library("torchvision", "")  # before timm
    timm = pytest.importorskip("timm")
    torch.manual_seed(5)
    trained = timm.create_model("test_resnet", in_chans=1, num_classes=1000).state_dict()
    save_file(trained, tmp_path / "model.safetensors")
    model = {"name": "timm:test_resnet", "pretrained": str(tmp_path)}
    it = prepare(settings("fedavg", model=model))
    loaded = it.experiment.model.state_dict(it.fed.server.w, it.fed.server.b)
    head = {name for name in loaded if name.startswith("fc.")}
    assert head
    assert all(torch.equal(loaded[name], trained[name]) for name in loaded if name not in head)
    assert it.experiment.initial_lines[0].endswith("the head (fc.weight, fc.bias) starts with random values")
