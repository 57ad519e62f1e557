"""The source `leaf`: folders of JSON files as LEAF's preprocess.sh writes them."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.data.federated import split
from fedmpi.data.lazy_images import LazyImages
from fedmpi.data.sources.leaf import leaf
from fedmpi.tasks.per_position import NextSymbol


def save(folder, part, users, name="all_data_0_niid_0_keep_0.json", **more):
    """A file of users, each with its x and y, with the keys in LEAF's order."""
    (folder / part).mkdir(parents=True, exist_ok=True)
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    counts = [len(x) for x, _ in users.values()]
    content = {"users": list(users), **more, "num_samples": counts, "user_data": data}
    (folder / part / name).write_text(json.dumps(content))


def test_images_of_users_in_several_files(tmp_path):
    """FEMNIST: 784 numbers v / 255. Users in ascending order, whatever the order in the files."""
    pixels = np.random.default_rng(0).integers(0, 256, (7, 784))
    rows = (pixels / 255).tolist()
    save(tmp_path, "train", {"f1_02": (rows[:2], [3, 1]), "f0_10": (rows[2:5], [0, 61, 2])}, "b.json")
    save(tmp_path, "train", {"f0_09": (rows[5:6], [5])}, "a.json")
    save(tmp_path, "test", {"f1_02": (rows[6:], [1]), "f0_09": (rows[:1], [3])})
    data = leaf(tmp_path, path=".")
    assert data.site_names == ("f0_09", "f0_10", "f1_02")
    assert data.site.tolist() == [0, 1, 1, 1, 2, 2]
    assert data.train_y.tolist() == [5, 0, 61, 2, 3, 1]
    assert data.test_site.tolist() == [0, 2]
    assert data.test_y.tolist() == [3, 1]
    assert data.classes == 62
    assert isinstance(data.train_x, LazyImages)  # bytes in memory ...
    assert data.train_x.stored.dtype == torch.uint8
    wanted = torch.tensor(rows, dtype=torch.float32)[[5, 2, 3, 4, 0, 1]]
    assert torch.equal(data.train_x.all_inputs(), wanted.view(6, 1, 28, 28))  # ... of the same numbers to the last bit
    parts = split(data, "site", None, 0).parts
    assert [part.tolist() for part in parts] == [[0], [1, 2, 3], [4, 5]]


def test_numbers_of_any_size(tmp_path):
    """LEAF's Synthetic: vectors; users are numbers; CelebA's scripts write classes as 1.0."""
    save(tmp_path, "train", {"10": ([[0.5, -2.0]], [1.0]), "9": ([[1.5, 3.0], [0.25, 1e9]], [0, 1])})
    save(tmp_path, "test", {"9": ([[1.0, 0.0]], [0]), "10": ([[1.0, 2.0]], [1])})
    data = leaf(tmp_path, path=".")
    assert data.site_names == ("9", "10")
    assert data.train_x.tolist() == [[1.5, 3.0], [0.25, 1e9], [0.5, -2.0]]
    assert data.train_y.tolist() == [0, 1, 1]
    assert data.classes == 2


def test_next_character(tmp_path):
    """Shakespeare: of a row's targets only the character after it counts, so that accuracy is LEAF's."""
    save(tmp_path, "train", {"B": (["abc", "bca"], ["a", "b"]), "A": (["cab"], ["c"])}, hierarchies=["play", "play"])
    save(tmp_path, "test", {"A": (["abz"], ["a"]), "B": (["bca"], ["?"])})
    data = leaf(tmp_path, path=".")
    assert data.input_and_class_names == ("a", "b", "c", "\N{REPLACEMENT CHARACTER}")
    assert data.train_x.tolist() == [[2, 0, 1], [0, 1, 2], [1, 2, 0]]
    assert data.train_y.tolist() == [[-100, -100, 2], [-100, -100, 0], [-100, -100, 1]]
    assert data.test_x.tolist() == [[0, 1, 3], [1, 2, 0]]
    assert data.test_y[:, -1].tolist() == [0, 3]
    task = NextSymbol(4)
    outputs = torch.zeros(2, 3, 4)
    outputs[0, -1, 0] = 1  # the first row's character is right, the second one's not
    assert task.metrics(task.reduce_outputs(outputs, data.test_y), data.test_y)["accuracy"] == 50
    given = leaf(tmp_path, path=".", alphabet="zcba?!")
    assert given.classes == 6
    assert given.train_x.tolist()[0] == [1, 3, 2]
    with pytest.raises(UserError, match=r"contains '\?', which is not in data\.alphabet"):
        leaf(tmp_path, path=".", alphabet="abcz")
    with pytest.raises(UserError, match=r"'a' twice"):
        leaf(tmp_path, path=".", alphabet="abca")


def tweet(text):
    return ["1467810369", "Mon Apr 06", "NO_QUERY", "ann", text, "training"]


def test_texts(tmp_path):
    """Sent140: rows of six fields, of which the fifth is the text."""
    save(
        tmp_path, "train", {"ann": ([tweet("so sad, so sad!"), tweet("sad day")], [0, 1]), "bob": ([tweet("day")], [1])}
    )
    save(tmp_path, "test", {"ann": ([tweet("so new day.")], [1])})
    counted = leaf(tmp_path, path=".", vocabulary=3)  # sad 3, day 2, so 2
    assert counted.train_x.tolist() == [[2, 0, 2], [1, 1, 0], [0, 1, 0]]
    assert counted.test_x.tolist() == [[0, 1, 1]]
    assert leaf(tmp_path, path=".").input_shape == (1000,)
    assert counted.train_y.tolist() == [0, 1, 1]


