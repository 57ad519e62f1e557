"""The commands on existing runs: status, compare, report, verify, export, predict, reproduce."""

import json
import signal
import sys
import time
from pathlib import Path
from string import hexdigits
from typing import Annotated, Any

import typer

from fedmpi.cli.runs import app
from fedmpi.cli.shared import (
    Overrides,
    RunDir,
    Trust,
    apply_machine_settings,
    fast_import,
    fix_threads,
    require_single_process,
    table,
)
from fedmpi.cli.sweeps import train_child
from fedmpi.common.errors import UserError
from fedmpi.runtime.reading import compare as comparing
from fedmpi.runtime.reading import files
from fedmpi.runtime.reading import status as reading

EVERY_S, CLEAR = 2.0, "\x1b[H\x1b[2J\x1b[3J"
Where = Annotated[
    Path, typer.Argument(metavar="RUN_DIR | SWEEP_DIR | SWEEP", help="A run's directory; a sweep's, or its file.")
]


@app.command(short_help="Show how far a run or a sweep is.")
def status(
    where: Where,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until the run has ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object (with --watch: one a line).")] = False,
) -> None:
    """Show how far a run is, by its files alone: round, time left, ranks, the slowest client, figures, bytes, faults,
    checkpoint; of a sweep which runs are done, failed and why. Exit code: 0 running or finished, 75 stopped or killed
    and `fedmpi resume` would go on, 1 failed, or nothing to go on from; of a sweep the worst of its runs'."""
    facts, alive, code, lines = _look(where)
    if watch:
        signal.signal(signal.SIGINT, lambda *_: _leave())
    last = ""
    while True:
        text = json.dumps(facts, allow_nan=False, indent=None if watch else 2) if as_json else "\n".join(lines)
        if watch and sys.stdout.isatty() and not as_json:
            sys.stdout.write(CLEAR)
            typer.echo(text)
        elif text != last:
            typer.echo(text)
        last = text
        sys.stdout.flush()
        if not (watch and alive):
            raise typer.Exit(code)
        time.sleep(EVERY_S)
        facts, alive, code, lines = _look(where)


def _look(where: Path) -> tuple[dict[str, Any], bool, int, list[str]]:
    """(facts, whether something runs, exit code, what is shown)"""
    from fedmpi.sweeps import expand
    from fedmpi.sweeps import status as sweep_status

    if where.is_file() and where.suffix in (".yaml", ".yml"):
        if not expand.is_sweep(where):
            raise UserError(f"{where} asks for one run, which lies in a directory: fedmpi status runs/NAME")
        facts = sweep_status.status_of_file(expand.load(where))
    elif files.is_run(files.folder(where)) or not (sweep_status.listed_runs(where) or files.runs_in(where)):
        if not files.is_run(where) and not (where / "lock").exists() and any(where.iterdir()):
            raise files.no_run(where, f"{' or '.join(files.OF_A_RUN)}, and no directory that does")
        facts = reading.status(where)
        return facts, facts["state"] == reading.RUNNING, reading.code(facts), reading.lines(facts)
    else:
        facts = sweep_status.status_of_directory(where)
    return facts, facts["counts"][reading.RUNNING] > 0, sweep_status.code(facts), sweep_status.lines(facts)


def _leave() -> None:
    """End `fedmpi status --watch` on Ctrl-C with exit code 130."""
    raise typer.Exit(130)


One = Annotated[Path, typer.Argument(metavar="A", help="A run's directory, or that of a sweep.")]
Other = Annotated[Path, typer.Argument(metavar="B", help="Another one of the same kind.")]


