"""Parts that are not in this rank's own store: in another folder of this filesystem, or on another host.

Ranks come back on other nodes, and a world may have another size: then rank r reads the part of rank r modulo the old
size. A part that only another host can reach is sent by the lowest rank there, piece by piece over the group's own
store, into a file of this rank's store that is removed afterwards.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from pccheck_async.errors import DamagedError, ReadError
from pccheck_async.format import Entry, Key
from pccheck_async.medium import File, Medium
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.store import StoreReader
from pccheck_async.transfer import aligned_buffer, available_descriptors

__all__ = ["FetchedLease", "FolderLease", "check_descriptors", "remove_fetched", "send_part"]

_PREFIX: Final = ".fetched-"
_PIECE_BYTES: Final = 4 << 20
_AHEAD: Final = 4
"""Pieces that may wait on rank 0's host for their receiver."""
_SPARE_DESCRIPTORS: Final = 4
"""For the records that are read while parts are locked, and for other threads."""
_STORE_ERRORS: Final = (RuntimeError, OSError)


class FolderLease:
    """A part in the folder of a rank, on a filesystem that is mounted here. One descriptor is open while it is held.

    Args:
        opened: The medium of the group's folder, which is prepared; all parts share it, and its threads.
        folder: The name of the rank's folder in it; empty for a store that is that folder itself.
        key: The checkpoint.
    """

    entry: Entry
    block_bytes: int
    _file: File | None = None

    def __init__(self, opened: OpenMedium, folder: str, key: Key) -> None:
        self._opened = opened
        self._folder = f"{folder}/" if folder else ""
        self._key = key

    @property
    def medium(self) -> Medium:
        """The one of the group's folder."""
        return self._opened.medium

    async def acquire(self) -> File:
        """Lock the slot."""
        reader = await StoreReader.open(self._opened, self._folder)
        counter, found = self._key.counter, None
        if reader is not None:
            try:
                found = await reader.lock(
                    lambda record: next((e for e in record.entries if e.counter == counter), None)
                )
            finally:
                await self.medium.close(reader.commit)
        if reader is None or found is None:
            raise DamagedError(f"{self._folder or 'the store'} has no part of checkpoint {counter} any more")
        self.entry, file = found
        if not isinstance(file, File):
            raise file
        self._file, self.block_bytes = file, reader.identity.block_bytes
        return file

    def release(self) -> None:
        """Let the slot go."""
        self._closing = asyncio.ensure_future(self.close())

    async def close(self) -> None:
        """Let the slot go, and return when that is done."""
        file, self._file = self._file, None
        if file is not None:
            await self.medium.close(file)


def check_descriptors(files: int, what: str = "reading") -> None:
    """Raise ReadError if this process may not open so many files at a time, before the first part is read."""
    free = available_descriptors()
    if files + _SPARE_DESCRIPTORS > free:
        raise ReadError(
            errno.EMFILE,
            f"{what} a checkpoint of several ranks keeps files open for each of their parts: {files} and "
            f"{_SPARE_DESCRIPTORS} more, and this process may open {free} more; raise the limit (ulimit -n)",
        )


def remove_fetched(folder: Path) -> None:
    """Remove parts that a rank had received when it was killed; the owner of a store receives one at a time."""
    for left in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            left.unlink()


async def send_part(store: Any, prefix: str, lease: FolderLease) -> None:
    """Send a part to the rank that receives under ``prefix``; an error is sent, too.

    ``store`` is a client of the group's store that nobody else uses meanwhile.
    """
    number = 0

    def put_blocking(data: bytes) -> None:
        nonlocal number
        if number >= _AHEAD:
            store.get(f"{prefix}/taken/{number - _AHEAD}")
            store.delete_key(f"{prefix}/taken/{number - _AHEAD}")
        store.set(f"{prefix}/{number}", data)
        number += 1

    async def put(data: bytes) -> None:
        await asyncio.to_thread(put_blocking, data)

    try:
        file = await lease.acquire()
        await put(b"+" + msgspec.msgpack.encode((lease.entry, lease.block_bytes, file.nbytes)))
        view = aligned_buffer(_PIECE_BYTES)
        for start in range(0, file.nbytes, _PIECE_BYTES):
            got = await lease.medium.read(file, start, view[: min(_PIECE_BYTES, file.nbytes - start)])
            await put(b"+" + bytes(view[:got]))
    except (DamagedError, ReadError) as error:
        await put(b"-" + str(error).encode())
    finally:
        lease.release()


class FetchedLease:
    """A part on another host, received into a file here.

    Args:
        store: A client of the group's store that nobody else uses meanwhile.
        prefix: Of the keys under which it is sent.
        opened: The medium of the group's folder, which is prepared.
        root: That folder.
        folder: The name of this rank's folder in it, for the file.
    """

    entry: Entry
    block_bytes: int
    _file: File | None = None

    def __init__(self, store: Any, prefix: str, opened: OpenMedium, root: Path, folder: str) -> None:
        self._store = store
        self._prefix = prefix
        self.medium = opened.medium
        self._name = f"{folder}/{_PREFIX}{secrets.token_hex(8)}"
        self._path = root / self._name

    async def acquire(self) -> File:
        """Receive all of it. Raises DamagedError with what the sender says, ReadError where the connection is lost."""
        try:
            await asyncio.to_thread(self._receive)
        except _STORE_ERRORS as error:
            raise ReadError(f"the part was not received: {str(error).splitlines()[0]}") from error
        self._file = await self.medium.open(self._name, writable=False)
        return self._file

    def _receive(self) -> None:
        remove_fetched(self._path.parent)
        pieces = self._pieces()
        with self._path.open("xb") as file:
            self.entry, self.block_bytes, nbytes = msgspec.msgpack.decode(next(pieces), type=tuple[Entry, int, int])
            while file.tell() < nbytes:
                file.write(next(pieces))

    def _pieces(self) -> Iterator[bytes]:
        number = 0
        while True:
            data = self._store.get(f"{self._prefix}/{number}")
            self._store.delete_key(f"{self._prefix}/{number}")
            self._store.set(f"{self._prefix}/taken/{number}", b"")
            if data[:1] != b"+":
                raise DamagedError(data[1:].decode())
            yield data[1:]
            number += 1

    def release(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            os.unlink(self._path)
        file, self._file = self._file, None
        if file is not None:
            self._closing = asyncio.ensure_future(self.medium.close(file))
