"""Server rules and their parts: pure functions on flat tensors.

A rule is linear wherever it can be:   Gram matrix K (m, m) -> coefficients (m,) -> one weighted sum,
so that it costs what an average costs and can work on any block of columns. Sums over clients run in ascending client
id; sums over d run in float64 over fixed chunks of columns, and over fixed blocks of chunks: the bits depend neither on
ranks nor on placement, nor on which rank has which blocks, nor on whether rows come all at once or one by one.
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

from fedmpi.common.host_memory import usable_cores

# Columns at a time: (12, CHUNK) float64 is 3 MiB; fewer, and the threads queue for Python between calls.
CHUNK = 1 << 15
CHUNK_GPU = 1 << 18  # a GPU wants few launches; divides a block, or is one
SCRATCH_GPU = 1 << 24  # float64 entries, the most that one call makes of up to 2^18 rows on a GPU
# Columns of one product of a batch: a GPU computes each entry of a product on one multiprocessor. On an H100 Gram
# matrices of 12 rows take a quarter of the time so.
PIECE_GPU = 1 << 11
# Columns are shared out in whole blocks, of the same size on every device. A vector of one block, or less, is neither
# shared out nor added up row by row.
BLOCK = 8 * CHUNK
WITHIN = 4  # chunks of a sum in the rows' own type, whose calls are short: half a MiB, which is still near
# Entries of a vector beyond which a weighted sum over clients is kept in the rows' own type, of halves in float32: a
# sum twice as wide is what a server cannot spare. The error is at most m 2^-24 of the updates: less than what rounding
# takes from weights that are m times as long.
WIDE = 1 << 24

Work = TypeVar("Work")


def chunk_size(on_gpu: bool, rows: int = 1) -> int:
    """Columns of a chunk: of many rows on a GPU fewer, a power of two, so that each size divides the larger ones."""
    if not on_gpu:
        return CHUNK
    return min(CHUNK_GPU, max(1 << (SCRATCH_GPU // max(rows, 1)).bit_length() >> 1, 64))


def scratch_bytes(rows: int, columns: int, on_gpu: bool) -> int:
    """Memory that sums over so many rows take for copies of chunks in float64, on all threads together."""
    size = chunk_size(on_gpu, rows)
    return 8 * _threads(-(-columns // size), on_gpu) * rows * min(columns, size)


def chunks(x: Tensor, a: int, b: int) -> list[tuple[int, int]]:
    """Cut the columns a to b of a vector at the multiples of the chunk size; return (first, end) of each part.

    x: rows (m, n) whose parts are copied in float64, many rows in smaller parts on a GPU; else any vector there.
    """
    size = chunk_size(x.is_cuda, len(x) if x.ndim > 1 else 1)
    cuts = [a, *range(a - a % size + size, b, size), b]
    return list(pairwise(cuts)) if a < b else []


def sum_type(width: int, kind: torch.dtype) -> torch.dtype:
    """In which a sum of vectors of `width` entries is kept: float64; of more than WIDE entries their own type, or
    float32 where that is a half."""
    return torch.float64 if width <= WIDE else torch.promote_types(kind, torch.float32)


@dataclass
class Sum:
    """sum_i c_i x_i of vectors that come one after another, whole or in pieces."""

    total: Tensor  # (n,) of sum_type(n, kind), where the sum is kept
    kind: torch.dtype  # the vectors' type

    def add(self, x: Tensor, c: float, first: bool, at: int = 0) -> None:
        """Add c x to total[at : at + len(x)]; first: in place of what is there."""

        def piece(span: tuple[int, int]) -> None:
            add(self.total[slice(*span)], x[span[0] - at : span[1] - at], c, first)

        spans = chunks(x, at, at + len(x))
        if x.dtype == self.total.dtype:  # nothing lies in between: as few calls as keep the cores busy
            spans = _shares(spans, -(-len(spans) // 4))
        spread(piece, spans, x)

    def value(self) -> Tensor:
        """(n,) in the vectors' type."""
        return self.total.to(self.kind)


def add(total: Tensor, x: Tensor, c: float, first: bool) -> None:
    """total <- c x, or total + c x: the one way in which rows are added. Of another type not more than a chunk."""
    if x.dtype != total.dtype:
        x = _wide(x)
    if first:
        torch.mul(x, c, out=total)
    else:
        total.add_(x, alpha=c)


