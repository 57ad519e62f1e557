"""Secure aggregation in jobs of several ranks: the bits of the plain run, drop-outs, lost ranks, and keys of sites."""

import subprocess

import numpy as np
import pytest
import yaml
from helpers import fedmpi, launcher, warm_env, write_rank_script
from real_job import hashes, rows, succeed

from fedmpi.privacy.site_keys import CREATE_PRIVATE, CREATE_PUBLIC

LIMIT_S = 240
MODEL = """
import os
from dataclasses import dataclass
from torch import nn
import fedmpi

class Model(nn.Sequential):
    passes = 0
    def forward(self, x):
        Model.passes += self.training
        if os.environ.get("OMPI_COMM_WORLD_RANK") == os.environ.get("DYING_RANK", "") and Model.passes == 5:
            os._exit(9)  # in the second round, in which each rank trains one client in four steps
        return super().forward(x)

def model(input_shape, classes):
    return Model(nn.Flatten(), nn.Linear(64, 4200), nn.ReLU(), nn.Linear(4200, classes))

@dataclass(frozen=True)
class Failing(fedmpi.Method):
    def upload(self, client):
        if client.round == 1 and client.id < int(os.environ.get("FAILING_CLIENTS", "0")):
            raise ValueError("this sample cannot be read")
        return super().upload(client)
"""


@pytest.fixture
def config(tmp_path):
    """Return a function that writes a config file and returns its path; all large slots are sent in many pieces."""
    (tmp_path / "plugin.py").write_text(MODEL)

    def write(name, **changes):
        tree = {
            "name": name,
            "rounds": 3,
            "output": str(tmp_path),
            "report": False,
            "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 4}},
            "model": {"name": f"{tmp_path}/plugin.py:model"},
            "method": {"name": f"{tmp_path}/plugin.py:Failing"},
            "train": {"batch_size": 100, "lr": 0.1},
            "cohort": {"placement": "pinned"},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree | changes))
        return path

    return write


def secagg(threshold):
    return {"privacy": {"secagg": {"threshold": threshold}}}


def test_masked_equals_unmasked(config, tmp_path):
    succeed("run", config("plain", server={"reduce": "local"}), kind="mpirun", size=4)
    succeed("run", config("masked", **secagg(3)), kind="mpirun", size=4)
    succeed("run", config("alone", **secagg(3)))
    assert len(hashes(tmp_path / "plain")) == 3
    assert hashes(tmp_path / "masked") == hashes(tmp_path / "alone") == hashes(tmp_path / "plain")
    assert not (tmp_path / "masked" / "update_stats.jsonl").exists()  # norms of single updates are withheld


def test_clients_that_fail_drop_out_down_to_the_threshold(config, tmp_path):
    for kind, size in (("alone", 1), ("mpirun", 4)):
        path = config(kind, faults={"on_client_error": "drop"}, **secagg(3))
        succeed("run", path, kind=kind, size=size, env=warm_env() | {"FAILING_CLIENTS": "1"})
        assert [[each["client"] for each in row["refused"]] for row in rows(tmp_path / kind)] == [[], [0], []]
    assert hashes(tmp_path / "alone") == hashes(tmp_path / "mpirun")
    path = config("few", faults={"on_client_error": "drop"}, **secagg(3))
    done = fedmpi("run", path, kind="mpirun", size=4, env=warm_env() | {"FAILING_CLIENTS": "2"})
    assert done.returncode == 2
    message = "privacy.secagg needs at least 3 clients, but only 2 clients have an upload to send; nothing is released"
    assert done.stderr.count(message) == 1, done.stderr
    assert hashes(tmp_path / "few") in ([], hashes(tmp_path / "alone")[:1])
    assert not (tmp_path / "few" / "model.safetensors").exists()


@pytest.mark.parametrize("policy", ["drop", "redo"])
def test_a_lost_rank(config, tmp_path, policy):
    path = config(policy, faults={"on_lost_rank": policy}, **secagg(3))
    mpirun, *options = launcher("mpirun", 5)
    command = [mpirun, "--with-ft", "ulfm", *options, "fedmpi", "run", str(path)]
    subprocess.run(command, env=warm_env() | {"DYING_RANK": "2"}, capture_output=True, timeout=LIMIT_S, check=False)
    assert [row["round"] for row in rows(tmp_path / policy, "faults.jsonl")] == [1]
    sizes = [len(row["cohort"]) for row in rows(tmp_path / policy)]
    assert sizes == ([4, 3, 4] if policy == "drop" else [4, 4, 4])
    succeed("run", config("whole", **secagg(3)))
    same = hashes(tmp_path / policy) == hashes(tmp_path / "whole")
    assert same == (policy == "redo")


def test_sites_sign_their_keys(config, tmp_path):
    sites, g = ("lyon", "oslo", "bern"), np.random.default_rng(0)
    (tmp_path / "keys").mkdir()
    for site in sites:
        lines = [f"{g.normal()},{g.integers(2)}" for _ in range(40)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,sick", *lines, ""]))
        for words in (CREATE_PRIVATE.format(path=f"{site}.key"), CREATE_PUBLIC.format(path=f"keys/{site}.pub")):
            subprocess.run(words.replace("SITE", site).split(), cwd=tmp_path, check=True, capture_output=True)
    data = {"source": "table", "root": str(tmp_path), "silos": list(sites), "path": "{site}.csv"}
    data |= {"label_column": "sick", "class_names": [0, 1]}
    more = {"data": data, "model": {"name": "logistic"}, "method": {"name": "fedavg"}}
    path = config("signed", privacy={"secagg": {"threshold": 2}, "keys": str(tmp_path / "keys")}, **more)
    start = f"fedmpi run {path}"
    own = [start, *(f"{start} privacy.identity={tmp_path}/{site}.key" for site in sites)]
    script = write_rank_script(tmp_path / "start.sh", *own)
    done = subprocess.run([*launcher("mpirun", 4), str(script)], env=warm_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(hashes(tmp_path / "signed")) == 3
    sent = [row["what"][0] for row in rows(tmp_path / "signed" / "audit", "rank-1.jsonl") if row["round"] == 0]
    expected = ["headers", "keys", "shares", "confirm", "unmask"]
    assert [what.removeprefix("secagg ") for what in sent if what.startswith("secagg")] == expected
    assert "masked sum" in sent
    wrong = write_rank_script(tmp_path / "wrong.sh", own[0], own[2], *own[2:])
    done = subprocess.run([*launcher("mpirun", 4), str(wrong)], env=warm_env(), capture_output=True, text=True)
    assert done.returncode == 2
    assert "oslo.key does not belong to lyon.pub in privacy.keys; use the private key of site lyon" in done.stderr
