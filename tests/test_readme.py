"""The README keeps its word: each file in it is written, each command in it is run, each quotation is compared.

A python or yaml block whose first line is a comment with a file name is that file; any other python block quotes
fedmpi. Commands run in a directory that looks like a checkout and holds those files. They run as they stand, but for:

    source .venv/bin/activate   nothing: the environment of the tests is the one
    make TARGET                 make --dry-run TARGET: setting up takes minutes, and `make test` would come back here
    what trains                 with rounds=1 (2 where its curve is asked for), and two ranks in place of four or five,
                                unless each has a site
    data.root=/data             where the real data are; skipped where they are not
    srun, sbatch                in the Slurm of the tests, skipped without
    fedmpi                      has imported torch (fork_server.py)
    mpirun                      told by variables what launch/mpirun.sh tells it: root, more ranks than cores
"""

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from helpers import ROOT, clean_env, warm

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)  # (language, text)
DATA = Path(os.environ.get("FEDMPI_DATA") or ROOT.parent / "shared" / "data")
MPIRUN = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
}


def file_name(language, text):
    """Of a block that is a file, else None."""
    named = re.match(r"# (\w+\.(?:py|yaml))\n", text)
    return named[1] if named and language in ("python", "yaml") else None


FILES = {name: text for language, text in BLOCKS if (name := file_name(language, text))}
QUOTED = [text for language, text in BLOCKS if language == "python" and not file_name(language, text)]
LINES = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
BATCH = ("srun", "sbatch")
COMPARED = [word for line in LINES if line.startswith("fedmpi analyse communication") for word in line.split()[3:]]


def words(line, rounds="rounds=1"):
    """The command of a line, shortened."""
    command = shlex.split(line, comments=True)
    trains = "run" in command or command[0].startswith("launch/") or command[0] == "sbatch"
    if not trains:
        return command
    if set(command) & {f"name={Path(run).name}" for run in COMPARED}:
        rounds = "rounds=2"
    if "configs/heart_disease.yaml" in command:  # a rank a site
        return [*command, rounds]
    return [re.sub(r"^(--ntasks=|--cpus-per-task=|)[45]$", r"\g<1>2", word) for word in command] + [rounds]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What a reader has after typing the README's files."""
    place = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "runs", "data", *FILES):
            (place / path.name).symlink_to(path)
    for name, text in FILES.items():
        (place / name).write_text(text, encoding="utf-8")
    return place


def run(command, checkout, **variables):
    done = subprocess.run(
        command, cwd=checkout, env=warm(clean_env(**MPIRUN) | variables), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_readme_has_what_these_tests_look_for():
    assert {language for language, _ in BLOCKS} == {"sh", "text", "yaml", "python"}
    assert set(FILES) == {"my.yaml", "notebook.py", "mine.py", "mine.yaml"}
    assert len(QUOTED) == 1
    assert {line.split()[0] for line in LINES} >= {"make", "fedmpi", "mpirun", "torchrun", *BATCH}
    assert words("mpirun -n 5 fedmpi run a.yaml  # why") == ["mpirun", "-n", "2", "fedmpi", "run", "a.yaml", "rounds=1"]


@pytest.mark.parametrize("line", [line for line in LINES if line.split()[0] not in ("source", *BATCH)])
def test_command(checkout, line):
    command = words(line)
    if command[0] == "make":
        command.insert(1, "--dry-run")
    if "data.root=/data" in command:
        if not (DATA / "heart_disease").is_dir():
            pytest.skip(f"{DATA / 'heart_disease'} is not there")
        command[command.index("data.root=/data")] = f"data.root={DATA}"
    if "mpirun" in command[0] and not shutil.which("mpirun", path=clean_env()["PATH"]):
        pytest.skip("no mpirun on PATH")
    said = run(command, checkout)
    if "rounds=1" in command:
        assert "round 1/1" in said
        assert (checkout / said.rpartition("run directory: ")[2].strip() / "summary.json").is_file()


@pytest.mark.cluster
@pytest.mark.parametrize("line", [line for line in LINES if line.split()[0] in BATCH])
def test_slurm_command(checkout, slurm_env, line):
    program, *arguments = words(line)
    if program == "srun":
        assert "round 1/1" in run([program, *arguments], checkout, **slurm_env)
        return
    job = run(["sbatch", "--parsable", "--output=%j.log", *arguments], checkout, **slurm_env).strip()
    state = "PENDING"
    while state in ("PENDING", "RUNNING", "COMPLETING"):  # sbatch --wait would look every ten seconds only
        time.sleep(0.2)
        state = re.search(r"JobState=(\w+)", run(["scontrol", "show", "job", job], checkout, **slurm_env))[1]
    log = (checkout / f"{job}.log").read_text()
    assert state == "COMPLETED", log
    assert "round 1/1" in log


@pytest.mark.parametrize("text", QUOTED)
def test_quotation(text):
    assert any(text in path.read_text(encoding="utf-8") for path in (ROOT / "fedmpi").rglob("*.py"))


def test_what_make_demo_suggests_is_in_the_readme():
    hints = re.findall(r"^\t +'  (.*?)(?: {3}.*)?'", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert len(hints) == 4
    assert set(hints) <= set(LINES)


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
