"""A run directory in which anything was altered, by one digit or byte, is found out; one that was not is verified."""

import json
import random
import shutil
from contextlib import contextmanager
from functools import partial

import pytest
from helpers import fedmpi
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.common.metrics_row import VARIES_WITH_RANKS
from fedmpi.runtime.execute import execute_run
from fedmpi.runtime.finished_runs import replay, verify
from fedmpi.runtime.record.run_dir import CHECKSUMS, compute_checksums

CONFIG = """\
rounds: 6
data: {source: digits, partition: {scheme: dirichlet, clients: 3}, validation: 0.1}
model: {name: "%s/net.py:net"}
method: {name: scaffold}
train: {batch_size: 200, momentum: 0.0}
evaluate: {every: 2, protocol: [global, personal], best: {metric: accuracy}}
record: {updates: gram}
analysis: [drift, features]
checkpoint: {every: 2, keep: 9}
"""
NET = """\
from torch import nn

def net(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes))
"""
LAST = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("verified")
    (place / "net.py").write_text(NET)
    (place / "c.yaml").write_text(CONFIG % place)
    for name, seed in (("one", 0), ("two", 1)):
        execute_run(config.load(place / "c.yaml", [f"output={place}/sweep", f"name={name}", f"seed={seed}"]))
    return place / "sweep" / "one"


@pytest.fixture
def copy(run, tmp_path):
    """The run, somewhere else."""
    return shutil.copytree(run, tmp_path / "copy")


@pytest.fixture(scope="module")
def replayed():
    return {}


@pytest.fixture
def once(run, replayed, tmp_path_factory, monkeypatch):
    """A replay of the run as it was stands for that of copies of which only results are altered."""
    real = replay.replay_rounds

    @contextmanager
    def again(path, trusted, overrides, *which):
        if which not in replayed:
            with real(run, trusted, overrides, *which) as (place, stopped):
                replayed[which] = shutil.copytree(place, tmp_path_factory.mktemp("again") / "x"), stopped
        yield replayed[which]

    monkeypatch.setattr(replay, "replay_rounds", again)


def check(path, **options):
    """(exit code, all that was said)."""
    said = []
    code = verify.verify_all(path, said.append, verify.VerifyOptions(trusted=True, **options))
    return code, "\n".join(said)


def compute_checksums_again(path):
    """What somebody does who knows how it is made."""
    (path / CHECKSUMS).write_text(json.dumps(compute_checksums(path)))


def change(path, line, key, value):
    """Change one value of one row; value: the new one, or a function of the old one."""
    lines = path.read_text().splitlines()
    row = json.loads(lines[line])
    lines[line] = json.dumps({**row, key: value(row[key]) if callable(value) else value})
    path.write_text("".join(f"{each}\n" for each in lines))


def nudged(value):
    """The same but for a digit."""
    if isinstance(value, str):
        return ("1" if value[0] != "1" else "2") + value[1:]
    if isinstance(value, list):
        return [*value[:-1], value[-1] + 1] if value else [0]
    if isinstance(value, dict):
        return {**value, "cosine": nudged(value["cosine"])}
    return value + 1 if isinstance(value, int) else value * (1 + 1e-9)


# ---- as it was ----
def test_all_rounds_are_verified_from_the_start_and_from_every_checkpoint(copy):
    code, said = check(copy, number=None)
    assert code == 0, said
    assert "ok 6 rounds replayed: the same bits and metrics\nverified" in said
    assert [line.split("round ")[1] for line in said.splitlines() if "replaying" in line] == [
        "1, from the start",
        "3, after checkpoint 1",
        "5, after checkpoint 3",
    ]


def test_without_trust_nothing_is_run(copy):
    with pytest.raises(UserError, match="names code that is not part of fedmpi"):
        verify.verify_all(copy, print, verify.VerifyOptions())


