"""The crash exploration finds what it is there to find: each test plants a mistake, and violations must turn up."""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from pccheck_async import Keep
from pccheck_async.errors import CorruptStoreError
from pccheck_async.format import Entry, Identity, Line, Record, checksum
from pccheck_async.format import record as layout
from pccheck_async.format.manifest import decode
from pccheck_async.format.record import slot_number
from pccheck_async.medium import File, Medium, Part
from pccheck_async.store import Retention, Store, Written, store, store_reader
from pccheck_async.store.commit_file import read_record
from pccheck_async.store.retention import Committed, Kept
from pccheck_async.testing import DiskSnapshot, WrappingWriter
from pccheck_async.transfer.operations import Operations
from tests.support.crash_harness import BLOCK, Findings, Scenario, explore, explore_damage, explore_falling_back

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_asked_once")]

SCENARIO = Scenario(2, 1, bursts=2, deaths=1, images=6, subsets=3, trouble=0.0, enough=1, sampled=0.1)
SEEDS = 12
"""Runs of a scenario before a planted mistake counts as not found; most are found in the first."""


def found(scenario: Scenario = SCENARIO) -> Findings:
    """Explore until something is found."""
    for seed in range(SEEDS):
        findings = explore(dataclasses.replace(scenario, seed=seed))
        if findings.violations:
            print(f"\n  seed {seed}: {findings.violations[0]}")
            return findings
    pytest.fail(f"{SEEDS} explorations found nothing")


class SlowRecords(WrappingWriter):
    """Lets flushes of records take so long that the next checkpoint is written meanwhile."""

    async def flush(self, file: File) -> None:
        if file.name == layout.COMMIT_NAME:
            for _ in range(500):
                await asyncio.sleep(0)
        await super().flush(file)


def test_nothing_is_found_where_nothing_is_planted() -> None:
    assert not explore(dataclasses.replace(SCENARIO, bursts=1, images=6, wrap=SlowRecords)).violations


KEEPING = dataclasses.replace(SCENARIO, bursts=6, deaths=2, images=6, pins=1.0, sampled=0.0, rules={"every": 3})