@app.command(short_help="Show how two runs differ.")
def compare(
    a: One,
    b: Other,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show which settings, data, code, versions and machines of two runs differ, and from which round on their results
    do; of two sweeps run by run. Exit code: 0 the same results, 1 they differ, or one has more rounds."""
    many = [not files.is_run(files.folder(each)) and bool(files.runs_in(each)) for each in (a, b)]
    differences = comparing.compare_sweeps(a, b) if all(many) else comparing.compare(a, b)
    if as_json:
        typer.echo(json.dumps(differences, indent=2))
    else:
        for line in comparing.lines(differences):
            typer.echo(line)
    raise typer.Exit(0 if differences["same"] else 1)


Directories = Annotated[
    list[Path], typer.Argument(metavar="RUN_DIR... | SWEEP_DIR", help="Written by `fedmpi run` or `fedmpi sweep`.")
]


@app.command(short_help="Show runs as a page.")
def report(
    directories: Directories,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: report.html in the directory, of several here.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each figure, too: .svg, .png, and its numbers as .csv.")
    ] = None,
    sites: Annotated[
        bool, typer.Option("--sites", help="Instead: a page for each site and a model card, in RUN_DIR/sites.")
    ] = False,
    alone: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="With --sites: a run of method local; default: one beside RUN_DIR."),
    ] = None,
    about: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --sites: YAML, `Intended use: text` and the like.")
    ] = None,
) -> None:
    """Write all that is recorded of one run, of several, or of all in a sweep's directory as one file of HTML, which
    needs nothing else: learning, clients, updates, classes, partition, traffic, time, faults, settings, hashes."""
    fix_threads(1)
    require_single_process()
    given = {"--alone": alone, "--about": about} if not sites else {"--to": to, "--figures": figures}
    for option, value in given.items():
        if value is not None:
            raise UserError(
                f"{option} goes {'without' if sites else 'with'} --sites; {'leave it out' if sites else 'add that'}"
            )
    if not sites:
        from fedmpi.reports import report as pages

        return pages.analyse(directories, to, figures, typer.echo)
    if len(directories) > 1:
        raise UserError(f"--sites tells of one run, and there are {len(directories)}; name one of them")
    from fedmpi.reports import site_pages

    site_pages.analyse(directories[0], alone, about, typer.echo)


@app.command(short_help="Check that a run's results are its own.")
def verify(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of `fedmpi run`; or a sweep's directory.")],
    overrides: Overrides = None,
    rounds: Annotated[str, typer.Option(metavar="N", help="How many rounds are replayed, or `all`.")] = "3",
    tolerance: Annotated[
        float | None, typer.Option(help="Compare figures within this (1e-3), not bits: on other machines.")
    ] = None,
    seal: Annotated[str | None, typer.Option(metavar="HEX", help="The seal that was published with the run.")] = None,
    trust: Trust = False,
) -> None:
    """Check that nothing in RUN_DIR was altered since the run ended, that its files follow from each other, and train N
    random rounds once more to compare models and figures. Exit code 0: verified; 1: altered; 2: it cannot be told."""
    require_single_process("verify")
    if rounds != "all" and not (rounds.isdecimal() and 0 < int(rounds) < 10**9):
        raise UserError(f"--rounds: {rounds}; allowed: a whole number from 1 on, or all")
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise UserError(f"--tolerance: {tolerance}; allowed: a number from 0 on, such as 1e-3")
    if seal is not None and not (8 <= len(seal) <= 64 and set(seal) <= set(hexdigits)):
        raise UserError(f"--seal: {seal!r}; allowed: its first 8 or more digits, of 0 to 9 and a to f")
    from fedmpi.runtime.trust import run_settings

    first = next((path.parent for path in sorted(directory.glob("*/config.yaml"))), directory)
    try:
        apply_machine_settings(
            run_settings(directory if (directory / "config.yaml").is_file() else first, trust, overrides or ())
        )
    except UserError:  # which is told beside what else was found
        fix_threads(1)
    with fast_import():
        from fedmpi.runtime.finished import verify as checks

    options = checks.Options(None if rounds == "all" else int(rounds), trust, overrides or (), tolerance, seal)
    raise typer.Exit(checks.verify_all(directory, typer.echo, options))


@app.command(short_help="Write a run's model for use elsewhere.")
def export(
    directory: RunDir,
    overrides: Overrides = None,
    to: Annotated[str, typer.Option(metavar="FORMAT", help="safetensors (weights) or onnx.")] = "safetensors",
    best: Annotated[bool, typer.Option("--best", help="The best model by evaluate.best, not the final one.")] = False,
    client: Annotated[
        str | None, typer.Option(metavar="K", help="The model that this client uses: its number, or its site's name.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: RUN_DIR/export/model and the format's ending.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Write the global model of RUN_DIR, or that of a client, as a file that needs no fedmpi, and compare its outputs
    with the model's on test samples; where they differ there is an error, and no file. onnx needs
    `pip install 'fedmpi[export]'`."""
    require_single_process("export")
    from fedmpi.runtime.trust import run_settings

    fix_threads(run_settings(directory, trust, overrides or ()).compute.threads)
    with fast_import():
        from fedmpi.runtime.finished import export as files

    files.export(directory, to, typer.echo, best=best, client=client, out=out, trusted=trust, overrides=overrides or ())


@app.command(short_help="Predict new rows with a run's model.")
def predict(
    directory: RunDir,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Rows of the kind that the run was trained on; a folder of pictures.")
    ],
    overrides: Overrides = None,
    to: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Default: RUN_DIR/predictions/ and the file's name as .csv.")
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="K", help="With the model of this client: its number, or its site's name.")
    ] = None,
    site: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose rows they are, where sites prepare theirs by their own.")
    ] = None,
    ids: Annotated[
        list[str] | None, typer.Option("--id", metavar="COLUMN", help="A column of FILE to copy; more than once.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The best model by evaluate.best, not the final one.")] = False,
    trust: Trust = False,
) -> None:
    """Prepare the rows of FILE as those of the training were, and write what the model of RUN_DIR predicts: class and
    probabilities, number, risk, labels, next symbol; masks as .npz. FILE is a table, a folder, a file or a CSV of
    pictures, texts, or an .npz, as the run's data source reads it; its label column may be missing."""
    require_single_process("predict")
    from fedmpi.runtime.trust import run_settings

    fix_threads(run_settings(directory, trust, overrides or ()).compute.threads)
    with fast_import():
        from fedmpi.runtime.finished import predict as rows

    which = {"client": client, "site": site}
    rows.predict(
        directory, file, typer.echo, out=to, best=best, **which, ids=ids or (), trusted=trust, overrides=overrides or ()
    )


