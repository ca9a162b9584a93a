"""The engine against a model of what is kept: random saves, failures, pins, changes of rules, kills, power failures."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pccheck_async import (
    CheckpointEngine,
    CheckpointInfo,
    Keep,
    NoCheckpointError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load,
    load_sync,
    open_checkpoint,
)
from pccheck_async.engine import capture
from pccheck_async.errors import StoreError, StoreFailedError, StoreFullError, WriteError
from pccheck_async.format import Line, Record
from pccheck_async.format.record import COMMIT_NAME, MOST_ENTRIES, REGION_NBYTES, encode_record, region_offsets
from pccheck_async.medium import File
from pccheck_async.store.commit_file import open_commit, read_record
from pccheck_async.testing import (
    Access,
    CrashDisk,
    CrashWriter,
    DiskSnapshot,
    ImageWriter,
    WrappingWriter,
    power_loss_images,
)
from pccheck_async.testing.power_loss import Change, Written
from pccheck_async.testing.probe import probe
from pccheck_async.transfer import aligned_buffer
from tests.engine.test_failures import flip, save, slot_of, state_of
from tests.engine.test_inline_capture_engine import small, stuck_engine

T = TypeVar("T")
FOLDER = "anywhere"


@dataclass(frozen=True)
class Rules:
    keep_last: int = 1
    every: int | None = None
    best: tuple[str, int, Any] | None = None
    spaced: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class One:
    """A committed checkpoint, as the model knows it."""

    counter: int
    step: int
    loss: float | None
    pinned: bool = False
    time: float = 0.0
    rejected: bool = False


class Clock:
    """The time module with a time of its own."""

    now = 1_700_000_000.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        return self.now


def expected(ones: list[One], rules: Rules) -> list[One]:
    """What the rules say, in words of their own: newest first."""
    there = sorted(ones, key=lambda one: -one.counter)
    ones = [one for one in there if not one.rejected]
    kept = [one for one in there if one.rejected and one.pinned]
    for place, one in enumerate(ones):
        periodic = rules.every is not None and _first_of_its_kind(one, ones, rules.every)
        spaced = any(_first_of_its_slice(one, ones, *each) for each in rules.spaced)
        if one.pinned or place < rules.keep_last or periodic or spaced or _among_best(one, ones, rules):
            kept.append(one)
    return sorted(kept, key=lambda one: -one.counter)


def _first_of_its_slice(one: One, ones: list[One], every: int, seconds: int) -> bool:
    beside = [other for other in ones if int(other.time) // every == int(one.time) // every]
    is_recent = one.time >= ones[0].time - seconds
    return is_recent and not any(other.counter < one.counter for other in beside)  # also by one that is too old now


def _first_of_its_kind(one: One, ones: list[One], every: int) -> bool:
    """Whether none is nearer behind the multiple that it follows, nor as near and newer."""
    past = (one.step + 1) % every
    multiple = one.step + 1 - past
    rivals = [other for other in ones if other is not one and multiple <= other.step + 1 <= one.step + 1]
    return multiple > 0 and not any(other.step < one.step or other.counter > one.counter for other in rivals)


def _among_best(one: One, ones: list[One], rules: Rules) -> bool:
    if rules.best is None or one.loss is None or one.loss != one.loss:
        return False
    _, count, mode = rules.best
    better = 0
    for other in ones:
        if other.loss is None or other.loss != other.loss or other is one:
            continue
        ahead = other.loss < one.loss if mode == "min" else other.loss > one.loss
        better += ahead or (other.loss == one.loss and other.counter > one.counter)
    return better < count


def as_ones(infos: list[CheckpointInfo]) -> list[One]:
    return [One(i.counter, i.step, i.metadata.get("loss"), i.pinned, i.time, i.rejected) for i in infos]  # type: ignore[arg-type]


def same(found: list[One], wanted: list[One]) -> bool:
    return repr(found) == repr(wanted)  # NaN equals nothing, but is written the same


class Broken(WrappingWriter):
    """Fails writes into slots while ``broken`` is set."""

    broken = False

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        if self.broken and access.kind == "write" and access.name != COMMIT_NAME:
            raise WriteError(errno.EIO, "broken", access.name)
        return await call()


class Trainer:
    """An engine on a disk of its own, and what it should have kept."""

    def __init__(self, rules: Rules, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.disk = CrashDisk()
        self.rules = rules
        self.kept: list[One] = []
        self.instead: list[list[One]] = []
        """What a power failure may go back to, as long as what a killed process wrote was not flushed by the next."""
        self.durable = False
        """Whether the engine pinned: also that flushes what a dead predecessor left."""
        self.seed = 0
        self.history: list[DiskSnapshot] = []
        self.engine: CheckpointEngine
        self.medium: Broken

    async def open(self) -> None:
        self.seed += 1
        self.medium = Broken(CrashWriter(self.disk, seed=self.seed))
        self.engine = CheckpointEngine(
            FOLDER,
            storage=StorageOptions(io=self.medium, chunk_bytes=4096),
            max_in_flight=3,
            keep_last=self.rules.keep_last,
            keep=Keep(every=self.rules.every, best=self.rules.best, spaced=self.rules.spaced),
            overwrite=True,
        )
        await self.engine.open()
        self.durable = False

    async def save(self, step: int, loss: float | None, later: int = 0) -> Any:
        self.clock.now += later
        metadata = {} if loss is None else {"loss": loss}
        state = {"weights": torch.full((2000,), float(step)), "step": step}
        pending = await self.engine.checkpoint(state, step=step, metadata=metadata)
        self.kept = expected([*self.kept, One(pending.counter, step, loss, time=self.clock.now)], self.rules)
        return pending

    async def pin(self, step: int, pinned: bool) -> None:
        at = next((n for n, one in enumerate(self.kept) if one.step == step), None)
        change = self.engine.pin if pinned else self.engine.unpin
        if at is None:
            with pytest.raises(NoCheckpointError):
                await change(step=step)
            return
        self.kept = [
            replace(one, pinned=pinned) if one.step == step and (number == at or not pinned) else one
            for number, one in enumerate(self.kept)
        ]
        assert (await change(step=step)).pinned == pinned
        self.durable = True

    async def reject(self, step: int) -> None:
        whole = [one for one in self.kept if not one.rejected]
        of_step = [one.counter for one in whole if one.step == step]
        bad = [one for one in whole if one.step >= step or (of_step and one.counter >= max(of_step))]
        if not bad or len(bad) == len(whole):
            with pytest.raises(StoreError) as raised:
                await self.engine.reject(step=step)
            assert isinstance(raised.value, NoCheckpointError) == (not bad)
            return
        self.kept = [replace(one, rejected=True) if one in bad else one for one in self.kept]
        assert same(
            as_ones(await self.engine.reject(step=step)),
            [one for one in self.kept if replace(one, rejected=False) in bad],
        )
        self.durable = True

    async def fail(self, step: int) -> None:
        self.medium.broken = True
        with pytest.raises(WriteError):  # from whichever of the two hears of it
            await (await self.engine.checkpoint({"weights": torch.ones(2000)}, step=step))
        self.medium.broken = False

    async def restart(self, rules: Rules | None) -> None:
        await self.engine.close()
        self.rules = rules or self.rules
        await self.open()

    async def crash(self, doing: Coroutine[Any, Any, Any], when: float, loses_power: bool) -> None:
        """Do something, and go on from what the disk was somewhere in the middle of it."""
        before = list(self.kept)
        self.history = [self.disk.snapshot()]
        self.disk.observer = self.history.append
        found = await doing
        if found is not None:
            await found
        self.disk.observer = None
        await self.engine.close()
        moment = self.history[min(len(self.history) - 1, int(when * len(self.history)))]
        rng = random.Random(self.seed)
        if loses_power:
            images = list(islice(power_loss_images(moment, sector=512), 20))
            self.disk = CrashDisk.from_image(rng.choice(images))
        else:
            self.disk = CrashDisk.after_process_death(moment, rng=rng, lingering=rng.choice([0, 3]))
        await self.open()
        now = as_ones(self.engine.checkpoints())
        possible = [before, self.kept, *(self.instead if loses_power else [])]
        assert any(same(now, one) for one in possible), (possible, now)
        self.instead = [] if loses_power else [*self.instead, before]
        self.kept = now

    async def check(self) -> None:
        await self.engine.drain()
        if self.durable or self.engine.statistics().durable:
            self.instead = []
        assert same(as_ones(self.engine.checkpoints()), self.kept)
        await self.check_restore()

    async def check_restore(self) -> None:
        """What a restart would take is the newest that is not rejected."""
        whole = [one for one in self.kept if not one.rejected]
        state = {"weights": torch.zeros(2000), "step": -1}
        if self.kept and not whole:
            with pytest.raises(StoreError, match="none but rejected"):
                await self.engine.restore(state)
            return
        restored = await self.engine.restore(state)
        assert (restored and restored.counter) == (whole[0].counter if whole else None)

    async def check_slots(self) -> None:
        """As many as are in flight and kept (I10), and one while a killed writer's requests hold theirs."""
        await self.engine.drain()
        ruled = self.rules.keep_last + (self.rules.best[1] if self.rules.best else 0)
        ruled += sum(-(-seconds // every) + 1 for every, seconds in self.rules.spaced)
        assert self.engine.statistics().slots <= 3 + max(ruled, len(self.kept)) + 1

    async def check_bits(self) -> None:
        await self.engine.close()
        for step in {one.step for one in self.kept}:  # a rejected one, too, where it is asked for
            state = await load(FOLDER, step=step, io=CrashWriter(self.disk, turns=0, read_only=True))
            assert state["step"] == step
            assert torch.equal(state["weights"], torch.full((2000,), float(step)))


steps = st.integers(0, 12)
losses = st.none() | st.sampled_from([0.0, 0.5, 1.0, 2.5, -1.0, float("nan"), float("inf")])
rules = st.builds(
    Rules,
    keep_last=st.integers(1, 3),
    every=st.none() | st.integers(2, 5),
    best=st.none() | st.tuples(st.just("loss"), st.integers(1, 3), st.sampled_from(["min", "max"])),
    spaced=st.sampled_from([(), ((2, 6),), ((3, 4), (5, 20))]),
)
saves = st.tuples(steps, losses, st.integers(-1, 5))
events = st.lists(
    st.tuples(st.just("save"), saves)
    | st.tuples(st.just("burst"), st.lists(saves, min_size=2, max_size=5))
    | st.tuples(st.just("fail"), steps)
    | st.tuples(st.just("pin"), steps)
    | st.tuples(st.just("unpin"), steps)
    | st.tuples(st.just("reject"), steps)
    | st.tuples(st.just("restart"), st.none() | rules)
    | st.tuples(st.just("crash while saving"), st.tuples(saves, st.floats(0, 1), st.booleans()))
    | st.tuples(st.just("crash while pinning"), st.tuples(steps, st.floats(0, 1), st.booleans()))
    | st.tuples(st.just("crash while rejecting"), st.tuples(steps, st.floats(0, 1), st.booleans())),
    min_size=3,
    max_size=14,
)


async def live(first: Rules, happening: list[tuple[str, Any]], clock: Clock) -> None:
    trainer = Trainer(first, clock)
    await trainer.open()
    for what, how in happening:
        match what:
            case "save":
                await (await trainer.save(*how)).durable()
                await trainer.check_slots()
            case "burst":
                for step, loss, later in how:
                    await trainer.save(step, loss, later)
                await trainer.check_slots()
            case "fail":
                await trainer.fail(how)
            case "pin" | "unpin":
                await trainer.pin(how, what == "pin")
            case "reject":
                await trainer.reject(how)
            case "restart":
                await trainer.restart(how)
            case "crash while saving":
                await trainer.crash(trainer.save(*how[0]), *how[1:])
            case "crash while pinning":
                await trainer.crash(trainer.pin(how[0], True), *how[1:])
            case "crash while rejecting":
                await trainer.crash(trainer.reject(how[0]), *how[1:])
        await trainer.check()
    await trainer.check_bits()


def run(first: Rules, happening: list[tuple[str, Any]]) -> None:
    logging.getLogger("pccheck_async").setLevel(logging.ERROR)
    clock = Clock()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(capture, "time", clock)
            asyncio.run(live(first, happening, clock))
    finally:
        logging.getLogger("pccheck_async").setLevel(logging.NOTSET)


@pytest.mark.slow
@given(rules, events)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_kept_set_is_what_the_rules_say(first: Rules, happening: list[tuple[str, Any]]) -> None:
    run(first, happening)


@pytest.mark.campaign
@given(rules, events)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
def test_five_hundred_sequences(first: Rules, happening: list[tuple[str, Any]]) -> None:
    run(first, happening)


@pytest.mark.slow
def test_multiples_beyond_what_a_record_names_go_first(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(_crowd())
    assert "of step 0 is dropped although Keep(every=...) keeps it" in caplog.text


async def _crowd() -> None:
    trainer = Trainer(Rules(every=1))
    await trainer.open()
    for step in range(MOST_ENTRIES + 2):
        await (await trainer.save(step, None)).durable()
    await trainer.pin(5, True)
    await (await trainer.save(100, None)).durable()
    found = [info.step for info in trainer.engine.checkpoints()]
    assert found == [100, *range(MOST_ENTRIES + 1, 2, -1)]
    await trainer.engine.close()


def test_what_new_rules_drop_is_said_at_opening(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(_change_rules())
    assert "the next checkpoint drops those of steps [1, 0]" in caplog.text


async def _change_rules() -> None:
    trainer = Trainer(Rules(keep_last=3))
    await trainer.open()
    for step in range(3):
        await (await trainer.save(step, None)).durable()
    await trainer.restart(Rules())
    assert len(trainer.engine.checkpoints()) == 3  # opening wrote nothing
    await trainer.engine.close()


def test_pins_from_a_blocking_trainer_outlive_it(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"x": torch.ones(3)}, step=1).result()
        assert engine.pin(step=1).pinned
        engine.checkpoint({"x": torch.ones(3)}, step=2).result()
        with pytest.raises(NoCheckpointError, match="no checkpoint of step 7"):
            engine.pin(step=7)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"x": torch.ones(3)}, step=3).result()
        assert [(info.step, info.pinned) for info in list_checkpoints(tmp_path)] == [(3, False), (1, True)]
        assert not engine.unpin(step=1).pinned
        assert [info.step for info in engine.checkpoints()] == [3, 1]  # it goes with the next commit
        engine.checkpoint({"x": torch.ones(3)}, step=4).result()
        assert [info.step for info in engine.checkpoints()] == [4]


def test_a_pin_from_before_a_rollback_ends_with_its_step(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"x": torch.ones(3)}, step=1).result()
        engine.pin(step=1)
        engine.checkpoint({"x": torch.zeros(3)}, step=1).result()
        assert [(info.counter, info.pinned) for info in engine.checkpoints()] == [(1, False), (0, True)]
        engine.unpin(step=1)
        assert [(info.counter, info.pinned) for info in engine.checkpoints()] == [(1, False), (0, False)]
        engine.checkpoint({"x": torch.ones(3)}, step=2).result()
        assert [info.step for info in engine.checkpoints()] == [2]


