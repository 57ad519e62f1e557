"""Commands that list components (list), explain config keys (show), and manage public data sets (data)."""

import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from fedmpi.cli.arguments import make_command_group, print_table
from fedmpi.cli.runs import app
from fedmpi.common.errors import UserError
from fedmpi.common.text import suggest_name
from fedmpi.config.reference import ConfigKey, list_keys
from fedmpi.runtime.introspection import (
    KIND_MODULES,
    describe_components_named,
    list_library_summaries,
    list_summaries,
    read_registry,
)


@app.command("list", short_help="List methods, models, data sets and other components.")
def list_components(
    name: Annotated[
        str | None,
        Argument(metavar="[KIND | NAME]", help=f"One of {', '.join(KIND_MODULES)}; or what one of them shows."),
    ] = None,
) -> None:
    """List the components that a config may name, or describe one of them with its options.

    Components are methods, models, datasets, partitions, augmentations, tasks, rules and others.
    """
    if name is None or name in KIND_MODULES:
        for kind in [name] if name else KIND_MODULES:
            typer.echo(f"{kind}:")
            summaries = list_summaries(kind) | list_library_summaries(kind)
            print_table([(f"  {name}", summary) for name, summary in summaries.items()])
        return
    descriptions = describe_components_named(name)
    if not descriptions:
        names = [*KIND_MODULES, *(each for kind in KIND_MODULES for each in read_registry(kind))]
        raise UserError(f"list: unknown kind or name '{name}'; {suggest_name(name, names)}")
    for each in descriptions:
        typer.echo(f"{each.kind}: {each.name}\n\n{each.text}\n")
        typer.echo("options:" if each.options else "no options")
        print_table([(f"  {one.name}", f"{one.type} (default {one.default}): {one.meaning}") for one in each.options])


@app.command("show", short_help="Explain a config key.")
def show_key(
    key: Annotated[str, Argument(metavar="KEY", help="A key, such as train.schedule, or a section, such as train.")],
) -> None:
    """Show the type, bounds, default and meaning of a config key, or the keys of a section.

    docs/configuration.md lists all keys.
    """
    known = {each.name: each for each in list_keys()}
    section = key.rpartition(".")[0]
    if key not in known:
        same_section = [name for name in known if name.rpartition(".")[0] == section]
        guess = suggest_name(key, same_section or known)
        raise UserError(f"show: unknown key '{key}'; {guess}{_options_hint(known, section)}")
    key_info = known[key]
    typer.echo(f"{key}: {key_info.meaning}")
    if key_info.section is None:
        return print_table([("  type", key_info.kind), ("  default", key_info.default)])
    children = [each for name, each in known.items() if name.rpartition(".")[0] == key]
    print_table([(f"  {each.name}", f"{_type_and_default(each)}{each.meaning}") for each in children])
    typer.echo(_options_hint(known, key).removeprefix("; "), nl=key_info.is_open)


def _options_hint(known: dict[str, ConfigKey], section: str) -> str:
    """Return a hint if a section also contains the options of a component, such as a method; otherwise ""."""
    is_open = section in known and known[section].is_open
    return (
        f"; for the options of the component in {section}, use `fedmpi list` and `fedmpi list NAME`" if is_open else ""
    )


def _type_and_default(key: ConfigKey) -> str:
    """Return "TYPE (default DEFAULT): " for a key, "required: " for one without default, and "" for a section."""
    if key.section is not None:
        return ""
    return "required: " if key.default == "required" else f"{key.kind} (default {key.default}): "


data = make_command_group("List, check and download public data sets.")
SetName = Annotated[str, Argument(metavar="NAME", help="A data set that `fedmpi data list` shows.")]
RootOption = Annotated[Path | None, Option(metavar="DIR", help="The data folder; default: $FEDMPI_DATA, or data.")]


@data.command("list", short_help="List the public data sets.")
def list_public_sets() -> None:
    """List the public data sets, with their sizes and whether they can be downloaded automatically."""
    from fedmpi.data.download.catalogue import CATALOGUE

    listed = {name: listing for name, listing in CATALOGUE.items() if not name.endswith(("_64", "_128", "_224"))}
    print_table(
        [
            (name, f"{each.description}; {'automatic download' if each.downloads else 'manual download'}")
            for name, each in listed.items()
        ]
    )
    typer.echo("MedMNIST is also available with 64, 128 and 224 pixels, for example pathmnist_64")


@data.command("check", short_help="Show missing files of a data set.")
def show_missing_files(name: SetName, root: RootOption = None) -> None:
    """Show where the files of a data set belong and which are missing; the exit code is 1 if any is missing."""
    from fedmpi.data.download import fetch

    listing, data_root = fetch.find_entry(name), _data_root(root)
    files = fetch.check_files(name, data_root)
    print_table([(path, problem or "ok") for path, problem in files])
    typer.echo(f"home: {listing.home}\nlicence: {listing.licence}")
    typer.echo(f"config: data: {{{listing.config}, root: {data_root}}}")
    if any(problem for _, problem in files):
        typer.echo(f"to do: {listing.manual_steps or f'fedmpi data fetch {name} --root {data_root}'}")
        raise typer.Exit(1)


@data.command("fetch", short_help="Download a data set.")
def download_missing_files(name: SetName, root: RootOption = None) -> None:
    """Download the missing files of a data set, and verify their checksums."""
    from fedmpi.data.download import fetch

    data_root = _data_root(root)
    fetch.find_entry(name)
    with fetch.download_lock(data_root):
        new = fetch.fetch_dataset(name, data_root)
    typer.echo(f"{name}: {'downloaded to' if new else 'complete in'} {data_root}")


def _data_root(directory: Path | None) -> Path:
    """Return the absolute path of the data folder; raise UserError if it is not a folder."""
    root = directory or Path(os.environ.get("FEDMPI_DATA") or "data")
    if root.exists() and not root.is_dir():
        raise UserError(f"--root: {root} is a file; choose a folder")
    return root.resolve()
