"""docs/methods.md is what its script makes of the sources."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_methods_page_is_up_to_date():
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "docs/make_methods.py"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stderr
    assert (ROOT / "docs/methods.md").read_text() == made.stdout, (
        "run: python -W ignore docs/make_methods.py > docs/methods.md"
    )
