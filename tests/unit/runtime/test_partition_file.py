"""Writing and reading partition.json and partition.npz, for few and for many clients."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import fedmpi

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import hold_out_validation, split
from fedmpi.data.partitions.site_and_file import partition_from_file
from fedmpi.reports.results import MAX_CLIENTS_DRAWN, build_partition_section
from fedmpi.reports.run_groups import Run, read_runs
from fedmpi.runtime.record.data_files import MAX_CLIENTS_IN_JSON, read_client_sizes, write_partition
from fedmpi.runtime.record.run_dir import RunDirectory

CLASSES = 3


def federation(clients, share=0.0, classes=CLASSES):
    y = torch.randint(CLASSES, (3 * clients,), generator=torch.Generator().manual_seed(2))
    y = y if classes > 1 else y.float()
    x = torch.zeros(len(y), 1)
    return hold_out_validation(split(Dataset(x, y, x[:9], y[:9], classes), "iid", clients, 0, "global"), share, 0)


def written(folder, fed):
    """Return the run directory and the content of partition.json."""
    folder.mkdir()
    (folder / "config.yaml").write_text("name: run\nseed: 0\nmethod: {name: fedavg}\nrounds: 1\n")
    write_partition(RunDirectory(folder), "iid", 0, fed)
    return folder, json.loads((folder / "partition.json").read_text())


@pytest.mark.parametrize("clients", [4, MAX_CLIENTS_IN_JSON, MAX_CLIENTS_IN_JSON + 1])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_sizes_and_label_counts_can_be_read_back(tmp_path, clients, share):
    fed = federation(clients, share)
    folder, facts = written(tmp_path / "run", fed)
    assert ("sizes" in facts) == (clients <= MAX_CLIENTS_IN_JSON)
    assert facts["clients"] == clients
    sizes, counts = read_client_sizes(folder, facts)
    assert np.array_equal(sizes, fed.train_sizes)
    assert np.array_equal(counts, fed.label_counts)
    parts = np.load(folder / "partition.npz")
    assert clients <= MAX_CLIENTS_IN_JSON or parts["label_counts"].dtype == np.uint8  # three samples fit a byte
    assert np.array_equal(parts["indices"], np.concatenate(list(fed.parts)))
    assert np.array_equal(parts["offsets"], np.concatenate([[0], np.cumsum(fed.train_sizes)]))
    complete = federation(clients).parts  # what was held out belongs to it
    again = partition_from_file(np.zeros(3 * clients), None, np.random.default_rng(), path=folder / "partition.npz")
    assert [part.tolist() for part in again] == [part.tolist() for part in complete]


def test_sites_without_common_rows_are_all_written(tmp_path):
    """In silo mode there is no partition.npz, so partition.json contains all sites."""
    sizes = np.arange(1, MAX_CLIENTS_IN_JSON + 2)
    sites = SimpleNamespace(train_sizes=sizes, label_counts=None, label_counts_shared=False, parts=None)
    write_partition(RunDirectory(tmp_path), "silos", 0, sites)
    facts = json.loads((tmp_path / "partition.json").read_text())
    assert facts["sizes"] == sizes.tolist()
    assert facts["label_counts"] is None
    assert not (tmp_path / "partition.npz").exists()


# ---- readers ----
def test_the_report_plots_a_selection_of_many_clients(tmp_path):
    fed = federation(MAX_CLIENTS_IN_JSON + 500)
    written(tmp_path / "run", fed)
    grid, curve = build_partition_section(read_runs([tmp_path / "run"]))
    every = (MAX_CLIENTS_IN_JSON + 500) // MAX_CLIENTS_DRAWN
    assert grid.chart.values == fed.label_counts[::every].tolist()
    assert f"{MAX_CLIENTS_DRAWN} of {MAX_CLIENTS_IN_JSON + 500} clients" in grid.note
    assert "partition.npz has all." in grid.note
    assert {row[0] for row in grid.data} == {str(k) for k in range(0, MAX_CLIENTS_IN_JSON + 500, every)}
    (series,) = curve.chart.series
    assert series.y == [3.0] * (MAX_CLIENTS_IN_JSON + 500)


def test_arrays_that_are_missing_are_told(tmp_path):
    folder, _ = written(tmp_path / "run", federation(MAX_CLIENTS_IN_JSON + 1))
    for damage in ("cut", "gone"):
        path = folder / "partition.npz"
        path.write_bytes(path.read_bytes()[:300]) if damage == "cut" else path.unlink()
        run = Run(folder)
        assert run.samples_by_client == (None, None)
        assert "partition.npz cannot be read" in run.notes[-1]
        assert build_partition_section(read_runs([folder])) == []
    result = fedmpi("report", folder)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "offsets",
    [[0, 2], [1, 3], [0, 2, 1, 3], [[0, 3]], [0.0, 3.0], []],
    ids=["end", "start", "order", "2-d", "float", "none"],
)
def test_invalid_offsets_are_refused(tmp_path, offsets):
    np.savez(tmp_path / "a.npz", indices=np.arange(3), offsets=np.array(offsets))
    with pytest.raises(UserError, match=r"cannot be read as a partition"):
        partition_from_file(np.zeros(3), None, np.random.default_rng(), path=tmp_path / "a.npz")