def test_a_pin_does_not_wait_for_a_checkpoint_that_waits_for_readers(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, max_in_flight=1) as engine, ExitStack() as readers:
        for step in range(3):
            engine.checkpoint({"x": torch.ones(3)}, step=step).result()
            readers.enter_context(open_checkpoint(tmp_path))
        waiting = engine.checkpoint({"x": torch.ones(3)}, step=3)
        pinning = threading.Thread(target=engine.pin, kwargs={"step": 2})
        pinning.start()
        pinning.join(30)
        assert not pinning.is_alive()
        assert not waiting.done()
        readers.close()
        waiting.result(30)
        assert [(info.step, info.pinned) for info in engine.checkpoints()] == [(3, False), (2, True)]


def test_more_pins_than_a_record_names_are_refused(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=62) as engine:
        for step in range(4):
            engine.checkpoint({"x": torch.ones(3)}, step=step).result()
        engine.pin(step=0)
        engine.pin(step=1)
        with pytest.raises(StoreFullError, match="3 checkpoints pinned and 62 kept by rules"):
            engine.pin(step=2)
    with pytest.raises(StoreFullError, match="unpin some, or keep fewer"):
        SyncCheckpointEngine(tmp_path, keep_last=63).open()
    with SyncCheckpointEngine(tmp_path) as engine:
        assert [info.step for info in engine.checkpoints()] == [3, 2, 1, 0]


