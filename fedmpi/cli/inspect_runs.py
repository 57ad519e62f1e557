"""Commands on existing runs (status, compare, report, verify, export, predict), and reproduce."""

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
    apply_machine_settings,
    load_run_settings,
    print_table,
    require_single_process,
    set_threads,
)
from fedmpi.cli.runs import app
from fedmpi.cli.sweeps import train_in_child_process
from fedmpi.common.errors import UserError
from fedmpi.runtime.inspection import compare as comparing


@app.command(short_help="Show how far a run or a sweep is.")
def status(
    where: Annotated[Path, Argument(metavar="RUN_DIR | SWEEP_DIR | SWEEP")],
    as_json: AsJson = False,
) -> None:
    """Show the progress of a run, read from its files: round, time left, ranks, metrics, bytes, faults, checkpoint.
    For a sweep, show which runs are finished, and which have failed and why. The exit code is 0 if the run is running
    or finished; 75 if it was stopped or killed and can be resumed; 1 if it has failed or cannot be resumed. For a
    sweep it is the worst of the runs' exit codes."""
    from fedmpi.sweeps.sweep_status import read_status

    facts, lines, code = read_status(where)
    typer.echo(json.dumps(facts, allow_nan=False, indent=2) if as_json else "\n".join(lines))
    raise typer.Exit(code)


