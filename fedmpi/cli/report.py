"""`fedmpi report`: what runs have recorded, as a page; and pages for the sites of a consortium."""

from pathlib import Path
from typing import Annotated

import typer

from fedmpi.cli.runs import app
from fedmpi.cli.shared import alone as in_one_process
from fedmpi.cli.shared import fix_threads
from fedmpi.common.errors import UserError

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
    in_one_process()
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
