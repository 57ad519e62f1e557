"""What environment.json says of the ranks' GPUs."""

import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers import fedmpi

from fedmpi.runtime.record import environment

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  gcc 11.4.0"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (dvs-builder@U16)  Tue Mar  5\n"
    "GCC version:"
)


@pytest.fixture
def card(monkeypatch):
    """A stand-in for one GPU, with a PyTorch for CUDA."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="4d2c-11"))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)


@pytest.mark.parametrize(("text", "driver"), [(CLOSED, "535.104.05"), (OPEN, "550.54.15")])
def test_of_a_gpu(card, monkeypatch, tmp_path, text, driver):
    monkeypatch.setattr(environment, "DRIVER", tmp_path / "version")
    (tmp_path / "version").write_text(text)
    versions = {"gpu": "4d2c-11", "driver": driver, "cudnn": "91002", "nccl": "2.27.5"}
    tf32 = {"matmul": False, "conv": True, "rnn": True}  # PyTorch's defaults
    assert environment.describe_gpu(torch.device("cuda", 0)) == {**versions, "tf32": tf32}


def test_what_is_not_known_is_left_out(card, monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert set(environment.describe_gpu(torch.device("cuda", 0))) == {"gpu", "tf32"}


def test_each_rank_has_its_own(monkeypatch, tmp_path):
    """A rank on a CPU has no such entries, not even empty ones."""
    config = {"name": "run", "rounds": 0, "output": str(tmp_path), "report": False}
    config |= {
        "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 2}},
        "model": {"name": "logistic"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**config, "method": {"name": "fedavg"}}))

    def ranks(name):
        done = fedmpi("run", tmp_path / "run.yaml", f"name={name}")
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / name / "environment.json").read_text())["ranks"]

    plain = ranks("plain")
    assert not {"driver", "cudnn", "nccl", "tf32"} & set(plain[0])
    found = {"gpu": "4d2c-11", "tf32": {"matmul": False}}
    monkeypatch.setattr(environment, "describe_gpu", lambda device: found)
    assert ranks("gpu") == [{**plain[0], **found}]