@app.command(short_help="Show how two runs differ.")
def compare(
    a: Annotated[Path, Argument(metavar="A", help="A run's directory.")],
    b: Annotated[Path, Argument(metavar="B", help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Show the differences between two runs in settings, data, code, versions and machines, and the first round in
    which their results differ. The exit code is 0 if the results are equal; 1 if they differ or one run has more
    rounds."""
    facts = comparing.compare_runs(a, b)
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(comparing.format_comparison(facts)))
    raise typer.Exit(0 if facts["same"] else 1)


@app.command(short_help="Show runs as a page.")
def report(
    directories: Annotated[list[Path], Argument(metavar="RUN_DIR... | SWEEP_DIR", help="What to show.")],
    to: Annotated[Path | None, Option(metavar="FILE", help="Default: report.html in the directory.")] = None,
    figures: Annotated[Path | None, Option(metavar="DIR", help="Write each figure: .svg, .png and .csv.")] = None,
    sites: Annotated[bool, Option("--sites", help="Write a page for each site and a model card.")] = False,
    local_baseline: Annotated[
        Path | None, Option(metavar="RUN_DIR", help="With --sites: a run of method local.")
    ] = None,
    statements: Annotated[Path | None, Option(metavar="FILE", help="With --sites: YAML, `Intended use: text`.")] = None,
) -> None:
    """Write a report of one run, of several runs, or of all runs in a sweep's directory as one self-contained HTML
    file: learning curves, clients, updates, classes, partition, traffic, time, faults and settings."""
    set_threads(1)
    require_single_process()
    if not sites:
        if local_baseline or statements:
            raise UserError("--local-baseline and --statements go with --sites")
        from fedmpi.reports import report as pages

        return pages.write_report(directories, to, figures, typer.echo)
    if to or figures or len(directories) > 1:
        raise UserError("--sites is for one RUN_DIR, without --to and --figures")
    from fedmpi.reports import site_pages

    site_pages.write_site_pages(directories[0], local_baseline, statements, typer.echo)


@app.command(short_help="Check that a run's results are its own.")
def verify(
    directory: Annotated[Path, Argument(metavar="RUN_DIR", help="Of `fedmpi run`; or a sweep's directory.")],
    overrides: Overrides = None,
    rounds: Annotated[str, Option(metavar="N", help="How many rounds are replayed, or `all`.")] = "3",
    tolerance: Annotated[float | None, Option(min=0.0, help="Compare metrics within this, not bits.")] = None,
    checksum: Annotated[str | None, Option(metavar="HEX", help="The published checksum, 8 digits or more.")] = None,
    trust: Trust = False,
) -> None:
    """Check that no file in RUN_DIR was altered after the run ended and that the files agree with each other; train N
    random rounds again, and compare models and metrics. The exit code is 0 if the run is verified, 1 if it was
    altered, and 2 if this cannot be decided."""
    if rounds != "all" and not (rounds.isdecimal() and int(rounds)):
        raise UserError(f"--rounds: {rounds}; allowed: a whole number from 1 on, or all")
    if checksum is not None and len(checksum) < 8:
        raise UserError(f"--checksum: {checksum!r}; needed: its first 8 or more digits")
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


@app.command(short_help="Write a run's model for use elsewhere.")
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
    """Write the global model of RUN_DIR, or the model of one client, to a file that can be used without fedmpi. The
    outputs of an ONNX file are compared with those of the model on test samples; if they differ, the command ends with
    an error and writes no file."""
    load_run_settings(directory, trust, overrides, "export")
    from fedmpi.runtime.finished_runs import export, models

    export.export_model(models.RunModel(directory, trust, overrides or (), best, client), file_format, typer.echo, out)


@app.command(short_help="Predict new rows with a run's model.")
def predict(
    directory: RunDir,
    file: Annotated[Path, Argument(metavar="FILE", help="Rows, or a folder of pictures.")],
    overrides: Overrides = None,
    to: Annotated[Path | None, Option(metavar="OUT", help="Default: RUN_DIR/predictions/FILE.csv.")] = None,
    client: Client = None,
    site: Annotated[str | None, Option(metavar="NAME", help="Whose rows they are.")] = None,
    ids: Annotated[list[str] | None, Option("--id", metavar="COLUMN", help="A column to copy; repeatable.")] = None,
    best: Best = False,
    trust: Trust = False,
) -> None:
    """Preprocess the rows of FILE like the training data, and write the predictions of the model of RUN_DIR: class and
    probabilities, number, risk, labels or next symbol; masks as .npz. FILE has the format that the run's data source
    reads: a table, a folder, an image file or a CSV of images, texts, or an .npz. The label column may be missing."""
    load_run_settings(directory, trust, overrides, "predict")
    from fedmpi.runtime.finished_runs import models, predict

    which = models.RunModel(directory, trust, overrides or (), best, client)
    predict.predict_file(which, file, typer.echo, out=to, site=site, ids=ids or ())


@app.command(short_help="Make a published table anew.")
def reproduce(
    name: Annotated[str | None, Argument(metavar="[TABLE]", help="Of configs/papers or benchmarks.")] = None,
    overrides: Overrides = None,
    jobs: Jobs = "auto",
    to: Annotated[Path | None, Option(metavar="DIR", help="Default: reproduction/TABLE.")] = None,
) -> None:
    """Reproduce a published table: fetch its data if they are missing, train the runs that are missing, show the
    results beside the published ones, and write them with a verdict for each cell. Without TABLE, list the tables and
    the data that they need. The exit code is 1 if a cell is missing or differs from the published value by more than
    two published standard deviations."""
    require_single_process("reproduce")
    set_threads(1)
    from fedmpi.sweeps import expand, reproduce

    if name is None or "=" in name:
        return print_table(list(reproduce.describe_tables([*([name] if name else []), *(overrides or ())])))
    path = reproduce.find_table(name)
    sweep = expand.load_sweep(path, overrides or ())
    apply_machine_settings(sweep.run_settings(sweep.first_stage_labels()[0]))
    import fedmpi.runtime.execute  # noqa: F401  imported here once, for all child processes
    from fedmpi.sweeps import run_sweep as runs

    reproduce.fetch_data(sweep, typer.echo)
    if code := runs.run_sweep(sweep, jobs, train_in_child_process, typer.echo):
        raise typer.Exit(code)
    raise typer.Exit(reproduce.write_comparison(sweep, to or Path("reproduction") / path.stem, typer.echo))
