"""Recovering a store whose records or ``store.json`` are lost. Slots are only read, whatever happens."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pccheck_async.engine.config import EngineConfig
from pccheck_async.errors import (
    CorruptStoreError,
    NoCheckpointError,
    ReadError,
    StoreError,
    StoreLockedError,
    is_exhausted,
    is_forbidden,
)
from pccheck_async.format import checksum
from pccheck_async.format.info import CheckpointInfo
from pccheck_async.format.manifest import MIN_BLOCK
from pccheck_async.format.record import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    FORMAT_VERSION,
    IDENTITY_NAME,
    Entry,
    Identity,
    NewerFormatError,
    Record,
    encode_identity,
    encode_record,
    newest_record,
    rebuild_identity,
    region_offsets,
    slot_name,
    slot_number,
)
from pccheck_async.medium import Writer
from pccheck_async.medium.open_medium import IO, Session
from pccheck_async.store.commit_file import lock_commit
from pccheck_async.store.records import read_commit, stored_identity, unread_record
from pccheck_async.store.store_reader import OneLoop, no_store, with_session
from pccheck_async.transfer.memory import PAGE_BYTES, aligned_buffer
from pccheck_async.upkeep.chunks import Progress
from pccheck_async.upkeep.held import LOCK_SECONDS
from pccheck_async.upkeep.salvage import FoundCheckpoint, arrange, search_slot

__all__ = ["Recovery", "recover_store"]

_NEW = ".recovered"
_BUSY = "in use by another process"

FileState = Literal["valid", "missing", "damaged"]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was found, and done.

    Attributes:
        identity: State of ``store.json``.
        record: State of the commit records: ``valid`` where any of the four copies is.
        found: What each slot holds; empty where the slots were not searched, because a record is valid.
        named: What the record names, or would name, newest first.
        written: Names of the files that were written.
        kept: Names that the files which they replace have now.
    """

    identity: FileState
    record: FileState
    found: tuple[FoundCheckpoint, ...]
    named: tuple[CheckpointInfo, ...]
    written: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def needed(self) -> bool:
        """Whether a trainer could not open the store as it was found."""
        return self.identity != "valid" or self.record != "valid"


def recover_store(
    path: str | os.PathLike[str],
    *,
    write: bool = False,
    search: bool = False,
    slots: Collection[int] | None = None,
    progress: Progress = lambda done, total: None,
    io: IO = "auto",
) -> Recovery:
    """Find out what a damaged store still holds, and make it a store again.

    A record that is valid decides, also where ``store.json`` is lost. Without one the slots are searched: a checkpoint
    counts as whole where its manifest decodes and every chunk has the checksum listed there. That proves that the bytes
    of its tensors are those that were written. It does not prove that it had been committed: the newest one may be one
    that the engine was about to commit. One that failed, such as one whose state changed while it was captured
    (``TornCaptureError``), is not whole: the engine overwrites the beginning of its manifest. Only where the process
    died, or the device failed, just before that, it may be found here. Nor does it prove that no bit of the manifest
    flipped, for only the record has its checksum: look at steps and plain values (:func:`describe_checkpoint`). What
    was pinned is not known any more.

    Args:
        path: Folder of the store.
        write: Write a new commit record, and ``store.json`` where it is not valid. The files that they replace stay
            under other names. Else nothing is written.
        search: Search the slots also where a record is valid, and write one that names what was found.
        slots: Name only the checkpoints in these; by default all that are whole.
        progress: Told bytes searched, and then bytes checked, of one slot after another.
        io: As for :class:`pccheck_async.CheckpointEngine`.

    Durability: what is written survives power loss when this returns. A crash in between leaves a store that can be
    recovered by another call.

    Raises:
        NoCheckpointError: there is nothing here that could be recovered.
        StoreError: ``write`` where nothing is missing or damaged.
        StoreLockedError: ``write`` while a trainer has the store open.
        CorruptStoreError: a newer version of this package made the store.
        ReadError, WriteError: the device failed.
    """

    async def work(session: Session) -> Recovery:
        return await _recover(session, path, write, search, slots, progress)

    with OneLoop() as loop:
        return loop.call(with_session(path, io, work, EngineConfig()))


async def _recover(
    session: Session,
    path: str | os.PathLike[str],
    write: bool,
    search: bool,
    slots: Collection[int] | None,
    progress: Progress,
) -> Recovery:
    writer = session.writer
    alone = write and COMMIT_NAME not in await writer.names()  # no trainer opens it so
    if write and not alone:
        await _lock(writer, path)
    names = await writer.names()  # only now: whoever held the lock may have made slots
    numbers = [number for name in names if (number := slot_number(name)) is not None]
    if not numbers and COMMIT_NAME not in names:
        raise no_store(session, path, "no store, nor parts of one")
    facts = await writer.prepare(create=False)
    identity_state, identity = await _identity(writer)
    commit = await read_commit(writer)
    record, store_id = (None, None) if commit is None else _record(*commit, identity)
    record_state: FileState = "valid" if record else "missing" if commit is None else "damaged"
    found: list[FoundCheckpoint] = []
    if record is None or search:
        for number in numbers:
            block_bytes = identity.block_bytes if identity else MIN_BLOCK
            found.append(await _search(session, number, block_bytes, progress, keep=write, alone=alone))
        if write and any(one.note == _BUSY for one in found):
            raise StoreLockedError(f"another process writes to a slot of {os.fspath(path)}: nothing was written")
        if alone and COMMIT_NAME in await writer.names():
            raise StoreLockedError(f"another process recovered {os.fspath(path)} meanwhile: nothing was written")
        found = [_unasked(one) if slots is not None and one.slot not in slots else one for one in found]
        entries, notes = arrange(found)
        found = [replace(one, note=notes.get(one.slot, one.note)) for one in found]
    else:
        entries = list(record.entries)
    recovery = Recovery(identity_state, record_state, tuple(found), tuple(entry.info for entry in entries), (), ())
    if not write:
        return recovery
    if not recovery.needed and not search:
        raise StoreError(
            f"{os.fspath(path)} is in order: nothing was written (`pccheck verify` checks its checkpoints)"
        )
    if found and not entries:
        raise NoCheckpointError(f"no slot of {os.fspath(path)} holds a whole checkpoint: nothing was written")
    if identity is None:
        block = _block(max(facts.block_bytes, PAGE_BYTES), entries)
        identity = Identity(
            format=FORMAT_VERSION, store_id=store_id or secrets.token_hex(16), checksum=checksum.NAME, block_bytes=block
        )
    writing = _Writing(writer, names)
    if record is None or search:
        await writing.commit(identity, entries)
    if identity_state != "valid":
        await writing.identity(identity)
    return replace(recovery, written=tuple(writing.written), kept=tuple(writing.kept))


