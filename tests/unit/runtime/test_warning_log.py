"""Warnings of a run are in its log."""

import warnings

from fedmpi.runtime.record.recorder import WarningLog


def test_early_ones_too():
    lines, log = [], WarningLog()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with log.collect():
            warnings.warn("early", stacklevel=1)
            log.write_to(lines.append)
            warnings.warn("late", stacklevel=1)
    assert lines == ["warning: early", "warning: late"]


def test_filters_are_as_they_were():
    before = list(warnings.filters)
    with WarningLog().collect():
        pass
    assert list(warnings.filters) == before
