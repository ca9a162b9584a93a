"""Reading a store's identity and its newest commit record, through the writer seam."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from pccheck_async.errors import CorruptStoreError, ReadError, is_exhausted, is_forbidden
from pccheck_async.layout import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    IDENTITY_NAME,
    Identity,
    Record,
    decode_identity,
    newest_record,
    rebuild_identity,
    superseded_in,
)
from pccheck_async.logs import write
from pccheck_async.memory import aligned_buffer
from pccheck_async.writer import File, Writer

__all__ = ["read_commit", "read_identity", "read_record", "stored_identity"]


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
        commit = None if is_exhausted(error) or is_forbidden(error) else await read_commit(writer)
        rebuilt = None if commit is None else rebuild_identity(commit)
        if rebuilt is None:
            raise
        text = "%s cannot be read (%s): the commit records tell what it says; `pccheck recover --write` writes it anew"
        write(logging.WARNING, "identity", text, IDENTITY_NAME, error.strerror, error=str(error))
        return rebuilt[0]


async def read_commit(writer: Writer) -> memoryview | None:
    """Return the bytes of the commit file, as :meth:`Writer.read_around` reads them; None where there is none."""
    try:
        file = await writer.open(COMMIT_NAME, writable=False)
    except FileNotFoundError:
        return None
    view = aligned_buffer(COMMIT_NBYTES)
    got, _ = await writer.read_around(file, 0, view)
    await writer.close_file(file)
    return view[:got]


async def read_record(writer: Writer, commit: File, identity: Identity) -> Record:
    """Return the newest valid record, and with it what it superseded; a copy that cannot be read is not valid.

    A store is created with a first, empty record, and a crash while one record is written never touches the other: so
    a store without any valid record was damaged.

    Raises:
        CorruptStoreError: neither record has a valid copy.
        ReadError: nor has one, and the device failed.
    """
    view = aligned_buffer(COMMIT_NBYTES)
    got, lost = await writer.read_around(commit, 0, view)
    record = newest_record(view[:got], identity.id_bytes)
    if record is not None:
        return replace(record, superseded=superseded_in(view[:got], identity.id_bytes, record))
    for error in lost.values():
        raise error
    raise CorruptStoreError(
        f"no copy of a commit record in {COMMIT_NAME!r} is valid; the checkpoints themselves may be whole: "
        "`pccheck recover` looks for them; keep the folder and do not write to it"
    )
