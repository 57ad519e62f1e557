"""With many clients, no object is made for a client before it is sampled, and all clients have their former rows."""

import hashlib
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import run_experiment, settings

from fedmpi.common import seeds
from fedmpi.data import batches as batches_module
from fedmpi.data.batches import Shard, iter_samples_once_if_shared, map_samples_and_targets, merge_shards
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import hold_out_validation, split
from fedmpi.data.partitions.base import Partition, equal_sizes


def rows_of_numbers(n, classes=3):
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(n + 50, 4, generator=g), torch.randint(classes, (n + 50,), generator=g)
    return Dataset(x[:n], y[:n], x[n:], y[n:], classes)


# ---- objects ----
@pytest.fixture
def object_counts(monkeypatch):
    """Count the shards and random generators that are made."""
    counts, derive = Counter(), seeds.derive_seed

    class CountedShard(Shard):
        def __init__(self, *args):
            counts["shards"] += 1
            super().__init__(*args)

    def counting(seed, *purpose):
        counts["generators"] += 1
        return derive(seed, *purpose)

    monkeypatch.setattr(batches_module, "Shard", CountedShard)
    monkeypatch.setattr(seeds, "derive_seed", counting)
    return counts


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_run_makes_no_object_for_a_client_that_is_not_sampled(object_counts, method):
    """3,000 clients need as many shards and generators as 30 if 3 are sampled in each of 2 rounds."""
    numbers = []
    for clients in (30, 3_000):
        object_counts.clear()
        config = settings(
            method,
            rounds=2,
            model={"name": "logistic"},
            cohort={"fraction": None, "size": 3},
            train={"steps": 1, "momentum": 0.0},
            evaluate={"protocol": ["global"]},
        )
        it = run_experiment(config, split(rows_of_numbers(6_000), "iid", clients, 0))
        assert len(it.fed.states.rows) <= 6
        assert len(it.fed.states.owners) <= 6
        numbers.append(dict(object_counts))
    assert numbers[0] == numbers[1]
    assert 0 < numbers[1]["shards"] < 100


@pytest.mark.parametrize("client_test", ["auto", "class_match", "global"])
def test_test_rows_are_computed_on_access(monkeypatch, client_test):
    drawn, numpy_rng = [], seeds.numpy_generator
    monkeypatch.setattr(
        seeds, "numpy_generator", lambda seed, *purpose: drawn.append(purpose) or numpy_rng(seed, *purpose)
    )
    fed = split(rows_of_numbers(2_000), "iid", 1_000, 0, client_test)
    assert drawn == [("partition",)]
    sizes = [len(fed.test[k]) for k in range(0, 1_000, 50)]
    assert sizes == fed.test_sizes[::50].tolist()
    assert fed.test[50].index is fed.test[50].index, "they are computed once"
    tested = [("client_test", k) for k in range(0, 1_000, 50)] if client_test == "auto" else []
    assert drawn[1:] == tested


def test_shards_with_shared_tensors_equal_shards_with_their_own():
    fed = split(rows_of_numbers(30), "iid", 3, 0)
    by_hand = type(fed)(**{**vars(fed), "train": dict(fed.train)})
    shared, separate = (hold_out_validation(each, 0.3, 0) for each in (fed, by_hand))
    for part in ("train", "validation"):
        ours, theirs = getattr(shared, part), getattr(separate, part)
        assert all(torch.equal(ours[k].index, theirs[k].index) for k in range(3))
        assert torch.equal(merge_shards(ours).index, merge_shards(theirs).index)
        changed = map_samples_and_targets(ours, lambda x: -x)
        assert torch.equal(changed[0].x, -ours[0].x)
        assert [len([*iter_samples_once_if_shared(shards)]) for shards in (ours, theirs)] == [1, 3]
    assert np.array_equal(shared.label_counts, separate.label_counts)
    assert np.array_equal(shared.validation_sizes, separate.validation_sizes)


# ---- the class Partition ----
def test_a_partition_equals_a_list_of_arrays():
    rng = np.random.default_rng(3)
    for clients in (1, 4, 40):
        owner = rng.integers(-1, clients, 200)
        parts, naive = Partition.from_owners(owner, clients), [np.flatnonzero(owner == k) for k in range(clients)]
        assert [part.tolist() for part in parts] == [part.tolist() for part in naive]
        assert parts.sizes.tolist() == [len(part) for part in naive]
        assert parts.owner.tolist() == [k for k, part in enumerate(naive) for _ in part]
        mixed = [rng.permutation(part) for part in naive]
        assert [part.tolist() for part in Partition.from_parts(mixed)] == [part.tolist() for part in mixed]
        assert [part.tolist() for part in Partition.from_parts(mixed).ascending()] == [part.tolist() for part in naive]
    for rows in range(12):
        assert equal_sizes(rows, 5).tolist() == [len(part) for part in np.array_split(np.arange(rows), 5)]


# ---- recorded rows ----
# Digests of the training, test and validation rows of clients, recorded when each client had an array of its own.
RECORDED_DIGESTS = {
    ("iid", 13): "b88c65efc94a 7a80a941e282 39912c778853",
    ("quantity", 9): "a09c3d127bd4 95527455b253 426354fa5b65",
    ("classes", 15, ("classes_per_client", 3)): "7a8f844ccca5 91102422486d b8481eb6ae24",
    ("shards", 14, ("s", 2)): "30a3060ea9f5 e442ac96e7e8 0bddf03d3259",
    ("shards", 14, ("s", 3), ("distinct", True)): "2ac92ae8e3a2 c41f70c7da40 36e88082fc3c",
    ("shards", 13, ("sorted", True)): "655c43e1c6af c8c30a14dfc9 a2b5dc62e295",
    ("dirichlet", 11): "e7092551b9e3 ce2b0056123c 9f3cfabf9019",
    ("dirichlet", 11, ("convention", "class_plain")): "2d83788e794f 7c74a921a9dc eaab3ef4f2a2",
    ("dirichlet", 11, ("convention", "client")): "1fb0ee46c0c2 a88c85d7894f 02bbeba4656f",
    ("site", None): "84234a948b5d afa6f4f96506 452a96d9ffc8",
    ("site", None, ("only", (3, 1))): "342be462feea f0547f0c8b6f 7958524aad8b",
}


@pytest.mark.parametrize(("chosen", "digests"), RECORDED_DIGESTS.items(), ids=map(str, RECORDED_DIGESTS))
def test_clients_have_the_recorded_rows(chosen, digests):
    g = torch.Generator().manual_seed(0)
    n, t = 1039, 311  # primes, which no number of clients divides
    y, test_y = (torch.randint(7, (rows,), generator=g) for rows in (n, t))
    site, test_site = (torch.randint(5, (rows,), generator=g) for rows in (n, t))
    x, test_x = torch.arange(n).float()[:, None], torch.arange(t).float()[:, None]
    data = Dataset(x, y, test_x, test_y, 7, site=site, test_site=test_site)
    scheme, clients, *options = chosen
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fed = hold_out_validation(split(data, scheme, clients, 3, **dict(options)), 0.2, 5)
    computed = []
    for shards in (fed.train, fed.test, fed.validation):
        rows = [shards[k].index.numpy().tobytes() for k in range(fed.clients)]
        computed.append(hashlib.sha256(b"".join(rows)).hexdigest()[:12])
    assert computed == digests.split()
