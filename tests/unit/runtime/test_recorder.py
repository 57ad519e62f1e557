"""What records a run, on any rank and before and after the run."""

import gc
import warnings
import weakref

from helpers import small_settings

from fedmpi.runtime import run
from fedmpi.runtime.record.recorder import RankRecorder, Recorder


def test_a_run_that_is_over_keeps_no_model_alive(tmp_path, monkeypatch):
    """A recorder lives on where the error reporter of a job may still call its `close_failed`."""
    recorders, models = [], []

    class Watched(Recorder):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            recorders.append(self)

    build = run.build.experiment

    def experiment(*arguments):
        made = build(*arguments)
        models.append(weakref.ref(made.model))
        return made

    monkeypatch.setattr(run, "Recorder", Watched)
    monkeypatch.setattr(run.build, "experiment", experiment)
    run.execute(small_settings("fedavg", "mlp", rounds=1, output=str(tmp_path)))
    gc.collect()
    assert models[0]() is None
    assert recorders[0].close_failed("the launcher has died") == ""


def test_warnings_are_logged_also_those_before_there_was_a_log():
    """Afterwards the filters of warnings are as they were."""
    recorder, before = RankRecorder(), list(warnings.filters)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with recorder.collect_warnings():
            warnings.warn("early", stacklevel=1)
            lines = list(recorder.early_lines)
            recorder.log = lines.append
            warnings.warn("late", stacklevel=1)
    assert lines == ["warning: early", "warning: late"]
    with recorder.collect_warnings():
        pass
    assert list(warnings.filters) == before
