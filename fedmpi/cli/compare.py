"""How two runs, or two sweeps, differ."""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from fedmpi.cli.runs import app
from fedmpi.runtime.reading import compare as comparing
from fedmpi.runtime.reading import files

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
    found = comparing.sweeps(a, b) if all(many) else comparing.compare(a, b)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in comparing.lines(found, shutil.get_terminal_size().columns):
            typer.echo(line)
    raise typer.Exit(0 if found["same"] else 1)
