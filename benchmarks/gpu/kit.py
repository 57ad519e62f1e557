"""Check and measure a machine with one GPU, without a network.

    python3 benchmarks/gpu/kit.py [PART ...] [--quick]

Measures memory and the seconds of a round, compared with loops by hand; then runs the tests of tests/jobs/gpu (tests of
communication over NCCL and gloo, every method alone and over ranks that share the GPU, the same bits in two runs and
after a resume). --quick: typical runs, about one minute: `fedmpi run` in bf16, with an LSTM, with packed clients, with
all analyses, with rank 0 on the CPU, compiled; and a profile of ten steps. --device cpu runs the same with smaller
tasks; --device simulated runs on the GPUs of tests/simulated_cuda.py, without parts that they do not support.

A Python with torch is required; other missing packages are listed first, with the commands that install them. Each part
has a time limit, at which all its processes are ended. If a part fails, the others are run, and the exit code is 1.
Results are written to one JSON file, which is updated after each part. --page FILE.json writes them to docs/gpu.md.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from measure import describe_machine, parse_result  # noqa: E402

SIMULATION = "tests/simulated_cuda.py"
PAGE, RESULTS = ROOT / "docs" / "gpu.md", ROOT / "build" / "gpu"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
MARK = "FEDMPI_GPU_PART"  # the environment variable that identifies the processes of a part
GRACE_S = 10.0  # between SIGTERM and SIGKILL
PROBE_S = 120  # the first use of a GPU after the machine has started can take that long
MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn", "pytest-xdist": "xdist"}  # else the package's own name
PROBE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "usable": torch.cuda.is_available()}
if found["usable"]:
    card = torch.cuda.get_device_properties(0)
    found |= {"gpu": f"{card.name}, {card.total_memory / 2**30:.0f} GiB", "cudnn": torch.backends.cudnn.version()}
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


class Part(NamedTuple):
    """A part of the checks: a command with a time limit."""

    name: str
    words: list[str]  # arguments of its command, after the interpreter
    limit_s: float


def measures_and_tests(device: str, folder: Path) -> Iterator[Part]:
    """Yield the benchmarks and the tests."""
    small, device, simulated = device != "cuda", device.replace("simulated", "cuda"), device == "simulated"
    share = ["--share", "20", "--rounds", "2"] if small else []
    for name in ("cnn", "cifar10", "packed"):
        yield Part(name, ["-W", "ignore", "benchmarks/gpu/rounds.py", name, "--device", device, *share], 90)
    sizes = ["--d", "100000", "--repeats", "3"] if small else []
    yield Part("vectors", ["-W", "ignore", "benchmarks/vectors.py", "--device", device, *sizes], 90)
    yield Part("settings", ["-W", "ignore", "benchmarks/gpu/settings.py", "--device", device, *share], 150)
    tests = ["-m", "pytest", "-vv", "-rs", "-p", "no:cacheprovider"]
    if simulated:
        yield Part("test_simulated_cuda", [*tests, "-m", "smoke", "tests/jobs/gpu/test_simulated_cuda.py"], 600)
        return
    for name, limit_s in (("augment_on_cuda", 60), ("same_device", 90), ("nccl", 180), ("methods_on_cuda", 300)):
        yield Part(f"test_{name}", [*tests, f"tests/jobs/gpu/test_{name}.py"], limit_s)


def typical_runs(device: str, folder: Path) -> Iterator[Part]:
    """Yield runs with typical settings."""
    compiles, device = device != "simulated", device.replace("simulated", "cuda")

    def run(name: str, *words: str, launcher: tuple[str, ...] = ("-m", "fedmpi"), limit_s: float = 60) -> Part:
        common = ["rounds=2", f"name={name}", f"output={folder / 'runs'}", f"compute.device={device}"]
        return Part(name, [*launcher, "run", "configs/quickstart.yaml", *common, *words], limit_s)

    fedavg = "method={name: fedavg}"
    yield run("bf16", "compute.precision=bf16")
    yield run("lstm", *write_texts(folder), "model={name: char_lstm}", fedavg, "train.epochs=null", "train.steps=10")
    yield run("pack", "compute.clients_per_pass=4", fedavg)
    every = "losses, drift, knowledge, contribution, features, orthogonality, layers"
    yield run("analysis", f"analysis=[{every}]")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "0")
    ranks = (*torchrun, "--nproc-per-node", "3", "benchmarks/gpu/server_without_gpu.py")
    yield run("server_on_cpu", *write_pictures(folder), fedavg, "comm.backend=gloo", launcher=ranks)
    yield Part("profile", ["-W", "ignore", "benchmarks/gpu/rounds.py", "profile", "--device", device], 60)
    if compiles:
        yield run("compile", "compute.compile=true", limit_s=180)


def simulate(part: Part) -> Part:
    """Return the part with the command changed so that its script or module runs on simulated GPUs."""
    server = "benchmarks/gpu/server_without_gpu.py"
    if "pytest" in part.words:  # the tests start processes with a simulation of their own
        return part
    options = ["--gpus", "2", "--server-on-cpu"] if server in part.words else []
    at = part.words.index(server) if options else 2 * (part.words[0] == "-W")
    return part._replace(words=[*part.words[:at], SIMULATION, *options, *part.words[at:]])


def write_texts(folder: Path) -> list[str]:
    """Write four texts of this project as texts of four authors; return the overrides of a config that reads them."""
    (folder / "authors").mkdir()
    for file in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / file, folder / "authors" / f"{Path(file).stem}.txt")
    return [
        f"data={{source: text, root: '{folder}', path: authors, context: 40, partition: {{scheme: site}}}}",
        "task={name: next_symbol}",
    ]


def write_pictures(folder: Path) -> list[str]:
    """Write random images that are resized when read; return the overrides of a config that reads them."""
    import numpy as np

    x = np.random.default_rng(0).integers(0, 256, (400, 3, 40, 36), dtype=np.uint8)
    np.savez(folder / "pictures.npz", x=x, y=np.arange(len(x)) % 10)
    partition = "partition: {scheme: iid, clients: 4}"
    augment = "augment: [{resize: 32}, horizontal_flip]"
    return [f"data={{source: npz, root: '{folder}', path: pictures.npz, {augment}, {partition}}}"]


# ---- required packages ----
def list_requirements(with_tests: bool) -> list[str]:
    """Return the packages that fedmpi, and the tests if wanted, depend on, as named in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()  # Python 3.10 has no reader of TOML
    expected = re.findall(r'"(.*?)"', re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)[1])
    dev = re.findall(r'"(.*?)"', re.search(r"^dev = \[(.*)\]$", text, re.MULTILINE)[1])
    return expected + [each for each in dev if with_tests and each.startswith("pytest")]


