"""data.stream: images read from disk equal those in memory, and only a few of them are in memory at once."""

import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from PIL import Image

from fedmpi.common.errors import UserError
from fedmpi.config.schema import Settings
from fedmpi.data import streaming
from fedmpi.data.batches import Shard, batches
from fedmpi.data.federated import add_augmentation, split
from fedmpi.data.lazy_images import concatenate_samples, make_lazy_images
from fedmpi.data.sources.hdf5 import hdf5
from fedmpi.data.sources.images.class_images import image_folder
from fedmpi.data.sources.images.read_images import DecodedFiles
from fedmpi.data.streaming import PREFETCHED_BATCHES, Stream, prefetch
from fedmpi.data.transforms.pipeline import make_transform
from fedmpi.runtime import build_data, rank_agreement

h5py = pytest.importorskip("h5py")

N = 60
RNG = np.random.default_rng(0)


def federation(folder, stream):
    with streaming.use_streaming_mode(stream):
        data = hdf5(folder, path="a.h5")
    chain = [
        make_transform(name, options, "data.augment.0", {})
        for name, options in (("random_crop", 2), ("horizontal_flip", None), ("cutout", 4))
    ]
    return add_augmentation(split(data, "iid", 2, 0), chain)


def epoch(x, size, shuffle, augment=None, y=None, rows=None):
    """Return the batches (x, y) of one epoch, in the order and with the augmentation of these seeds."""
    y = torch.arange(len(x)) if y is None else y
    shard = Shard(x, y, torch.arange(len(x)) if rows is None else rows)
    seeds = (None if seed is None else torch.Generator().manual_seed(seed) for seed in (shuffle, augment))
    return list(batches(shard, size, next(seeds), augment=next(seeds)))


@pytest.mark.parametrize(("shape", "parts"), [((10, 9), ("",)), ((3, 10, 9), ("", "val_", "test_"))])
def test_arrays_read_from_disk_equal_those_in_memory(tmp_path, shape, parts):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, n in zip(parts, (N, 7, 7), strict=False):
            file[f"{name}x"] = RNG.integers(0, 256, (n, *shape), dtype=np.uint8)
            file[f"{name}y"] = np.arange(n) % 3
    in_memory, on_disk = (federation(tmp_path, stream) for stream in (False, True))
    assert isinstance(on_disk.train[0].x.stored, Stream)
    assert isinstance(in_memory.train[0].x.stored, torch.Tensor)
    for channels_last in (False, True):
        a, b = in_memory.to("cpu", channels_last), on_disk.to("cpu", channels_last)
        for k in (0, 1):
            epochs = [epoch(one.x, 7, 1, 2, one.y, one.index) for one in (a.train[k], b.train[k])]
            for (x, y), (other, same) in zip(*epochs, strict=True):
                assert torch.equal(x, other)
                assert torch.equal(y, same)
                assert x.stride() == other.stride()
        assert torch.equal(a.global_test.x, b.global_test.x)
        assert isinstance(b.global_test.x, torch.Tensor), "a small test part is stored as floats in memory"


def test_stream_true_is_refused_for_sources_that_read_into_memory(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((N, 8, 8), np.uint8), y=np.arange(N) % 3)
    data = {"source": "npz", "path": "a.npz", "root": tmp_path, "stream": True}
    data["partition"] = {"scheme": "iid", "clients": 2}
    config = Settings.model_validate({"data": data, "model": {"name": "mlp"}, "method": {"name": "fedavg"}})
    message = r"data\.stream: true is not .*, because the data source npz loads .* into memory; .*HDF5"
    with pytest.raises(UserError, match=message):
        build_data.build_partitioned_data(config)


# ---- image files ----
@pytest.fixture
def folder(tmp_path):
    """Return image files, a stream of them, and their pixels (n, 3, 6, 5)."""
    pixels = RNG.integers(0, 256, (N, 6, 5, 3), dtype=np.uint8)
    files = [tmp_path / f"{k}.png" for k in range(N)]
    for file, each in zip(files, pixels, strict=True):
        Image.fromarray(each).save(file)

    def decode(k):
        try:
            with Image.open(files[k]) as image:
                return np.asarray(image).transpose(2, 0, 1)
        except OSError as error:
            raise UserError(f"{files[k]} cannot be read as an image") from error

    return (
        files,
        Stream(DecodedFiles(files, decode, np.zeros((3, 6, 5), np.uint8))),
        torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(),
    )


def test_files_are_decoded_in_order(folder):
    _, stream, pixels = folder
    on_disk, in_memory = (make_lazy_images(each, (0.1,), (0.3,), 3) for each in (stream, pixels))
    assert torch.equal(on_disk.all_inputs(), in_memory.all_inputs())
    mask = torch.arange(N) % 7 == 3
    for rows in (torch.tensor([5, 2, 9]), mask):
        assert torch.equal(on_disk[rows].all_inputs(), in_memory[rows].all_inputs())
    joined = concatenate_samples([on_disk[mask], on_disk[:4], on_disk])
    assert isinstance(joined.stored, Stream)
    assert torch.equal(
        joined.all_inputs(), concatenate_samples([in_memory[mask], in_memory[:4], in_memory]).all_inputs()
    )
    mixed = concatenate_samples([on_disk[:4], in_memory])
    assert torch.equal(mixed.all_inputs(), torch.cat([in_memory.all_inputs()[:4], in_memory.all_inputs()]))
    for (x, _), (other, _) in zip(epoch(on_disk, 7, 3), epoch(in_memory, 7, 3), strict=True):
        assert torch.equal(x, other)


def test_prefetching_is_bounded_and_ends_with_the_generator():
    requested, before = [], set(threading.enumerate())

    def parts():
        for k in range(1000):
            requested.append(k)
            yield k

    with closing(prefetch(lambda k: -k, parts())) as results:
        assert [next(results) for _ in range(5)] == [0, -1, -2, -3, -4]
        assert len(requested) == 5 + PREFETCHED_BATCHES
    assert set(threading.enumerate()) <= before
    assert len(requested) == 5 + PREFETCHED_BATCHES
    assert list(prefetch(lambda k: -k, range(7))) == [-k for k in range(7)]
    assert list(prefetch(lambda k: k, [])) == []


# ---- data sources of image files ----
@pytest.fixture
def sites(tmp_path):
    """Return a folder SITE/CLASS/*.png with images of several sizes."""
    for k in range(24):
        home = tmp_path / ("north", "south")[k % 2] / ("cat", "dog", "owl")[k % 3]
        home.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 256, (9 + k % 4, 8, 3), dtype=np.uint8)).save(home / f"{k}.png")
    return tmp_path


def test_folders_of_sites_are_streamed(sites):
    results = []
    for stream in (False, True):
        with streaming.use_streaming_mode(stream):
            data = image_folder(sites, sites=True, size=6)
        assert isinstance(data.train_x.stored, Stream) == stream
        results.append((data, rank_agreement.compute_data_digests(split(data, "site", None, 0))))
    (in_memory, _), (on_disk, digest) = results
    assert torch.equal(in_memory.train_x.all_inputs(), on_disk.train_x.all_inputs())
    assert torch.equal(in_memory.test_x.all_inputs(), on_disk.test_x.all_inputs())
    assert torch.equal(in_memory.train_y, on_disk.train_y)
    (sites / "north/cat/0.png").write_bytes((sites / "north/cat/6.png").read_bytes() + b"x")
    with streaming.use_streaming_mode(True):
        other = image_folder(sites, sites=True, size=6)
    assert rank_agreement.compute_data_digests(split(other, "site", None, 0)) != digest
