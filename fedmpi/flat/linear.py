"""Linear algebra of server rules on rows of flat vectors: weighted sums, Gram matrices, norms, trimmed means.

Most rules have the form   Gram matrix K (m, m) -> coefficients (m,) -> one weighted sum. Such a rule costs about as
much as an average, and each block of columns can be processed separately. Sums over clients are computed in ascending
order of the client ids. Sums over columns are computed in float64, over fixed chunks of columns and then over fixed
blocks of chunks. The results are therefore bitwise identical for any number of ranks and any distribution of clients or
columns over ranks, no matter whether rows arrive together or one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from math import floor
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedmpi.common.host_memory import count_usable_cores

# Columns of a chunk. (12, CHUNK) float64 takes 3 MiB; with smaller chunks, threads would wait for Python between calls.
CHUNK = 1 << 15
CHUNK_GPU = 1 << 18  # larger, because a GPU needs few kernel launches; it divides a block
SCRATCH_ENTRIES_GPU = 1 << 24  # limit for the float64 entries that one call creates on a GPU, for up to 2^18 rows
# Columns of one matrix product in a batch of products. A GPU computes each entry of a product on one multiprocessor, so
# several products use more of it: on an H100, batches reduce the time for Gram matrices of 12 rows to a quarter.
PRODUCT_COLUMNS_GPU = 1 << 11
# Columns are divided among ranks in whole blocks, which have the same size on all devices. A vector of at most one
# block is neither divided nor added up row by row.
BLOCK = 8 * CHUNK
# Chunks per task of a sum in the rows' own type, whose calls are short; these take half a MiB, which fits into the
# cache.
CHUNKS_PER_TASK = 4
# A weighted sum over clients of longer vectors has the rows' own type (float32 for half types), because a server has no
# memory for a sum twice as wide. The error is at most m 2^-24 of the updates: less than that of rounding the weights of
# the model if these are m times as long as an update.
MAX_FLOAT64_WIDTH = 1 << 24

Result = TypeVar("Result")


def chunk_size(on_gpu: bool, rows: int = 1) -> int:
    """Return the number of columns of a chunk.

    On a GPU, chunks have fewer columns if there are many rows. Sizes are powers of two, so that each size divides all
    larger ones.
    """
    if not on_gpu:
        return CHUNK
    return min(CHUNK_GPU, max(1 << (SCRATCH_ENTRIES_GPU // max(rows, 1)).bit_length() >> 1, 64))


def scratch_bytes(rows: int, columns: int, on_gpu: bool) -> int:
    """Return how many bytes all threads together need for float64 copies when summing a matrix (rows, columns)."""
    size = chunk_size(on_gpu, rows)
    return 8 * _num_threads(-(-columns // size), on_gpu) * rows * min(columns, size)


def chunk_spans(x: Tensor, a: int, b: int) -> list[tuple[int, int]]:
    """Divide the columns a to b at multiples of the chunk size; return (first, end) of each part.

    Args:
        x: the tensor that determines the chunk size. To copy chunks of a matrix (m, n) to float64, pass the matrix,
            because chunks on a GPU are smaller if m is large. Otherwise pass any vector on the same device.
        a: the first column.
        b: the column after the last one.
    """
    size = chunk_size(x.is_cuda, len(x) if x.ndim > 1 else 1)
    cuts = [a, *range(a - a % size + size, b, size), b]
    return list(pairwise(cuts)) if a < b else []


def sum_dtype(width: int, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which vectors with `width` entries of type `dtype` are summed.

    This is float64 for up to MAX_FLOAT64_WIDTH entries. Longer vectors are summed in their own type, or in float32 if
    that is a 16-bit type.
    """
    return torch.float64 if width <= MAX_FLOAT64_WIDTH else torch.promote_types(dtype, torch.float32)


