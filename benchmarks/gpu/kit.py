"""All that a machine with one GPU can tell, in ten minutes and without a network.   python benchmarks/gpu/kit.py

The tests of tests/jobs/gpu (the communication battery over NCCL and gloo, every method alone and over ranks that share
the GPU, the same bits twice and after going on), then seconds a round next to loops written by hand, and memory. On a
GPU it writes benchmarks/results/gpu.json and the table of docs/gpu.md; --device cpu does the same with small shares of
the tasks, to see that it works, and writes neither. What fails is said, and the rest goes on; exit code 1 then.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from measure import machine, read  # noqa: E402

PAGE, FILE = ROOT / "docs" / "gpu.md", ROOT / "benchmarks" / "results" / "gpu.json"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
LIMITS_S = {"tests": 360}  # of a part; 100 of any other


def parts(device):
    """(what, program and arguments): on a CPU a small share of it."""
    small = device == "cpu"
    rounds = ["benchmarks/gpu/rounds.py", "--device", device, *(["--share", "20", "--rounds", "2"] if small else [])]
    vectors = ["benchmarks/vectors.py", "--device", device, *(["--d", "100000", "--repeats", "3"] if small else [])]
    yield "tests", ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/jobs/gpu"]
    yield "W1, CIFAR-10, packed", rounds
    yield "W2", vectors


def run(words, limit_s):
    """(exit code, what it printed, seconds)"""
    began = time.perf_counter()
    command = [sys.executable, "-W", "ignore", *words]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
        )
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or ""  # bytes, though text was asked for
        code, text = (
            124,
            f"{said.decode(errors='replace') if isinstance(said, bytes) else said}\nnot done after {limit_s} s",
        )
    return code, text, time.perf_counter() - began


def about(device):
    found = machine() | {"os": platform.platform()}
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": f"{card.name}, {card.total_memory / 2**30:.0f} GiB",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def table(found):
    """The lines between the markers of docs/gpu.md."""
    head = "; ".join(f"{key} {value}" for key, value in found["machine"].items() if value is not None)
    lines = [f"`{found['command']}`, {found['seconds']:.0f} s: {head}.", ""]
    lines += ["| part | what | fedmpi | by hand | ratio | |", "| --- | --- | --- | --- | --- | --- |"]
    for part in found["parts"]:
        rows = [row for text in part["lines"] if (row := read(text))]
        last = part["lines"][-1] if part["lines"] else "nothing was printed"
        if not rows or part["code"]:
            lines.append(f"| {part['part']} | {'FAILED: ' if part['code'] else ''}{last} | | | | |")
        for row in rows:
            sides = [f"{row[side][1]:.4g} {row['unit']}" for side in ("ours", "theirs")]
            lines.append(
                f"| {part['part']} | {row['what']} | {sides[0]} | {sides[1]} | {row['ratio']} | {row['note']} |"
            )
    return "\n".join([*lines, ""])


def fill(page, text):
    """The page with `text` between its markers."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}{text}{END}{rest.split(END)[1]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--without-tests", action="store_true", help="only the figures")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no usable GPU here; --device cpu shows that the kit works")
    print(f"on the {asked.device}", flush=True)
    began, found = time.perf_counter(), {"command": "make gpu", "machine": about(asked.device), "parts": []}
    for part, words in parts(asked.device):
        if part == "tests" and asked.without_tests:
            continue
        print(f"== {part}: {' '.join(words)}", flush=True)
        code, text, seconds = run(words, LIMITS_S.get(part, 100))
        print(f"{text}\n{part}: {seconds:.0f} s, exit code {code}", flush=True)
        lines = [each for each in text.splitlines() if each.strip()]
        found["parts"].append({"part": part, "code": code, "seconds": round(seconds), "lines": lines[-200:]})
    found["seconds"] = round(time.perf_counter() - began)
    print(table(found))
    if asked.device == "cuda":
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(fill(PAGE.read_text(), table(found)))
        print(f"written: {FILE.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")
    sys.exit(any(each["code"] for each in found["parts"]))


if __name__ == "__main__":
    main()
