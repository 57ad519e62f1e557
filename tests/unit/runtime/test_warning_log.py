"""Warnings of a run are in its log."""

import warnings

from fedmpi.runtime.record.recorder import RankRecorder


def test_early_ones_too():
    recorder = RankRecorder()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with recorder.collect_warnings():
            warnings.warn("early", stacklevel=1)
            lines = list(recorder.early_lines)
            recorder.log = lines.append
            warnings.warn("late", stacklevel=1)
    assert lines == ["warning: early", "warning: late"]


def test_filters_are_as_they_were():
    before = list(warnings.filters)
    with RankRecorder().collect_warnings():
        pass
    assert list(warnings.filters) == before
