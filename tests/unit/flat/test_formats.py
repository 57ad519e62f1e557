"""Formats of messages: sizes, error bounds, and values that are not finite."""

import pytest
import torch

from fedmpi.flat.formats import BLOCK, HalfPrecision, Int8, RowCodec
from fedmpi.flat.packing import Packing

FORMATS = [HalfPrecision("bf16"), HalfPrecision("fp16"), Int8()]


def random_numbers(n, seed=0, dtype=torch.float32):
    """Random numbers of all orders of magnitude that updates have; some are 0, and some are equal."""
    g = torch.Generator().manual_seed(seed + n)
    x = torch.randn(n, generator=g) * 10 ** (4 * torch.rand(n, generator=g) - 4)
    x[::7] = 0
    x[3::11] = x[:1]
    return x.to(dtype)


def encode_and_decode(fmt, x):
    packed = torch.full((fmt.size(len(x)),), 255, dtype=torch.uint8)
    fmt.encode(x, packed)
    out = torch.full_like(x, torch.nan)
    fmt.decode(packed, out)
    return out


@pytest.mark.parametrize("n", [0, 1, 7, BLOCK - 1, BLOCK, 3 * BLOCK + 13])
def test_encoding_errors_are_bounded(n):
    x = random_numbers(n)
    for name, bits, least in (("bf16", 8, 1e-38), ("fp16", 11, 2.0**-24)):
        assert bool(((encode_and_decode(HalfPrecision(name), x) - x).abs() <= x.abs() * 2.0**-bits + least / 2).all())
    out = encode_and_decode(Int8(), x)
    for at in range(0, n, BLOCK):
        block = slice(at, at + BLOCK)
        bound = x[block].abs().max() / 127 * (0.5 + 2.0**-15)
        assert bool(((out[block] - x[block]).abs() <= bound).all())


def test_int8_has_the_values_computed_by_hand():
    x = torch.tensor([127.0, -63.5, 0.4, 0.5, 1.5, -127.0])
    assert encode_and_decode(Int8(), x).tolist() == [127, -64, 0, 0, 2, -127]  # rounded to nearest, ties to even
    assert encode_and_decode(HalfPrecision("bf16"), torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])).tolist() == [
        1,
        1 + 2.0**-6,
    ]
    out = encode_and_decode(HalfPrecision("fp16"), torch.tensor([65504.0, 65520.0, -1e6]))  # at the end of its range
    assert out.tolist() == [65504, torch.inf, -torch.inf]
    x = torch.ones(2 * BLOCK)
    x[3] = torch.nan
    assert encode_and_decode(Int8(), x).isfinite().tolist() == [False] * BLOCK + [True] * BLOCK


SHAPES = {"_loss": (), "_b": (3,), "dw": (70,), "small": (2, 2), "dc": (2, 33), "last": (1,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_row_codec_encodes_only_the_selected_slots(fmt, dtype):
    """The other slots are unchanged bit for bit, and the message has the announced number of bytes."""
    codec = RowCodec(packing := Packing(SHAPES), {"dw": fmt, "dc": fmt}, dtype)
    row = random_numbers(packing.size, dtype=dtype)
    row[0] = torch.nan
    packed, out = codec.encode(row, torch.empty(codec.nbytes, dtype=torch.uint8)), torch.empty_like(row)
    assert codec.nbytes == 8 * -(-9 * dtype.itemsize // 8) + fmt.size(70) + fmt.size(66)
    assert codec.num_entries * dtype.itemsize == codec.nbytes
    codec.decode(packed, out)
    actual, sent = packing.views(out), packing.views(row)
    for name in SHAPES:
        x = getattr(sent, name)
        if name in ("dw", "dc"):
            assert torch.equal(getattr(actual, name), encode_and_decode(fmt, x.flatten()).view(x.shape))
        else:
            assert torch.equal(getattr(actual, name), x) or name == "_loss"
    assert bool(actual._loss.isnan())
    codec.round_trip(row)
    assert torch.equal(row[1:], out[1:])
    assert torch.equal(codec.encode(row, packed.clone()), packed)  # encoding again changes nothing
