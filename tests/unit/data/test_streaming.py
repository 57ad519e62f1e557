"""data.stream: pictures on disk are those in memory, to the bit, and take no more memory however many they are."""

import subprocess
import sys
import threading
import time
import zipfile
from contextlib import closing

import numpy as np
import pytest
import torch
from helpers import clean_env
from PIL import Image

from fedmpi.common.errors import UserError
from fedmpi.config.schema import Settings
from fedmpi.data import streaming
from fedmpi.data.augment.chosen import augmented, operation
from fedmpi.data.batches import Shard, batches
from fedmpi.data.federated import split
from fedmpi.data.pictures import of_bytes, stacked
from fedmpi.data.sources.npz import npz
from fedmpi.data.sources.pictures.image_folder import image_folder
from fedmpi.data.streaming.decoded import Decoded
from fedmpi.data.streaming.mapped import Mapped, in_archive
from fedmpi.data.streaming.stream import AHEAD, Stream, in_turn
from fedmpi.runtime import build_data, consistency

N = 60
RNG = np.random.default_rng(0)
SHAPES = {"grey": (10, 9), "colour first": (3, 10, 9), "colour last": (10, 9, 3)}


def arrays(shape, n=N, **more):
    return {"x": RNG.integers(0, 256, (n, *shape), dtype=np.uint8), "y": np.arange(n) % 3, **more}


def federation(folder, stream, **options):
    with streaming.choosing(stream):
        data = npz(folder, path="a.npz", mean=None, std=None, **options)
    chain = [
        operation(name, given, "data.augment.0", {}) for name, given in (("crop", 2), ("flip", None), ("cutout", 4))
    ]
    return augmented(split(data, "iid", 2, 0), chain)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("more", [{}, {"val": True, "test": True}], ids=["held out", "given parts"])
def test_what_is_read_from_disk_is_what_is_in_memory(tmp_path, shape, more):
    parts = arrays(shape)
    for name in more:
        parts |= {f"{name}_{key}": value for key, value in arrays(shape, 7).items()}
    np.savez(tmp_path / "a.npz", **parts)
    held, read = (federation(tmp_path, stream) for stream in (False, True))
    assert isinstance(read.train[0].x.stored, Stream)
    assert isinstance(held.train[0].x.stored, torch.Tensor)
    for blocks in (False, True):
        a, b = held.to("cpu", blocks), read.to("cpu", blocks)
        for k in (0, 1):
            epochs = [
                list(
                    batches(
                        data.train[k],
                        7,
                        *(torch.Generator().manual_seed(s) for s in (1,)),
                        augment=torch.Generator().manual_seed(2),
                    )
                )
                for data in (a, b)
            ]
            for (x, y), (other, same) in zip(*epochs, strict=True):
                assert torch.equal(x, other)
                assert torch.equal(y, same)
                assert x.stride() == other.stride()
        assert torch.equal(a.global_test.x, b.global_test.x)
        assert isinstance(b.global_test.x, torch.Tensor), "few test pictures are floats in memory"


