"""Compare runs in fedmpi and in other programs with the same rows, batches, initial weights and cohorts.

    python benchmarks/oracles/compare.py [PEER[:METHOD] ...] [--python PEER=INTERPRETER ...] [--to results/oracles.csv]

Each method of cases_*.py runs in fedmpi, which writes its initial weights and its batches to a file; by_PEER.py repeats
the run in the other program. It is a process of its own, since the program may need other versions of packages:
--python names its interpreter (default: this one). Five small clients of different sizes, three per round, three
rounds, float64. The clients' mean loss, the global model and, if there are any, the clients' own models are compared.
If a program is not installed, a message says so. Lines of the CSV about other programs or methods are kept.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # so that configs find the methods of readings.py

import ours  # noqa: E402
from cases import Case  # noqa: E402
from cases_fluke import FLUKE  # noqa: E402
from cases_more import FEDLAB, FLGO, FLOWER, PFL, PFLLIB  # noqa: E402

PEERS = {  # name: (package, module that must be importable)
    "fluke": ("fluke-fl", "fluke"),
    "pfl": ("pfl", "pfl.algorithm.scaffold"),
    "fedlab": ("fedlab", "fedlab.core.standalone"),
    "flower": ("flwr", "flwr.serverapp.strategy"),
    "pfllib": ("PFLlib", "flcore.servers.serverbase"),  # github.com/TsingZ0/PFLlib, its folder `system` on the path
    "flgo": ("flgo", "flgo.algorithm.feddyn"),
}
FOUND = """
import importlib.metadata, subprocess, {module} as module
try:
    print(importlib.metadata.version('{package}'))
except importlib.metadata.PackageNotFoundError:
    place = module.__file__.rpartition('/')[0]
    print(subprocess.run(['git', '-C', place, 'log', '-1', '--format=%h'], capture_output=True, text=True).stdout)
