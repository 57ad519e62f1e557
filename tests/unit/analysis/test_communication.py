"""Parameters transmitted: sums, ratios, and what a run directory may lack."""

import json

import pytest

from fedmpi.analysis import report
from fedmpi.analysis.communication import curve, table
from fedmpi.common.errors import UserError


@pytest.fixture
def run(tmp_path):
    """Makes a run directory: each row is (up, down, accuracy or None)."""

    def make(name, rows):
        (tmp_path / name).mkdir()
        keys = ("round", "up_parameters", "down_parameters", "accuracy")
        lines = [json.dumps(dict(zip(keys, (t, *row), strict=True))) for t, row in enumerate(rows)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return tmp_path / name

    return make


def test_a_curve_has_the_sums_up_to_each_measured_round(run):
    found = curve(run("a", [(10, 12, None), (20, 0, 50.0), (1, 1, None), (9, 7, 75.5)]), "accuracy")
    assert found["points"] == [
        {"round": 1, "up": 30, "down": 12, "value": 50.0},
        {"round": 3, "up": 40, "down": 20, "value": 75.5},
    ]
    assert (found["rounds"], found["up"], found["down"]) == (4, 40, 20)


def test_ratios_are_of_averages_per_round_to_the_first_run(run):
    full = curve(run("full", [(1000, 1000, 1.0), (1000, 1000, 2.0)]), "accuracy")
    # four rounds: 1000 + 3 * 200 up, 2 * 1000 + 2 * 200 down, so 400 and 600 in an average round
    fast = [(1000, 1000, 1.0), (200, 1000, 2.0), (200, 200, 3.0), (200, 200, 4.5)]
    text = table([full, curve(run("fast", fast), "accuracy")], "accuracy")
    assert [line.split()[1:] for line in text[1:]] == [
        ["2", "1,000", "1,000", "2,000", "1.000", "1.000", "1.000", "2.00"],
        ["4", "400", "600", "1,000", "0.400", "0.600", "0.500", "4.50"],
    ]


@pytest.mark.parametrize(
    ("rows", "metric", "text"),
    [
        ([(1, 1, 1.0), (1, 1, 2.0)], "acc", "has no 'acc'; did you mean 'accuracy'? allowed: accuracy"),
        ([(1, 1, None), (1, 1, 2.0)], "accuracy", "accuracy was measured after 1 round; a curve needs 2 or more"),
        ([], "accuracy", "no round is complete"),
    ],
)
def test_a_run_that_lacks_something_is_told(run, rows, metric, text):
    place = run("a", rows)
    with pytest.raises(UserError) as caught:
        curve(place, metric)
    assert text in str(caught.value)
    assert str(place) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_that_is_none_and_a_file_that_is_not_whole(run, tmp_path):
    with pytest.raises(UserError, match=r"is no run directory: it holds no metrics\.jsonl"):
        curve(tmp_path / "none", "accuracy")
    place = run("a", [(1, 1, 1.0), (1, 1, 2.0)])
    with (place / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "up_par')
    assert curve(place, "accuracy")["rounds"] == 2  # a kill cuts a line: that round was not complete
    with (place / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:3 is no row of a run"):
        curve(place, "accuracy")


def test_numbers_that_are_not_finite_are_null(tmp_path):
    path = report.write(tmp_path / "a.json", {"ratio": float("nan"), "rounds": 2})
    assert json.loads(path.read_text()) == {"ratio": None, "rounds": 2}
