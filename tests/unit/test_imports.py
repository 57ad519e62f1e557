"""The house: rooms import downwards only, as docs/architecture.md draws them; importing does nothing."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
from helpers import ROOT, clean_env

PACKAGE = ROOT / "fedmpi"
MOST_ENTRIES, MOST_LINES = 18, 300

OUTSIDE = {  # packages that one place shields the others from
    "torchvision": {"common.torchvision_compat"},
    "mpi4py": {"comm.backends.mpi"},
    "typer": {
        "cli.analyses",
        "cli.compare",
        "cli.data",
        "cli.ending",
        "cli.main",
        "cli.plan",
        "cli.reference",
        "cli.report",
        "cli.results",
        "cli.runs",
        "cli.shared",
        "cli.status",
        "cli.sweeps",
    },
    "mlflow": {"runtime.record.tracking.adapters"},
    "trackio": {"runtime.record.tracking.adapters"},
    "wandb": {"runtime.record.tracking.adapters"},
    "rich": {"runtime.record.progress", "runtime.sweeping.view"},
    "yaml": {"config.yaml_source"},
    "sklearn": {"data.sources.tables.flamby_heart"},  # besides, the digits are read from its file
    "pyarrow": {"data.sources.tables.arrow"},
    "scipy": {"methods._prototypes", "data.sources.pictures.svhn", "analysis.sweep_table"},
    "safetensors": {
        "runtime.record.durable",
        "runtime.record.run_dir",
        "runtime.record.saved_model",
        "runtime.resuming.initial",
    },
    "matplotlib": {"analysis.figures", "analysis.pages.drawing.raster"},
    "PIL": {"data.sources.pictures.reading", "data.sources.tables.arrow"},
}
METHOD_FILES_MAY = {"torch", "scipy"}  # besides the standard library; scipy in _prototypes alone


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts[1:]) or "fedmpi"


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path):
    """All that a file imports, wherever in it: dotted names, with `from a import b` as a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            yield from (word.value for word in node.args if isinstance(word, ast.Constant))


@lru_cache
def edges(module):
    """(modules of ours, outside packages) that a module imports."""
    ours, outside = set(), set()
    for dotted in imports(MODULES[module]):
        first, *rest = dotted.split(".")
        if first != "fedmpi":
            outside.add(first)
            continue
        while rest and ".".join(rest) not in MODULES:  # a name inside a module
            rest.pop()
        ours.add(".".join(rest) or "fedmpi")
    return ours - {module}, outside


def room(module):
    """The package, or the file beside the packages, that a module belongs to."""
    return module.split(".")[0]


