"""`fedmpi predict`: new rows are prepared as those of the training were, whichever the source and the task.

The test rows of a run, saved as a file of their own, give the metrics that the run has recorded, to the last digit.
"""

import csv
import io
import json
import random
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import fedmpi as package
from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.data.sources.digits import digits
from fedmpi.data.sources.flamby import FEATURES, HOSPITALS
from fedmpi.data.sources.source_utils import split_train_test
from fedmpi.runtime.execute import execute_run
from fedmpi.runtime.finished_runs import predict as command
from fedmpi.runtime.finished_runs.models import RunModel

WORDS = ("red", "green", "blue")


def train(place, data, **more):
    """Return the run directory of a short run and the metrics of its last round."""
    tree = {
        "name": more.pop("name", "run"),
        "rounds": 2,
        "output": str(place / "runs"),
        "data": {"root": str(place), "partition": {"scheme": "iid", "clients": 2}, **data},
        "model": {"name": "logistic"},
        "method": {"name": "fedavg"},
        "train": {"batch_size": 8, "lr": 0.1},
        "report": False,
        **more,
    }
    (place / "c.yaml").write_text(yaml.safe_dump(tree))
    run = execute_run(config.load(place / "c.yaml"))[0]["directory"]
    rows = (place / "runs" / tree["name"] / "metrics.jsonl").read_text().splitlines()
    return place / "runs" / run.rpartition("/")[2], json.loads(rows[-1])


