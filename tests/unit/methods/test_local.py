"""Local training (3.13): no weight and no buffer travels. test_own_models.py compares it with plain SGD."""

import pytest
import torch
from helpers import fedmpi, play, settings


def test_nothing_travels():
    """Rank 0 sends its command; clients send loss, seconds and the stop flag. The global model is the initial one."""
    it = play(settings("local", "norm"))
    messages = it.made.messages
    assert (messages.announcement().packing.size, messages.upload(0).packing.size) == (1, 3)
    assert torch.equal(it.w, it.w0)
    assert torch.equal(it.b, it.b0)
    assert it.rows[-1]["personal_loss"] != it.rows[0]["personal_loss"]


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_whole_run_in_which_nothing_travels(tmp_path, rounds):
    changes = ["method.name=local", f"rounds={rounds}", f"output={tmp_path}", "model={name: mlp}"]
    done = fedmpi("run", "configs/quickstart.yaml", *changes)
    assert done.returncode == 0, done.stderr
    assert "clients sent 0 and received 0 parameters\n" in done.stdout
