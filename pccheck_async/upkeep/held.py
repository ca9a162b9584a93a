"""Checkpoints held for reading: their slots are locked shared, so that no writer reuses them meanwhile."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pccheck_async.errors import DamagedError, NoCheckpointError, ReadError
from pccheck_async.format.manifest import Manifest
from pccheck_async.format.record import Entry, Record
from pccheck_async.medium import File
from pccheck_async.medium.open_medium import Session
from pccheck_async.store.reading import choose
from pccheck_async.store.restore import read_manifest
from pccheck_async.store.store_reader import StoreReader, no_store

__all__ = ["LOCK_SECONDS", "Held", "hold", "hold_slot", "open_reader"]

LOCK_SECONDS = 1.0
"""The last requests of a writer that was killed hold its locks for a moment; a trainer holds them for good."""


@dataclass(frozen=True, slots=True)
class Held:
    """A committed checkpoint, held for reading.

    Attributes:
        reader: Its store.
        entry: What the record says of it.
        file: Its slot.
        manifest: What it holds.
    """

    reader: StoreReader
    entry: Entry
    file: File
    manifest: Manifest


async def open_reader(session: Session, path: str | os.PathLike[str]) -> StoreReader:
    """Open a store for reading. Raises NoCheckpointError where there is none, CorruptStoreError."""
    reader = await StoreReader.open(session)
    if reader is None:
        raise no_store(session, path)
    return reader


@asynccontextmanager
async def hold(reader: StoreReader, path: str | os.PathLike[str], step: int | None) -> AsyncIterator[Held]:
    """Hold the newest checkpoint, or the newest of ``step``, until the context is left.

    Raises:
        NoCheckpointError: there is none.
        DamagedError: its slot is missing, or its manifest damaged.
        CorruptStoreError: this version does not understand it.
        ReadError: the device failed.
    """
    async with hold_slot(reader, lambda record: choose(record.entries, step)) as held:
        if held is None:
            raise NoCheckpointError(
                f"{os.fspath(path)} holds no checkpoint" + ("" if step is None else f" of step {step}")
            )
        entry, file = held
        if not isinstance(file, File):
            raise file
        manifest = await read_manifest(reader.session.writer, file, entry, reader.identity.block_bytes)
        yield Held(reader, entry, file, manifest)


@asynccontextmanager
async def hold_slot(
    reader: StoreReader, pick: Callable[[Record], Entry | None]
) -> AsyncIterator[tuple[Entry, File | DamagedError | ReadError] | None]:
    """Hold the slot of the picked checkpoint (see :meth:`StoreReader.lock`) until the context is left."""
    held = await reader.lock(pick)
    try:
        yield held
    finally:
        if held is not None and isinstance(held[1], File):
            await reader.session.writer.close_file(held[1])
