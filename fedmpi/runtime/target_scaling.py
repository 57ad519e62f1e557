"""Regression targets standardised by their training rows (data.standardise_target)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.target_scale import TargetScale, target_sums
from fedmpi.config.schema import Settings
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import Federated
from fedmpi.tasks.base import ignored_value, is_counted


def scaled(settings: Settings, data: Federated, dataset: Dataset) -> Federated:
    """Return the federation of one data set with its targets standardised, as the settings say."""
    how = settings.data.standardise_target
    _check_targets(dataset)
    if how == "pooled":
        scale = TargetScale.of_sums([sums(settings, dataset.train_y)])
        return _with_scales(data, {"": scale}, {id(y): scale.beside(y) for y in (dataset.train_y, dataset.test_y)})
    if dataset.site is None or (dataset.test_site is None and len(dataset.test_y)):
        raise UserError(
            "data.standardise_target: site needs a data set that knows the sites of its rows (data.site_column), or "
            "data.silos; say data.standardise_target: pooled"
        )
    owners = {id(dataset.train_y): dataset.site, id(dataset.test_y): dataset.test_site}
    new = {id(y): torch.stack([y, y, y], dim=1) for y in (dataset.train_y, dataset.test_y)}
    scales = {}
    for k in torch.cat([owner for owner in owners.values() if owner is not None]).unique().tolist():
        scale = TargetScale.of_sums([sums(settings, dataset.train_y[dataset.site == k])])
        scales[dataset.site_names[k] if dataset.site_names else str(k)] = scale
        for y in (dataset.train_y, dataset.test_y):
            owner = owners[id(y)]
            if owner is not None:
                new[id(y)][owner == k] = scale.beside(y[owner == k])
    return _with_scales(data, scales, new)


def scaled_silos(
    settings: Settings,
    data: Federated,
    datasets: Mapping[int, Dataset],
    exchange: Callable[[np.ndarray], np.ndarray],
) -> Federated:
    """The federation of silos with its targets standardised, as the settings say.

    Args:
        datasets: of the silos that this rank opens, by client.
        exchange: given (N, 3 k) float64 with this rank's rows filled, returns the rows of all ranks. It is called where
            targets are standardised by all sites; else what is known of a site stays with its rank.
    """
    how = settings.data.standardise_target
    for dataset in datasets.values():
        _check_targets(dataset)
    own = {k: sums(settings, dataset.train_y) for k, dataset in datasets.items()}
    if how == "pooled":
        rows = np.zeros((data.clients, 3 * int(np.prod(data.target_shape, dtype=np.int64))))
        for k, row in own.items():
            rows[k] = row
        scale = TargetScale.of_sums(exchange(rows))
        scales, by_client = {"": scale}, dict.fromkeys(datasets, scale)
    else:
        by_client = {k: TargetScale.of_sums([row]) for k, row in own.items()}
        scales = {data.site_names[k]: scale for k, scale in by_client.items()}
    pairs = [(y, by_client[k]) for k, dataset in datasets.items() for y in (dataset.train_y, dataset.test_y)]
    return _with_scales(data, scales, {id(y): scale.beside(y) for y, scale in pairs})


def sums(settings: Settings, y: Tensor) -> np.ndarray:
    """(3 k,) number, sum and sum of squares of the targets that `task.ignore` does not leave out."""
    return target_sums(y, is_counted(y, ignored_value(settings.task.options.get("ignore"))))


def _check_targets(dataset: Dataset) -> None:
    if not dataset.train_y.is_floating_point():
        raise UserError(
            f"data.standardise_target: targets are {dataset.train_y.dtype}, and real numbers are needed (of a table: "
            "data.target: number)"
        )


def _with_scales(data: Federated, scales: Mapping[str, TargetScale], new: Mapping[int, Tensor]) -> Federated:
    """new: by the id of a tensor of targets what stands in its place."""
    standardised = data.with_samples(lambda x: x, lambda y: new[id(y)])
    return replace(standardised, target_scales=scales, target_shape=(3, *data.target_shape))
