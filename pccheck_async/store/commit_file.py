"""The file ``commit`` of a store: made together with the store, locked against other writers, laid out."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress

from pccheck_async.errors import CorruptStoreError, StoreLockedError, WriteError
from pccheck_async.format import checksum
from pccheck_async.format.record import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    FORMAT_VERSION,
    IDENTITY_NAME,
    REGION_NBYTES,
    Identity,
    Record,
    decode_record,
    encode_identity,
    encode_record,
    names_checkpoints,
    region_offsets,
    slot_number,
)
from pccheck_async.medium import File, Part, Writer
from pccheck_async.medium.lifetime import made_here
from pccheck_async.medium.status_file import read_status
from pccheck_async.store.records import read_identity, read_records
from pccheck_async.transfer.memory import PAGE_BYTES, aligned_buffer

__all__ = ["CommitFile", "lock_commit", "open_commit"]

_POLL_SECONDS = 0.01
"""Locks of other processes can only be polled: flock tells nobody when it becomes free."""
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)


class CommitFile:
    """Where the records of a store go, locked as long as it is open. Made by :func:`open_commit`.

    Attributes:
        file: The file.
        identity: What ``store.json`` beside it says.
        is_new: Whether this process made it, and flushed what is in it.
    """

    def __init__(self, file: File, identity: Identity, *, is_new: bool) -> None:
        self.file = file
        self.identity = identity
        self.is_new = is_new
        self._id_bytes = identity.id_bytes
        self._buffer = aligned_buffer(REGION_NBYTES)

    def part(self, record: Record) -> Part:
        """Return what is written for a record; good until the next call."""
        data = encode_record(record, self._id_bytes, self.identity.block_bytes)
        # Two copies on separate blocks: one damaged block does not cost the record. Both only ever touch this
        # generation's parity, so the record before stays whole whatever happens here, in whatever order.
        view = self._buffer[: len(data)]
        view[:] = data
        return self.file, [(offset, view) for offset in region_offsets(record.generation)]

    async def unsettled(self, writer: Writer, record: Record) -> Part:
        """Return what has to be written before any crash falls back to ``record``.

        Zeros over the remains of a torn record, where the next one goes, and over what cannot be read there. And one
        copy of ``record``: a page cache shows one that the disk does not have where a flush failed, and a filesystem
        may have nothing to flush of a file that only a process wrote which is dead. The other copy stays, whatever
        happens: so it is the one that is not this record, or cannot be read, where there is such a one.
        """
        view = await read_records(writer, self.file, self.identity)

        def found(start: int) -> Record | None:
            return decode_record(view[start : start + REGION_NBYTES], self.identity.id_bytes)

        pieces = []
        for start in region_offsets(record.generation + 1):
            if found(start) is None and bytes(view[start : start + REGION_NBYTES]).strip(b"\0"):
                pieces.append((start, aligned_buffer(REGION_NBYTES)))
        data = encode_record(record, self.identity.id_bytes, self.identity.block_bytes)
        copy = aligned_buffer(len(data))
        copy[:] = data
        first, second = region_offsets(record.generation)
        held = found(first)
        pieces.append((second if held and held.generation == record.generation else first, copy))
        return self.file, pieces


async def open_commit(writer: Writer, path: str | os.PathLike[str], lock_timeout: float) -> CommitFile:
    """Lock the store, and create it where there is none. ``path`` is for messages.

    Durability: opening an existing store writes nothing.

    Raises:
        StoreLockedError: another writer held the store for ``lock_timeout`` seconds.
        CorruptStoreError: the folder holds something else.
        WriteError: the folder cannot be written.
    """
    facts = await writer.prepare(create=True)
    file = await lock_commit(writer, lambda: _open(writer), lock_timeout, lambda: _refuse_own(path))
    if file is None:
        raise StoreLockedError(
            f"another writer has held {os.fspath(path)} for {lock_timeout} s{_holder(path)}: close it first, or use "
            "another folder (reading with load or list_checkpoints works meanwhile)"
        )
    # Only now that nobody else, not even a dying writer's last request, can change it, is anything read.
    found = await read_identity(writer)
    identity = found or await _create(writer, file, max(facts.block_bytes, PAGE_BYTES))
    return CommitFile(file, identity, is_new=found is None)


def _holder(path: str | os.PathLike[str]) -> str:
    """Who it probably is, for a message."""
    with suppress(OSError):
        if (published := read_status(path)) is not None and published.alive:
            return f" (process {published.status.pid} on {published.status.host!r})"
    return ""


def _refuse_own(path: str | os.PathLike[str]) -> None:
    """Raise StoreLockedError where an engine of this process has the store open: it does not die, and may never end."""
    if made_at := made_here(path):
        raise StoreLockedError(
            f"an engine of this process has {os.fspath(path)} open, made at {made_at}: close it first (where no name "
            "leads to it any more, as after a cell of a notebook ran again, restart the process), or use another "
            "folder (reading with load or list_checkpoints works meanwhile)"
        )


async def lock_commit(
    writer: Writer, opening: Callable[[], Awaitable[File]], timeout: float, refused: Callable[[], None] = lambda: None
) -> File | None:
    """Open the file and lock it against other writers; None where one held it for ``timeout`` seconds.

    Whoever held it may have put another one in its place, as recovering does: then it is that one which is locked.
    ``refused`` is called each time that somebody else holds it, and may end the waiting with an error.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    file = await opening()
    while True:
        locked = await writer.try_lock(file)
        if locked and await writer.in_place(file):
            return file
        if not locked:
            refused()
        if loop.time() >= deadline:
            return None
        if locked:
            await writer.close_file(file)
            file = await opening()
        else:
            await asyncio.sleep(_POLL_SECONDS)


