"""Run each command of the pages about analyses, methods and plug-ins (doc_commands.py)."""

import pytest
from doc_commands import RESEARCH_COMMANDS, check_command


@pytest.mark.parametrize("line", RESEARCH_COMMANDS)
def test_command(checkout, line):
    check_command(line, checkout)
