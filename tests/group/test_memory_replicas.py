"""Copies in the memory of other hosts: what survives the loss of hosts, with their memory and their disks."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pccheck_async import FlatShard, Group, MemoryTier, PendingCheckpoint, SyncCheckpointEngine
from pccheck_async.engine import Memory
from pccheck_async.errors import CheckpointError, StoreFullError
from pccheck_async.format import crc32
from pccheck_async.group import replicas as replicas_module
from pccheck_async.group import wire
from pccheck_async.group.placement import peer_hosts
from pccheck_async.group.replicas import Replicas
from pccheck_async.group.replicas import _Offer as wire_offer
from pccheck_async.store import Store
from pccheck_async.testing.probe import probe
from pccheck_async.upkeep import list_memory
from tests.group.test_memory import memory_of
from tests.support.ranks import RankFailedError, run_ranks, wait_for
from tests.support.state_strategies import TORCH_DTYPES, difference
from tests.unit.test_composed import scaled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("machine_asked_once"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:the checkpoint of step"),
]
SIZES = pytest.mark.parametrize("elements", [500, 300_000], ids=["one request", "chunks"])


class Hosts:
    """Hosts, each with a disk and a memory of its own, and the ranks that run on them."""

    def __init__(self, disks: Path, memory: Path, *, replicas: int = 1, **settings: Any) -> None:
        self.disks, self.memory, self.replicas, self.settings = disks, memory, replicas, settings

    def disk(self, host: int) -> Path:
        return self.disks / f"{host}"

    def tier(self, host: int) -> MemoryTier:
        (self.memory / f"{host}").mkdir(exist_ok=True)
        return MemoryTier(interval=1, path=str(self.memory / f"{host}"), replicas=self.replicas, **self.settings)

    def lose(self, hosts: Iterable[int]) -> None:
        for host in hosts:
            shutil.rmtree(self.memory / f"{host}")
            shutil.rmtree(self.disks / f"{host}")

    def part(self, host: int, rank: int) -> Path:
        (folder,) = (self.memory / f"{host}").iterdir()
        return folder / f"rank-{rank:05d}"

    def run(
        self,
        places: list[int],
        steps: range = range(0),
        *,
        on_disk: range = range(0),
        elements: int = 500,
        then: Callable[[SyncCheckpointEngine, int], Any] = lambda engine, rank: None,
        meanwhile: Callable[[list[int]], None] | None = None,
        restore: bool = True,
    ) -> list[Any]:
        """Restore, save steps in memory, wait until the last one is on other hosts, and die; ``places``: of each rank.

        Returns what each rank restored, or what ``then`` returned.
        """

        def work(group: Group) -> Any:
            host = places[group.rank]
            folder = self.disk(host) / "run"
            engine = SyncCheckpointEngine(
                folder, group=group, memory=self.tier(host), save_last=False, keep_last=2
            ).open()
            state = state_of(group.rank, -1, elements)
            restored = engine.restore(state, private="modulo") if restore else None
            found = (-1, "none") if restored is None else (restored.step, restored.source)
            if restored is not None:
                assert torch.equal(state["tensor"], state_of(state["rank"], restored.step, elements)["tensor"])
            for number in steps:
                where = "disk" if number in on_disk else "memory"
                pending = engine.checkpoint(state_of(group.rank, number, elements), step=number, tier=where)  # type: ignore[arg-type]
                pending.wait_reached("memory", 20)
                if where == "disk":
                    pending.result(20)
                if number == steps[-1]:
                    pending.wait_reached("replicas", 20)
            answer = then(engine, group.rank)
            (marks / str(group.rank)).touch()
            wait_for(*(marks / str(rank) for rank in range(len(places))))
            return found if answer is None else answer  # and the process ends without closing it

        with TemporaryDirectory() as name:
            marks = Path(name)
            if meanwhile is not None:  # which kills them
                statuses: list[int] = []
                run_ranks(len(places), work, meanwhile=meanwhile, statuses=statuses)
                return statuses
            return run_ranks(len(places), work)


@pytest.fixture
def hosts(tmp_path: Path, shared_memory: Path) -> Callable[..., Hosts]:
    return partial(Hosts, tmp_path, shared_memory)


def state_of(rank: int, step: int, elements: int = 500) -> dict[str, Any]:
    return {"tensor": torch.arange(elements) + 1000 * step + rank, "step": step, "rank": rank}


@SIZES
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_is_lost_with_its_memory_and_its_disk(hosts: Callable[..., Hosts], elements: int, lost: int) -> None:
    both = hosts()
    assert both.run([0, 1], range(3), elements=elements) == [(-1, "none")] * 2
    both.lose([lost])
    expected = [(2, "memory")] * 2
    expected[lost] = (2, "replicas")
    assert both.run([0, 1], elements=elements) == expected
    assert both.run([0, 1], range(3, 5), elements=elements) == expected
    both.lose([1 - lost])
    assert both.run([0, 1], elements=elements) == [(4, "replicas" if rank == 1 - lost else "memory") for rank in (0, 1)]


@pytest.mark.parametrize("lost", [0, 1])
def test_hosts_with_one_disk(hosts: Callable[..., Hosts], lost: int) -> None:
    """What only memory has is found in that of the other host, and the disk is no newer than it was."""
    both = hosts()
    both.disk = lambda host: both.disks / "shared"  # type: ignore[method-assign]
    both.run([0, 1], range(4), on_disk=range(1, 2))
    shutil.rmtree(both.memory / f"{lost}")
    expected = [(3, "replicas" if rank == lost else "memory") for rank in (0, 1)]
    assert both.run([0, 1]) == expected
    assert both.run([0, 1], range(4, 7), on_disk=range(5, 7)) == expected
    shutil.rmtree(both.memory / f"{lost}")
    assert both.run([0, 1]) == [(6, "disk" if rank == lost else "memory") for rank in (0, 1)]  # nearer than a copy
    for host in (0, 1):
        shutil.rmtree(both.memory / f"{host}", ignore_errors=True)
    assert both.run([0, 1]) == [(6, "disk")] * 2


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_kind_of_tensor_comes_back_from_a_copy(hosts: Callable[..., Hosts]) -> None:
    both = hosts()

    def kinds(rank: int, fill: int) -> dict[str, Any]:
        bits = (torch.arange(64 * 16, dtype=torch.uint8) % 2 + rank) * fill % 2  # bytes of 0 and 1: good for booleans
        state: dict[str, Any] = {str(dtype): bits[: 64 * dtype.itemsize].view(dtype) for dtype in TORCH_DTYPES}
        fp8 = (bits * 9).view(torch.float8_e4m3fn)
        state["scaled"] = {"codes": fp8, "scales": torch.full((4,), fill / 7)}
        state["wrapped"] = scaled(bits.view(torch.int8) * 5)
        state["numpy"] = {kind: np.full(5, fill).astype(kind) for kind in ("<i4", ">f8", "f2", "c8")}
        return state

    def save(engine: SyncCheckpointEngine, rank: int) -> None:
        engine.checkpoint(kinds(rank, 1), step=7, tier="memory").wait_reached("replicas", 20)

    def check(engine: SyncCheckpointEngine, rank: int) -> list[str]:
        state, wanted = kinds(rank, 0), kinds(rank, 1)
        restored = engine.restore(state, private="modulo")
        assert restored is not None
        one, other = ((each.pop("wrapped").codes, each) for each in (state, wanted))
        return [restored.source, difference(one, other)]

    both.run([0, 1], then=save, restore=False)
    both.lose([1])
    assert both.run([0, 1], then=check, restore=False) == [["memory", ""], ["replicas", ""]]


# -- rounds that fail


def faults(both: Hosts, spoil: Callable[[SyncCheckpointEngine, int], Any], why: str) -> None:
    """Spoil one round; training, memory and the disk go on, the floor stays, and a later round ends well."""

    def work(engine: SyncCheckpointEngine, rank: int) -> None:
        def save(step: int, tier: Any = "memory") -> PendingCheckpoint:
            pending = engine.checkpoint(state_of(rank, step), step=step, tier=tier)
            pending.wait_reached("memory", 20)
            return pending

        repair = spoil(engine, rank)
        pending = save(3)
        with pytest.raises(CheckpointError, match=why):
            pending.wait_reached("replicas", 20)
        statistics = engine.statistics()
        assert re.search(f"since step 3: {why}", statistics.replicas_degraded), statistics.replicas_degraded
        assert statistics.in_replicas == 3
        assert save(4, "disk").result(20).step == 4
        if repair is not None:
            time.sleep(0.5)  # the round about step 4 fails, too
            assert "since step 3: " in engine.statistics().replicas_degraded
            repair()
            save(5).wait_reached("replicas", 20)
            assert engine.statistics().replicas_degraded == ""

    both.run([0, 1], range(3), then=work)


def replicas_of(engine: SyncCheckpointEngine) -> Replicas:
    replicas = probe(engine).core.peers._memory.driver.replicas  # type: ignore[attr-defined]
    assert isinstance(replicas, Replicas)
    return replicas


def lost_then(both: Hosts, host: int, step: int) -> None:
    both.lose([host])
    found = both.run([0, 1])
    assert ([each for each, _ in found], found[host][1]) == ([step] * 2, "replicas")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_is_full(hosts: Callable[..., Hosts], victim: int) -> None:
    def fill(engine: SyncCheckpointEngine, rank: int) -> Any:
        if rank != victim:
            return lambda: None
        memory, check = memory_of(engine), Memory.check_room

        def full(self: Memory, store: Store, nbytes: int) -> None:
            if store is not memory.store:
                raise StoreFullError(errno.ENOSPC, "no space left", "copies")
            check(self, store, nbytes)

        replicas = replicas_of(engine)
        probe(engine).core.loop.call(replicas.apply())  # what the last round has left, which may be under way
        (held,) = replicas._held.values()
        for slot in held.store.slots.table.free():  # so that one has to be made
            probe(engine).core.loop.call(held.store.slots._remove_slot(slot))
        Memory.check_room = full  # type: ignore[method-assign]
        return partial(setattr, Memory, "check_room", check)

    both = hosts()
    faults(both, fill, f"rank {1 - victim}: rank {victim} on .*no space left")
    lost_then(both, victim, 5)


def test_a_peer_that_is_too_slow(hosts: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "_PATIENCE_SECONDS", 1.0)

    def slow(engine: SyncCheckpointEngine, rank: int) -> Any:
        receive = wire.Channel.receive_into

        async def sleeps(self: wire.Channel, into: memoryview) -> None:
            await asyncio.sleep(5)

        if rank == 1:
            wire.Channel.receive_into = sleeps  # type: ignore[method-assign]

        def repair() -> None:
            time.sleep(2)
            wire.Channel.receive_into = receive  # type: ignore[method-assign]

        return repair

    both = hosts()
    faults(both, slow, r"rank 0: rank 1 on .*(within 1 s|too slow)")
    lost_then(both, 1, 5)


@pytest.mark.parametrize("spoils", ["frame", "manifest", "chunk"])
def test_bytes_that_change_on_their_way_are_found(hosts: Callable[..., Hosts], spoils: str) -> None:
    """Under the checksum of a frame, and above it: then those of the manifest find it, before a record names it."""

    def spoil(engine: SyncCheckpointEngine, rank: int) -> Any:
        send = wire.Channel.send

        async def flips(self: wire.Channel, kind: wire.Kind, body: bytes | memoryview = b"") -> None:
            if kind == wire.Kind.DATA and (spoils == "frame" or (len(body) == 4096) == (spoils == "chunk")):
                spoilt = bytearray(body)
                spoilt[17] ^= 4
                if spoils == "frame":
                    head = wire._HEAD.pack(kind, len(body))
                    await self.write(head + crc32(body, crc32(head)).to_bytes(4, "little"))
                    await self.write(memoryview(spoilt))
                else:
                    await send(self, kind, memoryview(spoilt))
            else:
                await send(self, kind, body)

        if rank == 0:
            wire.Channel.send = flips  # type: ignore[method-assign]
        return partial(setattr, wire.Channel, "send", send)

    both = hosts()
    why = {"frame": "damaged on its way", "manifest": "manifest .*is damaged", "chunk": "checksum mismatch"}[spoils]
    faults(both, spoil, f"rank 0: rank 1 on .*{why}")
    lost_then(both, 0, 5)


def test_a_peer_with_another_token(hosts: Callable[..., Hosts]) -> None:
    def other(engine: SyncCheckpointEngine, rank: int) -> Any:
        listener = replicas_of(engine)._listener
        token = listener._token
        if rank == 1:
            listener._token = b"x" * 32
        return partial(setattr, listener, "_token", token)

    both = hosts()
    faults(both, other, "rank 0: rank 1 on .*has not the token of this run")
    lost_then(both, 0, 5)


def test_a_dead_port_and_strangers_cost_copies_alone(hosts: Callable[..., Hosts]) -> None:
    def close(engine: SyncCheckpointEngine, rank: int) -> Any:
        listener = replicas_of(engine)._listener
        for number in range(100):
            with socket.create_connection(listener.address) as stranger:
                stranger.sendall(os.urandom(number))
        if rank == 1:
            probe(engine).core.loop.call(listener.close())
        return None

    both = hosts()
    faults(both, close, "rank 0: rank 1 on .*refused")
    both.lose([0])
    assert both.run([0, 1])[0] == (2, "replicas")  # step 4 is on the lost disk alone


def test_strange_offers_of_one_that_has_the_token(hosts: Callable[..., Hosts]) -> None:
    """Each is refused with an error, and the next round ends well."""

    def offer(engine: SyncCheckpointEngine, rank: int) -> None:
        if rank == 0:
            probe(engine).core.loop.call(_offer_strangely(replicas_of(engine)))
        pending = engine.checkpoint(state_of(rank, 3), step=3, tier="memory")
        pending.wait_reached("memory", 20)
        pending.wait_reached("replicas", 20)

    both = hosts()
    both.run([0, 1], range(3), then=offer)
    lost_then(both, 0, 3)


async def _offer_strangely(replicas: Replicas) -> None:
    member, chance = replicas._member, random.Random(3)
    part, address = next(iter(member.parts.values())), member.roster.addresses[1]
    assert address is not None
    running = wire_offer(0, part, 0.3)
    for number in range(60):
        entry = msgspec.structs.replace(
            part.entry, **{chance.choice(["nbytes", "manifest_offset", "manifest_nbytes", "counter"]):
                           chance.choice([-1, 0, 1, 4097, 1 << 40, 1 << 62])},
        )  # fmt: skip
        ended = msgspec.structs.replace(
            running, part=msgspec.structs.replace(part, entry=entry), round=chance.randrange(3)
        )
        data = chance.randbytes(number) if number % 3 == 0 else msgspec.msgpack.encode(ended)
        channel = await wire.connect(address, member.roster.token, number % 4, 1)
        await channel.send(wire.Kind.OFFER, data)
        with pytest.raises(CheckpointError):
            await channel.receive(wire.Kind.READY)
        channel.close()


# -- while ranks die


@pytest.mark.parametrize("seed", range(6))
def test_what_was_copied_is_there_whenever_all_die(hosts: Callable[..., Hosts], tmp_path: Path, seed: int) -> None:
    chance, both = random.Random(seed), hosts()
    promised = tmp_path / "promised"
    promised.mkdir()

    def train(engine: SyncCheckpointEngine, rank: int) -> None:
        for step in range(1000):
            pending = engine.checkpoint(state_of(rank, step, 300_000), step=step, tier="memory")
            pending.wait_reached("memory", 20)
            if step % 3 == 0:
                pending.wait_reached("replicas", 20)
                (promised / str(step)).touch()

    def kill(pids: list[int]) -> None:
        wait_for(promised / "3")
        time.sleep(chance.random())
        for pid in chance.sample(pids, 2):
            os.kill(pid, signal.SIGKILL)

    both.run([0, 1], elements=300_000, then=train, meanwhile=kill)
    copied = max(int(mark.name) for mark in promised.iterdir())
    lost = chance.randrange(2)
    both.lose([lost])
    found = both.run([0, 1], elements=300_000)
    assert [source for _, source in found] == ["replicas" if rank == lost else "memory" for rank in (0, 1)]
    assert found[0][0] == found[1][0] >= copied


@pytest.mark.parametrize(
    "delay", [0.05, 0.5, *(pytest.param(each, marks=pytest.mark.campaign) for each in (0.0, 0.2, 0.9))]
)
def test_all_die_in_the_middle_of_a_round_and_one_host_is_lost(hosts: Callable[..., Hosts], delay: float) -> None:
    both = hosts(rate_limit=4_000_000)

    def die(engine: SyncCheckpointEngine, rank: int) -> None:
        engine.checkpoint(state_of(rank, 3, 300_000), step=3, tier="memory").wait_reached("memory", 20)
        time.sleep(delay)

    both.run([0, 1], range(3), elements=300_000, then=die)
    both.lose([1])
    found = both.run([0, 1], elements=300_000)
    assert [source for _, source in found] == ["memory", "replicas"]
    assert [step for step, _ in found] in ([2, 2], [3, 3])


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("places", "replicas"), [([0, 1], 1), ([0, 0, 1, 2], 1), ([0, 1, 2], 2)])
def test_soak(hosts: Callable[..., Hosts], tmp_path: Path, places: list[int], replicas: int) -> None:
    """Many lives of one job: all die at any moment, and up to so many hosts are lost, before each restart."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance, them, promised, lost = random.Random(seed), hosts(replicas=replicas), -1, list[int]()
    tested = 0  # lives that went on from copies
    for life in range(25):
        marks = tmp_path / f"life-{life}"
        marks.mkdir()

        def train(engine: SyncCheckpointEngine, rank: int, marks: Path = marks, least: int = promised) -> None:
            first = max([info.step for info in engine.checkpoints()], default=-1) + 1
            assert first - 1 >= least, (first, least)
            for step in range(first, first + 1000):
                pending = engine.checkpoint(state_of(rank, step, 300_000), step=step, tier="memory")
                pending.wait_reached("memory", 20)
                if step % 3 == 0:
                    pending.wait_reached("replicas", 20)
                    (marks / str(step)).touch()

        def kill(pids: list[int]) -> None:
            time.sleep(1.0 + 2 * chance.random())
            for pid in chance.sample(pids, len(pids)):
                os.kill(pid, signal.SIGKILL)

        statuses = them.run(places, elements=300_000, then=train, meanwhile=kill)
        assert not [status for status in statuses if status != -signal.SIGKILL], (seed, life, statuses)
        copied = max((int(mark.name) for mark in marks.iterdir()), default=-1)
        promised = max(copied, -1 if lost else promised)  # after a loss, copies are there only once they are made anew
        lost = chance.sample(sorted({*places}), chance.choice([0, 1, replicas]))
        tested += bool(lost) and promised >= 0
        them.lose(lost)
    found = them.run(places, elements=300_000)
    assert min(step for step, _ in found) >= promised, (seed, promised, found)
    assert tested >= 5


