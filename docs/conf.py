"""The documentation as pages: `make docs` runs Sphinx with this; every page is Markdown that reads on its own, too."""

import re
from pathlib import Path

version = re.search(r'__version__ = "(.+)"', (Path(__file__).parents[1] / "fedmpi/common/version.py").read_text())[1]
release = version
project = "fedmpi"
html_title = f"fedmpi {version}"
html_theme = "furo"
html_copy_source = False
html_show_copyright = False

extensions = ["myst_parser", "sphinxcontrib.mermaid"]
myst_heading_anchors = 3  # as on GitHub: page.md#a-heading
myst_fence_as_directive = ["mermaid"]  # drawn by the browser; without a network its text stands there
