"""Sweep files: their runs and settings, published values, and mistakes."""

import math

import pytest

from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.runtime import build_data
from fedmpi.sweeps import expand

BASE = """\
name: table
data: {source: digits, partition: {scheme: dirichlet, clients: 4, alpha: 0.3}}
model: {name: mlp}
method: {name: fedavg}
train: {lr: 0.1}
"""
TUNED = "grid: {m: {A: {}, B: {}}, seed: [0]}\ntune: {grid: {train.lr: [1, 2]}, %s}\n"
METHODS = "grid: {method: {A: {method: {name: fedavg}}, B: {method: {name: fedprox}}}, seed: [0, 1, 2]}\n"


def write(tmp_path, text, name="sweep.yaml", base=BASE):
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / name).write_text("base: [base.yaml]\n" + text)
    return tmp_path / name


def test_there_is_one_run_per_combination_of_labels(tmp_path):
    (tmp_path / "fedprox.yaml").write_text("method: {name: fedprox, mu: 0.5}\n")
    (tmp_path / "fedavg.yaml").write_text("method: {name: fedavg}\n")
    text = """\
grid:
  method: [fedavg.yaml, fedprox.yaml]
  data.partition.alpha: [0.1, 1]
  lr: {slow: {train: {lr: 0.01}}, fast: {train: {lr: 0.5, epochs: 3}}}
  seed: [0, 1, 2]
"""
    sweep = expand.load_sweep(write(tmp_path, text), ["rounds=7"])  # settings that no axis sets can be overridden
    runs = list(sweep.first_stage_runs())
    assert len(runs) == 2 * 2 * 2 * 3
    labels, settings = runs[-1]
    assert labels == {"method": "fedprox", "data.partition.alpha": "1", "lr": "fast", "seed": "2"}
    assert (settings.method.name, settings.method.options) == ("fedprox", {"mu": 0.5})
    assert settings.data.partition.options == {"alpha": 1}
    assert (settings.train.lr, settings.train.epochs, settings.seed, settings.rounds) == (0.5, 3, 2, 7)
    assert (str(settings.output), settings.name) == ("runs/sweep", "fedprox_alpha-1_fast_seed-2")
    assert settings.data.partition.clients == 4  # from the file, since no axis sets it
    assert len({each.name for _, each in runs}) == len(runs)
    covering_labels = list(sweep.covering_labels())
    assert {pair for each in covering_labels for pair in each.items()} == {p for each, _ in runs for p in each.items()}
    assert len(covering_labels) < len(runs) / 3


def test_a_sweep_does_not_inherit_the_name_of_a_run(tmp_path):
    """Otherwise it would write into the directory of that run. The name of a sweep in `base` is inherited."""

    def sweep_name(file, *overrides):
        sweep = expand.load_sweep(file, overrides)
        return sweep.run_settings(sweep.first_stage_labels()[0]).output.name

    file = write(tmp_path, "grid: {seed: [0, 1]}\n", name="seeds.yaml")
    assert (sweep_name(file), sweep_name(file, "name=other")) == ("seeds", "other")
    assert config.load(tmp_path / "base.yaml").name == "table"
    write(tmp_path, "name: mine\ngrid: {seed: [0, 1]}\n", name="seeds.yaml")
    (tmp_path / "part.yaml").write_text("base: [seeds.yaml]\ninclude: {seed: 0}\n")
    assert (sweep_name(file), sweep_name(tmp_path / "part.yaml")) == ("mine", "mine")