def test_the_space_that_rules_need(tmp_path: Path) -> None:
    rules: Any = {"max_in_flight": 3, "keep_last": 2, "keep": Keep(every=100, best=("loss", 4, "max"))}
    with SyncCheckpointEngine(tmp_path, **rules) as engine:
        with pytest.raises(NoCheckpointError):
            engine.space_needed()
        needed = engine.space_needed({"x": torch.zeros(1 << 20)})
        assert needed.slots == {"in flight": 3, "the last 2": 2, "the best 4 by 'loss'": 4}
        assert needed.nbytes == 9 * needed.slot_bytes == 9 << 22
        assert "and 4194304 bytes more with every multiple of 100 steps" in str(needed)
        engine.checkpoint({"x": torch.zeros(1 << 20)}, step=1).result()
        assert engine.statistics().slots == 9
        assert 9 << 22 <= engine.statistics().slot_bytes < 10 << 22  # the manifests on top
        (tmp_path / "slot-900").symlink_to("gone")  # found in the folder, and removed before it is looked at
        assert engine.space_needed().slot_bytes >= 4 << 20


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"keep_last": 0}, ValueError, "keep_last is a whole number of at least 1"),
        ({"keep_last": 65}, ValueError, "keep_last is at most 64"),
        ({"every": 0}, ValueError, r"Keep\(every=...\) is a whole number"),
        ({"every": 1.5}, ValueError, r"Keep\(every=...\) is a whole number"),
        ({"best": "loss"}, TypeError, r'such as \("loss", 3, "min"\)'),
        ({"best": ("loss", 0, "min")}, ValueError, "the count of Keep"),
        ({"best": ("loss", 3, "low")}, ValueError, "'min' or 'max'"),
        ({"best": (1, 3, "min")}, TypeError, "names a metric"),
        ({"keep_last": 60, "best": ("loss", 5, "min")}, ValueError, "together is at most 64"),
        ({"spaced": [(1, 63)]}, ValueError, r"keep_last and the slices of Keep\(spaced=...\) together is at most 64"),
        (
            {"spaced": [(60, 86400)]},
            ValueError,
            r": 1440 slices in \(60, 86400\); a commit record names 64",
        ),
        ({"spaced": [(5e-324, 1)]}, ValueError, r": inf slices in \(5e-324, 1\)"),
        ({"spaced": [(1, 1e308)]}, ValueError, ": 1e[+]308 slices"),
        ({"spaced": [(1, 10**400)]}, ValueError, r"both are finite; not so in \(1, 1000"),
        ({"spaced": [(10**400, 10**400)]}, ValueError, "both are finite"),
        ({"spaced": [(1, math.inf)]}, ValueError, r"not so in \(1, inf\)"),
        ({"spaced": [(math.nan, 1)]}, ValueError, r"not so in \(nan, 1\)"),
        ({"best": ("loss", 10**400, "min")}, ValueError, "together is at most 64"),
        ({"spaced": (1, 80)}, TypeError, r"such as \[\(timedelta"),
        ({"spaced": [(2, 1)]}, ValueError, r"not so in \(2, 1\)"),
        ({"spaced": [(0, 1)]}, ValueError, r"not so in \(0, 1\)"),
        ({"spaced": [(-(10**400), 1)]}, ValueError, "longer than 0"),
        ({"spaced": [("10 min", 60)]}, TypeError, "timedeltas or seconds, not '10 min'"),
        ({"keep_last": "all", "spaced": [(1, 2)]}, ValueError, "give no keep="),
    ],
)
def test_rules_that_make_no_sense(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    rules = settings.copy()
    keep_last = rules.pop("keep_last", 1)
    with pytest.raises(error, match=message):
        SyncCheckpointEngine(FOLDER, keep_last=keep_last, keep=Keep(**rules))


@pytest.mark.slow
def test_a_pin_makes_durable_first_what_a_dead_writer_left_in_the_cache() -> None:
    """Else its record overwrites the newest durable one, under one that no device has yet (I12)."""
    kept = 16  # a record of more than one sector: less than that a device replaces whole or not at all

    async def run() -> None:
        trainer = Trainer(Rules(keep_last=kept))
        await trainer.open()
        for step in range(kept):
            await (await trainer.save(step, None)).durable()
        before = [info.step for info in trainer.engine.checkpoints()]
        history: list[DiskSnapshot] = []
        trainer.disk.observer = history.append
        await (await trainer.save(kept, None)).durable()
        after = [info.step for info in trainer.engine.checkpoints()]
        await trainer.engine.close()
        killed = [s for s in history if s.boundary == "flush commit submitted"]
        trainer.disk = CrashDisk.after_process_death(killed[-1])
        left = {id(change) for file in trainer.disk.snapshot().files.values() for change in file.unflushed}
        assert left
        await trainer.open()
        history.clear()
        trainer.disk.observer = history.append
        await trainer.engine.pin(step=after[0])
        await trainer.engine.close()
        for snapshot in history:
            files = {
                number: replace(file, unflushed=tuple(c for c in file.unflushed if id(c) not in left))
                for number, file in snapshot.files.items()
            }  # the device took nothing of what the dead writer left, unless it was flushed
            for image in power_loss_images(replace(snapshot, files=files), sector=512, limit=256):
                steps = [info.step for info in list_checkpoints(FOLDER, io=ImageWriter(image))]
                assert steps in (before, after), snapshot.boundary

    asyncio.run(run())


def in_flight(change: Change) -> TypeGuard[Written]:
    return isinstance(change, Written) and not change.completed


def torn(snapshot: DiskSnapshot, landed: slice) -> CrashDisk:
    """The disk as the next process finds it; of writes in flight only these sectors are there."""
    files = {
        number: replace(
            file,
            unflushed=tuple(
                part
                for change in file.unflushed
                for part in ([*change.sectors(512)][landed] if in_flight(change) else [change])
            ),
        )
        for number, file in snapshot.files.items()
    }
    return CrashDisk.after_process_death(replace(snapshot, files=files))


@pytest.mark.slow
def test_a_record_of_which_two_writers_tore_one_part_each_is_none() -> None:
    """Records of one generation differ in what is new: one's first sectors and the other's last ones may fit (I12)."""
    kept = 16  # a record of several sectors

    async def run() -> None:
        trainer = Trainer(Rules(keep_last=kept))
        await trainer.open()
        for step in range(kept):
            await (await trainer.save(step, None)).durable()
        history: list[DiskSnapshot] = []
        trainer.disk.observer = history.append
        await (await trainer.save(kept, None)).durable()
        await trainer.engine.close()
        killed = records_in_flight(history)[0]
        tried = 0
        for cut in range(1, 4096 // 512):
            trainer.disk = torn(killed, slice(cut))
            if newest(trainer.disk) == kept:
                continue  # what is missing is empty: it is not torn
            await trainer.open()
            history.clear()
            trainer.disk.observer = history.append
            await (await trainer.save(kept + 1, None)).durable()
            await trainer.engine.close()
            for snapshot in records_in_flight(history):
                tried += 1
                assert newest(torn(snapshot, slice(cut, None))) in (kept - 1, kept + 1), (cut, snapshot.boundary)
        assert tried >= 2

    asyncio.run(run())


def records_in_flight(history: list[DiskSnapshot]) -> list[DiskSnapshot]:
    return [s for s in history if s.boundary.startswith("write commit") and s.boundary.endswith("submitted")]


def newest(disk: CrashDisk) -> int:
    """The step of what loads."""
    step: int = load_sync(FOLDER, io=CrashWriter(disk, read_only=True))["step"]
    return step


class Forgetful(WrappingWriter):
    """A page cache: what a flush failed to write is shown as if it were on the disk, and no later flush writes it."""

    chains = True
    inner: CrashWriter

    def __init__(self, disk: CrashDisk) -> None:
        super().__init__(CrashWriter(disk))
        self.fails = False

    async def open(self, name: str, *, writable: bool) -> File:
        file = await super().open(name, writable=writable)
        file.direct = False
        return file

    async def flush(self, file: File) -> None:
        if self.fails and file.name == COMMIT_NAME:
            self.inner.disk.forget(self.inner.disk.find(file.name))
            raise WriteError(errno.EIO, os.strerror(errno.EIO), file.name)
        await super().flush(file)


@pytest.mark.slow
def test_a_record_that_only_the_page_cache_has_is_written_again_before_slots_are() -> None:
    """Else a crash finds the older one, whose slots were written over (I4)."""

    async def run() -> None:
        history: list[DiskSnapshot] = []
        disk, state = CrashDisk(), {"x": torch.arange(3000), "step": 0}
        writer = Forgetful(disk)
        async with CheckpointEngine(FOLDER, storage=StorageOptions(io=writer)) as engine:
            await (await engine.checkpoint(state, step=0)).durable()
            writer.fails = True
            with pytest.raises(StoreFailedError):
                await (await engine.checkpoint(state | {"step": 1}, step=1)).durable()
        async with CheckpointEngine(FOLDER, storage=StorageOptions(io=Forgetful(disk))) as engine:
            assert [info.step for info in engine.checkpoints()] == [1]  # so the slot of step 0 is free
            disk.observer = history.append
            await (await engine.checkpoint(state | {"step": 2}, step=2)).durable()
        found = {
            newest(CrashDisk.from_image(image))
            for snapshot in history
            for image in power_loss_images(snapshot, sector=512, limit=16)
        }
        assert found == {0, 1, 2}

    asyncio.run(run())


def test_a_pin_waits_for_the_record_of_a_checkpoint() -> None:
    """Else both write one generation, and one of them what the other does not know of."""
    engine, writer, disk = stuck_engine(keep_last=2)
    engine.checkpoint(small(), step=0).result(30)
    writer.hold("flush", after=1)
    pending = engine.checkpoint(small(), step=1)
    writer.wait_stuck()  # its record
    pinning = threading.Thread(target=engine.pin, kwargs={"step": 0})
    pinning.start()
    lock = probe(engine).store.lock
    waits = threading.Event()
    while not lock._waiters and len(writer.stuck) < 2:
        waits.wait(0.001)
    writer.release()
    pending.result(30)
    pinning.join(30)
    wanted = [(1, False), (0, True)]
    assert [(info.step, info.pinned) for info in engine.checkpoints()] == wanted
    engine.close()
    found = list_checkpoints(FOLDER, io=CrashWriter(disk, read_only=True))
    assert [(info.step, info.pinned) for info in found] == wanted


def test_a_pin_drops_what_is_known_to_be_damaged(tmp_path: Path) -> None:
    save(tmp_path, 0, 1)
    flip(slot_of(tmp_path, 1), 5000)
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        with pytest.warns(RuntimeWarning, match="falling back to step 0"):
            engine.restore(state_of(9))
        engine.pin(step=0)
    assert [(info.step, info.pinned) for info in list_checkpoints(tmp_path)] == [(0, True)]


def test_a_pin_that_changes_nothing_makes_the_record_durable_that_has_it() -> None:
    """A predecessor that pinned may have died before its flush: the page cache shows a pin that no disk has (I12)."""
    disk, state = CrashDisk(), {"x": torch.arange(3000), "step": 0}
    flushed: list[str] = []

    class Noting(WrappingWriter):
        async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
            if access.kind == "flush":
                flushed.append(access.name)
            return await call()

    with SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=CrashWriter(disk))) as engine:
        engine.checkpoint(state, step=1).result(30)
        engine.pin(step=1)
    with SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=Noting(CrashWriter(disk)))) as engine:
        assert not flushed
        engine.pin(step=1)
        assert COMMIT_NAME in flushed


