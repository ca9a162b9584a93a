# SPDX-License-Identifier: Apache-2.0
"""Connections between ranks of one run, over which copies of checkpoints in memory are sent.

Both sides first prove that they have the run's token, in messages of fixed sizes; nothing is allocated for a stranger.
Then they exchange frames: a kind, a length that the receiver knows or limits, a CRC-32 of the whole frame, and as many
bytes. Frames are neither encrypted nor signed: an attacker who can change them can change the control plane's messages.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final

from pccheck_async.errors import GroupError, machine_error
from pccheck_async.format import crc32
from pccheck_async.telemetry import write
from pccheck_async.transfer import abandoned_in_child

__all__ = ["FRAME_BYTES", "Channel", "Kind", "Listener", "Pace", "connect", "local_address"]

FRAME_BYTES: Final = 4 << 20
"""Bytes of a checkpoint in one frame: with 1 MiB, copies were sent at three quarters of the speed."""
_VERSION: Final = 1
_MAGIC: Final = b"pccR"
_HELLO: Final = struct.Struct("<4sHII32s")
"""Magic, version, the sender's rank, the receiver's rank, a nonce."""
_ANSWER: Final = struct.Struct("<4sH32s32s")
"""Magic, version, a nonce, a proof."""
_PROOF_BYTES: Final = 32
_HEAD: Final = struct.Struct("<BI")
_HEAD_BYTES: Final = _HEAD.size + 4
_MOST_TEXT: Final = 4096
_MEETING_SECONDS = 20.0
_LAST_SECONDS = 5.0
_MOST_STRANGERS: Final = 64
"""Most connections that have not proved yet that they have the token; the oldest is closed when one more comes."""
_SIOCGIFADDR: Final = 0x8915


class Kind(IntEnum):
    """The kinds of frames, in the order in which they are sent."""

    OFFER = 1
    READY = 2
    DATA = 3
    TAKEN = 4
    FAILED = 5


class Channel:
    """A connection to another rank.

    Methods raise OSError, and GroupError: the other side sent an error, or something unexpected, or closed it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def read(self, into: memoryview) -> None:
        """Fill a buffer with the next bytes."""
        while into:
            if not (got := await self._loop.sock_recv_into(self._socket, into)):
                raise GroupError("the connection was closed")
            into = into[got:]

    async def read_bytes(self, nbytes: int) -> bytes:
        """Return the next ``nbytes`` bytes."""
        await self.read(memoryview(data := bytearray(nbytes)))
        return bytes(data)

    async def write(self, data: bytes | memoryview) -> None:
        """Send bytes."""
        await self._loop.sock_sendall(self._socket, data)

    async def send(self, kind: Kind, body: bytes | memoryview = b"") -> None:
        """Send a frame."""
        head = _HEAD.pack(kind, len(body))
        await self.write(head + crc32(body, crc32(head)).to_bytes(4, "little"))
        await self.write(body)

    async def receive(self, kind: Kind, most: int = 0) -> bytes:
        """Return the body of the next frame. Raises GroupError if it is of another kind, or longer than ``most``."""
        nbytes, expected = await self._head(kind)
        if nbytes > most:
            raise GroupError(f"it sent a frame of {nbytes} bytes, where at most {most} belong")
        body = await self.read_bytes(nbytes)
        _check(body, expected)
        return body

    async def receive_into(self, into: memoryview) -> None:
        """Fill a buffer with the body of the next frame. Raises GroupError if it is no data frame of that length."""
        nbytes, expected = await self._head(Kind.DATA)
        if nbytes != len(into):
            raise GroupError(f"it sent a frame of {nbytes} bytes, where {len(into)} belong")
        await self.read(into)
        _check(into, expected)

    async def _head(self, kind: Kind) -> tuple[int, tuple[int, int]]:
        """Read the head of the next frame; return the length of its body, the CRC of the head and that of the frame.

        Raises GroupError: the frame is of another kind, or an error of the other side.
        """
        data = await self.read_bytes(_HEAD_BYTES)
        found, nbytes = _HEAD.unpack(head := data[: _HEAD.size])
        expected = crc32(head), int.from_bytes(data[_HEAD.size :], "little")
        if found == Kind.FAILED and nbytes <= _MOST_TEXT:
            body = await self.read_bytes(nbytes)
            _check(body, expected)
            raise GroupError(body.decode(errors="replace"))
        if found != kind:
            raise GroupError(f"it sent a frame of kind {found}, where {kind} belongs")
        return nbytes, expected

    async def fail(self, why: str) -> None:
        """Send an error, and wait some seconds until the other side has read it.

        Closing at once, with bytes from the other side unread, would reset the connection and lose the error.
        """
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                await self.send(Kind.FAILED, why.encode(errors="replace")[:_MOST_TEXT])
                self._socket.shutdown(socket.SHUT_WR)
                while await self._loop.sock_recv(self._socket, 1 << 16):
                    pass

    def close(self) -> None:
        """Close the connection, also for forked children that share the socket."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _check(body: bytes | memoryview, expected: tuple[int, int]) -> None:
    head, whole = expected
    if crc32(body, head) != whole:
        raise GroupError("a frame was damaged on its way")


def _proof(token: bytes, who: bytes, *what: bytes) -> bytes:
    return hmac.digest(token, who + b"".join(what), "sha256")


async def connect(address: tuple[str, int], token: bytes, sender: int, receiver: int) -> Channel:
    """Connect to the rank ``receiver``; both sides prove that they are of this run. Raises GroupError."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    channel = Channel(socket.socket(family, socket.SOCK_STREAM))
    try:
        async with asyncio.timeout(_MEETING_SECONDS):
            await channel._loop.sock_connect(channel._socket, address)
            hello = _HELLO.pack(_MAGIC, _VERSION, sender, receiver, secrets.token_bytes(32))
            await channel.write(hello)
            magic, version, nonce, proof = _ANSWER.unpack(await channel.read_bytes(_ANSWER.size))
            if magic != _MAGIC:
                raise GroupError("something else than a rank answers there")
            if version != _VERSION:
                raise GroupError(f"it sends copies by version {version} of the protocol, this rank by {_VERSION}")
            if not hmac.compare_digest(proof, _proof(token, b"receiver", hello, nonce)):
                raise GroupError("it has not the token of this run")
            await channel.write(_proof(token, b"sender", hello, nonce))
    except TimeoutError:
        channel.close()
        raise GroupError(f"it did not answer within {_MEETING_SECONDS} s") from None
    except OSError as error:
        channel.close()
        why = os.strerror(error.errno) if error.errno else str(error)
        raise GroupError(f"it is not reached at {address[0]} port {address[1]}: {why}") from error
    except BaseException:
        channel.close()
        raise
    return channel


