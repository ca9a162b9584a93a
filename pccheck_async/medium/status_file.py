# SPDX-License-Identifier: Apache-2.0
"""The status file: statistics that a running engine publishes for other processes.

``<store>/status`` is no part of the store's format: nothing is decided by it, nothing of it is flushed, and any of it
may be missing. It is one line ``pccheck-status 1 <length> <CRC-32>``, both in eight hexadecimal digits, and a JSON
document of that length. An engine makes the file when its first checkpoint was admitted, writes over it twice a second,
keeps ``flock`` on it as long as it lives, and removes it, or one that it found, when it is closed. So a file that is
not locked is the last status of a process that died.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from pccheck_async.errors import CorruptStoreError, read_error
from pccheck_async.format import crc32
from pccheck_async.medium.folder import open_regular

__all__ = [
    "STATUS_NAME", "CommittedStatus", "InFlightStatus", "Published", "Status", "copied", "encode_status", "read_status",
    "starts_status",
]  # fmt: skip

STATUS_NAME = "status"
_MAGIC = b"pccheck-status 1 "
_HEAD = re.compile(_MAGIC + rb"([0-9a-f]{8}) ([0-9a-f]{8})\n")
_MOST_BYTES = 1 << 20
_TRIES = 20
_STALE_SECONDS = 10.0
"""Age of the last status from which a writer is taken for dead if the filesystem has no locks."""
_Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An integer of 64 bits, which converts to float; larger ones are forged."""


class InFlightStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in progress (see ``PendingCheckpoint.progress``); ``seconds`` is the time since its admission."""

    step: _Int
    counter: _Int
    phase: str
    nbytes: _Int
    captured: _Int
    written: _Int
    seconds: float


class CommittedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A durable checkpoint; see :class:`pccheck_async.CheckpointInfo`."""

    step: _Int
    counter: _Int
    nbytes: _Int
    time: float
    pinned: bool


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A published status; fields without a line here are those of :class:`pccheck_async.EngineStatistics`.

    Attributes:
        pid: Id of the engine's process.
        host: Name of the engine's machine.
        started: When the engine was opened, in seconds since the epoch.
        time: When this was published, in seconds since the epoch.
        in_flight: Checkpoints in progress, oldest first.
        committed: The newest committed checkpoints, newest first.
        counts: Numbers of checkpoints: admitted, durable, superseded, failed, skipped, abandoned, in_memory.
        save_seconds: Time from admission to durability, on average; None before the first.
        stage_bytes: Bytes of each stage so far.
        stage_seconds: Seconds of each stage so far, summed over concurrent operations.
        host_memory: Staging memory that may be used, in bytes.
        interval: Steps between checkpoints that the policy has decided on; None if it goes by time or is undecided.
        interval_seconds: Seconds between checkpoints; None if not known.
        reason: The policy's reason for the interval.
        step: The last step that ``engine.step`` finished, None before the first.
        step_seconds: Time between the ends of the last two steps, with all of the loop; None before the second.
        next_step: The step after which the next checkpoint is due, None if not known.
        next_time: The time when it is due, in seconds since the epoch, None if not known.
        failure: The error that stopped the store from taking commits; empty while it takes them.
    """

    pid: _Int
    host: str
    started: float
    time: float
    in_flight: list[InFlightStatus]
    committed: list[CommittedStatus]
    counts: dict[str, _Int]
    durable_bytes: _Int
    save_seconds: float | None
    stall_seconds: float
    stage_bytes: dict[str, _Int]
    stage_seconds: dict[str, float]
    pool_bytes: _Int
    pool_in_use_bytes: _Int
    host_memory: _Int
    slots: _Int
    slot_bytes: _Int
    io: str
    interval: _Int | None
    interval_seconds: float | None
    reason: str
    step: _Int | None
    step_seconds: float | None
    next_step: _Int | None
    next_time: float | None
    failure: str


S = TypeVar("S", bound=msgspec.Struct)


def copied(kind: type[S], source: object, **others: Any) -> S:
    """Return a struct whose fields are ``others``, and for the rest the attributes of ``source`` of the same names."""
    same = {name: getattr(source, name) for name in kind.__struct_fields__ if name not in others}
    return kind(**same, **others)


@dataclass(frozen=True, slots=True)
class Published:
    """The contents of a status file, and whether the engine that wrote it still runs."""

    status: Status
    alive: bool


def encode_status(status: Status) -> bytes:
    """Return the bytes of a status file."""
    body = msgspec.json.encode(status)
    return b"%b%08x %08x\n%b" % (_MAGIC, len(body), crc32(body), body)


def starts_status(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a status file; an empty one counts as one."""
    return not head or head.startswith(_MAGIC)


def read_status(path: str | os.PathLike[str]) -> Published | None:
    """Read the last status of a store's engine; None if there is none, or it cannot be decoded.

    This takes no lock of the store, and writes nothing. Raises OSError if the file cannot be read.
    """
    name = Path(path) / STATUS_NAME
    while True:
        try:
            fd = open_regular(name, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError, CorruptStoreError):
            return None
        except PermissionError as error:
            raise read_error(error, name) from error
        try:
            if (status := _read(fd)) is None:
                return None
            # An engine that is closed removes its file, and only then releases the lock.
            if (alive := _is_locked(fd, status)) or _leads_to(name, fd):
                return Published(status, alive)
        finally:
            os.close(fd)


def _leads_to(name: Path, fd: int) -> bool:
    try:
        return os.path.samestat(name.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _read(fd: int) -> Status | None:
    for _ in range(_TRIES):  # the writer may be writing right now
        data = os.pread(fd, _MOST_BYTES, 0)
        if (head := _HEAD.match(data)) is None:
            return None
        body = data[head.end() :][: int(head[1], 16)]
        if len(body) == int(head[1], 16) and crc32(body) == int(head[2], 16):
            try:
                return msgspec.json.decode(body, type=Status)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None
        time.sleep(0.001)
    return None


def _is_locked(fd: int, status: Status) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return time.time() - status.time < _STALE_SECONDS
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
