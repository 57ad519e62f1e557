"""`fedmpi verify` reports any alteration of a run directory, and verifies an unaltered one."""

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
data: {source: digits, partition: {scheme: dirichlet, clients: 3}, validation: 0.1, augment: [{random_crop: 8}]}
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
    """Copy the run to another directory."""
    return shutil.copytree(run, tmp_path / "copy")


@pytest.fixture(scope="module")
def replayed():
    return {}


@pytest.fixture
def once(run, replayed, tmp_path_factory, monkeypatch):
    """Use one replay of the unaltered run for all copies in which only results are altered."""
    real = replay.replay_rounds

    @contextmanager
    def again(path, trusted, overrides, *which):
        if which not in replayed:
            with real(run, trusted, overrides, *which) as (place, stopped):
                replayed[which] = shutil.copytree(place, tmp_path_factory.mktemp("again") / "x"), stopped
        yield replayed[which]

    monkeypatch.setattr(replay, "replay_rounds", again)


def check(path, **options):
    """Return the exit code and the printed lines."""
    output = []
    code = verify.verify_all(path, output.append, verify.VerifyOptions(trusted=True, **options))
    return code, "\n".join(output)


def compute_checksums_again(path):
    """Compute the checksums again, as an attacker could."""
    (path / CHECKSUMS).write_text(json.dumps(compute_checksums(path)))


def change(path, line, key, value):
    """Change one value of one row; value: the new value, or a function of the old one."""
    lines = path.read_text().splitlines()
    row = json.loads(lines[line])
    lines[line] = json.dumps({**row, key: value(row[key]) if callable(value) else value})
    path.write_text("".join(f"{each}\n" for each in lines))


def nudged(value):
    """Return the value with one digit changed."""
    if isinstance(value, str):
        return ("1" if value[0] != "1" else "2") + value[1:]
    if isinstance(value, list):
        return [*value[:-1], value[-1] + 1] if value else [0]
    if isinstance(value, dict):
        return {**value, "cosine": nudged(value["cosine"])}
    return value + 1 if isinstance(value, int) else value * (1 + 1e-9)


# ---- as it was ----
def test_all_rounds_can_be_verified(copy):
    code, output = check(copy, number=None)
    assert code == 0, output
    assert "ok 6 rounds replayed: the same bits and metrics\nverified" in output
    assert [line.split("round ")[1] for line in output.splitlines() if "replaying" in line] == [
        "1, from the start",
        "3, after checkpoint 1",
        "5, after checkpoint 3",
    ]


def test_without_trust_nothing_is_run(copy):
    with pytest.raises(UserError, match="names code that is not part of fedmpi"):
        verify.verify_all(copy, print, verify.VerifyOptions())


# ---- one byte, anywhere ----
def test_one_changed_byte_of_any_file_is_reported(copy, monkeypatch):
    """A changed byte at any position is reported; findings from replayed rounds are left out."""
    monkeypatch.setattr(verify, "_replay_some_rounds", lambda *_: set())
    files = [copy / name for name in (*compute_checksums(copy)["files"], CHECKSUMS)]
    files += [*copy.glob("checkpoints/*"), *copy.glob("state/**/*.safetensors")]
    assert len(files) > 15
    draw = random.Random(0)
    for path in files:
        before = path.read_bytes()
        for at in {0, len(before) - 1, draw.randrange(len(before))}:
            path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
            code, output = check(copy)
            assert code == 1, (path, at, output)
            assert path.name in output, (path, at, output)
        path.write_bytes(before)
    assert "ALTERED" not in check(copy)[1]


def test_missing_and_additional_files_are_reported(copy):
    (copy / "partition.npz").unlink()
    (copy / "faults.jsonl").write_text("")
    code, output = check(copy, number=1)
    assert code == 1
    assert "ALTERED partition.npz is missing since the run ended" in output
    assert "ALTERED faults.jsonl was added since the run ended" in output


# ---- by somebody who computes the checksums again ----
def test_every_value_of_a_round_is_recomputed(run, tmp_path, once):
    """The checksums are computed again, so only the replay finds it, with the key and the correct value."""
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
        code, output = check(altered, number=1)
        assert code == 1, (key, output)
        was, now = verify._shorten_value(nudged(row[key])), verify._shorten_value(row[key])
        assert f"metrics.jsonl, round {LAST}: {key} is {was}, but the replay gave {now}" in output


