"""The batches of one epoch contain every row once, in an order that only the generator determines."""

import numpy as np
import pytest
import torch

from fedmpi.data.batches import Shard, batches
from fedmpi.data.lazy_images import make_lazy_images
from fedmpi.data.streaming import DiskSource, Stream


def shard(n=10):
    """Return a shard of the rows 2, 4, 6, ... of 3 n + 1; x is the row number."""
    x = torch.arange(3.0 * n + 1).view(-1, 1)
    return Shard(x, torch.arange(3 * n + 1), 2 + 2 * torch.arange(n))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("n", "size", "drop_last", "sizes"),
    [
        (10, 4, False, [4, 4, 2]),
        (10, 4, True, [4, 4]),
        (10, 50, False, [10]),
        (10, 50, True, []),  # a client smaller than a batch makes no step
        (10, None, False, [10]),
        (0, 4, False, []),
    ],
)
def test_batches_have_the_expected_sizes(n, size, drop_last, sizes):
    assert [len(x) for x, _ in batches(shard(n), size, generator(), drop_last)] == sizes


def test_the_order_is_one_permutation_of_the_generator():
    one = generator(5)
    pairs = list(batches(shard(), 3, one))
    rows = torch.cat([y for _, y in pairs])
    assert torch.equal(rows, shard().index[torch.randperm(10, generator=generator(5))])
    assert torch.equal(torch.cat([x for x, _ in pairs]).flatten().long(), rows)
    assert not torch.equal(torch.cat([y for _, y in batches(shard(), 3, one)]), rows)


def test_full_batches_and_evaluations_keep_the_order_and_draw_no_numbers():
    one = generator(5)
    before = one.get_state()
    ((_, rows),) = batches(shard(), None, one)
    assert torch.equal(rows, shard().index)
    assert torch.equal(one.get_state(), before)
    assert torch.equal(torch.cat([y for _, y in batches(shard(), 3, None)]), shard().index)


@pytest.mark.parametrize(
    ("shape", "channels_last"), [((16,), False), ((5,), False), ((3, 4, 4), True), ((1, 28, 28), False)]
)
def test_rows_read_ahead_are_those_of_their_batch(shape, channels_last):
    """Small batches, which are read together, have the values, strides and alignment of batches read singly."""
    x = torch.randn(400, *shape)
    if channels_last:
        x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    rows = Shard(x, torch.arange(400), torch.arange(7, 390))
    read = list(batches(rows, 16, None))
    assert len(read) == 24
    for i, (part, y) in enumerate(read):
        index = rows.index[16 * i : 16 * (i + 1)]
        assert torch.equal(y, index)
        assert torch.equal(part, x[index])
        assert part.data_ptr() % 64 == 0
        assert [s for s, n in zip(part.stride(), part.shape, strict=True) if n > 1] == [
            s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1
        ]


def test_batches_read_no_value_from_the_device():
    """No value is read from the device: this would be an error on the device meta."""
    x, index = torch.empty(20, 3, device="meta"), torch.arange(4, 14)
    read = list(batches(Shard(x, torch.empty(20, device="meta"), index), 4, None))
    assert [(len(x), len(y), y.device.type) for x, y in read] == [(4, 4, "meta"), (4, 4, "meta"), (2, 2, "meta")]


class Zeros(DiskSource):
    shape = (20, 1, 4, 4)

    def __init__(self):
        self.rows = []

    def fingerprint(self, rows):
        yield b""

    def read(self, rows):
        self.rows += rows.tolist()
        return np.zeros((len(rows), *self.shape[1:]), np.uint8)


def test_reading_ahead_reads_no_value_from_the_device():
    """Otherwise files would not be read while a GPU computes."""
    source, index = Zeros(), torch.arange(18, 2, -1)
    x = make_lazy_images(Stream(source), (0.5,), (0.5,), 1).to("meta", channels_last=False)
    read = list(batches(Shard(x, torch.empty(20, device="meta"), index), 8, torch.Generator().manual_seed(0)))
    assert [(x.shape, x.device.type, len(y)) for x, y in read] == [((8, 1, 4, 4), "meta", 8)] * 2
    assert source.rows == index[torch.randperm(16, generator=torch.Generator().manual_seed(0))].tolist()