def test_auto_is_a_matter_of_size(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", **arrays((8, 8)))
    assert isinstance(federation(tmp_path, "auto").train[0].x.stored, torch.Tensor)
    monkeypatch.setattr(streaming, "LIMIT", N * 64 - 1)
    assert isinstance(federation(tmp_path, "auto").train[0].x.stored, Stream)
    np.savez_compressed(tmp_path / "a.npz", **arrays((8, 8)))
    assert isinstance(federation(tmp_path, "auto").train[0].x.stored, torch.Tensor), "as a whole: it has to be unpacked"


@pytest.mark.parametrize("what", ["compressed", "floats", "table"])
def test_what_cannot_stay_on_disk_is_told(tmp_path, what):
    parts = arrays((8, 8) if what != "table" else (8,))
    if what == "floats":
        parts["x"] = parts["x"] / 255
    (np.savez_compressed if what == "compressed" else np.savez)(tmp_path / "a.npz", **parts)
    data = {"source": "npz", "path": "a.npz", "root": tmp_path, "stream": True}
    tree = {
        "data": {**data, "partition": {"scheme": "iid", "clients": 2}},
        "model": {"name": "mlp"},
        "method": {"name": "fedavg"},
    }
    with pytest.raises(
        UserError, match=r"data\.stream: true, but source npz gives these samples as a whole: .*numpy\.savez"
    ):
        build_data.partitioned(Settings.model_validate(tree))


def test_ranks_notice_other_data(tmp_path):
    parts = arrays((8, 8))
    found = []
    for change in (0, 0, 1):
        np.savez(tmp_path / "a.npz", **{**parts, "x": parts["x"] + np.uint8(change)})
        found.append(consistency.data(federation(tmp_path, True)))
    assert found[0] == found[1]
    assert found[0]["(training data)"] != found[2]["(training data)"]


EPOCH = """
import sys
from pathlib import Path
import numpy as np, torch
from fedmpi.common import heap
from fedmpi.data.batches import Shard, batches
from fedmpi.data.pictures import of_bytes
from fedmpi.data.streaming.mapped import Mapped, in_archive
from fedmpi.data.streaming.stream import Stream

def held():
    return {w[0]: int(w[1]) // 1024 for w in map(str.split, open("/proc/self/status")) if w[0] in ("VmRSS:", "VmHWM:")}

x = of_bytes(Stream(Mapped(in_archive(Path(sys.argv[1]), "x"))), (0.5,), (0.5,), 3)
shard = Shard(x, torch.zeros(len(x), dtype=torch.int64), torch.arange(len(x)))
before = held()["VmRSS:"]
seen = sum(len(y) for _, y in batches(shard, 16, torch.Generator().manual_seed(0)))
print(seen, held()["VmHWM:"] - before)
"""


def test_memory_is_bounded(tmp_path):
    """An epoch over 588 MiB, in MiB of this process."""
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (4096, 3, 224, 224)).flush()
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.write(tmp_path / "x.npy", "x.npy")
    (tmp_path / "x.npy").unlink()
    command = [sys.executable, "-c", EPOCH, str(tmp_path / "a.npz")]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_env(), check=False)
    (tmp_path / "a.npz").unlink()
    assert done.returncode == 0, done.stderr
    seen, grown = map(int, done.stdout.split())
    assert seen == 4096
    assert grown < 200, "32 MiB of pages and more around them, four batches of 2.3 MiB, and what one takes as floats"


# ---- picture files ----
@pytest.fixture
def folder(tmp_path):
    """Files, and their pixels (n, 3, 6, 5)."""
    pixels = RNG.integers(0, 256, (N, 6, 5, 3), dtype=np.uint8)
    files = [tmp_path / f"{k}.png" for k in range(N)]
    for file, each in zip(files, pixels, strict=True):
        Image.fromarray(each).save(file)

    def decode(k):
        try:
            with Image.open(files[k]) as image:
                return np.asarray(image).transpose(2, 0, 1)
        except OSError as error:
            raise UserError(f"{files[k]} cannot be read as a picture") from error

    return files, Stream(Decoded(files, decode, (3, 6, 5))), torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def test_files_are_decoded_in_order(folder):
    _, stream, pixels = folder
    read, held = (of_bytes(each, (0.1,), (0.3,), 3) for each in (stream, pixels))
    assert torch.equal(read.floats(), held.floats())
    assert torch.equal(read[torch.tensor([5, 2, 9])].floats(), held[torch.tensor([5, 2, 9])].floats())
    mask = torch.arange(N) % 7 == 3
    assert torch.equal(read[mask].floats(), held[mask].floats())
    both = stacked([read[mask], read[:4], read])
    assert isinstance(both.stored, Stream)
    assert torch.equal(both.floats(), stacked([held[mask], held[:4], held]).floats())
    mixed = stacked([read[:4], held])
    assert torch.equal(mixed.floats(), torch.cat([held.floats()[:4], held.floats()]))
    y = torch.arange(N)
    for (x, _), (other, _) in zip(
        *(batches(Shard(each, y, y), 7, torch.Generator().manual_seed(3)) for each in (read, held)), strict=True
    ):
        assert torch.equal(x, other)


def test_a_damaged_file_is_named_and_no_thread_is_left(folder):
    files, stream, _ = folder
    files[41].write_bytes(b"no picture")
    y = torch.arange(N)
    before = set(threading.enumerate())
    with pytest.raises(UserError, match=r"41\.png cannot be read as a picture"):
        list(batches(Shard(of_bytes(stream, None, None, 3), y, y), 4, None))
    wait_until(lambda: set(threading.enumerate()) <= before)


