"""A run that starts from given weights, on any ranks, and is resumed without the file."""

import torch
import yaml
from helpers import fedmpi
from real_job import rows, succeed
from safetensors.torch import save_file

CONFIG = {
    "rounds": 3,
    "data": {"source": "digits", "partition": {"scheme": "dirichlet", "clients": 5, "alpha": 0.5}},
    "model": {"name": "logistic"},
    "method": {"name": "fedper"},
    "cohort": {"fraction": 0.4},
    "evaluate": {"protocol": ["personal"]},
}


def test_a_command_on_any_ranks_and_gone_on_with_without_the_file(tmp_path):
    """Clients that train for the first time after that start from the given weights, too."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "output": str(tmp_path)}))

    def hashes(name):
        return [(row["sha256"], row["personal_loss"]) for row in rows(tmp_path / name)]

    succeed("run", tmp_path / "run.yaml", "name=first", "rounds=1", "seed=4")
    first = tmp_path / "first"
    said = succeed("run", tmp_path / "run.yaml", "name=alone", f"init.from={first}").stdout
    assert "2 of 2 tensors of the model start from" in said
    succeed("run", tmp_path / "run.yaml", "name=ranks", f"init.from={first}", kind="mpirun", size=3)
    succeed("run", tmp_path / "run.yaml", "name=cut", f"init.from={first}", "rounds=1")
    (first / "model.safetensors").unlink()
    succeed("resume", tmp_path / "cut", "rounds=3")
    assert hashes("alone") == hashes("ranks") == hashes("cut")
    other = tmp_path / "other.safetensors"
    save_file({"head.bias": torch.zeros(10)}, other)
    done = fedmpi("run", tmp_path / "run.yaml", "name=cut", f"init.from={other}", "checkpoint.resume=auto")
    assert done.returncode == 2
    assert "initial weights changed" in done.stderr
