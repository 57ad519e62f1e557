"""README and the pages keep their word: each file in them is written, each command in them is run, each quotation is
compared; what cannot be run here is checked as far as it can be.

A python or yaml block whose first line is a comment with a file name is that file; any other python block quotes
fedmpi, any other yaml block is part of a config. A block marked `sh` is run, README's first and then page by page, each
command once; one marked `bash` is for machines that are not here. Commands run in a directory that looks like a
checkout and holds those files. They run as they stand, but for:

    source .venv/bin/activate   nothing: the environment of the tests is the one
    make TARGET                 make --dry-run TARGET: setting up takes minutes, and `make test` would come back here
    what trains, or measures    with rounds=1 (2 where its curve is asked for), and two ranks in place of four or five,
                                unless each has a site; a sweep with softmax regression and two seeds
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

from fedmpi import config
from fedmpi.cli import app

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
RUN = [
    ROOT / "README.md",
    *(
        ROOT / f"docs/{name}.md"
        for name in (
            "start",
            "runs",
            "researcher",
            "cluster",
            "hpc",
            "slurm",
            "consortium",
            "filter_decomposition",
            "analysis",
            "own",
            "write_a_method",
            "hooks",
        )
    ),
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for page in RUN for block in BLOCK.findall(page.read_text(encoding="utf-8"))]  # (language, text)
EVERYWHERE = [(page, *block) for page in PAGES for block in BLOCK.findall(page.read_text(encoding="utf-8"))]
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


def once(lines):
    """Each command in the order in which it first stands, as it stands there."""
    first = {}
    for line in lines:
        first.setdefault(tuple(shlex.split(line, comments=True)), line)
    return list(first.values())


FILES = {name: text for language, text in BLOCKS if (name := file_name(language, text))}
QUOTED = [text for language, text in BLOCKS if language == "python" and not file_name(language, text)]
LINES = once([line for language, text in BLOCKS if language == "sh" for line in text.splitlines()])
PARTS = [
    pytest.param(text, id=f"{page.stem}-{k}")
    for k, (page, language, text) in enumerate(EVERYWHERE)
    if language == "yaml" and not file_name(language, text)
]
ELSEWHERE = [
    pytest.param(text, id=f"{page.stem}-{k}")
    for k, (page, language, text) in enumerate(EVERYWHERE)
    if language == "bash"
]
BATCH = ("srun", "sbatch")
COMPARED = [word for line in LINES if line.startswith("fedmpi analyse communication") for word in line.split()[3:]]
SITES = {"configs/heart_disease.yaml", *(name for name, text in FILES.items() if "silos:" in text)}  # a rank a site


def words(line, rounds="rounds=1"):
    """The command of a line, shortened."""
    command = shlex.split(line, comments=True)
    trains = "run" in command or command[0].startswith("launch/") or command[0] == "sbatch"
    if command[:2] in (["fedmpi", "sweep"], ["fedmpi", "table"]):
        return [*command, rounds, "model={name: logistic}", "only={seed: [0, 1]}"]
    if command[:3] == ["fedmpi", "analyse", "variance"]:
        return [*command, rounds]
    if command[:3] == ["fedmpi", "analyse", "trajectory"]:
        return [*command, rounds, *["--first", "0", "--last", "1", "--grid", "3", "--samples", "50"]]
    if not trains or "checkpoint.resume=auto" in command:  # it goes on with a run of two rounds
        return command
    if set(command) & {f"name={Path(run).name}" for run in COMPARED}:
        rounds = "rounds=2"
    if set(command) & SITES:
        return [*command, rounds]
    return [re.sub(r"^(--ntasks=|--cpus-per-task=|--array=0-|)[45]$", r"\g<1>2", word) for word in command] + [rounds]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What a reader has after typing the files."""
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


