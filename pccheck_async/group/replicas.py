# SPDX-License-Identifier: Apache-2.0
"""Copies of checkpoints in memory on other hosts: this rank's parts there, and other ranks' parts here.

A copy lies in an ordinary store of the rank whose part it is, in that rank's folder in this host's memory: a restart
finds, reads and continues it like that rank's own store. The record of such a store names parts on the keep-list of the
tier, each only once all of it was received and verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

import msgspec
from msgspec.structs import replace

from pccheck_async.engine import Memory, MemoryTier
from pccheck_async.errors import CheckpointError, GroupError
from pccheck_async.format import Entry, align
from pccheck_async.format.record import REGION_NBYTES
from pccheck_async.group.actions import Action
from pccheck_async.group.folder import parts_of, write_parts
from pccheck_async.group.member import Member
from pccheck_async.group.messages import Roster, Round, RoundEnd
from pccheck_async.group.parts import Applied, Part
from pccheck_async.group.wire import FRAME_BYTES, Channel, Kind, Listener, Pace, connect
from pccheck_async.medium import File
from pccheck_async.store import OwnSlot, PartReader, SlotLease, Source, Staging, Store, Written, rank_name
from pccheck_async.telemetry import write
from pccheck_async.transfer import Tasks, aligned_buffer, uninterrupted
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.operations import Operations

__all__ = ["Replicas"]

_PATIENCE_SECONDS = 60.0
_MOST_SECONDS = 86400.0
_LEAST_RATE = 16 << 20
"""Bytes per second below which a transfer is given up, or half of one copy's share of the rate limit, if lower."""


class _Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The beginning of a transfer."""

    round: int
    part: Part
    seconds: float
    """The most seconds that the whole transfer may take."""


@dataclass(slots=True, eq=False)
class _Held:
    """The copies of one rank's parts in this host's memory."""

    store: Store
    parts: list[Part]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by one transfer at a time."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the record is changed, and not during a transfer."""


class _Leased(Source):
    """The source of a part in a leased slot that no record names."""

    def __init__(self, store: Store, lease: SlotLease, entry: Entry) -> None:
        self.entry, self.medium, self.block_bytes = entry, store.medium, store.block_bytes
        self._lease = lease

    async def acquire(self) -> File:
        return self._lease.file

    async def close(self) -> None:
        pass  # the slot stays leased


