"""Analyses of the local models: their losses, forgetting, and the contribution of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedmpi.engine.evaluate import evaluate
from fedmpi.engine.probes.cohort import Cohort, Model


def decomposition(M: Tensor, l: Tensor, p: Tensor) -> dict[str, float]:  # noqa: E741  the paper's letter
    """M (m, m), l (m,) and weights p (m,) that add up to one, float64.

    >>> decomposition(torch.tensor([[1.0, 3.0], [2.0, 1.0]]), torch.tensor([1.5, 2.0]), torch.tensor([0.5, 0.5]))
    {'local': 1.0, 'shift': 0.75, 'aggregation': 0.0, 'total': 1.75}
    """
    M, l, p = M.double(), l.double(), p.double()  # noqa: E741
    local, total = p @ M.diagonal(), p @ l
    shift = p @ (M - M.diagonal()[None, :]) @ p
    aggregation = p @ (total - M.T @ p)
    return {"local": local.item(), "shift": shift.item(), "aggregation": aggregation.item(), "total": total.item()}


def measure_losses(c: Cohort) -> dict[str, Any]:
    """What the loss of the global model is made of (FedLD, Eq. 2).

    M[j, i] = L_j(w_i), mean loss of client i's local model on client j's training samples; l_j = L_j(w), w aggregated:
        local        sum_i p_i M[i, i]
        shift        sum_ij p_j p_i (M[j, i] - M[i, i])       other clients have other samples
        aggregation  sum_i p_i (sum_j p_j l_j - sum_j p_j M[j, i])       an average is none of the models that it is of
    They add up to the loss of the global model, sum_j p_j l_j. As printed the third one has L_i(w_i), and then they do
    not. The matrix M takes m^2 evaluations, shared among the ranks.
    """
    own: dict[int, list[float]] = {k: [] for k in c.mine}
    for _, model in (*c.models(), (None, c.after)):
        for k in own:
            own[k].append(c.train_loss(model, k))
    m = len(c.members)
    rows = c.gather({k: torch.tensor(row, dtype=torch.float64) for k, row in own.items()}, m + 1)
    if c.comm.rank:
        return {}
    return {**decomposition(rows[:, :m], rows[:, m], c.p), "matrix": rows[:, :m], "global": rows[:, m]}


def class_accuracy(outputs: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Percent of each class's samples that are given it, (C,); nan for a class without samples.

    >>> class_accuracy(torch.eye(3)[[0, 1, 0]], torch.tensor([0, 1, 1]), 3)
    tensor([100.,  50.,  nan], dtype=torch.float64)
    """
    right = torch.bincount(targets[outputs.argmax(1) == targets], minlength=classes)
    return 100 * right.double() / torch.bincount(targets, minlength=classes)


def measure_knowledge(c: Cohort) -> dict[str, Any]:
    """What local training keeps of what the global model knew (FedSOL, Fig. 7; FedNTD).

    Accuracy of each local model on the global test set, as a whole and class by class, beside the global model's before
    and after the round. Forgetting between two rounds is the mean over classes of how far accuracy fell below its best.
    The global models are the task of the rank with the first client.
    """
    first, classes = c.members[0], c.trainer.data.classes
    nothing = torch.full((classes + 1,), torch.nan, dtype=torch.float64)
    own = {k: _known(c, model) for k, model in c.mine.items()}
    of_global = [_known(c, model) if first in own else nothing for model in (c.before, c.after)]
    rows = {k: torch.cat([known, *(of_global if k == first else [nothing, nothing])]) for k, known in own.items()}
    found = c.gather(rows, 3 * (classes + 1))
    if c.comm.rank:
        return {}
    local, rest = found[:, : classes + 1], found[0, classes + 1 :]
    before, after = rest.split(classes + 1)
    return {
        "local": local[:, 0].tolist(),
        "local_mean": local[:, 0].mean().item(),
        "local_std": local[:, 0].std(correction=0).item(),
        "before": before[0].item(),
        "after": after[0].item(),
        "classes_local": local[:, 1:].nanmean(0).tolist(),
        "classes_before": before[1:].tolist(),
        "classes_after": after[1:].tolist(),
    }


def _known(c: Cohort, model: Model) -> Tensor:
    """(1 + C,): accuracy on the global test set, and that of each class."""
    test, classes = c.trainer.data.global_test, c.trainer.data.classes
    assert test is not None  # else the run was refused at its start (runtime/compatibility.py)
    c.trainer.model.load(model.w, model.b)
    of_test = evaluate(c.trainer, test, c.batch)
    by_class = class_accuracy(of_test.outputs, of_test.targets, classes)
    counts = torch.bincount(test.y[test.index], minlength=classes).double()
    return torch.cat([(by_class.nan_to_num() @ counts / counts.sum())[None], by_class]).cpu()


def measure_contribution(c: Cohort) -> dict[str, Any]:
    """What a client gives: how much worse the average of the others' local models is.

    With w_-k = sum of p_i w_i over i != k, over 1 - p_k, a client's gain is L(w_-k) - L(w_mean): the loss that its part
    saves, on the global test set, or in silo mode pooled over the sites' own. Negative: the others do better without
    it. It is about the plain average of local models, whatever the method's own rule makes of them. In silo mode all
    local models pass twice: once for their mean, once for what is left without each.
    """
    p = dict(zip(c.members, c.p.tolist(), strict=True))
    w, b = torch.zeros_like(c.before.w, dtype=torch.float64), torch.zeros_like(c.before.b, dtype=torch.float64)
    for k, model in c.models():
        w, b = w + p[k] * model.w.double(), b + p[k] * model.b.double()

    def without(k: int | None, model: Model | None) -> Model:
        if k is None or model is None:
            return Model(w.to(c.dtype), b.to(c.before.b.dtype))
        rest = 1 - p[k]
        left = [(whole - p[k] * part.double()) / rest for whole, part in ((w, model.w), (b, model.b))]
        return Model(left[0].to(c.dtype), left[1].to(c.before.b.dtype))

    test = c.trainer.data.global_test
    if test is not None:
        own = {k: [c.figures(without(k, model), test)["loss"], torch.nan] for k, model in c.mine.items()}
        if c.members[0] in own:
            own[c.members[0]][1] = c.figures(without(None, None), test)["loss"]
        rows = c.gather({k: torch.tensor(row, dtype=torch.float64) for k, row in own.items()}, 2)
        return {} if c.comm.rank else _gains(rows[:, 0], rows[0, 1])
    seen: dict[int, list[float]] = {k: [] for k in c.mine}
    for left in (*(without(k, model) for k, model in c.models()), without(None, None)):
        for site, losses in seen.items():
            losses.append(c.figures(left, c.trainer.data.test[site])["loss"])
    rows = c.gather({k: torch.tensor(row, dtype=torch.float64) for k, row in seen.items()}, len(c.members) + 1)
    if c.comm.rank:
        return {}
    n = torch.as_tensor(c.trainer.data.test_sizes[list(c.members)], dtype=torch.float64)
    pooled = (n / n.sum()) @ rows.where(n[:, None] > 0, torch.zeros(()).double())
    return _gains(pooled[:-1], pooled[-1])


def _gains(without: Tensor, mean: Tensor) -> dict[str, Any]:
    return {"loss": mean.item(), "gain": (without - mean).tolist()}
