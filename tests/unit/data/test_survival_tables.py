"""Tables of survival times: leaks of the outcome, words of the event, values that stand for a gap."""

import re
import warnings

import numpy as np
import pytest
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.leaks import warn_of_leaks
from fedmpi.data.preparation import Request
from fedmpi.data.sources.tables.table import table

RANDOM = np.random.default_rng(0)
TIME, EVENT, NOISE = RANDOM.exponential(100, 80), RANDOM.integers(0, 2, 80), RANDOM.normal(size=80)
SITE = np.arange(80) % 2


def said(features, names, site=None):
    x, y = torch.tensor(np.stack(features, 1)).float(), torch.tensor(np.stack([EVENT, TIME], 1)).float()
    site = None if site is None else torch.tensor(site)
    data = Dataset(x, y, x[:1], y[:1], 1, site=site, meaning=(*names, "->"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_of_leaks(data, survival=True)
    return [str(each.message) for each in told]


# ---- leaks ----
@pytest.mark.parametrize(
    ("leak", "site"),
    [
        (TIME, None),
        (-TIME, None),
        (np.log(TIME), None),
        (np.floor(TIME / 30), None),
        (np.where(EVENT == 1, TIME, -TIME), None),
        (TIME * np.where(SITE, 1, -2), SITE),  # up at one site, and down at the other
    ],
)
def test_a_feature_that_orders_the_times_is_named(leak, site):
    told = said([NOISE, leak], ["age", "days"], site)
    assert len(told) == 1
    assert "feature 'days' alone gives the order of the times" in told[0]


def test_a_feature_that_equals_the_event_is_named():
    told = said([NOISE, EVENT * 2.0 - 1], ["age", "status"])
    assert len(told) == 1
    assert "feature 'status' alone tells the event of all training rows" in told[0]


def test_features_that_tell_nothing_alone_are_not_named():
    almost = TIME.copy()
    almost[[3, 50]] = almost[[50, 3]]
    flipped = np.where(np.arange(80) == 7, 1 - EVENT, EVENT)
    assert said([NOISE, almost, flipped, np.ones(80)], ["age", "a", "b", "c"]) == []


# ---- values that stand for a gap ----
def sheet(folder, columns, separator=","):
    lines = [separator.join(columns), *(separator.join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    (folder / "a.csv").write_text("\n".join(lines) + "\n")


def rows_of(folder, columns, **options):
    sheet(folder, columns)
    given = {"path": "a.csv", "test_fraction": 0, "standardise": "none", "label_column": ["dead", "days"]} | options
    return table(folder, **given)


SURVIVAL = {"dead": [0, 1] * 4, "days": range(10, 90, 10)}
AGE = [60, -9, 70, "-9.0", 99, 50, 40, 61]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([-9], [60, 70, 99, 50, 40, 61]),
        (["-9", 99], [60, 70, 50, 40, 61]),
        ({"age": [-9]}, [60, 70, 99, 50, 40, 61]),
        ({"days": [80]}, [60, -9, 70, -9, 99, 50, 40]),
        ([-9, 80], [60, 70, 99, 50, 40]),
    ],
)
def test_missing_values_are_gaps_of_all_columns_or_of_the_named_ones(tmp_path, given, left):
    data = rows_of(tmp_path, {"age": AGE, **SURVIVAL}, missing="drop", missing_values=given)
    assert data.train_x[:, 0].tolist() == left
    data = data.preparation.read(Request(str(tmp_path / "a.csv")))
    assert (99 in data.x[:, 0].tolist()) == (99 in left)  # new rows are read alike


def test_missing_values_of_words_of_parquet_and_in_a_column_that_names_them(tmp_path):
    grade = ["I", "unknown", "9", "II", "I", "9.0", "II", "I"]
    data = rows_of(
        tmp_path, {"grade": grade, **SURVIVAL}, categorical=["grade"], missing="drop", missing_values=[9, "unknown"]
    )
    assert data.meaning[:2] == ("grade=I", "grade=II")
    named = {"grade": ["I", "II", 9]}
    data = rows_of(
        tmp_path, {"grade": grade, **SURVIVAL}, categorical=named, missing="drop", missing_values=[9, "unknown"]
    )
    assert len(data.train_x) == 7
    with pytest.raises(UserError, match=r"line 3: column 'age' is empty \(or holds one of data\.missing_values\)"):
        rows_of(tmp_path, {"age": AGE, **SURVIVAL}, missing_values=[-9])
    with pytest.raises(UserError, match=r"no column 'agee' \(data.missing_values\)"):
        rows_of(tmp_path, {"age": AGE, **SURVIVAL}, missing_values={"agee": [-9]})


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        (AGE, True),
        ([1, -1, 0, 1, -1, 0, 0, 1], False),
        ([1, -1, 0, 5, -1, 0, 0, 1], True),
        ([60, -9, 70, 50, 99, 50, 40, 61], False),  # once
        ([-3, -9, 70, -9, 99, 50, 40, 61], False),
        ([0.5, -0.5, 1, -0.5, 1, 2, 3, 4], False),
    ],
)
def test_one_negative_number_that_is_repeated_is_warned_of(tmp_path, cells, says):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rows_of(tmp_path, {"age": cells, **SURVIVAL})
    found = [str(each.message) for each in told if "missing_values" in str(each.message)]
    assert len(found) == says
    assert not says or "column 'age' holds" in found[0]