def write(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def predictions(run, file, **options):
    """Return the rows of the CSV file that `fedmpi predict` writes, and the lines that it prints."""
    lines, to = [], file.with_name("out.csv")
    which = {key: options.pop(key) for key in ("trusted", "overrides", "client") if key in options}
    command.predict_file(RunModel(run, **which), file, lines.append, out=to, **options)
    return read(to), lines


def percent_equal(results, expected):
    return pytest.approx(100 * np.mean([a == b for a, b in zip(results, expected, strict=True)]), abs=1e-9)


def column(rows, name):
    return [row[name] for row in rows]


def patients(place, n=90, gaps=False):
    """Return a table with a site and a part for each row, numbers, a text column, and targets of all kinds."""
    draw = random.Random(3)
    header = ["id", "age", "colour", "dose", "site", "part", "sick", "cost", "event", "time", "a", "b"]
    rows = []
    for k in range(n):
        site = draw.choice(["north", "south"])
        age, dose = draw.gauss(50 if site == "north" else 70, 9), draw.gauss(3e5, 4e4)
        sick = age + draw.gauss(0, 5) > 60
        part = "test" if k % 3 == 0 else "train"
        cell = "" if gaps and draw.random() < 0.3 else f"{dose:.1f}"
        targets = ["yes" if sick else "no", f"{dose / 1e5 + age:.2f}", int(sick), f"{draw.random() * 9:.2f}"]
        labels = [int(sick), int(draw.random() < 0.5)]
        rows.append([f"p{k}", f"{age:.2f}", draw.choice(WORDS), cell, site, part, *targets, *labels])
    write(place / "all.csv", header, rows)
    return header, rows


def table(column, **more):
    labels = [column] if isinstance(column, str) else column
    drop = [name for name in ("id", "sick", "cost", "event", "time", "a", "b") if name not in labels]
    return {
        "source": "table",
        "path": "all.csv",
        "label_column": column,
        "site_column": "site",
        "split_column": "part",
        "categorical": ["colour"],
        "drop": drop,
        **more,
    }


# target: task, its options of data, and how a metric is made of the predictions and the cells of the file
TABLES = {
    "sick": ("classification", {}, "accuracy"),
    "cost": ("regression", {"target": "number"}, "mse"),
    ("event", "time"): ("survival", {}, "c_index"),
    ("a", "b"): ("multi_label", {"target": "number"}, "accuracy"),
}
PREPARED = {
    "by site": {},
    "pooled": {"standardise": "pooled"},
    "imputed": {"missing": "impute"},
    "imputed, pooled": {"missing": "impute", "standardise": "pooled"},
    "a word that no training row has, which is a row of zeros": {},
}


def of_test_part(rows):
    return [row for row in rows if row[5] == "test"]


@pytest.mark.parametrize("target", TABLES, ids=str)
def test_a_tables_test_rows_give_the_recorded_metrics(tmp_path, target):
    header, rows = patients(tmp_path)
    task, more, metric = TABLES[target]
    named = target if isinstance(target, str) else list(target)
    run, last = train(tmp_path, table(named, **more), task={"name": task})
    truth = of_test_part(rows)
    file = write(tmp_path / "new.csv", header, truth)
    assert package.load(run).predict(file).metrics[metric] == last[metric]
    got, _ = predictions(run, file, ids=["id"])
    assert column(got, "id") == [row[0] for row in truth]
    assert [int(row["line"]) for row in got] == list(range(2, 2 + len(got)))  # the header is line 1
    if task == "classification":
        assert percent_equal(column(got, "prediction"), [cells[6] for cells in truth]) == last["accuracy"]
        sums = [float(row["probability_no"]) + float(row["probability_yes"]) for row in got]
        assert sums == pytest.approx([1] * len(got), abs=1e-6)
    elif task == "regression":
        squares = [(float(row["prediction"]) - float(cells[7])) ** 2 for row, cells in zip(got, truth, strict=True)]
        assert sum(squares) / len(squares) == pytest.approx(last["mse"], rel=1e-5)
    elif task == "multi_label":
        results = [int(row[f"prediction_{name}"]) for row in got for name in "ab"]
        assert percent_equal(results, [cells[at] for cells in truth for at in (10, 11)]) == last["accuracy"]
    else:
        assert list(got[0]) == ["line", "id", "risk"]


@pytest.mark.parametrize("how", PREPARED)
def test_new_rows_are_prepared_like_the_training_rows(tmp_path, how):
    header, rows = patients(tmp_path, gaps="missing" in PREPARED[how])
    if "word" in how:
        rows[0][2] = "pink"  # of the test part
        write(tmp_path / "all.csv", header, rows)
    run, last = train(tmp_path, table("sick", **PREPARED[how]))
    file = write(tmp_path / "new.csv", header, of_test_part(rows))
    assert package.load(run).predict(file).metrics["accuracy"] == last["accuracy"]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A run on the table of patients: its directory, its last metrics, and header and test rows of the table."""
    place = tmp_path_factory.mktemp("study")
    header, rows = patients(place)
    run, last = train(place, table("sick", categorical={"colour": list(WORDS)}))
    return SimpleNamespace(run=run, last=last, header=header, test=of_test_part(rows))


def test_columns_may_come_in_another_order_and_without_the_label(study, tmp_path):
    header, test, model = study.header, study.test, package.load(study.run)
    complete = model.predict(write(tmp_path / "new.csv", header, test))
    order = [4, 3, 2, 1]  # site, dose, colour, age
    few = write(tmp_path / "few.csv", [header[k] for k in order], [[row[k] for k in order] for row in test])
    results = model.predict(few)
    assert results["prediction"] == complete["prediction"]
    assert results.metrics == {}
    columns = {header[k]: [row[k] for row in test] for k in order}
    for rows in (columns, [dict(zip(header, row, strict=True)) for row in test]):
        assert model.predict(rows)["prediction"] == complete["prediction"]
    one = model.predict(write(tmp_path / "one.csv", header, test[4:5]))  # standardised by the training, not by itself
    assert one["probability_yes"][0] == pytest.approx(complete["probability_yes"][4], abs=1e-6)


def test_a_site_can_be_named_if_the_file_has_no_site_column(study, tmp_path):
    header, test, model = study.header, study.test, package.load(study.run)
    here = [row for row in test if row[4] == "south"]
    complete = model.predict(write(tmp_path / "new.csv", header, here))
    few = write(tmp_path / "few.csv", header[1:4], [row[1:4] for row in here])
    assert model.predict(few, site="south")["prediction"] == complete["prediction"]
    with pytest.raises(UserError, match=r"column 'site', or set --site NAME .*sites: north, south"):
        model.predict(few)
    with pytest.raises(UserError, match="site 'west' does not exist in this run; sites: north, south"):
        model.predict(few, site="west")
    both = write(tmp_path / "both.csv", header, test)
    output = f"{len(test) - len(here)} of {len(test)} rows name another site .first: north., "
    with pytest.warns(UserWarning, match=output):
        model.predict(both, site="south")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": None}, r"has no column 'age', with which the model was trained"),
        ({"age": ""}, r"line 2: the cell in column 'age' is empty; fill in a value, because data.missing: refuse"),
        ({"age": "old"}, r"line 2: column 'age' contains 'old', which is not a number"),
        ({"site": "west"}, r"line 2: column 'site' contains 'west', not a site of this run; sites: north, south"),
        ({"colour": "pink"}, r"line 2: column 'colour' contains 'pink', which is not in data.categorical.colour"),
    ],
)
def test_rows_of_another_format_are_refused(study, tmp_path, change, message):
    row = {**dict(zip(study.header, study.test[0], strict=True)), **change}
    row = {key: cell for key, cell in row.items() if cell is not None}
    with pytest.raises(UserError, match=message):
        package.load(study.run).predict(write(tmp_path / "bad.csv", list(row), [list(row.values())]))


def test_invalid_labels_are_reported(study, tmp_path):
    test = [[*row, "x"] for row in study.test]
    test[1][6] = "perhaps"
    got, output = predictions(study.run, write(tmp_path / "new.csv", [*study.header, "note"], test))
    assert len(got) == len(test)
    assert re.search(r"no metric: .*line 3.*'perhaps'", output[-1])


def test_reading_options_apply_to_the_new_file(study, tmp_path):
    run, last, file = study.run, study.last, tmp_path / "new.csv"
    test = [[cell.replace(".", ",") for cell in map(str, row)] for row in study.test]
    file.write_text("\n".join(";".join(row) for row in [study.header, *test]) + "\n")
    given = ["data.delimiter=;", "data.decimal=,"]
    _, output = predictions(run, file, overrides=given)
    assert f"accuracy {last['accuracy']:.2f}" in output[0]
    results = package.load(run, overrides=given).predict(file)
    assert results.metrics["accuracy"] == last["accuracy"]
    own = package.load(run, client=0, overrides=given).predict(file, site="north")  # not of the client's training data
    assert len(own["prediction"]) == len(test)
    names = "data.delimiter, data.decimal may be set"
    for text, message in [
        ("data.standardise=none", f"^data.standardise cannot be changed, because .*{names}"),
        ("data.delimiter=;;", "^data.delimiter: ';;' is not allowed; must be"),
    ]:
        with pytest.raises(UserError, match=message):
            predictions(run, file, overrides=[text])


# ---- other sources ----
def pictures(folder, names, n, seed, size=9):
    g = np.random.default_rng(seed)
    files = []
    for label, name in enumerate(names):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for k in range(n):
            pixels = np.clip(g.normal(80 + 60 * label, 60, (size, size + label, 3)), 0, 255).astype(np.uint8)
            files.append(folder / name / f"{k}.png")
            Image.fromarray(pixels).save(files[-1])
    return files


def heart_disease(place):
    g, test = np.random.default_rng(0), []
    for name in HOSPITALS:
        y = np.arange(40) % 3
        x = np.round(g.normal(60, 20, (40, 13)) + 9 * y[:, None], 1)
        x[::4, FEATURES.index("chol")] = 0  # not measured
        cells = [[*("?" if g.random() < 0.1 else f"{v}" for v in row), f"{k}"] for row, k in zip(x, y, strict=True)]
        (place / f"processed.{name}.data").write_text("\n".join(map(",".join, cells)) + "\n")
        rows = split_train_test((y > 0).astype(np.int64), 0.2)[1]
        test += [[*cells[k][:-1], str(int(y[k] > 0)), name] for k in rows]
    file = write(place / "new.csv", [*FEATURES, "num", "hospital"], test)
    return {"source": "heart_disease", "partition": {"scheme": "site"}}, {}, file


def leaf(place):
    draw = random.Random(0)
    (place / "new").mkdir()
    for part, n in (("train", 40), ("test", 15)):
        strings = ["".join(draw.choice("abcd" if part == "train" else "abcde") for _ in range(6)) for _ in range(n)]
        users = {"me": {"x": [text[:5] for text in strings], "y": [text[5] for text in strings]}}
        (place / part).mkdir()
        content = {"users": ["me"], "num_samples": [n], "user_data": users}
        (place / part / "all.json").write_text(json.dumps(content))
    for k, text in enumerate(strings):
        (place / "new" / f"{k:02}.txt").write_text(text)
    return (
        {"source": "leaf", "path": "."},
        {"task": {"name": "next_symbol"}, "model": {"name": "char_lstm"}},
        place / "new",
    )


def image_folder(place):
    """Operations of data.augment without randomness are also applied to new images."""
    names = ["cat", "dog", "owl"]
    pictures(place / "train", names, 8, 0)
    pictures(place / "test", names, 5, 1)
    data = {"source": "image_folder", "size": 8, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.2, 0.3]}
    return {**data, "augment": ["horizontal_flip", {"center_crop": 6}]}, {}, place / "test"


def csv_images(place):
    names = ["10", "2"]  # as numbers: class 0 is 2
    files = pictures(place / "all", names, 12, 0)
    rows = [
        [f"all/{file.parent.name}/{file.name}", file.parent.name, "train" if k % 3 else "test"]
        for k, file in enumerate(files)
    ]
    write(place / "list.csv", ["picture", "kind", "part"], rows)
    data = {"source": "csv_images", "path": "list.csv", "image_column": "picture", "label_column": "kind"}
    file = write(place / "new.csv", ["picture", "kind", "part"], [row for row in rows if row[2] == "test"])
    return {**data, "split_column": "part", "size": 8, "channels": 1}, {}, file


def pixels_to_16(place):
    data = digits(place)
    np.savez(place / "new.npz", x=data.test_x[:, 0].numpy() * 16.0, y=data.test_y.numpy())
    return {"source": "digits"}, {}, place / "new.npz"


def saved(folder, columns):
    """Write a data set as save_to_disk of Hugging Face's datasets does."""
    import pyarrow

    folder.mkdir(parents=True)
    table = pyarrow.table(columns)
    with pyarrow.ipc.new_stream(str(folder / "data.arrow"), table.schema) as file:
        file.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")


def saved_dataset(place, of_pictures=False):
    pytest.importorskip("pyarrow")
    g, label = np.random.default_rng(0), [WORDS[k % 2] for k in range(40)]
    x = [(g.normal(0, 1, 4) + k % 2).tolist() for k in range(40)]
    for k in range(40) if of_pictures else ():
        file = io.BytesIO()
        Image.fromarray(g.integers(0, 180 + 70 * (k % 2), (8, 8), np.uint8)).save(file, "PNG")
        x[k] = {"bytes": file.getvalue(), "path": None}
    saved(place / "d" / "train", {"x": x[:28], "label": label[:28]})
    saved(place / "d" / "test", {"x": x[28:], "label": label[28:]})
    (place / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    np.savez(place / "new.npz", x=np.array([] if of_pictures else x[28:]), y=[name == "red" for name in label[28:]])
    for k, name in enumerate(label[28:] if of_pictures else ()):
        (place / "new" / name).mkdir(parents=True, exist_ok=True)
        (place / "new" / name / f"{k}.png").write_bytes(x[28 + k]["bytes"])
    data = {"source": "saved_dataset", "path": "d", "input_column": "x"}
    return data, {}, place / ("new" if of_pictures else "new.npz")


def saved_pictures(place):
    return saved_dataset(place, of_pictures=True)


def texts(place):
    draw = random.Random(0)
    (place / "texts").mkdir()
    last_parts = []
    for name in ("ann", "bob"):
        text = "".join(draw.choice("abab abc\n") for _ in range(400))
        (place / "texts" / f"{name}.txt").write_text(text)
        last_parts.append([name, text[320:]])  # test_fraction is 0.2
    model = {"name": "char_lstm", "embedding": 4, "hidden": 8, "layers": 1}
    file = write(place / "new.csv", ["author", "text"], last_parts)
    return {"source": "text", "path": "texts", "context": 10}, {"model": model, "task": {"name": "next_symbol"}}, file


SOURCES = [heart_disease, leaf, image_folder, csv_images, pixels_to_16, saved_dataset, saved_pictures, texts]


@pytest.mark.parametrize("source", SOURCES)
def test_test_rows_of_a_source_give_the_recorded_accuracy(tmp_path, source):
    data, more, file = source(tmp_path)
    run, last = train(tmp_path, data, **more)
    results = package.load(run).predict(file)
    assert results.metrics["accuracy"] == last["accuracy"]
    assert all(len(column) == len(next(iter(results.values()))) for column in results.values())


def test_images_by_folder_file_and_list(animals, tmp_path):
    files = pictures(tmp_path, ["cat", "dog"], 3, 1)
    results = package.load(animals).predict(tmp_path)
    assert list(results["file"]) == ["cat/0.png", "cat/1.png", "cat/2.png", "dog/0.png", "dog/1.png", "dog/2.png"]
    assert package.load(animals).predict(files[4])["prediction"] == [results["prediction"][4]]
    assert package.load(animals).predict([files[4], files[0]])["prediction"][1] == results["prediction"][0]


def test_image_names_are_relative_to_the_csv_file(animals, tmp_path):
    with pytest.raises(UserError, match=r"new\.csv, line 2: image a\.png not found .*relative to the folder of new"):
        package.load(animals).predict(write(tmp_path / "new.csv", ["path"], [["a.png"]]))
    with pytest.raises(UserError, match="has no column 'path'"):
        package.load(animals).predict(write(tmp_path / "bad.csv", ["file"], [["a.png"]]))


def test_images_of_another_size_are_refused_without_resizing(tmp_path):
    pictures(tmp_path / "train", ["cat"], 8, 0, size=8)
    pictures(tmp_path / "train", ["dog"], 8, 2, size=8)
    (run, _), other = train(tmp_path, {"source": "image_folder"}), pictures(tmp_path / "new", ["cat"], 1, 1, size=7)
    with pytest.raises(
        UserError, match="the images have 7x7 pixels and 3 channels, but the training images had 8x8 pixels and 3"
    ):
        package.load(run).predict(other[0])


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """A run on a folder of images of two classes."""
    place = tmp_path_factory.mktemp("animals")
    pictures(place / "train", ["cat", "dog"], 8, 0)
    return train(place, {"source": "image_folder", "size": 8})[0]


def test_invalid_labels_are_excluded_from_metrics_and_counted(animals, tmp_path):
    files = pictures(tmp_path / "new", ["cat", "dog"], 3, 1)
    rows = [[f"new/{file.parent.name}/{file.name}", file.parent.name] for file in files]
    complete = package.load(animals).predict(write(tmp_path / "new.csv", ["path", "label"], rows[1:]))
    rows[0][1] = "wolf"
    file = write(tmp_path / "new.csv", ["path", "label"], rows)
    got, output = predictions(animals, file)
    assert len(got) == 6
    assert (
        output[-1]
        == f"metrics: {file}, line 2: 'wolf' is not one of the classes of the training data; 1 row of 6 ignored"
    )
    assert package.load(animals).predict(file).metrics == complete.metrics
    none = package.load(animals).predict(write(tmp_path / "new.csv", ["path", "label"], rows[:1]))
    assert none.metrics == {}


@pytest.mark.parametrize("rows", [[{"path": "a.png"}], [np.zeros((8, 8, 3))], {"path": ["a.png"]}, []], ids=type)
def test_unreadable_image_rows_are_refused_with_the_allowed_formats(animals, rows):
    takes = "must be an image, a folder of images, a CSV file that lists images, or a list of files"
    with pytest.raises(UserError, match=f"rows: .* is not allowed for this run; {takes}"):
        package.load(animals).predict(rows)


@pytest.mark.parametrize("kind", ["uint8 images", "numbers", "hdf5"])
def test_arrays_give_the_recorded_accuracy(tmp_path, kind):
    g, y = np.random.default_rng(0), np.arange(60) % 3
    if kind == "numbers":
        x = (g.normal(0, 1, (60, 5)) + y[:, None]).astype(np.float32)
        more = {"mean": [1.0] * 5, "std": [2.0] * 5}
    else:
        x = np.clip(g.normal(60, 50, (60, 8, 8, 3)) + 50 * y[:, None, None, None], 0, 255).astype(np.uint8)
        more = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.2, 0.3]}
    if kind == "hdf5":
        with pytest.importorskip("h5py").File(tmp_path / "a.h5", "w") as file:
            for part, rows in (("train", slice(40)), ("test", slice(40, None))):
                file[f"{part}/images"], file[f"{part}/labels"] = x[rows], y[rows]
        more |= {"source": "hdf5", "path": "a.h5"}
    else:
        np.savez(tmp_path / "a.npz", x=x[:40], y=y[:40], test_x=x[40:], test_y=y[40:])
        more |= {"source": "npz", "path": "a.npz"}
    run, last = train(tmp_path, more)
    np.savez(tmp_path / "new.npz", x=x[40:], y=y[40:])
    got, output = predictions(run, tmp_path / "new.npz")
    assert f"accuracy {last['accuracy']:.2f}" in output[0]
    assert percent_equal([int(row["prediction"]) for row in got], y[40:]) == last["accuracy"]
    assert package.load(run).predict(x[40:])["prediction"] == column(got, "prediction")
    with pytest.raises(UserError, match=r"rows of shape \(.*\), as in training"):
        package.load(run).predict(x[40:, :4])
    other = x[40:].astype(np.float32) if x.dtype == np.uint8 else x[40:].astype(np.uint8)
    with pytest.raises(UserError, match=r"rows: x is (float32|uint8) .*, as in training"):
        package.load(run).predict(other)


