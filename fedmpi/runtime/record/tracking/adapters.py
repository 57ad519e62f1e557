"""Trackers: what each package is told of a run. The step of a value is the number of rounds that are done."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmpi.config.field_types import flat

MOST = 100  # values at a time, which MLflow takes
OTHERS = re.compile(r"[^\w.\- ]")  # in names MLflow refuses the @ of accuracy@SITE, and some paths, which / makes


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl, those within others under dotted names."""
    found = flat(dict(row), "")
    return {k: v for k, v in found.items() if isinstance(v, (int, float)) and not isinstance(v, bool) and k != "round"}


class TensorBoard:
    """TensorBoard's event files, in RUN_DIR/tensorboard: `tensorboard --logdir runs` shows all runs below it.

    folder: where to write, in place of that.
    """

    def __init__(self, folder: str | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.kind, self.folder = SummaryWriter, folder

    def begin(self, run: dict[str, Any]) -> None:
        self.writer = self.kind(self.folder or f"{run['directory']}/tensorboard")
        if not run["going_on"]:
            settings = flat(run["settings"], "")
            self.writer.add_text("settings", "\n".join(f"    {key}: {value}" for key, value in settings.items()))

    def round(self, row: dict[str, Any]) -> None:
        for name, value in numbers(row).items():
            self.writer.add_scalar(name, value, row["round"] + 1)
        self.writer.flush()

    def end(self, summary: dict[str, Any]) -> None:
        self.writer.close()


class MLflow:
    """MLflow's store of files, in OUTPUT/mlruns: `mlflow ui --backend-store-uri OUTPUT/mlruns` shows it.

    uri: another store, or a server. experiment: under which name.
    """

    def __init__(self, uri: str | None = None, experiment: str = "fedmpi") -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without it newer ones ask for a data base
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.client_of, self.metric, self.param, self.uri, self.experiment = (
            MlflowClient,
            Metric,
            Param,
            uri,
            experiment,
        )

    def begin(self, run: dict[str, Any]) -> None:
        uri = self.uri or (Path(run["directory"]).parent / "mlruns").as_uri()
        self.client = self.client_of(tracking_uri=uri)
        known = self.client.get_experiment_by_name(self.experiment)
        within = known.experiment_id if known else self.client.create_experiment(self.experiment)
        found = self.client.search_runs([within], f"tags.`fedmpi.id` = '{run['id']}'")
        if found:
            self.run = found[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        tags = {"fedmpi.id": run["id"], "fedmpi.directory": run["directory"]}
        self.run = self.client.create_run(within, tags=tags, run_name=run["name"]).info.run_id
        params = [self.param(key, str(value)[:500]) for key, value in flat(run["settings"], "").items()]
        for at in range(0, len(params), MOST):
            self.client.log_batch(self.run, params=params[at : at + MOST])

    def round(self, row: dict[str, Any]) -> None:
        now = int(time.time() * 1000)
        found = {OTHERS.sub("_", name): value for name, value in numbers(row).items()}
        values = [self.metric(name, value, now, row["round"] + 1) for name, value in found.items()]
        for at in range(0, len(values), MOST):
            self.client.log_batch(self.run, metrics=values[at : at + MOST])

    def end(self, summary: dict[str, Any]) -> None:
        whole = summary["exit_reason"] == "finished" or summary["exit_reason"].startswith("enough")
        self.client.set_terminated(self.run, "FINISHED" if whole else "KILLED")


class WandB:
    """Weights & Biases, offline, in RUN_DIR/wandb: `wandb sync` uploads it later.

    project: under which name. mode: online, to upload at once.
    """

    def __init__(self, project: str = "fedmpi", mode: str = "offline") -> None:
        import wandb

        self.wandb, self.project, self.mode = wandb, project, mode

    def begin(self, run: dict[str, Any]) -> None:
        quiet = self.wandb.Settings(silent=True, console="off")
        given = {"id": run["id"], "resume": "allow", "name": run["name"], "dir": run["directory"], "settings": quiet}
        self.run = self.wandb.init(project=self.project, mode=self.mode, config=run["settings"], **given)

    def round(self, row: dict[str, Any]) -> None:
        self.run.log(numbers(row), step=row["round"] + 1)

    def end(self, summary: dict[str, Any]) -> None:
        self.run.finish()


class Trackio:
    """trackio, in its folder on this machine: `trackio show` shows it.

    project: under which name.
    """

    def __init__(self, project: str = "fedmpi") -> None:
        import trackio

        self.trackio, self.project = trackio, project

    def begin(self, run: dict[str, Any]) -> None:
        name = f"{run['name']}-{run['id'][:6]}"
        self.run = self.trackio.init(project=self.project, name=name, config=run["settings"], resume="allow")

    def round(self, row: dict[str, Any]) -> None:
        self.run.log(numbers(row), step=row["round"] + 1)

    def end(self, summary: dict[str, Any]) -> None:
        self.run.finish()