# -- what copies follow


@pytest.mark.parametrize("verb", ["remove", "reject"])
def test_copies_follow_what_is_removed(hosts: Callable[..., Hosts], verb: str) -> None:
    both = hosts()

    def drop(engine: SyncCheckpointEngine, rank: int) -> None:
        engine.checkpoint(state_of(rank, 3), step=3).result(20)
        pending = engine.checkpoint(state_of(rank, 4), step=4)
        pending.result(20)
        pending.wait_reached("replicas", 20)
        getattr(engine, verb)(step=4)

    both.run([0, 1], range(3), on_disk=range(2, 3), then=drop)
    for host in (0, 1):  # the newest record of a copy names nothing that is gone
        assert [info.step for info in list_memory(str(both.memory / f"{host}"))[0].infos] in ([], [3])
    assert [step for step, _ in both.run([0, 1])] == [3, 3]


def test_leaving_takes_copies_away(hosts: Callable[..., Hosts]) -> None:
    both = hosts()
    both.run([0, 1], range(3), then=lambda engine, rank: engine.close())
    assert [[*(both.memory / f"{host}").iterdir()] for host in (0, 1)] == [[], []]
    assert both.run([0, 1]) == [(2, "disk")] * 2


# -- hosts and ranks


def test_fewer_hosts_than_copies_are_said(hosts: Callable[..., Hosts]) -> None:
    alone = hosts(replicas=2)

    def look(engine: SyncCheckpointEngine, rank: int) -> str:
        pending = engine.checkpoint(state_of(rank, 0), step=0, tier="memory")
        pending.wait_reached("memory", 20)
        with pytest.raises(CheckpointError, match="needs 3 hosts, and here are 1"):
            pending.wait_reached("replicas", 20)
        return engine.statistics().replicas_degraded

    assert alone.run([0, 0], then=look) == ["replicas=2 needs 3 hosts, and here are 1"] * 2
    assert alone.run([0, 1], range(1, 3)) == [(0, "memory"), (0, "replicas")]
    alone.lose([1])
    assert alone.run([0, 1]) == [(2, "memory"), (2, "replicas")]


