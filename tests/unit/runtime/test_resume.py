"""A run that was interrupted at any point is resumed with the results of an uninterrupted run."""

import random
import re
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import digest, fedmpi, prepare, record, small_settings
from thread_ranks import run_in_threads

from fedmpi.common.errors import UserError
from fedmpi.data.transforms.geometric import Resize
from fedmpi.methods import registry
from fedmpi.runtime import checkpoints
from fedmpi.runtime.checkpoints import CheckpointWriter, ClientStateFiles
from fedmpi.runtime.record.atomic_files import CorruptFileError

ROUNDS = 4


class Killed(Exception):  # noqa: N818
    pass


def kept_in(folder, every=1, keep=2):
    (folder / "checkpoints").mkdir(exist_ok=True)
    return CheckpointWriter(folder / "checkpoints", ClientStateFiles(folder / "state"), every, keep)


def attach(it, folder, room, every=1, keep=2):
    """Make a federation write checkpoints, with at most `room` clients' rows in memory."""
    it.kept = kept_in(folder, every, keep)
    it.fed.reporter.callbacks.save_state = it.kept.save
    if it.experiment.messages.client_state.size:
        it.fed.states.store, it.fed.states.max_in_memory = it.kept.rows, room


def run_until(it, cut):
    """Run to the end, or raise Killed when round `cut` is reported."""
    rows = it.fed.reporter.callbacks.record_round

    def on_round(row):
        if row["round"] == cut:
            raise Killed
        rows(row)

    it.fed.reporter.callbacks.record_round = on_round
    try:
        it.reason = it.fed.run()
    finally:
        it.kept.wait()
        it.kept._writer.shutdown()


def begin(folder, config, *, cut=None, room=0, every=1, keep=2, stop=lambda: False):
    """Start or resume a run with checkpoints, which is killed when it reports round `cut`."""
    it, output = prepare(config, stop=stop), []
    attach(it, folder, room or 10**6, every, keep)
    t = checkpoints.restore_newest_checkpoint(it.fed, it.kept, 10, output.append)
    with suppress(Killed):
        run_until(it, cut)
    return it, t, output


def full(it):
    kept = {k: digest(it.fed.states._get_row(k)) for k in range(it.fed.trainer.data.clients)}  # from memory or shelf
    return record(it) | {"kept": kept, "reason": it.reason}


def config(method, **more):
    return small_settings(method, "norm", rounds=ROUNDS, evaluate={"protocol": ["global", "personal"]}, **more)


WIRES = ["int8", "bf16"]


def wire_of(method):
    """Return one of the compressions that the method supports."""
    return WIRES[1] if method == "fedfomo" else WIRES[sum(map(ord, method)) % 2]


def killed_twice(tmp_path, method, config):
    """A resumed run has the same bits, with only two clients' rows in memory."""
    it = prepare(config)
    it.reason = it.fed.run()
    undisturbed = full(it)
    cuts = torch.randperm(ROUNDS, generator=torch.Generator().manual_seed(len(method)))[:2].sort().values.tolist()
    rows, lines, updates = {}, {}, {}
    for cut in (*cuts, None):
        it, _, _ = begin(tmp_path, config, cut=cut, room=2)
        rows |= {row["round"]: row for row in it.rows}
        lines |= {(line["round"], line["client"], line["protocol"]): line for line in it.lines}
        updates |= {row["round"]: row for row in it.updates}
    it.rows = [rows[t] for t in sorted(rows)]
    it.files |= {"update_stats.jsonl": [updates[t] for t in sorted(updates)], "clients.jsonl": list(lines.values())}
    found = full(it)
    assert {name: found[name] for name in found if name != "lines"} == {
        name: undisturbed[name] for name in undisturbed if name != "lines"
    }
    assert sorted(map(str, found["lines"])) == sorted(map(str, undisturbed["lines"]))


