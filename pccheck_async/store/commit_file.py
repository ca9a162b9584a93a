# SPDX-License-Identifier: Apache-2.0
"""The files ``commit`` and ``store.json``: creating, locking and reading them, and writing records."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from pccheck_async.errors import (
    CorruptStoreError,
    NewerFormatError,
    ReadError,
    StoreError,
    StoreLockedError,
    WriteError,
    is_exhausted,
    is_forbidden,
)
from pccheck_async.format import Identity, Parts, Record, checksum
from pccheck_async.format.record import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    FORMAT_VERSION,
    GROUP_NAME,
    GROUP_VERSION,
    IDENTITY_NAME,
    REGION_NBYTES,
    decode_identity,
    decode_record,
    encode_identity,
    encode_record,
    entries_before,
    generation_of,
    is_foreign,
    names_checkpoints,
    newest_record,
    rebuild_identity,
    region_offsets,
    slot_number,
)
from pccheck_async.medium import LOCK_POLL_SECONDS, File, Medium, Part, call_to_close, holder_here, read_around
from pccheck_async.medium.files import Files
from pccheck_async.medium.status_file import read_status
from pccheck_async.store.rank_folders import is_group_folder, recovery
from pccheck_async.telemetry import write
from pccheck_async.transfer import PAGE_BYTES, aligned_buffer

__all__ = ["CommitFile", "held_by_other", "lock_commit", "open_commit", "read_commit", "read_identity", "read_record"]
__all__ += ["may_lack_the_newest", "stored_identity", "unread_record"]


_NO_RECORD = bytes(REGION_NBYTES)


async def stored_identity(medium: Medium, folder: str = "") -> Identity | None:
    """Return the validated ``store.json``, None if there is none. Raises CorruptStoreError, ReadError.

    ``folder`` is the prefix of the names of the store's files: "rank-00003/" on the medium of a group's folder.
    """
    data = await medium.read_small(folder + IDENTITY_NAME)
    return None if data is None else decode_identity(data)


async def read_identity(medium: Medium, path: str | os.PathLike[str], folder: str = "") -> Identity | None:
    """Return the content of ``store.json``, None if there is no (complete) store. Raises CorruptStoreError, ReadError.

    ``path`` is for messages; ``folder`` is a prefix of names (:func:`stored_identity`). If the device cannot read the
    file, its content is rebuilt from the records. Readable bytes that are not understood may be of another format: they
    are an error.
    """
    try:
        return await stored_identity(medium, folder)
    except NewerFormatError:
        raise
    except CorruptStoreError as error:
        raise CorruptStoreError(f"{error}: {recovery(path, '--write')} makes it anew") from None
    except ReadError as error:
        found = None if is_exhausted(error) or is_forbidden(error) else await read_commit(medium, folder)
        rebuilt = None if found is None else rebuild_identity(found[0])
        if rebuilt is None:
            raise
        text = "%s cannot be read (%s): the commit records replace it; %s writes it anew"
        todo = recovery(path, "--write")
        write("identity", text, folder + IDENTITY_NAME, error.strerror, todo, error=str(error))
        return rebuilt[0]


async def read_commit(medium: Medium, folder: str = "") -> tuple[memoryview, dict[int, ReadError]] | None:
    """Return the bytes of the commit file, and the errors of unreadable blocks by offset; None if there is no file."""
    try:
        file = await medium.open(folder + COMMIT_NAME, writable=False)
    except FileNotFoundError:
        return None
    view = aligned_buffer(COMMIT_NBYTES)
    got, lost = await read_around(medium, file, 0, view)
    await medium.close(file)
    return view[:got], lost


def unread_record(commit: memoryview, lost: Mapping[int, ReadError], store_id: bytes) -> ReadError | None:
    """Return the error that leaves the newest record unknown: both copies of one record are unreadable; None if known.

    A copy that can be read and is not valid proves that its record, which is durable only in both copies, never was.
    """
    for generation in (0, 1):
        why = []
        for start in region_offsets(generation):
            errors = [error for offset, error in lost.items() if start <= offset < start + REGION_NBYTES]
            if errors and decode_record(commit[start : start + REGION_NBYTES], store_id) is None:
                why.append(errors[0])
        if len(why) == 2:
            return why[0]
    return None


async def _read_records(medium: Medium, commit: File, identity: Identity, path: str | os.PathLike[str]) -> memoryview:
    """Return the bytes of the commit file, in which an unreadable copy of a record is an invalid one.

    Raises ReadError if neither copy of a record can be read: it may be the newest, and slots that the other record
    names may be overwritten.
    """
    view = aligned_buffer(COMMIT_NBYTES)
    got, lost = await read_around(medium, commit, 0, view, identity.block_bytes)
    if error := unread_record(view[:got], lost, identity.id_bytes):
        text = (
            f"{error.strerror}: neither copy of a commit record can be read, and it may be the newest; try again, and "
            f"where that does not help, see what is left with {recovery(path)}"
        )
        raise ReadError(error.errno, text, error.filename) from error
    return view[:got]


def may_lack_the_newest(commit: memoryview, *, identity: Identity, record: Record) -> bool:
    """Return whether a record newer than ``record``, the newest valid one, may be lost: both of its copies are damaged.

    Zeros are a record that was never written; what lies beyond the end of a file that was cut is damaged.
    A running writer may be writing them just now: read again before you rely on it.
    """
    copies = [commit[start : start + REGION_NBYTES] for start in region_offsets(record.generation + 1)]
    if any(decode_record(copy, identity.id_bytes) is not None or bytes(copy) == _NO_RECORD for copy in copies):
        return False
    return any(generation_of(copy) not in range(record.generation) for copy in copies)


async def read_record(medium: Medium, commit: File, identity: Identity, path: str | os.PathLike[str]) -> Record:
    """Return the newest valid record, with the entries of the record before it. ``path`` is for messages.

    Raises CorruptStoreError if no copy of a record is valid: the store was damaged, as it is created with an empty
    record, and a crash while a record is written never touches the other one. Raises ReadError if neither copy of a
    record can be read.
    """
    view = await _read_records(medium, commit, identity, path)
    record = newest_record(view, identity.id_bytes)
    if record is None:
        why = of_another_store(view, identity) or f"no copy of a commit record in {COMMIT_NAME!r} is valid"
        raise CorruptStoreError(
            f"{why}; the checkpoints themselves may be whole: {recovery(path)} looks for them; keep the "
            "folder and do not write to it"
        )
    return replace(record, before=entries_before(view, identity.id_bytes, record))


def of_another_store(commit: memoryview, identity: Identity) -> str:
    """Return the sentence that a commit file is another store's; empty if it is not, or has no valid record."""
    found = rebuild_identity(commit)
    if found is None or found[0].store_id == identity.store_id:
        return ""
    return (
        f"{IDENTITY_NAME} is of store {identity.store_id[:8]}..., all records in {COMMIT_NAME!r} are of store "
        f"{found[0].store_id[:8]}...: one of the two was copied from elsewhere"
    )


