"""Run each command of README and of the pages about running fedmpi (doc_commands.py)."""

import pytest
from doc_commands import BATCH, RUNNING_COMMANDS, check_command


@pytest.mark.parametrize("line", [line for line in RUNNING_COMMANDS if line.split()[0] not in ("source", *BATCH)])
def test_command(checkout, line):
    check_command(line, checkout)
