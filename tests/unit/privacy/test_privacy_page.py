"""The table of methods in docs/privacy.md is what the checks of a run say."""

import subprocess
import sys

import pytest
from helpers import ROOT, clean_env

pytest.importorskip("dp_accounting")


def test_the_table_of_methods():
    command = [sys.executable, "-W", "ignore", str(ROOT / "docs/make_privacy.py")]
    table = subprocess.run(command, env=clean_env(), capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs/privacy.md").read_text(encoding="utf-8")
    assert page.partition("<!-- methods -->\n")[2].partition("<!-- end -->")[0] == table, (
        "run docs/make_privacy.py, and put its output between the comments in docs/privacy.md"
    )
