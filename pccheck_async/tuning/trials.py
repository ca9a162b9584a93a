# SPDX-License-Identifier: Apache-2.0
"""Measurements of the tuner, in a folder of their own: the storage's speed, and a real engine's at one point."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pccheck_async.engine import EngineConfig, EngineCore, StorageOptions, note_closing_failure_on, run
from pccheck_async.errors import StoreLockedError, folder_error
from pccheck_async.format import align
from pccheck_async.medium import File, Medium
from pccheck_async.medium.open_medium import IO, open_medium
from pccheck_async.transfer import PAGE_BYTES, Tasks, aligned_buffer
from pccheck_async.tuning.choice import Point, staging_bytes

__all__ = ["Disk", "Trial", "TrialSample", "run_trial", "saves_of_trial", "scratch_folder", "try_disk"]

_PREFIX = ".tune-"

_DISK_STREAMS = 4
_DISK_CHUNK_BYTES = 8 << 20
_DISK_FILE = "disk"
_RANDOM_WORDS = 1 << 20
_BLOCK_WORDS = 4096 // 8
_LEAST_SECONDS = 0.05
"""Least seconds of a trial, if ``_MOST_SAVES`` allow it: small checkpoints are saved many times."""
_MOST_SAVES = 64


class Disk(NamedTuple):
    """The speed of the storage, measured without an engine."""

    bandwidth: float  # bytes per second that are written over earlier ones, and flushed
    stream_cpu: float  # share of a core that one running write takes


class Trial(NamedTuple):
    """The result of a trial: Tw in seconds (time per save, multiplied by N), and the seconds of a single capture."""

    durable: float
    captured: float


class TrialSample:
    """A state of ``nbytes`` random bytes, which no storage can compress, to be changed before each save."""

    def __init__(self, nbytes: int) -> None:
        random = np.random.default_rng().integers(-(1 << 63), 1 << 63, _RANDOM_WORDS, np.int64)
        self._words = torch.from_numpy(np.resize(random, max(1, nbytes // 8)))
        blocks = self._words[::_BLOCK_WORDS]
        torch.arange(len(blocks), out=blocks)  # no two blocks are the same
        self.nbytes = self._words.nbytes
        self.state = {"sample": self._words}

    def change(self) -> None:
        """Change every block of 4096 bytes, so that no storage can deduplicate them."""
        self._words[::_BLOCK_WORDS] += 1 << 32


async def try_disk(folder: Path, io: IO, *, nbytes: int, seconds: float) -> Disk:
    """Return the speed of writing over a file: write one of at most ``nbytes`` for ``seconds``, then over it as long.

    The CPU time is that of the whole process, in which nothing else should compute meanwhile.
    """
    opened = await open_medium(folder, io, writers=_DISK_STREAMS, copiers=1)
    try:
        facts = await opened.medium.prepare(create=True)
        chunk = align(min(nbytes, _DISK_CHUNK_BYTES), max(facts.block_bytes, PAGE_BYTES))
        chunks = -(-nbytes // chunk)
        file = await opened.medium.reserve(_DISK_FILE, chunks * chunk)
        data = aligned_buffer(chunk)
        data[:] = np.random.default_rng().bytes(chunk)
        count = await _write(opened.medium, file, data, chunks, seconds, once=True)
        began, busy = time.perf_counter(), time.process_time()
        written = await _write(opened.medium, file, data, count, seconds, once=False)
        took, busy = time.perf_counter() - began, time.process_time() - busy
        await opened.medium.remove(_DISK_FILE)
    finally:
        await opened.close()
    return Disk(written * chunk / took, min(1.0, busy / took / _DISK_STREAMS))


async def _write(medium: Medium, file: File, data: memoryview, chunks: int, seconds: float, *, once: bool) -> int:
    """Write chunk after chunk for ``seconds``, the file again and again or ``once``; flush; return their number."""
    end = time.perf_counter() + seconds
    written = 0

    async def stream() -> None:
        nonlocal written
        while not written or (time.perf_counter() < end and not (once and written == chunks)):
            number, written = written, written + 1
            await medium.write(file, number % chunks * len(data), data)

    async with Tasks() as group:
        for _ in range(_DISK_STREAMS):
            group.create_task(stream())
    await medium.make_durable([(file, ())])
    return written


async def run_trial(folder: Path, io: IO, point: Point, sample: TrialSample, host_memory: int) -> Trial:
    """Save the sample without a pause with an engine at ``point`` and at most ``host_memory`` bytes of staging memory.

    The store in ``folder`` is created the first time. Its slots are written once before the measurement.
    """
    config = EngineConfig(
        max_in_flight=point.max_in_flight,
        overwrite=True,  # the sample of the trial before: nothing of it is to be restored
        storage=StorageOptions(
            io=io,
            writers=point.writers,
            chunk_bytes=point.chunk_bytes,
            host_memory=staging_bytes(sample.nbytes, point, host_memory),
            skip_unchanged=False,  # of the sample every block changes
        ),
    )
    async with _engine(folder, config) as core:
        # Space that was only reserved is slower to write than space that holds data, and staging memory is slow at
        # first touch: a long run has neither.
        written_before = core.infos and core.infos[0].nbytes >= sample.nbytes
        warm_up = 1 if written_before else point.max_in_flight + 1
        took = (await _save(core, sample, warm_up)).durable / warm_up
        most = max(1, _MOST_SAVES // point.max_in_flight)
        turns = max(_turns(point), min(most, round(_LEAST_SECONDS / took / point.max_in_flight)))
        count = turns * point.max_in_flight
        saved = await _save(core, sample, count)
        return Trial(saved.durable * point.max_in_flight / count, saved.captured)


def saves_of_trial(point: Point) -> int:
    """Return the least number of saves of a trial at ``point``."""
    return 1 + _turns(point) * point.max_in_flight


def _turns(point: Point) -> int:
    return 3 if point.max_in_flight == 1 else 2


@asynccontextmanager
async def _engine(folder: Path, config: EngineConfig) -> AsyncIterator[EngineCore]:
    core = EngineCore(folder, config)
    core.stream.saturated = True
    await run(core, core.open)
    try:
        yield core
    except BaseException as error:
        with note_closing_failure_on(error):
            await run(core, core.close)
        raise
    await run(core, core.close)


async def _save(core: EngineCore, sample: TrialSample, count: int) -> Trial:
    """Save ``count`` times, as fast as the engine admits checkpoints.

    With N in flight a capture waits until one has ended, so N are in flight except at the beginning and the end.

    Returns:
        Seconds until all are durable, and until the first is captured.
    """
    began = time.perf_counter()
    captured = 0.0
    pendings = []
    for _ in range(count):
        sample.change()
        pending, start = core.start_checkpoint(sample.state, None, None)
        await pending.captured()
        captured = captured or time.perf_counter() - start
        pendings.append(pending)
    for pending in pendings:
        await pending.durable()
    return Trial(time.perf_counter() - began, captured)


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder inside ``folder``, and afterwards remove it, and the parents that were created for it.

    The interpreter's exit removes it, too. Folders that a killed process left are removed by the next call.

    Raises:
        StoreLockedError: another process has a scratch folder there.
        WriteError: the folder cannot be created.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                _lock(fd, folder)
                made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder, ignore_cleanup_errors=True)
            except OSError as error:
                raise folder_error(error, folder) from error
            yield Path(stack.enter_context(made))
    finally:
        for parent in missing:
            with suppress(OSError):  # not empty: somebody else put something there
                parent.rmdir()


def _lock(fd: int, folder: Path) -> None:
    """Lock ``folder`` against other tunings, and remove scratch folders that a killed one left there."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreLockedError(f"another tuning runs in {folder}; each would measure the other") from None
    except OSError:
        return  # a filesystem that locks no folders: leftovers stay
    for left in folder.glob(_PREFIX + "*"):
        shutil.rmtree(left, ignore_errors=True)
