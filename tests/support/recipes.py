"""The programs on the pages of the guide that are run by tests of their own, not in the order of their page."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.readme_blocks import ROOT, blocks_of

__all__ = ["MOST_LINES", "program", "programs", "write_program"]

MOST_LINES = 60
"""A program is shorter than that."""
_GUIDE = ROOT / "examples" / "guide"


def programs(page: str) -> dict[str, str]:
    """Return the programs of a page by the names that the lines before their blocks give them."""
    found = {}
    for block in blocks_of((_GUIDE / page).read_text()):
        if name := re.fullmatch(r"<!-- not run: here; (?:tests/\S+) runs it as (\S+) -->", block.mark):
            assert name[1] not in found, f"{page} has two programs {name[1]}"
            found[name[1]] = block.text
    return found


def program(page: str, name: str) -> str:
    """Return the text of a program."""
    return programs(page)[name]


def write_program(page: str, name: str, folder: Path) -> Path:
    """Write a program into a folder; return its path."""
    path = folder / name
    path.write_text(program(page, name))
    return path