KEPT = {"persist_optimizer": True, "clip_norm": 1.0}
LOCAL = {
    "adamw": {"optim": "adamw", "momentum": None, "lr": 0.003, "steps": 4, **KEPT},
    "sgd": {"nesterov": True, **KEPT},
}


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "ditto"])
@pytest.mark.parametrize("train", LOCAL)
def test_optimiser_state_is_restored(tmp_path, method, train):
    killed_twice(tmp_path, method, config(method, train=LOCAL[train]))


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
@pytest.mark.parametrize("best", [{"metric": "loss"}, {"metric": "accuracy", "patience": 1, "min_delta": 3.0}])
def test_the_best_model_so_far_is_known(tmp_path, method, best):
    more = {"data": {"validation": 0.2}, "evaluate": {"best": best, "protocol": ["global", "personal"]}}
    killed_twice(tmp_path, method, small_settings(method, "norm", rounds=ROUNDS, **more))


@pytest.mark.parametrize("method", sorted(registry))
def test_resume_gives_the_same_hashes_for_every_method(tmp_path, method):
    killed_twice(tmp_path, method, config(method))


DRAWS = {"fedsr"}  # from torch's own generator, which the ranks of one process share


@pytest.mark.parametrize("coded", [False, True], ids=["", "coded"])
@pytest.mark.parametrize("method", sorted(set(registry) - DRAWS))
def test_every_method_can_be_resumed_on_another_number_of_ranks(tmp_path, method, coded):
    """A run on four, two and then three ranks, killed twice, has the same bits as one process."""
    rng = random.Random(method)
    cohort = {"fraction": 0.6, "placement": rng.choice(["balanced", "pinned"])}
    config = small_settings(
        method, "mlp", rounds=6, cohort=cohort, comm={"compression": wire_of(method) if coded else "fp32"}
    )
    full = prepare(config)
    full.fed.run()
    cuts, hashes = sorted(rng.sample(range(5), 2)), {}

    def start(seat):
        it = prepare(config, comm=seat)
        attach(it, tmp_path, 2)
        return it

    def play(it, cut):
        checkpoints.restore_newest_checkpoint(it.fed, it.kept, 30, lambda text: None)
        try:
            run_until(it, cut)
        finally:
            hashes.update({row["round"]: row["sha256"] for row in it.rows})

    for size, cut in ((4, cuts[0]), (2, cuts[1]), (3, None)):
        ended = run_in_threads(size, {}, start, lambda it, cut=cut: play(it, cut))
        assert all(end is None for end in ended.values()) == (cut is None), ended
    assert [hashes[t] for t in range(6)] == full.hashes


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_off(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 16])


@pytest.mark.parametrize("harm", [flip, cut_off, lambda path: path.write_bytes(b""), lambda path: path.unlink()])
@pytest.mark.parametrize("what", ["server", "row"])
def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(tmp_path, harm, what):
    for name in "ab":
        (tmp_path / name).mkdir()
    undisturbed, _, _ = begin(tmp_path / "a", config("scaffold"))
    it, _, _ = begin(tmp_path / "b", config("scaffold"), cut=2)
    newest = it.fed.states.last_trained
    client = next(k for k, t in newest.items() if t == 2)
    path = tmp_path / "b" / {"server": "checkpoints/000002", "row": f"state/{client:06}.000002"}[what]
    path = path.with_name(f"{path.name}.safetensors")
    harm(path)
    gone = not path.exists()
    again, t, output = begin(tmp_path / "b", config("scaffold"))
    assert t == 1
    assert (gone and what == "server" and not output) or (len(output) == 1 and str(path) in output[0]), output
    assert again.rows[-1]["sha256"] == undisturbed.rows[-1]["sha256"]
    assert full(again)["kept"] == full(undisturbed)["kept"]


def test_one_missing_byte_is_an_error(tmp_path):
    """Bits of a row's file that are flipped one by one."""
    rows = ClientStateFiles(tmp_path)
    rows.put(3, 7, torch.arange(5.0))
    path, good = rows.path(3, 7), rows.path(3, 7).read_bytes()
    assert torch.equal(rows.get(3, 7), torch.arange(5.0))
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(CorruptFileError, match=re.escape(str(path))):
            rows.get(3, 7)
        assert not rows.is_intact(3, 7)