@pytest.mark.parametrize("kind", ["pins", "multiples", "best"])
def test_a_rule_that_is_forgotten(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(retention: Retention, committed: Sequence[Entry], new: Entry, damaged: Any = ()) -> Kept:
        changes: dict[str, Any] = {"keep": Keep()} if kind in ("multiples", "best") else {}
        entries = [*committed, new]
        if kind == "pins":
            entries = [structs.replace(entry, pinned=False) for entry in entries]
        return retain(dataclasses.replace(retention, **changes), entries[:-1], entries[-1], damaged)

    retain = Retention.retain
    monkeypatch.setattr(Retention, "retain", forgetful)
    rules = {"best": ("loss", 1, "min")} if kind == "best" else KEEPING.rules
    word = {"pins": "pinned", "multiples": "multiples", "best": "best"}[kind]
    assert word in found(dataclasses.replace(KEEPING, rules=rules)).violations[0]


def test_slot_freed_before_the_record_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def free_first(self: Store, record: Record, data: Sequence[Part] = ()) -> None:
        self.slots.table.note_committed((entry.slot for entry in record.entries), ())
        await write_record(self, record, data)

    write_record = Store.write_record
    monkeypatch.setattr(Store, "write_record", free_first)
    found(dataclasses.replace(SCENARIO, bursts=4, deaths=0, images=4, subsets=2, wrap=SlowRecords))


def test_an_older_checkpoint_takes_the_place_of_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit_anything(self: Committed, entry: Entry) -> Record:
        return self.record_naming([entry])

    monkeypatch.setattr(Committed, "decide", commit_anything)
    found(dataclasses.replace(SCENARIO, max_in_flight=4, bursts=3))


class RecordFirst(WrappingWriter):
    """Flushes the payload only after the record that names it."""

    def __init__(self, inner: Medium) -> None:
        super().__init__(inner)
        self._late: list[File] = []

    async def make_durable(self, parts: Sequence[Part], *, ignore_cancellation: bool = False) -> None:
        for file, pieces in parts:
            if file.name.startswith("slot-"):
                for offset, data in pieces:
                    await self.write(file, offset, data)
                self._late.append(file)
            else:
                await super().make_durable([(file, pieces)], ignore_cancellation=ignore_cancellation)
                while self._late:
                    await self.flush(self._late.pop())


def test_record_written_before_the_payload_is_flushed() -> None:
    found(dataclasses.replace(SCENARIO, wrap=RecordFirst))


class FlushFirst(WrappingWriter):
    """Flushes what is persisted before it is written."""

    chains = True

    def __init__(self, inner: Medium, name: str) -> None:
        super().__init__(inner)
        self._name = name

    async def make_durable(self, parts: Sequence[Part], *, ignore_cancellation: bool = False) -> None:
        for number, (file, pieces) in enumerate(parts, 1):
            if file.name.startswith(self._name):
                await self.flush(file)
                for offset, data in pieces:
                    await self.write(file, offset, data)
            else:
                await super().make_durable([(file, pieces)], ignore_cancellation=ignore_cancellation)
            if number < len(parts):
                await self.unlock(file)


@pytest.mark.parametrize("name", ["slot-", layout.COMMIT_NAME])
def test_what_is_persisted_is_flushed_before_it_is_written(name: str) -> None:
    """Of small checkpoints all goes through there: they are explored with states of one chunk only."""
    found(dataclasses.replace(SCENARIO, chunk_blocks=16, buffers=4, wrap=lambda writer: FlushFirst(writer, name)))


class FlushOneBlockShort(WrappingWriter):
    """Writes the last block of a slot only after the flush that should have covered it."""

    def __init__(self, inner: Medium) -> None:
        super().__init__(inner)
        self._last: dict[File, tuple[int, bytes]] = {}

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        if not file.name.startswith("slot-"):
            await super().write(file, offset, data)
            return
        start = len(data) - BLOCK
        if start:
            await super().write(file, offset, data[:start])
        kept_back = self._last.get(file)
        this = offset + start, bytes(data[start:])
        self._last[file] = max(this, kept_back or this)
        if kept_back is not None:
            await self._write_block(file, *min(this, kept_back))

    async def flush(self, file: File) -> None:
        await super().flush(file)
        if file in self._last:
            await self._write_block(file, *self._last.pop(file))

    async def _write_block(self, file: File, offset: int, data: bytes) -> None:
        await super().write(file, offset, memoryview(data))


def test_payload_flush_one_block_short() -> None:
    found(dataclasses.replace(SCENARIO, wrap=FlushOneBlockShort))


async def largest_counter_found(writer: Medium, commit: File, identity: Identity, path: str) -> Record:
    """Recover naively: the slot with the largest counter wins, whatever the record says."""
    record = await read_record(writer, commit, identity, path)
    entries = [entry for name in await writer.names() if (entry := await entry_in(writer, name)) is not None]
    newest = sorted((*entries, *record.entries), key=lambda entry: entry.counter)[-1:]
    return Record(record.generation, tuple(newest))


async def entry_in(writer: Medium, name: str) -> Entry | None:
    """Return an entry for the first manifest that a slot holds."""
    number = slot_number(name)
    if number is None:
        return None
    file = await writer.open(name, writable=False)
    content = memoryview(bytearray(file.nbytes // BLOCK * BLOCK))
    await writer.read(file, 0, content)
    await writer.close(file)
    for offset in range(0, len(content), BLOCK):
        data = bytes(content[offset:]).split(bytes(64))[0]
        for padding in range(4):
            try:
                manifest = decode(data + bytes(padding))
            except CorruptStoreError:
                continue
            return Entry(
                counter=manifest.counter,
                step=manifest.step,
                time=manifest.time,
                nbytes=manifest.payload_nbytes,
                slot=number,
                manifest_offset=offset,
                manifest_nbytes=len(data) + padding,
                manifest_checksum=checksum.crc32(data + bytes(padding)),
                pinned=False,
                metadata=dict(manifest.metadata),
            )
    return None


def test_recovery_by_largest_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (store, store_reader):
        monkeypatch.setattr(module, "read_record", largest_counter_found)
    found(dataclasses.replace(SCENARIO, sampled=1.0))  # only who reads the whole folder makes this mistake


class Agreeable(int):
    """A checksum that equals whatever it is compared with."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def test_record_checksum_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unverified:
        NAME = checksum.NAME

        @staticmethod
        def crc32(data: bytes, value: int = 0) -> int:
            return Agreeable(checksum.crc32(data, value))

    monkeypatch.setattr(layout, "checksum", Unverified)
    found()


def test_payload_checksum_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = Operations.scatter

    async def believe(self: Operations, source: memoryview, value: int, segments: bytes, keepalive: Any = None) -> None:
        await scatter(self, source, zlib.crc32(source), segments, keepalive)

    monkeypatch.setattr(Operations, "scatter", believe)
    assert any(explore_damage(1, images=100, seed=seed).violations for seed in range(SEEDS))


class NoFolderSync(WrappingWriter):
    """Leaves names volatile."""

    async def sync_names(self) -> None:
        """Do nothing."""


def test_directory_entry_not_synced() -> None:
    found(dataclasses.replace(SCENARIO, wrap=NoFolderSync))


def test_new_slot_not_synced() -> None:
    class SyncIdentityOnly(WrappingWriter):
        async def sync_names(self) -> None:
            if not any(slot_number(name) is not None for name in await self.names()):
                await super().sync_names()

    found(dataclasses.replace(SCENARIO, wrap=SyncIdentityOnly))


def dying_with_the_record_in_flight(snapshot: DiskSnapshot) -> bool:
    """Choose process deaths after a record was written and before it was flushed."""
    return snapshot.boundary == "flush commit submitted"


def test_first_flush_of_a_new_writer_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trust_the_predecessor(_: Store) -> None:
        pass

    monkeypatch.setattr(Store, "take_over", trust_the_predecessor)
    found(dataclasses.replace(SCENARIO, bursts=1, deaths=8, images=16, dying=dying_with_the_record_in_flight))


def test_what_was_fallen_back_to_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget(_: Store, entry: Entry) -> None:
        pass

    monkeypatch.setattr(Store, "adopt", forget)
    assert any(explore_falling_back(seed, "flush slot").violations for seed in range(SEEDS))


LINED = dataclasses.replace(SCENARIO, deaths=2, images=8)


def begin_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each opening write a line before its first commit, as one with a tier in memory does."""
    commit = Store.commit

    async def with_line(self: Store, written: Written) -> bool:
        if self.committed.line is None:
            await self.begin_line(Line(bytes(16), self.committed.largest_counter))
        return await commit(self, written)

    monkeypatch.setattr(Store, "commit", with_line)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in (1, 2))])
def test_a_line_before_the_first_commit_costs_nothing(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    begin_lines(monkeypatch)
    assert not explore(dataclasses.replace(LINED, seed=seed)).violations
