"""Parts that are not in this rank's own store: in another folder of this filesystem, or on another host.

Ranks come back on other nodes, and a world may have another size: then rank r reads the part of rank r modulo the old
size. A part that only another host can reach is sent by the lowest rank there, piece by piece over the group's own
store, into a file of this rank's store that is removed afterwards.
"""

from __future__ import annotations

import asyncio
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
from pccheck_async.medium.open_medium import OpenMedium, open_medium
from pccheck_async.store import StoreReader
from pccheck_async.transfer import aligned_buffer

__all__ = ["FetchedLease", "FolderLease", "send_part"]

_PIECE_BYTES: Final = 4 << 20
_AHEAD: Final = 4
"""Pieces that may wait on rank 0's host for their receiver."""
_STORE_ERRORS: Final = (RuntimeError, OSError)


class FolderLease:
    """A part in the folder of another rank, on a filesystem that is mounted here."""

    entry: Entry
    medium: Medium
    block_bytes: int
    _opened: OpenMedium | None = None

    def __init__(self, path: Path, key: Key) -> None:
        self._path = path
        self._key = key

    async def acquire(self) -> File:
        """Open the folder and lock the slot."""
        opened = self._opened = await open_medium(self._path, "auto", writers=1, copiers=1)
        reader = await StoreReader.open(opened)
        counter = self._key.counter
        found = None
        if reader is not None:
            found = await reader.lock(lambda record: next((e for e in record.entries if e.counter == counter), None))
        if reader is None or found is None:
            raise DamagedError(f"{self._path} has no part of checkpoint {counter} any more")
        self.entry, file = found
        if not isinstance(file, File):
            raise file
        self.medium, self.block_bytes = opened.medium, reader.identity.block_bytes
        return file

    def release(self) -> None:
        """Close the folder."""
        self._closing = asyncio.ensure_future(self.close())

    async def close(self) -> None:
        """Close the folder, and return when it is closed."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()


async def send_part(store: Any, prefix: str, path: Path, key: Key) -> None:
    """Send the part in the folder ``path`` to whoever receives under ``prefix``; what goes wrong is sent, too.

    ``store`` is a client of the group's store that nobody else uses meanwhile.
    """
    lease = FolderLease(path, key)
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
        folder: For the file; this rank's.
    """

    entry: Entry
    medium: Medium
    block_bytes: int
    _opened: OpenMedium | None = None

    def __init__(self, store: Any, prefix: str, folder: Path) -> None:
        self._store = store
        self._prefix = prefix
        self._path = folder / f".fetched-{secrets.token_hex(8)}"

    async def acquire(self) -> File:
        """Receive all of it. Raises DamagedError with what the sender says, ReadError where the connection is lost."""
        try:
            await asyncio.to_thread(self._receive)
        except _STORE_ERRORS as error:
            raise ReadError(f"the part was not received: {str(error).splitlines()[0]}") from error
        opened = self._opened = await open_medium(self._path.parent, "auto", writers=1, copiers=1)
        await opened.medium.prepare(create=False)
        self.medium = opened.medium
        return await opened.medium.open(self._path.name, writable=False)

    def _receive(self) -> None:
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
        opened, self._opened = self._opened, None
        if opened is not None:
            self._closing = asyncio.ensure_future(opened.close())
