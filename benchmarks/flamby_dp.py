"""Compare FLamby's curve under differential privacy of samples with ours, to separate the causes of differences.

    python benchmarks/flamby_dp.py [--root DIR] [--to benchmarks/results/flamby_dp.csv] [--figure FILE.png]

Trains the runs of configs/benchmarks/flamby_heart_dp.yaml, as `fedmpi reproduce flamby_heart_dp` does: FedAvg on
Fed-Heart-Disease at 20 pairs (epsilon, delta) and without privacy, with five seeds. Each run is made with fedmpi's
initial weights (ours), with FLamby's (theirs), those of its linear layer after torch.manual_seed(seed), and from these
by the procedure of FLamby's program (coded), which differs from fedmpi in these points (flamby/strategies/utils.py,
with the defaults of Opacus at that time):

- The noise is computed for 15 epochs, that is 15 ceil(n / 4) steps with the rate 1 / ceil(n / 4), but 1,500 steps are
  taken, so that the epsilon of the program is larger than the stated one.
- Batches are those of a shuffled pass, while the accounting assumes Poisson batches.
- The sum of the clipped gradients is divided by int(n / ceil(n / 4)), which is 3 at three of the hospitals.
- All hospitals draw their noise with the same seed, so that it does not average out.

FLamby does not set the seed of the initial weights, so that its runs cannot be repeated exactly. Each line of the CSV
is a run; runs that are in the file already are not repeated. The share of means within the published standard deviation
is printed for each kind of runs, and for these runs (coded) the epsilon of the steps that the program takes.
"""

import argparse
import csv
import statistics
import tempfile
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from flamby import CONFIGS, their_start

from fedmpi.comm.base import SingleProcess
from fedmpi.engine.federation_config import RunCallbacks
from fedmpi.engine.local.private_steps import PrivateSteps
from fedmpi.engine.local.training_loop import iterate_batches
from fedmpi.privacy.accountant import Sampling, compute_epsilon
from fedmpi.privacy.noise import NoiseKey
from fedmpi.runtime import build, build_data
from fedmpi.sweeps import expand

KINDS = ("ours", "theirs", "coded")
NO_PRIVACY = "no privacy"
SWEEP = CONFIGS / "flamby_heart_dp.yaml"
BATCH_SIZE, EPOCHS, TOLERANCE = 4, 15, 0.01  # of FLamby; the tolerance of epsilon is that of Opacus


