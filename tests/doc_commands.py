"""Extract the files and commands of README and docs/; tests/unit/test_docs.py checks them, and tests/docs runs them.

A python or yaml block whose first line is a comment with a file name is the content of that file; any other python
block quotes fedmpi, any other yaml block is part of a config. Commands of blocks marked `sh` are run, page by page,
each command once; blocks marked `bash` are for other machines. Commands run in a directory that looks like a checkout
and contains those files. They run unchanged, with these exceptions:

    source .venv/bin/activate   is not run: the tests already run in their environment
    make TARGET                 becomes make --dry-run TARGET: a set-up takes minutes, `make test` would run these tests
    training, measuring         gets rounds=1 (2 if a curve is plotted), and two ranks instead of four or five, unless
                                each rank has a site; a sweep gets softmax regression and two seeds
    data.root=/data             is the folder of the real data; the command is skipped if they are missing
    srun, sbatch                run in the tests' Slurm, and are skipped if there is none
    fedmpi                      has torch imported already (fork_server.py)
    mpirun, torchrun            get by variables the settings of launch/*.sh: root, more ranks than cores, the address
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, clean_env, warm_env

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNING = ("README", "docs/start", "docs/runs", "docs/researcher", "docs/cluster", "docs/hpc", "docs/slurm")
RESEARCH = ("docs/filter_decomposition", "docs/analysis", "docs/own", "docs/write_a_method", "docs/hooks")
DATA = Path(os.environ.get("FEDMPI_DATA") or ROOT.parent / "shared" / "data")
BATCH = ("srun", "sbatch")
LAUNCHERS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
    "PET_LOCAL_ADDR": "127.0.0.1",  # torchrun
}


def blocks(page):
    """Return (language, text) of each code block of a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def file_name(language, text):
    """Return the file name in a block's first line; None if the block is not a file."""
    named = re.match(r"# (\w+\.(?:py|yaml))\n", text)
    return named[1] if named and language in ("python", "yaml") else None


def unique(lines):
    """Return the commands without repetitions, in the order of their first occurrences."""
    first = {}
    for line in lines:
        first.setdefault(tuple(shlex.split(line, comments=True)), line)
    return list(first.values())


def commands(pages):
    """Return the command lines of all blocks that are marked `sh`."""
    texts = [text for page in pages for language, text in blocks(ROOT / f"{page}.md") if language == "sh"]
    return unique(line for text in texts for line in text.splitlines())


RUN = [block for page in (*RUNNING, "docs/consortium", *RESEARCH) for block in blocks(ROOT / f"{page}.md")]
FILES = {name: text for language, text in RUN if (name := file_name(language, text))}
RUNNING_COMMANDS = commands((*RUNNING, "docs/consortium"))
RESEARCH_COMMANDS = [line for line in commands(RESEARCH) if line not in RUNNING_COMMANDS]
COMMANDS = RUNNING_COMMANDS + RESEARCH_COMMANDS
COMPARED = [word for line in COMMANDS if line.startswith("fedmpi analyse communication") for word in line.split()[3:]]
SITES = {"configs/heart_disease.yaml", *(name for name, text in FILES.items() if "silos:" in text)}  # a rank a site


def shortened(line, rounds="rounds=1"):
    """Return the words of a command, changed so that it trains as little as possible."""
    command = shlex.split(line, comments=True)
    trains = "run" in command or command[0].startswith("launch/") or command[0] == "sbatch"
    if command[:2] in (["fedmpi", "sweep"], ["fedmpi", "table"]):
        return [*command, rounds, "model={name: logistic}", "include={seed: [0, 1]}"]
    if command[:3] == ["fedmpi", "analyse", "variance"]:
        return [*command, rounds]
    if any(word.endswith("/trajectory.py") for word in command):
        return [*command, rounds, *["--first", "0", "--last", "1", "--grid", "3"]]
    if not trains or "checkpoint.resume=auto" in command:  # it resumes a run of two rounds
        return command
    if set(command) & {f"name={Path(run).name}" for run in COMPARED}:
        rounds = "rounds=2"
    if set(command) & SITES:
        return [*command, rounds]
    return [re.sub(r"^(--ntasks=|--cpus-per-task=|--array=0-|)[45]$", r"\g<1>2", word) for word in command] + [rounds]


def run(command, checkout, **variables):
    """Run a command in a checkout and return its output; the test fails if the command fails."""
    env = warm_env(clean_env(**LAUNCHERS) | variables)
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_command(line, checkout):
    """Run a command of a page, shortened; skip it where this machine lacks what it needs."""
    command = shortened(line)
    if command[0] == "make":
        command.insert(1, "--dry-run")
    if "data.root=/data" in command:
        if not (DATA / "heart_disease").is_dir():
            pytest.skip(f"{DATA / 'heart_disease'} is not there")
        command[command.index("data.root=/data")] = f"data.root={DATA}"
    for program in ("make", "mpirun"):
        if program in command[0] and not shutil.which(program, path=clean_env()["PATH"]):
            pytest.skip(f"no {program} on PATH")
    output = run(command, checkout)
    if "rounds=1" in command and command[1] not in ("sweep", "table", "analyse"):
        assert "round 1/1" in output
        assert (checkout / output.rpartition("run directory: ")[2].splitlines()[0] / "summary.json").is_file()