def test_published_values_are_read(tmp_path):
    text = """\
grid: {method: {A: {}, B: {method: {name: fedprox}}}, data.partition.alpha: [0.1, 0.5], seed: [0, 1]}
published:
  source: Somebody, table 1
  metric: accuracy
  values: {A: {"0.1": 42.3, "0.5": [73.9, 0.4]}}
"""
    (sweep,) = expand.load_sweep(write(tmp_path, text)).published
    assert (sweep.source, sweep.axes) == ("Somebody, table 1", ("method", "data.partition.alpha"))
    assert sweep.values["A", "0.5"] == (73.9, 0.4)
    assert math.isnan(sweep.values["A", "0.1"][1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "grid: {seed: [0, 1]}\n",
            r"sweep\.yaml:2: grid: .* is a sweep of several runs; train them with `fedmpi sweep",
        ),
        ("seed: [0, 1]\n", r"must be a whole number .* write grid: \{seed: \[0, 1\]\} and use fedmpi sweep"),
        ("train: {lr: [0.1, 0.2]}\n", r"must be a number .* write grid: \{train\.lr: \[0\.1, 0\.2\]\}"),
        ("data: {source: digits, axes: NHW}\n", r"data.axes: unknown key; (?!.*over)"),
    ],
)
def test_errors_of_runs_mention_the_keys_of_sweeps(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        build_data.make_source(config.load(write(tmp_path, text)))


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        # Overrides must not change what an axis sets, or labels of the table would be wrong.
        (
            METHODS,
            ["seed=42"],
            "line: seed=42 is not allowed, because axis seed of the sweep sets this key; "
            "to choose among its values, use include={seed: ...}",
        ),
        (METHODS, ["seed=42", "include={seed: 0}"], "because axis seed of the sweep sets this key"),
        (
            METHODS,
            ["method.name=fednova"],
            "method.name=fednova is not allowed, because axis method of the sweep sets this key",
        ),
        (METHODS, ["method={name: fednova}"], "because axis method of the sweep sets this key"),
        (
            "grid: {train.lr: [0.1, 0.2], m: {a: {}, b: {train: {lr: 0.05}}}}\n",
            [],
            "have the same settings; remove one",
        ),
        ("grid: {m: {a: {seed: 5}, b: {seed: 5, train: {lr: 0.1}}}}\n", [], "have the same settings; remove one"),
        ("grid: {name: [a, b]}\n", [], "cannot sweep over `name`"),
        ("grid: {output: [a, b]}\n", [], "cannot sweep over `output`"),
        ("rounds: 3\n", [], "grid: no axes are given; give at least one"),
        ("gird: {seed: [0, 1]}\n", [], r"sweep\.yaml:2: gird: unknown key; did you mean 'grid'"),
        ("grid: {}\n", [], "no axes are given"),
        ("grid: {seed: []}\n", [], r"sweep\.yaml:2: grid\.seed: .* must be a list of values, a list of config files"),
        ("grid: {seed: [1, 1]}\n", [], r"grid\.seed: a value is listed twice"),
        ("grid: {seed: [{a: 1}]}\n", [], r"grid\.seed: a list may contain only plain values"),
        ("grid: {method: [none.yaml]}\n", [], r"none\.yaml"),
        ("grid: {method: [fedavg, ditto]}\n", [], r"plain values of a key \(such as method\.name\) or config files"),
        (
            "grid: {method: {A: 3}}\n",
            [],
            r"sweep\.yaml:2: grid\.method\.A: 3 is not allowed; must be a mapping of settings",
        ),
        ("grid: {m: {A b: {}, A-b: {}}}\n", [], r"would have the same name, a-b; rename a label"),
        ("grid: {seed: [0]}\ninclude: {sed: 0}\n", [], r"include: unknown axis 'sed'; did you mean 'seed'"),
        ("grid: {seed: [0]}\ninclude: {seed: 1}\n", [], r"include\.seed: unknown label '1'"),
        ("grid: {seed: [0]}\nexclude: [{seed: 0}]\n", [], "include and exclude leave no run"),
        ("grid: {seed: [0]}\nexclude: {seed: 0}\n", [], r"sweep\.yaml:3: exclude: .* must be a list of"),
        ("grid: {seed: [0]}\npublished: 3\n", [], "published: 3 is not allowed; must be a mapping"),
        ("grid: {seed: [0]}\npublished: {values: {}, sauce: x}\n", [], r"published\.sauce: unknown key; did you mean"),
        (
            "grid: {m: {A: {}}}\npublished: {values: {B: 1}}\n",
            [],
            r"published\.values: unknown label 'B' of the axis m",
        ),
        (
            "grid: {m: {A: {}}}\npublished: {values: {A: x}}\n",
            [],
            r"published\.values\.A: 'x' is not allowed; must be a finite number",
        ),
        (
            "grid: {m: {A: {}}}\npublished: {values: {A: [1, -2]}}\n",
            [],
            r"values\.A: \[1, -2\] is not allowed; must be a finite number",
        ),
        (
            "grid: {m: {A: {}}}\npublished: {values: {A: .inf}}\n",
            [],
            r"values\.A: inf is not allowed; must be a finite number",
        ),
        (
            "grid: {m: {A: {}}}\npublished: {metric: [a, b], values: {A: 1}}\n",
            [],
            r"values\.A: 1 is not allowed; must be a list with one value per metric: a, b",
        ),
        (
            "grid: {m: {A: {}}}\npublished: {axes: [n], values: {A: 1}}\n",
            [],
            r"published\.axes: .* must be a list of axes of grid: m",
        ),
        ("grid: {m: {A: {}}}\ntune: {}\n", [], r"tune\.grid: missing, but required"),
        (
            TUNED % "by: validation_loss",
            [],
            r"tune\.by: 'validation_loss' is not allowed; must be loss or a metric of the task",
        ),
        (TUNED % "by: loss, of: first", [], r"tune\.of: 'first' is not allowed; must be last, mean_last_10"),
        (TUNED % "by: loss, to: 3", [], r"tune\.to: unknown key; did you mean 'of'"),
        (
            TUNED % "by: loss, per: [seed]",
            [],
            r"tune\.per: \[seed\] is not allowed; must be a list of axes of grid: m",
        ),
        (TUNED % "by: loss, using: {m: A}", [], r"tune\.using includes no run to compare candidates for B"),
        (
            TUNED.replace("train.lr", "seed") % "by: loss",
            [],
            r"tune\.grid\.seed is not allowed, because seed is an axis of grid, or the",
        ),
        (
            *("grid: {train.lr: [0.1, -1], seed: [0]}\n", []),  # the message names the run
            r"sweep\.yaml:2: grid\.train\.lr: train\.lr: -1 .*\n  in the run train\.lr: -1, seed: 0",
        ),
    ],
)
def test_mistakes_are_reported_with_their_place(tmp_path, text, overrides, message):
    with pytest.raises(UserError, match=message):
        list(expand.load_sweep(write(tmp_path, text), overrides).first_stage_runs())


