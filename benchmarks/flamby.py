"""Compare FLamby's tables with ours, to separate effects of the initial weights from effects of FLamby's program.

    python benchmarks/flamby.py [heart] [brca] [--root DIR] [--to benchmarks/results/flamby.csv]

Trains the runs of configs/benchmarks/flamby_heart.yaml and flamby_brca.yaml, as `fedmpi reproduce` does; --root is the
folder of heart_disease/ and tcga_brca/ (docs/data.md). Each run is made with fedmpi's initial weights (ours) and with
FLamby's (theirs), those of the first linear layer after torch.manual_seed(seed); the order of batches is fedmpi's in
both. Some runs are made a third time (coded) as in FLamby's program, with its weights. In its Cyclic
(flamby/strategies/cyclic.py) each client trains a model of its own in its turn, and passes nothing to the next client;
its benchmark evaluates client 0's model, so that this is client 0 alone, for as many rounds as it had turns. In its Cox
loss (flamby/datasets/fed_tcga_brca/loss.py), of patients with the same time only the first one in the batch is at risk.
Each line of the CSV is a run, with metrics of the pooled test set and of each site. Runs that are in the file already
are not repeated. The cells that differ from the published value by more than two published standard deviations are
printed: mean, standard deviation and number of seeds for each kind of initial weights. With --seeds above the published
five, the output shows how reliable a mean of five is.
"""

import argparse
import csv
import statistics
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from fedmpi.comm.base import SingleProcess
from fedmpi.engine.federation_config import RunCallbacks
from fedmpi.runtime import build, build_data
from fedmpi.sweeps import expand
from fedmpi.tasks.survival import Survival

CONFIGS = Path(__file__).parent.parent / "configs" / "benchmarks"
LAYER = {"heart": ("head.linear", 13), "brca": ("head", 39)}  # name of the layer in our model, number of inputs
FIRST = {"heart": "cleveland", "brca": "Northeast"}  # client 0
SITES = {"heart": 4, "brca": 6}
COLUMNS = ("set", "method", "start", "seed", "figures")


def their_start(name, seed, file):
    """Write FLamby's initial weights to a file that `init.from` reads."""
    layer, inputs = LAYER[name]
    torch.manual_seed(seed)
    drawn = torch.nn.Linear(inputs, 1)
    save_file({f"{layer}.{key}": value for key, value in drawn.state_dict().items()}, file)


def turns(sites, rounds, seed):
    """Return the number of turns of client 0 in FLamby's Cyclic, which draws an order of all clients per cycle."""
    rng = np.random.default_rng(seed)
    order = [int(k) for _ in range(-(-rounds // sites)) for k in rng.permutation(sites)]
    return order[:rounds].count(0)


class TheirCox(Survival):
    """The Cox loss of FLamby: the partial likelihood without a rule for equal times."""

    def loss(self, model, x, y):
        order = y[:, 1].sort(descending=True, stable=True).indices
        f = model(x).view(-1)[order].double()
        return (y[order, 0] * (f.logcumsumexp(0) - f)).mean().float()


def run(name, method, start, seed, root):
    """Run one setting and return the published metrics after the last round, on the pooled test set and each site."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "start.safetensors"
        their_start(name, seed, file)
        words = [f"grid.seed=[{seed}]", *([f"data.root={root}"] if root else [])]
        words += [f"init.from={file}"] if start != "ours" else []
        path = CONFIGS / f"flamby_{name}.yaml"
        if start == "coded" and name == "brca":
            words += [f"task.name={Path(__file__).resolve()}:TheirCox"]
        if start == "coded" and method == "Cyclic":
            settings = expand.load_sweep(path, words).run_settings({"method": method, "seed": str(seed)})
            rounds = turns(SITES[name], settings.rounds, seed)
            words += [
                f"rounds={rounds}",
                f"data.partition.only=[{FIRST[name]}]",
                "cohort={fraction: 1, sampling: uniform}",
            ]
        args = expand.load_sweep(path, words)
        settings = args.run_settings({"method": method, "seed": str(seed)})
        experiment = build.make_experiment(settings, build_data.build_partitioned_data(settings), torch.device("cpu"))
    rows = []
    build.make_federation(
        experiment, SingleProcess(torch.device("cpu")), lambda: False, RunCallbacks(rows.append)
    ).run()
    return [rows[-1][each.metric] for each in args.published]


def outside(name, results):
    """Yield a line for each cell whose mean, for any kind of initial weights, is beyond two published deviations."""
    for at, each in enumerate(expand.load_sweep(CONFIGS / f"flamby_{name}.yaml").published):
        for (method,), (mean, std) in each.values.items():
            ours = {}
            for (where, what, start, _), figures in results.items():
                if (where, what) == (name, method):
                    ours.setdefault(start, []).append(figures[at])
            apart = {start: abs(statistics.mean(values) - mean) for start, values in ours.items()}
            if any(gap > 2 * std and gap > 0.005 for gap in apart.values()):
                lines = [(start, statistics.mean(v), statistics.pstdev(v), len(v)) for start, v in ours.items()]
                output = ", ".join(f"{start} {m:.3f} +- {s:.3f} ({n})" for start, m, s, n in lines)
                yield f"{name:6} {method:10} {each.metric:22} published {mean:.3f} +- {std:.3f}   {output}"


def main():
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", help="heart, brca (default: both)")
    parser.add_argument("--root")
    parser.add_argument("--methods", nargs="+", help="some of them, such as 'Local 1'")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44, 45, 46])
    parser.add_argument("--to", type=Path, default=Path("benchmarks/results/flamby.csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # scikit-learn warns because Switzerland's test patients are all of one class
    there = list(csv.DictReader(arguments.to.open())) if arguments.to.exists() else []
    results = {
        (*(row[key] for key in COLUMNS[:3]), int(row["seed"])): [float(x) for x in row["figures"].split()]
        for row in there
    }
    with arguments.to.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not there:
            writer.writerow(COLUMNS)
        for name in arguments.sets or LAYER:
            methods = [key for (key,) in expand.load_sweep(CONFIGS / f"flamby_{name}.yaml").published[0].values]
            methods = [method for method in methods if method in (arguments.methods or methods)]
            cases = [(name, m, s, seed) for m in methods for s in ("ours", "theirs") for seed in arguments.seeds]
            coded = [method for method in methods if name == "brca" or method == "Cyclic"]
            cases += [(name, method, "coded", seed) for method in coded for seed in arguments.seeds]
            for case in cases:
                if case not in results:
                    results[case] = run(*case, arguments.root)
                    writer.writerow([*case, " ".join(f"{value:.4f}" for value in results[case])])
                    file.flush()
            print(*outside(name, results), sep="\n", flush=True)


if __name__ == "__main__":
    main()
