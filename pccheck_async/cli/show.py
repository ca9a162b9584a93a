"""What the subcommands print alike."""

from __future__ import annotations

import sys

__all__ = ["complain", "size"]


def complain(problem: str | Exception) -> None:
    """Print one line on stderr; of an error its name and message, no traceback."""
    name = f"{type(problem).__name__}: " if isinstance(problem, Exception) else ""
    print(f"pccheck: {name}{problem}", file=sys.stderr)


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