def test_the_pages_have_what_these_tests_look_for():
    assert {language for language, _ in BLOCKS} == {"sh", "bash", "text", "yaml", "python"}
    assert set(FILES) == {
        *("my.yaml", "sweep.yaml", "notebook.py", "mine.py", "mine.yaml", "study.yaml", "make_sites.py", "about.yaml"),
        *("pull.py", "agree.py", "hyper.py", "read_state.py", "compare.yaml", "features.yaml"),
    }
    assert sum(bool(file_name(*block)) for block in BLOCKS) == len(FILES), "a file stands in one place"
    assert len(QUOTED) == 1
    assert {"configs/heart_disease.yaml", "study.yaml"} == SITES
    assert {line.split()[0] for line in LINES} >= {"make", "fedmpi", "mpirun", "torchrun", *BATCH}
    assert words("mpirun -n 5 fedmpi run a.yaml  # why") == ["mpirun", "-n", "2", "fedmpi", "run", "a.yaml", "rounds=1"]
    assert once(["a b", "c  # why", "a  b # again"]) == ["a b", "c  # why"]


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
    if "rounds=1" in command and command[1] not in ("sweep", "table", "analyse"):
        assert "round 1/1" in said
        assert (checkout / said.rpartition("run directory: ")[2].splitlines()[0] / "summary.json").is_file()


@pytest.mark.cluster
@pytest.mark.parametrize("line", [line for line in LINES if line.split()[0] in BATCH])
def test_slurm_command(checkout, slurm_env, line):
    program, *arguments = words(line)
    if program == "srun":
        said = run([program, *arguments], checkout, **slurm_env)
        assert ("round 1/1" if "run" in arguments else "started") in said
        return
    job = run(["sbatch", "--parsable", "--output=%j.log", *arguments], checkout, **slurm_env).strip()
    states = {"PENDING"}
    while states & {"PENDING", "RUNNING", "COMPLETING"}:  # sbatch --wait would look every ten seconds only
        time.sleep(0.2)
        states = {*re.findall(r"JobState=(\w+)", run(["scontrol", "show", "job", job], checkout, **slurm_env))}
    logs = [path.read_text() for path in checkout.glob(f"*{job}*.log")]
    assert states == {"COMPLETED"}, logs
    assert len(logs) == (3 if any(word.startswith("--array") for word in arguments) else 1)
    assert all("round 1/1" in log for log in logs)


@pytest.mark.parametrize("text", ELSEWHERE)
def test_what_cannot_be_run_here_is_written_right(text):
    """It is bash, and what it names of fedmpi is there."""
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert not done.stderr
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups}
    assert set(re.findall(r"(?<!-n )\bfedmpi ([a-z]+)", text)) <= commands
    for path in re.findall(r"(?<![\w/$}.])(?:configs|launch|slurm|docs|benchmarks)/[\w./-]+", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("text", PARTS)
def test_part_of_a_config(tmp_path, text):
    path = tmp_path / "whole.yaml"
    (tmp_path / "mine.py").write_text(
        "class Watch:\n    def __init__(self, every=1): ...\n    def round(self, row): ...\n"
    )
    path.write_text(f"base: [{ROOT / 'configs/quickstart.yaml'}]\n{text}", encoding="utf-8")
    config.load(path)


@pytest.mark.parametrize("text", QUOTED)
def test_quotation(text):
    assert any(text in path.read_text(encoding="utf-8") for path in (ROOT / "fedmpi").rglob("*.py"))


def test_what_make_demo_suggests_is_told():
    hints = re.findall(r"^\t +'  (.*?)(?: {3}.*)?'", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert len(hints) == 4
    assert set(hints) <= {line.partition("  #")[0].strip() for line in LINES} | {"source .venv/bin/activate"}


def anchors(page):
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^) ]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_stands_in_the_contents():
    contents = re.findall(r"^\w+$", (ROOT / "docs/index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted([*contents, "index"]) == sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


def test_the_site_is_made_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="`make docs` installs it")
    command = ["sphinx-build", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()
