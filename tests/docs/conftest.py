"""The folder in which the commands of the pages are run."""

import pytest
from doc_commands import FILES
from helpers import ROOT


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a folder with the files that a reader of the pages has typed in."""
    place = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "runs", "data", *FILES):
            (place / path.name).symlink_to(path)
    for name, text in FILES.items():
        (place / name).write_text(text, encoding="utf-8")
    return place
