"""Reading a store's identity and its newest commit record, through the writer seam."""

from __future__ import annotations

from pccheck_async.errors import CorruptStoreError
from pccheck_async.layout import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    IDENTITY_NAME,
    Identity,
    Record,
    decode_identity,
    newest_record,
)
from pccheck_async.memory import aligned_buffer
from pccheck_async.writer import File, Writer

__all__ = ["read_identity", "read_record"]


async def read_identity(writer: Writer) -> Identity | None:
    """Return the validated ``store.json``, None where there is no (complete) store. Raises CorruptStoreError."""
    data = await writer.read_small(IDENTITY_NAME)
    return None if data is None else decode_identity(data)


async def read_record(writer: Writer, commit: File, identity: Identity) -> Record:
    """Return the newest valid record. Raises CorruptStoreError where neither record has a valid copy.

    A store is created with a first, empty record, and a crash while one record is written never touches the other: so
    a store without any valid record was damaged.
    """
    view = aligned_buffer(COMMIT_NBYTES)
    got = await writer.read(commit, 0, view)
    record = newest_record(view[:got], identity.id_bytes)
    if record is None:
        raise CorruptStoreError(
            f"no copy of a commit record in {COMMIT_NAME!r} is valid; the checkpoints themselves may be whole: "
            "`pccheck recover` looks for them; keep the folder and do not write to it"
        )
    return record