def test_masks_are_written_as_arrays_and_give_the_recorded_dice(tmp_path):
    g = np.random.default_rng(0)
    y = g.integers(0, 2, (24, 8, 8))
    x = (y[:, None] + g.normal(0, 0.5, (24, 1, 8, 8))).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x[:16], y=y[:16], test_x=x[16:], test_y=y[16:])
    net = "from torch import nn\ndef net(shape, classes): return nn.Conv2d(1, classes, 3, padding=1)\n"
    (tmp_path / "net.py").write_text(net)
    own = {"model": {"name": f"{tmp_path}/net.py:net"}, "task": {"name": "segmentation"}}
    run, last = train(tmp_path, {"source": "npz", "path": "a.npz", "classes": 2}, **own)
    np.savez(tmp_path / "new.npz", x=x[16:], y=y[16:])
    out = command.predict_file(RunModel(run, True), tmp_path / "new.npz", print)
    assert out == run / "predictions" / "new.npz"
    with np.load(out) as results:
        mask = results["mask"]
    assert mask.shape == (8, 8, 8)
    both, either = ((mask == 1) & (y[16:] == 1)).sum(), (mask == 1).sum() + (y[16:] == 1).sum()
    assert 2 * both / either == pytest.approx(last["dice"], abs=1e-12)
    with pytest.raises(UserError, match=r"must end in \.npz"):
        command.predict_file(RunModel(run, True), tmp_path / "new.npz", print, out=tmp_path / "masks.csv")