# ---- one byte, anywhere ----
def test_one_byte_of_any_file(copy, monkeypatch):
    """Wherever it stands; what rounds would say is left out."""
    monkeypatch.setattr(verify, "_replay_some_rounds", lambda *_: set())
    files = [copy / name for name in (*compute_checksums(copy)["files"], CHECKSUMS)]
    files += [*copy.glob("checkpoints/*"), *copy.glob("state/**/*.safetensors")]
    assert len(files) > 15
    draw = random.Random(0)
    for path in files:
        before = path.read_bytes()
        for at in {0, len(before) - 1, draw.randrange(len(before))}:
            path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
            code, said = check(copy)
            assert code == 1, (path, at, said)
            assert path.name in said, (path, at, said)
        path.write_bytes(before)
    assert "ALTERED" not in check(copy)[1]


def test_a_missing_and_an_additional_file_are_found(copy):
    (copy / "partition.npz").unlink()
    (copy / "faults.jsonl").write_text("")
    code, said = check(copy, number=1)
    assert code == 1
    assert "ALTERED partition.npz is missing since the run ended" in said
    assert "ALTERED faults.jsonl was added since the run ended" in said


# ---- by somebody who computes the checksums again ----
def test_every_figure_of_a_round_is_recomputed(run, tmp_path, once):
    """The checksums are computed again, so that only the replay can tell; it names the key and the right value."""
    altered = tmp_path / "copy"
    before = (run / "metrics.jsonl").read_text()
    row = json.loads(before.splitlines()[LAST])
    recomputed = [key for key in row if key != "round" and key not in VARIES_WITH_RANKS]
    assert {"loss", "accuracy", "train_loss", "cohort", "sha256", "personal_accuracy_worst_decile"} <= set(recomputed)
    shutil.copytree(run, altered)
    for key in recomputed:
        (altered / "metrics.jsonl").write_text(before)
        change(altered / "metrics.jsonl", LAST, key, nudged(row[key]))
        compute_checksums_again(altered)
        code, said = check(altered, number=1)
        assert code == 1, (key, said)
        was, now = verify._shorten_value(nudged(row[key])), verify._shorten_value(row[key])
        assert f"metrics.jsonl, round {LAST}: {key} is {was}, replaying gives {now}" in said


def test_a_round_that_was_altered_is_replayed_whatever_is_drawn(copy, monkeypatch, once):
    """Of a row whose digits differ from its checksum the replay says which figure is wrong, and what it should be."""
    monkeypatch.setattr(replay.SystemRandom, "sample", lambda self, items, n: items[:n])
    right = json.loads((copy / "metrics.jsonl").read_text().splitlines()[3])["accuracy"]
    change(copy / "metrics.jsonl", 3, "accuracy", 99.5)
    code, said = check(copy, number=1)
    assert code == 1
    assert "metrics.jsonl, round 3, has changed since the run ended" in said
    assert f"ALTERED metrics.jsonl, round 3: accuracy is 99.5, replaying gives {str(right)[:12]}" in said
    assert "ALTERED summary.json: " in said


def change_summary(run, part):
    facts = json.loads((run / "summary.json").read_text())
    facts[part]["accuracy"] += 1
    (run / "summary.json").write_text(json.dumps(facts, indent=2))
    return f"{facts[part]['accuracy']}, but metrics.jsonl gives"


def change_model(run, name, tensor):
    with safe_open(run / name, framework="pt") as file:
        about = file.metadata()
    tensors = load_file(run / name)
    tensors[tensor].view(-1)[0] += 1e-6
    save_file(tensors, run / name, about)


CLIENT = f"ALTERED clients.jsonl, round {LAST}, client 2, personal: %s is"
ALTERED = {
    **{
        f"a client's {key}": (lambda run, key=key: change(run / "clients.jsonl", -1, key, nudged), CLIENT % key)
        for key in ("loss", "accuracy", "samples")
    },
    "analysis": (
        lambda run: change(run / "analysis.jsonl", -1, "drift", nudged),
        f"ALTERED analysis.jsonl, round {LAST}: drift is",
    ),
    **{
        f"summary's {part}": (partial(change_summary, part=part), f"ALTERED summary.json: {part}.accuracy is ")
        for part in ("last", "best", "best_round", "mean_last_10")
    },
    # One weight is known by its hash; statistics of batch normalisation, which no hash has, by the replay.
    **{
        f"{tensor} of {name}": (partial(change_model, name=name, tensor=tensor), f"ALTERED {name}: ")
        for name in ("model.safetensors", "model-best.safetensors")
        for tensor in ("1.weight", "2.running_mean")
    },
}


