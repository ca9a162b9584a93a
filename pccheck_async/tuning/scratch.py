"""A folder for passing use beside a store."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pccheck_async.errors import StoreLockedError, folder_error

__all__ = ["scratch_folder"]

_PREFIX = ".tune-"


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
