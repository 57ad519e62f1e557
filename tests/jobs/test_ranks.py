"""An experiment gives the same bits in one process and on any ranks.

Ranks are started by mpirun and torchrun, communicate over gloo and MPI, and are assigned clients in any way.
"""

import json
import os
import subprocess

import numpy as np
import pytest
import torch
from fork_server import COMMAND
from helpers import ROOT, digest, fedmpi, launcher, warm_env, write_rank_script
from real_job import rows, succeed
from safetensors.torch import load_file

from fedmpi.config.schema import Settings
from fedmpi.runtime import build_data

TIMES = ("wall_s", "train_s", "wait_s", "server_s", "evaluate_s")
BYTES = ("sent_bytes", "received_bytes")  # rank 0's: they depend on how many ranks there are


# ---- every method, in one job per way to start ----
@pytest.fixture(scope="module")
def every_method(tmp_path_factory):
    """Return a function that runs a job of `size` ranks, and returns {case: results}."""

    def start(kind, size, backend):
        file = tmp_path_factory.mktemp("ranks") / "found.json"
        program = [*COMMAND, str(ROOT / "tests" / "every_method.py"), str(file), backend]
        command = [*launcher(kind, size), *program]
        done = subprocess.run(command, env=warm_env(), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(file.read_text())

    return start


@pytest.fixture(scope="module")
def one_process(every_method):
    return every_method("alone", 1, "auto")


@pytest.mark.parametrize(
    ("kind", "size", "backend"),
    [("torchrun", 3, "gloo"), ("mpirun", 5, "mpi")],
    ids=lambda value: str(value),
)
def test_every_method_gives_the_bits_of_one_process(every_method, one_process, kind, size, backend):
    found = every_method(kind, size, backend)
    assert found.keys() == one_process.keys()
    for case, mine in found.items():
        for part in ("rows", "lines", "updates", "w", "b", "server", "kept"):
            assert mine[part] == one_process[case][part], f"{case}: {part}"
        assert sum(sent for sent, _ in mine["bytes"]) == sum(received for _, received in mine["bytes"]), case
        plain = "rank 0 trains" not in case and "shard" not in case
        rounds = zip(mine["rounds"], mine["sizes"], strict=True) if plain else ()
        for (sent, received, m), (download, own, upload) in rounds:
            assert sent == 4 * (download * (size - 1) + own * m), case  # bytes: float32
            assert received == 4 * upload * m, case


# ---- the main job, as users start it ----
def main_job(folder, *overrides, **start):
    succeed("run", "configs/quickstart.yaml", "rounds=3", f"output={folder}", *overrides, **start)
    run = folder / "quickstart"
    model = {name: digest(x) for name, x in load_file(run / "model.safetensors").items()}
    return _facts(run), rows(run, "clients.jsonl"), (run / "update_stats.jsonl").read_text(), model


def _facts(run):
    return [{name: value for name, value in row.items() if name not in (*TIMES, *BYTES)} for row in rows(run)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return main_job(tmp_path_factory.mktemp("alone"))


def test_the_main_job_in_one_process(alone):
    rows, _, _, _ = alone
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert len({row["sha256"] for row in rows}) == 3
    assert {"loss", "accuracy", "train_loss", "personal_loss", "personal_accuracy_worst_decile"} <= rows[0].keys()
    assert rows[2]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize(
    ("kind", "size", "overrides"),
    [
        ("mpirun", 2, ["comm.backend=gloo"]),
        pytest.param("mpirun", 5, ["comm.backend=mpi"], marks=pytest.mark.smoke),
        pytest.param("torchrun", 3, [], marks=pytest.mark.smoke),
        ("torchrun", 2, ["cohort.placement=pinned", "server.trains_clients=true"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else str(value),
)
def test_the_main_job_gives_the_bits_of_one_process(tmp_path, alone, kind, size, overrides):
    assert main_job(tmp_path, *overrides, kind=kind, size=size) == alone


# ---- silos ----
SILOS = """
name: silos
rounds: 3
data: {source: npz, silos: [north.npz, south.npz]}
model: {name: mlp, hidden: [8]}
method: {name: fedavg}
evaluate: {protocol: [global, personal]}
"""


def write_silos(folder, *homes):
    """Write silos.yaml and the files of its two sites to `homes`, where all.npz contains both."""
    (folder / "silos.yaml").write_text(SILOS)
    sites = []
    for k, name in enumerate(("north", "south")):
        x = np.random.default_rng(k).normal(size=(60, 5)).astype("float32")
        y, site = (x[:, 0] > 0).astype(int), np.full(60, k)
        sites.append({"x": x[:40], "y": y[:40], "test_x": x[40:], "test_y": y[40:]})
        np.savez((homes or (folder, folder))[k] / f"{name}.npz", **sites[k])
        sites[k] |= {"site": site[:40], "test_site": site[40:]}
    np.savez(folder / "all.npz", **{key: np.concatenate([site[key] for site in sites]) for key in sites[0]})


def test_a_rank_needs_only_the_files_of_its_own_silos(tmp_path):
    """Each of three ranks has a folder: rank 0's is empty, each other contains one hospital's file.

    One process has both.
    """
    roots = [tmp_path / str(rank) for rank in range(3)]
    for root in roots:
        root.mkdir()
    write_silos(tmp_path)
    write_silos(tmp_path, *roots[1:])
    start = f"fedmpi run {tmp_path}/silos.yaml output={tmp_path}/runs data.root="
    script = write_rank_script(tmp_path / "start.sh", *(f"{start}{root}" for root in roots))
    for command in ([*launcher("mpirun", 3), str(script)], f"{start}{tmp_path}".split()):
        done = subprocess.run(command, env=warm_env(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    spread, together = tmp_path / "runs" / "silos", tmp_path / "runs" / "silos-2"
    assert {"accuracy", "personal_accuracy"} <= _facts(together)[0].keys()
    assert _facts(spread) == _facts(together)
    assert rows(spread, "clients.jsonl") == rows(together, "clients.jsonl")
    assert {line["site"] for line in rows(spread, "clients.jsonl")} == {"north.npz", "south.npz"}
    host = os.uname().nodename
    assert f"\nsite north.npz  rank 1 on {host}\nsite south.npz  rank 2 on {host}\n" in (spread / "log.txt").read_text()
    alone = "\nthis process opens the files of all 2 sites: north.npz, south.npz\n"
    assert alone in (together / "log.txt").read_text()


def test_a_rank_opens_two_sites_files_only_if_allowed(tmp_path):
    """With two sites and one rank to train, no file is opened."""
    write_silos(tmp_path)
    words = ["run", tmp_path / "silos.yaml", f"data.root={tmp_path}", f"output={tmp_path}"]
    done = fedmpi(*words, kind="mpirun", size=2)
    assert done.returncode == 2
    refused = "data.silos: there are 2 sites, but only 1 training rank, so rank 1 would open the files of north.npz, "
    refused += "south.npz; start 3"
    assert f"error: {refused} ranks (rank 0 is the server), or let sites share a rank with " in done.stderr
    assert not (tmp_path / "silos").exists()
    for more in ("data.share_ranks=true", "server.trains_clients=true"):
        succeed(*words, more, "rounds=1", kind="mpirun", size=2)


@pytest.mark.parametrize(("share", "sent"), [(True, [67, 2]), (False, [67])])
def test_a_site_sends_only_counts_shapes_and_types_at_the_start(tmp_path, share, sent):
    """Rank 1 sends three numbers and 64 columns of text with shapes and types.

    Its two label counts only if it shares them.
    """
    np.savez(tmp_path / "north.npz", x=np.zeros((20, 5), dtype="float32"), y=np.arange(20) % 2)
    data = {"source": "npz", "silos": ["north.npz"], "root": str(tmp_path), "share_label_counts": share}
    settings = Settings.model_validate({"data": data, "model": {"name": "mlp"}, "method": {"name": "fedavg"}})
    said = []

    class Rank1:
        rank, size, device = 1, 2, torch.device("cpu")

        def exchange(self, outgoing, incoming):
            said.extend(len(x) for _, x in outgoing)

        def broadcast(self, x):
            pass

    build_data.build_silo_data(settings, Rank1())
    assert said == sent


HASHES = """
import hashlib, json
from dataclasses import dataclass
from pathlib import Path
import torch
from fedmpi.method import Method

@dataclass(frozen=True)
class Hashes(Method):
    def aggregate(self, s, up):
        slots = {name: getattr(up._views, name) for name in up._views}  # whole rows, as they came from the sites
        for i, k in enumerate(up.clients):
            row = torch.cat([slot[i].reshape(-1) for slot in slots.values()])
            line = [s.round, k, list(slots), row.nbytes, hashlib.sha256(row.numpy().tobytes()).hexdigest()]
            with Path(__file__).with_name("came.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\\n")
        return up.mean(), s.state
"""


@pytest.mark.smoke
def test_the_audit_lists_all_messages_of_a_site(tmp_path):
    """The hashes are those of the bytes that rank 0 received, and no message is missing."""
    (tmp_path / "hashes.py").write_text(HASHES)
    write_silos(tmp_path)
    method = f"method={{name: '{tmp_path}/hashes.py:Hashes'}}"
    words = ["run", tmp_path / "silos.yaml", f"data.root={tmp_path}", f"output={tmp_path}"]
    succeed(*words, method, kind="mpirun", size=3)
    came = [json.loads(line) for line in (tmp_path / "came.jsonl").read_text().splitlines()]
    assert len(came) == 6
    for k in range(2):
        path = tmp_path / "silos" / "audit" / f"rank-{k + 1}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(set(line) == {"time", "round", "what", "to", "bytes", "sha256"} for line in lines)
        assert all(line["what"] for line in lines)  # nothing leaves without a name
        updates = [line for line in lines if "dw" in line["what"]]
        found = [[line["round"], k, line["what"], line["bytes"], line["sha256"]] for line in updates]
        assert found == [line for line in came if line[1] == k]
        assert {line["to"] for line in updates} == {0}
        others = [line["what"] for line in lines if "dw" not in line["what"]]
        assert ["label counts"] in others
        assert any("n_train" in what for what in others)
        assert sum("accuracy" in what for what in others) == 6  # three rounds, two protocols
    # A site may keep its label counts, and do without an audit: the model is the same.
    succeed(*words, method, "data.audit=false", "data.share_label_counts=false", kind="mpirun", size=3)
    told, kept = (tmp_path / name for name in ("silos", "silos-2"))
    assert not (kept / "audit").exists()
    assert _facts(told) == _facts(kept)
    assert json.loads((kept / "partition.json").read_text())["label_counts"] is None
    assert json.loads((told / "partition.json").read_text())["label_counts"]


def test_methods_that_need_label_counts_are_rejected_if_sites_do_not_share_them(tmp_path):
    (tmp_path / "nosy.py").write_text(
        "from dataclasses import dataclass\nfrom fedmpi.method import Method\n\n@dataclass(frozen=True)\n"
        "class Nosy(Method):\n    def aggregate(self, s, up):\n"
        "        s.label_counts\n        return up.mean(), s.state\n"
    )
    write_silos(tmp_path)
    words = ["run", tmp_path / "silos.yaml", f"data.root={tmp_path}", f"output={tmp_path}"]
    words += ["data.share_label_counts=false"]
    for method in ("feddisco", "fedpac", "ccvr"):
        done = fedmpi(*words, f"method={{name: {method}}}")
        assert done.returncode == 2
        assert f"error: method {method} needs the label counts of all clients" in done.stderr
    done = fedmpi(*words, f"method={{name: '{tmp_path}/nosy.py:Nosy'}}")
    assert done.returncode == 2, done.stderr
    assert "server.label_counts is not available, because sites do not share their label counts" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_evaluated_model_is_the_saved_model(tmp_path):
    """Metrics and the choice of the best model refer to w, on any ranks and with or without silos."""
    write_silos(tmp_path)
    words = ["run", tmp_path / "silos.yaml", f"data.root={tmp_path}", f"output={tmp_path}", "rounds=6", "train.lr=0.3"]
    words += ["data.validation=0.2", "evaluate.best=loss"]
    together = ["data.silos=null", "data.path=all.npz", "data.partition={scheme: site}"]
    runs = []
    for name, kind, size, more in (("a", "alone", 1, []), ("b", "mpirun", 3, []), ("c", "alone", 1, together)):
        succeed(*words, *more, f"name={name}", kind=kind, size=size)
        runs.append(_facts(tmp_path / name))
    assert (tmp_path / "a" / "model-best.safetensors").read_bytes() == (
        tmp_path / "b" / "model-best.safetensors"
    ).read_bytes()
    assert runs[0] == runs[1]
    for key, tolerance in (("sha256", None), ("validation_loss", 1e-6), ("loss", 1e-6)):
        alone, partition = ([row[key] for row in run] for run in (runs[0], runs[2]))
        assert alone == (partition if tolerance is None else pytest.approx(partition, rel=tolerance))