def combine(rows: Tensor, coefficients: Tensor, start: int = 0, width: int | None = None) -> Tensor:
    """sum_i c_i rows_i.   (m, n), (m,) float64 -> (n,) in the rows' type.

    start: the rows' first column in the vector of `width` entries of which they are a part.
    """
    n = rows.shape[1]
    width = n if width is None else width
    out = torch.empty(n, dtype=rows.dtype, device=rows.device)
    if width <= BLOCK or not len(rows):
        c = coefficients.to(device=rows.device, dtype=torch.float64)
        step = _columns_at_once(rows)

        def at_once(span: tuple[int, int]) -> None:
            for a in range(span[0] - start, span[1] - start, step):
                b = min(a + step, span[1] - start)
                out[a:b] = c @ _wide(rows[:, a:b])

        spread(at_once, chunks(rows, start, start + n), rows)
        return out

    each, kind = coefficients.tolist(), sum_type(width, rows.dtype)

    def one_by_one(span: tuple[int, int]) -> None:
        a, b = span[0] - start, span[1] - start
        sum_ = out[a:b] if kind == rows.dtype else torch.empty(b - a, dtype=kind, device=rows.device)
        for i, c in enumerate(each):
            add(sum_, rows[i, a:b], c, i == 0)
        if kind != rows.dtype:
            out[a:b] = sum_

    spans = chunks(rows[0], start, start + n)
    if kind == rows.dtype:
        spans = _shares(spans, len(spans) if rows.is_cuda else WITHIN)
    spread(one_by_one, spans, rows)
    return out


def _shares(spans: Sequence[tuple[int, int]], many: int) -> list[tuple[int, int]]:
    """Join spans that follow one another, so many to one."""
    shares = [spans[at : at + many] for at in range(0, len(spans), max(many, 1))]
    return [(share[0][0], share[-1][1]) for share in shares]


