"""Texts by author become windows of symbols and the symbols after them; each author's end is the test part."""

import os
from pathlib import Path

import pytest
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.silos import count_local_labels, describe_silos, open_silos
from fedmpi.data.sources.texts import UNKNOWN_CHARACTER, shakespeare, text

REAL = Path(os.environ.get("FEDMPI_DATA") or Path(__file__).parents[4] / "shared" / "data")
ANN, BOB = "abcabcabca", "cbacbacbacbacbacb?"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "novels").mkdir()
    for name, said in (("bob", BOB), ("ann", ANN)):
        (tmp_path / "novels" / f"{name}.txt").write_text(said)
    return tmp_path


def spelled(rows, symbols):
    return ["".join(symbols[k] for k in row) for row in rows.tolist()]


def test_a_folder_of_authors(folder):
    data = text(folder, path="novels", context=3)
    symbols = [*data.input_and_class_names]
    assert symbols == ["a", "b", "c", UNKNOWN_CHARACTER]  # ? occurs in Bob's test part alone
    assert data.site_names == ("ann", "bob")
    # Ann's first 8 characters: 2 windows of 3 and the character after; Bob's first 15: 4
    assert spelled(data.train_x, symbols) == ["abc", "abc", "cba", "cba", "cba", "cba"]
    assert spelled(data.train_y, symbols) == ["bca", "bca", "bac", "bac", "bac", "bac"]
    assert data.site.tolist() == [0, 0, 1, 1, 1, 1]
    assert len(data.test_x) == 0  # Ann's 2 and Bob's 3 last characters are no window and the character after
    assert (data.train_x.dtype, data.train_y.dtype, data.classes) == (torch.int64, torch.int64, 4)
    longer = text(folder, path="novels", context=2)
    assert spelled(longer.test_x, symbols) == ["cb"]
    assert spelled(longer.test_y, symbols) == ["b" + UNKNOWN_CHARACTER]
    assert longer.test_site.tolist() == [1]
    assert text(folder, path="novels", context=3, min_chars=11).site_names == ("bob",)  # Ann's is too short
    given = text(folder, path="novels", context=3, alphabet="?cba")
    assert (given.input_and_class_names, given.train_x[0].tolist()) == (tuple("?cba"), [3, 2, 1])


def test_a_table_gives_the_same_data_as_a_folder(folder):
    """Rows of one author are joined by a line feed, and so are lines of any ending."""
    (folder / "a.csv").write_bytes(f'author,text\nbob,"{BOB[:5]}"\nann,{ANN}\nbob,"{BOB[5:9]}\r\n{BOB[9:]}"\n'.encode())
    (folder / "novels" / "bob.txt").write_text(f"{BOB[:5]}\n{BOB[5:9]}\n{BOB[9:]}")
    expected, data = (text(folder, path=path, context=2) for path in ("novels", "a.csv"))
    assert data.input_and_class_names == expected.input_and_class_names
    for name in ("train_x", "train_y", "test_x", "test_y", "site", "test_site"):
        assert torch.equal(getattr(data, name), getattr(expected, name))


def test_silos_give_the_same_data_as_sites(folder):
    by_sites = text(folder, path="novels", context=2, alphabet="abc?")
    opened = open_silos(text, folder, ["ann", "bob"], [0, 1], path="novels/{site}.txt", context=2, alphabet="abc?")
    for k, data in opened.items():
        assert torch.equal(data.train_x, by_sites.train_x[by_sites.site == k])
        assert torch.equal(data.test_y, by_sites.test_y[by_sites.test_site == k])
    assert not count_local_labels(
        opened, describe_silos(opened), ["ann", "bob"]
    ).any()  # characters are no class of a sample
    opened[1] = text(folder, site="novels/bob.txt", context=2, alphabet="?abc")
    with pytest.raises(UserError, match=r"classes of ann and bob have different names.*data\.alphabet"):
        count_local_labels(opened, describe_silos(opened), ["ann", "bob"])


SPOKEN = "Ann:\nabcab\ncabca\n\nBob:\nno\n\nAnn:\nbcabc\n"


def test_shakespeare_by_role(tmp_path):
    (tmp_path / "input.txt").write_text(SPOKEN)
    data = shakespeare(tmp_path, context=4, min_chars=5)
    assert data.site_names == ("Ann",)
    # "abcab\ncabca\nbcabc", 17 characters, of which the last 3 are the test part
    assert spelled(data.train_x, [*data.input_and_class_names]) == ["abca", "b\nca", "bca\n"]
    assert shakespeare(tmp_path, context=1, min_chars=1).site_names == ("Ann", "Bob")


@pytest.mark.skipif(not (REAL / "tinyshakespeare").is_dir(), reason=f"{REAL / 'tinyshakespeare'} is not there")
def test_tiny_shakespeare():
    data = shakespeare(REAL)
    assert (len(data.site_names), data.classes) == (141, 64)  # roles with 1,000 characters; of 65 one is in short roles
    assert (data.train_x[:, 1:] == data.train_y[:, :-1]).all()


def test_hidden_files_and_byte_order_marks_are_ignored(folder):
    before = text(folder, path="novels", context=3)
    (folder / "novels/ann.txt").rename(folder / "novels/ann.TXT")
    (folder / "novels/bob.txt").write_bytes(b"\xef\xbb\xbf" + BOB.encode())
    (folder / "novels/.hidden.txt").touch()
    assert torch.equal(text(folder, path="novels", context=3).train_x, before.train_x)
