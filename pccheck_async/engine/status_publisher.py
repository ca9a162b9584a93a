# SPDX-License-Identifier: Apache-2.0
"""Publishes the status of an engine into a file, for other processes to look at."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pccheck_async.engine.flight import Flight
from pccheck_async.engine.policy import TrainingHooks
from pccheck_async.engine.statistics import EngineStatistics
from pccheck_async.errors import CorruptStoreError
from pccheck_async.format import CheckpointInfo
from pccheck_async.medium.folder import open_regular
from pccheck_async.medium.status_file import (
    STATUS_NAME,
    CommittedStatus,
    InFlightStatus,
    Status,
    copied,
    encode_status,
    starts_status,
)
from pccheck_async.telemetry import COUNTED, write
from pccheck_async.transfer import ForkLock

__all__ = ["PUBLISH_SECONDS", "Publisher", "make_status"]

PUBLISH_SECONDS = 0.5
_MOST_COMMITTED = 8
_MODE = 0o666  # the user's umask decides
_making = ForkLock()


class Publisher:
    """Writes the status twice a second, on a thread of its own, as a write to a busy filesystem may take long.

    The store's medium is not used: the file is never flushed, nothing depends on it, and errors are logged once and
    have no other consequence.

    Args:
        store: Path of the store.
        collect: Returns the status to publish.
        pause: Seconds between two writes.
    """

    def __init__(self, store: str, collect: Callable[[], Status], *, pause: float = PUBLISH_SECONDS) -> None:
        self._path = Path(store).absolute() / STATUS_NAME  # the process may change its folder before the first one
        self._store = store
        self._collect = collect
        self._pause = pause
        self._fd = -1
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Publish from now on. Called at every checkpoint, under the engine's lock; later calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pccheck-status", daemon=True)  # interrupted or not
            with suppress(RuntimeError):  # no thread can be started any more, while the interpreter exits
                self._thread.start()

    def close(self, timeout: float) -> None:
        """Remove the file and end the thread, or leave that to the thread if it takes longer than ``timeout`` seconds.

        Called while the store is locked, so the file cannot be another engine's. If nothing was published, the file is
        that of an engine that died, and is removed, too: it would go on to report that crash.
        """
        self._end.set()
        if self._thread is None:
            with suppress(OSError, CorruptStoreError):
                self._remove_old()
        elif self._thread.ident is not None:
            self._thread.join(timeout)

    def abandon(self) -> None:
        """In a forked child: close the file, and with it its lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def _run(self) -> None:
        ended = logged = False
        while not ended:
            try:
                data = encode_status(self._collect())
                if self._fd < 0:
                    self._create(data)
                else:
                    os.pwrite(self._fd, data, 0)
            except Exception as error:  # noqa: BLE001 - checkpoints do not depend on it
                if not logged:
                    logged = True
                    text = "%s: other processes (pccheck watch) see nothing of this engine: %s; said once"
                    write("status", text, self._store, error, store=self._store)
            ended = self._end.wait(self._pause)
        if self._fd >= 0:
            with suppress(OSError):
                if os.path.samestat(os.fstat(self._fd), self._path.lstat()):  # after a timeout it may be another's
                    self._path.unlink()
            self.abandon()

    def _create(self, data: bytes) -> None:
        """Replace the file of a process that died, or create it; raise an error if there is another kind of file.

        The new file gets its name when it is locked and has content: a reader that found it before could lock it
        shared, or take this process for dead.
        """
        with suppress(FileNotFoundError):
            self._remove_old()
        nameless = self._path.with_name(STATUS_NAME + ".tmp")
        nameless.unlink(missing_ok=True)  # of a process that died, as the store is locked
        try:
            with _making:
                self._fd = os.open(nameless, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
            with suppress(OSError):  # if the filesystem locks nothing, its age shows whether the engine lives
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._fd, data, 0)
            nameless.rename(self._path)
        except BaseException:
            self.abandon()
            with suppress(OSError):
                nameless.unlink(missing_ok=True)
            raise

    def _remove_old(self) -> None:
        """Remove the status file of an engine that died. Raises an error if it is another file, or not there."""
        fd = open_regular(self._path, os.O_RDONLY)
        try:
            if not starts_status(os.pread(fd, 32, 0)):
                raise FileExistsError(f"{self._path} is not a status file of an engine")
        finally:
            os.close(fd)
        self._path.unlink()


def make_status(
    statistics: EngineStatistics,
    started: float,
    in_flight: Sequence[Flight],
    newest: Flight | None,
    committed: Sequence[CheckpointInfo],
    training: TrainingHooks,
    failure: BaseException | None,
) -> Status:
    """Return the status to publish.

    ``started`` is in seconds since the epoch; ``newest`` was admitted last; ``committed`` are newest first;
    ``training`` has the last training step; ``failure`` stopped the store from taking commits.
    """
    report = training.last_report
    now, clock, interval = time.time(), time.monotonic(), statistics.interval
    next_step, next_time = None, None
    if newest is not None and report is not None:
        if interval.interval is not None:
            next_step = newest.step + interval.interval
        elif interval.seconds is not None:
            next_time = now - clock + newest.admitted_at + interval.seconds
    return copied(
        Status,
        statistics,
        pid=os.getpid(),
        host=socket.gethostname(),
        started=started,
        time=now,
        in_flight=[
            copied(
                InFlightStatus, each.progress, step=each.step, counter=each.counter, seconds=clock - each.admitted_at
            )
            for each in in_flight
        ],
        committed=[copied(CommittedStatus, info) for info in committed[:_MOST_COMMITTED]],
        counts={name: getattr(statistics, name) for name in COUNTED},
        save_seconds=statistics.save_seconds.mean,
        stage_bytes={name: stage.nbytes for name, stage in statistics.stages.items()},
        stage_seconds={name: stage.seconds for name, stage in statistics.stages.items()},
        host_memory=statistics.decisions.host_memory,
        interval=interval.interval,
        interval_seconds=interval.seconds,
        reason=interval.reason,
        step=None if report is None else report.step,
        step_seconds=training.step_seconds,
        next_step=next_step,
        next_time=next_time,
        failure="" if failure is None else f"{type(failure).__name__}: {failure}",
    )
