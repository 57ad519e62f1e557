"""Silo mode: a rank opens only the files of its own sites, and tables tell all ranks the sizes of all sites."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.silos import TABLE_WIDTH, build_silo_federation, count_local_labels, describe_silos, open_silos
from fedmpi.data.sources.digits import digits
from fedmpi.data.sources.named_arrays import npz

SILOS = ["north.npz", "south.npz", "west.npz"]


def write_sites(root, widths=(4, 4, 4), classes=(2, 2, 2)):
    for k, (name, f, c) in enumerate(zip(SILOS, widths, classes, strict=True)):
        n = 10 * (k + 1)
        np.savez(root / name, x=np.full((n, f), float(k), dtype=np.float32), y=np.arange(n) % c)


def test_ranks_open_only_their_own_files_and_know_all_sizes(tmp_path):
    write_sites(tmp_path)
    ranks = [open_silos(npz, tmp_path, SILOS, own) for own in ([], [0, 2])]
    for other in (SILOS[0], SILOS[2]):
        (tmp_path / other).write_text("no rank may read the file of another site")
    ranks.append(open_silos(npz, tmp_path, SILOS, [1]))
    table = np.concatenate([describe_silos(opened) for opened in ranks])
    assert table.dtype == np.int64
    assert table.shape == (3, TABLE_WIDTH)
    counts = sum(count_local_labels(opened, table, SILOS) for opened in ranks)
    views = [build_silo_federation(opened, table, counts, SILOS) for opened in ranks]
    for view, own in zip(views, ([], [0, 2], [1]), strict=True):
        assert sorted(view.train) == sorted(view.test) == own
        assert view.train_sizes.tolist() == [8, 16, 24]  # a fifth of each class is in the test part
        assert view.test_sizes.tolist() == [2, 4, 6]
        assert view.label_counts.tolist() == [[4, 4], [8, 8], [12, 12]]
        assert (view.input_shape, view.classes, view.clients) == ((4,), 2, 3)
        assert (view.x_dtype, view.target_shape, view.target_dtype) == (torch.float32, (), torch.int64)
        assert view.global_test is view.parts is None
        assert view.site_names == tuple(SILOS)
    assert views[1].train[2].x.unique().tolist() == [2.0]


@pytest.mark.parametrize(
    ("differences", "message"),
    [
        ({"widths": (4, 4, 5)}, r"north\.npz has 2 classes and samples of shape \(4,\), .* west\.npz .*\(5,\)"),
        ({"classes": (2, 3, 2)}, r"north\.npz has 2 classes.*south\.npz has 3 classes.*options of the data source"),
    ],
)
def test_the_error_names_sites_that_differ(tmp_path, differences, message):
    """An option of the source tells a site how many classes the others have."""
    write_sites(tmp_path, **differences)
    opened = open_silos(npz, tmp_path, SILOS, range(3))
    with pytest.raises(UserError, match=message):
        count_local_labels(opened, describe_silos(opened), SILOS)
    if "classes" in differences:
        opened = open_silos(npz, tmp_path, SILOS, range(3), classes=3)
        counts = [[4, 4, 0], [6, 6, 5], [12, 12, 0]]  # 20 = 7 + 7 + 6, of which one each is in the test part
        assert count_local_labels(opened, describe_silos(opened), SILOS).tolist() == counts


def test_each_silo_must_be_opened_exactly_once(tmp_path):
    write_sites(tmp_path)
    opened = open_silos(npz, tmp_path, SILOS, [0, 1])
    with pytest.raises(UserError, match=r"clients \[0, 1\], but each of 0\.\.2 must be opened by exactly one rank"):
        count_local_labels(opened, describe_silos(opened), SILOS)
    with pytest.raises(UserError, match="twice"):
        open_silos(npz, tmp_path, ["a", "b", "a"], [0])
    with pytest.raises(UserError, match="digits cannot open a single site"):
        open_silos(digits, Path(), ["a", "b"], [0])


def several_tensors(n, tokens=5, name="ids"):
    x = {name: torch.zeros(n, tokens).long(), "mask": torch.ones(n, tokens) > 0}
    return Dataset(x, torch.rand(n, 2), {k: v[:1] for k, v in x.items()}, torch.rand(1, 2), 1)


def test_a_rank_without_data_knows_the_shapes_of_samples_and_targets():
    sites = {k: several_tensors(3 + k) for k in range(3)}
    table = np.concatenate([describe_silos({k: sites[k]}) for k in (2, 0, 1)] + [describe_silos({})])
    server = build_silo_federation({}, table, np.zeros((3, 1), dtype=np.int64), SILOS)
    assert server.input_shape == {"ids": (5,), "mask": (5,)}
    assert server.x_dtype == {"ids": torch.int64, "mask": torch.bool}
    assert (server.target_shape, server.target_dtype) == ((2,), torch.float32)
    assert torch.equal(server.example_targets(), torch.zeros(2, 2))
    sites[1] = several_tensors(3, tokens=6)
    with pytest.raises(UserError, match=r"north\.npz has .*'ids': \(5,\).*south\.npz .*'ids': \(6,\)"):
        count_local_labels(sites, describe_silos(sites), SILOS)
    with pytest.raises(UserError, match=r"sample of client 4 has .* bytes, but at most 512 are allowed"):
        describe_silos({4: several_tensors(3, name="a" * 500)})
