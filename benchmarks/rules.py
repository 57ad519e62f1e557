"""W3: measure the cost of each aggregation rule, relative to the weighted mean and to a plain matrix product.

    python benchmarks/rules.py [RULE ...] [--m 5 12 30 100] [--d 1700000 25600000] [--gib 1.5]

The rows (m, d) are random float32 and already at the server. Every rule of `server.rule` is run with its defaults, then
FedLD's rule for each tensor of a model of 20 tensors. mean: fedmpi's weighted mean with sums in float64; product:
`p @ rows` in float32 by torch in one thread, with less precision. The rules run in turn; results are medians. Pairs of
m and d whose rows take more than --gib are skipped with a message.
"""

import argparse
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import torch
from measure import print_result, run_in_turn

from fedmpi.aggregation import rules
from fedmpi.common.registry import load_object
from fedmpi.flat.layout import Segment
from fedmpi.flat.packing import Views
from fedmpi.method.context import Uploads
from fedmpi.runtime.device import keep_freed_memory

TENSORS = 20
SLOW = {"median", "trimmed_mean"}  # rules that sort every column: one turn, and at most SORTED numbers
SORTED = 1e8


def segments(d):
    """Divide a vector (d,) into TENSORS segments of equal length."""
    ends = [d * i // TENSORS for i in range(TENSORS + 1)]
    return [Segment(f"t{i}", (b - a,), a, "body") for i, (a, b) in enumerate(pairwise(ends))]


def sides(names, m, d):
    """Return {name: function to time} for rows (m, d)."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(m, d, generator=g)
    p = torch.full((m,), 1 / m, dtype=torch.float64)
    up = Uploads(range(m), p * m, p, Views({"dw": rows}))
    server = SimpleNamespace(segments=segments(d))
    results = {"product": lambda: (p.float() @ rows, None)[1], "mean": lambda: (rules.mean(up, server), None)[1]}
    for name in names:
        rule, _, scope = name.partition(", ")
        function = load_object(rule, rules.registry, "server rule")
        options = {"scope": "tensor"} if scope else {}
        results[name] = partial(lambda f, o: (f(up, server, **o), None)[1], function, options)
    return results


def main():
    """Run the benchmark with the arguments of the command line."""
    every = [name for name in rules.registry if name != "mean"] + ["principal, tensor by tensor"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=every, help="rules; all where none is given")
    parser.add_argument("--m", type=int, nargs="+", default=[5, 12, 30, 100], help="clients")
    parser.add_argument("--d", type=int, nargs="+", default=[1_700_000, 25_600_000], help="parameters")
    parser.add_argument("--gib", type=float, default=1.5, help="the most memory that the rows may take")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=12, help="for one pair of m and d, the first turn apart")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # the setting of every run
    torch.manual_seed(0)
    for d in args.d:
        for m in args.m:
            if 4 * m * d > args.gib * 2**30:
                print(f"m={m}, d={d:,} left out: {4 * m * d / 2**30:.1f} GiB of rows; --gib {args.gib:g}", flush=True)
                continue
            names = [name for name in args.names if name not in SLOW or m * d <= SORTED]
            seconds = run_in_turn(sides(names, m, d), args.repeats, args.seconds)
            for name in ("mean", *(name for name in seconds if name not in ("mean", "product"))):
                beside = "product" if name == "mean" else "mean"
                note = "" if name == "mean" else f"{seconds[name] / seconds['product']:.1f} of a bare product"
                pair = [(who, 1e3 * seconds[key]) for who, key in (("rule", name), (beside, beside))]
                print_result(f"{name}, m={m}, d={d:,}", *pair, unit="ms", note=note, digits=2)
            for name in set(args.names) - set(names):
                print(f"{name}, m={m}, d={d:,} left out: it sorts {m * d:,} numbers", flush=True)


if __name__ == "__main__":
    main()
