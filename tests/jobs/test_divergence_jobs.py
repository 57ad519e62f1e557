"""A run that diverges ends, on any number of ranks."""

import json

from helpers import fedmpi


def test_a_run_that_diverges_stops(tmp_path):
    done = fedmpi(
        "run", "configs/quickstart.yaml", "rounds=30", "train.lr=500", "faults={max_norm: null, on_divergence: stop}",
        f"output={tmp_path}", "method={name: fedavg}", "model={name: logistic}", "name=run", kind="mpirun", size=3,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    facts = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert facts["exit_reason"].startswith("diverged: training has diverged since round 0: loss is")
    assert facts["rounds"] == 4
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())[-1] == "000003.safetensors"
