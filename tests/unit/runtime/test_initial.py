"""Initial weights from a file (init.from): matching tensors are loaded, and all others are listed."""

import re

import pytest
import torch
from helpers import norm_net, prepare, run_experiment, settings
from safetensors.torch import load_file, save_file

from fedmpi.common.errors import UserError
from fedmpi.runtime.record.saved_model import load_initial_weights


@pytest.fixture
def file(tmp_path):
    """Return random weights with the shapes of norm_net."""
    torch.manual_seed(5)
    save_file(norm_net((1, 8, 8), 4).state_dict(), tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def changed(file, **tensors):
    state = {name: x.clone() for name, x in load_file(file).items()}
    for name, x in tensors.items():
        state.pop(name.replace("_", "."), None)
        if x is not None:
            state[name.replace("_", ".")] = x
    save_file(state, file)
    return file


def test_all_tensors_are_loaded_including_buffers(file):
    it = prepare(settings("fedavg", "norm", init={"from": str(file)}))
    state = it.experiment.model.state_dict(it.fed.server.w, it.fed.server.b)
    assert all(torch.equal(state[name], x) for name, x in load_file(file).items())
    assert it.experiment.initial.lines == [f"9 of 9 tensors of the model are loaded from {file}"]
    assert torch.equal(it.w0, it.fed.server.w)


def test_tensors_that_do_not_match_keep_their_random_values(file):
    changed(file, **{"6_weight": torch.zeros(3, 5), "6_bias": None, "old_head": torch.zeros(2)})
    plain = prepare(settings("fedavg", "norm"))
    it = prepare(settings("fedavg", "norm", init={"from": str(file)}))
    state, before = (x.experiment.model.state_dict(x.fed.server.w, x.fed.server.b) for x in (it, plain))
    assert torch.equal(state["6.weight"], before["6.weight"])
    assert torch.equal(state["6.bias"], before["6.bias"])
    assert torch.equal(state["0.weight"], load_file(file)["0.weight"])
    assert it.experiment.initial.lines == [
        f"7 of 9 tensors of the model are loaded from {file}",
        "with another shape or type: 6.weight (4, 96), in the file torch.float32 (3, 5)",
        "only in the file: old.head",
        "with random initial values: 6.weight, 6.bias",
    ]
    with pytest.raises(UserError, match=r"init\.strict: .* differ; with another shape or type: 6\.weight"):
        prepare(settings("fedavg", "norm", init={"from": str(file), "strict": True}))


@pytest.mark.parametrize(
    ("harm", "output"),
    [
        (lambda f: f.unlink(), r"x\.safetensors cannot be read .*No such file"),
        (lambda f: f.write_bytes(b"PK not this"), r"x\.safetensors cannot be read"),
        (
            lambda f: save_file({"a": torch.zeros(2)}, f),
            r"no tensor in .* matches; only in the file: a; with random",
        ),
        (
            lambda f: changed(f, **{"0_bias": torch.full((6,), torch.nan)}),
            r"x\.safetensors: 0\.bias .* not finite",
        ),
    ],
)
def test_unsuitable_files_are_errors(file, harm, output):
    harm(file)
    with pytest.raises(UserError, match=output):
        prepare(settings("fedavg", "norm", init={"from": str(file)}))
    with pytest.raises(UserError, match=re.escape(f"init.from: {file.parent}/model.safetensors cannot be read")):
        load_initial_weights(torch.nn.Linear(1, 1), file.parent, False)


def test_a_run_started_from_its_end_has_the_figures_of_its_end(tmp_path, file):
    for method in ("fedavg", "fednova", "fedatom"):
        it = run_experiment(settings(method, "cnn", rounds=2))
        state = it.experiment.model.state_dict(it.w, it.b)
        save_file({name: x.clone(memory_format=torch.contiguous_format) for name, x in state.items()}, file)
        again = run_experiment(settings(method, "cnn", rounds=0, init={"from": str(file), "strict": True}))
        names = ("loss", "accuracy", "sha256")
        assert [again.rows[-1][n] for n in names] == [it.rows[-1][n] for n in names]