def test_image_files(tmp_path):
    """CelebA: x names files of raw/img_align_celeba."""
    save(tmp_path, "train", {"7": (["000001.png", "000002.png"], [1.0, 0.0])})
    save(tmp_path, "test", {"7": (["000001.png"], [1.0])})
    with pytest.raises(MissingDataError, match=r"raw.img_align_celeba with the image files, such as 000001\.png"):
        leaf(tmp_path, path=".")
    folder = tmp_path / "raw" / "img_align_celeba"
    folder.mkdir(parents=True)
    for k in (1, 2):
        Image.fromarray(np.full((8, 8, 3), 40 * k, np.uint8)).save(folder / f"00000{k}.png")
    data = leaf(tmp_path, path=".", size=4)
    assert data.input_shape == (3, 4, 4)
    assert data.train_x.stored[:, 0, 0, 0].tolist() == [40, 80]
    assert data.train_y.tolist() == [1, 0]
    assert leaf(tmp_path, path=".").input_shape == (3, 84, 84)


def test_users_without_training_rows(tmp_path):
    """Their test rows are in the global test set; `-t user` of preprocess.sh tests on other users alone."""
    save(tmp_path, "train", {"a": ([[1.0]], [0]), "c": ([[2.0]], [1]), "empty": ([], [])})
    save(tmp_path, "test", {"b": ([[3.0]], [0]), "c": ([[4.0], [5.0]], [1, 0])})
    data = leaf(tmp_path, path=".")
    assert data.site_names == ("a", "c")
    assert data.test_site.tolist() == [-1, 1, 1]
    dataset = split(data, "site", None, 0)
    assert dataset.test_sizes.tolist() == [0, 2]
    assert len(dataset.global_test) == 3
    assert {name: len(rows) for name, rows in dataset.test_by_site.items()} == {"c": 2}
    save(tmp_path, "test", {"x": ([[3.0]], [0])})
    assert leaf(tmp_path, path=".").test_site is None


GOOD = {"a": ([[1.0, 2.0]], [0]), "b": ([[3.0, 4.0]], [1])}


@pytest.mark.parametrize(
    ("train", "options", "pattern"),
    [
        ({"a": ([[1.0, 2.0]], [0, 1])}, {}, r"user 'a': .* has no lists x and y of equal length"),
        (
            {"a": ([[1.0, 2.0], [1.0]], [0, 1])},
            {},
            r"user 'a': the samples in x do not all have the same number of values",
        ),
        ({**GOOD, "c": ([[1.0]], [0])}, {}, r"the shape of a sample is \(2,\) for one user and \(1,\) for another"),
        (
            {**GOOD, "c": (["abc"], ["d"])},
            {},
            r"user 'c': x contains characters, but x of previous users contains numbers",
        ),
        (
            {"a": ([["w", ["x"]]], [{"t": 1}])},
            {},
            r"user 'a': x = .* is not a sample of a known kind.*write your own data source",
        ),
        ({"a": ([[1.0, 2.0]], [[1, 0]])}, {}, r"user 'a': y contains \[1, 0\]; must be one number"),
        ({"a": ([[1.0, float("nan")]], [1])}, {}, r"x of train/ contains nan in row 0"),
        ({"a": (["abc", "ab"], ["d", "c"])}, {}, r"user 'a': the strings in x have different lengths"),
        ({"a": ([], [])}, {}, r"no user has samples"),
        (
            GOOD,
            {"classes": 1_000_000, "alphabet": "ab"},
            r"data\.alphabet has no effect, because x in .* contains numbers",
        ),
        (
            {"a": ([[1.0, 2.0]], [7])},
            {"classes": 3},
            r"y contains labels from 1 to 7; they must be integers from 0 to 2",
        ),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, train, options, pattern):
    save(tmp_path, "train", train)
    characters = "abc" in str(train) and "numbers" not in pattern
    save(tmp_path, "test", {"b": (["abc"], ["d"]) if characters else ([[3.0, 4.0]], [1])})
    with pytest.raises(UserError, match=pattern):
        leaf(tmp_path, path=".", **options)


def test_other_folders_and_files_are_refused(tmp_path):
    save(tmp_path, "train", GOOD)
    with pytest.raises(MissingDataError, match=r"test/\*\.json found; .*preprocess\.sh"):
        leaf(tmp_path, path=".")
    save(tmp_path, "test", {"b": (["abc"], ["d"])})
    with pytest.raises(UserError, match=r"x contains numbers in train/ and characters in test/"):
        leaf(tmp_path, path=".")
    save(tmp_path, "test", GOOD)
    save(tmp_path, "test", {"b": ([[1.0, 1.0]], [1])}, "more.json")
    with pytest.raises(UserError, match=r"more\.json, user 'b': the user appears twice"):
        leaf(tmp_path, path=".")
    (tmp_path / "test" / "more.json").write_text('{"users": []}')
    with pytest.raises(UserError, match=r"more\.json cannot be read as LEAF's JSON: the key user_data is missing"):
        leaf(tmp_path, path=".")
