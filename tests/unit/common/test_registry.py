"""Names are resolved to objects: three forms, and a message for each mistake."""

import sys

import pytest

from fedmpi.common import registry
from fedmpi.common.errors import UserError

REGISTRY = {"root": "math:sqrt", "power": "math:pow"}
RULE = registry.PluginKind("server rule", {}, "server.rule", ("up", "s"))


def message(name, **more):
    with pytest.raises(UserError) as caught:
        registry.load_object(name, REGISTRY, "function", **more)
    return str(caught.value)


def test_a_name_is_a_key_or_in_a_module_or_in_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def cube(x):\n    return x ** 3\n")
    assert registry.load_object("root", REGISTRY, "function")(9.0) == 3.0
    assert registry.load_object("math:hypot", REGISTRY, "function")(3.0, 4.0) == 5.0
    assert registry.load_object(f"{file}:cube", REGISTRY, "function")(2) == 8


def test_names_of_one_file_share_its_module_and_edits_are_loaded(tmp_path):
    file = tmp_path / "mine.py"  # dataclasses look the module up in sys.modules while the file is still running
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Base:\n    x: int = 1\nclass Child(Base): ...\n"
    )
    base, child = (registry.load_object(f"{file}:{name}", {}, "method") for name in ("Base", "Child"))
    assert issubclass(child, base)
    file.write_text("class Base:\n    edited = True\n")
    assert registry.load_object(f"{file}:Base", {}, "method").edited


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rot", "unknown function 'rot'; did you mean 'root'? allowed: power, root;"),
        ("zzzzzz", "unknown function 'zzzzzz'; allowed"),
        ("FOLDER/none.py:f", "file not found: FOLDER/none.py"),
        ("FOLDER/mine.py:cub", "does not define 'cub'; did you mean 'cube'? it defines: Quad, cube"),
        (
            "nosuchpackage.sub:f",
            "no module named 'nosuchpackage'; install it, or add the folder that contains it to PYTHONPATH",
        ),
        ("math:sqroot", "'math' does not define 'sqroot'"),
    ],
)
def test_an_unknown_name_is_an_error(tmp_path, name, text):
    source = "import math\nfrom os import getcwd\n_hidden = 1\ndef cube(x): ...\nclass Quad: ...\n"
    (tmp_path / "mine.py").write_text(source)
    said = message(name.replace("FOLDER", str(tmp_path)), origin="run.yaml:7")
    assert said.startswith("run.yaml:7: ")
    assert text.replace("FOLDER", str(tmp_path)) in said


@pytest.mark.parametrize(
    ("source", "line", "text"),
    [
        ("x = 1\n\ny = undefined + x\n", 3, "NameError: name 'undefined' is not defined"),
        ("def f(:\n    pass\n", 1, "SyntaxError: invalid syntax"),
        ("import json\njson.loads('{')\n", 2, "JSONDecodeError"),  # raised in the library; the user's line is named
        ("import sys\n\nsys.exit(3)\n", 3, "SystemExit: 3"),
    ],
)
def test_an_error_in_the_users_code_names_its_line(tmp_path, monkeypatch, source, line, text):
    """The code is in a file, or in a module of a package."""
    (tmp_path / "brokenpackage").mkdir()
    (tmp_path / "brokenpackage" / "__init__.py").write_text("")
    file = tmp_path / "brokenpackage" / "part.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (f"{file}:f", "brokenpackage.part:f"):
        found = message(name)
        assert f"{file}:{line}: " in found
        assert text in found
    sys.modules.pop("brokenpackage", None)


def test_an_option_must_not_precede_engine_arguments(tmp_path):
    """Otherwise the server's view would be passed as the option."""
    file = tmp_path / "rule.py"
    file.write_text("def wrong(up, factor: float = 0.5): ...\ndef right(updates, server, factor: float = 0.5): ...\n")
    with pytest.raises(
        UserError,
        match=r"cannot be called with the arguments \(up, s, .*\): option factor comes before these arguments",
    ):
        registry.make_component(RULE, registry.Selection(f"{file}:wrong"))
    assert registry.make_component(RULE, registry.Selection(f"{file}:right", {"factor": 2.0})).keywords == {
        "factor": 2.0
    }


def test_a_plugin_imports_from_its_own_directory(tmp_path):
    """This works in any working directory; the import path is restored, and a module of another plug-in is not used."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "beside_of_test.py").write_text(f"NAME = '{name}'\n")
        (tmp_path / name / "mine.py").write_text("import beside_of_test\ndef f():\n    return beside_of_test.NAME\n")
    before = [*sys.path], [*sys.meta_path]
    assert registry.load_object(f"{tmp_path}/a/mine.py:f", {}, "function")() == "a"
    assert ([*sys.path], [*sys.meta_path]) == before
    text = message(f"{tmp_path}/b/mine.py:f")
    assert (
        f"import beside_of_test refers to {tmp_path}/b/beside_of_test.py here, but another plug-in has already imported"
        in text
    )


def test_random_numbers_drawn_during_an_import_are_reproducible(tmp_path):
    found = []
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("import random, numpy as np\nX = [random.random(), np.random.rand()]\n")
        found.append(registry.load_object(f"{tmp_path}/{name}.py:X", {}, "function"))
    assert found[0] == found[1]
