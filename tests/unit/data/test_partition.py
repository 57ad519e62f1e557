"""Partitions: every index once, closed-form sizes, the limits of the Dirichlet parameter, refusals with numbers."""

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
    """Shuffled labels, `each` of every class."""
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
def test_every_index_once_and_deterministic(scheme, options):
    """103 samples a class, which nothing divides, of ten classes whose numbers have gaps."""
    labels = np.delete(np.arange(12), [2, 7])[balanced(10, 103)]
    cut = load_object(scheme, registry, "partition")
    parts = cut(labels, 20, rng(), **options)
    assert len(parts) == 20
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    again, other = cut(labels, 20, rng(), **options), cut(labels, 20, rng(1), **options)
    assert all(map(np.array_equal, parts, again))
    assert not all(map(np.array_equal, parts, other))


def test_a_remainder_is_spread_over_the_first_parts():
    # 103 = 10 * 10 + 3: three clients hold 11; one class of 11 in four shards, 11 = 3 + 3 + 3 + 2
    assert [len(part) for part in iid(np.zeros(103, dtype=int), 10, rng())] == [11] * 3 + [10] * 7
    assert sorted(len(part) for part in shards(np.zeros(11, dtype=int), 4, rng(), s=1)) == [2, 3, 3, 3]


@pytest.mark.parametrize(("clients", "s"), [(100, 2), (10, 10), (5, 8)])
def test_distinct_shards_give_exactly_s_classes(clients, s):
    labels = balanced(10, 1000)
    counts = histograms(labels, shards(labels, clients, rng(), s=s, distinct=True), 10)
    assert ((counts > 0).sum(1) == s).all()
    assert (counts.sum(0) == 1000).all()


@pytest.mark.parametrize("convention", ["class", "class_plain", "client"])
def test_large_alpha_is_the_global_histogram(convention):
    labels = balanced(10, 1000)
    counts = histograms(labels, dirichlet(labels, 10, rng(), alpha=1e6, convention=convention), 10)
    # `client` draws 1,000 labels a client, each class binomial with deviation sqrt(1000 * .1 * .9) = 9.5: 5 deviations,
    # save the last client, which takes what nine others left: deviation 9.5 * sqrt(9) = 28. The others are exact to 1.
    tolerance = {"class": 2, "class_plain": 2, "client": 48}[convention]
    assert np.abs(counts[:-1] - 100).max() <= tolerance
    assert np.abs(counts[-1] - 100).max() <= 3 * tolerance


