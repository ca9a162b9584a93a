"""The fenced blocks of the README and the guide; ``python -m tests.support.readme_blocks PAGE...`` runs them in order.

Each page runs in a folder of its own below the current one, and its Python blocks share their names, as a reader would
paste them. A block does not run where the line before says so (``<!-- not run: ... -->``), nor do those that install:
they run in environments of their own. Of a ``diff`` both sides run, each twice. All pages run in one process, and so do
``pccheck`` commands without a shell's syntax, because importing torch takes longer than most blocks.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from pccheck_async.cli import app
from tests.support.run_example import ignore_warnings_of_trainers

__all__ = ["INSTALLING", "PAGES", "ROOT", "RUN", "SHOWN", "Block", "blocks_of", "is_run"]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "examples" / "guide").glob("*.md"))]
RUN = {"python", "sh", "diff"}
SHOWN = {"text", "yaml"}
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
    blocks: list[Block] = []
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
        blocks.append(Block(language, start + 1, mark, "\n".join(lines[start + 1 : number]) + "\n"))
        start = None
    if start is not None:
        raise ValueError(f"the block that line {start + 1} opens is not closed")
    return blocks


def is_run(block: Block) -> bool:
    """Whether the block is one that :func:`main` runs."""
    return block.language in RUN and block.mark not in INSTALLING and not block.mark.startswith("<!-- not run: ")


def run(block: Block, page: Path, names: dict[str, Any]) -> None:
    """Run one block in the current folder."""
    match block.language:
        case "python":
            exec(compile("\n" * block.line + block.text, page, "exec"), names)
        case "diff":
            for other in "+-":
                lines = [line[1:] for line in block.text.splitlines() if not line.startswith(other)]
                program = compile("\n".join(lines), f"{page.name}: diff without {other}", "exec")
                for _ in range(2):  # the second run resumes where the first ended
                    exec(program, {"__name__": "__main__"})
        case _:
            lines = block.text.splitlines()
            if all(re.fullmatch(r"pccheck [\w@./*' -]+", line) for line in lines):
                for line in lines:
                    status = app(shlex.split(line)[1:], standalone_mode=False)
                    assert not status, f"{line}: exit status {status}"
            else:
                subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True)


def main() -> None:
    """Run the blocks of pages."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # Python 3.12: fork of a loader's workers
    ignore_warnings_of_trainers()
    work = Path.cwd()
    for page in map(Path, sys.argv[1:]):
        names: dict[str, Any] = {"__name__": "__main__"}
        folder = work / page.stem
        folder.mkdir()
        os.chdir(folder)
        for block in filter(is_run, blocks_of(page.read_text())):
            print(f"-- {page.name}, {block.language}, line {block.line}", flush=True)
            run(block, page, names)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
