"""Probes of local models and updates: loss decomposition, forgetting, contribution, drift, and change per layer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fedmpi.engine.diagnostics.cohort import Cohort, Model, Probe
from fedmpi.flat.layout import Layout, Segment

Rows = tuple[int, Mapping[int, Tensor]]


# ---- probe losses: decomposition of the global model's loss (FedLD, Eq. 2) ----
def compute_loss_rows(c: Cohort) -> Rows:
    """Return a row for each client j of this rank: the losses of all local models and of the aggregate on its samples.

    The row holds M[j, :] and l_j. M[j, i] = L_j(w_i) is the mean loss of client i's local model on client j's training
    samples, and l_j = L_j(w) is the mean loss of the aggregated model on these samples. The m^2 evaluations are divided
    among the ranks.
    """
    own: dict[int, list[float]] = {k: [] for k in c.local_models}
    for _, model in (*c.models(), (None, c.after)):
        for k in own:
            own[k].append(c.evaluate_model(model, c.trainer.data.train[k]).metrics["loss"])
    return len(c.members) + 1, {k: torch.tensor(row, dtype=torch.float64) for k, row in own.items()}


def summarize_losses(c: Cohort, rows: Tensor) -> dict[str, Any]:
    """Return the loss decomposition of a round, with M (m, m) and l (m,), from the rows of all clients."""
    M, l = rows[:, :-1], rows[:, -1]  # noqa: E741  the paper's letter
    return {**decompose_loss(M, l, c.p), "matrix": M, "global": l}


def decompose_loss(M: Tensor, l: Tensor, p: Tensor) -> dict[str, float]:  # noqa: E741
    """Split the loss of the global model, sum_j p_j l_j, into three terms.

        local        sum_i p_i M[i, i]
        shift        sum_ij p_j p_i (M[j, i] - M[i, i])       because clients have different samples
        aggregation  sum_i p_i (sum_j p_j l_j - sum_j p_j M[j, i])    because the average differs from local models
    In FedLD's paper, the third term contains L_i(w_i) = M[i, i] in place of sum_j p_j M[j, i]; with it, the terms would
    not add up to the total.

    Args:
        M: (m, m) losses; M[j, i] is the loss of client i's model on client j's samples.
        l: (m,) losses of the global model on the clients' samples.
        p: (m,) weights of the clients.

    >>> decompose_loss(torch.tensor([[1.0, 3.0], [2.0, 1.0]]), torch.tensor([1.5, 2.0]), torch.tensor([0.5, 0.5]))
    {'local': 1.0, 'shift': 0.75, 'aggregation': 0.0, 'total': 1.75}
    """
    M, l, p = M.double(), l.double(), p.double()  # noqa: E741
    local, total = p @ M.diagonal(), p @ l
    shift = p @ (M - M.diagonal()[None, :]) @ p
    aggregation = p @ (total - M.T @ p)
    return {"local": local.item(), "shift": shift.item(), "aggregation": aggregation.item(), "total": total.item()}


# ---- probe knowledge: how much of the global model's accuracy local training preserves (FedSOL, Fig. 7; FedNTD) ----
def compute_accuracy_rows(c: Cohort) -> Rows:
    """Return a row for each client of this rank: accuracies on the global test set, in total and for each class.

    The row holds the accuracies of the client's local model, of the global model before the round, and of the global
    model after it.
    """
    test, classes = c.trainer.data.global_test, c.trainer.data.classes
    assert test is not None  # checked by runtime/compatibility.py
    counts = torch.bincount(test.y[test.index], minlength=classes).double().cpu()

    def accuracies(model: Model) -> Tensor:
        _, outputs, targets = c.evaluate_model(model, test)
        by_class = class_accuracy(outputs, targets, classes).cpu()
        return torch.cat([(by_class.nan_to_num() @ counts / counts.sum())[None], by_class])

    of_global = [accuracies(model) for model in (c.before, c.after)] if c.local_models else []
    return 3 * (classes + 1), {k: torch.cat([accuracies(model), *of_global]) for k, model in c.local_models.items()}


def class_accuracy(outputs: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Return the accuracy of each class in per cent, (C,); nan for classes without samples.

    >>> class_accuracy(torch.eye(3)[[0, 1, 0]], torch.tensor([0, 1, 1]), 3)
    tensor([100.,  50.,  nan], dtype=torch.float64)
    """
    correct = torch.bincount(targets[outputs.argmax(1) == targets], minlength=classes)
    return 100 * correct.double() / torch.bincount(targets, minlength=classes)