@pytest.mark.parametrize("what", ALTERED)
def test_what_was_altered_is_found_although_the_seal_was_made_anew(copy, what, once):
    alter, message = ALTERED[what]
    more = alter(copy) or ""
    compute_checksums_again(copy)
    code, said = check(copy, number=None if "safetensors" in what else 1)
    assert code == 1
    assert message + more in said


def test_a_setting_that_was_changed_is_found(copy):
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("lr: 0.01", "lr: 0.02"))
    compute_checksums_again(copy)
    code, said = check(copy, number=1)
    assert code == 1
    assert "train.lr is 0.02 in config.yaml, but 0.01 in identity.json" in said
    assert "replaying gives" in said


# ---- what cannot be told ----
def test_without_a_seal_only_all_rounds_prove_something(copy, once):
    (copy / CHECKSUMS).unlink()
    code, said = check(copy, number=1)
    assert code == 2
    assert "there is no checksums.json" in said
    assert check(copy, number=None)[0] == 0


# ---- the checksum of the run ----
def test_a_published_checksum_is_compared(copy, once):
    noted = json.loads((copy / CHECKSUMS).read_text())["checksum"]
    code, said = check(copy, number=1, published=noted[:16].upper())
    assert code == 0
    assert said.endswith("by checksums, which do not reveal a change by someone who rewrites them, too")
    change(copy / "metrics.jsonl", 2, "wall_s", 0.001)
    compute_checksums_again(copy)
    assert check(copy, number=1)[0] == 0 or "summary.json: wall_s" in check(copy, number=1)[1]
    code, said = check(copy, number=1, published=noted[:16])
    assert code == 1
    assert f"not {noted[:16]}" in said


def test_a_resumed_run_has_a_new_checksum(copy):
    noted = json.loads((copy / CHECKSUMS).read_text())["checksum"]
    more = config.load(
        copy / "config.yaml", [f"output={copy.parent}", "name=copy", "checkpoint.resume=must", "rounds=8"]
    )
    execute_run(more)
    assert json.loads((copy / CHECKSUMS).read_text())["checksum"] != noted
    assert check(copy, number=2)[0] == 0


# ---- the command ----
def test_a_sweeps_directory(run, tmp_path):
    place = shutil.copytree(run.parent, tmp_path / "sweep")
    change(place / "two" / "metrics.jsonl", 1, "sent_bytes", 7)
    done = fedmpi("verify", place, "--rounds", "1", "--trust")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.endswith("2 runs: 1 verified; 1 altered (two)\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "0"], "--rounds: 0; allowed: a whole number from 1 on, or all"),
        (["--tolerance", "-1"], "Invalid value for '--tolerance'"),
        (["--checksum", ""], "--checksum: ''; needed: its first 8 or more digits"),
        (["--rounds", "1"], "is not a run directory"),
    ],
)
def test_mistakes(tmp_path, words, said):
    done = fedmpi("verify", tmp_path, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("train.schedule=cosine", "train.schedule: cosine has its course over all rounds"),
        ("method.name=ccvr", "method ccvr ends with the last round"),
    ],
)
def test_more_rounds_of_what_goes_by_their_number_are_another_experiment(tmp_path, more, why):
    """It was ALTERED to verify, and its rounds were not those of a run that was not stopped."""
    text = CONFIG.replace("%s/net.py:net", "logistic").replace("analysis: [drift, features]\n", "")
    (tmp_path / "c.yaml").write_text(text.replace("rounds: 6", "rounds: 2"))
    words = [f"output={tmp_path}", "name=a", more]
    execute_run(config.load(tmp_path / "c.yaml", words))
    words += ["rounds=4", "checkpoint.resume=must"]
    with pytest.raises(UserError, match=rf"cannot be resumed.*: rounds is 4, was 2 \({why}, so the completed rounds"):
        execute_run(config.load(tmp_path / "c.yaml", words))
    execute_run(config.load(tmp_path / "c.yaml", [*words, "checkpoint.changes=accept"]))
    code, said = check(tmp_path / "a", number=None)
    assert code == 2, said