def test_symbols_are_those_of_windows_of_the_text(tmp_path):
    data, more, file = texts(tmp_path)
    run, last = train(tmp_path, data, **more)
    results, parts = package.load(run).predict(file), {row["author"]: row["text"] for row in read(file)}
    # 80 characters: windows at 1, 11, ..., 61 with all targets, and the last ten, whose next one is not known
    assert list(results["character"]) == [*range(1, 71, 10), 71] * 2
    right = [
        symbol == parts[name][start + k]
        for name, start, symbols in zip(results["text"], results["character"], results["symbols"], strict=True)
        for k, symbol in enumerate(symbols)
        if start + k < 80 and start < 71
    ]
    assert 100 * sum(right) / len(right) == pytest.approx(last["accuracy"], abs=1e-9)
    assert [symbols[-1] for symbols in results["symbols"]] == results["next"]
    for text, message in [
        ("ab Z ab ab ab", "'odd' contains 'Z', which is not in the training data"),
        ("ab", "has only 2 characters, but the model was trained on windows of 10"),
    ]:
        (tmp_path / "odd.txt").write_text(text)
        with pytest.raises(UserError, match=message):
            package.load(run).predict(tmp_path / "odd.txt")


# ---- sources of a user's own ----
PERSONAL_MODEL_HOOKS = """
import torch
from fedmpi import Dataset

def own(root):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 2
    x = torch.randn(60, 4, generator=g) + y[:, None]
    return Dataset(x[:40], y[:40], x[40:], y[40:], 2)

def several(root):
    ids = torch.arange(60).view(20, 3) % 7
    x = {"ids": ids, "mask": (ids > 2).float()}
    y = torch.arange(20) % 2
    first, last = ({name: part[rows] for name, part in x.items()} for rows in (slice(14), slice(14, 20)))
    return Dataset(first, y[:14], last, y[14:], 2)

class Masked(torch.nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.words, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, classes)

    def forward(self, mask, ids):
        return self.head((self.words(ids) * mask[:, :, None]).sum(1))
"""


