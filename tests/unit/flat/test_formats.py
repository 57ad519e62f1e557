"""Formats of messages: their sizes, bounds of the error, numbers that are not finite, error feedback."""

import pytest
import torch

from fedmpi.flat.formats import BLOCK, Coding, Half, Int8, TopK, feed_back, largest
from fedmpi.flat.packing import Packing

FORMATS = [Half("bf16"), Half("fp16"), Int8(), TopK(0.01), TopK(0.3)]
SIZES = [0, 1, 7, BLOCK - 1, BLOCK, 3 * BLOCK + 13]
each_format = pytest.mark.parametrize("form", FORMATS, ids=str)
each_size = pytest.mark.parametrize("n", SIZES)


def numbers(n, seed=0, dtype=torch.float32):
    """Of all orders of magnitude that updates have, some of them 0, some equal."""
    g = torch.Generator().manual_seed(seed + n)
    x = torch.randn(n, generator=g) * 10 ** (4 * torch.rand(n, generator=g) - 4)
    x[::7] = 0
    x[3::11] = x[:1]
    return x.to(dtype)


def through(form, x):
    packed = torch.full((form.size(len(x), x.element_size()),), 255, dtype=torch.uint8)
    form.encode(x, packed)
    out = torch.full_like(x, torch.nan)
    form.decode(packed, out)
    return packed, out


@each_size
def test_errors_are_within_their_bounds(n):
    x = numbers(n)
    for name, bits, least in (("bf16", 8, 1e-38), ("fp16", 11, 2.0**-24)):
        assert bool(((through(Half(name), x)[1] - x).abs() <= x.abs() * 2.0**-bits + least / 2).all())
    out = through(Int8(), x)[1]
    for at in range(0, n, BLOCK):
        block = slice(at, at + BLOCK)
        bound = x[block].abs().max() / 127 * (0.5 + 2.0**-15)
        assert bool(((out[block] - x[block]).abs() <= bound).all())
    for fraction in (0.01, 0.3, 0.49):
        form = TopK(fraction)
        out, k = through(form, x)[1], form.kept(n)
        kept = sorted(range(n), key=lambda i: (-abs(x[i]), i))[:k]
        naive = torch.zeros(n)
        naive[kept] = x[kept]
        assert torch.equal(out, naive)


def test_by_hand():
    x = torch.tensor([127.0, -63.5, 0.4, 0.5, 1.5, -127.0])
    assert through(Int8(), x)[1].tolist() == [127, -64, 0, 0, 2, -127]  # to the nearest, of two to the even one
    assert through(TopK(1 / 3), x)[1].tolist() == [127, 0, 0, 0, 0, -127]
    assert through(Half("bf16"), torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8]))[1].tolist() == [1, 1 + 2.0**-6]
    out = through(Half("fp16"), torch.tensor([65504.0, 65520.0, -1e6]))[1]  # where its range ends
    assert out.tolist() == [65504, torch.inf, -torch.inf]
    x = torch.ones(1000)
    x[::2] = -1
    assert largest(x, 5).tolist() == [0, 1, 2, 3, 4]  # of equal entries the first
    x[[700, 900]] = 2
    assert largest(x, 5).tolist() == [0, 1, 2, 700, 900]


# ---- error feedback ----
@each_format
def test_error_feedback_sends_everything_in_the_end(form):
    """x_1 + ... + x_t = what arrived + what is left, exactly as far as float32 adds; and what is left stays bounded."""
    left, arrived, sent = torch.zeros(3000), torch.zeros(3000, dtype=torch.float64), torch.zeros(3000).double()
    largest_left = []
    for t in range(60):
        x = torch.randn(3000, generator=torch.Generator().manual_seed(t)) + 0.1
        sent += x.double()
        before, v = left.clone(), left + x
        feed_back(form, x, left)
        assert torch.equal(x, through(form, v)[1])
        assert torch.equal(left, v - x)
        assert not torch.equal(before, left)
        arrived += x.double()
        largest_left.append(float(left.norm()))
    torch.testing.assert_close(arrived + left.double(), sent, atol=1e-4, rtol=0)
    if form.name != "topk" or form.fraction > 0.1:
        assert max(largest_left[30:]) < 1.5 * max(largest_left[:30])


def test_error_feedback_by_hand():
    """Of x = (2, 1), again and again, topk of one half takes one a time; an infinite upload changes nothing."""
    left, seen = torch.zeros(2), []
    for _ in range(6):
        x = torch.tensor([2.0, 1.0])
        feed_back(TopK(0.5), x, left)
        seen.append(x.tolist())
    assert seen == [[2, 0], [2, 0], [0, 3], [4, 0], [2, 0], [0, 3]]
    assert left.tolist() == [2, 0]
    x = torch.tensor([torch.nan, 1.0])
    feed_back(Int8(), x, left)
    assert left.tolist() == [2, 0]
    assert not bool(x.isfinite().all())


# ---- rows ----
SHAPES = {"_loss": (), "_b": (3,), "dw": (70,), "small": (2, 2), "dc": (2, 33), "last": (1,)}


@pytest.mark.parametrize(
    ("form", "dtype"), [(form, (torch.float32, torch.float64)[i % 2]) for i, form in enumerate(FORMATS)]
)
def test_a_row(form, dtype):
    """Slots with a format in theirs, the others bit for bit, and as many bytes as were told beforehand."""
    coding = Coding(packing := Packing(SHAPES), {"dw": form, "dc": form}, dtype)
    row = numbers(packing.size, dtype=dtype)
    row[0] = torch.nan
    packed, out = coding.pack(row, torch.empty(coding.nbytes, dtype=torch.uint8)), torch.empty_like(row)
    size = 8 * -(-9 * dtype.itemsize // 8) + sum(form.size(n, dtype.itemsize) for n in (70, 66))
    assert packed.numel() == coding.nbytes == coding.entries * dtype.itemsize == size
    coding.unpack(packed, out)
    found, sent = packing.views(out), packing.views(row)
    for name in SHAPES:
        x = getattr(sent, name)
        if name in ("dw", "dc"):
            assert torch.equal(getattr(found, name), through(form, x.flatten())[1].view(x.shape))
        else:
            assert torch.equal(getattr(found, name), x) or name == "_loss"
    assert bool(found._loss.isnan())
    settled = row.clone()
    coding.settle(settled, {})
    assert torch.equal(settled[1:], out[1:])
    assert torch.equal(coding.pack(settled, packed.clone())[: 9 * dtype.itemsize], packed[: 9 * dtype.itemsize])
