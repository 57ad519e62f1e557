"""What rank 0 warns of before a run."""

import pytest
from helpers import small_settings

from fedmpi.runtime import run


@pytest.mark.parametrize(
    ("size", "trains", "warns"),
    [
        (2, False, True),
        (8, False, True),
        (9, False, False),
        (4, True, False),
    ],
)
def test_a_gpu_on_which_rank_0_trains_nobody(size, trains, warns):
    said = run.unused_gpu(small_settings("fedavg", "mlp", server={"trains": trains}), size)
    assert bool(said) == warns
    if warns:
        assert said.startswith(f"rank 0 occupies one of {size} GPUs, and trains nobody on it")
        assert "server.trains=true" in said
