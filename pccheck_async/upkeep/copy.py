"""One checkpoint copied into another store: verified on the way, and committed there as any other."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from msgspec import structs

from pccheck_async.api import with_session
from pccheck_async.engine import EngineConfig
from pccheck_async.errors import DamagedError, StoreFullError
from pccheck_async.format import CheckpointInfo, align, check_step, crc32
from pccheck_async.format.manifest import encode
from pccheck_async.format.record import MOST_ENTRIES
from pccheck_async.medium.open_medium import IO, Session, store_path
from pccheck_async.store import KeepAll, SlotLease, Store, open_store
from pccheck_async.transfer import aligned_buffer
from pccheck_async.upkeep.reading import (
    LOCK_SECONDS,
    Held,
    Progress,
    Run,
    check_chunks,
    hold,
    make_pool,
    open_reader,
    run_with_session,
)

__all__ = ["copy_checkpoint"]


def copy_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    pinned: bool | None = None,
    progress: Progress = lambda done, total: None,
    io: IO = "auto",
) -> CheckpointInfo:
    """Copy a checkpoint into another store, which is made where there is none. Nothing is dropped there.

    It becomes the newest checkpoint of ``target``. Step, time and metadata stay; the counter, too, where every counter
    there is smaller, and else it gets the next one. Every chunk is verified between reading and writing, in staging
    buffers of bounded size, past the page cache on both sides where the filesystems allow it.

    Durability: when this returns the copy survives power loss. On an error nothing was committed.

    Args:
        source: Store that has it; a trainer may write to it meanwhile.
        target: Store that gets it; no trainer has it open.
        step: The newest checkpoint of this step; by default the newest of all.
        pinned: Whether the copy is pinned; by default as it is in ``source``. One that is not pinned goes when a
            trainer that opens ``target`` commits, unless its rules keep it.
        progress: See :data:`Progress`.
        io: As for :class:`pccheck_async.CheckpointEngine`.

    Returns:
        The checkpoint as ``target`` has it.

    Raises:
        ValueError: both are one folder, or ``target`` is a URL or begins with ``~``.
        NoCheckpointError: there is none to copy.
        CorruptStoreError: it is damaged (DamagedError), or ``target`` is.
        StoreLockedError: a trainer has ``target`` open.
        StoreFullError: there is no space for it, or a commit record has no room for it.
        ReadError, WriteError: a device failed.
    """
    step, target = check_step(step), store_path(target)
    with suppress(OSError):
        if os.path.samefile(source, target):
            raise ValueError(f"{os.fspath(source)} and {os.fspath(target)} are one folder: there is nothing to copy")

    async def read(first: Session) -> CheckpointInfo:
        reader = await open_reader(first, source)
        async with hold(reader, source, step) as held:
            return await with_session(target, io, lambda second: write(held, second), EngineConfig())

    async def write(held: Held, session: Session) -> CheckpointInfo:
        store = await open_store(
            session.medium, path=target, retention=KeepAll(), max_in_flight=1, lock_timeout=LOCK_SECONDS
        )
        if len(store.committed.entries) >= MOST_ENTRIES:
            raise StoreFullError(
                errno.ENOSPC, f"a commit record names {MOST_ENTRIES} checkpoints: remove some first", os.fspath(target)
            )
        return await _copy(held, store, session, pinned, progress)

    return run_with_session(source, io, read)


async def _copy(held: Held, store: Store, session: Session, pinned: bool | None, progress: Progress) -> CheckpointInfo:
    entry = structs.replace(
        held.entry,
        counter=max(held.entry.counter, store.committed.largest_counter + 1),
        pinned=held.entry.pinned if pinned is None else pinned,
    )
    manifest = structs.replace(held.manifest, counter=entry.counter)
    data = encode(manifest)
    block = store.block_bytes
    offset = align(manifest.payload_nbytes, block)
    lease = await store.reserve(offset + align(len(data), block))
    try:
        await _copy_payload(held, session, lease, progress)
    except BaseException:
        await store.release(lease)
        raise
    padded = aligned_buffer(align(len(data), block))
    padded[: len(data)] = data
    await store.commit(
        lease,
        structs.replace(
            entry,
            slot=lease.slot,
            manifest_offset=offset,
            manifest_nbytes=len(data),
            manifest_checksum=crc32(data),
        ),
        [(offset, padded)],
    )
    return entry.info


async def _copy_payload(held: Held, session: Session, lease: SlotLease, progress: Progress) -> None:
    manifest, done = held.manifest, 0

    def damaged(index: int, reason: str) -> None:
        chunk = manifest.chunks[index]
        raise DamagedError(
            f"{held.file.name}: chunk {index} (bytes {chunk.offset} to {chunk.offset + chunk.nbytes}) of the "
            f"checkpoint of step {held.entry.step} is damaged ({reason}); nothing was copied"
        )

    async def write(run: Run, view: memoryview) -> None:
        # Where blocks of the target are larger than those of the source, a run may end inside one. Then the writer
        # goes on without O_DIRECT.
        nonlocal done
        await session.medium.write(lease.file, run.offset, view)
        done += run.nbytes
        progress(done, manifest.payload_nbytes)

    pool = make_pool(manifest)
    try:
        await check_chunks(held.reader.session, held.file, manifest.chunks, pool, damaged=damaged, checked=write)
    finally:
        pool.close()
