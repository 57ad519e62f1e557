"""A feature that alone gives the target away is named before the training."""

import numpy as np
import torch
from table_files import noise, warnings_of

from fedmpi.data.dataset import Dataset
from fedmpi.data.leaks import warn_about_label_leaks


def leaks(x, y, names=()):
    """The warnings for features x (n, f) and classes y (n,)."""
    x, y = torch.tensor(np.asarray(x)).float(), torch.tensor(np.asarray(y))
    data = Dataset(x, y, x[:1], y[:1], int(y.max()) + 1, input_and_class_names=(*names, "->") if names else ())
    return warnings_of(warn_about_label_leaks, data)


def test_a_feature_that_separates_the_classes_alone_is_named():
    y = [0] * 20 + [1] * 20 + [2] * 20
    x = np.stack([noise(), np.array([5.0, -1.0, 2.0])[y] + noise(seed=1) / 20], axis=1)
    assert "feature 'code' alone separates the classes" in leaks(x, y, names=("a", "code"))[0]
    assert "feature '1' alone" in leaks(x, y)[0]  # a source that names no feature
    assert leaks(x[:, :1], y) == []
    x[0, 1] = x[25, 1]  # two classes with one value
    assert leaks(x, y) == []


def test_no_warning_where_chance_alone_would_separate_the_classes():
    """Of n = 12 rows one in 2 / C(12, 6) = 1/462 features separates six from six; of 20, one in 92,378."""
    for n, warnings in ((12, 0), (20, 1)):
        assert len(leaks(np.arange(n)[:, None] * 1.0, [0] * (n // 2) + [1] * (n // 2))) == warnings
