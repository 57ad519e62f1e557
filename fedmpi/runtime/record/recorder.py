"""Record a run: rank 0 writes the run directory, prints lines and calls loggers; every rank writes checkpoints."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from fedmpi.comm.failures.process_exit import print_message
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import encode_format
from fedmpi.common.jsonl import read_jsonl
from fedmpi.common.redaction import redact
from fedmpi.common.signals import StopRequest
from fedmpi.config.yaml_source import to_yaml
from fedmpi.engine.federation import Federation
from fedmpi.engine.federation_config import RunCallbacks
from fedmpi.engine.model_selection import BestModel
from fedmpi.engine.server import FederationServer
from fedmpi.runtime import code_trust
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.build_model import make_lora_config, make_prepared_module
from fedmpi.runtime.checkpoints import CheckpointWriter
from fedmpi.runtime.record import console_text
from fedmpi.runtime.record.adapter_files import write_adapter
from fedmpi.runtime.record.data_files import write_partition, write_preprocessing
from fedmpi.runtime.record.loggers import LoggerCollection
from fedmpi.runtime.record.metadata import resolve_settings
from fedmpi.runtime.record.run_dir import BEST, CHECKSUMS, INITIAL, RunDirectory, compute_checksums
from fedmpi.runtime.record.saved_model import describe_best_model, describe_personal_models
from fedmpi.runtime.record.summary import metric_names, summarize_run, traffic_of_client
from fedmpi.runtime.sample_privacy import describe_guarantee

CLIENTS_TAIL = 1 << 16  # bytes read from the end of clients.jsonl, enough for the largest number of clients shown


class CheckpointRecorder(RunCallbacks):
    """Writes a rank's checkpoints and shows its warnings; this is all that ranks other than 0 record."""

    checkpoints: CheckpointWriter | None = None  # None: the run has no checkpoints

    def __init__(self) -> None:
        super().__init__()
        self.early_lines: list[str] = []  # lines for the log before the log file exists
        self.log: Callable[[str], object] = self.early_lines.append

    @contextmanager
    def collect_warnings(self) -> Iterator[None]:
        """Show warnings as usual within this context, and on rank 0 also write them to log.txt."""
        show = warnings.showwarning

        def show_and_log(message: Warning | str, *where: Any, **more: Any) -> None:
            show(message, *where, **more)
            with suppress(UserError, ValueError):  # a full disk is reported when the round's results are written
                self.log(f"warning: {message}")

        with warnings.catch_warnings():
            warnings.showwarning = show_and_log
            yield

    def save_state(self, fed: Any, t: int, memory: dict[str, Any], last: bool) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save(fed, t, memory, last)

    def print_line(self, text: str) -> None:
        """Do nothing; `Recorder`, which rank 0 uses, prints the text on the console."""

    def close_failed(self, reason: str) -> str:
        """Return ""; on rank 0, `Recorder` closes a failed run and returns a line on how to resume it."""
        return ""