_OTHER_KIND = {
    FORMAT_VERSION: "holds the checkpoints of one process: open it without group=, or give the group another folder",
    GROUP_VERSION: "holds one rank's parts of a group's checkpoints: open the folder that it is in, with group=",
}
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)
_ELSEWHERE = "use another folder (reading with load or list_checkpoints works meanwhile)"


def _advice(path: str | os.PathLike[str]) -> str:
    return f"see what is left with {recovery(path)}, or use an empty folder"


@dataclass(slots=True, eq=False)
class CommitFile:
    """The file of a store's records, locked while it is open. Made by :func:`open_commit`."""

    file: File
    identity: Identity
    is_new: bool
    """Whether this process made the file, and flushed its contents."""
    _buffer: memoryview = field(default_factory=partial(aligned_buffer, REGION_NBYTES))

    def part(self, record: Record) -> Part:
        """Return the writes of both copies of a record, for :meth:`.Medium.make_durable`; valid until the next call."""
        view = _encoded(record, self.identity, self._buffer)
        # Two copies on separate blocks: one damaged block does not cost the record. Both only ever touch this
        # generation's parity, so the record before it stays whole, whichever of these writes happen.
        return self.file, [(offset, view) for offset in region_offsets(record.generation)]

    async def repairs(self, medium: Medium, record: Record, path: str | os.PathLike[str]) -> Part:
        """Return the writes after which any crash falls back to ``record``. ``path`` is for messages.

        Zeros are written over the remains of a torn record, and over unreadable bytes, in the next record's place. And
        one copy of ``record`` is written again: after a failed flush the page cache shows a record that the disk does
        not have, and a filesystem may find nothing to flush in a file that only a dead process wrote. It is the damaged
        copy, if one is; the other copy stays as it is.
        """
        view = await _read_records(medium, self.file, self.identity, path)

        def record_at(start: int) -> Record | None:
            return decode_record(view[start : start + REGION_NBYTES], self.identity.id_bytes)

        if may_lack_the_newest(view, identity=self.identity, record=record):
            text = (
                "both copies of a commit record are damaged, or were cut short by a power failure: it may have named a "
                "newer checkpoint than %s, and the next save of this process may write over that: to look, end the "
                "process before it saves, copy the folder, and see %s"
            )
            there = f"step {record.entries[0].step}" if record.entries else "any that is known"
            write("record_lost", text, there, recovery(path, "--search"))
        pieces = []
        for start in region_offsets(record.generation + 1):
            if record_at(start) is None and bytes(view[start : start + REGION_NBYTES]).strip(b"\0"):
                pieces.append((start, aligned_buffer(REGION_NBYTES)))
        first, second = region_offsets(record.generation)
        held = record_at(first)
        place = second if held and held.generation == record.generation else first
        pieces.append((place, _encoded(record, self.identity, aligned_buffer(REGION_NBYTES))))
        return self.file, pieces


