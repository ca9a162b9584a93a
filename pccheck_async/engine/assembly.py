"""The pipeline of an engine: all that bytes go through between a state and its store, made and closed together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pccheck_async.engine.aborts import Aborts
from pccheck_async.engine.config import Decisions, EngineConfig, decide
from pccheck_async.engine.in_flight import Admissions
from pccheck_async.engine.inline_capture import Images
from pccheck_async.engine.loop import EngineLoop
from pccheck_async.engine.pending import PendingCheckpoint
from pccheck_async.engine.restorer import Restorer
from pccheck_async.engine.scheduler import Scheduler
from pccheck_async.engine.status_publisher import Publisher
from pccheck_async.format.manifest import MIN_BLOCK
from pccheck_async.medium.open_medium import IO, Session, open_session
from pccheck_async.medium.status_file import Status
from pccheck_async.store.commit import Store, open_store
from pccheck_async.telemetry.reporter import Reporter
from pccheck_async.telemetry.stages import StageClock
from pccheck_async.transfer.copying import CopyBackend, CudaCopy, make_backend
from pccheck_async.transfer.machine import available_cores, available_memory
from pccheck_async.transfer.plan import Planner
from pccheck_async.transfer.pool import BufferPool
from pccheck_async.transfer.uninterrupted import uninterrupted

__all__ = ["Pipeline", "open_pipeline"]

_AT_ONCE = 256 << 10
"""Bytes of a state that is captured before the engine's thread hears of it."""
_END_SECONDS = 0.5
"""What the end of threads and files may take in any case, where nothing hangs."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pipeline:
    """What an engine is made of once its store is open. Made by :func:`open_pipeline`.

    Attributes:
        loop: Runs it.
        session: Operations, and the files of the store.
        store: Where checkpoints go.
        decisions: The numbers behind every "auto".
        backend: Copies.
        pool: Staging buffers.
        planner: Lays states out.
        images: Makes the images of small ones.
        clock: Stage times.
        scheduler: Runs checkpoints.
        aborts: Ends them early.
        restorer: Runs restores.
        publisher: Tells other processes; None for a folder that only a user's writer knows.
    """

    loop: EngineLoop
    session: Session
    store: Store
    decisions: Decisions
    backend: CopyBackend
    pool: BufferPool
    planner: Planner
    images: Images
    clock: StageClock
    scheduler: Scheduler
    aborts: Aborts
    restorer: Restorer
    publisher: Publisher | None

    async def close(self, deadline: float | None = None) -> tuple[bool, list[PendingCheckpoint]]:
        """Drain, and close all of it.

        Returns:
            Whether all of it is closed, and the checkpoints that had not ended after ``deadline`` seconds. Where there
            are any, or anything else had not ended by then, all of it is left behind.

        Cancellation: aborts what is in flight, waits for its operations, and closes.
        """
        began, ending, closer = time.monotonic(), None, asyncio.current_task()
        try:
            left = await self.scheduler.drain(deadline, last=True)
            if left:
                self._stop_publishing(0.1)
                self.scheduler.give_up(left)  # what they still had to capture may change from now on
                return False, left
            rest = None if deadline is None else max(_END_SECONDS, began + deadline - time.monotonic())
            ending = asyncio.ensure_future(self._end(closer, rest))
            await asyncio.wait((ending,), timeout=rest)
        except asyncio.CancelledError:
            await uninterrupted(ending or self._end(closer))
            raise
        if ending.done():
            ending.result()
        return ending.done(), []

    async def _end(self, closer: asyncio.Task[Any] | None, seconds: float | None = None) -> None:
        self._stop_publishing(5.0 if seconds is None else min(5.0, seconds))
        await self.scheduler.cancel_all()  # nothing but the removal of slots, unless the drain was cancelled
        await self.loop.end_others(closer)  # restores of other threads
        await self.session.close()
        self.backend.close()
        self.pool.close()

    def _stop_publishing(self, seconds: float) -> None:
        if self.publisher is not None:
            self.publisher.close(seconds)  # while the store is locked


async def open_pipeline(
    path: str,
    io: IO,
    config: EngineConfig,
    *,
    loop: EngineLoop,
    admissions: Admissions,
    reporter: Reporter,
    patience: Callable[[], float | None],
    collect: Callable[[], Status],
    began: Callable[[Session], None],
) -> Pipeline:
    """Lock (or create) the store, recover, and make everything around it.

    Args:
        path: Folder of the store.
        io: Operations engine, or writer.
        config: The user's settings.
        loop: The engine's, on which this is called.
        admissions: The engine's; they go on from the largest counter of the store.
        reporter: Told of what happens.
        patience: As for :class:`Aborts`.
        collect: As for :class:`Publisher`.
        began: Called with the session before any file of it is open.

    Raises:
        StoreLockedError, CorruptStoreError, StoreFullError: as :func:`open_store`.
        WriteError: the folder cannot be written.
    """
    cores, memory = available_cores(), available_memory()
    first = decide(config, block_bytes=MIN_BLOCK, cores=cores, memory=memory)
    session = await open_session(path, io, writers=first.writers, copiers=first.copiers)
    began(session)
    backend: CopyBackend | None = None
    try:
        in_flight, writer = config.max_in_flight, session.writer
        store = await open_store(
            writer, path=path, retention=config.retention, max_in_flight=in_flight, lock_timeout=config.lock_timeout
        )
        backend = make_backend(session.operations, config.device)
        pinning = backend.pinning if isinstance(backend, CudaCopy) else None
        block_bytes, cuda = store.block_bytes, pinning is not None
        decisions = decide(config, block_bytes=block_bytes, cores=cores, memory=memory, cuda=cuda)
        decisions.reasons["io"] = session.reason
        pool = BufferPool(decisions.host_memory, decisions.chunk_bytes, pinning)
        planner = Planner(decisions.chunk_bytes, store.block_bytes)
        images = Images(session.operations, planner, min(_AT_ONCE, decisions.chunk_bytes))
        clock = StageClock("capture", "commit", "restore")
        scheduler = Scheduler(
            store=store,
            writer=writer,
            backend=backend,
            pool=pool,
            planner=planner,
            images=images,
            max_in_flight=in_flight,
            clock=clock,
            ended=admissions.note_end,
            reporter=reporter,
            path=path,
        )
        restorer = Restorer(
            store=store, writer=writer, backend=backend, pool=pool, clock=clock, post=loop.post, reporter=reporter
        )
        admissions.counter = store.committed.largest_counter
        return Pipeline(
            loop=loop,
            session=session,
            store=store,
            decisions=decisions,
            backend=backend,
            pool=pool,
            planner=planner,
            images=images,
            clock=clock,
            scheduler=scheduler,
            aborts=Aborts(loop, scheduler, admissions, patience),
            restorer=restorer,
            # Of other writers' folders only they know what and where they are.
            publisher=Publisher(path, collect) if isinstance(io, str) else None,
        )
    except BaseException:
        await session.close()
        if backend is not None:
            backend.close()
        raise