@app.command(short_help="Make a published table anew.")
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="[TABLE]", help="Of configs/papers or benchmarks.")] = None,
    overrides: Overrides = None,
    jobs: Annotated[str, typer.Option(help="Runs at a time, as in `fedmpi sweep`.")] = "auto",
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: reproduction/TABLE.")] = None,
) -> None:
    """Fetch or find the data of TABLE, train what is missing of its runs, show the table beside what is published, and
    write it with a verdict for each cell. Without TABLE: show which there are, and which data they need. Exit code 1 if
    a cell is missing or lies outside."""
    require_single_process("reproduce")
    fix_threads(1)
    from fedmpi.sweeps import expand, reproduce

    if name is None or "=" in name:
        return table(list(reproduce.overview([*([name] if name else []), *(overrides or ())])))
    path = reproduce.find_table(name)
    asked = expand.load(path, overrides or ())
    apply_machine_settings(asked.settings(asked.first()[0]))
    with fast_import():
        import fedmpi.runtime.run  # noqa: F401  once for all runs
        from fedmpi.sweeps import run as runs

    reproduce.fetch_data(asked, typer.echo)
    if code := runs.run(asked, jobs, train_child, typer.echo):
        raise typer.Exit(code)
    raise typer.Exit(reproduce.write(asked, to or Path("reproduction") / path.stem, typer.echo))
