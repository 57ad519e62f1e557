"""Packages only import packages of lower layers (docs/architecture.md), and forbidden modules are not used."""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from functools import lru_cache
from importlib.metadata import version

from helpers import ROOT

import fedmpi
from fedmpi.engine.federation import Federation

PACKAGE = ROOT / "fedmpi"
MOST_LINES = 420

OUTSIDE = {  # the modules, or packages of them, that alone may import a library
    "torchvision": {"common.torchvision_compat"},
    "mpi4py": {"comm.backends.mpi"},
    "typer": {"cli"},
    "wandb": {"runtime.record.loggers"},
    "rich": {"data.download.fetch"},
    "yaml": {"config.yaml_source", "reports.run_groups"},
    "sklearn": {"data.sources.flamby"},  # besides, the digits are read from its file
    "pyarrow": {"data.sources.tables.arrow"},
    "scipy": {
        "methods._prototypes",
        "data.sources.images.public_arrays",
        "sweeps.results_table",
        "analysis.curvature",
        "privacy",
    },
    "dp_accounting": {"privacy.accountant"},
    "safetensors": {"runtime.record", "models.pretrained"},
    "timm": set(),  # fedmpi/models/libraries.py imports optional packages by name, with a message
    "monai": set(),
    "transformers": {"models.hugging_face", "data.sources.tokenizer"},
    "huggingface_hub": {"models.hugging_face"},
    "matplotlib": {"analysis.charts"},
    "jinja2": {"reports.page"},
    "PIL": {"data.sources.images.decode", "data.sources.images.image_mask"},
}
METHOD_FILES_MAY = {"torch", "scipy"}  # besides the standard library; scipy in _prototypes alone


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts[1:]) or "fedmpi"


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path):
    """Return the dotted names of all imports in a file, with `from a import b` as a.b."""
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
    """Return the modules of fedmpi and the external packages that a module imports."""
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


def package(module):
    """Return the package of fedmpi, or the top-level module, that a module belongs to."""
    return module.split(".")[0]


@lru_cache
def picture():
    """Return the arrows of the first diagram of docs/architecture.md as {package: packages that it points to}."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    arrows = re.findall(r"^ +(\w+) --> (\w+)$", text.split("```mermaid")[1].split("```")[0], re.MULTILINE)
    below = {name: set() for arrow in arrows for name in arrow}
    for upper, lower in arrows:
        below[upper].add(lower)
    return below


def test_the_page_on_architecture_shows_the_code_of_a_round():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    text = "\n\n\n".join(
        textwrap.dedent(inspect.getsource(each)).rstrip() for each in (Federation.run, Federation.run_round)
    )
    assert f"```python\n{text}\n```" in page


def reachable(start, below):
    seen, todo = set(), [start]
    while todo:
        new = below.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def test_every_package_is_in_the_diagram():
    results = {package(module) for module in MODULES} - {"fedmpi", "__main__"}
    assert set(picture()) == results
    described = re.findall(r"^\| `(\w+)", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert results <= set(described), "each package has a line in the table of docs/architecture.md"


def test_the_diagram_has_no_cycle_and_no_unused_arrow():
    below = picture()
    assert all(name not in reachable(name, below) for name in below)
    used = {(package(module), package(target)) for module in MODULES for target in edges(module)[0]}
    idle = {(upper, lower) for upper, lowers in below.items() for lower in lowers} - used
    assert not idle, f"drawn, but nobody imports so: {sorted(idle)}"


def test_imports_follow_the_layers():
    """Imports inside functions count, too. `fedmpi` itself imports lazily, and __main__ is the command line."""
    for module in MODULES:
        home = package(module)
        may = {"fedmpi": {"common"}, "__main__": {"cli"}}.get(home) or reachable(home, picture()) | {home, "common"}
        ours, outside = edges(module)
        wrong = {target for target in ours if package(target) not in may}
        if home == "methods":  # a method stands alone; what several share is in files whose names begin with _
            wrong |= {target for target in ours if package(target) == home and not target.startswith("methods._")}
            assert not outside - METHOD_FILES_MAY - sys.stdlib_module_names, f"{module} imports {outside}"
        assert not wrong, f"{module} imports {sorted(wrong)}"
        for library in outside & OUTSIDE.keys():
            homes = tuple(f"{place}." for place in OUTSIDE[library])
            assert f"{module}.".startswith(homes), f"{module} imports {library}"


def test_no_two_modules_import_each_other():
    """There are no import cycles, including imports inside functions and for type checkers."""
    below = {module: edges(module)[0] - {"fedmpi"} for module in MODULES}
    circles = [module for module in MODULES if module in reachable(module, below)]
    assert not circles


def test_modules_have_a_maximum_length():
    """A module should have at most 300 lines, docstrings included, and must have at most 420."""
    long = {name: n for name, path in MODULES.items() if (n := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long


def test_pickle_is_not_used():
    """Neither messages nor files use pickle.

    There are no such modules, no torch.save, no arrays of objects, and no collectives of torch.distributed for objects.
    torch.load is used only for pretrained weights in files of other programs, and executes no code.
    """
    for module, path in MODULES.items():
        assert not edges(module)[1] & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}, (
            module
        )
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = getattr(node.value, "id", "")
                assert (owner, node.attr) != ("torch", "save"), f"{module}:{node.lineno}"
                assert (owner, node.attr) != ("torch", "load") or module == "models.pretrained", (
                    f"{module}:{node.lineno}"
                )
                assert not (owner == "dist" and "_object" in node.attr), f"{module}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                words = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
                assert words.get("weights_only") is True, f"{module}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
                words = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
                assert words.get("allow_pickle") is False, f"{module}:{node.lineno}: np.load without allow_pickle=False"


def test_imports_of_scripts_exist():
    for path in (*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("docs/**/*.py"), *ROOT.glob("examples/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedmpi":
                home = importlib.import_module(node.module)
                for name in node.names:
                    there = hasattr(home, name.name) or f"{node.module}.{name.name}".removeprefix("fedmpi.") in MODULES
                    assert there, f"{path} imports {name.name} from {node.module}"


def test_the_version_is_defined_once():
    assert version("fedmpi") == fedmpi.__version__
    assert f"\n## {fedmpi.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
