"""The command as a separate process: its imports, its exit code, and closed streams."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT, clean_env

from fedmpi.runtime import introspection


@pytest.mark.parametrize("train", ["train.optim=sgd", "train={optim: adamw, momentum: null, persist_optimizer: true}"])
def test_a_run_imports_nothing_that_it_does_not_need(tmp_path, train):
    """The run writes no report, which would need matplotlib."""
    words = ["rounds=1", "report=false", "checkpoint.every=1", f"output={tmp_path}", train]
    program = f"""
import sys
from fedmpi import run
run({str(ROOT / "configs/quickstart.yaml")!r}, {words})
print(*sorted({{"torch._dynamo", "sklearn", "scipy", "matplotlib", "torchvision", "rich"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], env=clean_env(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""


GOOD = """\
data: {source: digits, partition: {scheme: dirichlet, clients: 4, alpha: 0.3}}
model: {name: mlp, widths: [20]}
method: {name: fedld, margin: 0.03}
train:
  epochs: 2
  lr: 1e-3
"""


def write(folder, text, name="run.yaml"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(GOOD)
    return file


LIGHT = """
import json, sys
from fedmpi import cli

for words, expected in json.loads(sys.argv[1]):
    sys.argv = ["fedmpi", *words]
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    heavy = {"torch", "numpy", "scipy", "matplotlib", "rich.progress", "mpi4py", "safetensors"} & set(sys.modules)
    if code != expected or heavy:
        sys.exit(f"{words}: exit code {code}, {sorted(heavy)} imported")
"""


def test_commands_that_need_no_torch_do_not_import_it(path, tmp_path):
    """Importing torch takes each rank at least a second. Covers commands that only print, and all kinds of mistakes."""
    commands = ["run", "resume", "replay", "validate", "doctor", "list"]
    analyses = ["variance", "virtual", "communication", "curvature"]
    fine = [
        [],
        ["--help"],
        ["--version"],
        ["analyse"],
        ["list"],
        *(["list", kind] for kind in introspection.KIND_MODULES),
    ]
    fine += [["show", "train.schedule"], ["show", "data"]]
    (tmp_path / "done").mkdir()
    for name, text in (
        ("identity.json", '{"rounds": "1", "name": "x"}'),
        ("summary.json", '{"exit_reason": "finished"}'),
    ):
        (tmp_path / "done" / name).write_text(text)
    fine += [["status", str(tmp_path / "done")]]
    fine += [[name, "--help"] for name in commands] + [["analyse", name, "--help"] for name in analyses]
    config = str(path)
    wrong = [
        ["lsit"],
        ["list", "all"],
        ["show", "train.x"],
        ["run"],
        ["run", f"{config}.none"],
        ["run", config, "seed=x"],
    ]
    wrong += [["validate", config, "sede=1"], ["validate", config, "compute.threads=1000000"]]
    wrong += [["resume", str(tmp_path)], ["replay", str(tmp_path)], ["analyse", "virtual", str(tmp_path)]]
    wrong += [["analyse", "variance", config, "train.lr=x"], ["analyse", "communication"]]
    words = json.dumps([(each, 0) for each in fine] + [(each, 2) for each in wrong])
    done = subprocess.run([sys.executable, "-c", LIGHT, words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr.splitlines()[-1:]
    assert done.stderr.count("fedmpi: error: ") == len(wrong)
    assert "Traceback" not in done.stderr


@pytest.mark.smoke
def test_python_m_fedmpi_runs_the_command(path):
    command = [sys.executable, "-m", "fedmpi", "run", str(path), "seed=x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("fedmpi: error: command line: seed: ")


def test_a_command_leaves_no_global_state():
    program = (
        "import sys, matplotlib\nfrom fedmpi.analysis import charts\n"
        "def state(): return {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}\n"
        "before = state()\n"  # not the backend: to ask for it is to choose it
        "charts.render_svg(charts.LineChart([charts.Series('a', [0, 1], [1.0, 2.0])], 'x', 'y'), 'a', 'b')\n"
        "print('matplotlib.pyplot' in sys.modules, state() == before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stdout == "False True\n", done.stderr
