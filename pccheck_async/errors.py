# SPDX-License-Identifier: Apache-2.0
"""The errors of the package: one root, each named for the condition a caller can act on.

Errors that stand for a failed system call also inherit from :class:`OSError` and keep ``errno`` and ``filename``.
:class:`asyncio.CancelledError` is never wrapped.
"""

from __future__ import annotations

import errno as _errno
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, Self

__all__ = [
    "CheckpointError", "ClosedError", "CorruptStoreError", "DamagedError", "DurabilityUnknownError", "GroupError",
    "IncompleteCheckpointError", "InfeasibleError", "InvalidTuningError", "NewerFormatError", "NoCheckpointError",
    "ReadError", "ReplicasDifferError", "StateMismatchError", "StoreError", "StoreFailedError", "StoreFullError",
    "StoreLockedError",
    "TornCaptureError", "UnsupportedStateError", "WriteError",
]  # fmt: skip


_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_EXPLANATION = r" (in a path, \. is a dot inside a key)"


def plain(path: str) -> str:
    r"""Return the path of a leaf without its escapes: ``model.layers.0`` for ``model.layers\.0``."""
    return _ESCAPED.sub(r"\1", path) if "\\" in path else path


def readable(paths: Iterable[str]) -> list[str]:
    """Return paths without their escapes, except those that would then be equal to another of the paths."""
    escaped = [*paths]
    if not any("\\" in path for path in escaped):
        return escaped
    there, counts = {*escaped}, Counter(map(plain, {*escaped}))
    names = [plain(path) for path in escaped]
    return [
        path if counts[name] > 1 or (name != path and name in there) else name
        for path, name in zip(escaped, names, strict=True)
    ]


def explained(message: str) -> str:
    r"""Return a message, followed by an explanation of ``\.`` if a path in the message contains ``\.``."""
    return message if r"\." not in message or _EXPLANATION in message else message + _EXPLANATION


def first_few(names: Sequence[object], most: int = 20) -> str:
    """Return the first names, up to ``most``, for a message; paths among them without their escapes."""
    return _first_few(readable(map(str, names[: most + 1])), most)


def in_shell(command: str, path: str | os.PathLike[str], *options: str) -> str:
    """Return a ``pccheck`` command line for a folder, quoted for a shell and in backticks, for a message."""
    return f"`pccheck {shlex.join([command, os.fspath(path), *options])}`"


_LISTED = 5
"""Approximate number of paths that the text of a StateMismatchError names."""


def _some(names: Sequence[str], most: int) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _first_few(names: Sequence[str], most: int = 20) -> str:
    return f"{', '.join(names[:most])}{', ...' if len(names) > most else ''}"


class CheckpointError(Exception):
    """Root of every error that the package raises on purpose."""


