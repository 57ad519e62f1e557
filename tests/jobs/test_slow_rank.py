"""If one rank is slow it gets fewer clients, the bits stay the same, and the timeline shows which ranks wait."""

import pytest
import yaml
from helpers import clean_env, fedmpi
from real_job import hashes

from fedmpi.engine.tracing import MAX_SPANS, Timeline
from fedmpi.runtime.record.run_dir import read_timelines

PLUGIN = """\
import os
import time
from dataclasses import dataclass
import fedmpi

@dataclass(frozen=True)
class Slow(fedmpi.Method):
    def initial_weights(self, k):
        if os.environ.get("OMPI_COMM_WORLD_RANK") == os.environ.get("SLOW_RANK"):
            time.sleep(1e-3 * k.n)
        return k.received
"""
ROUNDS = 9
pytestmark = pytest.mark.xdist_group("slow rank")  # all tests read the same runs


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory):
    """Run jobs on three ranks, one of which takes 120 ms more for each client."""
    path = tmp_path_factory.mktemp("slow")
    (path / "slow.py").write_text(PLUGIN)
    config = {
        "name": "one",
        "output": str(path),
        "rounds": ROUNDS,
        "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 12}},
        "model": {"name": "mlp", "hidden": [8]},
        "method": {"name": f"{path}/slow.py:Slow"},
        "train": {"batch_size": 10},
        "evaluate": {"every": 100},
    }
    (path / "run.yaml").write_text(yaml.safe_dump(config))
    for more in (["name=one"], ["name=packed", "compute.clients_per_pass=5"]):
        start(path, "run", path / "run.yaml", *more)
    return path


def start(path, *words, slow="2", code=0, size=3):
    done = fedmpi(*words, kind="mpirun" if size > 1 else "alone", size=size, env=clean_env(SLOW_RANK=slow))
    assert done.returncode == code, done.stderr + done.stdout
    return done


def clients_of_rank(run, rank, job=0):
    """Return {round: clients that the rank trained in it}."""
    lines = read_timelines(run)[job]["ranks"][rank]["rounds"]
    who = {x["round"]: [s[3] for s in x["spans"] if s[0] == "train" and len(s) > 3] for x in lines}
    return {t: sum(len(each) if isinstance(each, list) else 1 for each in found) for t, found in who.items()}


@pytest.mark.smoke
def test_a_slow_rank_gets_fewer_clients(runs_folder):
    share = clients_of_rank(runs_folder / "one", 2)
    assert share[0] == share[2] == 6
    assert max(share[t] for t in range(3, ROUNDS)) <= 4


def test_a_repeated_packed_run_has_the_same_bits(runs_folder):
    """Which clients are trained together depends on their placement, which therefore must not depend on time."""
    share = clients_of_rank(runs_folder / "packed", 2)
    assert {share[t] for t in range(ROUNDS)} == {6}
    start(runs_folder, "run", runs_folder / "run.yaml", "name=again", "compute.clients_per_pass=5", slow="none")
    assert hashes(runs_folder / "again") == hashes(runs_folder / "packed")


# ---- the timeline ----
def test_every_rank_records_all_spans_of_every_round(runs_folder):
    (job,) = read_timelines(runs_folder / "one")
    assert sorted(job["ranks"]) == [0, 1, 2]
    for rank, each in job["ranks"].items():
        lines = each["rounds"]
        assert [line["round"] for line in lines] == list(range(ROUNDS + 1))  # the last word, too
        for line, after in zip(lines, [*lines[1:], None], strict=True):
            end = 0.0
            for what, begin, ms, *_ in line["spans"]:
                assert begin == pytest.approx(end, abs=0.03), what
                end = begin + ms
            assert end == pytest.approx(1e3 * line["s"], abs=0.03)
            if after is not None:
                assert line["at"] + line["s"] == pytest.approx(after["at"], abs=0.01)
        names = {span[0] for line in lines for span in line["spans"]}
        assert {"broadcast", "uploads"} <= names if rank == 0 else {"wait_command", "train"} <= names
    assert (
        sum(
            clients_of_rank(runs_folder / "one", 1)[t] + clients_of_rank(runs_folder / "one", 2)[t]
            for t in range(ROUNDS)
        )
        == 12 * ROUNDS
    )


def test_the_size_of_a_timeline_row_is_bounded(monkeypatch):
    """It does not grow with the number of clients, and nothing is recorded if the timeline is off."""
    clock = iter(range(10**6))
    monkeypatch.setattr(
        "fedmpi.engine.tracing.time", type("Time", (), {"perf_counter": lambda: next(clock) / 10, "time": lambda: 0})
    )
    told, line = [], Timeline()
    line.write_row = told.append
    line.begin(0)
    for k in range(5000):
        line.span("train", k)
        line.span("send")
    line.begin(1)
    line.flush()
    (row,) = told
    assert len(row["spans"]) == MAX_SPANS
    assert sum(row["rest"].values()) + sum(span[2] for span in row["spans"]) == pytest.approx(1e3 * row["s"])
    assert row["s"] == pytest.approx(1000)
    off = Timeline()
    off.span("train", 1)
    off.begin(1)
    off.end()
    assert (off.spans, off.finished_row) == ([], None)