def test_a_plug_in_source_takes_prepared_inputs_with_a_notice(tmp_path):
    (tmp_path / "own.py").write_text(PERSONAL_MODEL_HOOKS)
    run, last = train(tmp_path, {"source": f"{tmp_path}/own.py:own"})
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=g) + (torch.arange(60) % 2)[:, None]
    np.savez(tmp_path / "new.npz", x=x[40:].numpy())
    with pytest.warns(UserWarning, match="are passed to the model unprepared"):
        got, _ = predictions(run, tmp_path / "new.npz", trusted=True)
    assert percent_equal([int(row["prediction"]) for row in got], [k % 2 for k in range(40, 60)]) == last["accuracy"]
    header, rows = patients(tmp_path)
    with pytest.raises(
        UserError, match=r"cannot be read as an \.npz file.*; this run needs an \.npz file with inputs of the model"
    ):
        package.load(run, trust=True).predict(write(tmp_path / "a.csv", header, rows))


def test_samples_of_several_tensors_are_passed_by_name(tmp_path):
    (tmp_path / "own.py").write_text(PERSONAL_MODEL_HOOKS)
    run, last = train(tmp_path, {"source": f"{tmp_path}/own.py:several"}, model={"name": f"{tmp_path}/own.py:Masked"})
    ids = np.arange(60).reshape(20, 3)[14:] % 7
    with pytest.warns(UserWarning, match="are passed to the model unprepared"):
        results = package.load(run, trust=True).predict({"ids": ids, "mask": (ids > 2).astype(np.float32)})
    assert percent_equal(map(int, results["prediction"]), [k % 2 for k in range(14, 20)]) == last["accuracy"]
    with pytest.raises(UserError, match="rows has no array 'mask'"):
        package.load(run, trust=True).predict({"ids": ids})


