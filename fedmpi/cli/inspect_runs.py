"""Commands for existing runs (status, compare, report, verify, export, predict), and the command `reproduce`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from fedmpi.cli.arguments import (
    AsJson,
    Best,
    Client,
    Jobs,
    Overrides,
    RunDir,
    Trust,
    check_resources_and_set_threads,
    load_run_settings,
    print_table,
    require_single_process,
    set_threads,
)
from fedmpi.cli.runs import app
from fedmpi.cli.sweeps import train_in_child_process
from fedmpi.common.errors import UserError
from fedmpi.runtime.inspection import compare as comparing


@app.command(short_help="Show the progress of a run or a sweep.")
def status(
    where: Annotated[Path, Argument(metavar="RUN_DIR | SWEEP_DIR | SWEEP")],
    as_json: AsJson = False,
) -> None:
    """Show the progress of a run: round, remaining time, ranks, metrics, traffic, faults and checkpoint.

    For a sweep, show which runs are finished, and which have failed and why. The exit code is 0 if the run is running
    or finished; 75 if it was stopped or killed and can be resumed; 1 if it has failed or cannot be resumed. For a
    sweep, it is 1 if a run has failed or cannot be resumed; otherwise 75 if runs are unfinished and none is running;
    otherwise 0.
    """
    from fedmpi.sweeps.sweep_status import read_status

    facts, lines, code = read_status(where)
    typer.echo(json.dumps(facts, allow_nan=False, indent=2) if as_json else "\n".join(lines))
    raise typer.Exit(code)


@app.command(short_help="Compare two runs.")
def compare(
    a: Annotated[Path, Argument(metavar="A", help="The directory of a run.")],
    b: Annotated[Path, Argument(metavar="B", help="The directory of another run.")],
    as_json: AsJson = False,
) -> None:
    """Show how two runs differ in settings, data, code, versions, machines and results.

    For results, the first round in which they differ is shown. The exit code is 0 if the results are equal; 1 if they
    differ or one run has more rounds than the other.
    """
    facts = comparing.compare_runs(a, b)
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(comparing.format_comparison(facts)))
    raise typer.Exit(0 if facts["same"] else 1)


@app.command(short_help="Write an HTML report of runs.")
def report(
    directories: Annotated[list[Path], Argument(metavar="RUN_DIR... | SWEEP_DIR", help="The runs to show.")],
    to: Annotated[Path | None, Option(metavar="FILE", help="Default: report.html in the directory.")] = None,
    figures: Annotated[
        Path | None, Option(metavar="DIR", help="Also write each figure here as .svg, .png and .csv.")
    ] = None,
    sites: Annotated[bool, Option("--sites", help="Write a page for each site and a model card.")] = False,
    local_baseline: Annotated[
        Path | None, Option(metavar="RUN_DIR", help="With --sites: a run of method local to compare with.")
    ] = None,
    statements: Annotated[
        Path | None, Option(metavar="FILE", help="With --sites: YAML file of statements, `Intended use: text`.")
    ] = None,
) -> None:
    """Write a report of one run, of several runs, or of all runs of a sweep as one self-contained HTML file.

    The report shows learning curves, clients, updates, classes, partition, traffic, time, faults and settings.
    """
    set_threads(1)
    require_single_process()
    if not sites:
        if local_baseline or statements:
            raise UserError("--local-baseline and --statements need --sites")
        from fedmpi.reports import report as pages

        return pages.write_report(directories, to, figures, typer.echo)
    if to or figures or len(directories) > 1:
        raise UserError("--sites takes a single RUN_DIR, and cannot be combined with --to or --figures")
    from fedmpi.reports import site_pages

    site_pages.write_site_pages(directories[0], local_baseline, statements, typer.echo)


@app.command(short_help="Verify the results of a run.")
def verify(
    directory: Annotated[Path, Argument(metavar="RUN_DIR", help="The directory of a run or a sweep.")],
    overrides: Overrides = None,
    rounds: Annotated[str, Option(metavar="N", help="Number of rounds to replay, or `all`.")] = "3",
    tolerance: Annotated[float | None, Option(min=0.0, help="Compare metrics within this tolerance, not bits.")] = None,
    checksum: Annotated[str | None, Option(metavar="HEX", help="The published checksum, 8 digits or more.")] = None,
    trust: Trust = False,
) -> None:
    """Verify a run: check that its files are consistent and unaltered, and repeat N random rounds.

    The models and metrics of the repeated rounds are compared with those in RUN_DIR. The exit code is 0 if the run is
    verified, 1 if it was altered, and 2 if this cannot be decided.
    """
    if rounds != "all" and not (rounds.isdecimal() and int(rounds)):
        raise UserError(f"--rounds: {rounds} is not allowed; must be a positive integer, or all")
    if checksum is not None and len(checksum) < 8:
        raise UserError(f"--checksum: {checksum} is not allowed; must be at least the first 8 digits of a SHA-256")
    first_run = next((path.parent for path in sorted(directory.glob("*/config.yaml"))), directory)
    try:
        load_run_settings(directory if (directory / "config.yaml").is_file() else first_run, trust, overrides, "verify")
    except UserError:  # reported with the other findings
        require_single_process("verify")
        set_threads(1)
    from fedmpi.runtime.finished_runs import verify as checks

    options = checks.VerifyOptions(
        None if rounds == "all" else int(rounds), trust, overrides or (), tolerance, checksum
    )
    raise typer.Exit(checks.verify_all(directory, typer.echo, options))


@app.command(short_help="Export the model of a run.")
def export(
    directory: RunDir,
    overrides: Overrides = None,
    file_format: Annotated[
        str, Option("--format", metavar="FORMAT", help="safetensors (weights) or onnx.")
    ] = "safetensors",
    best: Best = False,
    client: Client = None,
    out: Annotated[Path | None, Option(metavar="FILE", help="Default: RUN_DIR/export/model.FORMAT.")] = None,
    trust: Trust = False,
) -> None:
    """Write the global model of RUN_DIR, or the model of one client, to a file that can be used without fedmpi.

    The outputs of an ONNX file are compared with those of the model on test samples; if they differ, the command fails
    and writes no file.
    """
    load_run_settings(directory, trust, overrides, "export")
    from fedmpi.runtime.finished_runs import export, models

    export.export_model(models.RunModel(directory, trust, overrides or (), best, client), file_format, typer.echo, out)


@app.command(short_help="Predict new rows with the model of a run.")
def predict(
    directory: RunDir,
    file: Annotated[Path, Argument(metavar="FILE", help="The rows: a file, or a folder of images or texts.")],
    overrides: Overrides = None,
    to: Annotated[Path | None, Option(metavar="OUT", help="Default: RUN_DIR/predictions/FILE.csv.")] = None,
    client: Client = None,
    site: Annotated[str | None, Option(metavar="NAME", help="The site of the rows.")] = None,
    ids: Annotated[list[str] | None, Option("--id", metavar="COLUMN", help="A column to copy; repeatable.")] = None,
    best: Best = False,
    trust: Trust = False,
) -> None:
    """Prepare the rows of FILE like the training data, and write the predictions of the model of RUN_DIR.

    Predictions are classes and probabilities, numbers, risks, labels or next symbols; masks are written as .npz. FILE
    has the format of the run's data source: a table, texts, an .npz file, an image, or a folder or CSV file of images.
    The label column may be missing.
    """
    load_run_settings(directory, trust, overrides, "predict")
    from fedmpi.runtime.finished_runs import models, predict

    which = models.RunModel(directory, trust, overrides or (), best, client)
    predict.predict_file(which, file, typer.echo, out=to, site=site, ids=ids or ())


@app.command(short_help="Reproduce a published table.")
def reproduce(
    name: Annotated[str | None, Argument(metavar="[TABLE]", help="A table in configs/papers or benchmarks.")] = None,
    overrides: Overrides = None,
    jobs: Jobs = "auto",
    to: Annotated[Path | None, Option(metavar="DIR", help="Default: reproduction/TABLE.")] = None,
) -> None:
    """Reproduce a published table: download missing data, train missing runs, and compare the results.

    The results are shown next to the published ones, and written with a verdict for each cell. Without TABLE, the
    tables and the data that they need are listed. The exit code is 1 if a cell is missing or differs from the published
    value by more than two published standard deviations.
    """
    require_single_process("reproduce")
    set_threads(1)
    from fedmpi.sweeps import expand, reproduce

    if name is None or "=" in name:
        return print_table(list(reproduce.describe_tables([*([name] if name else []), *(overrides or ())])))
    path = reproduce.find_table(name)
    sweep = expand.load_sweep(path, overrides or ())
    check_resources_and_set_threads(sweep.run_settings(sweep.first_stage_labels()[0]))
    import fedmpi.runtime.execute  # noqa: F401  imported here once, for all child processes
    from fedmpi.sweeps import run_sweep as runs

    reproduce.fetch_data(sweep, typer.echo)
    if code := runs.run_sweep(sweep, jobs, train_in_child_process, typer.echo):
        raise typer.Exit(code)
    raise typer.Exit(reproduce.write_comparison(sweep, to or Path("reproduction") / path.stem, typer.echo))
