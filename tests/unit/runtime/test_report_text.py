"""What a run says before and after training, and `fedmpi validate` instead of it: true, and all that one must know."""

import pytest
import torch
import yaml
from helpers import ROOT, fedmpi, images, play, prepare, settings, small_settings

from fedmpi.comm import detect
from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.runtime import launch, memory
from fedmpi.runtime.record import report_text

HERE = [{"host": "node1", "device": "cpu"}]


def told(made):
    return "\n".join(report_text.headlines(made, detect({}), "solo", HERE))


def test_classes_are_those_of_a_classification():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    real = split(Dataset(x[:30], x[:30, 0], x[30:], x[30:, 0], 1), "iid", 2, 0)
    said = told(prepare(settings(model={"name": "mlp"}, task={"name": "regression"}), real).made)
    assert "2 clients with 15 to 15 samples; one process" in said
    assert "class" not in said
    assert "2 clients with 85 to 85 samples, 4 classes; one process" in told(
        prepare(settings(), split(images(), "iid", 2, 0)).made
    )


def test_a_plug_in_is_called_by_its_file_and_not_its_path():
    name = f"{ROOT}/tests/helpers.py:norm_net"
    assert told(prepare(settings(model={"name": name})).made).startswith("run: fedavg on digits, helpers.py:norm_net ")


def test_of_nothing_there_is_no_share():
    """Local training sends nothing; a format may fill up to a whole word all the same."""
    it = play(small_settings("local", rounds=1))
    row = {"cohort": [0], "up_parameters": 2, "down_parameters": 2}
    assert report_text.sums([row], it.made.messages) == "clients sent 2 and received 2 parameters"


def test_formats_and_what_they_cost():
    """What travels how; bytes of a message are those of its format; who keeps and moves what is left out."""

    def said(method, ranks=1, placement="balanced", **wire):
        made = prepare(settings(method, "norm", comm={"wire": wire}, cohort={"placement": placement})).made
        return report_text.wire(made, ranks), report_text.traffic(made.messages, 1, made.itemsize), made

    text = memory.size_text
    nothing, before, made = said("fedavg")
    d = made.model.layout.size
    assert (nothing, before) == ([], f"a client sends {text(4 * (d + 15))} and receives {text(4 * (d + 13))} a round")
    keeps = f"what a format leaves out of an upload, {text(4 * d)}, a client keeps for its next"
    lines, after, _ = said("fedavg", up="bf16")
    assert lines == ["wire: up bf16 (dw)", keeps]
    assert after.startswith(f"a client sends {text(64 + -(-2 * d // 8) * 8)} and receives")
    lines, _, _ = said("fedpac", ranks=3, up={"name": "topk", "fraction": 0.1}, down="int8")
    assert lines[0] == "wire: up topk of 0.1 (dw; whole: head), down int8 of the difference to what was sent before"
    assert lines[1].endswith("keeps for its next, and moves it between ranks (cohort.placement: pinned does not)")
    assert said("fedavg", ranks=3, placement="pinned", up="int8")[0][1] == keeps
    assert said("fedavg", up={"name": "int8", "feedback": False}, down="fp16")[0] == [
        "wire: up int8 (dw), down fp16 of the model"
    ]


@pytest.fixture
def combined(tmp_path):
    """A config on top of a fragment that brings ten local epochs and a tenth of the clients."""
    path, fragment = tmp_path / "mine.yaml", tmp_path / "paper.yaml"
    fragment.write_text(
        "method: {name: fedatom, personal: true}\ncohort: {fraction: 0.1}\n"
        "train: {epochs: 10, batch_size: 10, lr: 0.01, momentum: 0.9}\n"
    )
    base = [str(ROOT / "configs" / "quickstart.yaml"), str(fragment)]
    path.write_text(
        yaml.safe_dump(
            {"base": base, "rounds": 4, "model": {"name": "mcmahan_cnn"}, "train": {"schedule": "step", "epochs": 1}}
        )
    )
    return path


def test_a_run_says_it_too(combined, tmp_path):
    done = fedmpi("run", combined, f"output={tmp_path}", "rounds=0", "train.warmup_rounds=2", "cohort.fraction=1")
    assert done.returncode == 0, done.stderr
    assert "0 rounds with 4 of 4 clients, 1 epoch in batches of 10; lr 0.01, step, 0.01 at last, after a" in done.stdout
    brought = "train.batch_size 10, train.lr 0.01, train.momentum 0.9"
    assert f"from {tmp_path}/paper.yaml: {brought}\n" in done.stdout


def test_a_torch_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wanted = settings(compute={"device": "cuda"})
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"this PyTorch \(.*\) was built without CUDA; install a wheel with it"):
        launch.pick_device(wanted, detect({}))
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    with pytest.raises(UserError, match="has no usable GPU"):
        launch.pick_device(wanted, detect({}))
