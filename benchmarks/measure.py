"""Shared functions of the benchmarks: run sides in turn, print and read results, start ranks, describe the machine.

People and programs read the same result lines:   WHAT: OURS 1.20 s  THEIRS 1.00 s  ratio 1.20  (a note)
"""

import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
PACKAGES = ("torch", "numpy", "mpi4py", "openmpi")
SIDE = re.compile(r"(?P<name>\S.*?) (?P<value>[\d.,e+-]+) (?P<unit>\S+)")
CNN = re.compile(r"([^:]+): (fedmpi|apart) ([\d.]+) s a round.*by hand ([\d.]+) s.*; ratio ([\d.]+) (.*)")
SMALL = re.compile(
    r"(\w+) +[\d,]+ parameters +by hand ([\d.]+) ms +one by one ([\d.]+) ms, ratio ([\d.]+) +packed ([\d.]+) ms, "
    r"([\d.]+) times as fast"
)
RATIO = re.compile(r"ratio (?P<ratio>[\d.e+-]+)(?P<note>.*)")


def run_in_turn(sides, repeats, limit_s=float("inf"), now=time.perf_counter):
    """Run functions in turn and return {name: median seconds}; the first turn does not count if there are several.

    Args:
        sides: {name: function}. A function that measures its own time returns it in seconds.
        repeats: number of turns.
        limit_s: no turn begins later than this many seconds after the first.
        now: the clock.
    """
    seconds, began = {name: [] for name in sides}, time.perf_counter()
    for turn in range(repeats):
        if turn and time.perf_counter() - began > limit_s:
            break
        for name, side in sides.items():
            at = now()
            own = side()
            seconds[name].append(now() - at if own is None else own)
    return {name: median(each[1:] or each) for name, each in seconds.items()}


def print_result(what, ours, theirs, unit="s", note="", digits=3):
    """Print a result line; ours, theirs: (name, value)."""
    sides = "  ".join(f"{name} {value:.{digits}f} {unit}" for name, value in (ours, theirs))
    ratio = ours[1] / theirs[1] if theirs[1] else float("nan")
    print(f"{what}: {sides}  ratio {ratio:.2f}" + (f"  ({note})" if note else ""), flush=True)


def parse_result(text):
    """Parse a result line as {what, ours, theirs, unit, ratio, note}; return None for other lines.

    `ours` and `theirs` are (name, value).
    """
    cells = [cell for cell in re.split(r":\s+|\s{2,}", text.strip()) if cell]
    at = next((i for i, cell in enumerate(cells) if cell.startswith("ratio ")), 0)
    if at < 3:
        return None
    sides, ratio = [SIDE.fullmatch(cell) for cell in cells[at - 2 : at]], RATIO.match(cells[at])
    if not all(sides) or not ratio:
        return None
    ours, theirs = ((side["name"], float(side["value"].replace(",", ""))) for side in sides)
    note = " ".join([ratio["note"].strip(), *cells[at + 1 :]]).strip()
    what = ", ".join(cells[: at - 2])
    return {
        "what": what, "ours": ours, "theirs": theirs, "unit": sides[0]["unit"], "ratio": float(ratio["ratio"]),
        "note": note.removeprefix("(").removesuffix(")"),
    }  # fmt: skip


def parse_results(text):
    """Parse a line of any benchmark as a list of results as in `read`; cnn.py and small.py have their own formats."""
    row = parse_result(text)
    if row:
        return [row]
    lines = CNN.match(text)
    if lines:
        what, who, x, y, ratio, note = lines.groups()
        return [make_result(what, (who, x), ("by hand", y), "s", ratio, note)]
    lines = SMALL.match(text)
    if not lines:
        return []
    name, hand, one, ratio, packed, faster = lines.groups()
    return [
        make_result(f"{name}, a client", ("fedmpi", one), ("by hand", hand), "ms", ratio),
        make_result(f"{name}, packed", ("fedmpi packed", packed), ("one by one", one), "ms", 1 / float(faster)),
    ]


def make_result(what, ours, theirs, unit, ratio, note=""):
    """Return a result as a dict, as `parse_result` does."""
    ours, theirs = ((name, float(value)) for name, value in (ours, theirs))
    return {"what": what, "ours": ours, "theirs": theirs, "unit": unit, "ratio": float(ratio), "note": note}


def mpirun_command(ranks, *words, options=()):
    """Return the command that starts a Python program on `ranks` ranks of this host."""
    command = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None:
        raise SystemExit("no mpirun on PATH; pip install 'fedmpi[mpi]'")
    output = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    here = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in output else []
    here += ["--allow-run-as-root"] if here and os.geteuid() == 0 else []
    return [command, *here, *options, "-n", str(ranks), sys.executable, "-W", "ignore", *map(str, words)]


def run_on_ranks(ranks, *words, options=(), quiet=False):
    """Run a Python program on ranks of this host, print its output, and return it.

    quiet: print the output only if the program fails.
    """
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    result = subprocess.run(mpirun_command(ranks, *words, options=options), env=env, stdout=subprocess.PIPE, text=True)
    if not quiet or result.returncode:
        print(result.stdout, end="", flush=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} on {ranks} ranks ended with {result.returncode}")
    return result.stdout


def read_memory_bytes(key, pid="self"):
    """Return the memory of a process in bytes; key: VmHWM for the peak, VmRSS for the present value."""
    results = re.search(rf"^{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(results[1]) * 1024


def reset_peak_memory():
    """Reset this process's peak memory (VmHWM) to its present memory."""
    Path("/proc/self/clear_refs").write_text("5")


def describe_machine():
    """Return a description of the machine, its software and the code, on which the results depend."""
    file = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.*)$", file.read_text(), re.MULTILINE) if file.exists() else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": f"{name[1].strip() if name else platform.processor()}, {cores} cores",
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package: find_version(package) for package in PACKAGES},
        "commit": find_commit(),
        "date": datetime.date.today().isoformat(),
    }


def find_version(package):
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_commit():
    """Return the description of the git commit; None without git."""
    try:
        output = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    except OSError:  # there is no git
        return None
    return output.stdout.strip() or None
