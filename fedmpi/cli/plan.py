"""What a run would need, before it is started."""

import json
from typing import Annotated

import typer

from fedmpi import config as configs
from fedmpi.cli.runs import app
from fedmpi.cli.shared import Config, Overrides, alone, fit, importing
from fedmpi.common.errors import UserError


@app.command(short_help="Show what a run would need.")
def plan(
    config: Config,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="How many ranks, rank 0 among them.")] = 1,
    hosts: Annotated[int, typer.Option(min=1, help="How many hosts they are spread over.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the memory, bytes and seconds that CONFIG would need on so many ranks, and the sbatch line that fits. Only a
    few clients are trained, for a moment, to measure this machine."""
    from fedmpi.sweeps import expand

    if expand.is_one(config):
        raise UserError(f"{config} asks for many runs; plan one of them: a config without `over`")
    if hosts > ranks:
        raise UserError(f"--hosts: {hosts} hosts for {ranks} rank(s); at most one host a rank")
    settings = configs.load(config, overrides or ())
    alone("plan")
    fit(settings)
    with importing():
        from fedmpi.doctor.planning import plan as planning
        from fedmpi.doctor.planning import plan_text

    facts = planning.plan(settings, ranks, hosts)
    words = [str(config), *(overrides or ())]
    if as_json:
        typer.echo(json.dumps({**facts, "sbatch": plan_text.sbatch(facts, words)}, indent=2))
    else:
        for line in plan_text.lines(facts, words):
            typer.echo(line)
