"""FLamby's tables beside ours, and how much of the difference is the initial weights.

    python benchmarks/flamby.py [heart] [brca] [--root DIR] [--to benchmarks/results/flamby.csv]

Trains what configs/benchmarks/flamby_heart.yaml and flamby_brca.yaml ask for (`fedmpi sweep` does the same): five
methods, five seeds. --root holds heart_disease/ and tcga_brca/ (docs/data.md). Each run is there twice: from initial
weights as fedmpi draws them, and from FLamby's, those of the first linear layer after torch.manual_seed(seed). The
order of batches is ours in both. A line of the table that it writes is a run, with the figure of the pooled test set;
what stands there is not run again. It prints mean and standard deviation over seeds: accuracy in percent, C-index 0..1.
"""

import argparse
import csv
import itertools
import statistics
import tempfile
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

from fedmpi.comm.backends.solo import Solo
from fedmpi.config import sweep
from fedmpi.engine.plan import Sink
from fedmpi.runtime import build, build_data

CONFIGS = Path(__file__).parent.parent / "configs" / "benchmarks"
LAYER = {"heart": ("head.linear", 13), "brca": ("head", 39)}  # its name in our model, and its inputs
STARTS = ("ours", "theirs")
COLUMNS = ("set", "method", "start", "seed", "figure")


def their_start(name, seed, file):
    """FLamby's initial weights, as a file that `init.from` reads."""
    layer, inputs = LAYER[name]
    torch.manual_seed(seed)
    drawn = torch.nn.Linear(inputs, 1)
    save_file({f"{layer}.{key}": value for key, value in drawn.state_dict().items()}, file)


def run(name, method, start, seed, root):
    """The first figure of the task on the pooled test set, after the last round."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "start.safetensors"
        their_start(name, seed, file)
        more = [f"data.root={root}"] if root else []
        asked = sweep.load(CONFIGS / f"flamby_{name}.yaml", more + [f"init.from={file}"] * (start == "theirs"))
        settings = asked.settings({"method": method, "seed": str(seed)})
        made = build.experiment(settings, build_data.partitioned(settings), torch.device("cpu"))
    rows = []
    build.federation(made, Solo(torch.device("cpu")), lambda: False, Sink(rows.append)).run()
    return rows[-1][made.task.names[0]]


def table(name, found):
    """Lines for one data set."""
    published = sweep.load(CONFIGS / f"flamby_{name}.yaml").published
    digits = 2 if published.metric == "accuracy" else 3
    for (method,), said in published.values.items():
        ours = [[v for key, v in found.items() if key[:3] == (name, method, start)] for start in STARTS]
        cells = [(statistics.mean(values), statistics.pstdev(values)) for values in ours] + [said]
        yield " ".join([f"{name:6} {method:9}", *(f"{mean:9.{digits}f} +- {std:.{digits}f}" for mean, std in cells)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", help="heart, brca (default: both)")
    parser.add_argument("--root")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44, 45, 46])
    parser.add_argument("--to", type=Path, default=Path("benchmarks/results/flamby.csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Switzerland's patients are of one class
    there = list(csv.DictReader(arguments.to.open())) if arguments.to.exists() else []
    found = {(*(row[key] for key in COLUMNS[:3]), int(row["seed"])): float(row["figure"]) for row in there}
    print(f"{'set':6} {'method':9} {'our start':>17} {'their start':>17} {'published':>17}")
    with arguments.to.open("a", newline="") as file:
        writer = csv.writer(file)
        if not there:
            writer.writerow(COLUMNS)
        for name in arguments.sets or LAYER:
            methods = [key for (key,) in sweep.load(CONFIGS / f"flamby_{name}.yaml").published.values]
            for case in itertools.product([name], methods, STARTS, arguments.seeds):
                if case not in found:
                    found[case] = run(*case, arguments.root)
                    writer.writerow([*case, f"{found[case]:.4f}"])
                    file.flush()
            print(*table(name, found), sep="\n", flush=True)


if __name__ == "__main__":
    main()
