"""Paths of the command line."""

from __future__ import annotations

from pathlib import Path

import typer

__all__ = ["parse_path"]


def parse_path(text: str) -> Path:
    """Return a path of the command line. Raises BadParameter for what :class:`Path` would make another place of.

    An empty one, which shells make of unset variables, is not the current folder, and a URL no folder named ``s3:``.
    """
    if not text:
        raise typer.BadParameter("the path is empty; the current folder is '.'")
    if "://" in text:
        raise typer.BadParameter(f"{text!r} is a URL; give a folder or file on a disk, or on a filesystem mounted here")
    return Path(text)
