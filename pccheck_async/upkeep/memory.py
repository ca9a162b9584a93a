# SPDX-License-Identifier: Apache-2.0
"""The stores in memory that engines of this user have left there, or have open: list them, and remove them."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pccheck_async.engine import MEMORY_ROOT, ORIGIN_NAME, MemoryTier, memory_prefix
from pccheck_async.errors import CheckpointError, StoreLockedError
from pccheck_async.format import CheckpointInfo
from pccheck_async.format.record import COMMIT_NAME
from pccheck_async.group import read_memory_place, read_place
from pccheck_async.medium.filesystem import slot_bytes
from pccheck_async.store import rank_folders

__all__ = ["MemoryFolder", "clear_memory", "list_memory", "memory_of"]


@dataclass(frozen=True, slots=True)
class MemoryFolder:
    """A store in memory.

    Attributes:
        path: The folder of the store.
        origin: The path of the store on disk when it was made; empty if that is not known.
        infos: Checkpoints in it, newest first, whether or not a restart of the store on disk accepts them.
        nbytes: Bytes of memory that its slots take.
        in_use: Whether an engine has it open.
        problem: The reason why it cannot be read; empty if it can.
    """

    path: Path
    origin: str
    infos: tuple[CheckpointInfo, ...]
    nbytes: int
    in_use: bool
    problem: str = ""


def list_memory(root: str | os.PathLike[str] = MEMORY_ROOT) -> list[MemoryFolder]:
    """Return this user's stores in memory, by name. Raises OSError: ``root`` cannot be listed."""
    return [_look(Path(root, name)) for name in sorted(os.listdir(root)) if name.startswith(memory_prefix())]


def _look(folder: Path) -> MemoryFolder:
    infos: tuple[CheckpointInfo, ...] = ()
    problem = origin = ""
    ranks = [*rank_folders(folder).values()]
    with suppress(OSError):
        origin = os.fsdecode(((ranks or [folder])[0] / ORIGIN_NAME).read_bytes())
        origin = os.path.dirname(origin) if ranks else origin
    try:
        infos = tuple(read_place(folder).infos)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    with _locked(folder) as free:
        return MemoryFolder(folder, origin, infos, sum(map(slot_bytes, ranks or [folder])), not free, problem)


def clear_memory(folder: str | os.PathLike[str]) -> int:
    """Remove a store in memory, and return the number of bytes that are freed.

    Raises StoreLockedError: an engine has it open; ValueError: ``folder`` is no store in memory of this user.
    """
    path = Path(folder)
    if not path.name.startswith(memory_prefix()) or not path.is_dir() or path.is_symlink():
        raise ValueError(f"{path} is no store in memory of this user: `pccheck memory ls` lists them")
    with _locked(path) as free:
        if not free:
            raise StoreLockedError(f"an engine has {path} open: close it first")
        nbytes = sum(map(slot_bytes, [*rank_folders(path).values()] or [path]))
        shutil.rmtree(path)
    return nbytes


def memory_of(path: str | os.PathLike[str], root: str | os.PathLike[str] = MEMORY_ROOT) -> list[CheckpointInfo]:
    """Return the checkpoints in memory that a restart of the store at ``path`` takes into account, newest first."""
    try:
        return read_memory_place(path, MemoryTier(path=os.fspath(root))).infos
    except (CheckpointError, OSError):
        return []


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a store, or the stores of a group's ranks; yield whether no engine has any of them open."""
    with ExitStack() as opened:
        free = True
        for each in [*rank_folders(folder).values()] or [folder]:
            try:
                fd = os.open(each / COMMIT_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            opened.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free = False
        yield free
