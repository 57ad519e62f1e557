"""The commands about data sets: which there are, what is missing, fetching."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fedmpi.cli.shared import table
from fedmpi.common.errors import UserError

data = typer.Typer(help="List, check and fetch data sets.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A data set of `fedmpi data list`.")]
Root = Annotated[
    Path | None, typer.Option(metavar="DIR", help="data.root; default: $FEDMPI_DATA, else `data` in this directory.")
]


@data.callback(invoke_without_command=True)
def about(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@data.command("list", short_help="Show the data sets.")
def list_() -> None:
    """Show the data sets that fedmpi knows, how many samples each has and how it is come by."""
    from fedmpi.data.fetching.getting import SETS

    shown = {name: listing for name, listing in SETS.items() if not name.endswith(("_64", "_128", "_224"))}
    table([(name, f"{each.what}; {'fetch' if each.downloads else 'by hand'}") for name, each in shown.items()])
    typer.echo("MedMNIST's sets are there with 64, 128 and 224 pixels, too: pathmnist_64")


@data.command(short_help="Show what is missing of a data set.")
def check(name: Name, root: Root = None) -> None:
    """Show where the files of data set NAME go, and what is missing; exit code 1 if something is."""
    from fedmpi.data.fetching import getting

    listing, where = getting.find(name), _root(root)
    found = getting.check(name, where)
    table([(place, wrong or "ok") for place, wrong in found])
    typer.echo(
        f"samples: {listing.samples}\nhome: {listing.home}\nlicence: {listing.licence}\nreference: {listing.reference}"
    )
    typer.echo(f"config: data: {{{listing.config}, root: {where}}}")
    if any(wrong for _, wrong in found):
        typer.echo(f"to do: {listing.by_hand or f'fedmpi data fetch {name} --root {where}'}")
        raise typer.Exit(1)


@data.command(short_help="Fetch a data set.")
def fetch(name: Name, root: Root = None) -> None:
    """Fetch what is missing of data set NAME. What was broken off is gone on with; checksums are compared."""
    from fedmpi.data.fetching import getting
    from fedmpi.data.fetching.progress import progress

    where = _root(root)
    getting.find(name)
    with getting.one_at_a_time(where), progress() as shown:
        new = getting.fetch(name, where, shown)
    typer.echo(f"{name}: {'fetched to' if new else 'all there, in'} {where}")


def _root(given: Path | None) -> Path:
    root = given or Path(os.environ.get("FEDMPI_DATA") or "data")
    if root.exists() and not root.is_dir():
        raise UserError(f"--root: {root} is not a folder")
    return root.resolve()
