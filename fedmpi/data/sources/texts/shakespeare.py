"""Tiny Shakespeare by role."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.sources.common import find
from fedmpi.data.sources.texts.reading import Text
from fedmpi.data.sources.texts.windows import windows

FILE = "github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt"


def shakespeare(
    root: Path,
    *,
    context: Annotated[int, Field(ge=1, le=100_000)] = 80,
    min_chars: Annotated[int, Field(ge=1)] = 1000,
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2,
) -> Dataset:
    """Tiny Shakespeare (Karpathy 2015): the next character, by role, in the spirit of LEAF's Shakespeare.

    File tinyshakespeare/input.txt, or input.txt, under root: speeches with an empty line between them, the first line
    `Role:`. A role is a site; its speeches, joined by a line feed, are cut in time: the last test_fraction of its
    characters is its test part. x (n, context) and y (n, context), the character after each, are windows one after the
    other. Roles with fewer than min_chars characters are left out; 141 of 309 have 1,000.
    """
    at = find(root, ("tinyshakespeare/input.txt", "input.txt"), "shakespeare", f"correct data.root; the file is {FILE}")
    try:
        content = at.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{at} cannot be read: {error}; fetch {FILE}") from error
    spoken: dict[str, list[str]] = {}
    line = 1
    for block in content.strip().split("\n\n"):
        role, _, speech = block.strip("\n").partition("\n")
        if not role.endswith(":"):
            raise UserError(
                f"{at}, about line {line}: a speech begins with {role[:40]!r}, not with `Role:`; fetch {FILE}"
            )
        spoken.setdefault(role[:-1], []).append(speech)
        line += block.count("\n") + 2
    texts = {role: Text("\n".join(spoken[role]), f"{at}, role {role}") for role in sorted(spoken)}
    return windows(texts, context, test_fraction, min_chars, None)
