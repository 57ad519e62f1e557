"""Runs with differential privacy of clients: what their directories reveal, epsilon, the noise of resumed runs."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import yaml
from helpers import fedmpi, prepare, small_settings
from test_client_level import make_settings, run

from fedmpi.common.errors import UserError
from fedmpi.engine.scheduler import draw_cohort
from fedmpi.method import Method
from fedmpi.methods import registry
from fedmpi.privacy.accountant import Sampling, compute_epsilon
from fedmpi.privacy.budget import Guarantee, PrivacyBudget
from fedmpi.runtime import private_runs

POISSON = {"cohort": {"sampling": "poisson", "fraction": 0.3, "weighting": "uniform"}}
DP = {"unit": "client", "clip": 0.5, "noise_multiplier": 0.8, "delta": 0.01}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a config and returns its path; the noise key is in `key`."""

    def write(name="run", dp=None, **changes):
        tree = {
            "name": name,
            "rounds": 4,
            "output": str(tmp_path),
            "report": False,
            "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 10}},
            "model": {"name": "logistic"},
            "method": {"name": "fedavg"},
            "train": {"batch_size": 64, "lr": 0.1},
            "cohort": {"weighting": "uniform"},
            "privacy": {
                "dp": {k: v for k, v in (DP | (dp or {})).items() if v is not None},
                "noise_file": str(tmp_path / "key"),
            },
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree | changes))
        return path

    return write


