"""docs/methods.md is what its script makes of the sources."""

import runpy
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_methods_page_is_up_to_date(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path("docs/make_methods.py", run_name="__main__")
    assert (ROOT / "docs/methods.md").read_text() == capsys.readouterr().out, (
        "run: python -W ignore docs/make_methods.py > docs/methods.md"
    )