@cache
def opacus_noise_multiplier(epsilon, delta, n):
    """Return the noise multiplier that Opacus finds for 15 epochs on n samples by bisection."""
    batches = -(-n // BATCH_SIZE)
    sampling, steps = Sampling("poisson", 1 / batches), EPOCHS * batches
    low, high, reached = 0.0, 10.0, float("inf")
    while reached > epsilon:
        high *= 2
        reached = compute_epsilon(high, delta, sampling, steps, "rdp")
    while epsilon - reached > TOLERANCE:
        middle = (low + high) / 2
        value = compute_epsilon(middle, delta, sampling, steps, "rdp")
        if value < epsilon:
            high, reached = middle, value
        else:
            low = middle
    return high


class CodedMechanism:
    """The noise and the divisor of FLamby's program, with the interface of SampleMechanism."""

    def __init__(self, mechanism, sizes):
        """Replace the noise of `mechanism`, whose clients have these numbers of samples."""
        self.clip, self.rates, self.steps = mechanism.clip, mechanism.rates, mechanism.steps
        self.multipliers = [opacus_noise_multiplier(mechanism.epsilon, mechanism.delta, n) for n in sizes]

    def noise_multiplier_of(self, client):
        """Return the noise multiplier of a client."""
        return self.multipliers[client]

    def expected_batch_size(self, client, n):
        """Return the number by which the sum of the clipped gradients is divided."""
        return int(n / -(-n // BATCH_SIZE))


class SharedNoiseKey(NoiseKey):
    """A key with which all clients draw the same noise."""

    def gaussian(self, n, std, word, t, attempt, client, fit, block):
        """Return the noise of some steps, which does not depend on the client."""
        return super().gaussian(n, std, word, t, attempt, fit, block)


class CodedSteps(PrivateSteps):
    """Private steps on the batches of shuffled passes."""

    def iterate_batches(self, client, epochs):
        """Yield the batches of shuffled passes."""
        generators = client.trainer.make_generators(client.round, client.id, client.num_fits)
        for batch in iterate_batches(client, epochs, 1, generators):
            yield batch
            client.private_steps += 1


def run(point, kind, seed, root):
    """Run one setting and return the mean accuracy of the four hospitals after the last round."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "start.safetensors"
        their_start("heart", seed, file)
        words = [f"grid.seed=[{seed}]", *([f"data.root={root}"] if root else [])]
        words += [f"init.from={file}"] if kind != "ours" else []
        settings = expand.load_sweep(SWEEP, words).run_settings({"point": point, "seed": str(seed)})
        data = build_data.build_partitioned_data(settings)
        experiment = build.make_experiment(settings, data, torch.device("cpu"))
    steps = experiment.private_steps
    if steps is not None:
        key = SharedNoiseKey if kind == "coded" else NoiseKey
        if kind == "coded":
            steps = CodedSteps(CodedMechanism(steps.mechanism, [int(n) for n in data.train_sizes]))
        # The noise is public here, so that the results can be repeated.
        steps.key = key(b"a public key for public data sets", f"{point}, seed {seed}")
    rows = []
    fed = build.make_federation(
        replace(experiment, private_steps=steps),
        SingleProcess(torch.device("cpu")),
        lambda: False,
        RunCallbacks(rows.append),
    )
    fed.run()
    return rows[-1]["sites_accuracy"]


def print_comparison(results, published):
    """Print, for each kind of runs, how many means are within the published standard deviation, and all means."""
    for kind in KINDS:
        means = {point: [v for (k, p, _), v in results.items() if (k, p) == (kind, point)] for point in published}
        if not all(means.values()):
            continue
        gaps = [abs(statistics.mean(means[p]) - mean) / std for p, (mean, std) in published.items()]
        one, two = (sum(gap <= limit for gap in gaps) for limit in (1, 2))
        print(f"{kind}: of {len(gaps)} means, {one} are within the published deviation, and {two} within two")
        for point, (mean, std) in published.items():
            values = means[point]
            text = f"{statistics.mean(values):.2f} +- {statistics.pstdev(values):.2f} ({len(values)})"
            print(f"    {point:26} published {mean:.2f} +- {std:.2f}   {text}")


def print_actual_epsilon(sizes=(199, 172, 30, 85)):
    """Print the epsilon of 1,500 steps with FLamby's noise, if batches were Poisson samples, for each hospital."""
    for epsilon in (50, 10, 5, 1, 0.1):
        for delta in (1e-3, 1e-4):
            reached = []
            for n in sizes:
                sampling = Sampling("poisson", BATCH_SIZE / n)
                noise = opacus_noise_multiplier(epsilon, delta, n)
                reached.append(compute_epsilon(noise, delta, sampling, 1500, "pld"))
            print(f"    stated epsilon {epsilon:g} at delta {delta:g}: {', '.join(f'{e:.3g}' for e in reached)}")


def draw_figure(results, published, file):
    """Draw the accuracy by epsilon for each delta: published mean and deviation, and ours."""
    from matplotlib import pyplot as plt

    def values(kind, point):
        return [v for (k, p, _), v in results.items() if (k, p) == (kind, point)]

    epsilons, deltas = (0.1, 1, 5, 10, 50), (0.1, 0.01, 0.001, 0.0001)
    styles = {"ours": ("C0", "o", "fedmpi"), "theirs": ("C1", "s", "fedmpi, FLamby's initial weights")}
    styles["coded"] = ("C2", "^", "FLamby's procedure in fedmpi")
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.6), sharey=True, layout="constrained")
    for axis, delta in zip(axes, deltas, strict=True):
        points = [f"epsilon {e:g} delta {delta:g}" for e in epsilons]
        mean, std = (torch.tensor([published[p][i] for p in points]) for i in (0, 1))
        axis.fill_between(epsilons, mean - std, mean + std, color="0.85")
        axis.plot(epsilons, mean, color="0.4", label="published: mean and standard deviation")
        axis.axhline(published[NO_PRIVACY][0], color="0.4", linestyle=":", label="published, without privacy")
        for kind, (color, marker, label) in styles.items():
            each = [values(kind, p) for p in points]
            spread = [statistics.pstdev(v) for v in each]
            axis.errorbar(
                epsilons, [statistics.mean(v) for v in each], spread, color=color, marker=marker, label=label, capsize=2
            )
        axis.set(xscale="log", title=f"delta = {delta:g}", xlabel="epsilon", xticks=epsilons)
        axis.set_xticklabels([f"{e:g}" for e in epsilons])
    axes[0].set_ylabel("mean accuracy of the hospitals, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(file, dpi=110)


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44, 45, 46])
    parser.add_argument("--to", type=Path, default=Path("benchmarks/results/flamby_dp.csv"))
    parser.add_argument("--figure", type=Path, help="draw all results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # one for each run: epsilon does not cover the standardisation
    there = list(csv.DictReader(arguments.to.open())) if arguments.to.exists() else []
    results = {(row["kind"], row["point"], int(row["seed"])): float(row["accuracy"]) for row in there}
    published = {point: value for (point,), value in expand.load_sweep(SWEEP).published[0].values.items()}
    with arguments.to.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not there:
            writer.writerow(("kind", "point", "seed", "accuracy"))
        for kind in arguments.kinds:
            for point in published:
                for seed in arguments.seeds:
                    if (kind, point, seed) not in results:
                        results[kind, point, seed] = run(point, kind, seed, arguments.root)
                        writer.writerow((kind, point, seed, f"{results[kind, point, seed]:.4f}"))
                        file.flush()
    print_comparison(results, published)
    print_actual_epsilon()
    if arguments.figure:
        draw_figure(results, published, arguments.figure)


if __name__ == "__main__":
    main()