def test_an_interface_that_is_not_there_ends_the_opening_of_all(hosts: Callable[..., Hosts]) -> None:
    both = hosts()
    tier = both.tier
    both.tier = lambda host: replace(tier(host), interface="strange0" if host else None)  # type: ignore[method-assign]
    with pytest.raises(RankFailedError) as caught:
        both.run([0, 1])
    assert str(caught.value).count("no such interface has an IPv4 address (No such device); there are lo") >= 2


def test_an_interface_by_its_name(hosts: Callable[..., Hosts]) -> None:
    both = hosts(interface="lo")
    both.run([0, 1], range(2), then=lambda engine, _: print(replicas_of(engine)._listener.address))
    lost_then(both, 0, 1)


def test_a_rank_that_leaves_ends_the_waiting_of_others(hosts: Callable[..., Hosts]) -> None:
    both = hosts(rate_limit=100_000)

    def leave(engine: SyncCheckpointEngine, rank: int) -> None:
        pending = engine.checkpoint(state_of(rank, 3, 300_000), step=3, tier="memory")
        pending.wait_reached("memory", 20)
        if rank == 0:
            with pytest.raises(CheckpointError, match="rank 1 left before"):
                pending.wait_reached("replicas", 20)
            assert engine.statistics().replicas_degraded == ""
        engine.close()

    both.run([0, 1], then=leave)
    assert both.run([0, 1], elements=300_000) == [(3, "disk")] * 2


