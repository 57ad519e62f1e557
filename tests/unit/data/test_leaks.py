"""A feature that alone gives the target away is named before the training."""

import numpy as np
import torch
from table_files import noise, warnings_of

from fedmpi.data.dataset import Dataset
from fedmpi.data.leaks import warn_of_leaks

RANDOM = np.random.default_rng(0)


def leaks(x, y, site=None, names=()):
    """The warnings for features x (n, f) and classes y (n,), or events and times y (n, 2)."""
    x, y = torch.tensor(np.asarray(x)).float(), torch.tensor(np.asarray(y))
    survival = y.ndim == 2
    site = None if site is None else torch.tensor(site)
    meaning = (*names, "->") if names else ()
    data = Dataset(x, y, x[:1], y[:1], 1 if survival else int(y.max()) + 1, site=site, meaning=meaning)
    return warnings_of(warn_of_leaks, data, survival)


def test_a_feature_that_separates_the_classes_alone_is_named():
    y = [0] * 20 + [1] * 20 + [2] * 20
    x = np.stack([noise(), np.array([5.0, -1.0, 2.0])[y] + noise(seed=1) / 20], axis=1)
    assert "feature 'code' alone separates the classes" in leaks(x, y, names=("a", "code"))[0]
    assert "feature '1' alone" in leaks(x, y)[0]  # a source that names no feature
    assert leaks(x[:, :1], y) == []
    x[0, 1] = x[25, 1]  # two classes with one value
    assert leaks(x, y) == []


def test_a_feature_separates_the_classes_of_every_site_by_its_own_values():
    y, site = [0, 1] * 30, [0] * 30 + [1] * 30
    x = np.array(y) * np.where(np.array(site) == 0, 1.0, -1.0)  # up at one site, down at the other
    assert leaks(x[:, None], y) == []
    assert "alone separates" in leaks(x[:, None], y, site)[0]
    x[0] = 1.0
    assert leaks(x[:, None], y, site) == []


def test_no_warning_where_chance_alone_would_separate_the_classes():
    """Of n = 12 rows one in 2 / C(12, 6) = 1/462 features separates six from six; of 20, one in 92,378."""
    for n, warnings in ((12, 0), (20, 1)):
        assert len(leaks(np.arange(n)[:, None] * 1.0, [0] * (n // 2) + [1] * (n // 2))) == warnings


def test_a_feature_that_equals_the_event_is_named():
    rng = np.random.default_rng(0)
    event, time, other = rng.integers(0, 2, 80), rng.exponential(100, 80), rng.normal(size=80)
    flipped = np.where(np.arange(80) == 7, 1 - event, event)
    x, y = np.stack([other, event * 2.0 - 1, flipped], axis=1), np.stack([event, time], axis=1).astype(np.float32)
    (message,) = leaks(x, y, names=("age", "status", "almost"))
    assert "feature 'status' alone separates the events" in message