class Listener:
    """The listening socket of one rank: accepts connections of ranks that have the token of the run.

    Args:
        host: The address to listen at; no other interface is open.

    Raises OSError.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, 0), family=family, backlog=256)
        except OSError as error:
            raise machine_error(error, f"the socket for copies at {host}") from error
        self._socket.setblocking(False)
        abandoned_in_child.add(self)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._meeting: dict[asyncio.Task[None], Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned = False

    def serve(self, token: bytes, rank: int, take: Callable[[int, Channel], Awaitable[None]]) -> None:
        """Accept connections until closed; call ``take`` with the rank and the channel of each that has the token."""
        self._token, self._rank, self._take = token, rank, take
        self._start(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError:  # no descriptor is left, say
                await asyncio.sleep(0.1)
                continue
            if len(self._meeting) >= _MOST_STRANGERS:
                self._give_up(next(iter(self._meeting)))
            channel = Channel(connection)
            self._meeting[self._start(self._meet(channel))] = channel

    def _give_up(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._meeting.pop(task).close()  # also of one that has not begun

    async def _meet(self, channel: Channel) -> None:
        try:
            try:
                async with asyncio.timeout(_MEETING_SECONDS):
                    sender = await self._check(channel)
            except (GroupError, OSError) as error:  # also TimeoutError
                self._warn(error)
                return
            finally:
                if (task := asyncio.current_task()) is not None:
                    self._meeting.pop(task, None)
            await self._take(sender, channel)
        finally:
            channel.close()

    async def _check(self, channel: Channel) -> int:
        """Exchange proofs with the other side; return its rank. Raises GroupError: it has not the token."""
        hello = await channel.read_bytes(_HELLO.size)
        magic, version, sender, receiver, _ = _HELLO.unpack(hello)
        if magic != _MAGIC or receiver != self._rank:
            raise GroupError("no rank of this run that looks for this one")
        nonce = secrets.token_bytes(32)
        await channel.write(_ANSWER.pack(_MAGIC, _VERSION, nonce, _proof(self._token, b"receiver", hello, nonce)))
        if version != _VERSION:
            raise GroupError(f"one that sends copies by version {version} of the protocol")
        proof = await channel.read_bytes(_PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(self._token, b"sender", hello, nonce)):
            raise GroupError("one that has not the token of this run")
        return int(sender)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            text = "something connected to %s port %d and was refused: %s; this is said once"
            write("replicas_stranger", text, *self.address, error or "it said nothing")

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def abandon(self) -> None:
        """Close the socket in a forked child."""
        self._socket.close()

    async def close(self) -> None:
        """Accept no more connections, and cancel the transfers under way."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        for task in [*self._meeting]:
            self._give_up(task)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()


class Pace:
    """Limits the rate of all that is sent to ``nbytes_per_second``; None: no limit."""

    def __init__(self, nbytes_per_second: int | None) -> None:
        self._rate = nbytes_per_second
        self._free_at = 0.0

    async def wait(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more bytes may be sent."""
        if self._rate is not None:
            now = asyncio.get_running_loop().time()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._rate
            await asyncio.sleep(start - now)


def local_address(interface: str | None, reached: str) -> str:
    """Return the address of an interface, given by name or address; None: of the one on the route to ``reached``.

    Raises GroupError: there is none. May look up a host name.
    """
    if interface is None:
        try:
            found = socket.getaddrinfo(reached, 9, type=socket.SOCK_DGRAM)
            with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[0][4])
                return str(probe.getsockname()[0])
        except OSError as error:
            raise GroupError(f"no interface leads to rank 0 at {reached} ({error}): give interface=") from error
    with suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        name = interface.encode()
        try:
            found_there = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name[:15]))
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            text = (
                f"interface={interface!r}: no such interface has an IPv4 address ({error.strerror}); there are {known}"
            )
            raise GroupError(text) from error
    return socket.inet_ntoa(found_there[20:24])