def package_name(requirement: str) -> str:
    """Return the name of the package in a requirement."""
    return re.match(r"[\w-]+", requirement)[0]


def find_version(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_missing(expected: list[str]) -> dict[str, str]:
    """Return {requirement: why it is not met}."""
    missing = {}
    for requirement in expected:
        name = package_name(requirement)
        at_least, version = re.search(r">=([\d.]+)", requirement), find_version(name)
        if importlib.util.find_spec(MODULES.get(name, name)) is None:
            missing[requirement] = "is not installed"
        elif at_least and version and parse_version(version) < parse_version(at_least[1]):
            missing[requirement] = f"{version} is installed"
    return missing


def parse_version(version: str) -> list[int]:
    """Return the numbers of a version."""
    return [int(each) for each in re.match(r"[\d.]*\d", version)[0].split(".")]


def describe_missing(missing: dict[str, str]) -> str:
    """Return a message about missing packages, with commands that download them for this Python on another machine."""
    torch, numpy = find_version("torch"), find_version("numpy")
    system = [f"--platform {tag}_{platform.machine()}" for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    python = f"--python-version {sys.version_info.major}.{sys.version_info.minor} --implementation cp"
    download = f"python3 -m pip download --dest wheels --only-binary=:all: {python} {' '.join(system)}"
    # torchvision depends on torch: pip would install a second torch, which would hide the existing one.
    stays = torch and "torch" not in map(package_name, missing)
    vision = [each for each in missing if package_name(each) == "torchvision" and stays]
    others = [each for each in missing if each not in vision] + ["pillow"] * bool(vision)
    if others and numpy and "numpy" not in map(package_name, others):
        others.append(f"numpy=={numpy}")  # keep the installed version, with which this torch works
    lines = [f"{download} {shlex.join(others)}"] * bool(others)
    if vision:
        minor = parse_version(torch)[1] + 15  # torch 2.6 and torchvision 0.21 belong together, and so on
        build = re.fullmatch(r"cpu|cu\d+|rocm[\d.]+", torch.partition("+")[2])
        index = f" --index-url https://download.pytorch.org/whl/{build[0]}" if build else ""
        lines.append(f"{download} --no-deps{index} 'torchvision==0.{minor}.*'")
    if importlib.util.find_spec("pip"):
        install = f"{sys.executable} -m pip install --no-index --no-deps --target packages wheels/*.whl"
    else:
        install = f'for wheel in wheels/*.whl; do {sys.executable} -m zipfile -e "$wheel" packages; done'
    again = shlex.join([sys.executable, *sys.argv])
    return "\n".join(
        [
            f"{sys.executable} (Python {platform.python_version()}) lacks what fedmpi needs:",
            *(f"  {requirement}: {why}" for requirement, why in missing.items()),
            "On a machine with a network, whose Python has pip:",
            *(f"  {line}" for line in lines),
            "Copy the folder wheels to this machine, and here:",
            f"  {install}",
            f'  PYTHONPATH="$PWD/packages${{PYTHONPATH:+:$PYTHONPATH}}" {again}',
        ]
    )


# ---- processes ----
def part_environment() -> dict[str, str]:
    """Return the environment of a part: the caller's, with this fedmpi first on PYTHONPATH."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    defaults = {"OMP_NUM_THREADS": "1", "FEDMPI_SECRET": secrets.token_hex(32)}  # write no file to the home directory
    return defaults | os.environ | {"PYTHONPATH": path}


def run(words: list[str], limit_s: float) -> tuple[int, str, float]:
    """Run Python with these arguments in a new process group; return the exit code, the output and the seconds."""
    mark, began = secrets.token_hex(8), time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a grandchild could keep a pipe open
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=part_environment() | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code, note = process.wait(limit_s), ""
        except subprocess.TimeoutExpired:
            code, note = 124, f"\nnot done after {limit_s:g} s: ended\n"
        finally:
            kill_part(process, mark)
        output.seek(0)
        return code, output.read() + note, time.perf_counter() - began


def kill_part(process: subprocess.Popen, mark: str) -> None:
    """End all processes of a part: its process group, and the ranks, to which torchrun gives groups of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = find_marked_processes(mark)
        if process.poll() is None:
            os.killpg(process.pid, number)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + GRACE_S
        while (process.poll() is None or find_marked_processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)


def find_marked_processes(mark: str) -> list[int]:
    """Return the ids of the processes that have inherited the mark, an environment variable, in any process group."""
    results = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in file.read_bytes().split(b"\0"):
                results.append(int(file.parent.name))
    return results


def describe_gpu() -> dict[str, object]:
    """Return what torch reports about the GPU.

    It is asked in a child process, since it allocates memory on the GPU, and a broken driver may hang.
    """
    code, text, _ = run(["-W", "ignore", "-c", PROBE], PROBE_S)
    lines = text.strip().splitlines() or [""]
    results = (
        {"usable": False, "gpu": f"torch ended with exit code {code}: {lines[-1]}"} if code else json.loads(lines[-1])
    )
    if shutil.which("nvidia-smi"):
        args = ["nvidia-smi", "--query-gpu=driver_version,mig.mode.current,compute_mode", "--format=csv,noheader"]
        with suppress(OSError, subprocess.TimeoutExpired):
            results["driver, MIG, compute mode"] = subprocess.run(
                args, capture_output=True, text=True, timeout=30
            ).stdout.strip()
    return results


# ---- results ----
def save_results(results: dict, path: Path) -> None:
    """Replace the file of results atomically, so that readers never see a part of it."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(path)


def format_results(results: dict) -> str:
    """Return the table of results that is inserted between the markers of docs/gpu.md."""
    head = "; ".join(f"{key} {value}" for key, value in results["machine"].items() if value is not None)
    state = f", {results['seconds']} s" if results["running"] is None else f", broken off in {results['running']}"
    lines = [f"`{results['command']}` on {results['device']}{state}: {head}.", ""]
    lines += ["| part | what | fedmpi | by hand | ratio | |", "| --- | --- | --- | --- | --- | --- |"]
    for part in results["parts"]:
        rows = [row for text in part["lines"] if (row := parse_result(text))]
        last = part["lines"][-1].strip().replace("|", "/") if part["lines"] else "nothing was printed"
        if part["code"]:
            lines.append(f"| {part['part']} | FAILED, exit code {part['code']}: {last} | | | | {part['seconds']} s |")
        elif not rows:
            tests = re.search(r"\d+ (passed|skipped).*", last)
            lines.append(
                f"| {part['part']} | {tests[0].strip('= ') if tests else 'done'} | | | | {part['seconds']} s |"
            )
        for row in rows:
            sides = [f"{row[side][1]:.4g} {row['unit']}" for side in ("ours", "theirs")]
            cells = [row["what"], *sides, str(row["ratio"]), row["note"]]
            lines.append(f"| {part['part']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def replace_between_markers(page: str, text: str) -> str:
    """Return the page with `text` between its markers."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}{text}{END}{rest.split(END)[1]}"


def main() -> None:
    """Run the benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="only these parts; an unknown one lists all")
    parser.add_argument("--quick", action="store_true", help="the list of one minute")
    parser.add_argument("--device", choices=["cpu", "cuda", "simulated"], help="default: cuda where torch can use it")
    parser.add_argument("--to", type=Path, default=RESULTS, metavar="DIR", help="for the JSON file; default build/gpu")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write this JSON file into docs/gpu.md, and end")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(replace_between_markers(PAGE.read_text(), format_results(json.loads(args.page.read_text()))))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as for Ctrl-C, so that the running part is ended, too
    with tempfile.TemporaryDirectory(prefix="fedmpi-gpu-") as folder:
        sys.exit(run_parts(args, parser, Path(folder)))


def run_parts(args: argparse.Namespace, parser: argparse.ArgumentParser, folder: Path) -> int:
    """Run the selected parts; return the exit code."""
    expected = list_requirements(with_tests=not args.quick and (not args.parts or "test_" in "".join(args.parts)))
    missing = find_missing(expected)
    if missing:
        print(describe_missing(missing), file=sys.stderr)
        return 2
    known = describe_gpu()
    device = args.device or ("cuda" if known["usable"] else "cpu")
    if device == "cuda" and not known["usable"]:
        said = known.get("gpu", "torch finds no usable GPU here")
        parser.error(f"--device cuda: {said}; --device cpu shows that the kit works")
    parts = list((typical_runs if args.quick else measures_and_tests)(device, folder))
    parts = [simulate(part) for part in parts] if device == "simulated" else parts
    unknown = [name for name in args.parts if name not in [part.name for part in parts]]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(part.name for part in parts)}")
    parts = [part for part in parts if not args.parts or part.name in args.parts]
    args.to.mkdir(parents=True, exist_ok=True)
    path, began = (
        args.to / f"{time.strftime('%Y%m%d-%H%M%S')}-{device}{'-quick' * args.quick}.json",
        time.perf_counter(),
    )
    about = describe_machine() | {"os": platform.platform()} | {key: known[key] for key in known if key != "usable"}
    command = shlex.join(["python3", "benchmarks/gpu/kit.py", *sys.argv[1:]])
    results = {"command": command, "device": device, "machine": about, "running": None, "seconds": 0, "parts": []}
    print(f"on {device}; results: {path}", flush=True)
    for part in parts:
        results["running"] = part.name
        save_results(results, path)
        print(f"== {part.name}: {shlex.join(part.words)}", flush=True)
        code, text, seconds = run(part.words, part.limit_s)
        print(f"{text}\n{part.name}: {seconds:.0f} s, exit code {code}", flush=True)
        lines = [each for each in text.splitlines() if each.strip()]
        results["parts"].append({"part": part.name, "code": code, "seconds": round(seconds), "lines": lines[-200:]})
        results |= {"running": None, "seconds": round(time.perf_counter() - began)}
        save_results(results, path)
    print(format_results(results))
    return int(any(each["code"] for each in results["parts"]))


if __name__ == "__main__":
    main()
