# SPDX-License-Identifier: Apache-2.0
"""The parts of an open engine: all that bytes go through between a state and its store, made and closed together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from pccheck_async.engine.capture import InlineCaptures
from pccheck_async.engine.config import EngineConfig, decide
from pccheck_async.engine.drain import Draining
from pccheck_async.engine.flight import Flight
from pccheck_async.engine.in_flight import InFlight
from pccheck_async.engine.loop import EngineLoop
from pccheck_async.engine.memory import Memory, warn_of_memory
from pccheck_async.engine.peers import Peers
from pccheck_async.engine.scheduler import Scheduler
from pccheck_async.engine.status_publisher import Publisher
from pccheck_async.errors import CheckpointError
from pccheck_async.format.record import FORMAT_VERSION, MIN_BLOCK
from pccheck_async.medium.open_medium import OpenMedium, open_medium
from pccheck_async.medium.status_file import Status
from pccheck_async.store import KnownBytes, can_hash, open_store, warn_of_newer
from pccheck_async.telemetry import Stream
from pccheck_async.transfer import BufferPool, share_of_machine, uninterrupted
from pccheck_async.transfer.copying import CopyBackend, make_backend
from pccheck_async.transfer.plan import Planner

__all__ = ["EngineParts"]

_OTHERS_SECONDS = 60.0
"""Seconds that closing waits for other ranks, which may be dead, to save the newest checkpoint in memory on disk."""
_END_SECONDS = 0.5
"""Seconds that each step of closing may take even if its deadline has passed."""


class EngineParts:
    """The parts of an engine whose store is open.

    Attributes:
        complete: Whether :meth:`open` made all of them.
        memory: The memory tier; None without one.
        drain: The drain, which copies checkpoints to a bucket; None without one.
        publisher: Publisher of the status file, for other processes; None if ``io`` is a medium.
    """

    complete = False
    opened: OpenMedium
    memory: Memory | None = None
    drain: Draining | None = None

    async def open(
        self,
        path: str,
        config: EngineConfig,
        peers: Peers,
        *,
        loop: EngineLoop,
        in_flight: InFlight,
        stream: Stream,
        collect: Callable[[], Status],
    ) -> None:
        """Lock (or create) the store, recover, and make all parts around it.

        ``collect`` is as for :class:`Publisher`.

        Raises the errors of :func:`open_store`; WriteError if the folder cannot be written.
        """
        self.loop, self.stream, self.peers = loop, stream, peers
        options = config.storage
        cores, memory = share_of_machine()
        first = decide(options, block_bytes=MIN_BLOCK, cores=cores, memory=memory)
        # Set before any file is open: a child forked meanwhile closes them.
        self.opened = opened = await open_medium(
            path, options.io, writers=first.writers, copiers=first.copiers, medium=options.medium
        )
        backend: CopyBackend | None = None
        try:
            self.store = store = await open_store(
                opened.medium,
                path=path,
                retention=config.retention,
                max_in_flight=config.max_in_flight,
                lock_timeout=options.lock_timeout,
                version=peers.record_version,
                known=_known_bytes(config, opened),
            )
            block_bytes = store.block_bytes
            if peers.record_version == FORMAT_VERSION:  # a group's ranks agree on which of their parts count
                await warn_of_newer(store, path)
            if config.memory is None and store.committed.record.line is not None:
                warn_of_memory(path, store, partial(peers.memory_folder, path))
            if config.memory is not None:
                self.memory = await Memory.open(
                    config.memory,
                    path,
                    store,
                    opened.operations,
                    config.max_in_flight + peers.undecided,
                    options.lock_timeout,
                    partial(peers.memory_folder, path),
                    peers.record_version,
                )
                block_bytes = max(block_bytes, self.memory.store.block_bytes)
            self.backend = backend = make_backend(opened.operations, options.gpu_capture)
            if config.drain is not None:
                self.drain = await Draining.open(
                    config.drain,
                    path,
                    store,
                    opened.operations,
                    backend,
                    peers,
                    owns=peers.leads,
                    of_group=peers.collective,
                    overwrite=config.overwrite,
                )
            pinning = backend.pinning
            self.decisions = decisions = decide(
                options, block_bytes=block_bytes, cores=cores, memory=memory, cuda=pinning is not None
            )
            decisions.reasons["io"] = opened.reason
            self.pool = BufferPool(decisions.host_memory, decisions.chunk_bytes, pinning)
            self.planner = Planner(decisions.chunk_bytes, block_bytes)
            self.inline_captures = InlineCaptures(opened.operations, self.planner)
            self.scheduler = Scheduler(
                store=store,
                peers=peers,
                pool=self.pool,
                planner=self.planner,
                backend=backend,
                max_in_flight=config.max_in_flight,
                in_flight=in_flight,
                stream=stream,
                path=path,
                memory=self.memory,
                draining=self.drain,
            )
            # Other media need not be folders.
            self.publisher = Publisher(path, collect) if isinstance(options.io, str) else None
            self.complete = True
        except BaseException:
            if self.memory is not None:
                await self.memory.close_files()
            await opened.close()
            if backend is not None:
                backend.close()
            raise

    def abandon(self) -> None:
        """In a forked child: close every descriptor, at any stage of :meth:`open`."""
        if hasattr(self, "opened"):
            self.opened.medium.abandon()
        if self.memory is not None:
            self.memory.abandon()
        if (publisher := getattr(self, "publisher", None)) is not None:
            publisher.abandon()

    async def close(self, deadline: float | None = None) -> tuple[bool, list[Flight]]:
        """Wait for the checkpoints in flight, save the newest one in memory on disk, drain, and close all parts.

        Returns:
            Whether all parts are closed, and the checkpoints that had not ended after ``deadline`` seconds. If there
            are any, or anything else had not ended by then, the open parts are left behind.

        Cancellation: aborts the checkpoints in flight, waits for their operations, and closes.
        """
        began, ending, closer = time.monotonic(), None, asyncio.current_task()

        def rest() -> float | None:
            return None if deadline is None else max(_END_SECONDS, began + deadline - time.monotonic())

        try:
            self.peers.leaving()
            left = await self.scheduler.drain(deadline, last=True)
            if left:
                self._stop_publishing(0.1)
                self.scheduler.give_up(left)  # the rest of their states may change from now on
                return False, left
            await self._save_unsaved(rest())
            await self.peers.leave(rest())  # before the drain ends: checkpoints of others would wait for the bucket
            if self.drain is not None:
                limits = [each for each in (rest(), self.scheduler.seconds_left) if each is not None]
                await self.drain.close(min(limits, default=None))
            await self.peers.disconnect(rest())
            ending = asyncio.ensure_future(self._end(closer, rest()))
            await asyncio.wait((ending,), timeout=rest())
        except asyncio.CancelledError:
            await uninterrupted(self._cut_short(ending or self._end(closer)))
            raise
        if ending.done():
            ending.result()
        return ending.done(), []

    async def _cut_short(self, ending: Awaitable[None]) -> None:
        try:
            await self.peers.cut_short()
        finally:
            await ending

    async def _save_unsaved(self, seconds: float | None) -> None:
        """Save the newest checkpoint in memory on disk; then fail those that are in memory alone."""
        error: Exception | None = None
        if seconds is None and self.peers.collective:
            seconds = _OTHERS_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await self.scheduler.save_unsaved()
        except (CheckpointError, OSError) as failure:  # also TimeoutError
            error = failure
        self.scheduler.in_flight.fail_in_memory(error)

    async def _end(self, closer: asyncio.Task[Any] | None, seconds: float | None = None) -> None:
        self._stop_publishing(5.0 if seconds is None else min(5.0, seconds))
        if self.drain is not None:
            await self.drain.cancel()
        await self.scheduler.cancel_all()  # nothing but the removal of slots, unless the drain was cancelled
        await self.loop.end_others(closer)  # restores of other threads
        if self.memory is not None:
            await self.memory.close(self.opened.operations, removes=self.peers.disposable_memory)
        await self.opened.close()
        self.backend.close()
        self.pool.close()

    def _stop_publishing(self, seconds: float) -> None:
        if self.publisher is not None:
            self.publisher.close(seconds)  # while the store is locked


def _known_bytes(config: EngineConfig, opened: OpenMedium) -> KnownBytes | None:
    """Return the memory of the bytes that slots hold, to skip writing these; None if all chunks are to be written."""
    wanted = config.storage.skip_unchanged
    if wanted == "auto":
        wanted = can_hash() and config.keep_last != "all"  # else no slot is taken again
    if not wanted or opened.medium.stages:
        return None
    return KnownBytes(opened.medium, opened.operations.call, lasting=config.storage.skip_unchanged is True)