def test_hosts_that_are_none_are_said(hosts: Callable[..., Hosts]) -> None:
    """Both ranks of these tests run on one machine, and only their folders are those of two."""
    said = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pccheck_async").addHandler(handler)
    try:
        found = hosts().run([0, 1], then=lambda engine, rank: [text for text in said if "on its own host" in text])
    finally:
        logging.getLogger("pccheck_async").removeHandler(handler)
    assert [len(each) for each in found] == [1, 0]


def test_one_process_has_no_other_host(tmp_path: Path, shared_memory: Path) -> None:
    with pytest.raises(ValueError, match="is for groups"):
        SyncCheckpointEngine(tmp_path, memory=MemoryTier(path=str(shared_memory), replicas=1)).open()


def test_a_rank_that_comes_back_where_its_copy_is_goes_on_from_it(hosts: Callable[..., Hosts]) -> None:
    both = hosts()
    both.run([0, 1], range(3))
    swapped = both.run([1, 0])
    assert swapped == [(2, "memory")] * 2
    assert both.run([1, 0], range(3, 5)) == [(2, "memory")] * 2
    both.lose([0])
    assert both.run([1, 0]) == [(4, "memory"), (4, "replicas")]


# -- damage


def spoil(slots: Iterable[Path]) -> None:
    for slot in slots:
        data = bytearray(slot.read_bytes())
        for at in range(100, len(data), 64):
            data[at] ^= 1
        slot.write_bytes(bytes(data))


