"""The commands `fedmpi analyse ...`, which compute additional metrics and figures from runs or configs."""

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
    check_resources_and_set_threads,
    load_run_settings,
    make_command_group,
    require_single_process,
    set_threads,
)

analyse = make_command_group("Compute further metrics and figures of runs, in a single process.")


@analyse.command(short_help="Measure the variance of aggregated kernels.")
def variance(
    config: Config,
    overrides: Overrides = None,
    replicates: Annotated[int, Option(min=2, help="Number of repetitions of each measured round.")] = 5,
    to: To = Path("analysis"),
) -> None:
    """Measure how much aggregated convolution kernels vary from one repetition of a round to the next.

    A model is trained with the settings in CONFIG. Every `evaluate.every` rounds the round is repeated `--replicates`
    times with different cohorts and batches. The variance of the kernels is compared for two ways of averaging: whole
    kernels, or the atoms and coefficients into which they are decomposed. Each repetition takes as long as one round.
    """
    settings = configs.load(config, overrides or ())
    check_resources_and_set_threads(settings, "analyse")
    from fedmpi.analysis import filter_decomposition

    filter_decomposition.analyse_variance(settings, replicates, to, typer.echo)


@analyse.command(short_help="Evaluate the virtual models in an aggregate.")
def virtual(run: RunDir, overrides: Overrides = None, to: To = Path("analysis"), trust: Trust = False) -> None:
    """Train one more round, and evaluate the virtual models of all pairs of clients.

    The round starts from the final model of RUN_DIR. A virtual model combines the coefficients of one client's
    decomposed kernels with the atoms of another client's.
    """
    settings = load_run_settings(run, trust, overrides, "analyse")
    from fedmpi.analysis import filter_decomposition
    from fedmpi.runtime.code_trust import forbid_external_code

    with forbid_external_code(trust):
        filter_decomposition.analyse_virtual_clients(run, settings, to, typer.echo)


@analyse.command(short_help="Compare a metric with the parameters transmitted.")
def communication(
    runs: Annotated[list[Path], Argument(metavar="RUN_DIR...", help="The runs; ratios are relative to the first.")],
    metric: Annotated[str, Option(help="A metric in metrics.jsonl.")] = "accuracy",
    to: To = Path("analysis"),
) -> None:
    """Compare runs by a metric as a function of the number of parameters that clients have sent and received."""
    set_threads(1)
    require_single_process()
    from fedmpi.reports import run_facts

    run_facts.compare_communication(runs, metric, to, typer.echo)


@analyse.command(short_help="Compare the cost of a local step with FedAvg's.")
def flops(config: Config, overrides: Overrides = None, to: To = Path("analysis")) -> None:
    """Count the floating-point operations of a local step and of a client's round, for CONFIG's method and FedAvg.

    The client with the most samples trains its first round with both methods.
    """
    settings = configs.load(config, overrides or ())
    check_resources_and_set_threads(settings, "analyse")
    from fedmpi.analysis import flops

    flops.analyse_flops(settings, to, typer.echo)


@analyse.command(short_help="Show what each rank did when.")
def timeline(
    run: RunDir,
    rounds: Annotated[int, Option(min=1, help="Number of rounds to plot, the last ones.")] = 10,
    to: To = Path("analysis"),
) -> None:
    """Show each rank's fraction of time spent computing, and what it waited for; plot a timeline of the last rounds."""
    set_threads(1)
    require_single_process()
    from fedmpi.reports import timeline

    timeline.write_timeline(run, rounds, to, typer.echo)


@analyse.command(short_help="Measure the sharpness of the minimum.")
def curvature(
    run: RunDir,
    overrides: Overrides = None,
    samples: Annotated[int, Option(min=1, help="Number of training samples of the loss.")] = 2048,
    top: Annotated[int, Option(min=1, max=50, help="Number of eigenvalues, the largest ones.")] = 5,
    grid: Annotated[int, Option(min=3, max=201, help="Points per side of the loss landscape.")] = 21,
    span: Annotated[float, Option(min=1e-6, help="The landscape extends from -span to span.")] = 1.0,
    to: To = Path("analysis"),
    trust: Trust = False,
) -> None:
    """Compute the largest eigenvalues of the Hessian of the training loss at the final model of RUN_DIR.

    Lanczos iteration on exact Hessian-vector products is used. The loss is also computed along the first two
    eigenvectors.
    """
    settings = load_run_settings(run, trust, overrides, "analyse")
    from fedmpi.analysis import curvature
    from fedmpi.runtime.code_trust import forbid_external_code

    with forbid_external_code(trust):
        curvature.analyse_curvature(run, settings, curvature.CurvatureOptions(samples, top, grid, span), to, typer.echo)
