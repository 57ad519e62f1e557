"""Sums over clients, compared with float64 numpy."""

import numpy as np
import pytest
import torch

from fedmpi.flat import linear


def rows(m, n, seed=0, dtype=torch.float32):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights(m, seed=0):
    p = torch.rand(m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    return p / p.sum()


@pytest.mark.parametrize("n", [1, 1000, linear.CHUNK + 1, 5 * linear.CHUNK + 7])
def test_combine_is_a_float64_sum_rounded_once(n):
    x, c = rows(5, n), weights(5)
    exact = c.numpy() @ x.numpy().astype(np.float64)
    # in another order, a float64 sum may differ in its last bit, and may therefore round to the next float32
    np.testing.assert_allclose(linear.weighted_sum(x, c).numpy(), exact.astype(np.float32), rtol=2**-23, atol=1e-12)


@pytest.mark.parametrize("n", [1000, 5 * linear.CHUNK + 7])
def test_gram_matrix_is_computed_in_float64(n):
    """Blocks of columns give the same bits: columns of a weighted sum are independent, and a Gram matrix is a sum over
    chunks.
    """
    x, step, c = rows(4, n), linear.CHUNK, weights(4)
    wide = x.numpy().astype(np.float64)
    K = linear.gram(x)
    assert K.dtype == torch.float64
    np.testing.assert_allclose(K.numpy(), wide @ wide.T, rtol=1e-12, atol=1e-9)
    assert torch.equal(K, K.T)
    assert torch.equal(sum(linear.gram(x[:, at : at + step]) for at in range(0, n, step)), K)
    parts = [linear.weighted_sum(x[:, : 2 * step], c), linear.weighted_sum(x[:, 2 * step :], c)]
    assert torch.equal(torch.cat(parts), linear.weighted_sum(x, c))


@pytest.mark.parametrize(("m", "span"), [(1, (0, 1000)), (2, (100, 900)), (12, (130, 140)), (17, (100, 900))])
def test_gram_matrix_from_blocks_on_several_ranks_has_the_same_bits(m, span, monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", 16)
    monkeypatch.setattr(linear, "BLOCK", 32)
    (a, b), x = span, rows(m, 1000)
    expected = linear.gram(x[:, a:b], a, 1000)
    at = max(a, min(b, 512))
    parts = [linear.gram_by_block(x[:, a:at], a, 1000), linear.gram_by_block(x[:, at:b], at, 1000)]
    assert torch.equal(linear.sum_blocks(torch.cat(parts)), expected)
    wide = x[:, a:b].double().numpy()
    np.testing.assert_allclose(expected.numpy(), wide @ wide.T, rtol=1e-12, atol=1e-9)


def test_rows_may_be_slices_of_longer_rows():
    """Gathered uploads contain other fields before and after a slot."""
    x, c = rows(3, 4 * linear.CHUNK + 50), weights(3)
    part = x[:, 11:-20]
    assert torch.equal(linear.weighted_sum(part, c), linear.weighted_sum(part.contiguous(), c))
    assert torch.equal(linear.gram(part), linear.gram(part.contiguous()))


def test_bits_do_not_depend_on_chunks_per_task_and_threads(monkeypatch):
    """For sums in the rows' own type, for any part of the vector and any number of threads."""
    monkeypatch.setattr(linear, "MAX_FLOAT64_WIDTH", 1)
    n, c = 5 * linear.CHUNK + 7, weights(6)
    x, actual, threads = rows(6, n), [], torch.get_num_threads()
    try:
        for within, start, count in ((1, 0, 1), (4, 0, 1), (4, 0, 3), (3, 64, 2), (100, 2 * linear.CHUNK, 1)):
            monkeypatch.setattr(linear, "CHUNKS_PER_TASK", within)
            torch.set_num_threads(count)
            actual.append(linear.weighted_sum(x, c, start, start + n))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, actual[0]) for each in actual)