@lru_cache
def picture():
    """The arrows of the first picture of docs/architecture.md: {room: rooms that it points to}."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    arrows = re.findall(r"^ +(\w+) --> (\w+)$", text.split("```mermaid")[1].split("```")[0], re.MULTILINE)
    below = {name: set() for arrow in arrows for name in arrow}
    for upper, lower in arrows:
        below[upper].add(lower)
    return below


def reachable(start, below):
    seen, todo = set(), [start]
    while todo:
        new = below.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def test_every_room_is_in_the_picture():
    found = {room(module) for module in MODULES} - {"fedmpi", "__main__"}
    assert set(picture()) == found
    described = re.findall(r"^\| `(\w+)", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert found <= set(described), "each room has a line in the table of docs/architecture.md"


def test_the_picture_has_no_circle_and_no_idle_arrow():
    below = picture()
    assert all(name not in reachable(name, below) for name in below)
    used = {(room(module), room(target)) for module in MODULES for target in edges(module)[0]}
    idle = {(upper, lower) for upper, lowers in below.items() for lower in lowers} - used
    assert not idle, f"drawn, but nobody imports so: {sorted(idle)}"


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downwards(module):
    """Imports inside functions count too. `fedmpi` itself only names its parts; __main__ is the command line."""
    home = room(module)
    may = {"fedmpi": {"common"}, "__main__": {"cli"}}.get(home) or reachable(home, picture()) | {home, "common"}
    ours, outside = edges(module)
    wrong = {target for target in ours if room(target) not in may}
    if home == "methods":  # a method stands alone; what several share is in files whose names begin with _
        wrong |= {target for target in ours if room(target) == "methods" and not target.startswith("methods._")}
        assert not outside - METHOD_FILES_MAY - sys.stdlib_module_names, f"{module} imports {outside}"
    assert not wrong, f"{module} imports {sorted(wrong)}"
    for package, homes in OUTSIDE.items():
        assert package not in outside or module in homes, f"{module} imports {package}"


def test_no_two_modules_import_each_other():
    """Neither directly nor by way of others, inside functions or for type checkers included."""
    below = {module: edges(module)[0] - {"fedmpi"} for module in MODULES}
    circles = [module for module in MODULES if module in reachable(module, below)]
    assert not circles


def test_the_house_stays_small():
    for place in {PACKAGE, *(path.parent for path in MODULES.values())} - {PACKAGE / "methods"}:
        entries = [p.name for p in place.iterdir() if p.name not in ("__init__.py", "__pycache__")]
        assert len(entries) <= MOST_ENTRIES, (place, sorted(entries))
    long = {str(p): n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > MOST_LINES}
    assert not long


def test_no_pickles():
    """Neither on the wire nor on disk: no such module, no torch.save or torch.load, no arrays of objects, no
    collectives of torch.distributed that take objects."""
    for module, path in MODULES.items():
        assert not edges(module)[1] & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}, (
            module
        )
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = getattr(node.value, "id", "")
                assert (owner, node.attr) not in {("torch", "save"), ("torch", "load")}, f"{module}:{node.lineno}"
                assert not (owner == "dist" and "_object" in node.attr), f"{module}:{node.lineno}"
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "load" and _is_numpy(node.func):
                words = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
                assert words.get("allow_pickle") is False, f"{module}:{node.lineno}: np.load without allow_pickle=False"


def _is_numpy(function):
    return getattr(function.value, "id", "") in ("np", "numpy")


@pytest.mark.parametrize("path", sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("docs/**/*.py")]), ids=str)
def test_scripts_name_what_there_is(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedmpi":
            home = importlib.import_module(node.module)
            missing = {name.name for name in node.names if not hasattr(home, name.name)}
            assert missing <= {name.removeprefix(f"{node.module}.") for name in submodules(home)}, missing


def submodules(package):
    return {found.name for found in pkgutil.iter_modules(getattr(package, "__path__", []), f"{package.__name__}.")}


EFFECTS = """
import os, random, signal, sys, threading
import numpy, rich.console, torch  # what importing rich does (it draws a random number) is not ours

def state():
    return {
        "torch random numbers": torch.get_rng_state().tolist(),
        "numpy random numbers": str(numpy.random.get_state()),
        "random numbers": random.getstate(),
        "threads of torch": torch.get_num_threads(),
        "type": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "signals": [signal.getsignal(number) for number in (2, 10, 12, 15)],
        "environment": {k: v for k, v in os.environ.items() if not k.startswith("TORCH")},  # torchvision names a cache
        "search path": list(sys.path),
        "working directory": (os.getcwd(), os.listdir()),
        "threads": threading.active_count(),
        "process group": torch.distributed.is_initialized(),
    }

before = state()
for name in sys.argv[1:]:
    __import__(name)
after = state()
print(*[name for name in before if before[name] != after[name]], sep=", ")
print(*[name for name in ("mpi4py",) if name in sys.modules], sep=", ")
"""


def test_importing_everything_changes_nothing(tmp_path):
    names = ["fedmpi" if module == "fedmpi" else f"fedmpi.{module}" for module in MODULES]
    command = [sys.executable, "-c", EFFECTS, *names]
    done = subprocess.run(command, cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\n\n"
    assert done.stderr == ""
    assert not list(Path(tmp_path).iterdir())


def test_mistakes_are_found_before_torch_is_imported():
    """It takes every rank a second or more; a config, a launcher and `fedmpi list` need none."""
    program = "import sys, fedmpi, fedmpi.cli, fedmpi.config, fedmpi.runtime.catalog\n"
    program += "import fedmpi.common.options, fedmpi.comm.launchers.launcher_env\n"
    program += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=clean_env())
    assert done.stdout == "False\n", done.stderr
