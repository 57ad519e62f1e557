"""Formats of messages: their sizes, bounds of the error, numbers that are not finite."""

import pytest
import torch

from fedmpi.flat.formats import BLOCK, HalfPrecision, Int8, RowCodec
from fedmpi.flat.packing import Packing

FORMATS = [HalfPrecision("bf16"), HalfPrecision("fp16"), Int8()]


def numbers(n, seed=0, dtype=torch.float32):
    """Of all orders of magnitude that updates have, some of them 0, some equal."""
    g = torch.Generator().manual_seed(seed + n)
    x = torch.randn(n, generator=g) * 10 ** (4 * torch.rand(n, generator=g) - 4)
    x[::7] = 0
    x[3::11] = x[:1]
    return x.to(dtype)


def through(form, x):
    packed = torch.full((form.size(len(x)),), 255, dtype=torch.uint8)
    form.encode(x, packed)
    out = torch.full_like(x, torch.nan)
    form.decode(packed, out)
    return out


@pytest.mark.parametrize("n", [0, 1, 7, BLOCK - 1, BLOCK, 3 * BLOCK + 13])
def test_errors_are_within_their_bounds(n):
    x = numbers(n)
    for name, bits, least in (("bf16", 8, 1e-38), ("fp16", 11, 2.0**-24)):
        assert bool(((through(HalfPrecision(name), x) - x).abs() <= x.abs() * 2.0**-bits + least / 2).all())
    out = through(Int8(), x)
    for at in range(0, n, BLOCK):
        block = slice(at, at + BLOCK)
        bound = x[block].abs().max() / 127 * (0.5 + 2.0**-15)
        assert bool(((out[block] - x[block]).abs() <= bound).all())


def test_by_hand():
    x = torch.tensor([127.0, -63.5, 0.4, 0.5, 1.5, -127.0])
    assert through(Int8(), x).tolist() == [127, -64, 0, 0, 2, -127]  # to the nearest, of two to the even one
    assert through(HalfPrecision("bf16"), torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])).tolist() == [1, 1 + 2.0**-6]
    out = through(HalfPrecision("fp16"), torch.tensor([65504.0, 65520.0, -1e6]))  # where its range ends
    assert out.tolist() == [65504, torch.inf, -torch.inf]
    x = torch.ones(2 * BLOCK)
    x[3] = torch.nan
    assert through(Int8(), x).isfinite().tolist() == [False] * BLOCK + [True] * BLOCK


SHAPES = {"_loss": (), "_b": (3,), "dw": (70,), "small": (2, 2), "dc": (2, 33), "last": (1,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_row(form, dtype):
    """Slots with a format in theirs, the others bit for bit, and as many bytes as were told beforehand."""
    codec = RowCodec(packing := Packing(SHAPES), {"dw": form, "dc": form}, dtype)
    row = numbers(packing.size, dtype=dtype)
    row[0] = torch.nan
    packed, out = codec.encode(row, torch.empty(codec.nbytes, dtype=torch.uint8)), torch.empty_like(row)
    assert codec.nbytes == 8 * -(-9 * dtype.itemsize // 8) + form.size(70) + form.size(66)
    assert codec.num_entries * dtype.itemsize == codec.nbytes
    codec.decode(packed, out)
    found, sent = packing.views(out), packing.views(row)
    for name in SHAPES:
        x = getattr(sent, name)
        if name in ("dw", "dc"):
            assert torch.equal(getattr(found, name), through(form, x.flatten()).view(x.shape))
        else:
            assert torch.equal(getattr(found, name), x) or name == "_loss"
    assert bool(found._loss.isnan())
    codec.round_trip(row)
    assert torch.equal(row[1:], out[1:])
    assert torch.equal(codec.encode(row, packed.clone()), packed)  # once more without change
