"""Connections for copies: strangers, wrong tokens, other versions, and peers that are slow, stopped or dead."""

from __future__ import annotations

import asyncio
import hmac
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from pccheck_async.errors import GroupError
from pccheck_async.format import crc32
from pccheck_async.group import wire
from pccheck_async.group.wire import Channel, Kind, Listener, Pace, connect, local_address

TOKEN = b"t" * 32
Served = Callable[[int, Channel], Awaitable[None]]


def served(test: Callable[[Listener], Awaitable[None]], take: Served | None = None) -> None:
    """Run a test beside a listener of rank 1, which by default sends back one frame."""

    async def echo(sender: int, channel: Channel) -> None:
        with suppress(GroupError, OSError):
            await channel.send(Kind.READY, await channel.receive(Kind.OFFER, 100) + b"%d" % sender)

    async def run() -> None:
        listener = Listener("127.0.0.1")
        listener.serve(TOKEN, 1, take or echo)
        try:
            await test(listener)
        finally:
            await listener.close()

    asyncio.run(run())


async def ask(listener: Listener, token: bytes = TOKEN, receiver: int = 1) -> bytes:
    channel = await connect(listener.address, token, 7, receiver)
    try:
        await channel.send(Kind.OFFER, b"hello ")
        return await channel.receive(Kind.READY, 100)
    finally:
        channel.close()


def test_both_sides_prove_themselves() -> None:
    async def test(listener: Listener) -> None:
        assert await ask(listener) == b"hello 7"

    served(test)


@pytest.mark.parametrize(("token", "receiver", "why"), [(b"x" * 32, 1, "has not the token"), (TOKEN, 2, "closed")])
def test_who_is_of_another_run_or_rank_is_refused(token: bytes, receiver: int, why: str) -> None:
    async def test(listener: Listener) -> None:
        with pytest.raises((GroupError, OSError), match=why):
            await ask(listener, token, receiver)
        assert await ask(listener) == b"hello 7"

    served(test)


def test_a_sender_with_another_token_gets_nothing_though_it_does_not_check_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(listener: Listener) -> None:
        monkeypatch.setattr(hmac, "compare_digest", lambda *_: True)  # on this side
        channel = await connect(listener.address, b"x" * 32, 7, 1)
        monkeypatch.undo()
        await channel.send(Kind.OFFER, b"hello ")
        with pytest.raises((GroupError, OSError)):
            await channel.receive(Kind.READY, 100)
        channel.close()

    served(test)


def test_another_version_is_named_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(listener: Listener) -> None:
        pack = wire._HELLO.pack

        class Newer:
            size, unpack = wire._HELLO.size, wire._HELLO.unpack

            @staticmethod
            def pack(magic: bytes, version: int, *rest: Any) -> bytes:
                return pack(magic, version + 1, *rest)

        monkeypatch.setattr(wire, "_HELLO", Newer)
        with pytest.raises((GroupError, OSError)):
            await ask(listener)
        answer = wire._ANSWER.pack(b"pccR", 9, bytes(32), bytes(32))

        def reply(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        with pytest.raises(GroupError, match="version 9 of the protocol, this rank by 1"):
            await connect(server.sockets[0].getsockname(), TOKEN, 0, 1)
        server.close()
        await server.wait_closed()

    served(test)
    assert "copies by version 2 of the protocol" in caplog.text


@pytest.mark.slow
def test_a_stranger_stops_nothing() -> None:
    """10,000 random beginnings, some of them nearly right; and more open connections than are looked at."""
    chance = random.Random(5)

    async def test(listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        idle = []
        for number in range(10_000):
            data = bytearray(chance.randbytes(chance.choice([0, 1, 45, 46, 47, 200])))
            if chance.random() < 0.5:
                data[:14] = wire._HELLO.pack(b"pccR", 1, 7, 1, b"")[: chance.randrange(15)]
            stranger = socket.create_connection(listener.address)
            stranger.sendall(data)
            stranger.close() if number % 50 else idle.append(stranger)
            if number % 100 == 0:
                await asyncio.sleep(0)
                before = loop.time()
                assert await ask(listener) == b"hello 7"
                assert loop.time() - before < 5
        assert len(listener._meeting) <= wire._MOST_STRANGERS
        for stranger in idle:
            stranger.close()

    served(test)


@pytest.mark.parametrize("cut", range(9))
def test_every_bit_of_a_frame_counts(cut: int) -> None:
    """A flipped bit in the head's kind, its length, its checksum, or in the body: never taken for what was sent."""
    for bit in range(8):

        async def test(listener: Listener) -> None:
            channel = await connect(listener.address, TOKEN, 7, 1)
            body = b"hello "
            head = wire._HEAD.pack(Kind.OFFER, len(body))
            frame = bytearray(head + crc32(body, crc32(head)).to_bytes(4, "little") + body)
            frame[cut if cut < 8 else 12] ^= 1 << bit  # noqa: B023
            await channel.write(bytes(frame))
            channel._socket.shutdown(socket.SHUT_WR)  # else a longer length would be waited for
            with pytest.raises((GroupError, OSError)):
                await channel.receive(Kind.READY, 100)
            channel.close()

        served(test)


def test_a_frame_longer_than_it_may_be_is_not_allocated() -> None:
    async def test(listener: Listener) -> None:
        channel = await connect(listener.address, TOKEN, 7, 1)
        await channel.write(wire._HEAD.pack(Kind.OFFER, (1 << 32) - 1) + bytes(4))
        with pytest.raises((GroupError, OSError), match="at most 100 belong"):
            await channel.receive(Kind.READY, 100)
        channel.close()

    async def take(_: int, channel: Channel) -> None:
        with pytest.raises(GroupError) as caught:
            await channel.receive(Kind.OFFER, 100)
        await channel.fail(str(caught.value))

    served(test, take)


def test_a_stopped_peer_and_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel still takes connections of a process that is stopped."""
    monkeypatch.setattr(wire, "_MEETING_SECONDS", 0.3)

    async def run() -> None:
        stopped = Listener("127.0.0.1")
        begin = time.monotonic()
        with pytest.raises(GroupError, match=r"did not answer within 0\.3 s"):
            await connect(stopped.address, TOKEN, 7, 1)
        assert time.monotonic() - begin < 5
        await stopped.close()
        with pytest.raises(GroupError, match="refused"):
            await connect(stopped.address, TOKEN, 7, 1)

    asyncio.run(run())


def test_the_rate_is_kept() -> None:
    async def run() -> float:
        pace, begin = Pace(1_000_000), time.monotonic()
        await asyncio.gather(*(pace.wait(100_000) for _ in range(4)))
        return time.monotonic() - begin

    assert 0.29 <= asyncio.run(run()) < 3


def test_one_interface_is_listened_at() -> None:
    name = next(name for _, name in socket.if_nameindex() if name == "lo")
    assert local_address(name, "") == local_address("127.0.0.1", "") == local_address(None, "localhost") == "127.0.0.1"
    with pytest.raises(GroupError, match=r"no such interface has an IPv4 address .*; there are .*lo"):
        local_address("strange0", "")
    listener = Listener("127.0.0.1")
    with pytest.raises(OSError):  # noqa: PT011
        socket.create_connection((_other_address(), listener.address[1]), timeout=1)
    asyncio.run(listener.close())


def _other_address() -> str:
    """An address of this machine on another interface; 127.0.0.2 is on the same one, and not listened at either."""
    others = [str(found[4][0]) for found in socket.getaddrinfo(os.uname().nodename, 1, socket.AF_INET)]
    return next((address for address in others if not address.startswith("127.")), "127.0.0.2")