# ---- words of the event ----
@pytest.mark.parametrize(("words", "named"), [(("nein", "ja"), {"ja": 1, "nein": 0}), ((1, 2), {1: 0, "2": 1})])
def test_event_words_are_the_events(tmp_path, words, named):
    columns = {"age": AGE, "dead": list(words) * 4, "days": SURVIVAL["days"]}
    data = rows_of(tmp_path, columns, event_words=named)
    assert data.train_y[:, 0].tolist() == [0, 1] * 4
    request = Request(str(tmp_path / "a.csv"))
    assert data.preparation.read(request).y.tolist() == data.train_y.tolist()


def test_event_words_that_do_not_fit_are_refused(tmp_path):
    columns = {"age": AGE, "dead": ["ja", "nein"] * 3 + ["Ja", "?"], "days": SURVIVAL["days"]}
    with pytest.raises(UserError, match=r"line 8: column 'dead' holds the event 'Ja'.*data\.event_words: ja, nein"):
        rows_of(tmp_path, columns, event_words={"ja": 1, "nein": 0}, missing="drop")
    with pytest.raises(UserError, match="needs a word with 1"):
        rows_of(tmp_path, columns, event_words={"ja": 1})
    with pytest.raises(UserError, match="two label columns"):
        rows_of(tmp_path, columns, event_words={"ja": 1, "nein": 0}, label_column="days")
    with pytest.raises(UserError, match=r"data\.event_words: \{WORD: 1, WORD: 0\}"):
        rows_of(tmp_path, columns, missing="drop")


# ---- rows in memory, features ----
def test_rows_of_text_in_memory_have_the_decimal_mark_of_the_training(tmp_path):
    (tmp_path / "a.csv").write_text("age;dead;days\n" + "".join(f"{k},5;{k % 2};{k}\n" for k in range(1, 9)))
    data = table(
        tmp_path,
        path="a.csv",
        delimiter=";",
        decimal=",",
        thousands=".",
        standardise="none",
        label_column=["dead", "days"],
    )
    for rows in ([{"age": "1.234,5"}, {"age": "2"}], {"age": [1234.5, 2]}, [{"age": 1234.5}, {"age": "2"}]):
        request = Request(rows)
        assert data.preparation.read(request).x[:, 0].tolist() == [1234.5, 2]


def test_a_feature_that_is_not_there_is_named_before_what_follows_from_it(tmp_path):
    with pytest.raises(UserError, match=r"no column 'sexx' \(data\.features\); did you mean 'sex'"):
        rows_of(tmp_path, {"sex": ["m", "w"] * 4, **SURVIVAL}, features=["sexx"], categorical=["sex"])


# ---- spellings, constants ----
def warned(folder, columns, **options):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rows_of(folder, columns, **options)
    return [text for each in told if "equal to an earlier" not in (text := str(each.message))]


MANY = {"dead": [0, 1] * 40, "days": (TIME * 10).round(), "age": NOISE.round(3)}


@pytest.mark.parametrize(
    ("cells", "options", "says"),
    [
        (["M", "W", "w", "M"] * 20, {}, r"'W' \(.*line 3\) and 'w' \(.*line 4\), which are two values"),
        (["Stage I", "II", "Stage  I", "II"] * 20, {}, "which are two values; if they are one, correct the file"),
        (["m", "w"] * 20 + ["m", "female"] * 20, {"site_column": "who"}, "'female', 'w' occur at one site only"),
        (["m", "w"] * 39 + ["m", "x"], {"site_column": "who"}, ""),  # one row is at one site
        (["m", "w"] * 20 + ["m", "female"] * 20, {}, ""),
    ],
)
def test_words_that_may_be_spellings_of_one_value_are_warned_of(tmp_path, cells, options, says):
    columns = MANY | {"sex": cells} | ({"who": ["n"] * 40 + ["s"] * 40} if options else {})
    told = warned(tmp_path, columns, categorical=["sex"], **options)
    assert len(told) == bool(says)
    if says:
        assert re.search(says, told[0])
        assert "data.categorical: {sex: [...]}" in told[0]
        named = {"sex": sorted({*map(str.strip, cells)})}
        assert warned(tmp_path, columns, categorical=named, **options) == []


def test_columns_with_one_value_are_warned_of(tmp_path):
    columns = MANY | {"who": ["n"] * 40 + ["s"] * 40, "year": [1] * 40 + [2] * 40, "land": ["DE"] * 80, "x": [3] * 80}
    told = warned(tmp_path, columns, categorical=["land"], site_column="who", standardise="site")
    assert len(told) == 1
    assert "each of 3 columns ('year', 'land', 'x') has the same value in all training rows" in told[0]
    told = warned(tmp_path, columns, categorical=["land"], drop=["x"], site_column="who")
    assert len(told) == 1
    assert "column 'land' has the same value" in told[0]
