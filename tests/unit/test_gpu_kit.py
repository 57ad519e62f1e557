"""benchmarks/gpu/kit.py: its message on missing packages, and the table that it writes to docs/gpu.md."""

import sys

import pytest
from helpers import ROOT


@pytest.fixture
def kit(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "gpu"), *sys.path])
    import kit

    return kit


def test_requirements_equal_those_of_pyproject(kit):
    names = [kit.package_name(each) for each in kit.list_requirements(with_tests=False)]
    assert names[:3] == ["torch", "torchvision", "numpy"]
    assert {"pydantic", "typer", "rich", "scikit-learn", "matplotlib"} < set(names)
    assert not any(name.startswith("pytest") for name in names)
    assert {"pytest", "pytest-xdist"} < {kit.package_name(each) for each in kit.list_requirements(with_tests=True)}
    assert kit.find_missing(kit.list_requirements(with_tests=True)) == {}


def test_a_package_that_is_too_old_is_reported_as_missing(kit, monkeypatch):
    monkeypatch.setattr(kit, "find_version", {"torch": "2.10.0a0+abc.nv25", "pydantic": "1.10.2", "rich": ""}.get)
    expected = ["torch>=2.6", "pydantic>=2.7", "rich>=13", "nosuchpackage>=1"]
    assert kit.find_missing(expected) == {
        "pydantic>=2.7": "1.10.2 is installed",
        "nosuchpackage>=1": "is not installed",
    }


def part(name, code, *lines):
    return {"part": name, "code": code, "seconds": 3, "lines": list(lines)}


def test_table(kit):
    results = {
        "command": "python3 benchmarks/gpu/kit.py",
        "device": "cuda",
        "machine": {"gpu": "H100", "openmpi": None},
        "running": None,
        "seconds": 12,
        "parts": [
            part("cnn", 0, "cnn, 100 clients: fedmpi 1.500 s  by hand 1.000 s  ratio 1.50  (peak 9 MiB)"),
            part("test_nccl", 0, "===== 3 passed, 6 skipped in 14.33s ====="),
            part("bf16", 0, "accuracy 5"),
            part("pack", 2, "no | room"),
        ],
    }
    head, _, *lines = kit.format_results(results).splitlines()
    assert head == "`python3 benchmarks/gpu/kit.py` on cuda, 12 s: gpu H100."
    assert lines[2:] == [
        "| cnn | cnn, 100 clients | 1.5 s | 1 s | 1.5 | peak 9 MiB |",
        "| test_nccl | 3 passed, 6 skipped in 14.33s | | | | 3 s |",
        "| bf16 | done | | | | 3 s |",
        "| pack | FAILED, exit code 2: no / room | | | | 3 s |",
    ]
    assert kit.format_results(results | {"running": "compile"}).startswith(
        "`python3 benchmarks/gpu/kit.py` on cuda, broken off in compile: gpu H100.\n"
    )


def test_only_the_text_between_the_markers_is_replaced(kit):
    page = kit.PAGE.read_text()
    filled = kit.replace_between_markers(page, "new\n")
    assert f"{kit.BEGIN}new\n{kit.END}" in filled
    assert kit.replace_between_markers(filled, page.split(kit.BEGIN)[1].split(kit.END)[0]) == page
