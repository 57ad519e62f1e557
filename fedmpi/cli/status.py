"""How far runs are, by what their directories hold."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fedmpi.cli.runs import app
from fedmpi.common.errors import UserError
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
    facts, alive, code, said = _look(where)
    if watch:
        signal.signal(signal.SIGINT, lambda *_: _leave())
    last = ""
    while True:
        text = json.dumps(facts, allow_nan=False, indent=None if watch else 2) if as_json else "\n".join(said)
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
        facts, alive, code, said = _look(where)


def _look(where: Path) -> tuple[dict[str, Any], bool, int, list[str]]:
    """(facts, whether something runs, exit code, what is shown)"""
    from fedmpi.sweeps import expand
    from fedmpi.sweeps import status as sweep_status

    if where.is_file() and where.suffix in (".yaml", ".yml"):
        if not expand.is_one(where):
            raise UserError(f"{where} asks for one run, which lies in a directory: fedmpi status runs/NAME")
        facts = sweep_status.of_file(expand.load(where))
    elif files.is_run(files.folder(where)) or not (sweep_status.recorded(where) or files.runs_in(where)):
        if not files.is_run(where) and not (where / "lock").exists() and any(where.iterdir()):
            raise files.no_run(where, f"{' or '.join(files.OF_A_RUN)}, and no directory that does")
        facts = reading.status(where)
        return facts, facts["state"] == reading.RUNNING, reading.code(facts), reading.lines(facts)
    else:
        facts = sweep_status.of_folder(where)
    return facts, facts["counts"][reading.RUNNING] > 0, sweep_status.code(facts), sweep_status.lines(facts)


def _leave() -> None:
    """Ctrl-C ends the watching."""
    raise typer.Exit(130)
