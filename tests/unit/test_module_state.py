"""No module of fedmpi keeps state between calls; state is in objects that are passed."""

import ast

from helpers import ROOT

PACKAGE = ROOT / "fedmpi"
CHANGES = {"append", "appendleft", "add", "update", "pop", "popitem", "clear", "setdefault", "extend", "discard"}
CHANGES |= {"remove", "insert"}
ALLOWED = {
    "cli/arguments.py warnings.showwarning",  # the command prints warnings in a way of its own
    "runtime/record/recorder.py warnings.showwarning",  # restored when the run ends
    "comm/failures/process_exit.py sys.stdout",  # which the shell may have closed
    "comm/failures/process_exit.py sys.stderr",
    "common/torchvision_compat.py _declared",  # torch forgets a declaration whose Library is collected
    "flat/linear.py _buffers",  # memory of each thread that the next sum uses again
}


def bound(nodes):
    """Return the names that these assignments bind."""
    targets = [t for node in nodes for t in getattr(node, "targets", [getattr(node, "target", None)])]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def changed(tree):
    """Return the names of this module, or of imported modules, that its functions change."""
    top = bound(node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign))
    top |= {
        alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)):
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield from node.names
            of = getattr(node, "value", None)
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in CHANGES:
                of = node.func.value
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("next", "setattr"):
                of = node.args[0]
            elif not (isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load)):
                continue
            if isinstance(of, ast.Name) and of.id in top - own:
                attribute = isinstance(node, ast.Attribute) and of.id in ("sys", "warnings")
                yield f"{of.id}.{node.attr}" if attribute else of.id


def test_functions_do_not_change_module_state():
    results = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        results |= {f"{path.relative_to(PACKAGE)} {name}" for name in changed(tree)}
    assert results == ALLOWED