def summarize_accuracy(c: Cohort, rows: Tensor) -> dict[str, Any]:
    """Return the accuracies of local and global models of a round, from which forgetting can be computed.

    Forgetting is the mean over classes of the decrease in accuracy from its best value.
    """
    local, before, after = rows.split(rows.shape[1] // 3, 1)
    return {
        "local": local[:, 0].tolist(),
        "local_mean": local[:, 0].mean().item(),
        "local_std": local[:, 0].std(correction=0).item(),
        "before": before[0, 0].item(),
        "after": after[0, 0].item(),
        "classes_local": local[:, 1:].nanmean(0).tolist(),
        "classes_before": before[0, 1:].tolist(),
        "classes_after": after[0, 1:].tolist(),
    }


# ---- probe contribution: how much the loss of the average model increases if a client is left out ----
def compute_leave_one_out_losses(c: Cohort) -> Rows:
    """Return a row for each client k of this rank: losses of the average model without one client, and with all.

    The average over all clients is w_mean; the average without client k is w_-k = sum_{i != k} p_i w_i / (1 - p_k).
    With a global test set, the row holds the losses L(w_-k) and L(w_mean) on this set. In silo mode only the sites have
    test data, so the row holds L(w_-i) for all clients i, and then L(w_mean), on the test samples of site k. This
    requires sending every local model to all ranks twice.
    """
    p = dict(zip(c.members, c.p.tolist(), strict=True))
    w, b = (torch.zeros_like(each, dtype=torch.float64) for each in c.before)
    for k, model in c.models():
        w, b = w + p[k] * model.w.double(), b + p[k] * model.b.double()

    def without(k: int, model: Model) -> Model:
        rest = [(each - p[k] * part.double()) / (1 - p[k]) for each, part in ((w, model.w), (b, model.b))]
        return Model(*(each.to(part.dtype) for each, part in zip(rest, c.before, strict=True)))

    mean, test = Model(w.to(c.before.w.dtype), b.to(c.before.b.dtype)), c.trainer.data.global_test
    if test is not None:
        of_mean = c.evaluate_model(mean, test).metrics["loss"] if c.local_models else 0.0
        losses = {k: c.evaluate_model(without(k, model), test).metrics["loss"] for k, model in c.local_models.items()}
        return 2, {k: torch.tensor([loss, of_mean], dtype=torch.float64) for k, loss in losses.items()}
    own: dict[int, list[float]] = {k: [] for k in c.local_models}
    for average in (*(without(k, model) for k, model in c.models()), mean):
        for site, row in own.items():
            row.append(c.evaluate_model(average, c.trainer.data.test[site]).metrics["loss"])
    return len(c.members) + 1, {k: torch.tensor(row, dtype=torch.float64) for k, row in own.items()}


def summarize_contribution(c: Cohort, rows: Tensor) -> dict[str, Any]:
    """Return the loss L(w_mean), and the gain L(w_-k) - L(w_mean) of each client.

    The gain is the amount by which including the client's model in the average reduces the loss; it is negative if the
    average is better without this model. w_mean is the weighted average of the local models, whatever the method's
    aggregation rule is. The losses of sites are averaged with weights proportional to their numbers of test samples.
    """
    if c.trainer.data.global_test is not None:
        losses, mean = rows[:, 0], rows[0, 1]
    else:
        n = torch.as_tensor(c.trainer.data.test_sizes[list(c.members)], dtype=torch.float64)
        *each, mean = (n / n.sum()) @ rows.where(n[:, None] > 0, torch.zeros(()).double())
        losses = torch.stack(each)
    return {"loss": mean.item(), "gain": (losses - mean).tolist()}


# ---- probe drift: length and conflicts of local updates (FedSOL, Fig. 6) ----
def compute_gram_rows(c: Cohort) -> Rows:
    """Return this rank's rows (m,) of the Gram matrix G = (d_i . d_k) of the updates d_k = w_k - w0."""
    own: dict[int, list[Tensor]] = {k: [] for k in c.local_updates}
    for _, d in c.updates():
        for k, update in c.local_updates.items():
            own[k].append(update.double() @ d.double())
    return len(c.members), {k: torch.stack(row) for k, row in own.items()}


def summarize_drift(c: Cohort, rows: Tensor) -> dict[str, Any]:
    """Return the statistics of the updates (see gram_statistics) from their Gram matrix `rows` (m, m)."""
    return gram_statistics((rows + rows.T) / 2)


def gram_statistics(G: Tensor) -> dict[str, Any]:
    """Return statistics of updates d_k from their Gram matrix G (m, m).

    divergence is the mean of |d_k|; consistency is the mean of |w_i - w_k| over pairs of clients; cosine is the mean
    cosine of the angle between the updates of a pair; conflicts is the fraction of pairs with a negative cosine;
    spectrum holds the eigenvalues of G, largest first. Means over pairs are None if there is only one client.

    >>> row = gram_statistics(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]))
    >>> row["divergence"], row["conflicts"], round(row["consistency"], 4), row["spectrum"]
    (1.0, 1.0, 1.7321, [1.5, 0.5])
    """
    G = G.double()
    norms = G.diagonal().clamp(min=0).sqrt()
    i, k = torch.triu_indices(len(G), len(G), offset=1)
    distances = (G[i, i] + G[k, k] - 2 * G[i, k]).clamp(min=0).sqrt()
    cosines = G / (norms[:, None] * norms[None, :])  # nan for a client whose update is 0
    pairs = cosines[i, k]
    pairs = pairs[~pairs.isnan()]
    finite = bool(G.isfinite().all())  # eigvalsh fails if a client has diverged
    return {
        "divergence": norms.mean().item(),
        "consistency": distances.mean().item() if len(i) else None,
        "cosine": pairs.mean().item() if len(pairs) else None,
        "conflicts": (pairs < 0).double().mean().item() if len(pairs) else None,
        "norms": norms.tolist(),
        "spectrum": torch.linalg.eigvalsh(G).flip(0).tolist() if finite else [torch.nan] * len(G),
        "cosines": cosines.tolist(),
    }


# ---- probe layers: how much and how evenly local training changes each layer (FedSOL, Fig. 5b) ----
def compute_layer_rows(c: Cohort) -> Rows:
    """Return a row for each client of this rank with three numbers per layer.

    For a layer l (its weight and bias), these are the mean of Lambda^(l); the same mean with norms of columns in place
    of the norm of the layer (see change_strength); and ||w^(l) - w0^(l)||.

    Lambda^(l) = |w^(l) - w0^(l)| / ||w^(l) - w0^(l)||    elementwise, FedSOL's Eq. 7
    """
    layers, rows = group_by_layer(c.trainer.model.layout), {}
    for k, d in c.local_updates.items():
        wide = d.double()
        changes = [[s.view(wide) for s in tensors] for tensors in layers.values()]
        norms = [torch.cat([m.flatten() for m in each]).norm() for each in changes]
        by_columns = (change_strength(each, columns=True) for each in changes)
        rows[k] = torch.stack([*map(change_strength, changes), *by_columns, *norms])
    return 3 * len(layers), rows


def group_by_layer(layout: Layout) -> dict[str, list[Segment]]:
    """Group the tensors of a layout by layer; return layer name -> tensors.

    The name of a layer is the name of its tensors without the last component.
    """
    groups = groupby(layout.segments, key=lambda s: s.name.rpartition(".")[0] or s.name)
    return {name: list(tensors) for name, tensors in groups}


def change_strength(changes: list[Tensor], columns: bool = False) -> Tensor:
    """Return the mean of Lambda = |w - w0| / ||w - w0|| over the entries of a layer.

    Args:
        changes: the tensors w - w0 of the layer.
        columns: whether to divide each entry by the norm of its column, i.e. the norm along the first dimension of its
            tensor, instead of the norm of the layer.

    >>> change_strength([torch.tensor([0.0, 1.0]), torch.tensor([[2.0, 3.0]])])  # mean of 0, .267, .535, .802
    tensor(0.4009, dtype=torch.float64)
    """
    changes = [m.double() for m in changes]
    layer_norm = torch.cat([m.flatten() for m in changes]).norm()
    norms = [m.norm(dim=0, keepdim=True) if columns else layer_norm for m in changes]
    ratios = [(m.abs() / norm.clamp(min=1e-12)).flatten() for m, norm in zip(changes, norms, strict=True)]
    return torch.cat(ratios).mean()


def summarize_layers(c: Cohort, rows: Tensor) -> dict[str, Any]:
    """Return, for each layer in the order of the model, means over the clients.

    `strength` is the mean of Lambda (see change_strength) over the n entries of a layer. It is largest, 1/sqrt(n), if
    all entries have changed by the same amount; small layers therefore have larger values than large layers, whatever
    the data. `evenness` is strength times sqrt(n). `columns` is the mean of Lambda with norms of columns instead of the
    norm of the layer, as in the code of FedSOL's authors. `norm` is ||w - w0||.
    """
    layers = group_by_layer(c.trainer.model.layout)
    n = torch.tensor([sum(s.stop - s.start for s in tensors) for tensors in layers.values()])
    strengths, columns, norms = rows.mean(0).split(len(layers))
    return {
        "layers": list(layers),
        "entries": n.tolist(),
        "strength": strengths.tolist(),
        "evenness": (strengths * n.double().sqrt()).tolist(),
        "columns": columns.tolist(),
        "norm": norms.tolist(),
    }


PROBES = {
    "losses": Probe(compute_loss_rows, summarize_losses),
    "knowledge": Probe(compute_accuracy_rows, summarize_accuracy),
    "contribution": Probe(compute_leave_one_out_losses, summarize_contribution),
    "drift": Probe(compute_gram_rows, summarize_drift),
    "layers": Probe(compute_layer_rows, summarize_layers),
}
