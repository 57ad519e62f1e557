"""Compare methods by personal accuracy and transmitted parameters, on CIFAR-10 with two classes per client.

    python benchmarks/personal.py CIFAR10.npz [--only NAME ...] [--processes 2] [--output runs/personal] [KEY=VALUE ...]

Each line of RUNS is one `fedmpi run configs/cifar10_two_classes.yaml`; runs that have finished in --output are not
repeated. personal: mean and standard deviation over all clients of the accuracy of each client's own model on its own
test split, after the last round. global: the accuracy of the global model on all test images, omitted if the head is
never uploaded. Parameters are the numbers that a client of the cohort uploads and downloads, as a mean over rounds;
`all` is their sum over the run.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

GLOBAL = "evaluate.protocol=[personal, global]"
RUNS = {
    "local": ["method={name: local}", "evaluate.protocol=[personal]"],
    "fedavg+ft": ["method={name: fedavg}", "evaluate.protocol=[personal, global, ft(2)]"],
    "fedper": ["method={name: fedper}", "evaluate.protocol=[personal]"],
    "fedrep": ["method={name: fedrep, head_epochs: 2, body_epochs: 1}", "evaluate.protocol=[personal]"],
    "ditto": ["method={name: ditto, lam: 0.75}", "evaluate.protocol=[personal]"],
    "fedpac": ["method={name: fedpac}", "evaluate.protocol=[personal]"],
    # With init: factors, as in the authors' code, the initial weights of a network without normalisation are so small
    # that the accuracy stays at chance level here.
    "fedpara": ["method={name: fedpara, ratio: 0.5, init: product}", GLOBAL],
    "fedatom": ["method={name: fedatom_personal}", GLOBAL],
    "fedatom-head": ["method={name: fedatom_personal, personal_head: local}", GLOBAL],
    "fedatom-5": ["method={name: fedatom, period: 5}", GLOBAL],
    "fedatom-10": ["method={name: fedatom, period: 10}", GLOBAL],
}


def run(name: str, data: Path, output: Path, extra: list[str]) -> None:
    """Run one line of RUNS, unless its run has finished already."""
    if (output / name).exists():
        summary = output / name / "summary.json"
        if summary.exists() and json.loads(summary.read_text())["exit_reason"] == "finished":
            return
        sys.exit(f"{output / name} holds a run that did not finish: remove it")
    settings = [f"name={name}", f"output={output}", f"data.root={data.parent}", f"data.path={data.name}"]
    command = [sys.executable, "-m", "fedmpi", "run", "configs/cifar10_two_classes.yaml", *settings, *RUNS[name]]
    print(f"{name} ...", file=sys.stderr, flush=True)
    subprocess.run([*command, *extra], check=True, stdout=subprocess.DEVNULL)


def format_line(directory: Path) -> str:
    """Return the line of the table for a run directory."""
    rows = [json.loads(text) for text in (directory / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    tuned = next((name for name in last if name.startswith("ft(") and name.endswith("_accuracy")), "personal_accuracy")
    up, down = (sum(row[key] for row in rows) for key in ("up_parameters", "down_parameters"))
    visits = sum(len(row["cohort"]) for row in rows)
    reached = f"{last['accuracy']:8.2f}" if "accuracy" in last else f"{'-':>8}"
    return (
        f"{directory.name:13}  {last[tuned]:8.2f}  {last[f'{tuned}_std']:5.2f}  {reached}  {up / visits:11,.0f}  "
        f"{down / visits:11,.0f}  {(up + down) / 1e6:7.1f} M  {sum(row['wall_s'] for row in rows):7.0f}"
    )


def main() -> None:
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the .npz file")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE for every run")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/personal"))
    given = parser.parse_intermixed_args()
    with ThreadPoolExecutor(given.processes) as pool:
        list(pool.map(lambda name: run(name, given.data.resolve(), given.output, given.settings), given.only))
    print(f"{'':13}  personal    std    global      up/visit   down/visit        all  seconds")
    for name in given.only:
        print(format_line(given.output / name))


if __name__ == "__main__":
    main()