@dataclass
class RunningSum:
    """A weighted sum sum_i c_i x_i of vectors that are added one after another, each as a whole or in pieces."""

    total: Tensor  # (n,) of type sum_dtype(n, dtype): the sum so far
    dtype: torch.dtype  # the type of the vectors that are added

    def add(self, x: Tensor, c: float, first: bool, offset: int = 0) -> None:
        """Add c x to total[offset : offset + len(x)]; if `first` is true, overwrite the values there."""

        def add_chunk(span: tuple[int, int]) -> None:
            add(self.total[slice(*span)], x[span[0] - offset : span[1] - offset], c, first)

        spans = chunk_spans(x, offset, offset + len(x))
        if x.dtype == self.total.dtype:  # no conversion is needed: use only as many calls as keep the cores busy
            spans = _join_consecutive(spans, -(-len(spans) // 4))
        parallel_map(add_chunk, spans, x)

    def value(self) -> Tensor:
        """Return the sum (n,), converted to the type of the vectors."""
        return self.total.to(self.dtype)


def add(total: Tensor, x: Tensor, c: float, first: bool) -> None:
    """Add c x to `total` in place; if `first` is true, overwrite it with c x.

    All sums that add rows one by one use this function, so that their results are bitwise identical. If the dtypes
    differ, x must not be longer than a chunk.
    """
    if x.dtype != total.dtype:
        x = _to_float64(x)
    if first:
        torch.mul(x, c, out=total)
    else:
        total.add_(x, alpha=c)


def weighted_sum(rows: Tensor, coefficients: Tensor, start: int = 0, width: int | None = None) -> Tensor:
    """Return the weighted sum of rows, sum_i c_i rows_i.

    Args:
        rows: (m, n), the vectors or some of their columns.
        coefficients: (m,) float64.
        start: the column of the complete vectors at which `rows` begin.
        width: the number of entries of the complete vectors; by default n.

    Returns:
        (n,) in the type of rows.
    """
    n = rows.shape[1]
    width = n if width is None else width
    out = torch.empty(n, dtype=rows.dtype, device=rows.device)
    if width <= BLOCK or not len(rows):
        c = coefficients.to(device=rows.device, dtype=torch.float64)
        step = _columns_at_once(rows)

        def combine_chunk(span: tuple[int, int]) -> None:
            for a in range(span[0] - start, span[1] - start, step):
                b = min(a + step, span[1] - start)
                out[a:b] = c @ _to_float64(rows[:, a:b])

        parallel_map(combine_chunk, chunk_spans(rows, start, start + n), rows)
        return out

    weights, dtype = coefficients.tolist(), sum_dtype(width, rows.dtype)

    def add_rows_to_chunk(span: tuple[int, int]) -> None:
        a, b = span[0] - start, span[1] - start
        sum_ = out[a:b] if dtype == rows.dtype else torch.empty(b - a, dtype=dtype, device=rows.device)
        for i, c in enumerate(weights):
            add(sum_, rows[i, a:b], c, i == 0)
        if dtype != rows.dtype:
            out[a:b] = sum_

    spans = chunk_spans(rows[0], start, start + n)
    if dtype == rows.dtype:
        spans = _join_consecutive(spans, len(spans) if rows.is_cuda else CHUNKS_PER_TASK)
    parallel_map(add_rows_to_chunk, spans, rows)
    return out


def _join_consecutive(spans: Sequence[tuple[int, int]], group_size: int) -> list[tuple[int, int]]:
    """Merge each group of `group_size` consecutive spans into one span."""
    groups = [spans[offset : offset + group_size] for offset in range(0, len(spans), max(group_size, 1))]
    return [(group[0][0], group[-1][1]) for group in groups]


def gram_by_block(rows: Tensor, start: int = 0, width: int | None = None) -> Tensor:
    """Return the Gram matrix K_ij = <rows_i, rows_j> of each block of BLOCK columns.

    Blocks are counted from column 0 of the complete vectors, so that all ranks divide the columns in the same way.

    For wide rows on a CPU, little more than the lower triangle of K is computed: each group of rows is multiplied only
    by the rows up to the end of the group.

    Args:
        rows: (m, n), the vectors or some of their columns.
        start: the column of the complete vectors at which `rows` begin.
        width: the number of entries of the complete vectors; by default n.

    Returns:
        (blocks, m, m) float64, on the CPU.
    """
    m, n = rows.shape
    groups = _split_range_by_halving(m) if (n if width is None else width) > BLOCK and not rows.is_cuda else [(0, m)]
    first, blocks = start // BLOCK, -(-(start + n) // BLOCK) - start // BLOCK if n else 0
    parts = torch.zeros(blocks, m, m, dtype=torch.float64, device=rows.device)
    spans = chunk_spans(rows, start, start + n)

    def multiply_chunk(span: tuple[int, int]) -> list[Tensor]:
        wide = _to_float64(rows[:, span[0] - start : span[1] - start])
        if rows.is_cuda:
            return [_multiply_on_gpu(wide, wide)]
        return [wide[a:b] @ wide[:b].T for a, b in groups]

    # With many rows on a GPU, chunks are narrow, and all (m, m) products together would need more memory than the rows.
    for (column, _), results in zip(
        spans, map(multiply_chunk, spans) if rows.is_cuda else parallel_map(multiply_chunk, spans, rows), strict=True
    ):
        for (a, b), products_ in zip(groups, results, strict=True):
            parts[column // BLOCK - first, a:b, :b] += products_
    parts = parts.cpu()
    return parts if len(groups) < 2 else parts.tril() + parts.tril(-1).mT


def gram(rows: Tensor, start: int = 0, width: int | None = None) -> Tensor:
    """Return the Gram matrix K_ij = <rows_i, rows_j> of rows (m, n): (m, m) float64, on the CPU."""
    return sum_blocks(gram_by_block(rows, start, width))


def inner_products(rows: Tensor, v: Tensor, start: int = 0) -> Tensor:
    """Return the inner products <rows_i, v> of rows (m, n) with a vector v (n,): (m,) float64, on the CPU."""
    return sum_blocks(inner_products_by_column_block(rows, v, start))


def block_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row (m, n) in each block of columns.

    A norm is nan if a value in its block is not finite. Rows are read once and not copied. On a GPU, sums are in
    float64, in which no square overflows, and the host does not wait for the result.

    Returns:
        (blocks, m) float64, on the device of rows.
    """
    n = rows.shape[1]
    if rows.is_cuda:
        full = n - n % BLOCK
        parts = [rows[:, :full].unflatten(1, (-1, BLOCK))] if full else []
        parts += [rows[:, None, full:]] if full < n else []
        norms = [torch.linalg.vector_norm(part, dim=2, dtype=torch.float64).T for part in parts]
        values = torch.cat(norms) if norms else rows.new_zeros(0, len(rows), dtype=torch.float64)
        return torch.where(values.isfinite(), values, torch.nan)
    dtype = torch.float32 if rows.element_size() < 4 else rows.dtype
    pieces = [rows[:, a : a + BLOCK] for a in range(0, n, BLOCK)]
    if not pieces:
        return torch.zeros(0, len(rows), dtype=torch.float64)
    values = torch.stack([torch.linalg.vector_norm(piece, dim=1, dtype=dtype) for piece in pieces]).double()
    for b, i in (~values.isfinite()).nonzero().tolist():
        # the square of a value such as 1e20 overflows in float32, although the value does not
        largest = pieces[b][i].abs().max().to(dtype)
        values[b, i] = float(largest) * float(torch.linalg.vector_norm(pieces[b][i] / largest, dtype=dtype))
    return torch.where(values.isfinite(), values, torch.nan)


def row_norms(parts: Tensor) -> Tensor:
    """Combine the norms of blocks, (blocks, m), into the norms of rows, (m,), without overflow of their squares."""
    if not len(parts):
        return parts.new_zeros(parts.shape[1:])
    largest = parts.amax(0)
    scaled = parts / torch.where(largest > 0, largest, 1.0)
    return torch.where(largest > 0, largest * scaled.square().sum(0).sqrt(), largest)


def trimmed_mean(rows: Tensor, trim: float) -> Tensor:
    """Return the means (n,) of the columns of rows (m, n) without the smallest and largest values of each column.

    In each column, the floor(trim m) smallest and the floor(trim m) largest values are left out.

    With `trim` near 1/2 this is the coordinate-wise median (for even m the mean of the two middle values).
    Yin, Chen, Ramchandran, Bartlett. Byzantine-Robust Distributed Learning. ICML 2018. https://arxiv.org/abs/1803.01498

    >>> trimmed_mean(torch.tensor([[0.0, 9.0], [1.0, 5.0], [-50.0, 7.0]]), 0.4)
    tensor([0., 7.])
    """
    m = len(rows)
    b = min(floor(trim * m + 1e-9), (m - 1) // 2)
    out = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)

    # four copies: the values, the sorted values, their order, and the values that are added up
    step = _columns_at_once(rows, copies=4)

    def average_chunk(span: tuple[int, int]) -> None:
        for start in range(*span, step):
            offset = slice(start, min(start + step, span[1]))
            out[offset] = _to_float64(rows[:, offset]).sort(0).values[b : m - b].mean(0)

    parallel_map(average_chunk, chunk_spans(rows, 0, rows.shape[1]), rows)
    return out


def inner_products_by_column_block(rows: Tensor, v: Tensor, start: int = 0) -> Tensor:
    """Return the inner products <rows_i, v> of rows (m, n) with v (n,), separately for each block of columns.

    Args:
        rows: (m, n), the vectors or some of their columns.
        v: the same columns of another vector, (n,).
        start: the column of the complete vectors at which `rows` begin.

    Returns:
        (blocks, m) float64, on the CPU.
    """
    n = rows.shape[1]
    first, blocks = start // BLOCK, -(-(start + n) // BLOCK) - start // BLOCK if n else 0
    out = torch.zeros(blocks, len(rows), dtype=torch.float64, device=rows.device)
    spans = chunk_spans(rows, start, start + n)

    def multiply_chunk(span: tuple[int, int]) -> Tensor:
        a, b = span[0] - start, span[1] - start
        wide, part = _to_float64(rows[:, a:b]), v[a:b].double()
        return _multiply_on_gpu(wide, part[None])[:, 0] if rows.is_cuda else wide @ part

    for (a, _), part in zip(spans, parallel_map(multiply_chunk, spans, rows), strict=True):
        out[a // BLOCK - first] += part
    return out.cpu()


def _multiply_on_gpu(x: Tensor, y: Tensor) -> Tensor:
    """Return x y^T for x (m, n) and y (k, n), as a sum of products over groups of columns: (m, k)."""
    n = x.shape[1]
    if n <= PRODUCT_COLUMNS_GPU:
        return x @ y.T
    if n % PRODUCT_COLUMNS_GPU:
        x, y = pad(x, (0, -n % PRODUCT_COLUMNS_GPU)), pad(y, (0, -n % PRODUCT_COLUMNS_GPU))
    x, y = (each.unflatten(1, (-1, PRODUCT_COLUMNS_GPU)).transpose(0, 1) for each in (x, y))
    return torch.bmm(x, y.mT).sum(0)


def sum_blocks(parts: Tensor) -> Tensor:
    """Return the sum of the results of all blocks, (blocks, ...) -> (...), added in the order of the blocks."""
    out = torch.zeros_like(parts[0]) if len(parts) else parts.new_zeros(parts.shape[1:])
    for part in parts:
        out += part
    return out


def _split_range_by_halving(m: int) -> list[tuple[int, int]]:
    """Halve the range (0, m), then its second half, and so on; return all parts, which cover the range.

    >>> _split_range_by_halving(12)
    [(0, 6), (6, 9), (9, 11), (11, 12)]
    """
    ends = [0]
    while ends[-1] < m:
        ends.append(m - (m - ends[-1]) // 2)
    return list(pairwise(ends))


def parallel_map(
    work: Callable[[tuple[int, int]], Result], spans: Sequence[tuple[int, int]], x: Tensor
) -> Iterator[Result]:
    """Apply `work` to all spans, using all CPU cores that this process may use; return the results in order."""
    threads = _num_threads(len(spans), x.is_cuda)
    if threads == 1:
        return iter([work(span) for span in spans])
    group_size = -(-len(spans) // (4 * threads))  # in groups: passing a chunk to a thread costs as much as adding it
    groups = [spans[offset : offset + group_size] for offset in range(0, len(spans), group_size)]
    return chain.from_iterable(list(_thread_pool().map(lambda group: [work(span) for span in group], groups)))


def _columns_at_once(rows: Tensor, copies: int = 1) -> int:
    """Return how many columns of `rows` to process at once, given that `copies` float64 copies of them are made.

    The copies then fit into the cache, or into the scratch memory of a GPU.
    """
    copies *= max(len(rows), 1)
    return chunk_size(True, copies) if rows.is_cuda else max(12 * CHUNK // copies // 64 * 64, 64)


_buffers = threading.local()


def _to_float64(x: Tensor) -> Tensor:
    """Convert x, (n,) or (m, n) with at most a chunk of columns, to float64.

    The result may be in memory that the next call on this thread overwrites: allocating memory for each chunk would
    cost more than the arithmetic.
    """
    if x.dtype == torch.float64 and x.is_contiguous():
        return x
    n, buffer = x.numel(), getattr(_buffers, "wide", None)
    if buffer is None or buffer.device != x.device or len(buffer) < n:
        buffer = _buffers.wide = torch.empty(n, dtype=torch.float64, device=x.device)
    return buffer[:n].view(x.shape).copy_(x)


def _num_threads(spans: int, on_gpu: bool) -> int:
    """Return the number of threads to use for this number of spans."""
    return 1 if on_gpu or spans < 4 else min(spans, max(count_usable_cores() // torch.get_num_threads(), 1))


@cache
def _thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        max(count_usable_cores() // torch.get_num_threads(), 1), thread_name_prefix="fedmpi-server"
    )
