"""What a run leaves: on rank 0 its directory, its lines on the console and its loggers, on every rank checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.inputs import to_text
from fedmpi.common.signals import StopRequest
from fedmpi.data.batches import Shards
from fedmpi.data.partitions.parts import Partition
from fedmpi.engine.best import Best
from fedmpi.engine.federation import Federation
from fedmpi.engine.plan import Sink
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.record import plugins, preprocessing, report_text, whole
from fedmpi.runtime.record.model_facts import personal_facts
from fedmpi.runtime.record.progress import Console
from fedmpi.runtime.record.run_dir import BEST, RunDirectory
from fedmpi.runtime.record.summary import judged_first, summary
from fedmpi.runtime.record.tracking.hearing import Hearing
from fedmpi.runtime.resuming.checkpoints import Checkpoints


class RankRecorder(Sink):
    """What every rank records: checkpoints. The engine calls its other methods on any rank, too; they do nothing."""

    checkpoints: Checkpoints | None = None  # where the run has any

    def __init__(self) -> None:
        super().__init__()
        self.warnings = WarningLog()

    def keep(self, fed: Any, t: int, memory: dict[str, Any], last: bool) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save(fed, t, memory, last)

    def say(self, text: str) -> None:
        """Show a line on the console, which rank 0 has."""

    def close_failed(self, reason: str) -> str:
        """Close a run that fails. Returns how to go on, if rank 0 can."""
        return ""

    def release(self) -> None:
        """Drop model and data after the run: the thread that watches the launcher keeps this object as long as the
        process lives."""
        vars(self).clear()


class Recorder(RankRecorder):
    """Writes the results of a run at rank 0: to its directory, the console and loggers.

    It is made before the ranks are connected, so that a run that fails at any time can be closed, and opened with the
    run directory when that is known.
    """

    is_described = False  # whether the directory says which run it holds

    def __init__(self, stop: StopRequest) -> None:
        super().__init__()
        self.stop = stop

    def open(self, directory: RunDirectory, experiment: Experiment, loggers: Hearing) -> None:
        """Write to this directory, and tell these loggers, from now on."""
        settings, task, data = experiment.settings, experiment.task, experiment.data
        self.directory, self.experiment, self.loggers = directory, experiment, loggers
        protocols = sorted(settings.evaluate.protocol, key="global".__ne__)
        starts = ["" if each == "global" else f"{each}_" for each in protocols]
        self.metrics = [f"{start}{name}" for start in starts for name in ("loss", *task.names)]  # what rounds may have
        self.falling = tuple(getattr(task, "falling", ()))
        self.model_facts = {"input": to_text(data.input_shape, data.x_dtype), "classes": str(data.classes)}
        self.model_facts |= personal_facts(settings.method.name, experiment.messages)
        self.last_clients: list[dict[str, Any]] = []

    def describe(
        self, identity: Mapping[str, str], environment: Mapping[str, Any], own_code: Mapping[Path, bytes]
    ) -> None:
        """Write which run the directory holds: settings, environment, the user's own code, who holds which samples.

        From now on a run that fails leaves a summary.
        """
        self.is_described = True
        directory, experiment = self.directory, self.experiment
        settings, data, cut = experiment.settings, experiment.data, experiment.settings.data.partition
        directory.write_identity(identity)
        directory.write_config(whole.written(settings).resolved())
        if experiment.initial is not None:
            directory.write_initial(experiment.initial.content)
        if (prepared := preprocessing.of_run(settings, data)) is not None:
            directory.write_preprocessing(prepared.content())
        copies = directory.write_plugins(plugins.copies(own_code), list(own_code))
        directory.write_environment({**environment, "plugins": copies})
        held = data.validation.rows if isinstance(data.validation, Shards) else None
        assert held is None or isinstance(held, Partition)
        scheme, counts = cut.scheme if cut else "silos", data.label_counts if data.counts_shared else None
        directory.write_partition(scheme, settings.seed, data.train_sizes, counts, data.parts, held)

    def show(self, lines: Sequence[str], live: bool) -> None:
        """Show these lines and what follows on the console. live: with a live line, if it is a terminal."""
        settings = self.experiment.settings
        shown = self.metrics[: 1 + len(self.experiment.task.names)]
        self.headline = shown[1]
        shown += [f"validation_{settings.evaluate.best.metric}"] if settings.evaluate.best.metric else []
        self.console = Console(settings.rounds, shown, self.directory.log, live=live)
        for line in lines:
            self.console.say(line)
        self.warnings.write_to(self.directory.log)

    def begin(self, fed: Federation, first: int, resumed: bool) -> None:
        """The rounds begin. first: the first round of which loggers hear; resumed: whether there were some."""
        assert fed.server is not None
        self.server = fed.server
        self.loggers.begin(self.experiment.settings, self.directory, first, resumed)

    def say(self, text: str) -> None:
        self.console.say(text)

    # ---- what the engine calls ----
    def round(self, row: dict[str, Any]) -> None:
        self.directory.add_metrics(row)
        self.console.round(row, self.server.view.noted)
        self.stop.done(row["round"] + 1)
        self.loggers.round(row)

    def clients(self, rows: list[dict[str, Any]]) -> None:
        self.last_clients = rows or self.last_clients
        self.directory.add_clients(rows)

    def best(self, best: Best) -> None:
        about = {**self.model_facts, "figure": best.choice.figure, "round": best.round, "value": best.value}
        self.directory.write_model(self.experiment.model.state_dict(best.w, best.b), about, BEST)

    def loss(self, row: dict[str, Any]) -> None:
        self.directory.add_loss(row)
        self.console.say(report_text.loss(row, self.experiment.data.site_names))

    def updates(self, row: dict[str, Any]) -> None:
        self.directory.add_updates(row)

    def placement(self, row: dict[str, Any]) -> None:
        self.directory.add_placement(row)

    def analysis(self, row: dict[str, Any]) -> None:
        self.directory.add_analysis(row)

    # ---- the end ----
    def close(self, fed: Federation, reason: str) -> dict[str, Any]:
        """Write the final model and the summary, and say farewell. Returns the summary."""
        assert fed.server is not None
        self.console.close()
        model, best = self.experiment.model, fed.server.best
        self.directory.write_model(model.state_dict(fed.server.w, fed.server.b), self.model_facts)
        ended = f"signal {self.stop.signal}" if reason == "stopped" and self.stop.signal else reason
        ended = f"diverged: {fed.reporter.watch.said}" if reason == "apart" else ended
        ended = f"enough: {best.why}" if reason == "enough" and best else ended
        result = self._write_summary(ended)
        self.loggers.end(result)
        report_text.farewell(self.console, self.directory, result, self.headline, self.last_clients, self.experiment)
        if reason == "stopped" and self.checkpoints is not None and not self.stop.enough:
            self.console.say(f"go on with: fedmpi resume {self.directory.shown}")
        return result

    def close_failed(self, reason: str) -> str:
        """Leave whole lines, and a summary of the rounds that are done, of a run that fails. Returns how to go on, if
        the run can."""
        if self.is_described and self.directory.end():
            self._write_summary(f"failed: {reason}")
            if any(self.directory.path.glob("checkpoints/[0-9]*")):
                return f"go on with: fedmpi resume {self.directory.shown}"
        return ""

    def _write_summary(self, ended: str) -> dict[str, Any]:
        rows, directory = self.directory.metrics(), self.directory
        names = judged_first(report_text.figures_in(rows), self.metrics)
        result = summary(rows, names, ended, directory.losses(), directory.best_model(), self.falling)
        directory.write_summary(result)
        return result


class WarningLog:
    """Copies the warnings of a run into its log.txt, for readers who no longer have the console."""

    def __init__(self) -> None:
        self._before: list[str] = []  # warnings before there was a log
        self._log: Callable[[str], object] = self._before.append

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Copy each warning, which is shown as ever; at the end the filters are as they were."""
        show = warnings.showwarning

        def both(message: Warning | str, *where: Any, **more: Any) -> None:
            show(message, *where, **more)
            with suppress(UserError, ValueError):  # a full disk, of which the round's own line will tell
                self._log(f"warning: {message}")

        with warnings.catch_warnings():
            warnings.showwarning = both
            yield

    def write_to(self, log: Callable[[str], object]) -> None:
        """Log the warnings so far, and from now on each one as it comes."""
        for line in self._before:
            log(line)
        self._log = log