def test_of_two_that_make_a_store_neither_takes_it_for_remains() -> None:
    """A listing that began before the other's commit file was there may show its store.json."""
    disk = CrashDisk()

    class Slow(CrashWriter):
        listings = 0

        async def open(self, name: str, *, writable: bool) -> File:
            if self.listings == 0:
                raise FileNotFoundError(name)
            return await super().open(name, writable=writable)

        async def names(self) -> list[str]:
            self.listings += 1
            return [name for name in await super().names() if name != "commit" or self.listings > 1]

    async def main() -> None:
        first = CrashWriter(disk)
        made = await open_commit(first, FOLDER, 0)
        await first.close()
        second = Slow(disk)
        assert (await open_commit(second, FOLDER, 0)).identity == made.identity
        assert second.listings > 1
        await second.close()

    asyncio.run(main())


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("lost", ["damaged", "older"])
@pytest.mark.parametrize("copy", [0, 1])
def test_the_record_that_a_new_writer_found_is_written_again_and_not_over_its_only_copy(
    copy: int, lost: str, direct: bool
) -> None:
    async def main() -> None:
        disk = CrashDisk()
        writer = CrashWriter(disk)
        commit = await open_commit(writer, FOLDER, 0)
        if lost == "older":  # as a death between the two writes leaves it
            for generation in (1, 2):
                await writer.make_durable([commit.part(Record(generation, ()))])
        record = await read_record(writer, commit.file, commit.identity, FOLDER)
        at = region_offsets(record.generation)[copy]
        other = aligned_buffer(REGION_NBYTES)
        if lost == "older":
            older = encode_record(Record(0, ()), commit.identity.id_bytes, commit.identity.block_bytes)
            other[: len(older)] = older
        await writer.write(commit.file, at, other)
        commit.file.direct = direct
        _, pieces = await commit.repairs(writer, record, FOLDER)
        assert [offset for offset, _ in pieces] == [at]
        await writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("torn", [0, 1])