@pytest.mark.parametrize("room", [10**6, 1])
@pytest.mark.parametrize(("every", "keep"), [(1, 2), (2, 2), (1, 1), (3, 1)])
def test_a_checkpoint_writes_only_changed_rows_and_old_files_are_removed(tmp_path, every, keep, room):
    """The rows on disk are those of the checkpoints, and between two checkpoints also those that left the memory.

    The row of a client that did not train is not written again.
    """
    config_ = small_settings("scaffold", "mlp", rounds=12, cohort={"fraction": 0.3}, evaluate={"every": 100})
    it, kept = prepare(config_), kept_in(tmp_path, every, keep)
    it.fed.states.store, it.fed.states.max_in_memory = kept.rows, room
    seen, before = [], set()

    def saved(fed, t, memory, last):
        nonlocal before
        kept.save(fed, t, memory, last)
        kept.wait()
        checkpoints = sorted(int(path.stem) for path in (tmp_path / "checkpoints").glob("*"))
        now = set(kept.rows.list_keys())
        needed = {(k, label) for c in checkpoints for k, label in fed.scheduler.last_trained_rounds(c).items()}
        assert now >= needed
        assert len(checkpoints) == min(keep + 1, (t + 1) // every)
        if (t + 1) % every == 0:
            assert now == needed
            changed = {k for r in range(t - every + 1, t + 1) for k in fed.scheduler.cohort(r)}
            assert {k for k, label in now - before} == changed
            before = now
        else:
            assert all(label > max(checkpoints, default=-1) for _, label in now - needed)
        seen.append(t)

    it.fed.reporter.callbacks.save_state = saved
    it.fed.run()
    assert seen == list(range(12))
    assert not list(tmp_path.rglob(".*.tmp"))


def test_rows_are_on_disk_before_the_checkpoint(tmp_path, monkeypatch):
    """After a power failure, rows of rounds before a checkpoint must exist if the checkpoint exists."""
    output = []
    sync, write = checkpoints.sync_to_disk, checkpoints.write_atomically
    monkeypatch.setattr(checkpoints, "sync_to_disk", lambda path: (output.append(path.name), sync(path)))
    monkeypatch.setattr(checkpoints, "write_atomically", lambda *a: (output.append(a[0].name), write(*a)))
    for name in ("metrics.jsonl", "clients.jsonl"):
        (tmp_path / name).touch()
    begin(tmp_path, small_settings("fedavg", "mlp", rounds=2))
    places = [i for i, name in enumerate(output) if name.endswith(".safetensors")]
    assert len(places) == 2
    assert [{*output[i - 2 : i]} for i in places] == [{"metrics.jsonl", "clients.jsonl"}] * 2


def test_incomplete_files_of_a_killed_run_are_removed(tmp_path):
    """Incomplete files are removed, and all files if no checkpoint is intact."""
    begin(tmp_path, config("scaffold"), cut=2)
    left = [tmp_path / "checkpoints" / ".000002.safetensors.tmp", tmp_path / "state" / ".000001.000002.safetensors.tmp"]
    for path in left:
        path.write_bytes(b"half")
    assert begin(tmp_path, config("scaffold"), cut=3)[1] == 2
    assert not list(tmp_path.rglob(".*"))
    for path in (tmp_path / "checkpoints").iterdir():
        cut_off(path)
    it, t, output = begin(tmp_path, config("scaffold"), cut=0)
    assert (t, len(output)) == (-1, 2)
    assert set(ClientStateFiles(tmp_path / "state").list_keys()) == {(k, 0) for k in it.fed.scheduler.cohort(0)}


class StopAt:
    """A stop request that is true when it is queried for the n-th time."""

    def __init__(self, n):
        self.n, self.seen = n, 0

    def __call__(self):
        self.seen += 1
        return self.seen >= self.n


@pytest.mark.parametrize(
    ("method", "room", "wire"),
    [
        ("fedavg", 0, "fp32"),
        ("scaffold", 0, "fp32"),
        ("fedper", 2, "fp32"),
        ("fedavg", 2, WIRES[0]),
        ("scaffold", 0, WIRES[1]),
    ],
)
def test_a_stop_saves_the_last_complete_round(tmp_path, method, room, wire):
    """The stop comes within a round, whose changes of client states are undone."""
    more = {"checkpoint": {"every": 4}, "evaluate": {"protocol": ["global", "personal"]}, "comm": {"compression": wire}}
    config_ = small_settings(method, "norm", rounds=6, **more)
    it = prepare(config_)
    it.reason = it.fed.run()
    undisturbed, counted = full(it), StopAt(10**9)
    prepare(config_, stop=counted).fed.run()
    rounds = set()
    for number, n in enumerate(range(counted.seen // 7, counted.seen, counted.seen // 3)):
        folder = tmp_path / str(number)
        folder.mkdir()
        it, _, _ = begin(folder, config_, room=room, every=4, stop=StopAt(n))
        assert it.reason == "stopped"
        complete = it.rows[-1]["round"] if it.rows else -1
        again, t, _ = begin(folder, config_, room=room, every=4)
        assert t == complete
        rounds.add(t)
        found = full(again)
        assert {name: found[name] for name in ("w", "b", "server", "kept")} == {
            name: undisturbed[name] for name in ("w", "b", "server", "kept")
        }
        assert found["rows"] == undisturbed["rows"][t if t >= 0 else 0 :]
    assert any((t + 1) % 4 for t in rounds - {-1})


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_finished_run_can_be_resumed_with_more_rounds(tmp_path, wire):
    longer = small_settings("scaffold", "norm", rounds=ROUNDS + 2, comm={"compression": wire})
    begin(tmp_path, config("scaffold", comm={"compression": wire}))
    it, t, _ = begin(tmp_path, longer)
    assert t == ROUNDS - 1
    undisturbed = prepare(longer)
    undisturbed.fed.run()
    found, expected = full(it), full(undisturbed)
    assert (found["w"], found["kept"]) == (expected["w"], expected["kept"])
    assert [row["round"] for row in it.rows] == [ROUNDS - 1, ROUNDS, ROUNDS + 1]


@pytest.mark.parametrize(
    ("now", "fine"),
    [
        ("['a', 'b', 'c']", True),
        ("['a']", False),
        ("['b', 'a']", False),
        ("['c', 'a', 'b']", False),
        ("['a', 'bc', 'b']", False),
        ("None", False),
    ],
)
def test_sites_can_only_be_added_at_the_end(now, fine):
    """Clients are numbered by the list, so a site would otherwise get the state of another one."""
    with nullcontext() if fine else pytest.raises(UserError, match=r"add sites only .* init\.from=runs/a/model"):
        checkpoints._check_sites_appended(Path("runs/a"), "['a', 'b']", now)


def test_a_run_can_be_resumed_where_images_are_rounded_differently(tmp_path, monkeypatch):
    """A resumed run compares stored images and the options of their transforms, not the transformed images.

    Devices round resized images differently.
    """
    g = np.random.default_rng(0)
    np.savez(tmp_path / "pictures.npz", x=g.integers(0, 256, (80, 1, 8, 8), dtype=np.uint8), y=np.arange(80) % 4)
    data = ("data.source=npz", f"data.root={tmp_path}", "data.path=pictures.npz", "data.partition.clients=4")
    words = ["configs/quickstart.yaml", *data, "data.augment=[{resize: 10}]", "model.name=logistic"]
    words += ["checkpoint.every=1", f"output={tmp_path}"]
    assert fedmpi("run", *words, "name=run", "rounds=1").returncode == 0
    resize = Resize.__call__
    monkeypatch.setattr(Resize, "__call__", lambda self, x, u: resize(self, x, u) * (1 + 1e-7))
    result = fedmpi("resume", tmp_path / "run", "rounds=2")
    assert result.returncode == 0, result.stderr
    result = fedmpi("resume", tmp_path / "run", "rounds=3", "data.augment=[{resize: 12}]")
    assert result.returncode == 2


def test_the_directory_of_a_host_without_rank_0_is_refused_with_an_explanation(tmp_path):
    """On such a host, a site's rank has written only its own state and audit."""
    place = tmp_path / "study"
    for name in ("state/north", "audit", "trace"):
        (place / name).mkdir(parents=True)
    (tmp_path / "new.csv").touch()
    commands = (["predict", place, tmp_path / "new.csv", "--client", "north"], ["report", place, "--sites"])
    for command in (*commands, ["status", place], ["verify", place], ["compare", place, place], ["resume", place]):
        result = fedmpi(*command)
        assert (result.returncode, result.stdout) == (2, "")
        assert "only files of the ranks of this host (state/, audit/, trace/)" in result.stderr
        assert "on the host of rank 0" in result.stderr
    assert "checkpoint.resume=must" in result.stderr
