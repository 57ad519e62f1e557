"""A warning about features from which a model would learn the target itself."""

from __future__ import annotations

import math
import warnings

from torch import Tensor

from fedmpi.common.text import list_things
from fedmpi.data.dataset import Dataset, is_labels

FALSE_ALARM_PROBABILITY = 1e-3  # probability of a warning for random features


def warn_about_label_leaks(data: Dataset, whose: str = "") -> None:
    """Warn once about features (columns of train_x) each of which alone separates the classes of all training rows.

    A feature does so if the classes are in intervals of its values that do not overlap.

    Args:
        whose: the silo, for the message.
    """
    x = data.train_x
    if not (isinstance(x, Tensor) and x.ndim == 2 and x.is_floating_point() and is_labels(data.train_y, data.classes)):
        return
    classes, member, counts = data.train_y.unique(return_inverse=True, return_counts=True)
    # A random feature separates C classes of m_c rows, n in all, with probability C! prod_c m_c! / n!.
    log_chance = math.log(x.shape[1]) + sum(math.lgamma(m + 1) for m in (*counts.tolist(), len(counts)))
    if len(classes) < 2 or log_chance - math.lgamma(len(x) + 1) > math.log(FALSE_ALARM_PROBABILITY):
        return
    place, out = member[:, None].expand_as(x), x.new_zeros(len(classes), x.shape[1])
    low, high = (out.scatter_reduce(0, place, x, how, include_self=False) for how in ("amin", "amax"))
    order = low.argsort(0)
    separates = (high.gather(0, order)[:-1] < low.gather(0, order)[1:]).all(0)  # (f,)
    columns = separates.nonzero().flatten().tolist()
    if columns:
        width = x.shape[1]
        has_names = len(data.input_and_class_names) > width and data.input_and_class_names[width] == "->"
        which = list_things([data.input_and_class_names[k] if has_names else str(k) for k in columns], "feature")
        warnings.warn(
            f"data{whose}: {which} alone separates the classes of the training rows; look whether it was known before "
            "the label, and leave it out (data.drop) if not",
            stacklevel=2,
        )
