"""What only people can say of a model: a YAML file of headings and texts, for the model card."""

from __future__ import annotations

from pathlib import Path

from fedmpi.common.errors import UserError
from fedmpi.config import yaml_source

ASKED = {
    "Intended use": "for whom, for which decision, beside which other evidence",
    "Not for": "patients, places and decisions for which it was not made",
    "Approval and consent": "ethics votes and legal basis at each site",
    "Contact": "who answers questions, and whom to tell of harm",
}


def read(path: Path) -> dict[str, str]:
    """Heading -> text, in the file's order.

    Raises:
        UserError: no such file, no YAML, or something else than headings and texts.
    """
    if not path.is_file():
        raise UserError(f"--about: there is no file {path}; write one with lines `Intended use: text`")
    said = yaml_source.read(path, "write lines `Intended use: text`").data
    for heading, text in said.items():
        if not isinstance(text, (str, int, float)) or isinstance(text, bool) or not str(text).strip():
            raise UserError(f"--about: {path}: {heading}: {text!r} is no text; write `{heading}: some words`")
    return {str(heading): str(text).strip() for heading, text in said.items()}