# ---- sites that keep their rows, and what they say of them ----
def silos(place, **more):
    header, rows = patients(place)
    for site in ("north", "south"):
        write(place / f"{site}.csv", header, [row for row in rows if row[4] == site])
    data = table("sick", **{"path": "{site}.csv", "class_names": ["no", "yes"], "site_column": None})
    data |= {"partition": None, "silos": ["north", "south"], "categorical": {"colour": list(WORDS)}}
    data["drop"] = [*data["drop"], "site"]
    run, _ = train(place, data, **{"evaluate": {"protocol": ["personal"]}, **more})
    return run, header, rows


def recorded(run, client):
    """Return the last row of a client in clients.jsonl."""
    lines = [json.loads(line) for line in (run / "clients.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if line["client"] == client)


def test_the_preprocessing_of_a_site_stays_in_its_folder(tmp_path):
    run, header, rows = silos(tmp_path)
    assert not (run / "preprocessing.json").exists()
    for client, site in enumerate(("north", "south")):
        ages = [float(row[1]) for row in rows if row[4] == site and row[5] == "train"]
        (fit,) = json.loads((run / "state" / site / "preprocessing.json").read_text())["sites"].values()
        assert fit["mean"][0] == pytest.approx(np.mean(ages), rel=1e-12)
        assert fit["deviation"][0] == pytest.approx(np.std(ages), rel=1e-12)
        here = [row for row in rows if row[4] == site and row[5] == "test"]
        results = package.load(run).predict(write(tmp_path / "new.csv", header, here), site=site)
        assert results.metrics["accuracy"] == recorded(run, client)["accuracy"]
    file = tmp_path / "new.csv"
    with pytest.raises(UserError, match=r"each site .* has its own preprocessing; .*: north, south"):
        package.load(run).predict(file)
    (run / "state" / "north" / "preprocessing.json").unlink()  # as on the host of the other site
    with pytest.raises(UserError, match=r"north/preprocessing\.json is missing: .* only on the host"):
        package.load(run).predict(file, site="north")


def test_a_clients_model_predicts_rows_prepared_by_the_clients_site(tmp_path):
    """With FedPer, each client's accuracy on its own test rows is that of clients.jsonl."""
    mlp = {"model": {"name": "mlp", "hidden": [4]}, "method": {"name": "fedper"}}
    run, header, rows = silos(tmp_path, **mlp)
    for client, site in enumerate(("north", "south")):
        here = [row for row in rows if row[4] == site and row[5] == "test"]
        file = write(tmp_path / "new.csv", header, here)
        for given in (client, site):
            results = package.load(run, client=given).predict(file)
            assert results.metrics["accuracy"] == recorded(run, client)["accuracy"]
        got, output = predictions(run, file, client=site)
        assert [row["prediction"] for row in got] == results["prediction"]
        assert f"accuracy {recorded(run, client)['accuracy']:.2f}" in output[0]


def test_rows_of_a_client_are_prepared_with_the_statistics_of_its_site(tmp_path):
    header, rows = patients(tmp_path)
    more = {"evaluate": {"protocol": ["personal"]}, "method": {"name": "ditto", "lam": 0.1}}
    run, _ = train(tmp_path, table("sick", partition={"scheme": "site"}), **more)
    for client, site in enumerate(("north", "south")):
        here = [row for row in rows if row[4] == site and row[5] == "test"]
        file = write(tmp_path / "new.csv", header[1:4] + header[6:7], [row[1:4] + row[6:7] for row in here])
        for given in (client, site):
            results = package.load(run, client=given).predict(file)
            assert results.metrics["accuracy"] == recorded(run, client)["accuracy"]
    with pytest.raises(
        UserError, match=r"client: 'nroth' does not exist .* 0 to 1, or site names: did you mean 'north'"
    ):
        package.load(run, client="nroth")


def test_sites_with_equal_preprocessing_need_not_be_named(tmp_path):
    for seed, site in enumerate(("north", "south")):
        pictures(tmp_path / site, ["cat", "dog"], 6, seed)
    data = {"source": "image_folder", "size": 8, "silos": ["north", "south"], "partition": None}
    run, _ = train(tmp_path, {**data, "class_names": ["cat", "dog"]})
    assert len(package.load(run).predict(tmp_path / "north")["prediction"]) == 12


# ---- the file itself ----
def test_a_damaged_preprocessing_file_is_reported(study, tmp_path):
    run = shutil.copytree(study.run, tmp_path / "run")
    assert "preprocessing.json" in json.loads((run / "checksums.json").read_text())["files"]
    file = write(tmp_path / "new.csv", study.header, study.test)
    complete = (run / "preprocessing.json").read_text()
    for damaged in (
        complete[:99],
        complete.replace('"table"', '"of wood"'),
        "[]",
        complete.replace('"columns"', '"pillars"'),
    ):
        (run / "preprocessing.json").write_text(damaged)
        with pytest.raises(UserError, match=r"preprocessing\.json cannot be read as the preprocessing of a run"):
            package.load(run).predict(file)
    (run / "preprocessing.json").unlink()
    with pytest.raises(UserError, match=r"preprocessing\.json cannot be read"):
        package.load(run).predict(file)


def test_an_unwritable_output_and_a_missing_input_are_errors(study, tmp_path):
    file = write(tmp_path / "new.csv", study.header, study.test)
    for to, message in [
        (file / "below.csv", "cannot write"),
        (tmp_path / "out.txt", r"must end in \.csv"),
    ]:
        with pytest.raises(UserError, match=message):
            command.predict_file(RunModel(study.run), file, print, out=to)
    with pytest.raises(UserError, match=r"none\.csv does not exist"):
        package.load(study.run).predict(tmp_path / "none.csv")


def test_predicted_masks_are_named_after_the_image_files():
    """A column may be named `file`, which is also a parameter of numpy.savez."""
    mask = np.arange(8).reshape(2, 2, 2)
    archive = np.load(
        io.BytesIO(command._format_npz({"file": np.array(["a.png", "b.png"], dtype=object), "mask": mask}))
    )
    assert archive["file"].tolist() == ["a.png", "b.png"]
    assert np.array_equal(archive["mask"], mask)