def gram_blocks(rows: Tensor, start: int = 0, width: int | None = None) -> Tensor:
    """K_ij = <rows_i, rows_j>, block by block of columns.   (m, n) -> (blocks, m, m) float64 on the CPU.

    On a CPU little more than one triangle is formed of wide rows: each group of rows is multiplied with all rows up to
    it. start, width: as of `combine`.
    """
    m, n = rows.shape
    groups = _halves(m) if (n if width is None else width) > BLOCK and not rows.is_cuda else [(0, m)]
    first, blocks = start // BLOCK, -(-(start + n) // BLOCK) - start // BLOCK if n else 0
    parts = torch.zeros(blocks, m, m, dtype=torch.float64, device=rows.device)
    spans = chunks(rows, start, start + n)

    def one(span: tuple[int, int]) -> list[Tensor]:
        wide = _wide(rows[:, span[0] - start : span[1] - start])
        if rows.is_cuda:
            return [_product_on_gpu(wide, wide)]
        return [wide[a:b] @ wide[:b].T for a, b in groups]

    # On a GPU chunks of many rows are narrow, and all of their (m, m) products would outgrow the rows.
    for (column, _), results in zip(spans, map(one, spans) if rows.is_cuda else spread(one, spans, rows), strict=True):
        for (a, b), products_ in zip(groups, results, strict=True):
            parts[column // BLOCK - first, a:b, :b] += products_
    parts = parts.cpu()
    return parts if len(groups) < 2 else parts.tril() + parts.tril(-1).mT


def gram(rows: Tensor, start: int = 0, width: int | None = None) -> Tensor:
    """K_ij = <rows_i, rows_j>.   (m, n) -> (m, m) float64 on the CPU."""
    return total(gram_blocks(rows, start, width))


def products(rows: Tensor, v: Tensor, start: int = 0) -> Tensor:
    """<rows_i, v>.   (m, n), (n,) -> (m,) float64 on the CPU."""
    return total(product_parts(rows, v, start))


def block_norms(rows: Tensor) -> Tensor:
    """Return the norms of the rows' blocks of columns, (blocks, m) float64 on their device; nan where a number is not
    finite. One pass without a copy; a GPU sums in float64, where no square overflows, and the host does not wait."""
    n = rows.shape[1]
    if rows.is_cuda:
        full = n - n % BLOCK
        parts = [rows[:, :full].unflatten(1, (-1, BLOCK))] if full else []
        parts += [rows[:, None, full:]] if full < n else []
        norms = [torch.linalg.vector_norm(part, dim=2, dtype=torch.float64).T for part in parts]
        values = torch.cat(norms) if norms else rows.new_zeros(0, len(rows), dtype=torch.float64)
        return torch.where(values.isfinite(), values, torch.nan)
    kind = torch.float32 if rows.element_size() < 4 else rows.dtype
    pieces = [rows[:, a : a + BLOCK] for a in range(0, n, BLOCK)]
    if not pieces:
        return torch.zeros(0, len(rows), dtype=torch.float64)
    values = torch.stack([torch.linalg.vector_norm(piece, dim=1, dtype=kind) for piece in pieces]).double()
    for b, i in (~values.isfinite()).nonzero().tolist():
        largest = pieces[b][i].abs().max().to(kind)  # the squares of 1e20 overflow, the number does not
        values[b, i] = float(largest) * float(torch.linalg.vector_norm(pieces[b][i] / largest, dtype=kind))
    return torch.where(values.isfinite(), values, torch.nan)


def row_norms(parts: Tensor) -> Tensor:
    """(m,) the rows' norms, from those of their blocks (blocks, m), whose squares may overflow."""
    if not len(parts):
        return parts.new_zeros(parts.shape[1:])
    largest = parts.amax(0)
    scaled = parts / torch.where(largest > 0, largest, 1.0)
    return torch.where(largest > 0, largest * scaled.square().sum(0).sqrt(), largest)


def trimmed_mean(rows: Tensor, trim: float) -> Tensor:
    """Per coordinate the mean without the b = floor(trim m) smallest and b largest.   (m, n) -> (n,)

    trim towards 1/2 is the coordinate-wise median, of an even number the mean of the two in the middle.
    Yin, Chen, Ramchandran, Bartlett. Byzantine-Robust Distributed Learning. ICML 2018. https://arxiv.org/abs/1803.01498

    >>> trimmed_mean(torch.tensor([[0.0, 9.0], [1.0, 5.0], [-50.0, 7.0]]), 0.4)
    tensor([0., 7.])
    """
    m = len(rows)
    b = min(floor(trim * m + 1e-9), (m - 1) // 2)
    out = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)

    step = _columns_at_once(rows, copies=4)  # what is sorted, the order, and what is added up

    def piece(span: tuple[int, int]) -> None:
        for start in range(*span, step):
            at = slice(start, min(start + step, span[1]))
            out[at] = _wide(rows[:, at]).sort(0).values[b : m - b].mean(0)

    spread(piece, chunks(rows, 0, rows.shape[1]), rows)
    return out


def product_parts(rows: Tensor, v: Tensor, start: int = 0) -> Tensor:
    """(blocks, m) the products block by block of columns, chunk by chunk within each."""
    n = rows.shape[1]
    first, blocks = start // BLOCK, -(-(start + n) // BLOCK) - start // BLOCK if n else 0
    out = torch.zeros(blocks, len(rows), dtype=torch.float64, device=rows.device)
    spans = chunks(rows, start, start + n)

    def one(span: tuple[int, int]) -> Tensor:
        a, b = span[0] - start, span[1] - start
        wide, part = _wide(rows[:, a:b]), v[a:b].double()
        return _product_on_gpu(wide, part[None])[:, 0] if rows.is_cuda else wide @ part

    for (a, _), part in zip(spans, spread(one, spans, rows), strict=True):
        out[a // BLOCK - first] += part
    return out.cpu()


def _product_on_gpu(x: Tensor, y: Tensor) -> Tensor:
    """x y^T of a chunk, as the sum over pieces of columns.   (m, n), (k, n) -> (m, k)"""
    n = x.shape[1]
    if n <= PIECE_GPU:
        return x @ y.T
    if n % PIECE_GPU:
        x, y = pad(x, (0, -n % PIECE_GPU)), pad(y, (0, -n % PIECE_GPU))
    x, y = (each.unflatten(1, (-1, PIECE_GPU)).transpose(0, 1) for each in (x, y))
    return torch.bmm(x, y.mT).sum(0)


def total(parts: Tensor) -> Tensor:
    """The sum over blocks, in their order."""
    out = torch.zeros_like(parts[0]) if len(parts) else parts.new_zeros(parts.shape[1:])
    for part in parts:
        out += part
    return out


def _halves(m: int) -> list[tuple[int, int]]:
    """(0, m) cut in the middle, its rest again, and so on.

    >>> _halves(12)
    [(0, 6), (6, 9), (9, 11), (11, 12)]
    """
    ends = [0]
    while ends[-1] < m:
        ends.append(m - (m - ends[-1]) // 2)
    return list(pairwise(ends))


def spread(work: Callable[[tuple[int, int]], Work], spans: Sequence[tuple[int, int]], x: Tensor) -> Iterator[Work]:
    """work(span) for all of them, on all cores of a CPU that this process may use; results in order."""
    threads = _threads(len(spans), x.is_cuda)
    if threads == 1:
        return iter([work(span) for span in spans])
    many = -(-len(spans) // (4 * threads))  # handing over a chunk costs as much as adding it
    shares = [spans[at : at + many] for at in range(0, len(spans), many)]
    return chain.from_iterable(list(_workers().map(lambda share: [work(span) for span in share], shares)))


def _columns_at_once(rows: Tensor, copies: int = 1) -> int:
    """Columns of which so many copies in float64 fit into a CPU's cache, or into a GPU's scratch memory."""
    copies *= max(len(rows), 1)
    return chunk_size(True, copies) if rows.is_cuda else max(12 * CHUNK // copies // 64 * 64, 64)


_buffers = threading.local()


def _wide(x: Tensor) -> Tensor:
    """x (n,) or (m, n), not more than a chunk, in float64, in memory that the next call on this thread uses again:
    allocating anew for each chunk costs more than the arithmetic."""
    if x.dtype == torch.float64 and x.is_contiguous():
        return x
    n, buffer = x.numel(), getattr(_buffers, "wide", None)
    if buffer is None or buffer.device != x.device or len(buffer) < n:
        buffer = _buffers.wide = torch.empty(n, dtype=torch.float64, device=x.device)
    return buffer[:n].view(x.shape).copy_(x)


def _threads(spans: int, on_gpu: bool) -> int:
    """How many of so many chunks are worked on at the same time."""
    return 1 if on_gpu or spans < 4 else min(spans, max(usable_cores() // torch.get_num_threads(), 1))


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(usable_cores() // torch.get_num_threads(), 1), thread_name_prefix="fedmpi-server")
