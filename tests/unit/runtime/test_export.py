"""Exported models give the model's outputs on real samples; otherwise there is an error and no file."""

from importlib.util import find_spec

import pytest
import torch
from helpers import fedmpi

import fedmpi as package
from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs, call_module
from fedmpi.common.target_scale import TargetScale
from fedmpi.runtime.execute import execute_run
from fedmpi.runtime.finished_runs import export
from fedmpi.runtime.finished_runs.models import RunModel

ONNX = all(find_spec(name) for name in export.ONNX_PACKAGES)
FORMATS = ["safetensors", *(["onnx"] if ONNX else [])]
PERSONAL_MODEL_HOOKS = """
import torch
from torch import nn
from fedmpi import Dataset
from fedmpi.common.inputs import Inputs

def drawn(root, kind: str = "pictures"):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(80) % 2
    x = torch.randn(80, 1, 8, 8, generator=g) + y.view(-1, 1, 1, 1)
    if kind != "pictures":
        ids = torch.randint(0, 9, (80, 5), generator=g)
        x = ids if kind == "text" else Inputs({"ids": ids, "mask": (ids > 2).float()})
    return Dataset(x[:60], y[:60], x[60:], y[60:], 2)

def norm(input_shape, classes):
    net = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout()]
    return nn.Sequential(*net, nn.Linear(108, classes))

def frozen(input_shape, classes):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, classes))
    net[1].weight.requires_grad_(False)
    return net

class Text(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.words, self.memory, self.head = nn.Embedding(9, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, classes)

    def forward(self, ids):
        return self.head(self.memory(self.words(ids))[0][:, -1])

class Masked(Text):
    def forward(self, mask, ids):
        z = self.words(ids) * mask[:, :, None]
        return self.head(self.memory(z)[0].sum(1) / mask.sum(1, keepdim=True).clamp(min=1))

class Mapped(Masked):
    def forward(self, inputs):
        return super().forward(inputs["mask"], inputs["ids"])

class Drawing(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        z = x.flatten(1)
        return self.head(z + torch.randn_like(z))

class Branching(Drawing):
    def forward(self, x):
        return self.head(x.flatten(1)) * (1.0 if len(x) > 1 else 3.0)
"""
CASES = {
    "statistics": ("norm", "pictures"),
    "frozen": ("frozen", "pictures"),
    "whole numbers": ("Text", "text"),
    "two tensors": ("Masked", "masked"),
    "a dictionary": ("Mapped", "masked"),
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    place = tmp_path_factory.mktemp("exported")
    (place / "own.py").write_text(PERSONAL_MODEL_HOOKS)

    def run(model, kind="pictures", method="fedavg", **more):
        name = f"{model}-{kind}-{method}{len(more)}"
        if not (place / name).exists():
            (place / "c.yaml").write_text(
                f"rounds: 1\noutput: {place}\nname: {name}\n"
                f"data: {{source: '{place}/own.py:drawn', kind: {kind}, partition: {{scheme: iid, clients: 2}}}}\n"
                f"model: {{name: '{place}/own.py:{model}'}}\nmethod: {{name: {method}}}\ntrain: {{momentum: 0.0}}\n"
            )
            execute_run(config.load(place / "c.yaml", [f"{key}={value}" for key, value in more.items()]))
        return place / name

    return run


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_the_file_gives_the_models_outputs(run_of, tmp_path, recwarn, case, to):
    """Other programs read the file, without warnings, and get the model's outputs for any batch size."""
    run, out, output = run_of(*CASES[case]), tmp_path / f"model.{to}", []
    assert export.export_model(RunModel(run, True), to, output.append, out) == out
    # A ResourceWarning is of objects that an earlier test left, and that are collected by chance now.
    assert [str(w.message) for w in recwarn if w.category is not ResourceWarning] == []
    assert ("on 20 test samples, in batches and one by one" in output[0]) == (to == "onnx")
    assert list(tmp_path.iterdir()) == [out]
    module, g = package.load(run, trust=True), torch.Generator().manual_seed(7)
    ids = torch.randint(0, 9, (7, 5), generator=g)
    parts = {"pictures": [torch.randn(7, 1, 8, 8, generator=g)], "text": [ids], "masked": [ids, (ids > 1).float()]}
    given = parts[CASES[case][1]]
    expected = call_module(module, given[0] if len(given) == 1 else Inputs({"ids": given[0], "mask": given[1]}))
    if to == "safetensors":
        from safetensors.torch import load_file

        results = load_file(out)
        assert results.keys() == module.state_dict().keys()
        assert all(torch.equal(results[name], value) for name, value in module.state_dict().items())
        return
    import onnxruntime

    session = onnxruntime.InferenceSession(str(out))
    names = [each.name for each in session.get_inputs()]
    assert sorted(names) == (["x"] if len(given) == 1 else ["ids", "mask"])
    by_name = {"x": given[0]} if len(given) == 1 else {"ids": given[0], "mask": given[1]}
    results = torch.from_numpy(session.run(None, {name: by_name[name].numpy() for name in names})[0])
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not ONNX, reason="needs fedmpi[export]")
@pytest.mark.parametrize("model", ["Drawing", "Branching"])
def test_defaults_that_yaml_cannot_represent_are_left_out(run_of, tmp_path, model):
    (out := tmp_path / "model.onnx").write_text("an earlier one")
    with pytest.raises(UserError, match=r"--format onnx: .*nothing was written"):
        export.export_model(RunModel(run_of(model), True), "onnx", print, out)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["an earlier one"]


def test_onnx_outputs_are_in_the_original_unit():
    scale = TargetScale((2.0,), (3.0,))
    assert export._ExportWrapper(torch.nn.Identity(), [""], scale)(torch.ones(4, 1)).tolist() == [[5.0]] * 4


@pytest.mark.parametrize(
    ("to", "out", "message"),
    [
        ("onnx", None, r"^--format onnx needs onnxruntime, .* not installed; run pip install 'fedmpi\[export\]'"),
        ("pickle", None, "--format: pickle is not allowed; must be safetensors or onnx"),
        ("safetensors", "file/model.safetensors", r"cannot write .*/file/model\.safetensors: "),
        ("safetensors", "config.yaml", r"--out: .*config\.yaml is not allowed .*must end in \.safetensors"),
    ],
)
def test_mistakes(run_of, tmp_path, monkeypatch, to, out, message):
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxruntime" else 1)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message):
        export.export_model(RunModel(run_of("norm"), True), to, print, out and tmp_path / out)


def test_the_command(run_of):
    result = fedmpi("export", run_of("norm"), "--trust")
    assert (result.returncode, result.stderr) == (0, "")
    assert "export/model.safetensors: " in result.stdout
    assert "names code that is not part of fedmpi" in fedmpi("export", run_of("norm")).stderr