def test_a_plugin_path_is_relative_to_the_sweep_file(tmp_path):
    (tmp_path / "mine.py").write_text("")
    sweep = expand.load_sweep(write(tmp_path, "grid: {m: {A: {model: {name: mine.py:Net}}}}\n"))
    assert next(iter(sweep.first_stage_runs()))[1].model.name == f"{tmp_path / 'mine.py'}:Net"


def test_tuning_runs_are_all_combinations_of_candidates(tmp_path):
    """With two axes of candidates, in the base of a smaller sweep; tuning needs validation rows."""
    text = """\
grid: {method: {A: {}, B: {method: {name: fedprox}}}, data.partition.alpha: [0.1, 1], seed: [0, 1]}
tune: {grid: {train.lr: [0.1, 0.2], mu: {a: {train: {epochs: 2}}, b: {}}}, by: accuracy, per: method, using: {seed: 1}}
"""
    write(tmp_path, text)
    small = tmp_path / "small.yaml"
    small.write_text("base: [sweep.yaml]\ninclude: {method: B}\ndata: {validation: 0.1}\n")
    sweep = expand.load_sweep(small)
    runs = list(sweep.first_stage_runs())
    assert len(runs) == 2 * 1 * 4
    labels, first = runs[0]
    assert first.name == "b_alpha-0.1_seed-1_lr-0.1_a"
    assert (first.train.lr, first.train.epochs, first.evaluate.best.metric) == (0.1, 2, "accuracy")
    assert sweep.tuning.get_cell_key(labels) == ("B",)
    with pytest.raises(UserError, match=r"best\.metric: accuracy needs validation rows, but data.validation is 0"):
        list(expand.load_sweep(small, ["data.validation=0"]).first_stage_runs())
    assert expand.load_sweep(small, ["evaluate.best.metric=loss"]).run_settings(labels).evaluate.best.metric == "loss"
    assert len(list(expand.load_sweep(small, ["tune=null"]).first_stage_runs())) == 4
