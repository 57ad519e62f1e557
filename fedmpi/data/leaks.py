"""Warn about features that reveal the target (label leaks)."""

from __future__ import annotations

import math
import warnings

from torch import Tensor

from fedmpi.common.text import list_things
from fedmpi.data.dataset import Dataset, is_labels

FALSE_ALARM_PROBABILITY = 1e-3  # largest probability of a warning if features are random


def warn_about_label_leaks(data: Dataset, silo: str = "") -> None:
    """Warn if a single feature (a column of train_x) separates the classes of the training rows.

    A feature separates the classes if its values in different classes lie in intervals that do not overlap.

    Args:
        data: the data set.
        silo: the name of the silo for the message, with a leading space; "" if there are no silos.
    """
    x = data.train_x
    if not (isinstance(x, Tensor) and x.ndim == 2 and x.is_floating_point() and is_labels(data.train_y, data.classes)):
        return
    classes, member, counts = data.train_y.unique(return_inverse=True, return_counts=True)
    # A random feature separates C classes of m_c rows, n in all, with probability C! prod_c m_c! / n!.
    log_chance = math.log(x.shape[1]) + sum(math.lgamma(m + 1) for m in (*counts.tolist(), len(counts)))
    if len(classes) < 2 or log_chance - math.lgamma(len(x) + 1) > math.log(FALSE_ALARM_PROBABILITY):
        return
    index, out = member[:, None].expand_as(x), x.new_zeros(len(classes), x.shape[1])
    low, high = (out.scatter_reduce(0, index, x, how, include_self=False) for how in ("amin", "amax"))
    order = low.argsort(0)
    separates = (high.gather(0, order)[:-1] < low.gather(0, order)[1:]).all(0)  # (f,)
    columns = separates.nonzero().flatten().tolist()
    if columns:
        width = x.shape[1]
        has_names = len(data.input_and_class_names) > width and data.input_and_class_names[width] == "->"
        which = list_things([data.input_and_class_names[k] if has_names else str(k) for k in columns], "feature")
        warnings.warn(
            f"data{silo}: {which} alone separates the classes of the training rows; check whether it was known before "
            "the "
            "label, and if not, exclude it with data.drop",
            stacklevel=2,
        )
