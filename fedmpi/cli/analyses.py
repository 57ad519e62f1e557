"""The commands `fedmpi analyse ...`, which compute metrics and figures from runs or configs in one process."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from fedmpi import config as configs
from fedmpi.cli.arguments import (
    Config,
    Overrides,
    RunDir,
    To,
    Trust,
    apply_machine_settings,
    load_run_settings,
    make_command_group,
    require_single_process,
    set_threads,
)

analyse = make_command_group("Look behind the figures of runs, in one process; write numbers and pictures.")


@analyse.command(short_help="How much aggregated kernels vary.")
def variance(
    config: Config,
    overrides: Overrides = None,
    replicates: Annotated[int, Option(min=2, help="How many times each measured round is made.")] = 5,
    to: To = Path("analysis"),
) -> None:
    """Measure how much aggregated convolution kernels vary from one repetition of a round to the next.

    A model is trained by the settings in CONFIG. Every `evaluate.every` rounds the round is repeated `--replicates`
    times with other cohorts and batches, and the variance of the kernels is compared for two ways of averaging: whole
    kernels, or atoms and coefficients. Each repetition takes as long as one round.
    """
    settings = configs.load(config, overrides or ())
    apply_machine_settings(settings, "analyse")
    from fedmpi.analysis import filter_decomposition

    filter_decomposition.analyse_variance(settings, replicates, to, typer.echo)


@analyse.command(short_help="The models behind an aggregate.")
def virtual(run: RunDir, overrides: Overrides = None, to: To = Path("analysis"), trust: Trust = False) -> None:
    """Train one more round from the final model of RUN_DIR, and evaluate the models that combine one client's
    coefficients with another client's atoms, for all pairs of clients."""
    settings = load_run_settings(run, trust, overrides, "analyse")
    from fedmpi.analysis import filter_decomposition
    from fedmpi.runtime.code_trust import forbid_external_code

    with forbid_external_code(trust):
        filter_decomposition.analyse_virtual(run, settings, to, typer.echo)


@analyse.command(short_help="A metric against parameters transmitted.")
def communication(
    runs: Annotated[list[Path], Argument(metavar="RUN_DIR...", help="Ratios are to the first.")],
    metric: Annotated[str, Option(help="A metric in metrics.jsonl.")] = "accuracy",
    to: To = Path("analysis"),
) -> None:
    """Compare runs by a metric as a function of the number of parameters that their clients have sent and received."""
    set_threads(1)
    require_single_process()
    from fedmpi.reports import run_facts

    run_facts.compare_communication(runs, metric, to, typer.echo)


@analyse.command(short_help="What a local step costs beside FedAvg's.")
def flops(config: Config, overrides: Overrides = None, to: To = Path("analysis")) -> None:
    """Count the floating-point operations of one local step and of one client's round, for CONFIG's method and for
    FedAvg. The client with the most samples trains its first round with both methods."""
    settings = configs.load(config, overrides or ())
    apply_machine_settings(settings, "analyse")
    from fedmpi.analysis import flops

    flops.analyse_flops(settings, to, typer.echo)


@analyse.command(short_help="Which rank did what when.")
def timeline(
    run: RunDir,
    rounds: Annotated[int, Option(min=1, help="How many rounds are drawn, the last ones.")] = 10,
    to: To = Path("analysis"),
) -> None:
    """Show how much of the time each rank of the run in RUN_DIR computed, and what it waited for; plot the last
    rounds."""
    set_threads(1)
    require_single_process()
    from fedmpi.reports import timeline

    timeline.write_timeline(run, rounds, to, typer.echo)


@analyse.command(short_help="How sharp the minimum is.")
def curvature(
    run: RunDir,
    overrides: Overrides = None,
    samples: Annotated[int, Option(min=1, help="Training samples that the loss is over.")] = 2048,
    top: Annotated[int, Option(min=1, max=50, help="How many eigenvalues, the largest ones.")] = 5,
    grid: Annotated[int, Option(min=3, max=201, help="Points a side of the landscape.")] = 21,
    span: Annotated[float, Option(min=1e-6, help="The landscape reaches from -span to span.")] = 1.0,
    to: To = Path("analysis"),
    trust: Trust = False,
) -> None:
    """Compute the largest eigenvalues of the Hessian of the training loss at the final model of RUN_DIR, by Lanczos
    iteration on exact Hessian-vector products, and the loss along the first two eigenvectors."""
    settings = load_run_settings(run, trust, overrides, "analyse")
    from fedmpi.analysis import curvature
    from fedmpi.runtime.code_trust import forbid_external_code

    with forbid_external_code(trust):
        curvature.analyse_curvature(run, settings, curvature.CurvatureOptions(samples, top, grid, span), to, typer.echo)