def wait_until(true):
    for _ in range(200):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("not within ten seconds")


def test_reading_ahead_is_bounded_and_ends_with_who_reads():
    begun, before = [], set(threading.enumerate())

    def read(k):
        begun.append(k)
        return k

    with closing(in_turn(read, range(1000))) as found:
        assert [next(found) for _ in range(5)] == [0, 1, 2, 3, 4]
        time.sleep(0.2)
        assert len(begun) <= 5 + AHEAD
    assert set(threading.enumerate()) <= before
    assert list(in_turn(read, range(7))) == list(range(7))
    assert list(in_turn(read, [])) == []


def test_an_interrupted_epoch_leaves_no_thread(folder):
    _, stream, _ = folder
    y, before = torch.arange(N), set(threading.enumerate())

    def epoch():
        for _ in batches(Shard(of_bytes(stream, None, None, 3), y, y), 2, None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        epoch()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_an_array_in_an_archive_is_where_it_is_said_to_be(tmp_path):
    parts = {
        "first": np.arange(7),
        "x": RNG.integers(0, 256, (9, 4, 5), dtype=np.uint8),
        "floats": RNG.random((3, 4, 5)),
    }
    parts["columns"] = np.asfortranarray(parts["x"])
    np.savez(tmp_path / "a.npz", **parts)
    assert np.array_equal(in_archive(tmp_path / "a.npz", "x"), parts["x"])
    assert Mapped(in_archive(tmp_path / "a.npz", "x")).shape == (9, 1, 4, 5)
    assert [in_archive(tmp_path / "a.npz", name) for name in ("first", "floats", "columns")] == [None] * 3
    np.savez_compressed(tmp_path / "b.npz", **parts)
    assert in_archive(tmp_path / "b.npz", "x") is None


# ---- sources of picture files ----
@pytest.fixture
def sites(tmp_path):
    """SITE/CLASS/*.png of several sizes."""
    for k in range(24):
        home = tmp_path / ("north", "south")[k % 2] / ("cat", "dog", "owl")[k % 3]
        home.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 256, (9 + k % 4, 8, 3), dtype=np.uint8)).save(home / f"{k}.png")
    return tmp_path


def test_folders_of_sites_may_stay_files(sites):
    found = []
    for stream in (False, True):
        with streaming.choosing(stream):
            data = image_folder(sites, sites=True, size=6)
        assert isinstance(data.train_x.stored, Stream) == stream
        found.append((data, consistency.data(split(data, "site", None, 0))))
    (held, _), (read, digest) = found
    assert torch.equal(held.train_x.floats(), read.train_x.floats())
    assert torch.equal(held.test_x.floats(), read.test_x.floats())
    assert torch.equal(held.train_y, read.train_y)
    (sites / "north/cat/0.png").write_bytes((sites / "north/cat/6.png").read_bytes() + b"x")
    with streaming.choosing(True):
        other = image_folder(sites, sites=True, size=6)
    assert consistency.data(split(other, "site", None, 0)) != digest


def test_a_file_that_is_no_picture_is_told_before_training(sites):
    (sites / "south/dog/1.png").write_bytes(b"no picture")
    with streaming.choosing(True), pytest.raises(UserError, match=r"south/dog/1\.png cannot be read as a picture"):
        image_folder(sites, sites=True, size=6)


def test_pictures_of_several_sizes_are_told_before_training(sites):
    with streaming.choosing(True), pytest.raises(UserError, match=r"\.png is 8x1\d, .*0\.png is 8x9: give data\.size"):
        image_folder(sites, sites=True)


def test_a_picture_that_breaks_off_is_told_when_it_is_read(sites):
    whole = (sites / "south/dog/1.png").read_bytes()
    (sites / "south/dog/1.png").write_bytes(whole[: len(whole) // 2])
    with streaming.choosing(True):
        data = image_folder(sites, sites=True, size=6, test_fraction=0.0)
    with pytest.raises(UserError, match=r"south/dog/1\.png cannot be read as a picture: .*mend or remove it"):
        list(batches(Shard(data.train_x, data.train_y, torch.arange(24)), 4, None))
