"""Parts on another host.

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
from pccheck_async.format import Entry
from pccheck_async.medium import File
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.store import Source
from pccheck_async.transfer import aligned_buffer

__all__ = ["ReceivedPart", "remove_fetched", "send_part"]

_PREFIX: Final = ".fetched-"
_PIECE_BYTES: Final = 4 << 20
_AHEAD: Final = 4
"""Pieces that may wait on rank 0's host for their receiver."""
_STORE_ERRORS: Final = (RuntimeError, OSError)


def remove_fetched(folder: Path) -> None:
    """Remove parts that a rank had received when it was killed; the owner of a store receives one at a time."""
    for left in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            left.unlink()


async def send_part(store: Any, prefix: str, source: Source) -> None:
    """Send a part to the rank that receives under ``prefix``; an error is sent, too.

    ``store`` is a client of the group's store for this call alone.
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
        file = await source.acquire()
        await put(b"+" + msgspec.msgpack.encode((source.entry, source.block_bytes, file.nbytes)))
        view = aligned_buffer(_PIECE_BYTES)
        for start in range(0, file.nbytes, _PIECE_BYTES):
            got = await source.medium.read(file, start, view[: min(_PIECE_BYTES, file.nbytes - start)])
            await put(b"+" + bytes(view[:got]))
    except (DamagedError, ReadError) as error:
        await put(b"-" + str(error).encode())
    finally:
        await source.close()


class ReceivedPart(Source):
    """A part on another host, received into a file here.

    Args:
        store: A client of the group's store for this part alone.
        prefix: Of the keys under which it is sent.
        opened: The medium of the group's folder, which is prepared.
        root: That folder.
        folder: The name of this rank's folder in it, for the file.
    """

    def __init__(self, store: Any, prefix: str, opened: OpenMedium, root: Path, folder: str) -> None:
        self._store = store
        self._prefix = prefix
        self.medium = opened.medium
        self._name = f"{folder}/{_PREFIX}{secrets.token_hex(8)}"
        self._path = root / self._name

    async def acquire(self) -> File:
        """Receive all of it. Raises DamagedError with the sender's error, ReadError if the connection is lost."""
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

    async def close(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            os.unlink(self._path)
        await super().close()
