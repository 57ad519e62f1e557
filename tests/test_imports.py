"""Imports run one way, each outside package has its place, and importing does nothing."""

import ast
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
from helpers import ROOT, clean_env

PACKAGE = ROOT / "fedmpi"

# Who may import whom, from the command line down to the equations. A name stands for a module, or for a package with
# all that is in it. Everybody may import LEAVES, and a package its own parts (files in methods/ not each other).
# Imports inside functions and for type checkers count.
LEAVES = "errors seeds plugins options wording"
ALONE = "layout slots rules harmony prototypes cohort schedule server_optim tasks vision listing sections "
ALONE += "yaml_lines record console"
ALLOWED = {
    "__main__": "cli",
    "cli": "launch config listing comm.job analysis fedmpi",
    "fedmpi": "api data.dataset method tasks",  # fedmpi/__init__.py: the version, and names looked up when first used
    "api": "launch build config",
    "analysis": "launch api build build_data narrate federation evaluate local trainer wire layout cohort rules comm "
    "record settings models.atoms",
    "launch": "narrate build build_data federation comm data.federated digest environment record console summary "
    "signals config",
    "narrate": "build federation comm memory record console wire",
    "build": "build_data federation trainer wire memory schedule server_optim server_rules methods method layout "
    "comm data models tasks settings",
    "build_data": "cohort comm data settings",
    "federation": "evaluate clients local trainer wire cohort server_optim comm method slots",
    "evaluate": "clients trainer data",
    "clients": "local trainer cohort comm",
    "local": "trainer wire method slots layout rules data models.net",
    "trainer": "wire method layout data models.net",
    "memory": "wire",
    "digest": "comm data",
    "wire": "method slots layout",
    "methods": "method server_rules rules harmony prototypes slots layout models",
    "server_rules": "method rules robust harmony slots",
    "robust": "rules",
    "method": "views slots layout",
    "views": "slots layout rules",
    "data": "vision",
    "models": "vision layout",
    "config": "settings sections complaints yaml_lines",
    "complaints": "settings yaml_lines",
    "settings": "sections",
    "comm": "",
    "environment": "fedmpi",
    "signals": "",
    "summary": "",
    **dict.fromkeys((*ALONE.split(), *LEAVES.split()), ""),
}
OUTSIDE = {  # packages that one place shields the others from
    "torchvision": {"vision"},
    "mpi4py": {"comm.mpi"},
    "typer": {"cli"},
    "rich": {"console"},
    "yaml": {"yaml_lines", "record"},
    "sklearn": {"tasks"},
    "scipy": {"prototypes"},
    "safetensors": {"api", "record"},
    "matplotlib": {"analysis.figures"},
    "PIL": {"data.sources.image_folder"},
}
METHOD_FILES_MAY = {"torch"}  # besides the standard library


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


def row(module):
    """The name under which a module stands in the table: its own, else its package's."""
    parts = module.split(".")
    return next((name for i in range(len(parts), 0, -1) if (name := ".".join(parts[:i])) in ALLOWED), None)


def within(module, names):
    return any(module == name or module.startswith(f"{name}.") for name in names.split())


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    place = row(module)
    assert place is not None, f"{module} has no row in ALLOWED: say which layer it belongs to"
    own_package = module.split(".")[0]
    ours, outside = edges(module)
    wrong = {
        target
        for target in ours
        if not within(target, f"{ALLOWED[place]} {LEAVES}")
        and not (own_package == target.split(".")[0] and (PACKAGE / own_package).is_dir() and own_package != "methods")
    }
    assert not wrong, f"{module} imports {sorted(wrong)}"
    for package, homes in OUTSIDE.items():
        assert package not in outside or module in homes, f"{module} imports {package}"
    if own_package == "methods":
        assert not outside - METHOD_FILES_MAY - sys.stdlib_module_names, f"{module} imports {outside}"


def test_the_table_has_no_circle_and_no_idle_row():
    known = {row(module) for module in MODULES}
    assert set(ALLOWED) == known
    below = {place: {row(name) for name in names.split()} - {place} for place, names in ALLOWED.items()}
    below["environment"].discard("fedmpi")  # both read the version only
    below["cli"].discard("fedmpi")
    while below:
        bottom = {place for place, names in below.items() if not names}
        assert bottom, f"a circle among {sorted(below)}"
        below = {place: names - bottom for place, names in below.items() if place not in bottom}


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
    program = "import sys, fedmpi, fedmpi.cli, fedmpi.config, fedmpi.listing, fedmpi.options, fedmpi.comm.job\n"
    program += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=clean_env())
    assert done.stdout == "False\n", done.stderr
