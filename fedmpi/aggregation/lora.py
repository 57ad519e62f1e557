"""Aggregation of low-rank adapters: what the server does with the factors A_k and B_k of m clients (server.lora).

The mean of the clients' weight changes is the mean of products, which the product of the means is not:

    M = sum_k p_k B_k A_k,        mean B mean A = M - sum_k p_k (B_k - mean B) (A_k - mean A)                        (1)
    separate   A = mean A, B = mean B. FedIT. Zhang, Vahidian, Kuo, Li, Zhang, Yu, Zhou, Chen. Towards Building the
               Federated GPT: Federated Instruction Tuning. ICASSP 2024. https://arxiv.org/abs/2305.05644
    freeze_a   A is never trained, so the mean of B gives M. FFA-LoRA. Sun, Li, Li, Ding. Improving LoRA in
               Privacy-preserving Federated Learning. ICLR 2024. https://arxiv.org/abs/2403.12313
    exact      as separate, and the residual, the sum in (1), is added to the base weight. FedEx-LoRA. Singhal, Ponkshe,
               Vepakomma. 2024. https://arxiv.org/abs/2410.09432
    svd        B A is the best approximation of M with rank r; the rows of A are orthogonal. FlexLoRA. Bai, Chen, Qian,
               Yao, Li. Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
               Resources. NeurIPS 2024. https://arxiv.org/abs/2402.11505
    stack      M is added to the base weight, and the adapters start again with B = 0 and a new A. FLoRA. Wang, Shen,
               He, Sun, Wang, Lyu, Li. NeurIPS 2024. https://arxiv.org/abs/2409.05976

All matrices are products of factors, U V with U (out, R) and V (R, in), and are computed in float64 from the factors
and their Gram matrices; a dense (out, in) matrix is never made. The scale of the adapters is applied where B A is used,
and nowhere here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmpi.flat.layout import Segment
from fedmpi.method.context import Server, Uploads

RULES = ("separate", "freeze_a", "exact", "svd", "stack")
CHANGES_BASE = ("exact", "stack")  # rules that add a low-rank matrix to the base weights in each round
RESIDUAL, RESIDUAL_NUMBER = "_residual", "_residual_number"  # fields of the broadcast
Product = tuple[Tensor, Tensor]  # U (out, R) and V (R, in)


@dataclass(frozen=True)
class AdapterShape:
    """The names and sizes of the adapter of one layer."""

    a: str  # name of the parameter A
    b: str  # name of the parameter B
    out: int
    into: int
    rank: int
    is_embedding: bool = False

    def residual_size(self, m: int) -> int:
        """Return the number of entries that describe a change of the base weight by m clients: U and V, or the matrix.

        The matrix itself is sent if it has fewer entries than its factors.
        """
        return min((self.out + self.into) * m * self.rank, self.out * self.into)

    def is_dense(self, m: int) -> bool:
        """Return whether the residual of m clients is sent as a matrix, not as factors."""
        return self.residual_size(m) == self.out * self.into


def mean_of_products(p: Tensor, a: Tensor, b: Tensor) -> Product:
    """Return factors of M = sum_k p_k B_k A_k, for weights p (m,), a (m, r, in) and b (m, out, r), in float64."""
    m, r, into = a.shape
    scaled = b.double() * p.double().to(b.device)[:, None, None]
    return scaled.permute(1, 0, 2).reshape(-1, m * r), a.double().reshape(m * r, into)


def residual_of_means(p: Tensor, a: Tensor, b: Tensor) -> Product:
    """Return factors of the residual M - (mean B)(mean A), by the sum in equation (1).

    Rounding errors are then proportional to the residual, which is usually much smaller than M.
    """
    weights = p.double().to(a.device)[:, None, None]
    a, b = a.double(), b.double()
    return mean_of_products(p, a - (weights * a).sum(0), b - (weights * b).sum(0))


def truncate(product: Product, r: int) -> Product:
    """Return B (out, r) and A (r, in), the best approximation of U V with rank r; the rows of A are orthonormal.

    With Gram matrices: V V^T = Q L Q^T gives orthonormal rows L^-1/2 Q^T V of the row space of U V, in which
    (U V)^T (U V) is the small matrix S = L^1/2 Q^T U^T U Q L^1/2. The leading eigenvectors of S are the leading right
    singular vectors of U V, which are the rows of A, and B = U V A^T.
    """
    u, v = product
    eigenvalues, q = torch.linalg.eigh(v @ v.T)
    is_positive = eigenvalues > eigenvalues[-1] * len(eigenvalues) * torch.finfo(torch.float64).eps
    roots, q = eigenvalues[is_positive].sqrt(), q[:, is_positive]
    left = q * roots
    _, y = torch.linalg.eigh(left.T @ (u.T @ u) @ left)
    y = y.flip(1)[:, :r]
    a, b = (q / roots @ y).T @ v, u @ (left @ y)
    missing = r - len(a)  # the row space of V is smaller than r
    return torch.nn.functional.pad(b, (0, missing)), torch.nn.functional.pad(a, (0, 0, 0, missing))


def squared_norm(product: Product) -> Tensor:
    """Return the squared Frobenius norm () of U V, from the Gram matrices of U and V."""
    u, v = product
    return ((u.T @ u) * (v @ v.T)).sum().clamp(min=0)


def subtract(x: Product, y: Product) -> Product:
    """Return factors of the difference of two products."""
    return torch.cat([x[0], -y[0]], 1), torch.cat([x[1], y[1]])


class LoraAggregation:
    """Aggregates adapters (server.lora) by modifying the direction of the server step.

    If `measures` is true, each call records the metric `lora_distance`: ||used - M|| / ||M|| over all adapted layers. M
    is the mean of the clients' weight changes, equation (1) of the module docstring, and `used` is the weight change
    from which the next round starts, in the precision of the model. Rounding errors in the metric are about 1e-8.

    Attributes:
        state: the fields, name -> shape, that the server broadcasts in addition to the model: the change of all base
            weights in the last round, and the number of changes so far.
    """

    def __init__(self, rule: str, adapters: Sequence[AdapterShape], cohort_size: int, *, measures: bool = True) -> None:
        """Set up the aggregation.

        Args:
            rule: one of RULES.
            cohort_size: the largest number m of clients in a round.
            measures: whether to record `lora_distance`. It is only right if the server adds the direction to the model;
                with freeze_a the direction must also be the mean of the updates.
        """
        self.measures = measures
        self.rule, self.adapters, self.cohort_size = rule, list(adapters), cohort_size
        self.state: dict[str, tuple[int, ...]] = {}
        if rule in CHANGES_BASE:
            size = sum(adapter.residual_size(cohort_size) for adapter in self.adapters)
            self.state = {RESIDUAL: (size,), RESIDUAL_NUMBER: ()}

    def __call__(self, updates: Uploads, server: Server, direction: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the direction (s,) of the server step, and new values of the fields in `state`.

        Args:
            direction: the direction for the complete model. With separate and freeze_a any direction is permitted,
                otherwise it must be the mean of the updates.
        """
        segments = {segment.name: segment for segment in server.segments}
        if self.rule == "freeze_a" or not self.measures:
            if self.measures:
                server.log_metrics(lora_distance=0.0)
            return direction, {}
        direction = direction.clone()
        rows, error, size, changes = updates.dw, 0.0, 0.0, list[Tensor]()
        for number, adapter in enumerate(self.adapters):
            if adapter.b not in segments:  # the method keeps this layer with the clients
                continue
            sa, sb = segments[adapter.a], segments[adapter.b]
            a, b = (self._client_values(rows, server.shared, s) for s in (sa, sb))
            a, b = a.flatten(2), b.flatten(2)
            exact, change = mean_of_products(updates.p, a, b), None
            if self.rule == "svd":
                # Orthonormal rows would be longer than those of the initial A, and the steps of B larger. The product
                # is the same if A has the mean norm of the clients' A, and B the inverse factor.
                length = float((updates.p @ a.cpu().square().sum((1, 2)) / adapter.rank).sqrt())
                if length:  # otherwise all products are zero, and the mean of A and B stays
                    new_b, new_a = truncate(exact, adapter.rank)
                    self._set_target(direction, server.shared, sa, new_a * length)
                    self._set_target(direction, server.shared, sb, new_b / length)
            elif self.rule == "stack":
                change = exact
                for s, value in zip((sa, sb), self._restart(adapter, number, server), strict=True):
                    self._set_target(direction, server.shared, s, value)
            elif self.rule == "exact":
                change = residual_of_means(updates.p, a, b)
            used = self._product_after_step(direction, server.shared, sa, sb)
            if change is not None:
                packed, change = self._pack_change(change, adapter, rows.dtype)
                changes.append(packed)
                used = torch.cat([used[0], change[0]], 1), torch.cat([used[1], change[1]])
            error += float(squared_norm(subtract(used, exact)))
            size += float(squared_norm(exact))
        server.log_metrics(lora_distance=math.sqrt(error / size) if size else 0.0)
        if not self.state:
            return direction, {}
        number_of_changes = getattr(server.rule_state, RESIDUAL_NUMBER) + 1  # type: ignore[attr-defined]
        return direction, {RESIDUAL: torch.cat(changes), RESIDUAL_NUMBER: number_of_changes}

    @staticmethod
    def _client_values(rows: Tensor, shared: Tensor, segment: Segment) -> Tensor:
        """Return the values (m, ...) of a parameter at the clients, in float64."""
        start = segment.view(shared).double()
        return torch.stack([start + segment.view(row).double() for row in rows])

    @staticmethod
    def _set_target(direction: Tensor, shared: Tensor, segment: Segment, value: Tensor) -> None:
        """Let the step of the server, shared + direction, set a parameter to `value`."""
        old = segment.view(shared)
        segment.view(direction).copy_(value.reshape(segment.shape) - old.double())

    @staticmethod
    def _product_after_step(direction: Tensor, shared: Tensor, sa: Segment, sb: Segment) -> Product:
        """Return the factors B and A after the step of the server, rounded as they are stored."""
        a, b = (s.view(shared) + s.view(direction) for s in (sa, sb))
        return b.flatten(1).double(), a.flatten(1).double()

    def _restart(self, adapter: AdapterShape, number: int, server: Server) -> Product:
        """Return new initial values of A and B, drawn as PEFT draws them; their product is zero."""
        generator = server.generator("lora", server.round, number)
        a, b = torch.zeros(adapter.rank, adapter.into), torch.zeros(adapter.out, adapter.rank)
        if adapter.is_embedding:
            b.normal_(generator=generator)
        else:
            bound = 1 / math.sqrt(adapter.into)
            a.uniform_(-bound, bound, generator=generator)
        device = server.shared.device
        return a.double().to(device), b.double().to(device)

    def _pack_change(self, change: Product, adapter: AdapterShape, dtype: torch.dtype) -> tuple[Tensor, Product]:
        """Return a change of a base weight as the entries that are sent, and the product that these entries stand for.

        If the cohort is smaller than the largest one, its factors are padded with zeros.
        """
        u, v = change
        if adapter.is_dense(self.cohort_size):
            dense = (u @ v).to(dtype)
            return dense.flatten(), (torch.eye(adapter.out, dtype=torch.float64, device=u.device), dense.double())
        missing = self.cohort_size * adapter.rank - u.shape[1]
        u, v = (
            torch.nn.functional.pad(u, (0, missing)).to(dtype),
            torch.nn.functional.pad(v, (0, 0, 0, missing)).to(dtype),
        )
        return torch.cat([u.flatten(), v.flatten()]), (u.double(), v.double())


def unpack_changes(row: Tensor, adapters: Sequence[AdapterShape], m: int) -> list[Tensor]:
    """Return the change (out, in) of each layer's product B A that a server has sent as `row`.

    Args:
        row: the field RESIDUAL of the broadcast.
        m: the largest number of clients in a round.
    """
    matrices, start = [], 0
    for adapter in adapters:
        size, rank = adapter.residual_size(m), m * adapter.rank
        part, start = row[start : start + size], start + size
        if adapter.is_dense(m):
            matrices.append(part.view(adapter.out, adapter.into))
        else:
            u, v = part[: adapter.out * rank], part[adapter.out * rank :]
            matrices.append(u.view(adapter.out, rank) @ v.view(rank, adapter.into))
    return matrices