def _encoded(record: Record, identity: Identity, buffer: memoryview) -> memoryview:
    """Encode a record into the beginning of a buffer, and return that part of it."""
    data = encode_record(record, identity.id_bytes, identity.block_bytes)
    buffer[: len(data)] = data
    return buffer[: len(data)]


async def open_commit(
    medium: Medium, path: str | os.PathLike[str], lock_timeout: float, version: int = FORMAT_VERSION
) -> CommitFile:
    """Lock the store; if there is none, create one with the format ``version``. ``path`` is for messages.

    Durability: opening an existing store writes nothing.

    Raises:
        StoreLockedError: another writer held the store for ``lock_timeout`` seconds.
        StoreError: the folder is a group's, or the store has the other format.
        CorruptStoreError: the folder holds other data, or a damaged store.
        WriteError: the folder cannot be written.
    """
    facts = await medium.prepare(create=True)
    file = await lock_commit(medium, lambda: _open(medium, path), lock_timeout, lambda: _refuse_own(path))
    if file is None:
        raise StoreLockedError(
            f"waited {lock_timeout} s: {held_by_other(path)}, or {_ELSEWHERE}{_forgotten_group(version)}"
        )
    # Read only now, when no one else can change it any more, not even a dying writer's last request.
    found = await read_identity(medium, path)
    if found is not None and found.format != version:
        raise StoreError(f"{os.fspath(path)} {_OTHER_KIND[found.format]}")
    identity = found or await _create(medium, file, max(facts.block_bytes, PAGE_BYTES), version, path)
    return CommitFile(file, identity, is_new=found is None)


def held_by_other(path: str | os.PathLike[str]) -> str:
    """Return the text that another process has a store open: which one, if its status file has that, and a remedy."""
    holder = "another process"
    with suppress(OSError):
        if (published := read_status(path)) is not None and published.alive:
            holder = f"process {published.status.pid} on {published.status.host!r}"  # probably
    return f"{holder} has {os.fspath(path)} open for writing: close it first"


def _forgotten_group(version: int) -> str:
    """Return advice for the case that the other writer is a rank of the same job; empty if it cannot be one."""
    world = os.environ.get("WORLD_SIZE", "")
    if version == GROUP_VERSION or not world.isdigit() or int(world) < 2:
        return ""
    return (
        f"; this process is one of WORLD_SIZE={world}: where all of them save into this folder, give each engine "
        "group=, such as group=dist.group.WORLD"
    )


