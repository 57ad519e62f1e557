"""Which launchers are on PATH, of which version."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from fedmpi.doctor.asking import CommandRunner
from fedmpi.doctor.lines import ODD, Line

LIMIT_S = 5.0


def launcher(name: str, runner: CommandRunner) -> list[Line]:
    """mpirun or srun: its first line with a version in it."""
    path = shutil.which(name)
    if path is None:
        return [Line(name, "not on PATH")]
    text = runner.run_command([path, "--version"], LIMIT_S)
    said = [line.strip() for line in text.splitlines() if re.search(r"\d+\.\d+", line)]
    return [Line(name, f"{said[0]} ({path})" if said else f"{path}, which does not say its version")]


def torchrun() -> list[Line]:
    """It has no version of its own: it is torch's, of the Python that its first line names."""
    path = shutil.which("torchrun")
    if path is None:
        return [Line("torchrun", "not on PATH")]
    if Path(path).resolve().parent == Path(sys.executable).parent.resolve():
        return [Line("torchrun", f"of this Python ({path})")]
    return [Line("torchrun", f"of another Python ({path}); its ranks may have other packages: use this one's", ODD)]