class Recorder(CheckpointRecorder):
    """The recorder of rank 0, which passes results of a run to the run directory, the console, loggers and callbacks.

    The recorder is created before the ranks connect, so that a run that fails at any time can be closed. `open` is
    called later, when the run directory is known.
    """

    is_description_written = False  # whether `write_description` has written the settings of the run to the directory

    def open(
        self,
        directory: RunDirectory,
        experiment: Experiment,
        stop: StopRequest,
        loggers: LoggerCollection | None,
        lines: Sequence[str],
    ) -> None:
        """Start recording: set the run directory and the loggers, print `lines`, and copy earlier output to log.txt.

        Args:
            stop: The stop request, which is set by a signal or by a limit on the number of rounds.
            loggers: Loggers and callbacks; None if the config names none.
            lines: Lines that describe the run.
        """
        settings, task = experiment.settings, experiment.task
        self.directory, self.experiment, self.stop, self.loggers = directory, experiment, stop, loggers
        protocols = sorted(settings.evaluate.protocol, key="global".__ne__)
        starts = ["" if each == "global" else f"{each}_" for each in protocols]
        self.metrics = [f"{start}{name}" for start in starts for name in ("loss", *task.names)]  # of evaluated rounds
        best = settings.evaluate.best.metric
        self.shown_metrics = [*self.metrics[: 1 + len(task.names)], *([f"validation_{best}"] if best else [])]
        self.model_facts = {
            "input": encode_format(experiment.data.input_shape, experiment.data.x_dtype),
            "classes": str(experiment.data.classes),
            **describe_personal_models(settings.method.name, experiment.messages),
        }
        self.rounds_shown, self.wall_s = 0, 0.0  # rounds of this job, and their total duration in seconds
        self.log = partial(directory.append, "log.txt")
        for line in lines:
            self.print_line(line)
        for line in self.early_lines:
            self.log(line)

    def write_description(
        self,
        identity: Mapping[str, str],
        environment: Mapping[str, Any],
        own_code: Sequence[code_trust.PluginFile],
    ) -> None:
        """Write the files that describe the run: settings, environment, plug-in code, partition and preprocessing.

        A summary is also written for a run that fails after this call.

        Args:
            identity: Settings and digests of code and data, for comparison when the run is resumed (identity.json).
            environment: The content of environment.json, without plug-ins.
            own_code: The plug-in files of the run.
        """
        self.is_description_written = True
        directory, experiment, settings = self.directory, self.experiment, self.experiment.settings
        directory.write_json("identity.json", identity)
        directory.write("config.yaml", to_yaml(redact(resolve_settings(settings).model_dump(mode="json"))).encode())
        if experiment.initial is not None:
            directory.write(INITIAL, experiment.initial.content)
        write_preprocessing(directory, resolve_settings(settings), experiment.data)
        copies = code_trust.copy_plugins(directory, own_code) if own_code else []
        directory.write_json("environment.json", {**environment, "plugins": copies})
        cut = settings.data.partition
        write_partition(directory, cut.scheme if cut else "silos", settings.seed, experiment.data)

    def begin_training(self, fed: Federation, first: int, resumed: bool) -> None:
        """Prepare for training, and call the method `begin` of all loggers.

        Args:
            first: The first round that loggers will receive.
            resumed: Whether the run is resumed.
        """
        assert fed.server is not None
        self.server = fed.server
        if self.loggers is not None:
            self.loggers.begin(self.experiment.settings, self.directory, first, resumed)

    def print_line(self, text: str) -> None:
        """Print a line on the console, and append it to log.txt."""
        self.log(text)
        if sys.stdout is not None:  # None if it was closed when Python started
            print_message(text, sys.stdout)

    # ---- callbacks of the engine ----
    def record_round(self, row: dict[str, Any]) -> None:
        self.directory.append("metrics.jsonl", row)
        self.rounds_shown, self.wall_s = self.rounds_shown + 1, self.wall_s + row["wall_s"]
        names = [*self.shown_metrics, *self.server.view.logged]
        self.print_line(
            console_text.format_round(row, self.experiment.settings.rounds, names, self.wall_s / self.rounds_shown)
        )
        self.stop.rounds_done = 0 < self.stop.max_rounds <= row["round"] + 1
        if self.loggers is not None:
            self.loggers.round(row)

    def append_rows(self, file: str, *rows: dict[str, Any]) -> None:
        if rows:
            self.directory.append(file, *rows)

    def save_best_model(self, best: BestModel) -> None:
        about = {**self.model_facts, "metric": best.criterion.metric, "round": best.round, "value": best.value}
        self.directory.write_model(self.experiment.saved_tensors(best.w, best.b), about, BEST)

    def record_lost_ranks(self, row: dict[str, Any]) -> None:
        self.directory.append("faults.jsonl", row)
        self.print_line(console_text.format_rank_failure(row, self.experiment.data.site_names))

    # ---- the end ----
    def close(self, fed: Federation, reason: str) -> dict[str, Any]:
        """Write the final model and the summary, print the results, and return the summary.

        Args:
            reason: The reason why training ended, as returned by `Federation.run`.
        """
        assert fed.server is not None
        self.directory.write_model(self.experiment.saved_tensors(fed.server.w, fed.server.b), self.model_facts)
        self._write_adapter(fed.server)
        best, ended = fed.server.best, reason
        if reason == "stopped" and self.stop.signal:
            ended = f"signal {self.stop.signal}"
        elif reason == "diverged":
            ended = f"diverged: {fed.reporter.divergence.message}"
        elif reason == "budget_spent":
            budget = fed.control.privacy_budget
            assert budget is not None
            ended = f"budget_spent: a further round would exceed epsilon {budget.max_epsilon:g}"
        elif reason == "early_stopped" and best:
            ended = f"early_stopped: {best.stop_reason}"
        result = self._write_summary(ended)
        if self.loggers is not None:
            self.loggers.end(result)
        evaluated = read_jsonl(self.directory.path / "clients.jsonl", need_round=True, tail_bytes=CLIENTS_TAIL).rows
        clients = [row for row in evaluated if row["round"] == evaluated[-1]["round"]]
        rows = self.directory.read_rows("metrics.jsonl")
        for line in console_text.format_results(rows, result, self.metrics[1], clients, self.experiment):
            self.print_line(line)
        self.print_line(f"run directory: {self.directory.display_path}")
        if reason == "stopped" and self.checkpoints is not None and not self.stop.rounds_done:
            self.print_line(f"to resume: fedmpi resume {self.directory.display_path}")
        return result

    def _write_adapter(self, server: FederationServer) -> None:
        """Write the adapters of the final model for PEFT (model.lora), into the folder `adapter`."""
        experiment, settings = self.experiment, self.experiment.settings
        config = make_lora_config(settings)
        if config is None:
            return
        initial = None
        if experiment.base_layers:  # the base before training is made again, so that no copy of it is kept in memory
            data = experiment.data
            sizes = data.input_shape, data.classes, data.x_dtype
            module = make_prepared_module(settings, experiment.method, *sizes, experiment.pretrained)
            initial = dict(module.named_parameters())
        tensors = experiment.model.state_dict(server.w, server.b)
        base = str(experiment.pretrained.path if experiment.pretrained else settings.model.name)
        write_adapter(self.directory.path / "adapter", experiment.model.module, tensors, config, initial, base)

    def close_failed(self, reason: str) -> str:
        """Close the files of a failed run, and write a summary of its completed rounds and the `reason` of the failure.

        Returns:
            A line on how to resume the run; "" if it has no checkpoint.
        """
        if self.is_description_written and self.directory.close_failed():
            self._write_summary(f"failed: {reason}")
            if any(self.directory.path.glob("checkpoints/[0-9]*")):
                return f"to resume: fedmpi resume {self.directory.display_path}"
        return ""

    def _write_summary(self, exit_reason: str) -> dict[str, Any]:
        directory, lower_is_better = self.directory, tuple(getattr(self.experiment.task, "lower_is_better", ()))
        rows, lost = directory.read_rows("metrics.jsonl"), directory.read_rows("faults.jsonl")
        best = describe_best_model(directory.path) if self.experiment.settings.evaluate.best.metric else None
        result = summarize_run(rows, metric_names(rows, self.metrics), exit_reason, lost, best, lower_is_better)
        experiment = self.experiment
        if experiment.private_steps is not None and experiment.private_steps.budget is not None:
            budget: Any = experiment.private_steps.budget
            result["privacy"] = describe_guarantee(budget.guarantee, budget.rounds, experiment.data.site_names)
        result |= traffic_of_client(experiment.messages, experiment.settings.rounds, experiment.itemsize)
        directory.write_json("summary.json", result)  # the last file before the checksums of all files are computed
        directory.write_json(CHECKSUMS, compute_checksums(directory.path))
        return result