def test_remains_of_either_copy_of_a_torn_record_are_erased(torn: int) -> None:
    async def main() -> None:
        disk = CrashDisk()
        writer = CrashWriter(disk)
        commit = await open_commit(writer, FOLDER, 0)
        record = await read_record(writer, commit.file, commit.identity, FOLDER)
        _, (again,) = await commit.repairs(writer, record, FOLDER)
        assert again[0] in region_offsets(record.generation)
        at = region_offsets(record.generation + 1)[torn]
        remains = aligned_buffer(4096)
        remains[:] = b"x" * 4096
        await writer.write(commit.file, at, remains)
        _, (zeros, copy) = await commit.repairs(writer, record, FOLDER)
        assert (zeros[0], bytes(zeros[1]).strip(b"\0")) == (at, b"")
        assert (copy[0], bytes(copy[1])) == (again[0], bytes(again[1]))
        await writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("saves", range(3, 7))
def test_a_line_leaves_superseded_checkpoints_for_last(tmp_path: Path, saves: int) -> None:
    with SyncCheckpointEngine(tmp_path, max_in_flight=2) as engine:
        for step in range(saves):
            engine.checkpoint({"x": torch.full((9,), float(step))}, step=step).result(60)
        core = probe(engine).core
        store = core.assembly.store
        core.loop.call(store.begin_line(Line(bytes(16), saves)))
        superseded = [entry.slot for entry in store.committed.record.superseded]
        assert superseded
        assert store.slots.table.decide(0).slot not in superseded