class Replicas:
    """One rank's side of the rounds. All of it runs on the engine's loop.

    Args:
        tier: The settings of the memory tier.
        member: This rank's member of the memory tier.
        memory: The memory tier.
        operations: The engine's threads.
        do: Carries out actions of the member.
        listener: The listener at this rank's address.

    Attributes:
        degraded: Why rounds fail, and since which step, or why there are fewer copies; empty if all is well.
    """

    def __init__(
        self,
        tier: MemoryTier,
        member: Member,
        memory: Memory,
        operations: Operations,
        do: Callable[[list[Action]], None],
        listener: Listener,
    ) -> None:
        self._member, self._memory, self._do = member, memory, do
        self._listener, self._operations = listener, operations
        self._backend, self._staging = CopyBackend(operations), Staging()
        self._rate, self._pace = tier.rate_limit, Pace(tier.rate_limit)
        self._held: dict[int, _Held] = {}
        self._refusals: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._ended = -1  # the number of the last round that ended
        self._sending: asyncio.Task[None] | None = None
        self._applying: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._settled: tuple[int, Exception | None] = (-1, None)  # the newest counter, and its outcome
        self._since: int | None = None
        self.degraded = self._few = ""

    # -- opening and closing

    async def open(self) -> None:
        """Open the stores of the copies that this rank holds, and begin to take copies. Called once all ranks have met.

        Raises GroupError, on all ranks: ranks cannot reach each other.
        """
        member = self._member
        _check_addresses(member.roster)
        for rank, holders in enumerate(member.rounds.holders):
            if member.rank in holders:
                try:
                    store = await self._memory.open_beside(rank_name(rank))
                except (CheckpointError, OSError) as error:  # it costs copies, and no checkpoint
                    self._refusals[rank] = str(error)
                else:
                    self._held[rank] = _Held(store, [*parts_of(store.committed.record)])
        hosts = len({*member.homes})
        if hosts <= member.rounds.replicas:
            needed = member.rounds.replicas + 1
            self.degraded = self._few = f"replicas={needed - 1} needs {needed} hosts, and here are {hosts}"
            if member.rank == 0:
                write("replicas_degraded", "the memory of fewer hosts can be lost: %s", self.degraded)
        names, held = member.roster.hosts, enumerate(member.rounds.holders)
        if member.rank == 0 and (
            same := [rank for rank, each in held if any(names[rank] == names[one] for one in each)]
        ):
            text = "copies of rank %d are on its own host %s: its ranks have different MemoryTier(path=...)"
            write("replicas_degraded", text, same[0], names[same[0]])
        if hosts == 1:
            self._settle(1 << 62, GroupError(self.degraded))
        self._listener.serve(member.roster.token, member.rank, self._take)

    async def close(self) -> None:
        """Take and send no more copies, and fail the waiting for them."""
        await self._listener.close()
        tasks = [*self._applying, *([] if self._sending is None else [self._sending])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._settle(
            1 << 62, GroupError("the engine was closed before the checkpoint was in the memory of other hosts")
        )

    # -- rounds

    def reached(self, counter: int) -> asyncio.Future[None]:
        """Return a future that is done once a checkpoint, or a newer one, is in the memory of other hosts, too.

        The future fails with GroupError if the round that settles this fails, or there are no more rounds.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        floor = self._member.rounds.floor
        if floor is not None and counter <= floor.counter:
            future.set_result(None)
        elif counter <= self._settled[0]:
            _set(future, self._settled[1])
        else:
            self._waiting[counter] = future
        return future

    def begin(self, running: Round) -> None:
        """Start to send this rank's part of a round's checkpoint to all ranks that hold copies of it."""
        self._changed.set()
        self._sending = asyncio.get_running_loop().create_task(self._send_all(running))

    def end(self, end: RoundEnd) -> None:
        """End a round: drop the copies that are not kept any more, and end the waiting for its checkpoint and older."""
        self._ended = end.number
        self._changed.set()
        if self._sending is not None:  # another rank has failed
            self._sending.cancel()
        self._start(self.apply())
        error = None
        if end.why is None:
            self.degraded, self._since = self._few, None
        else:
            why = end.why if end.rank < 0 else f"rank {end.rank}: {end.why}"
            error = GroupError(f"step {end.step} is not in the memory of other hosts: {why}")
            if end.rank >= 0:
                self._degrade(end, why)
        self._settle(end.key.counter, error)

    def _degrade(self, end: RoundEnd, why: str) -> None:
        if self._since is None:
            self._since = end.step
            if self._member.rank in (0, end.rank):
                text = "replicas degraded since step %d, the copies in the memory of other hosts are older: %s"
                write("replicas_degraded", text, end.step, why, step=end.step, error=why)
        self.degraded = f"since step {self._since}: {why}"

    def stop(self, why: str) -> None:
        """Called when nothing more is decided: fails the waiting for copies."""
        self.degraded = self.degraded or why
        self._settle(1 << 62, GroupError(why))

    def _settle(self, counter: int, error: Exception | None) -> None:
        self._settled = max(self._settled, (counter, error), key=lambda settled: settled[0])
        for each in [each for each in self._waiting if each <= counter]:
            _set(self._waiting.pop(each), error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._applying.add(task)
        task.add_done_callback(self._applying.discard)

    # -- sending

    async def _send_all(self, running: Round) -> None:
        why: str | None = None
        try:
            async with Tasks() as tasks:  # the first error ends all
                for holder in self._member.rounds.holders[self._member.rank]:
                    tasks.create_task(self._send(running, holder))
        except GroupError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - else the round never ends
            why = f"it cannot send its part: {error!r}"
        self._do(self._member.copied(running.number, why))

    async def _send(self, running: Round, holder: int) -> None:
        """Send this rank's part to one holder. Raises GroupError, which names the holder."""
        try:
            await self._send_to(running, holder)
        except (CheckpointError, OSError) as error:
            host = self._member.roster.hosts[holder]
            raise GroupError(f"rank {holder} on {host}: {error}") from error

    async def _send_to(self, running: Round, holder: int) -> None:
        member, store = self._member, self._memory.store
        if (part := member.parts.get(running.key)) is None:
            raise GroupError("there is no part here to send")
        if (address := member.roster.addresses[holder]) is None:
            raise GroupError("it takes no copies")
        source, seconds = OwnSlot(store, part.entry), self._seconds(part.entry)
        file = await source.acquire()
        try:
            async with asyncio.timeout(seconds):
                channel = await connect(address, member.roster.token, member.rank, holder)
                try:
                    await self._send_over(channel, _Offer(running.number, part, seconds), source, file)
                finally:
                    channel.close()
        except TimeoutError:
            raise GroupError(f"it did not take the copy within {seconds:.0f} s") from None
        finally:
            await source.close()

    async def _send_over(self, channel: Channel, offer: _Offer, source: Source, file: File) -> None:
        """Send a part, and wait until it is taken; an error of the other side is raised at once, also while sending."""
        await channel.send(Kind.OFFER, msgspec.msgpack.encode(offer))
        await channel.receive(Kind.READY)
        async with Tasks() as tasks:
            tasks.create_task(channel.receive(Kind.TAKEN))
            tasks.create_task(self._send_bytes(channel, source, file))

    async def _send_bytes(self, channel: Channel, source: Source, file: File) -> None:
        buffer = aligned_buffer(FRAME_BYTES)
        for offset, nbytes in _frames(source.entry):
            await self._pace.wait(nbytes)
            # Read by the system, and not from the mapping: the file may be cut off by now.
            whole = buffer[: align(nbytes, source.block_bytes)]
            if await source.medium.read(file, offset, whole) < nbytes:
                raise GroupError("the part here is cut off")
            await channel.send(Kind.DATA, buffer[:nbytes])

    def _seconds(self, entry: Entry) -> float:
        rate = _LEAST_RATE if self._rate is None else min(_LEAST_RATE, self._rate / (2 * self._member.rounds.replicas))
        return _PATIENCE_SECONDS + (entry.nbytes + entry.manifest_nbytes) / rate

    # -- taking

    async def _take(self, sender: int, channel: Channel) -> None:
        """Take a part from the rank ``sender``, whose it is; on an error send it the reason."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                data = await channel.receive(Kind.OFFER, REGION_NBYTES)
            offer = msgspec.msgpack.decode(data, type=_Offer)
            async with asyncio.timeout(min(max(0.0, offer.seconds), _MOST_SECONDS)):
                await self._take_part(sender, offer, channel)
        except TimeoutError:
            await channel.fail("it was too slow")
        except Exception as error:  # noqa: BLE001 - it costs the copy, and nothing else
            await channel.fail(str(error) or repr(error))

    async def _take_part(self, sender: int, offer: _Offer, channel: Channel) -> None:
        member, part = self._member, offer.part
        if (held := self._held.get(sender)) is None:
            raise GroupError(self._refusals.get(sender, "it holds no copies of that rank"))
        running = await self._learned(offer.round)
        entry, block_bytes = part.entry, held.store.block_bytes
        if running.key != part.key or (part.rank, part.world) != (sender, member.world):
            raise GroupError("this is not the part that was to be sent")
        ordered = 0 <= entry.nbytes <= entry.manifest_offset and entry.manifest_nbytes > 0
        if not ordered or entry.manifest_offset % block_bytes:
            raise GroupError("its lengths are not those of a part")
        async with held.turn:
            async with held.lock:
                await self._apply(held)
            end = entry.manifest_offset + align(entry.manifest_nbytes, block_bytes)
            lease = await self._lease(held.store, end)
            entry = replace(entry, slot=lease.slot)
            try:
                await channel.send(Kind.READY)
                await self._receive(channel, held.store, lease, entry)
                await self._verify(held.store, lease, entry)
            except BaseException:
                await held.store.release(lease, entry.manifest_offset)
                raise
            # The slot is the record's then, or free.
            await uninterrupted(self._commit(held, lease, replace(part, entry=entry)))
        await channel.send(Kind.TAKEN)

    async def _commit(self, held: _Held, lease: SlotLease, part: Part) -> None:
        await held.store.finish_data(Written(lease, part.entry))
        async with held.lock:
            if part.key not in self._member.kept_copies:
                await held.store.release(lease, part.entry.manifest_offset)
                raise GroupError("the checkpoint was removed meanwhile")
            await self._write(held, [part, *held.parts])

    async def _learned(self, number: int) -> Round:
        """Wait until this rank has learned that a round runs; return it. Raises GroupError: it has ended."""
        while self._ended < number:
            if (running := self._member.rounds.running) is not None and running.number == number:
                return running
            self._changed.clear()
            await self._changed.wait()
        raise GroupError("that round has ended")

    async def _lease(self, store: Store, nbytes: int) -> SlotLease:
        if store.slots.table.decide(nbytes).create:
            self._memory.check_room(store, nbytes)
        lease = await store.reserve_now(nbytes, creates=True)
        if lease is None:
            raise GroupError("readers of other processes hold all slots of the copies")
        return lease

    async def _receive(self, channel: Channel, store: Store, lease: SlotLease, entry: Entry) -> None:
        buffer = aligned_buffer(FRAME_BYTES)
        for offset, nbytes in _frames(entry):
            await channel.receive_into(buffer[:nbytes])
            padded = align(nbytes, store.block_bytes)
            buffer[nbytes:padded] = bytes(padded - nbytes)
            await store.medium.write(lease.file, offset, buffer[:padded])

    async def _verify(self, store: Store, lease: SlotLease, entry: Entry) -> None:
        """Compare all of a received part with its checksums: a record may name only verified parts."""
        reader = PartReader(_Leased(store, lease, entry), self._backend, self._staging)
        try:
            await reader.hold()
            await reader.verify()
        finally:
            await reader.close()

    # -- records

    async def apply(self) -> None:
        """Drop the copies that are not to be kept (:attr:`.member.Member.kept_copies`)."""
        if self._member.run is None:  # none is there before the first decision
            return
        for held in [*self._held.values()]:
            async with held.lock:
                with suppress(CheckpointError, OSError):  # then they were removed
                    await self._apply(held)

    async def _apply(self, held: _Held) -> None:
        kept = [part for part in held.parts if part.key in self._member.kept_copies]
        if kept != held.parts:
            await self._write(held, kept)
            await held.store.slots.remove_surplus()

    async def _write(self, held: _Held, parts: Sequence[Part]) -> None:
        """Write a record that names ``parts``; if that fails, remove the store: its record may name dropped ones."""
        member = self._member
        assert member.run is not None
        try:
            await held.store.take_over_once()
            newest_first = tuple(sorted(parts, key=lambda part: -part.entry.counter))
            await write_parts(held.store, newest_first, Applied(member.run, member.learned, ()))
        except (CheckpointError, OSError) as error:
            for rank in [rank for rank, each in self._held.items() if each is held]:
                self._refusals[rank] = f"its record cannot be written: {error}"
                del self._held[rank]
                await self._memory.remove_beside(rank_name(rank), self._operations)
            raise
        held.parts = [*newest_first]


def _check_addresses(roster: Roster) -> None:
    """Raise GroupError if a rank listens at an address that other hosts cannot reach."""
    if len({*roster.hosts}) > 1:
        for rank, (host, address) in enumerate(zip(roster.hosts, roster.addresses, strict=True)):
            if address is not None and ip_address(address[0]).is_loopback:
                raise GroupError(
                    f"rank {rank} on {host} would take copies at {address[0]}, which no other host reaches: give "
                    "MemoryTier(interface=...)"
                )


def _frames(entry: Entry) -> Iterator[tuple[int, int]]:
    """Yield offset in the slot and length of each frame of a part: first its payload, then its manifest."""
    for start, nbytes in ((0, entry.nbytes), (entry.manifest_offset, entry.manifest_nbytes)):
        for at in range(0, nbytes, FRAME_BYTES):
            yield start + at, min(FRAME_BYTES, nbytes - at)


def _set(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
