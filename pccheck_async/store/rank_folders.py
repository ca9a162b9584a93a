# SPDX-License-Identifier: Apache-2.0
"""The folders of ranks in the folder of their group, by their names, and the test for a group's folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pccheck_async.errors import CorruptStoreError, ReadError, in_shell, read_error
from pccheck_async.format.record import GROUP_NAME, GROUP_VERSION, IDENTITY_NAME, decode_identity
from pccheck_async.medium.folder import Folder

__all__ = ["is_group_folder", "rank_folders", "rank_name", "rank_of", "recovery"]

_RANK_NAME = re.compile(r"rank-(\d{5,9})")


def rank_name(rank: int) -> str:
    """Return the name of a rank's folder."""
    return f"rank-{rank:05d}"


def rank_of(name: str) -> int | None:
    """Return the rank in the name of a rank's folder; None for any other name."""
    match = _RANK_NAME.fullmatch(name)
    return int(match[1]) if match and rank_name(int(match[1])) == name else None


def rank_folders(folder: Path) -> dict[int, Path]:
    """Return the folders of ranks in a group's folder, by rank; none if it does not exist. Raises ReadError."""
    found: dict[int, Path] = {}
    try:
        for child in folder.iterdir():
            if (rank := rank_of(child.name)) is not None:
                found[rank] = child
    except OSError as error:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise read_error(error, folder) from error
    return dict(sorted(found.items()))


def recovery(path: str | os.PathLike[str], *options: str) -> str:
    """Return the shell command that recovers a store, for messages; for a rank's store it names the group's folder."""
    group, name = os.path.split(os.path.abspath(path))
    of_rank = _RANK_NAME.fullmatch(name) and os.path.lexists(os.path.join(group, GROUP_NAME))
    return in_shell("recover", group if of_rank else path, *options)


def is_group_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds the stores of a group's ranks, also if its ``group.json`` is damaged or lost."""
    folder = Path(path)
    if os.path.lexists(folder / GROUP_NAME):
        return True
    if os.path.lexists(folder / IDENTITY_NAME):
        return False
    try:
        return any(map(_is_store_of_rank, rank_folders(folder).values()))
    except ReadError:
        return False


def _is_store_of_rank(folder: Path) -> bool:
    """Whether a folder with the name of a rank's folder holds a rank's store: other stores may have such a name."""
    try:
        return decode_identity(Folder(folder).read_small(IDENTITY_NAME)).format == GROUP_VERSION
    except (OSError, CorruptStoreError):
        return False
