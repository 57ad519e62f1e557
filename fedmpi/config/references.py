"""`${env:NAME}` in a config's values: the text of an environment variable; `${env:NAME:-text}` where it may be unset.

    seed=${env:SLURM_ARRAY_TASK_ID}        name: digits-${env:USER}        root: ${env:DATA:-data}
YAML takes braces within {...} and [...] for its own, so `hide` puts other characters there, as many, before it reads.
"""

import os
import re

from fedmpi.common.errors import UserError
from fedmpi.common.text import show

OPEN, CLOSE, BEGIN, END = "${env:", "}", "\ue000" * 6, "\ue001"
_WRITTEN = re.compile(r"\$\{env:([^{}\n]*)\}")
_HIDDEN = re.compile(f"{BEGIN}([^{END}]*){END}")
_OTHER = re.compile(r"\$\{(?!env:)[\w.:-]*\}")
_NAME = re.compile(r"([A-Za-z_]\w*)(?::-(.*))?", re.ASCII)


def hide(text: str) -> str:
    """The text with other characters around the names; lines and columns stay."""
    return _WRITTEN.sub(lambda found: f"{BEGIN}{found[1]}{END}", text)


def written(text: str) -> str:
    """`text` as it stood before `hide`."""
    return _HIDDEN.sub(lambda found: f"{OPEN}{found[1]}{CLOSE}", text)


def resolved(text: str, where: str) -> str:
    """Hidden references replaced by what they stand for.

    Raises:
        UserError: an unset variable, what is no name of one, a variable that refers to others.
    """

    def value(found: re.Match[str]) -> str:
        parts = _NAME.fullmatch(found[1])
        if parts is None:
            raise UserError(f"{where}: {show(written(found[0]))}: write ${{env:NAME}} or ${{env:NAME:-text}}")
        name, otherwise = parts.groups()
        said = os.environ.get(name, otherwise)
        if said is None:
            raise UserError(
                f"{where}: the environment variable {name} is not set; set it, or write ${{env:{name}:-text}} with "
                "what is to stand in its place"
            )
        if OPEN in said:
            raise UserError(f"{where}: the environment variable {name} holds a reference itself; write out its value")
        return said

    if other := _OTHER.search(text):
        raise UserError(f"{where}: {show(other[0])} is no reference here; write ${{env:NAME}} for a variable")
    result = _HIDDEN.sub(value, text)
    if OPEN in result:
        raise UserError(f"{where}: {show(result)}: '{OPEN}' without its '{CLOSE}'")
    return result