async def _open(writer: Writer) -> File:
    try:
        return await _open_or_create(writer)
    except WriteError as error:
        if error.errno not in _REFUSED:
            raise
        text = f"the store's files cannot be written ({error.strerror}); use a folder that this process may write"
        raise WriteError(error.errno, text, error.filename) from error


async def _open_or_create(writer: Writer) -> File:
    try:
        return await writer.open(COMMIT_NAME, writable=True)
    except FileNotFoundError:
        await _refuse_remains(writer)
    try:
        return await writer.create(COMMIT_NAME, COMMIT_NBYTES)
    except WriteError as error:
        if error.errno != errno.EEXIST:
            raise
        # Another writer was faster; the lock decides.
        return await writer.open(COMMIT_NAME, writable=True)


async def _refuse_remains(writer: Writer) -> None:
    """Raise CorruptStoreError where parts of a store lie that lost its commit file: a new one would overwrite them."""
    parts = [name for name in await writer.names() if name == IDENTITY_NAME or slot_number(name) is not None]
    if parts and COMMIT_NAME not in await writer.names():  # looked for again: another writer may be making the store
        raise CorruptStoreError(
            f"{COMMIT_NAME!r} is missing beside {max(parts)}: "
            "see what is left with `pccheck recover`, or use an empty folder"
        )


async def _create(writer: Writer, file: File, block_bytes: int) -> Identity:
    """Make the folder a store; ``store.json`` comes last, so a crash leaves either no store or a whole one."""
    if file.nbytes > COMMIT_NBYTES:
        raise CorruptStoreError(f"there is a file {COMMIT_NAME!r} here that is not a store's; use an empty folder")
    view = aligned_buffer(COMMIT_NBYTES)
    if names_checkpoints(bytes(view[: await writer.read(file, 0, view)])):
        raise CorruptStoreError(
            f"{IDENTITY_NAME} is missing beside a {COMMIT_NAME!r} file that names checkpoints: "
            "see what is left with `pccheck recover`, or use an empty folder"
        )
    if any(slot_number(name) is not None for name in await writer.names()):  # made only after both
        raise CorruptStoreError(
            f"{IDENTITY_NAME} is missing, {COMMIT_NAME!r} is empty, and there are slots: "
            "see what is left with `pccheck recover`, or use an empty folder"
        )
    identity = Identity(
        format=FORMAT_VERSION, store_id=secrets.token_hex(16), checksum=checksum.NAME, block_bytes=block_bytes
    )
    first = encode_record(Record(0, ()), identity.id_bytes, block_bytes).ljust(COMMIT_NBYTES, b"\0")
    second_copy = region_offsets(0)[1]
    image = bytearray(first)
    image[second_copy : second_copy + REGION_NBYTES] = first[:REGION_NBYTES]
    view[:] = image
    await writer.write(file, 0, view)
    await writer.flush(file)  # crash: store.json without a first record behind it
    await writer.sync_folder()  # crash: store.json without a commit file beside it
    passing = IDENTITY_NAME + ".tmp"
    if passing in await writer.names():
        await writer.unlink(passing)  # crash: what its killed writer had queued lands in ours, with another id
    await writer.write_small(passing, encode_identity(identity))
    await writer.rename(passing, IDENTITY_NAME)
    await writer.sync_folder()  # crash: checkpoints acknowledged in a folder that is no store
    return identity
