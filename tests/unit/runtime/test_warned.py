"""Warnings of a run are in its log."""

import warnings

from fedmpi.runtime.record import warned


def test_early_ones_too():
    lines = []
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with warned.heard():
            warnings.warn("early", stacklevel=1)
            warned.into(lines.append)
            warnings.warn("late", stacklevel=1)
    assert lines == ["warning: early", "warning: late"]


def test_filters_are_as_they_were():
    before = list(warnings.filters)
    with warned.heard():
        pass
    assert list(warnings.filters) == before
