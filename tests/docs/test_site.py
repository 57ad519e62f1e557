"""The pages are well-formed for the programs that read them: Sphinx, and bash for what cannot be run here."""

import subprocess

import pytest
from doc_commands import PAGES, blocks
from helpers import ROOT, clean_env


def test_the_site_is_made_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="`make docs` installs it")
    command = ["sphinx-build", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()


def test_what_cannot_be_run_here_is_bash():
    for page in PAGES:
        for text in (text for language, text in blocks(page) if language == "bash"):
            done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
            assert not done.stderr, page