@pytest.mark.parametrize("clients", [10, 40])  # a client is as large as a class; four clients are
def test_small_alpha_by_client_is_one_class_until_it_is_exhausted(clients):
    labels = balanced(10, 100)
    counts = histograms(labels, dirichlet(labels, clients, rng(3), alpha=1e-6, convention="client"), 10)
    assert (counts.sum(1) == 1000 // clients).all()
    assert ((counts > 0).sum(1) == 1).all()


def test_by_client_follows_the_sample_by_sample_law():
    """Two classes of 3 and 5, one client of 4 drawn by hand against many draws: the law of the class-0 count."""
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
    # each share has deviation at most sqrt(.25 / 4000) = .0079, the difference of two 1.41 times that: 4 deviations
    assert np.abs(ours - naive).max() / draws < 4 * 1.415 * 0.0079


@pytest.mark.parametrize(
    ("cut", "labels", "clients", "options", "words"),
    [
        (iid, np.zeros(3, dtype=int), 4, {}, "3 samples into clients=4"),
        (
            dirichlet,
            balanced(2, 20),
            5,
            {},
            r"min_size: 10 is too large: 40 samples .* clients=5 are 8\.0 per client.*at most 8",
        ),
        (dirichlet, np.zeros(50), 2, {}, "float64"),
        (shards, balanced(10, 50), 4, {"s": 2}, "8 shards are fewer than the 10 classes"),
        (shards, balanced(10, 50), 300, {"s": 2}, "cannot cut 500 samples into clients x s = 300 x 2"),
        (shards, balanced(3, 50), 3, {"s": 4, "distinct": True}, "s: 4 distinct classes"),
        (shards, balanced(3, 50), 3, {"s": 2, "distinct": True, "sorted": True}, "cannot both be true"),
    ],
)
def test_refused_with_numbers(cut, labels, clients, options, words):
    with pytest.raises(UserError, match=words):
        cut(labels, clients, rng(), **options)


def test_redraws_are_capped(monkeypatch):
    monkeypatch.setattr(random_partitions, "MAX_SHARES", 1000)
    # 2 classes at alpha -> 0 go to one client each, so of 10 clients 8 stay empty in every draw
    with pytest.raises(UserError, match=r"none of \d+ draws.*alpha=1e-05, clients=10.*the best gave 0.*raise alpha"):
        dirichlet(balanced(2, 100), 10, rng(), alpha=1e-5)
    with pytest.raises(UserError, match=r"none of \d+ draws of quantity \(alpha=1e-08, clients=2\).*raise alpha"):
        quantity(np.zeros(20, dtype=int), 2, rng(), alpha=1e-8)


@pytest.mark.parametrize(("clients", "k"), [(10, 1), (25, 3), (7, 10)])
def test_classes_gives_each_client_exactly_k(clients, k):
    labels = balanced(10, 600)
    counts = histograms(labels, parts := classes(labels, clients, rng(), classes_per_client=k), 10)
    assert ((counts > 0).sum(1) == k).all()
    for c in range(10):
        held = counts[counts[:, c] > 0, c]
        assert held.max(initial=0) - held.min(initial=600) <= 1  # in equal parts among those who hold it
        assert held.sum() in (0, 600)
    if clients >= 10:
        assert sum(map(len, parts)) == 6000  # client i holds class i mod C, so nothing is left over


def test_quantity_changes_sizes_alone():
    """Sizes are cut at floor(cumsum(q) n), q ~ Dir(alpha 1_N), drawn until all have min_size samples."""
    labels, naive = balanced(10, 1000), rng()
    parts = quantity(labels, 10, rng(), alpha=0.5)
    sizes = np.zeros(10)
    while sizes.min() < 10:
        sizes = np.diff(np.floor(np.cumsum(naive.dirichlet([0.5] * 10)) * 10_000)[:-1], prepend=0, append=10_000)
    assert [len(part) for part in parts] == sizes.tolist()
    assert sizes.max() > 3 * np.median(sizes)
    large = histograms(labels, parts, 10)[sizes.argmax()]
    # a share of n samples drawn without replacement: deviation below sqrt(n / 10)
    assert np.abs(large - sizes.max() / 10).max() < 5 * (sizes.max() / 10) ** 0.5


def read_file(path, clients=None, samples=5):
    x, y = torch.zeros(samples, 1), torch.zeros(samples, dtype=torch.int64)
    return [part.tolist() for part in split(Dataset(x, y, x, y, 2), "file", clients, 0, path=str(path)).parts]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_file_says_who_holds_what(tmp_path):
    (tmp_path / "parts.csv").write_text("client\n1\n0\n-1\n1\n0\n")
    assert read_file(tmp_path / "parts.csv") == [[1, 4], [0, 3]]
    validation = {"validation_indices": np.array([1]), "validation_offsets": np.array([0, 1, 1])}
    np.savez(tmp_path / "partition.npz", indices=np.array([4, 0, 3]), offsets=np.array([0, 1, 3]), **validation)
    assert read_file(tmp_path / "partition.npz") == [[1, 4], [0, 3]]


@pytest.mark.parametrize(
    ("name", "text", "clients", "words"),
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
        ("a.csv", "client\n-1\n-1\n-1\n", None, "a.csv assigns no sample to a client"),
        (
            "a.csv",
            "client\n0\n1\n0\n",
            3,
            r"clients: 3 differs from the 2 clients in .*remove data\.partition\.clients",
        ),
        ("a.npz", "text", None, "cannot be read as a partition"),
    ],
)
def test_a_file_that_is_no_partition(tmp_path, name, text, clients, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        read_file(tmp_path / name, clients, 3)


def drawn_one_after_another(labels, clients, generator, alpha, balance, min_size):
    """Convention class as the benchmark's authors write it: one draw a class, everything redrawn until all have
    enough; a class whose mass fell on full clients is drawn among the others."""
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
    ("alpha", "convention", "slow"),
    [
        (0.004, "class", 50),
        (0.05, "class", 50),
        (0.3, "class_plain", 50),
        (2.0, "class_plain", 50),
        (0.003, "class", 2),  # the mass of most draws falls on full clients, and none is judged together with others
    ],
)
def test_many_draws_at_once_are_draws_one_after_another(monkeypatch, alpha, convention, slow):
    monkeypatch.setattr(random_partitions, "MIN_SINGLE_DRAWS", slow)
    labels = balanced(6, 300)
    for seed in range(8):
        ours, naive = rng(seed), rng(seed)
        parts = dirichlet(labels, 5, ours, alpha=alpha, convention=convention, min_size=3)
        expected = drawn_one_after_another(labels, 5, naive, alpha, convention == "class", 3)
        assert np.array_equal(histograms(labels, parts, 6), expected)
        for label in range(6):  # the samples themselves come next, class after class
            naive.permutation(np.flatnonzero(labels == label))
        assert ours.random() == naive.random()
