"""The site: README, guide and reference.

Build it in the root of a checkout, with the package installed: ``sphinx-build -W -b html -c .github/docs . SITE``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from pccheck_async import __version__

project = "pccheck_async"
copyright = "the authors of pccheck_async"  # noqa: A001 - Sphinx wants this name
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
include_patterns = [
    "README.md", "examples/guide/*.md", "examples/paper/README.md", ".github/*.md", ".github/docs/reference/*.md",
]  # fmt: skip
exclude_patterns = [".venv", "build", ".github/PULL_REQUEST_TEMPLATE.md"]
source_suffix = {".md": "markdown"}

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autoclass_content = "both"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"pccheck_async {__version__}"
html_copy_source = False
templates_path = ["."]
html_additional_pages = {"index": "start.html"}

REFERENCE = ["saving", "state", "reading", "policies", "stores", "statistics", "shelf", "errors"]
CONTENTS = """
```{{toctree}}
:caption: {caption}
:hidden:

{pages}
```
"""


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Give the start page its table of contents, which has no place in a README."""
    if name != root_doc:
        return
    root = Path(app.srcdir)

    _, *parts = (root / "examples/guide/index.md").read_text().split("\n## ")
    guide = {part.split("\n")[0]: dict.fromkeys(re.findall(r"\((\w+)\.md\)", part)) for part in parts}
    contents = {
        "Guide": ["examples/guide/index"],
        **{caption: [f"examples/guide/{page}" for page in pages] for caption, pages in guide.items() if pages},
        "Reference": [f".github/docs/reference/{page}" for page in REFERENCE],
        "Project": [".github/CONTRIBUTING", ".github/SECURITY", "examples/paper/README"],
    }
    for caption, names in contents.items():
        source[0] += CONTENTS.format(caption=caption, pages="\n".join(names))


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_contents)
