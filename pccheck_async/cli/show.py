"""What the subcommands print alike."""

from __future__ import annotations

import sys

__all__ = ["complain", "printable", "size"]


def complain(problem: str | Exception) -> None:
    """Print one line on stderr; of an error its name and message, no traceback."""
    name = f"{type(problem).__name__}: " if isinstance(problem, Exception) else ""
    print(f"pccheck: {name}{printable(str(problem))}", file=sys.stderr)


def printable(text: str) -> str:
    """Return a string from a checkpoint so that it reaches a terminal as text, never as a control sequence."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size(nbytes: int) -> str:
    """Return a size as people read it, in units of 1000 bytes."""
    if nbytes < 1000:
        return f"{nbytes} B"
    amount = nbytes / 1000
    for unit in ("kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
