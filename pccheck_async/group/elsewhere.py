# SPDX-License-Identifier: Apache-2.0
"""Restoring parts that lie on another host.

Ranks may come back on other nodes, and their number may be another one: then rank r reads the part of rank r modulo the
old number. A part that only another host can reach is sent by the lowest rank there, piece by piece over the group's
own ``TCPStore``, into a file in the receiver's folder that is removed afterwards.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pccheck_async.errors import CheckpointError, CorruptStoreError, DamagedError, GroupError, ReadError
from pccheck_async.format import Entry, align
from pccheck_async.group.control import Client
from pccheck_async.medium import File
from pccheck_async.medium.files import map_error
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.store import Source
from pccheck_async.transfer import aligned_buffer, uninterrupted

__all__ = ["ReceivedPart", "remove_fetched", "send_part"]

_PREFIX: Final = ".fetched-"
_PIECE_BYTES: Final = 4 << 20
_AHEAD: Final = 4
"""Pieces that may wait on rank 0's host for their receiver."""
_STOPPED: Final = b"-"
"""The value in place of an acknowledgement by which the receiver says that it takes no more pieces."""
_CANCELLED: Final = "the restore was cancelled"
_KINDS: Final[dict[str, type[CheckpointError]]] = {
    "damaged": DamagedError,
    "corrupt": CorruptStoreError,
    "unread": ReadError,
}
"""The classes of a sender's errors that are sent; any other error does not mean that the part is damaged."""


def remove_fetched(folder: Path) -> None:
    """Remove the files of received parts from a rank's folder, as a killed process leaves them.

    Called by the owner of the folder, which receives one part at a time.
    """
    for left in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            left.unlink()


async def send_part(client: Client, prefix: str, source: Source) -> None:
    """Send a part, or the error of reading it, to the rank that receives under ``prefix``; stop if that one does.

    ``client`` is this rank's; the part is sent over a connection of its own. Closes ``source``.

    Cancellation: ends once nothing is sent any more.
    """
    number = 0

    def put_blocking(store: TCPStore, data: bytes) -> bool:
        nonlocal number
        if number >= _AHEAD:
            taken = f"{prefix}/taken/{number - _AHEAD}"
            if store.get(taken) == _STOPPED:
                return False
            store.delete_key(taken)
        store.set(f"{prefix}/{number}", b"+" + data)  # type: ignore[arg-type]
        number += 1
        return True

    async def stop(putting: asyncio.Future[bool]) -> None:
        """Wake the thread, for which a receiver that died acknowledges nothing."""
        await asyncio.to_thread(client.set, f"{prefix}/taken/{number - _AHEAD}", _STOPPED)
        await asyncio.gather(putting, return_exceptions=True)

    async def pieces() -> AsyncIterator[bytes]:
        file = await source.acquire()
        yield msgspec.msgpack.encode((source.entry, source.block_bytes, file.nbytes))
        view = aligned_buffer(_PIECE_BYTES)
        for start in range(0, file.nbytes, _PIECE_BYTES):
            nbytes = min(_PIECE_BYTES, file.nbytes - start)
            # Whole blocks are read: after a crash a slot may end inside one.
            if await source.medium.read(file, start, view[: align(nbytes, source.block_bytes)]) < nbytes:
                raise DamagedError(f"{file.name} is too short")
            yield bytes(view[:nbytes])

    try:
        store = await asyncio.to_thread(client.another)
        async for piece in pieces():
            putting = asyncio.ensure_future(asyncio.to_thread(put_blocking, store, piece))
            try:
                if not await asyncio.shield(putting):
                    break
            except asyncio.CancelledError:
                await uninterrupted(stop(putting))
                raise
    except Exception as error:  # noqa: BLE001 - else the receiver waits for ever
        await asyncio.to_thread(client.set, f"{prefix}/{number}", b"-" + _encode(error))
    finally:
        await source.close()


def _encode(error: Exception) -> bytes:
    """Encode an error of a sender, with its errno: a lack of descriptors says nothing of the part."""
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "")
    arguments: tuple[object, ...] = (str(error),)
    if isinstance(error, ReadError) and error.errno is not None:
        arguments = (error.errno, error.strerror, error.filename)
    return msgspec.msgpack.encode((kind, arguments))


def _decode(data: bytes) -> CheckpointError:
    kind, arguments = msgspec.msgpack.decode(data, type=tuple[str, tuple[int | str | None, ...]])
    return _KINDS.get(kind, GroupError)(*arguments)


class ReceivedPart(Source):
    """A part on another host, received into a file here.

    Args:
        client: This rank's client; the part is received over a connection of its own.
        prefix: Prefix of the keys under which the part is sent.
        opened: The medium of the group's folder, which is prepared.
        root: The group's folder.
        folder: The name of this rank's folder in it, for the file.
    """

    def __init__(self, client: Client, prefix: str, opened: OpenMedium, root: Path, folder: str) -> None:
        self._client = client
        self._prefix = prefix
        self.medium = opened.medium
        self._name = f"{folder}/{_PREFIX}{secrets.token_hex(8)}"
        self._path = root / self._name
        self._taken = 0  # pieces
        self._stopping = False

    async def acquire(self) -> File:
        """Receive the whole part into a file; return that file, open.

        Cancellation: raised once nothing is received and written any more.

        Raises the sender's DamagedError, ReadError or CorruptStoreError; StoreFullError, WriteError: the file cannot be
        written; GroupError: the connection is lost.
        """
        receiving = asyncio.create_task(asyncio.to_thread(self._receive))
        try:
            await asyncio.shield(receiving)
        except asyncio.CancelledError:
            await uninterrupted(self._stop(receiving))
            raise
        except CheckpointError:
            raise
        except OSError as error:
            raise map_error(error, self._path) from error
        except RuntimeError as error:
            raise GroupError(f"the part was not received: {str(error).splitlines()[0]}") from error
        self._file = await self.medium.open(self._name, writable=False)
        return self._file

    async def _stop(self, receiving: asyncio.Task[None]) -> None:
        self._stopping = True  # first: a thread that passes the number of the piece that it waits for sees it
        wake = b"-" + _encode(GroupError(_CANCELLED))
        await asyncio.to_thread(self._client.set, f"{self._prefix}/{self._taken}", wake)
        await asyncio.gather(receiving, return_exceptions=True)

    def _receive(self) -> None:
        try:
            pieces = self._pieces(self._client.another())
            remove_fetched(self._path.parent)
            with self._path.open("xb") as file:
                self.entry, self.block_bytes, nbytes = msgspec.msgpack.decode(next(pieces), type=tuple[Entry, int, int])
                while file.tell() < nbytes:
                    file.write(next(pieces))
        except BaseException:
            self._client.set(f"{self._prefix}/taken/{self._taken}", _STOPPED)
            raise

    def _pieces(self, store: TCPStore) -> Iterator[bytes]:
        while True:
            if self._stopping:
                raise GroupError(_CANCELLED)
            data = store.get(f"{self._prefix}/{self._taken}")
            store.delete_key(f"{self._prefix}/{self._taken}")
            if data[:1] != b"+":
                raise _decode(data[1:])
            store.set(f"{self._prefix}/taken/{self._taken}", b"")  # type: ignore[arg-type]
            self._taken += 1
            yield data[1:]

    async def close(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            os.unlink(self._path)
        await super().close()
