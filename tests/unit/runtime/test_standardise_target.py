"""data.standardise_target: training uses standardised targets; metrics and predictions have the original unit."""

import csv
import json
import warnings

import numpy as np
import pytest
import torch
from helpers import fedmpi

import fedmpi as package
from fedmpi import config
from fedmpi.comm.base import SingleProcess
from fedmpi.common.errors import UserError
from fedmpi.common.target_scale import TargetScale, sum_targets
from fedmpi.runtime import build_data
from fedmpi.tasks.regression import Regression, StandardisedRegression

PRICES = """\
rounds: 4
data: {source: table, root: ROOT, label_column: price, target: number, WHERE}
model: {name: logistic}
task: {name: regression, metrics: [mae, rmse, mse, r2]}
method: {name: fedavg}
train: {lr: 0.1, batch_size: 8, epochs: 5}
compute: {threads: 1}
evaluate: {protocol: [global]}
"""
NO_SITES = "path: all.csv, drop: [town], partition: {scheme: iid, clients: 2}"
POOL = "path: all.csv, standardise: pooled, site_column: town, partition: {scheme: site}"
ONE_SITE = POOL.replace("site}", "site, only: [a]}").replace("pooled", "site")


@pytest.fixture
def folder(tmp_path):
    """Write a table of prices of 15,000 to 500,000, whose level differs between two towns."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2)).round(3)
    town = np.arange(120) % 2
    price = (150_000 + 150_000 * town + 60_000 * x[:, 0] - 20_000 * x[:, 1]).round()
    lines = [f"{'ab'[t]},{t},{a},{b},{p:.0f}" for t, (a, b), p in zip(town, x, price, strict=True)]
    (tmp_path / "all.csv").write_text("\n".join(["town,big,x,z,price", *lines]) + "\n")
    for k, name in enumerate("ab"):
        (tmp_path / f"{name}.csv").write_text("\n".join(["town,big,x,z,price", *lines[k::2]]) + "\n")
    return tmp_path


def load(folder, how, where=POOL, *more):
    (folder / "run.yaml").write_text(PRICES.replace("ROOT", str(folder)).replace("WHERE", where))
    return config.load(
        folder / "run.yaml", [f"output={folder}/runs", "name=r", f"data.standardise_target={how}", *more]
    )


def targets_of(shards):
    return torch.cat([shard.y[shard.index] for shard in shards])


# ---- the scale ----
def test_the_scale_is_mean_and_deviation_of_counted_targets():
    y = torch.tensor([[1.0, 4.0], [3.0, float("nan")], [5.0, 8.0]])
    rows = [sum_targets(part, ~part.isnan()) for part in (y[:1], y[1:])]
    scale = TargetScale.from_sums(rows)
    assert scale.mean == (3.0, 6.0)
    assert scale.deviation == pytest.approx((np.sqrt(8 / 3), 2.0))
    assert torch.allclose(
        scale.to_original_units((y - torch.tensor(scale.mean)) / torch.tensor(scale.deviation)), y, equal_nan=True
    )
    assert TargetScale.from_sums([sum_targets(torch.full((3,), 7.1), torch.ones(3).bool())]).deviation == (1.0,)
    assert TargetScale.from_dict(json.loads(json.dumps({"mean": scale.mean, "deviation": scale.deviation}))) == scale


@pytest.mark.parametrize("how", ["pooled", "site"])
def test_pooled_and_site_scales_in_a_table_and_in_silos(folder, how):
    plain, data = (build_data.build_partitioned_data(load(folder, each)) for each in ("false", how))
    for k in range(2):
        y, new = (targets_of([each.train[k]]) for each in (plain, data))
        assert torch.equal(new[:, 0], y)
        fitted = targets_of(plain.train.values()) if how == "pooled" else y
        for column, value in ((1, fitted.double().mean()), (2, fitted.double().std(correction=0))):
            assert new[:, column].tolist() == pytest.approx([value.item()] * len(y), rel=1e-6)
    if how == "site":  # rows of the global test set by their own site
        means = torch.tensor([data.target_scales[name].mean[0] for name in "ab"])
        assert set(data.global_test.y[:, 1].tolist()) == set(means.tolist())
    silos = "silos: [a, b], path: '{site}.csv', drop: [town]"
    by_silo = build_data.build_silo_data(load(folder, how, silos), SingleProcess(torch.device("cpu")))
    assert by_silo.target_shape == data.target_shape == (3,)
    for k in range(2):
        for part in ("train", "test"):
            results, expected = (targets_of([getattr(each, part)[k]]) for each in (by_silo, data))
            assert torch.allclose(results, expected, rtol=1e-6)


# ---- the task ----
def test_the_loss_is_standardised_and_metrics_are_in_the_original_unit():
    rng = torch.Generator().manual_seed(0)
    y = 1000 + 50 * torch.randn(12, 2, generator=rng)
    f = torch.randn(12, 2, generator=rng)
    scale = TargetScale((1000.0, 990.0), (50.0, 40.0))
    standard = (y - torch.tensor([1000.0, 990.0])) / torch.tensor([50.0, 40.0])
    names = ("mse", "rmse", "mae", "r2")
    plain, task = Regression(2, names), StandardisedRegression(2, names)
    assert task.loss(lambda x: f, f, scale.stack_with_targets(y)).item() == pytest.approx(
        plain.loss(lambda x: f, f, standard).item()
    )
    assert task.metrics(f, scale.stack_with_targets(y)) == pytest.approx(
        plain.metrics(scale.to_original_units(f), y), rel=1e-5
    )
    assert task.check(scale.stack_with_targets(y), (2,)) == ""
    assert "same number of components" in task.check(scale.stack_with_targets(y), (3,))


@pytest.mark.parametrize("ignore", [-999, "nan"])
def test_ignored_targets_are_excluded(ignore):
    y = torch.tensor([1.0, 3.0, float(ignore), 5.0])
    f, scale = torch.tensor([0.5, 0.1, 9.0, -1.0]), TargetScale((3.0,), (2.0,))
    names = ("mse", "rmse", "mae", "r2")
    task, stored = StandardisedRegression(1, names, ignore), torch.tensor([0, 1, 3])
    complete = StandardisedRegression(1, names)
    assert task.loss(lambda x: f, f, scale.stack_with_targets(y)) == complete.loss(
        lambda x: f[stored], f[stored], scale.stack_with_targets(y[stored])
    )
    assert task.metrics(f, scale.stack_with_targets(y)) == pytest.approx(
        complete.metrics(f[stored], scale.stack_with_targets(y[stored]))
    )
    assert float(task.batch_weight(scale.stack_with_targets(y))) == 3


# ---- a run ----
def words_of(folder, how):
    load(folder, how)
    return [folder / "run.yaml", f"output={folder}/runs", f"data.standardise_target={how}"]


def succeed(*words):
    result = fedmpi(*words)
    assert result.returncode == 0, result.stderr
    return result


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("how", ["pooled", "site"])
def test_metrics_and_predictions_are_in_the_original_unit(folder, how):
    run = folder / "runs/r"
    succeed("run", *words_of(folder, how), "name=r")
    row = rows_of(run)[-1]
    assert row["rmse"] < 10_000  # the noise-free plane is found; targets have a deviation of 98,000
    assert row["mse"] == pytest.approx(row["rmse"] ** 2)
    assert row["r2"] > 0.99
    succeed("predict", run, folder / "all.csv", "--to", folder / "out.csv")
    with (folder / "all.csv").open() as given, (folder / "out.csv").open() as file:
        wanted = np.array([float(each["price"]) for each in csv.DictReader(given)])
        results = np.array([float(each["prediction"]) for each in csv.DictReader(file)])
    assert np.sqrt(np.mean((wanted - results) ** 2)) < 10_000
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        module = package.load(run)
    assert "the model returns standardised targets" in str(messages[0].message)
    assert module.predict(folder / "all.csv")["prediction"] == pytest.approx(results, rel=1e-5)


def test_rows_of_an_unknown_site_need_its_name(folder):
    succeed("run", *words_of(folder, "site"), "name=r", "rounds=1")
    (folder / "new.csv").write_text("big,x,z\n0,0,0\n")
    predict = ("predict", folder / "runs/r", folder / "new.csv", "--to", folder / "o.csv")
    result = fedmpi(*predict)
    assert result.returncode == 2
    assert "--site NAME" in result.stderr
    levels = []
    for site in "ab":
        succeed(*predict, "--site", site)
        levels.append(float((folder / "o.csv").read_text().splitlines()[1].split(",")[1]))
    assert levels[1] - levels[0] > 100_000


@pytest.mark.parametrize(
    ("how", "where", "more", "says"),
    [
        ("pooled", POOL, ["task.name=classification", "task.metrics=null"], "needs task.name: regression"),
        ("pooled", ONE_SITE, [], "set data.standardise_target: site"),
        ("site", NO_SITES, [], "or data.standardise_target: pooled"),
    ],
)
def test_settings_that_cannot_standardise_targets_are_refused(folder, how, where, more, says):
    with pytest.raises(UserError, match=says):
        build_data.build_partitioned_data(load(folder, how, where, *more))
