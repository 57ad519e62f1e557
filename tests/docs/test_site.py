"""The pages are well-formed for Sphinx, and shell blocks that are not run here are valid bash."""

import subprocess

import pytest
from doc_commands import PAGES, blocks
from helpers import ROOT, clean_env


def test_sphinx_builds_the_site_without_warnings(tmp_path):
    pytest.importorskip("sphinx", reason="`make docs` installs it")
    command = ["sphinx-build", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()


def test_commands_that_are_not_run_are_valid_bash():
    for page in PAGES:
        for text in (text for language, text in blocks(page) if language == "bash"):
            done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
            assert not done.stderr, page
