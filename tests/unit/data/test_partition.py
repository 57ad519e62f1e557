"""Partition schemes assign each sample once, follow their stated distribution, and give errors with numbers."""

import numpy as np
import pytest
import torch

from fedmpi.common.errors import UserError
from fedmpi.common.registry import load_object
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import split
from fedmpi.data.partitions import random_partitions, registry
from fedmpi.data.partitions.random_partitions import dirichlet, iid, quantity
from fedmpi.data.partitions.shards import classes, shards


def balanced(classes, each):
    """Return shuffled labels with `each` samples of every class."""
    return np.random.default_rng(7).permutation(np.repeat(np.arange(classes), each))


def rng(seed=0):
    return np.random.default_rng(seed)


def histograms(labels, parts, classes):
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


SCHEMES = [
    ("iid", {}),
    ("quantity", {"alpha": 0.5}),
    ("classes", {"classes_per_client": 3}),
    ("shards", {"s": 2}),
    ("shards", {"s": 3, "distinct": True}),
    ("shards", {"s": 2, "sorted": True}),
    ("dirichlet", {"alpha": 0.5}),
    ("dirichlet", {"alpha": 0.5, "convention": "class_plain"}),
    ("dirichlet", {"alpha": 0.5, "convention": "client"}),
    ("dirichlet", {"alpha": 1e-3, "convention": "client"}),
]


@pytest.mark.parametrize(("scheme", "options"), SCHEMES)
def test_each_sample_is_assigned_once_and_the_seed_determines_the_partition(scheme, options):
    """There are ten classes, whose numbers have gaps, of 103 samples, a prime."""
    labels = np.delete(np.arange(12), [2, 7])[balanced(10, 103)]
    function = load_object(scheme, registry, "partition")
    parts = function(labels, 20, rng(), **options)
    assert len(parts) == 20
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    again, other = function(labels, 20, rng(), **options), function(labels, 20, rng(1), **options)
    assert all(map(np.array_equal, parts, again))
    assert not all(map(np.array_equal, parts, other))


def test_the_first_parts_get_the_remainder():
    # 103 = 10 * 10 + 3, so three clients have 11; one class of 11 in four shards is 3 + 3 + 3 + 2
    assert [len(part) for part in iid(np.zeros(103, dtype=int), 10, rng())] == [11] * 3 + [10] * 7
    assert sorted(len(part) for part in shards(np.zeros(11, dtype=int), 4, rng(), s=1)) == [2, 3, 3, 3]


@pytest.mark.parametrize(("clients", "s"), [(100, 2), (10, 10), (5, 8)])
def test_distinct_shards_give_exactly_s_classes(clients, s):
    labels = balanced(10, 1000)
    counts = histograms(labels, shards(labels, clients, rng(), s=s, distinct=True), 10)
    assert ((counts > 0).sum(1) == s).all()
    assert (counts.sum(0) == 1000).all()


@pytest.mark.parametrize("convention", ["class", "class_plain", "client"])
def test_large_alpha_gives_every_client_the_global_class_proportions(convention):
    labels = balanced(10, 1000)
    counts = histograms(labels, dirichlet(labels, 10, rng(), alpha=1e6, convention=convention), 10)
    # With `client` each client draws 1,000 labels; a class is binomial with standard deviation sqrt(1000 * .1 * .9) =
    # 9.5, of which 5 are allowed. The last client gets what remains, with 9.5 * sqrt(9) = 28. `class` is exact to 1.
    tolerance = {"class": 2, "class_plain": 2, "client": 48}[convention]
    assert np.abs(counts[:-1] - 100).max() <= tolerance
    assert np.abs(counts[-1] - 100).max() <= 3 * tolerance