class _PathError(CheckpointError):
    """An error whose message names leaves by their paths; escapes are removed unless the message explains them."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message if _EXPLANATION in message else message.replace(r"\.", "."))


class WriteError(CheckpointError, OSError):
    """A write or flush failed; ``errno`` and ``filename`` are those of the system call."""


class DurabilityUnknownError(WriteError):
    """A flush failed, or a step after one: it is unknown which bytes a power loss would leave."""

    @classmethod
    def of(cls, error: OSError) -> Self:
        """Return a DurabilityUnknownError with the arguments and the file name of ``error``, its cause."""
        unknown = cls(*error.args)
        unknown.filename = error.filename
        return unknown


class ReadError(CheckpointError, OSError):
    """A read failed; ``errno`` and ``filename`` are those of the system call."""


class StoreError(CheckpointError):
    """Something is wrong with a store as a whole."""


class CorruptStoreError(StoreError):
    """Bytes on storage differ from the bytes written, or this version does not understand them."""


class DamagedError(CorruptStoreError):
    """Bytes of a checkpoint are missing or fail their checksum: an older one is restored, the next commit drops it."""


class NewerFormatError(CorruptStoreError):
    """A newer version of this package made the store: it is not damaged, and must not be changed."""


class NoCheckpointError(StoreError):
    """There is no checkpoint (or not the one asked for) in this folder."""


class StoreFailedError(StoreError, WriteError):
    """A flush or a commit record failed, so nothing more is committed; committed checkpoints stay readable.

    Raised for that first failure and for everything after it, with its ``errno`` and ``filename``. A plain
    :class:`WriteError` fails only the checkpoint that it is raised for: the next one may succeed.
    """


class StoreLockedError(StoreError):
    """Another process (or engine) writes to this store."""


class StoreFullError(StoreError, OSError):
    """The space that a checkpoint needs could not be reserved; committed checkpoints are untouched."""


class UnsupportedStateError(_PathError, TypeError):
    """A value in the app state cannot be saved; the message names its path."""


class StateMismatchError(_PathError, ValueError):
    """A checkpoint does not fit the state it should be restored into.

    The text names the first few paths; the attributes have all.

    Attributes:
        missing: Paths the state has and the checkpoint lacks.
        unexpected: Paths the checkpoint has and the state lacks.
        mismatched: Paths both have, but with different shapes, dtypes, types or arguments; each with what was found.

    Args:
        message: Text in place of the lists of paths.
        missing: The attribute, as paths with their escapes.
        unexpected: The attribute, as paths with their escapes.
        mismatched: The attribute, as paths with their escapes.
        cause: The probable reason of the difference, for the text.
        advice: A remedy, for the text.
    """

    parts_unseen = False
    """Whether the missing tensors may lie in parts of the checkpoint that cannot be read here."""

    def __init__(
        self,
        message: str = "",
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
        cause: str = "",
        advice: str = "",
    ) -> None:
        parted = [text.partition(" (") for text in mismatched]  # the path, and what was found
        names = iter(readable([*missing, *unexpected, *(path for path, _, _ in parted)]))
        self.missing = tuple(islice(names, len(missing)))
        self.unexpected = tuple(islice(names, len(unexpected)))
        self.mismatched = tuple(name + bracket + what for name, (_, bracket, what) in zip(names, parted, strict=True))
        self._said, self._cause = message, cause
        super().__init__(self.with_advice(advice))

    def with_advice(self, advice: str) -> str:
        """Return the text with ``advice`` in place of the error's own, which is for code that calls ``restore``."""
        if self._said:
            return f"{self._said}; {advice}" if advice else self._said
        lists = {
            "missing from the checkpoint": self.missing,
            "unexpected in the checkpoint": self.unexpected,
            "different in the checkpoint": self.mismatched,
        }
        there = {label: paths for label, paths in lists.items() if paths}
        most = -(-_LISTED // max(1, len(there)))
        listed = "; ".join(f"{label} ({len(paths)}): {_some(paths, most)}" for label, paths in there.items())
        told = "; ".join(filter(None, (self._cause, advice))).replace("?; ", "? ")
        head = "the checkpoint does not fit this state; nothing was restored"
        return explained(". ".join(filter(None, (head, told, listed))))


class TornCaptureError(_PathError):
    """The live state changed while it was captured; nothing of that checkpoint was committed.

    Attributes:
        paths: The leaves that are known to have changed; others may have, too.
    """

    ADVICE: Final = (
        "move code that trains it into the engine.step block, and call engine.wait_captured() before that code, or "
        "checkpoint with overlap=False"
    )
    """Advice for a state that was changed by other code than an optimizer's step."""

    def __init__(self, message: str, *, paths: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.paths = tuple(readable(paths))


class InfeasibleError(CheckpointError, ValueError):
    """No settings fit the machine; the message names the resource that is short, and a remedy.

    Attributes:
        constraints: The limits that were reached: "storage", "memory", "cpu" or "record".
    """

    def __init__(self, message: str, *, constraints: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.constraints = tuple(constraints)


class InvalidTuningError(CheckpointError, ValueError):
    """A file of tuned settings cannot be used: damaged, or from another version."""


class GroupError(CheckpointError):
    """Ranks of a group disagree, or one of them is gone: calls that wait for them fail.

    No committed checkpoint is removed.
    """


class ReplicasDifferError(GroupError):
    """Ranks differ in tensors that were taken for replicas, equal on all ranks: this checkpoint is aborted.

    In the next checkpoint each rank saves its own tensors. Only a caller that waits for the aborted checkpoint gets the
    error; the run goes on, with a warning in the log.
    """


class IncompleteCheckpointError(NoCheckpointError, GroupError):
    """Parts of a checkpoint cannot be reached, though it may be complete; the message names the ranks and hosts.

    Attributes:
        unasked: Whether only one rank's part was requested: the other parts were not searched for, and may be whole.
    """

    unasked = False


class ClosedError(CheckpointError, RuntimeError):
    """The engine is closed, or belongs to another process (after a fork)."""


def write_error(error: OSError, path: str | os.PathLike[str]) -> WriteError:
    """Map the ``OSError`` of a failed write or flush, keeping errno and naming the file."""
    return WriteError(error.errno or _errno.EIO, _advised(error, path), os.fspath(path))


_DESCRIPTORS = "close files, or raise their limit (ulimit -n)"
_ADVICE = {
    _errno.EMFILE: _DESCRIPTORS,
    _errno.ENFILE: "the whole machine has too many files open: see fs.file-max",
    _errno.ESTALE: "the file server does not know this file any more: mount its filesystem again, and start again",
}
_NO_LOCKS = (_errno.ENOLCK, _errno.EOPNOTSUPP, _errno.ENOSYS, _errno.EINVAL)


def _advised(error: OSError, path: str | os.PathLike[str]) -> str:
    text = error.strerror or str(error)
    if is_forbidden(error):
        folder = _closed_folder(Path(path))
        which = "the file" if folder is None else f"the folder {folder}"
        entered = "" if folder is None else f": this process may not read and enter {which}"
        return f"{text}{entered}; that is no damage: use the account that owns {which}, or change its mode"
    return f"{text}; {_ADVICE[error.errno]}" if error.errno in _ADVICE else text


def _closed_folder(path: Path) -> Path | None:
    """Return the outermost folder of a path, itself included, that this process may not enter; None for none.

    The path itself, if it is a folder, must be readable, too.
    """
    wanted = [(folder, os.X_OK) for folder in reversed(path.parents)] + [(path, os.R_OK | os.X_OK)]
    return next((each for each, mode in wanted if os.path.isdir(each) and not os.access(each, mode)), None)


def lock_error(error: OSError) -> OSError:
    """Return the error of a failed ``flock``, with advice in its text if the filesystem has no locks."""
    if error.errno not in _NO_LOCKS:
        return error
    text = (
        f"flock: {error.strerror}; the filesystem has no locks, which keep writers and readers apart: mount it with "
        "them (Lustre: -o flock; NFS: without nolock, or with local_lock=flock on a single host), or use another folder"
    )
    return OSError(error.errno, text, error.filename)


def machine_error(error: OSError | RuntimeError, what: str) -> ReadError:
    """Return the ReadError for a thread or event loop (``what``) that could not be started, with the limit to raise."""
    number = error.errno if isinstance(error, OSError) and error.errno is not None else _errno.EAGAIN
    todo = _ADVICE.get(number, "see ulimit -u and the cgroup's pids.max")
    return ReadError(number, f"{what} cannot be started ({getattr(error, 'strerror', None) or error}); {todo}")


def folder_error(error: OSError, path: str | os.PathLike[str]) -> WriteError:
    """Map the ``OSError`` of a store's folder that cannot be made or opened to a WriteError with reason and remedy."""
    why, use = error.strerror or str(error), "use a folder that this process may write"
    if error.errno in _ADVICE:
        use = _ADVICE[error.errno]
    elif error.errno == _errno.EACCES:
        use += ", below folders that it may enter"
    at, folder = os.fspath(error.filename or path), os.fspath(path)
    if error.errno in (_errno.EEXIST, _errno.ENOTDIR):
        why, use = "it is a file" if os.path.isfile(at) else "it is no folder", "give a folder"
    if at != folder:
        why = f"{at}: {why}"
    text = f"the store's folder cannot be made or opened ({why}); {use}"
    return WriteError(error.errno or _errno.EIO, text, folder)


def is_exhausted(error: BaseException) -> bool:
    """Whether a system call failed for want of descriptors or memory, which says nothing about the stored bytes."""
    return isinstance(error, OSError) and error.errno in (_errno.EMFILE, _errno.ENFILE, _errno.ENOMEM)


def is_forbidden(error: BaseException) -> bool:
    """Whether a system call failed because this process lacks a permission."""
    return isinstance(error, OSError) and error.errno in (_errno.EACCES, _errno.EPERM)


def is_read_only(error: BaseException) -> bool:
    """Whether a file could not be opened for writing because its filesystem is mounted read-only."""
    return isinstance(error, OSError) and error.errno == _errno.EROFS


def read_error(error: OSError, path: str | os.PathLike[str]) -> ReadError:
    """Map the ``OSError`` of a failed read, keeping errno and naming the file."""
    return ReadError(error.errno or _errno.EIO, _advised(error, path), os.fspath(path))