@SIZES
def test_damage_of_the_own_part_is_made_good_by_a_copy(hosts: Callable[..., Hosts], elements: int) -> None:
    both = hosts()
    both.run([0, 1], range(3), elements=elements)
    spoil(both.part(1, 1).glob("slot-*"))
    assert both.run([0, 1], elements=elements) == [(2, "memory"), (2, "replicas")]
    assert both.run([0, 1], range(3, 5), elements=elements) == [(2, "memory"), (2, "replicas")]
    assert both.run([0, 1], elements=elements) == [(4, "memory")] * 2


def test_damage_of_one_copy_is_made_good_by_another(hosts: Callable[..., Hosts]) -> None:
    three = hosts(replicas=2)
    three.run([0, 1, 2], range(3))
    three.lose([0])
    spoil(three.part(1, 0).glob("slot-*"))
    assert three.run([0, 1, 2]) == [(2, "replicas"), (2, "memory"), (2, "memory")]
    three.lose([0])
    spoil(three.part(2, 0).glob("slot-*"))
    with pytest.raises(RankFailedError, match=r"DamagedError: rank 0"):  # on all ranks, and nothing is restored
        three.run([0, 1, 2])


def test_a_restore_within_the_run_reads_the_copy(hosts: Callable[..., Hosts]) -> None:
    both = hosts()

    def damage(engine: SyncCheckpointEngine, rank: int) -> tuple[int, str]:
        if rank == 0:
            spoil(both.part(0, 0).glob("slot-*"))
        state = state_of(rank, -1)
        restored = engine.restore(state)
        assert restored is not None
        assert torch.equal(state["tensor"], state_of(rank, 2)["tensor"])
        return restored.step, restored.source

    assert both.run([0, 1], range(3), then=damage) == [(2, "replicas"), (2, "memory")]