def _refuse_own(path: str | os.PathLike[str]) -> None:
    """Raise StoreLockedError if the holder is an engine of this process: waiting cannot help."""
    if (holder := holder_here(path)) is not None:
        raise StoreLockedError(
            f"an engine of this process has {os.fspath(path)} open, made at {holder.made_at}: close it first"
            f"{call_to_close(holder)} (opening another engine does, once nothing leads to it: in a notebook neither a "
            f"name nor an output nor the traceback of the last error), or {_ELSEWHERE}"
        )


async def lock_commit(
    medium: Medium, opening: Callable[[], Awaitable[File]], timeout: float, refused: Callable[[], None] = lambda: None
) -> File | None:
    """Open the commit file and lock it against other writers; None if another one held it for ``timeout`` seconds.

    ``refused`` is called each time that another opening holds the lock, and may end the waiting with an error.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    file = await opening()
    while True:
        locked = await medium.lock(file)
        if locked:
            with suppress(FileNotFoundError):  # the holder may have put another file in its place, as a recovery does
                named = await medium.open(file.name, writable=False)
                await medium.close(named)
                if named.identity == file.identity:
                    return file
        else:
            refused()
        if loop.time() >= deadline:
            return None
        if locked:
            await medium.close(file)
            file = await opening()
        else:
            await asyncio.sleep(LOCK_POLL_SECONDS)


async def _open(medium: Medium, path: str | os.PathLike[str]) -> File:
    try:
        with suppress(FileNotFoundError):
            return await medium.open(COMMIT_NAME, writable=True)
        names = await medium.names()
        # Other media need not be folders.
        if GROUP_NAME in names or (isinstance(medium, Files) and is_group_folder(path)):
            raise StoreError(
                f"{os.fspath(path)} holds a group's checkpoints: open it with group=, or use another folder"
            )
        # A new commit file would overwrite the remains of a store that lost its own.
        parts = [name for name in names if name == IDENTITY_NAME or slot_number(name) is not None]
        if parts and COMMIT_NAME not in await medium.names():  # once more: another writer may be making the store
            raise CorruptStoreError(f"{COMMIT_NAME!r} is missing beside {max(parts)}: {_advice(path)}")
        try:
            return await medium.reserve(COMMIT_NAME, COMMIT_NBYTES)
        except WriteError as error:
            if error.errno != errno.EEXIST:
                raise
            return await medium.open(COMMIT_NAME, writable=True)  # another writer was faster; the lock decides
    except WriteError as error:
        if error.errno not in _REFUSED:
            raise
        why = os.strerror(error.errno)
        text = f"the store's files cannot be written ({why}); use a folder that this process may write"
        raise WriteError(error.errno, text, error.filename) from error


async def _create(medium: Medium, file: File, block_bytes: int, version: int, path: str | os.PathLike[str]) -> Identity:
    """Make the folder a store, with ``store.json`` as the last file, so that a crash leaves no store or a whole one."""
    view = aligned_buffer(COMMIT_NBYTES)
    found = bytes(view[: await medium.read(file, 0, view)])
    if file.nbytes > COMMIT_NBYTES or is_foreign(found):
        raise CorruptStoreError(f"there is a file {COMMIT_NAME!r} here that is not a store's; use an empty folder")
    if names_checkpoints(found):
        raise CorruptStoreError(
            f"{IDENTITY_NAME} is missing beside a {COMMIT_NAME!r} file that names checkpoints: {_advice(path)}"
        )
    if any(slot_number(name) is not None for name in await medium.names()):  # made only after both
        raise CorruptStoreError(
            f"{IDENTITY_NAME} is missing, {COMMIT_NAME!r} is empty, and there are slots: {_advice(path)}"
        )
    identity = Identity(format=version, store_id=secrets.token_hex(16), checksum=checksum.NAME, block_bytes=block_bytes)
    view = aligned_buffer(COMMIT_NBYTES)
    for offset in region_offsets(0):
        _encoded(Record(0, (), parts=None if version == FORMAT_VERSION else Parts()), identity, view[offset:])
    await medium.make_durable([(file, [(0, view)])])  # else a crash may leave store.json without a first record
    await medium.sync_names()  # else a crash may leave store.json without a commit file
    # Durable, as a whole, when this returns: else a crash may leave acknowledged checkpoints, and no store around them.
    await medium.replace(IDENTITY_NAME, encode_identity(identity))
    return identity