@pytest.mark.parametrize("clients", [10, 40])  # one client, or four, are as large as a class
def test_small_alpha_by_client_gives_one_class_until_it_is_exhausted(clients):
    labels = balanced(10, 100)
    counts = histograms(labels, dirichlet(labels, clients, rng(3), alpha=1e-6, convention="client"), 10)
    assert (counts.sum(1) == 1000 // clients).all()
    assert ((counts > 0).sum(1) == 1).all()


def test_by_client_has_the_distribution_of_drawing_sample_by_sample():
    """The number of samples of class 0 is compared for classes of 3 and 5 samples and a client of 4."""
    labels = np.array([0] * 3 + [1] * 5)
    draws, alpha = 4000, 0.7
    ours = np.zeros(5)
    naive = np.zeros(5)
    generator = rng(11)
    for _ in range(draws):
        part = dirichlet(labels, 2, generator, alpha=alpha, convention="client", min_size=1)[0]
        ours[(labels[part] == 0).sum()] += 1
        q, left = generator.dirichlet([alpha, alpha]), [3, 5]
        for _ in range(4):
            c = int(generator.random() < q[1])
            if left[c] == 0:
                c = 1 - c
            left[c] -= 1
        naive[3 - left[0]] += 1
    # a fraction has standard deviation at most sqrt(.25 / 4000) = .0079, the difference of two 1.41 times that; 4 of
    # these are allowed
    assert np.abs(ours - naive).max() / draws < 4 * 1.415 * 0.0079


@pytest.mark.parametrize(
    ("scheme", "labels", "clients", "options", "message"),
    [
        (iid, np.zeros(3, dtype=int), 4, {}, "3 samples into 4 parts"),
        (
            dirichlet,
            balanced(2, 20),
            5,
            {},
            r"min_size: 10 is too large, because 40 samples .* 5 clients are only 8\.0 per client.*at most 8",
        ),
        (dirichlet, np.zeros(50), 2, {}, "float64"),
        (shards, balanced(10, 50), 4, {"s": 2}, r"\(clients x s = 8\) is less than the number of classes \(10\)"),
        (shards, balanced(10, 50), 300, {"s": 2}, "cannot split 500 samples into clients x s = 300 x 2"),
        (shards, balanced(3, 50), 3, {"s": 4, "distinct": True}, "s: 4 distinct classes"),
        (shards, balanced(3, 50), 3, {"s": 2, "distinct": True, "sorted": True}, "cannot both be true"),
    ],
)
def test_impossible_partitions_are_errors_with_numbers(scheme, labels, clients, options, message):
    with pytest.raises(UserError, match=message):
        scheme(labels, clients, rng(), **options)


def test_the_number_of_draws_is_limited(monkeypatch):
    monkeypatch.setattr(random_partitions, "MAX_SHARES", 1000)
    # for alpha -> 0 each of 2 classes goes to one client, so 8 of 10 clients have no sample in any draw
    with pytest.raises(
        UserError, match=r"none of \d+ draws.*alpha=1e-05, clients=10.*the smallest client has 0.*raise alpha"
    ):
        dirichlet(balanced(2, 100), 10, rng(), alpha=1e-5)
    with pytest.raises(UserError, match=r"none of \d+ draws of quantity \(alpha=1e-08, clients=2\).*raise alpha"):
        quantity(np.zeros(20, dtype=int), 2, rng(), alpha=1e-8)


@pytest.mark.parametrize(("clients", "k"), [(10, 1), (25, 3), (7, 10)])
def test_classes_gives_each_client_exactly_k(clients, k):
    labels = balanced(10, 600)
    counts = histograms(labels, parts := classes(labels, clients, rng(), classes_per_client=k), 10)
    assert ((counts > 0).sum(1) == k).all()
    for c in range(10):
        sizes = counts[counts[:, c] > 0, c]
        assert sizes.max(initial=0) - sizes.min(initial=600) <= 1  # equal parts for the clients that have the class
        assert sizes.sum() in (0, 600)
    if clients >= 10:
        assert sum(map(len, parts)) == 6000  # client i has class i mod C, so each class has a client


def test_quantity_changes_only_the_sizes():
    """Samples are cut at floor(cumsum(q) n), with q ~ Dir(alpha 1_N) drawn until all have min_size samples."""
    labels, naive = balanced(10, 1000), rng()
    parts = quantity(labels, 10, rng(), alpha=0.5)
    sizes = np.zeros(10)
    while sizes.min() < 10:
        sizes = np.diff(np.floor(np.cumsum(naive.dirichlet([0.5] * 10)) * 10_000)[:-1], prepend=0, append=10_000)
    assert [len(part) for part in parts] == sizes.tolist()
    assert sizes.max() > 3 * np.median(sizes)
    large = histograms(labels, parts, 10)[sizes.argmax()]
    # the standard deviation of a class among n samples, drawn without replacement, is below sqrt(n / 10)
    assert np.abs(large - sizes.max() / 10).max() < 5 * (sizes.max() / 10) ** 0.5


def read_file(path, clients=None, samples=5):
    x, y = torch.zeros(samples, 1), torch.zeros(samples, dtype=torch.int64)
    return [part.tolist() for part in split(Dataset(x, y, x, y, 2), "file", clients, 0, path=str(path)).parts]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_file_assigns_samples_to_clients(tmp_path):
    (tmp_path / "parts.csv").write_text("client\n1\n0\n-1\n1\n0\n")
    assert read_file(tmp_path / "parts.csv") == [[1, 4], [0, 3]]
    validation = {"validation_indices": np.array([1]), "validation_offsets": np.array([0, 1, 1])}
    np.savez(tmp_path / "partition.npz", indices=np.array([4, 0, 3]), offsets=np.array([0, 1, 3]), **validation)
    assert read_file(tmp_path / "partition.npz") == [[1, 4], [0, 3]]


@pytest.mark.parametrize(
    ("name", "text", "clients", "message"),
    [
        ("a.txt", "", None, "end in .csv or .npz"),
        (
            "a.csv",
            "owner\n1\n",
            None,
            r"a\.csv cannot be read as a partition: it has no column `client`; its columns: owner",
        ),
        ("a.csv", "client\n0\nx\n", None, r"line 3: client is 'x'"),
        ("a.csv", "client\n0\n0\n99999999999999999999\n", None, r"line 4: client is '9+'; must be 0 to 2, or -1"),
        ("a.csv", "client\n-1\n-1\n-1\n", None, "a.csv assigns no sample to any client"),
        (
            "a.csv",
            "client\n0\n1\n0\n",
            3,
            r"clients: 3 differs from the 2 clients in .*remove data\.partition\.clients",
        ),
        ("a.npz", "text", None, "cannot be read as a partition"),
    ],
)
def test_unusable_partition_files_are_errors(tmp_path, name, text, clients, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_file(tmp_path / name, clients, 3)


def draw_one_after_another(labels, clients, generator, alpha, balance, min_size):
    """Draw like the authors of NIID-Bench: one draw per class, and everything again until all clients have enough.

    A class whose whole mass is on full clients is drawn again for the others.
    """
    n = len(labels)
    while True:
        sizes, counts = np.zeros(clients), []
        for c in np.unique(labels):
            free = sizes < n / clients if balance else np.ones(clients, dtype=bool)
            q = np.where(free, generator.dirichlet([alpha] * clients), 0)
            if q.sum() < 1e-300:
                q[free] = generator.dirichlet([alpha] * int(free.sum()))
            ends = np.floor(np.cumsum(q / q.sum()) * (labels == c).sum())
            ends[np.flatnonzero(free)[-1] :] = (labels == c).sum()
            counts.append(np.diff(ends, prepend=0))
            sizes += counts[-1]
        if sizes.min() >= min_size:
            return np.array(counts).T


@pytest.mark.parametrize(
    ("alpha", "convention", "min_single_draws"),
    [
        (0.004, "class", 50),
        (0.05, "class", 50),
        (0.3, "class_plain", 50),
        (2.0, "class_plain", 50),
        (0.003, "class", 2),  # most draws have their mass on full clients, so that none can be checked in a block
    ],
)
def test_draws_in_blocks_equal_single_draws(monkeypatch, alpha, convention, min_single_draws):
    monkeypatch.setattr(random_partitions, "MIN_SINGLE_DRAWS", min_single_draws)
    labels = balanced(6, 300)
    for seed in range(8):
        ours, naive = rng(seed), rng(seed)
        parts = dirichlet(labels, 5, ours, alpha=alpha, convention=convention, min_size=3)
        expected = draw_one_after_another(labels, 5, naive, alpha, convention == "class", 3)
        assert np.array_equal(histograms(labels, parts, 6), expected)
        for label in range(6):  # then the samples of each class are drawn
            naive.permutation(np.flatnonzero(labels == label))
        assert ours.random() == naive.random()