@pytest.mark.parametrize("where", ["record", "identity", "manifest", "chunk"])
def test_every_class_of_bits_in_a_copy(hosts: Callable[..., Hosts], where: str) -> None:
    """With the other host lost: what is damaged is found, and nothing is restored with other bytes."""
    both = hosts()
    both.run([0, 1], range(3))
    shutil.copytree(both.memory / "1", whole := both.disks / "whole")
    for bit in range(0, 8, 3):
        both.lose([0])
        shutil.rmtree(both.memory / "1")
        shutil.copytree(whole, both.memory / "1")
        (folder,) = (both.memory / "1").glob("*/rank-00000")
        name, places = {
            "record": ("commit", range(40, 1 << 18, 4096)),
            "identity": ("store.json", range(40, 50)),
            "manifest": ("slot-*", range(4096 + 20, 4096 + 21)),
            "chunk": ("slot-*", range(2000, 2001)),
        }[where]
        for file in folder.glob(name):
            data = bytearray(file.read_bytes())
            for at in places:
                data[at] ^= 1 << bit
            file.write_bytes(bytes(data))
        if where in ("record", "identity"):
            assert both.run([0, 1]) == [(-1, "none")] * 2  # there is no such copy
        else:
            with pytest.raises(RankFailedError, match="DamagedError: rank 0"):
                both.run([0, 1])
    both.lose([0])
    shutil.rmtree(both.memory / "1")
    shutil.copytree(whole, both.memory / "1")
    assert both.run([0, 1]) == [(2, "replicas"), (2, "memory")]


