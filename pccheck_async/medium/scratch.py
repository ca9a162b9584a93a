"""A folder for passing use beside a store, and how much room there is."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pccheck_async.errors import StoreLockedError, folder_error
from pccheck_async.format.record import slot_number

__all__ = ["free_bytes", "scratch_folder", "slot_bytes"]

_PREFIX = ".tune-"


def free_bytes(folder: Path) -> int:
    """Return what this user may still write where ``folder`` is or would be."""
    facts = os.statvfs(next(parent for parent in (folder, *folder.parents) if parent.exists()))
    return facts.f_bavail * facts.f_frsize


def slot_bytes(folder: Path) -> int:
    """Return the bytes of the slots of the store in ``folder``, 0 where there is none."""
    if not folder.is_dir():
        return 0
    nbytes = 0
    for entry in os.scandir(folder):
        if slot_number(entry.name) is not None:
            with suppress(OSError):  # an engine may remove it meanwhile, and a bad one has no size
                nbytes += entry.stat().st_size
    return nbytes


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder inside ``folder``; afterwards it is gone, and so are the parents that were made for it.

    Also at the interpreter's exit; and what a killed process left there goes when the next one comes.

    Raises:
        StoreLockedError: another process has a scratch folder there.
        WriteError: it cannot be made.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_alone(folder))
                made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder, ignore_cleanup_errors=True)
            except OSError as error:
                raise folder_error(error, folder) from error
            yield Path(stack.enter_context(made))
    finally:
        for parent in missing:
            with suppress(OSError):  # not empty: somebody else put something there
                parent.rmdir()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock ``folder`` against other tunings, and remove what one that was killed left there."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreLockedError(f"another tuning runs in {folder}; each would measure the other") from None
        except OSError:
            pass  # a filesystem that locks no folders: what was left there stays
        else:
            for left in folder.glob(_PREFIX + "*"):
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(fd)
