"""`split` divides a data set: test rows of clients, shared tensors, sites, and checks of a user's own schemes."""

import warnings
from dataclasses import replace

import pytest
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.batches import batches, stored_channels_last
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split


def images(n=400, t=200, classes=4, channels=3):
    """Return images whose pixels are the row number (negative in the test part), with labels 0, 1, ... in turn."""
    x = torch.arange(n, dtype=torch.float32).view(n, 1, 1, 1).expand(n, channels, 5, 6).contiguous()
    test = -1 - torch.arange(t, dtype=torch.float32).view(t, 1, 1, 1).expand(t, channels, 5, 6).contiguous()
    return Dataset(x, torch.arange(n) % classes, test, torch.arange(t) % classes, classes)


def dataset_with_sites():
    owner = torch.tensor([0] * 10 + [1] * 20 + [2] * 30)
    y = torch.arange(60) % 2
    test_owner = torch.tensor([2, 1, 1])
    return Dataset(
        torch.rand(60, 4), y, torch.rand(3, 4), y[:3], 2, site=owner, test_site=test_owner, site_names=("a", "b", "c")
    )


def test_aligned_test_rows_have_the_proportions_of_the_client():
    """Class c has floor(T n_kc / n_k) rows, with T = 1000, or less if a class has too few test rows."""
    y, test_y = torch.tensor([0] * 71 + [1] * 29), torch.arange(2000) % 2

    def test_rows(tests, **options):
        data = Dataset(torch.zeros(100, 1), y, torch.zeros(tests, 1), test_y[:tests], 2)
        return split(data, "iid", 1, seed=0, **options).test[0].index

    rows = test_rows(2000, client_test="aligned")
    assert torch.bincount(test_y[rows]).tolist() == [710, 290]
    assert rows.unique().numel() == 1000
    assert torch.bincount(test_y[test_rows(300)]).tolist() == [149, 61]  # T = floor(150 / 0.71) = 211
    # A client with 1,200 classes gets one row of each of the 1,000 classes of which it has two samples.
    y = torch.cat([torch.arange(1200), torch.arange(200, 1200)])
    data = Dataset(torch.zeros(2200, 1), y, torch.zeros(1200, 1), torch.arange(1200), 1200)
    assert split(data, "iid", 1, seed=0).test[0].index.tolist() == list(range(200, 1200))


def test_class_match_and_global_choose_all_rows_of_the_classes_or_all():
    data = images()
    fed = split(data, "shards", 4, seed=0, client_test="class_match", s=1)
    for k in range(4):
        owned = set(data.train_y[fed.parts[k]].tolist())
        assert fed.test[k].index.tolist() == [i for i in range(200) if i % 4 in owned]
    assert split(data, "iid", 4, seed=0, client_test="global").test_sizes.tolist() == [200] * 4


def test_scheme_site_makes_one_client_per_site():
    fed = split(dataset_with_sites(), "site", None, seed=0)
    assert fed.train_sizes.tolist() == [10, 20, 30]
    assert [fed.test[k].index.tolist() for k in range(3)] == [[], [1, 2], [0]]
    assert fed.site_names == ("a", "b", "c")
    assert split(dataset_with_sites(), "site", 3, seed=0, client_test="global").test_sizes.tolist() == [3, 3, 3]
    assert split(dataset_with_sites(), "iid", 4, seed=0).site_names == ()


def regression():
    return Dataset(torch.rand(20, 2), torch.rand(20), torch.rand(6, 2), torch.rand(6), 1)


def test_regression_has_no_label_counts_and_tests_on_all_rows():
    fed = split(regression(), "iid", 4, seed=0)
    assert fed.label_counts.tolist() == [[0]] * 4
    assert fed.test_sizes.tolist() == [6] * 4


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_is_stored_once_and_kept_in_batches(channels):
    data = images(channels=channels)
    fed = split(data, "iid", 4, seed=0)
    moved = fed.to("cpu", channels_last=True)
    x = moved.train[0].x
    assert x.stride() == (5 * 6 * channels, 1, 6 * channels, channels)
    assert all(moved.train[k].x is x for k in range(4))
    assert moved.global_test.x is moved.test[3].x
    assert torch.equal(x, data.train_x)
    generators = (torch.Generator().manual_seed(1) for _ in range(2))
    plain, last = (list(batches(f.train[2], 7, g)) for f, g in zip((fed, moved), generators, strict=True))
    for (a, _), (b, _) in zip(plain, last, strict=True):
        assert torch.equal(a, b)
        assert stored_channels_last(b)
        assert not stored_channels_last(a)
    back = moved.to("cpu", channels_last=False)
    assert back.train[0].x.stride() == data.train_x.stride()