# -- every subset of hosts


@pytest.mark.parametrize("worlds", [([0, 1], [0]), ([0, 1], [0, 2]), ([0, 0, 1, 2], [0, 0, 3, 2])])
def test_a_job_goes_on_with_other_hosts_and_ranks(hosts: Callable[..., Hosts], worlds: tuple[list[int], ...]) -> None:
    """Host 1 is lost; a tensor that all ranks had shards of is whole, also on one that has all parts in its memory."""
    them = hosts()

    def work(places: list[int], step: int, group: Group) -> int:
        world, rank = len(places), group.rank
        first, end = 1000 * rank // world, 1000 * (rank + 1) // world
        shard = FlatShard(torch.zeros(end - first), [1000], first)
        folder = them.disks / f"{places[rank]}" / "run"
        engine = SyncCheckpointEngine(folder, group=group, memory=them.tier(places[rank]), save_last=False).open()
        restored = engine.restore({"shard": shard})
        found = -1 if restored is None else restored.step
        if restored is not None:
            assert torch.equal(shard.local, torch.arange(float(first), float(end)) + restored.step)
        shard.local.copy_(torch.arange(float(first), float(end)) + step)
        pending = engine.checkpoint({"shard": shard}, step=step, tier="memory")
        pending.wait_reached("memory", 20)
        if len({*places}) > 1:
            pending.wait_reached("replicas", 20)
        (marks / f"{step}-{rank}").touch()
        wait_for(*(marks / f"{step}-{each}" for each in range(world)))
        return found

    marks = them.disks / "marks"
    marks.mkdir()
    before, after = worlds
    assert run_ranks(len(before), partial(work, before, 3)) == [-1] * len(before)
    them.lose([1])
    assert run_ranks(len(after), partial(work, after, 4)) == [3] * len(after)
    assert run_ranks(len(after), partial(work, after, 5)) == [4] * len(after)
    if len(after) > 1:
        them.lose([2])
        others = [4 if host == 2 else host for host in after]
        assert run_ranks(len(after), partial(work, others, 6)) == [5] * len(after)


