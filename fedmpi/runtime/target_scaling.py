"""Regression targets standardised by their training rows (data.standardise_target); hints where numbers are large."""

from __future__ import annotations

import warnings
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

LARGE_TARGET = 100  # root mean square of targets beyond which there is a hint
LARGE_INPUT, PEAK = 20, 200  # root mean square and maximum of the inputs; pixels in 0..255 have more than both
GLANCE = 5000  # rows that are looked at for a hint


def check(settings: Settings) -> None:
    """Raise UserError where the settings cannot standardise targets."""
    how, cut = settings.data.standardise_target, settings.data.partition
    if how and settings.task.name != "regression":
        raise UserError(
            f"data.standardise_target: {how} goes with task.name: regression, and it is {settings.task.name}; leave it "
            "out"
        )
    if how == "pooled" and cut is not None and cut.options.get("only"):
        raise UserError(
            "data.partition.only leaves sites out of training, but with data.standardise_target: pooled all sites' "
            "training rows say how targets are standardised; say data.standardise_target: site"
        )


def scaled(settings: Settings, data: Federated, dataset: Dataset) -> Federated:
    """The federation of one data set with its targets standardised, as the settings say."""
    how = settings.data.standardise_target
    if not how:
        return data
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
    if not how:
        return data
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
    found = data.with_samples(lambda x: x, lambda y: new[id(y)])
    return replace(found, target_scales=scales, target_shape=(3, *data.target_shape))


def warn_of_scales(settings: Settings, dataset: Dataset, whose: str = "") -> None:
    """Warn once of inputs as large as raw pixels are, and of large targets of a regression. whose: ` of SITE`."""
    x, y, ours = dataset.train_x, dataset.train_y, settings.data
    if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and len(x):
        some = x[:: max(len(x) // GLANCE, 1)].double()
        size = some.square().mean([0, *range(2, some.ndim)]).sqrt().max().item()
        peak = some.abs().max().item()
        if size > LARGE_INPUT and peak >= PEAK:
            span = f"{some.min().item():g}..{some.max().item():g}"
            kind = "raw pixels" if x.ndim > 2 else "columns that are not standardised"
            how = "pixel_range, or mean and std" if x.ndim > 2 else "standardise"
            warnings.warn(
                f"data{whose}: inputs are in {span}, as {kind} are; training expects numbers about 1, and may diverge: "
                f"scale them (options of data sources: {how}; 8-bit pixels that are stored as uint8 become 0..1)",
                stacklevel=2,
            )
    if settings.task.name == "regression" and not ours.standardise_target and y.is_floating_point() and len(y):
        counted = is_counted(y, ignored_value(settings.task.options.get("ignore")))
        size = y.double()[counted].square().mean().sqrt().item()
        if size > LARGE_TARGET:
            warnings.warn(
                f"data{whose}: the targets have a root mean square of {size:.3g}, and a model's first outputs are near "
                "0: training may diverge at any learning rate; say data.standardise_target: pooled (metrics and "
                "predictions stay in the unit of the targets)",
                stacklevel=2,
            )