def rows(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def succeed(*words):
    done = fedmpi(*words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def refuse(*words, code=2):
    """Return the one message of a command that is refused."""
    done = fedmpi(*words)
    assert done.returncode == code, done.stderr[-3000:]
    errors = [line for line in done.stderr.splitlines() if line.startswith("fedmpi: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return errors[0]


# ---- Poisson cohorts ----
def test_poisson_cohorts():
    drawn = [draw_cohort(3, t, 10, 0.1, "poisson") for t in range(4000)]
    counts = Counter(k for cohort in drawn for k in cohort)
    assert all(abs(counts[k] - 400) < 5 * 360**0.5 for k in range(10))
    empty = sum(not cohort for cohort in drawn)
    assert abs(empty - 4000 * 0.9**10) < 5 * (4000 * 0.9**10 * (1 - 0.9**10)) ** 0.5
    pairs = sum({0, 1} <= set(cohort) for cohort in drawn)
    assert abs(pairs - 40) < 5 * 40**0.5
    assert drawn[:50] == [draw_cohort(3, t, 10, None, "poisson", 1) for t in range(50)]
    assert drawn[:50] != [draw_cohort(3, t, 10, 0.1, "poisson", attempt=1) for t in range(50)]


def test_a_round_without_clients():
    it = run(make_settings(cohort={"sampling": "poisson", "fraction": 0.05}, rounds=12))
    cohorts = [it.fed.scheduler.cohort(t) for t in range(12)]
    assert [] in cohorts
    assert [row["round"] for row in it.rows] == list(range(12))
    assert it.w.isfinite().all()


def test_a_secret_decides_who_takes_part(write, tmp_path):
    """Two runs with the same config, seed and key have different cohorts, and so have other models without noise."""
    config = write(dp={"noise_multiplier": 1e-6}, **POISSON)
    for name in ("one", "two"):
        succeed("run", config, f"name={name}")
    first, second = ({row["sha256"] for row in rows(tmp_path / name)} for name in ("one", "two"))
    assert not first & second


@pytest.mark.parametrize("cohort", [POISSON["cohort"], {"fraction": 0.3, "weighting": "uniform"}])
def test_nothing_tells_who_took_part(write, tmp_path, cohort):
    done = succeed("run", write(cohort=cohort, report=True, trace=True, method={"name": "scaffold"}))
    place = tmp_path / "run"
    for row in rows(place):
        assert set(row) == {
            *("round", "loss", "accuracy", "epsilon", "clip", "wall_s", "sha256", "evaluate_s", "class_accuracy"),
        }
    summary = json.loads((place / "summary.json").read_text())
    assert not [
        name for name in ("up_parameters", "down_parameters", "sent_bytes", "received_bytes") if summary.get(name)
    ]
    names = {path.relative_to(place).parts[0] for path in place.rglob("*") if path.is_file()}
    assert not names & {"trace", "clients.jsonl", "update_stats.jsonl", "analysis.jsonl", "faults.jsonl"}
    assert names == {
        *("checkpoints", "checksums.json", "config.yaml", "environment.json", "identity.json", "lock", "log.txt"),
        *("metrics.jsonl", "model.safetensors", "partition.json", "partition.npz", "preprocessing.json"),
        *("privacy.json", "releases.jsonl", "report.html", "summary.json", "state"),
    }
    for text in (done.stdout, done.stderr, (place / "log.txt").read_text(), (place / "report.html").read_text()):
        assert not re.search(r"client \d", text)
        assert "train_loss" not in text
        assert '"cohort"' not in text
    for command in ("status", "report"):
        succeed(command, place)


# ---- the budget ----
@pytest.mark.parametrize(
    ("cohort", "sampling"),
    [
        (POISSON["cohort"], Sampling("poisson", 0.3)),
        ({"fraction": 0.3, "weighting": "uniform"}, Sampling("without_replacement", size=3, population=10)),
        ({"weighting": "uniform"}, Sampling("none")),
    ],
)
def test_epsilon_of_each_round(write, tmp_path, cohort, sampling):
    done = succeed("run", write(cohort=cohort))
    found = [row["epsilon"] for row in rows(tmp_path / "run")]
    assert found == [compute_epsilon(0.8, 0.01, sampling, steps) for steps in (1, 2, 3, 4)]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epsilon"] == found[-1]
    assert done.stdout.count(f"epsilon {found[-1]:.4g} at delta 0.01") == 2


def test_epsilon_of_cycles(write, tmp_path):
    succeed("run", write(cohort={"sampling": "cyclic", "fraction": 0.5, "weighting": "uniform"}))
    steps = [1, 1, 2, 2]
    assert [row["epsilon"] for row in rows(tmp_path / "run")] == [
        compute_epsilon(0.8, 0.01, Sampling("none"), n) for n in steps
    ]


def test_the_run_ends_before_max_epsilon(write, tmp_path):
    epsilons = [compute_epsilon(0.8, 0.01, Sampling("poisson", 0.3), steps) for steps in (1, 2, 3, 4)]
    limit = (epsilons[1] + epsilons[2]) / 2
    done = succeed("run", write(dp={"max_epsilon": limit}, **POISSON))
    place = tmp_path / "run"
    assert [row["epsilon"] for row in rows(place)] == epsilons[:2]
    assert len(rows(place, "releases.jsonl")) == 2
    reason = json.loads((place / "summary.json").read_text())["exit_reason"]
    assert reason == f"budget_spent: a further round would exceed epsilon {limit:g}"
    assert reason in done.stdout
    succeed("verify", place)


def test_a_given_epsilon_is_reached(write, tmp_path):
    config = write(dp={"epsilon": 3.0, "noise_multiplier": None}, **POISSON)
    succeed("run", config)
    found = [row["epsilon"] for row in rows(tmp_path / "run")]
    assert 2.99 < found[-1] <= 3.0
    assert len(found) == 4
    succeed("verify", tmp_path / "run")
    assert "rounds" in refuse("resume", tmp_path / "run", "rounds=6")
    assert len(rows(tmp_path / "run", "releases.jsonl")) == 4


@pytest.mark.parametrize("sampling", [Sampling("poisson", 0.3), Sampling("none")])
def test_repeated_rounds_count(sampling):
    guarantee, written = Guarantee(0.8, 0.01, sampling), []
    budget = PrivacyBudget(guarantee, None, [0, 1, 2], lambda *row: written.append(row))
    assert [budget.record_release(t) for t in (1, 2, 3)] == [1, 1, 0]
    assert written == [(1, 1), (2, 1), (3, 0)]
    limit = compute_epsilon(0.8, 0.01, sampling, 6)
    assert budget.epsilon == limit
    assert not PrivacyBudget(guarantee, limit, budget.rounds).permits_round(4)
    assert PrivacyBudget(guarantee, limit, budget.rounds[:5]).permits_round(4)


def test_a_repeated_round_has_another_cohort():
    """With the same cohort, epsilon would have to count both releases as one with less noise."""
    it = prepare(make_settings(cohort={"sampling": "poisson", "fraction": 0.5}, rounds=6))
    scheduler = it.fed.scheduler
    plain = [scheduler.cohort(t) for t in range(6)]
    draws = {"cohort_seed": scheduler.cohort_seed, "releases": [0, 1, 2, 3, 2, 3], "repeats_run": False}
    private_runs.set_cohort_draws(it.fed, draws)
    scheduler.first_round = 3  # the run is resumed after round 2
    resumed = [scheduler.cohort(t) for t in range(6)]
    private_runs.set_cohort_draws(it.fed, draws | {"repeats_run": True})
    repeated = [scheduler.cohort(t) for t in range(6)]
    again = {
        (t, a): draw_cohort(scheduler.cohort_seed, t, 7, 0.5, "poisson", None, a) for t in (2, 3) for a in (0, 1, 2)
    }
    assert len({*map(tuple, again.values())}) == 6
    assert resumed == [*plain[:2], again[2, 1], again[3, 2], *plain[4:]]
    assert repeated == [*plain[:2], again[2, 1], again[3, 1], *plain[4:]]


@pytest.mark.parametrize("cohort", [POISSON["cohort"], {"weighting": "uniform"}])
def test_a_run_that_is_resumed_after_a_release(write, tmp_path, cohort):
    """The newest checkpoint is lost after rounds 2 and 3 were released: both count, and have other noise."""
    place = tmp_path / "run"
    dp = {"adaptive": {"quantile": 0.5, "count_noise": 1.0}}
    succeed("run", write(dp=dp, cohort=cohort, checkpoint={"every": 1, "keep": 4}))
    before = rows(place)
    for t in (2, 3):
        (place / "checkpoints" / f"{t:06}.safetensors").unlink()
    (place / "summary.json").unlink()
    succeed("resume", place)
    after = rows(place)
    sampling = Sampling("poisson", 0.3) if "sampling" in cohort else Sampling("none")
    assert [row["epsilon"] for row in after] == [compute_epsilon(0.8, 0.01, sampling, steps) for steps in (1, 2, 5, 6)]
    assert [row["sha256"] for row in after[:2]] == [row["sha256"] for row in before[:2]]
    assert not {row["sha256"] for row in after[2:]} & {row["sha256"] for row in before}
    assert [tuple(row.values()) for row in rows(place, "releases.jsonl")] == [
        *((0, 0), (1, 0), (2, 0), (3, 0)),
        *((2, 1), (3, 1)),
    ]
    verified = succeed("verify", place, "--rounds", "all")
    assert "4 rounds replayed: the same bits" in verified.stdout
    succeed("replay", place)
    assert len(rows(place, "releases.jsonl")) == 6
    assert not (tmp_path / "run-replay" / "releases.jsonl").exists()


# ---- verification ----
def test_verification_needs_the_key(write, tmp_path):
    place, key = tmp_path / "run", tmp_path / "key"
    succeed("run", write(**POISSON))
    assert "same bits" in succeed("verify", place).stdout
    own = key.read_text()
    key.write_text("another secret of forty characters......" * 2)
    done = fedmpi("verify", place)
    assert done.returncode == 2
    assert "cannot tell: no round was replayed, because the noise of this run cannot be drawn again" in done.stdout
    assert "does not contain the key with which" in done.stdout
    key.unlink()
    done = fedmpi("verify", place)
    assert done.returncode == 2
    assert f"{key} does not exist" in done.stdout
    assert not key.exists()
    assert "does not exist" in refuse("replay", place)
    key.write_text(own)
    key.chmod(0o600)
    succeed("verify", place)


def test_a_run_is_resumed_with_its_own_key_only(write, tmp_path):
    succeed("run", write())
    (tmp_path / "key").write_text("another secret of forty characters......" * 2)
    assert "does not contain the key" in refuse("resume", tmp_path / "run", "rounds=6")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("seed=1", "seed"),
        ("privacy.dp.clip=0.6", "privacy.dp.clip"),
        ("train.lr=0.2", "train.lr"),
        ("data.partition.clients=11", "data.partition.clients"),
        ("cohort.fraction=0.5", "cohort.fraction"),
    ],
)
def test_noise_is_not_drawn_again_for_another_run(write, tmp_path, change, name):
    succeed("run", write())
    message = refuse("run", write(), "name=again", f"privacy.repeat={tmp_path / 'run'}", change)
    assert "two different results with the same noise would reveal data" in message
    assert name in message


def test_a_run_whose_noise_cannot_be_drawn_again(write, tmp_path):
    succeed("run", write())
    repeat = f"privacy.repeat={tmp_path / 'run'}"
    assert "no release of round 4; set rounds" in refuse("run", write(), "name=again", repeat, "rounds=5")
    message = refuse("run", write(), "name=other", f"privacy.repeat={tmp_path / 'nothing'}")
    assert "is no directory of a run with differential privacy of clients" in message


# ---- what is refused ----
@pytest.mark.parametrize(
    ("dp", "changes", "message"),
    [
        ({"noise_multiplier": 0}, {}, "privacy.dp.noise_multiplier"),
        ({"noise_multiplier": -1}, {}, "privacy.dp.noise_multiplier"),
        ({"epsilon": 1.0}, {}, "epsilon"),
        ({"noise_multiplier": None}, {}, "noise_multiplier"),
        ({"delta": 0.1}, {}, "privacy.dp.delta: 0.1 is not allowed with 10 clients; must be below 1 / 10"),
        ({"clip": 0}, {}, "privacy.dp.clip"),
        ({"adaptive": {"count_noise": 0.3}}, {}, "privacy.dp.adaptive.count_noise: 0.3 is too small"),
        ({"weight_cap": 10}, {}, "weight_cap has no effect with cohort.weighting: uniform"),
        ({}, {"cohort": {"weighting": "samples"}}, "set cohort.weighting: uniform, or privacy.dp.weight_cap"),
        ({"weight_cap": 10}, {"cohort": {"weighting": "samples"}, "method": {"name": "feddyn"}}, "equal weights"),
        ({}, {"server": {"rule": "trimmed_mean"}}, "server.rule: trimmed_mean"),
        ({}, {"analysis": ["drift"]}, "analysis: [drift]"),
        ({}, {"evaluate": {"protocol": ["global", "personal"]}}, "evaluate.protocol: [global, personal]"),
        ({}, {"evaluate": {"protocol": ["global", "ft(1)"]}}, "evaluate.protocol"),
        ({}, {"evaluate": {"best": {"metric": "accuracy"}}, "VALIDATION": 0.1}, "evaluate.best.metric: accuracy"),
        ({}, {"comm": {"compression": "int8"}}, "comm.compression: int8"),
        ({}, {"record": {"updates": "gram"}}, "record.updates: gram"),
        ({}, {"faults": {"on_bad_update": "drop"}}, "faults.on_bad_update: drop"),
        ({}, {"faults": {"on_client_error": "drop"}}, "faults.on_client_error: drop"),
        ({}, {"faults": {"max_norm": 3.0}}, "faults.max_norm: 3.0"),
        ({}, POISSON | {"faults": {"on_lost_rank": "drop"}}, "faults.on_lost_rank: drop"),
        ({}, {"task": {"name": "classification", "class_weights": "balanced"}}, "task.class_weights: balanced"),
        ({"mechanism": "banded"}, {}, "cohort.sampling"),
    ],
)
def test_refused_settings(write, dp, changes, message):
    changes = dict(changes)
    if validation := changes.pop("VALIDATION", None):
        changes["data"] = {"source": "digits", "partition": {"scheme": "iid", "clients": 10}, "validation": validation}
    assert message in refuse("run", write(dp=dp, **changes))


READS_MORE = {
    **dict.fromkeys(("ccvr", "feddisco", "fedpac"), "needs the label counts of all clients"),
    **dict.fromkeys(("fedcm", "fedexp", "fedfomo", "fedgh", "fedld", "fednova"), "reads single uploads at the server"),
    "apfl": "reads single values of alpha at the server",
    "fedproto": "reads single values of present, protos at the server",
}


def settings_of_method(name):
    changes = {"cohort": {"fraction": 1.0, "weighting": "uniform"}, "evaluate": {"protocol": ["global"]}}
    return small_settings(name, "norm", rounds=2, privacy={"dp": DP}, **changes)


@pytest.mark.parametrize("name", sorted(READS_MORE))
def test_methods_that_read_more_than_means_are_refused(name):
    with pytest.raises(UserError, match=f"method.name: {name} {READS_MORE[name]}"):
        run(settings_of_method(name))


@pytest.mark.filterwarnings("ignore:method .* evaluate.protocol does not evaluate them")
@pytest.mark.parametrize("name", sorted({*registry} - {*READS_MORE}))
def test_methods_get_noisy_means_of_all_that_clients_send(name):
    it = run(settings_of_method(name))
    packing = it.experiment.messages.upload_layout(1).packing
    sent = {slot for slot, size in packing.shapes.items() if size != (0,)} - {"_loss", "_seconds", "_flag"}
    assert sent <= {*it.releases[1]} <= {*it.experiment.method.sends, "_b"}
    assert len(it.releases) == 2
    assert [row["epsilon"] for row in it.rows] == [compute_epsilon(0.8, 0.01, Sampling("none"), n) for n in (1, 2)]
    assert not {"train_loss", "updates"} & {*it.rows[1]}


def test_the_guarantee_of_a_run_cannot_change_when_it_is_resumed(write, tmp_path):
    done = fedmpi("run", write())
    assert done.returncode == 0, done.stderr
    done = fedmpi("resume", tmp_path / "run", "rounds=5", "privacy.dp.noise_multiplier=2", "checkpoint.changes=accept")
    assert done.returncode == 2
    assert "began with another noise_multiplier (0.8, now 2.0)" in done.stderr
    done = fedmpi("resume", tmp_path / "run", "rounds=5")
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Curious(Method):
    """A method whose `aggregate` reads something about single clients, although it declares that it reads means."""

    reads: str = "clients"
    mean_only_slots: ClassVar = {"dw": ("p",)}

    def aggregate(self, server, updates):
        if self.reads == "label_counts":
            server.label_counts.sum()
        elif self.reads == "other weights":
            updates.mean("dw", torch.ones(len(updates), dtype=torch.float64))
        elif self.reads in ("gram", "inner_products", "trimmed_mean"):
            getattr(updates, self.reads)(updates.mean("dw"))
        else:
            getattr(updates, self.reads)
        return updates.mean("dw"), server.state


@pytest.mark.parametrize(
    "reads", ["clients", "n", "dw", "other weights", "gram", "inner_products", "trimmed_mean", "label_counts"]
)
def test_a_method_that_breaks_its_declaration(reads):
    name = f"{__file__}:Curious"
    config = make_settings(method=name, options={"reads": reads})
    with pytest.raises(UserError, match=r"has only the mean of each slot|server\.label_counts is not available"):
        run(config)