@pytest.mark.parametrize(
    ("places", "replicas"),
    [
        pytest.param([0, 1, 2, 3], 2, id="four hosts, two copies"),
        pytest.param([0, 0, 1, 2], 1, id="three hosts, one copy", marks=pytest.mark.campaign),
        pytest.param([0, 1, 2, 3], 1, id="four hosts, one copy", marks=pytest.mark.campaign),
        pytest.param([0, 0, 1, 2], 2, id="three hosts, two copies", marks=pytest.mark.campaign),
    ],
)
def test_what_survives_is_what_the_placement_says(
    tmp_path: Path, shared_memory: Path, replicas: int, places: list[int]
) -> None:
    """Every subset of hosts that is lost, with memory and disk; the others stay as they were."""
    them, count = Hosts(tmp_path, shared_memory, replicas=replicas), len({*places})
    them.run(places, range(2))
    peers = peer_hosts(count, replicas)
    kept = {host: both for host in range(count) if (both := (tmp_path / f"k{host}", tmp_path / f"m{host}"))}
    for host, (disk, memory) in kept.items():
        (tmp_path / f"{host}").rename(disk)
        shutil.copytree(shared_memory / f"{host}", memory)
    for lost in chain.from_iterable(combinations(range(count), each) for each in range(1, count + 1)):
        for host, (disk, memory) in kept.items():
            shutil.rmtree(shared_memory / f"{host}", ignore_errors=True)
            shutil.rmtree(tmp_path / f"{host}", ignore_errors=True)
            if host not in lost:
                disk.rename(tmp_path / f"{host}")  # its inodes name the folder in memory
                shutil.copytree(memory, shared_memory / f"{host}")
        found = them.run(places)
        survives = all(host not in lost or not {*peers[host]} <= {*lost} for host in range(count))
        assert {step for step, _ in found} == {1 if survives else -1}, (lost, found)
        if survives:
            assert [source for _, source in found] == ["replicas" if host in lost else "memory" for host in places]
        for host, (disk, _) in kept.items():
            if host not in lost:
                (tmp_path / f"{host}").rename(disk)
