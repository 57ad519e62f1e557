"""Augmented runs give the same models in one process, on three ranks, and after an interruption."""

import numpy as np
import pytest
from real_job import hashes, succeed

h5py = pytest.importorskip("h5py")

RUN = """\
rounds: 3
data:
  source: hdf5
  path: a.h5
  mean: [0.5]
  std: [0.25]
  augment:
    - random_crop: {padding: 2, padding_mode: reflect}
    - horizontal_flip
    - color_jitter: {brightness: 0.3}
    - cutout: 4
  partition: {scheme: iid, clients: 4}
model: {name: mlp, hidden: [8]}
method: {name: fedavg}
evaluate: {protocol: [global, "ft(1)"]}
"""


def test_ranks_and_interruptions_do_not_change_an_augmented_model(tmp_path):
    """Runs as users start them: in one process, on three ranks, and interrupted after a round."""
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = rng.integers(0, 256, (80, 12, 12), dtype=np.uint8)
        file["y"] = np.arange(80) % 3
    (tmp_path / "run.yaml").write_text(RUN)

    def models(name, *overrides, **start):
        words = (f"output={tmp_path}", f"data.root={tmp_path}", f"name={name}", *overrides)
        succeed("run", str(tmp_path / "run.yaml"), *words, **start)
        return hashes(tmp_path / name)

    alone = models("alone")
    assert models("three", kind="mpirun", size=3) == alone
    assert models("disk", "data.stream=true") == alone
    models("again", "rounds=1")
    assert models("again", "checkpoint.resume=must", "checkpoint.changes=accept")[-1] == alone[-1]
    assert models("other", "data.augment=[horizontal_flip]")[-1] != alone[-1]
