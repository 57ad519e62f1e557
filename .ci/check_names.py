#!/usr/bin/env python3
"""Fail if an identifier in a folder is a word that does not say what it holds.   python .ci/check_names.py [FOLDER]

These words are participles used as nouns, and names of earlier versions (CONTRIBUTING.md, House rules).
"""

import ast
import sys
from pathlib import Path

# fmt: off
BANNED = {
    "apart", "asked", "blame", "door", "found", "heed", "held", "kept", "made", "said", "still", "stranger", "told",
    "wanted", "whole",
}
# fmt: on


def identifiers(tree: ast.AST) -> list[tuple[int, str]]:
    """Return (line, name) for each variable, attribute, argument, function and class of a module."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute):
            names.append((node.lineno, node.attr))
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            names.append((node.lineno, node.arg))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append((node.lineno, node.name))
    return names


def main() -> int:
    """Print each banned identifier with its place; return 1 if there is any."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "fedmpi")
    bad = [
        f"{path}:{line}: {name}: name what it holds (CONTRIBUTING.md, House rules)"
        for path in sorted(folder.rglob("*.py"))
        for line, name in identifiers(ast.parse(path.read_text(encoding="utf-8")))
        if name in BANNED
    ]
    print(*bad, sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