"""  # the package's version, or the commit of its sources
COLUMNS = ("peer", "version", "method", "what", "ours", "theirs", "relative", "with_reading", "verdict", "why")
AGREE = 1e-5  # largest relative difference of values that agree
CASES = [*FLUKE, *PFL, *FEDLAB, *FLOWER, *PFLLIB, *FLGO]


def version(peer: str, python: str) -> str | None:
    """Return the version of an installed program; None if it cannot be imported."""
    package, module = PEERS[peer]
    words = [python, "-W", "ignore", "-c", FOUND.format(package=package, module=module)]
    done = subprocess.run(words, capture_output=True, text=True)
    return (done.stdout.split() or ["?"])[-1] if done.returncode == 0 else None


def figures(mine: ours.Ours, theirs: dict[str, torch.Tensor], case: Case) -> dict[str, tuple[float, float, float]]:
    """Return {quantity: (fedmpi's value, the other program's value, the relative difference)}.

    The values of models are their distances from the initial weights; the relative difference is the distance between
    the two models divided by the larger of these.
    """
    found = {}
    if case.loss and "loss" in theirs:
        for t in (1, len(mine.loss)):
            a, b = float(mine.loss[t - 1]), float(theirs["loss"][t - 1])
            found[f"loss, round {t}"] = a, b, abs(a - b) / abs(a)
    if "w" in theirs and mine.w.shape == theirs["w"].shape:
        for t in (1, len(mine.w)):
            found[f"model, round {t}"] = compare_models(mine.w[t - 1], theirs["w"][t - 1], mine.w0)
    elif "w" in theirs and (part := _part(mine, theirs["w"].shape[1])):
        for t in (1, len(mine.w)):
            found[f"model, round {t}"] = compare_models(mine.w[t - 1, part], theirs["w"][t - 1], mine.w0[part])
    if case.kept:
        a, b = mine.kept[case.kept], theirs["kept"]
        start = mine.w0 if a.shape[1] == len(mine.w0) else mine.w0[_part(mine, a.shape[1])]
        found[f"own models, round {len(mine.w)}"] = compare_models(a, b, start)
    return found


def _part(mine: ours.Ours, width: int) -> slice | None:
    """Return the slice of the flat model, body or head, that has this length; None if neither has."""
    d, head = len(mine.w0), (ours.WIDTH + 1) * ours.CLASSES
    return slice(d - head, d) if width == head else slice(0, d - head) if width == d - head else None


def compare_models(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> tuple[float, float, float]:
    """Return the distances of two models from the initial weights, and the relative difference of the models."""
    far, theirs = float((a - start).norm()), float((b - start).norm())
    return far, theirs, float((a - b).norm()) / (max(far, theirs) or 1.0)


def compare(cases: list[Case], python: str) -> Iterator[list[dict[str, str]]]:
    """Yield the CSV lines of each case, without the version; cases: those of one program, run in one process."""
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / str(i) for i in range(2 * len(cases))]
        asked = [changes for case in cases for changes in (case.ours, case.reading)]
        runs: list[ours.Ours | None] = []
        for changes, folder, case in zip(asked, folders, (case for case in cases for _ in range(2)), strict=True):
            folder.mkdir()
            runs.append(ours.run(changes, folder, case.theirs) if changes else None)
        # The other program's results depend on our run only if the program aggregates our clients' models.
        own = {2 * i: 2 * i + (case.peer == "flower" and bool(case.reading)) for i, case in enumerate(cases)}
        given = sorted({*own.keys(), *own.values()})
        words = [python, "-W", "ignore", str(HERE / f"by_{cases[0].peer}.py"), *(str(folders[i]) for i in given)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{cases[0].peer}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        for i, case in zip(own, cases, strict=True):
            yield list(_lines(case, runs[i], runs[i + 1], folders[i], folders[own[i]]))


def _lines(case: Case, mine: ours.Ours, read: ours.Ours | None, folder: Path, second: Path) -> Iterator[dict[str, str]]:
    """Yield the CSV lines of a case.

    Args:
        case: the case.
        mine: fedmpi's run.
        read: fedmpi's run with the equations of the other program, if the case has them.
        folder: the other program's results for `mine`.
        second: the other program's results for `read`.
    """
    if (folder / "error.txt").exists():
        said = (folder / "error.txt").read_text().splitlines()[-1]
        yield _who(case) | {"what": said, "verdict": "does not run", "why": case.why}
        return
    found, left = _found(folder)
    said, with_reading = figures(mine, found, case), figures(read, _found(second)[0], case) if read else {}
    if left and not read:
        said["passes not used"] = 0.0, float(left), float("inf")
    for what in said:
        yield _line(case, what, said[what], with_reading.get(what))


def _found(folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """Return the arrays of theirs.npz, and the number of passes that the other program has not used."""
    with np.load(folder / "theirs.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file.files if file[name].ndim}, int(file["left"])


def _who(case: Case) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "") | {"peer": case.peer, "method": case.method}


def _line(case: Case, what: str, said: tuple[float, float, float], read: tuple[float, ...] | None) -> dict[str, str]:
    a, b, relative = said
    agrees, with_reading = relative < AGREE, read[2] if read else None
    verdict = "agrees" if agrees else "explained" if with_reading is not None and with_reading < AGREE else "differs"
    return _who(case) | {
        "what": what,
        "ours": f"{a:.8g}",
        "theirs": f"{b:.8g}",
        "relative": f"{relative:.1e}",
        "with_reading": "" if with_reading is None or agrees else f"{with_reading:.1e}",
        "verdict": verdict,
        "why": "" if agrees else case.why,
    }


def main() -> None:
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", metavar="PEER[:METHOD]", help="default: all")
    parser.add_argument("--python", nargs="+", default=[], metavar="PEER=INTERPRETER")
    parser.add_argument("--to", type=Path, default=HERE.parent / "results" / "oracles.csv")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    given = dict(each.split("=", 1) for each in asked.python)
    peers = {each.split(":")[0] for each in asked.which} or set(PEERS)
    if unknown := sorted((set(given) | peers) - set(PEERS)):
        parser.error(f"there is no by_{unknown[0]}.py; there are {', '.join(PEERS)}")
    pythons = {peer: given.get(peer, sys.executable) for peer in PEERS if peer in peers}
    there = {peer: version(peer, python) for peer, python in pythons.items()}
    for peer, found in there.items():
        if found is None:
            print(f"{PEERS[peer][0]}: not installed for {pythons[peer]} (pip install {PEERS[peer][0]}, then --python)")
    lines = {}
    if asked.to.exists():
        with asked.to.open(newline="") as file:
            lines = {(row["peer"], row["method"], row["what"]): row for row in csv.DictReader(file)}
    for peer in [peer for peer in pythons if there[peer]]:
        names = {word.split(":", 1)[-1] for word in asked.which if word.startswith(f"{peer}:")}
        cases = [case for case in CASES if case.peer == peer and (not names or case.method in names)]
        for case, found in zip(cases, compare(cases, pythons[peer]) if cases else [], strict=True):
            lines = {key: row for key, row in lines.items() if key[:2] != (peer, case.method)}
            for row in found:
                row["version"] = there[peer]
                lines[peer, case.method, row["what"]] = row
                shown = (
                    "{peer:7} {method:18} {what:20} {ours:>11} {theirs:>11} {relative:>8} {with_reading:>8} {verdict}"
                )
                print(shown.format(**row), row["why"], flush=True)
    place = {(case.peer, case.method): i for i, case in enumerate(CASES)}
    kept = sorted(lines.values(), key=lambda row: place.get((row["peer"], row["method"]), len(place)))
    with asked.to.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)


if __name__ == "__main__":
    main()
