"""A warning names a feature that alone reveals the target."""

import numpy as np
import torch
from table_files import noise, warnings_of

from fedmpi.data.dataset import Dataset
from fedmpi.data.leaks import warn_about_label_leaks


def leaks(x, y, names=()):
    """Return the warnings for features x (n, f) and classes y (n,)."""
    x, y = torch.tensor(np.asarray(x)).float(), torch.tensor(np.asarray(y))
    data = Dataset(x, y, x[:1], y[:1], int(y.max()) + 1, input_and_class_names=(*names, "->") if names else ())
    return warnings_of(warn_about_label_leaks, data)


def test_a_feature_that_separates_the_classes_alone_is_named():
    y = [0] * 20 + [1] * 20 + [2] * 20
    x = np.stack([noise(), np.array([5.0, -1.0, 2.0])[y] + noise(seed=1) / 20], axis=1)
    assert "feature 'code' alone separates the classes" in leaks(x, y, names=("a", "code"))[0]
    assert "feature '1' alone" in leaks(x, y)[0]  # without names of features
    assert leaks(x[:, :1], y) == []
    x[0, 1] = x[25, 1]  # now two classes share a value
    assert leaks(x, y) == []


def test_no_warning_if_random_features_may_separate_the_classes():
    """A random feature separates 6 of 12 rows with probability 2 / C(12, 6) = 1/462, and 10 of 20 with 1/92,378."""
    for n, warnings in ((12, 0), (20, 1)):
        assert len(leaks(np.arange(n)[:, None] * 1.0, [0] * (n // 2) + [1] * (n // 2))) == warnings