def write_scheme(tmp_path, body):
    file = tmp_path / "mine.py"
    file.write_text(f"import numpy as np\n\n\ndef cut(y, n, generator, *, odd: bool = False):\n    {body}\n")
    return f"{file}:cut"


@pytest.mark.filterwarnings("ignore:.*assigns 200 of 400 training samples to no client")
def test_a_users_own_scheme_gets_its_options(tmp_path):
    scheme = write_scheme(tmp_path, "return [np.arange(1 if odd else 0, 400, 2), np.array([200 + odd])][:n]")
    assert split(images(), scheme, 1, seed=0, odd=True).parts[0][:3].tolist() == [1, 3, 5]
    with pytest.raises(UserError, match=r"data\.partition\.odd"):
        split(images(), scheme, 1, seed=0, odd=3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[np.arange(3)]", "returned 1 index arrays, but must return 2"),
        ("[np.arange(3), np.arange(0)]", "gives client 1 no training sample"),
        ("[np.arange(3), np.arange(2, 5)]", "sample 2 more than once"),
        ("[np.arange(3), np.array([3, 400])]", r"client 1 indices 3\.\.400.*0\.\.399"),
        ("[np.arange(3), np.array([3.5])]", "float64"),
        ("3", "returned int; it must return a list of one index array per client"),
    ],
)
def test_errors_of_a_users_own_scheme_name_it(tmp_path, body, message):
    with pytest.raises(UserError, match=message):
        split(images(), write_scheme(tmp_path, f"return {body}"), 2, seed=0)


def test_sites_that_are_not_clients_are_evaluated_nevertheless():
    site, test_site = torch.arange(400) % 4, torch.arange(200) % 3  # the last site has no test rows
    data = replace(images(), site=site, test_site=test_site, site_names=("a", "b", "c", "d"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fed = split(data, "site", None, seed=0, only=["d", "b"])
    assert (fed.clients, fed.site_names) == (2, ("b", "d"))
    assert [fed.parts[k].tolist() for k in (0, 1)] == [torch.nonzero(site == k).flatten().tolist() for k in (1, 3)]
    assert fed.test_sizes.tolist() == [67, 0]
    assert len(fed.global_test) == 200
    assert {name: shard.index.tolist() for name, shard in fed.test_by_site.items()} == {
        name: torch.nonzero(test_site == k).flatten().tolist() for k, name in enumerate("abc")
    }
    by_number = split(replace(data, site_names=()), "site", None, seed=0, only=[3, 1])
    assert [part.tolist() for part in by_number.parts] == [part.tolist() for part in fed.parts]
    assert list(by_number.test_by_site) == ["0", "1", "2"]
    numbers = replace(data, site_names=("1", "2", "10", "30"))  # hospitals whose names are numbers
    assert split(numbers, "site", None, seed=0, only=[30, "2"]).site_names == ("2", "30")


@pytest.mark.parametrize(
    ("make", "scheme", "clients", "options", "message"),
    [
        (images, "site", None, {}, "needs a data set with a site for each sample"),
        (images, "iid", None, {}, "needs the number of clients"),
        (images, "iid", 0, {}, r"data\.partition\.clients: 0 is not allowed"),
        (images, "dirichlet", 4, {"alhpa": 1.0}, "alpha"),
        (images, "dirichlet", 4, {"convention": "klass"}, "class_plain"),
        (images, "iid", 4, {"client_test": "site"}, "scheme: site"),
        (images, "iid", 4, {"client_test": "alligned"}, "must be one of auto, site, aligned"),
        (images, "iid", 4, {"client_test": "shards"}, r"client_test: shards needs data\.partition\.scheme: shards"),
        (images, "shards", 4, {"client_test": "shards", "sorted": True}, r"needs data\.partition\.scheme: shards"),
        (
            lambda: images(t=12),
            "shards",
            8,
            {"client_test": "shards", "s": 2},
            r"class 0 has only 3 test rows for 4 shards \(.*; .*class_match",
        ),
        (regression, "iid", 4, {"client_test": "aligned"}, "client_test: global"),
        (regression, "shards", 4, {}, "regression"),
    ],
)
def test_impossible_divisions_are_errors(make, scheme, clients, options, message):
    with pytest.raises(UserError, match=message):
        split(make(), scheme, clients, seed=0, **options)
