"""Reading a store's identity and its newest commit record, through the writer seam."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from msgspec.structs import replace

from pccheck_async.errors import CorruptStoreError, ReadError, is_exhausted, is_forbidden
from pccheck_async.format.record import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    IDENTITY_NAME,
    REGION_NBYTES,
    Identity,
    Record,
    decode_identity,
    decode_record,
    entries_before,
    newest_record,
    rebuild_identity,
    region_offsets,
)
from pccheck_async.medium import File, Writer
from pccheck_async.telemetry.logs import write
from pccheck_async.transfer.memory import aligned_buffer

__all__ = ["read_commit", "read_identity", "read_record", "read_records", "stored_identity", "unread_record"]


async def stored_identity(writer: Writer) -> Identity | None:
    """Return the validated ``store.json``, None where there is none. Raises CorruptStoreError, ReadError."""
    data = await writer.read_small(IDENTITY_NAME)
    return None if data is None else decode_identity(data)


async def read_identity(writer: Writer) -> Identity | None:
    """Return what ``store.json`` says, None where there is no (complete) store. Raises CorruptStoreError, ReadError.

    Where the device cannot read it, the records tell what it said. Bytes that are there, and that are not understood,
    may be those of another format: they are an error.
    """
    try:
        return await stored_identity(writer)
    except ReadError as error:
        found = None if is_exhausted(error) or is_forbidden(error) else await read_commit(writer)
        rebuilt = None if found is None else rebuild_identity(found[0])
        if rebuilt is None:
            raise
        text = "%s cannot be read (%s): the commit records tell what it says; `pccheck recover --write` writes it anew"
        write(logging.WARNING, "identity", text, IDENTITY_NAME, error.strerror, error=str(error))
        return rebuilt[0]


async def read_commit(writer: Writer) -> tuple[memoryview, dict[int, ReadError]] | None:
    """Return what :meth:`Writer.read_around` does of the commit file; None where there is none."""
    try:
        file = await writer.open(COMMIT_NAME, writable=False)
    except FileNotFoundError:
        return None
    view = aligned_buffer(COMMIT_NBYTES)
    got, lost = await writer.read_around(file, 0, view)
    await writer.close_file(file)
    return view[:got], lost


def unread_record(commit: memoryview, lost: Mapping[int, ReadError], store_id: bytes) -> ReadError | None:
    """Return why nobody can tell which record is the newest: of one there is no valid copy, and none could be read.

    A copy that is read and not valid tells that its record, which is durable only in both, never was.
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


async def read_records(writer: Writer, commit: File, identity: Identity) -> memoryview:
    """Return the bytes of the commit file; a copy that cannot be read is not valid.

    Raises:
        ReadError: the device failed where both copies of a record are, which may be the newest: what the other one
            names may be written over.
    """
    view = aligned_buffer(COMMIT_NBYTES)
    got, lost = await writer.read_around(commit, 0, view)
    if error := unread_record(view[:got], lost, identity.id_bytes):
        text = (
            f"{error.strerror}: neither copy of a commit record can be read, and it may be the newest; try again, and "
            "where that does not help, see what is left with `pccheck recover`"
        )
        raise ReadError(error.errno, text, error.filename) from error
    return view[:got]


async def read_record(writer: Writer, commit: File, identity: Identity) -> Record:
    """Return the newest valid record, and with it what the one before it names.

    A store is created with a first, empty record, and a crash while one record is written never touches the other: so
    a store without any valid record was damaged.

    Raises:
        CorruptStoreError: neither record has a valid copy.
        ReadError: see :func:`read_records`.
    """
    view = await read_records(writer, commit, identity)
    record = newest_record(view, identity.id_bytes)
    if record is None:
        raise CorruptStoreError(
            f"no copy of a commit record in {COMMIT_NAME!r} is valid; the checkpoints themselves may be whole: "
            "`pccheck recover` looks for them; keep the folder and do not write to it"
        )
    return replace(record, before=entries_before(view, identity.id_bytes, record))