def test_altered_rounds_are_always_replayed(copy, monkeypatch, once):
    """If a row differs from its checksum, the replay names the wrong value and the correct one."""
    monkeypatch.setattr(replay.SystemRandom, "sample", lambda self, items, n: items[:n])
    right = json.loads((copy / "metrics.jsonl").read_text().splitlines()[3])["accuracy"]
    change(copy / "metrics.jsonl", 3, "accuracy", 99.5)
    code, output = check(copy, number=1)
    assert code == 1
    assert "metrics.jsonl, round 3, has changed since the run ended" in output
    assert f"ALTERED metrics.jsonl, round 3: accuracy is 99.5, but the replay gave {str(right)[:12]}" in output
    assert "ALTERED summary.json: " in output


def test_the_summary_contains_the_bytes_that_a_client_exchanges(run):
    """SCAFFOLD sends dw, dc and batch statistics, and receives w, c and batch statistics."""
    summary = json.loads((run / "summary.json").read_text())
    tensors = load_file(run / "model.safetensors").values()
    floats = sum(x.numel() for x in tensors if x.is_floating_point())
    for key in ("client_sent_bytes", "client_sent_bytes_max", "client_received_bytes"):
        assert 4 * (2 * floats - 12) <= summary[key] < 4 * (2 * floats + 10)


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
def test_alterations_are_found_despite_recomputed_checksums(copy, what, once):
    alter, message = ALTERED[what]
    more = alter(copy) or ""
    compute_checksums_again(copy)
    code, output = check(copy, number=None if "safetensors" in what else 1)
    assert code == 1
    assert message + more in output


def test_a_changed_setting_is_reported(copy):
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("lr: 0.01", "lr: 0.02"))
    compute_checksums_again(copy)
    code, output = check(copy, number=1)
    assert code == 1
    assert "train.lr is 0.02 in config.yaml, but 0.01 in identity.json" in output
    assert "but the replay gave" in output


# ---- what cannot be told ----
def test_without_checksums_all_rounds_must_be_replayed(copy, once):
    (copy / CHECKSUMS).unlink()
    code, output = check(copy, number=1)
    assert code == 2
    assert "checksums.json is missing" in output
    assert check(copy, number=None)[0] == 0


# ---- the checksum of the run ----
def test_a_published_checksum_is_compared(copy, once):
    noted = json.loads((copy / CHECKSUMS).read_text())["checksum"]
    code, output = check(copy, number=1, published=noted[:16].upper())
    assert code == 0
    assert output.endswith("by checksums, which anyone who changes a file can also rewrite")
    change(copy / "metrics.jsonl", 2, "wall_s", 0.001)
    compute_checksums_again(copy)
    assert check(copy, number=1)[0] == 0 or "summary.json: wall_s" in check(copy, number=1)[1]
    code, output = check(copy, number=1, published=noted[:16])
    assert code == 1
    assert f"not {noted[:16]}" in output


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
    result = fedmpi("verify", place, "--rounds", "1", "--trust")
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stdout.endswith("2 runs: 1 verified; 1 altered (two)\n")


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--rounds", "0"], "--rounds: 0 is not allowed; must be a positive integer, or all"),
        (["--tolerance", "-1"], "Invalid value for '--tolerance'"),
        (["--checksum", ""], "--checksum:  is not allowed; must be at least the first 8 digits"),
        (["--rounds", "1"], "is not a run directory"),
    ],
)
def test_mistakes(tmp_path, words, output):
    result = fedmpi("verify", tmp_path, *words)
    assert result.returncode == 2
    assert output in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("train.schedule=cosine", "train.schedule: cosine depends on the total number of rounds"),
        ("method.name=ccvr", "method ccvr calibrates the model in the last round"),
    ],
)
def test_more_rounds_change_the_experiment_if_settings_depend_on_them(tmp_path, more, why):
    """Otherwise verify would report it as ALTERED, as its rounds differ from those of an uninterrupted run."""
    text = CONFIG.replace("%s/net.py:net", "logistic").replace("analysis: [drift, features]\n", "")
    (tmp_path / "c.yaml").write_text(text.replace("rounds: 6", "rounds: 2"))
    words = [f"output={tmp_path}", "name=a", more]
    execute_run(config.load(tmp_path / "c.yaml", words))
    words += ["rounds=4", "checkpoint.resume=must"]
    with pytest.raises(UserError, match=rf"cannot be resumed.*: rounds is 4, was 2 \({why}, so the completed rounds"):
        execute_run(config.load(tmp_path / "c.yaml", words))
    execute_run(config.load(tmp_path / "c.yaml", [*words, "checkpoint.changes=accept"]))
    code, output = check(tmp_path / "a", number=None)
    assert code == 2, output
