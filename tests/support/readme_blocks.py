"""The fenced blocks of the README; ``python -m tests.support.readme_blocks README`` runs them in order.

Blocks of Python share their names, as a reader would paste them; commands of a shell end at the first that fails. The
blocks that install are left out: they run in environments of their own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["INSTALLING", "RUN", "SHOWN", "Block", "blocks_of"]

RUN = {"python", "sh"}
SHOWN = {"text"}
"""Languages of what cannot run: layouts, output."""
INSTALLING = {"<!-- quickstart: run -->", "<!-- quickstart: test -->"}


class Block(NamedTuple):
    """A fenced block: its language, the line that opens it, what stands on the line before, and its text."""

    language: str
    line: int
    mark: str
    text: str


def blocks_of(text: str) -> list[Block]:
    """Return all blocks, in order. Raises ValueError where a fence is not closed."""
    found: list[Block] = []
    lines = text.splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not re.match(r"\s*(```|~~~)", line):
            continue
        if start is None:
            start = number
            continue
        mark = lines[start - 1] if start else ""
        language = lines[start].strip().strip("`~").strip()
        found.append(Block(language, start + 1, mark, "\n".join(lines[start + 1 : number]) + "\n"))
        start = None
    if start is not None:
        raise ValueError(f"the block that line {start + 1} opens is not closed")
    return found


def main() -> None:
    """Run the blocks of a README in the current folder."""
    readme = Path(sys.argv[1])
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(readme.read_text()):
        if block.language not in RUN or block.mark in INSTALLING:
            continue
        print(f"-- {block.language}, line {block.line}", flush=True)
        if block.language == "python":
            code = compile("\n" * block.line + block.text, readme, "exec")
            exec(code, names)
        else:
            subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True)


if __name__ == "__main__":
    main()