def _unasked(one: FoundCheckpoint) -> FoundCheckpoint:
    return replace(one, entry=None, note=one.note or "not asked for")


async def _lock(writer: Writer, path: str | os.PathLike[str]) -> None:
    """Hold the writer's lock until the session ends."""
    if await lock_commit(writer, lambda: writer.open(COMMIT_NAME, writable=True), LOCK_SECONDS) is None:
        raise StoreLockedError(f"another process has {os.fspath(path)} open for writing: close it first")


async def _identity(writer: Writer) -> tuple[FileState, Identity | None]:
    try:
        identity = await stored_identity(writer)
    except NewerFormatError as error:
        raise NewerFormatError(f"{error}: nothing was written; recover it with the version that made it") from None
    except CorruptStoreError:
        return "damaged", None
    except ReadError as error:
        if is_exhausted(error) or is_forbidden(error):
            raise
        return "damaged", None
    return ("missing", None) if identity is None else ("valid", identity)


def _record(
    commit: memoryview, lost: Mapping[int, ReadError], identity: Identity | None
) -> tuple[Record | None, str | None]:
    """Return the newest valid record, and the store id that it names; without ``store.json`` of whatever store."""
    if identity is not None:
        store_id, record = identity.store_id, newest_record(commit, identity.id_bytes)
    elif rebuilt := rebuild_identity(commit):
        store_id, record = rebuilt[0].store_id, rebuilt[1]
    else:
        return None, None
    return None if unread_record(commit, lost, bytes.fromhex(store_id)) else record, store_id


async def _search(
    session: Session, number: int, block_bytes: int, progress: Progress, *, keep: bool, alone: bool
) -> FoundCheckpoint:
    """Search a slot; it stays locked until the session ends where what was found is going to be named.

    With ``alone`` also against others that recover: without a commit file its lock cannot keep them out.
    """
    name = slot_name(number)
    try:
        file = await session.writer.open(name, writable=alone)  # flock over NFS asks for that
    except (CorruptStoreError, OSError) as error:
        if is_exhausted(error) or is_forbidden(error):
            raise  # what it holds may be whole, and would not be named
        return FoundCheckpoint(number, name, None, 0, (), None, str(error))
    try:
        if not await session.writer.try_lock(file, shared=not alone):
            keep = False
            return FoundCheckpoint(number, name, None, 0, (), None, _BUSY)
        return await search_slot(session, file, block_bytes, progress)
    finally:
        if not keep:
            await session.writer.close_file(file)


def _block(block: int, entries: Sequence[Entry]) -> int:
    """Return the largest block size up to ``block`` that every checkpoint keeps."""
    while block > MIN_BLOCK and any(entry.manifest_offset % block for entry in entries):
        block //= 2
    return block


class _Writing:
    """Replaces files of a store; what they replace stays under another name.

    Attributes:
        written: Names of the new files.
        kept: Names that the old ones have now.
    """

    def __init__(self, writer: Writer, names: Sequence[str]) -> None:
        self._writer = writer
        self._names = set(names)
        self.written: list[str] = []
        self.kept: list[str] = []

    async def commit(self, identity: Identity, entries: Sequence[Entry]) -> None:
        """Write a commit file both of whose records name ``entries``: four copies of it."""
        new = COMMIT_NAME + _NEW
        if new in self._names:  # left by a crash
            await self._writer.unlink(new)
        file = await self._writer.create(new, COMMIT_NBYTES)
        image = aligned_buffer(COMMIT_NBYTES)
        for generation in (0, 1):
            data = encode_record(Record(generation, tuple(entries)), identity.id_bytes, identity.block_bytes)
            for offset in region_offsets(generation):
                image[offset : offset + len(data)] = data
        await self._writer.write(file, 0, image)
        await self._writer.flush(file)  # crash: a commit file under its name without its records
        await self._replace(new, COMMIT_NAME)

    async def identity(self, identity: Identity) -> None:
        """Write ``store.json``; it comes last, and names the store whose records are there by then."""
        new = IDENTITY_NAME + _NEW
        await self._writer.write_small(new, encode_identity(identity))
        await self._replace(new, IDENTITY_NAME)

    async def _replace(self, new: str, name: str) -> None:
        if name in self._names:
            number = 0
            while (aside := f"{name}.damaged-{number}") in self._names:
                number += 1
            await self._writer.rename(name, aside)
            self._names.add(aside)
            self.kept.append(aside)
        await self._writer.rename(new, name)
        await self._writer.sync_folder()  # crash: acknowledged, and the old name back
        self.written.append(name)
