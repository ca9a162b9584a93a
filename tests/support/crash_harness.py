"""Crash-state enumeration: run the engine on a CrashDisk, fail the power everywhere, recover, compare."""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import math
import random
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from pccheck_async import (
    CheckpointEngine,
    CheckpointError,
    CheckpointInfo,
    Keep,
    NoCheckpointError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load,
    load_sync,
)
from pccheck_async.errors import CorruptStoreError, WriteError
from pccheck_async.format.record import COMMIT_NAME, IDENTITY_NAME, decode_identity, newest_record, slot_name
from pccheck_async.medium import Medium
from pccheck_async.testing import (
    Access,
    CrashDisk,
    CrashWriter,
    DiskSnapshot,
    Image,
    ImageWriter,
    WrappingWriter,
    power_loss_images,
)
from pccheck_async.transfer import PAGE_BYTES
from tests.support.image_reader import Listed, listed

T = TypeVar("T")
BLOCK = PAGE_BYTES
SECTORS = (512, BLOCK)
_FLOATS = tuple(BLOCK // 4096 * floats for floats in (300, 2500, 900, 4200, 4200, 1200, 0))
"""Sizes of the state by step: it grows, shrinks, and stays."""


@functools.cache
def state_of(step: int) -> dict[str, Any]:
    """Return the one state that may ever be seen for ``step``."""
    generator = np.random.default_rng(step)
    weights = torch.from_numpy(generator.random(_FLOATS[step % len(_FLOATS)], dtype=np.float32))
    return {"weights": weights, "mask": torch.from_numpy(generator.random(5) < 0.5), "step": step}


def metadata_of(step: int) -> dict[str, str | int | float | bool | None]:
    """Return facts that make a record longer than a sector of 512 bytes, so that it can be torn."""
    generator = random.Random(step)
    return {"note": generator.randbytes(220).hex(), "loss": generator.random()}


def is_state_of(found: dict[str, Any], step: int) -> bool:
    """Whether ``found`` is the state of ``step``, bit for bit."""
    expected = state_of(step)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        for name, value in expected.items()
    )


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is run, and how closely it is looked at.

    Attributes:
        max_in_flight: N.
        keep_last: K.
        seed: Decides everything but the pace of the engine's threads.
        bursts: Rounds of a few checkpoints, each round waited for.
        deaths: Process deaths; after each of them recovery, one more round, another death, recovery and a round.
        states: More deaths until so many distinct crash states were seen: how many one yields depends on threads.
        images: Power losses drawn at each boundary,
        subsets: and all subsets of what was not flushed, where it is at most so many changes.
        trouble: Share of the checkpoints that are cancelled; a quarter of it is that of the slot writes that fail.
        record_trouble: Share of the writes and flushes of records that fail.
        chunk_blocks: Blocks of a chunk: 2 make several of most states, 16 hold any of them with its manifest.
        buffers: Chunks that are in memory at a time.
        medium: Makes the writer's view of the disk,
        sectors: and the units that it stores all or not at all, in turn.
        wrap: Makes the engine's writer of the disk's: where a regression is planted.
        dying: Boundaries at which the process may die.
        rules: Of ``Keep``; all that a record names is then read, not only the newest.
        pins: Share of the rounds after which a checkpoint is pinned, or unpinned.
        removals: Share of the rounds beside which a checkpoint is removed through the engine.
        sampled: Share of the distinct images that the readers look at as a whole: of the others they read what
            a record names.
        enough: Violations after which to look no further.
    """

    max_in_flight: int
    keep_last: int | Literal["all"]
    seed: int = 0
    bursts: int = 4
    deaths: int = 3
    states: int = 0
    images: int = 12
    subsets: int = 4
    trouble: float = 0.1
    record_trouble: float = 0.0
    chunk_blocks: int = 2
    buffers: int = 2
    medium: Callable[..., CrashWriter] = CrashWriter
    sectors: tuple[int, ...] = SECTORS
    wrap: Callable[[Medium], Medium] = lambda writer: writer
    dying: Callable[[DiskSnapshot], bool] = lambda snapshot: True
    enough: int = 10
    rules: Mapping[str, Any] = field(default_factory=dict)
    pins: float = 0.0
    removals: float = 0.0
    sampled: float = 1.0


@dataclass(frozen=True, slots=True)
class Promises:
    """What is kept beside the newest checkpoint.

    Attributes:
        pinned: Steps that were pinned.
        multiples: Steps that end multiples of ``Keep(every=...)``.
        loss: The least one, where the best are kept.
        kept: Steps that were acknowledged and not removed, where all are kept.
        removed: Steps of which the removal was acknowledged.
    """

    pinned: frozenset[int] = frozenset()
    multiples: frozenset[int] = frozenset()
    loss: float = math.inf
    kept: frozenset[int] = frozenset()
    removed: frozenset[int] = frozenset()

    def with_saved(self, step: int, rules: Mapping[str, Any]) -> Promises:
        """Return the promises after ``step`` was acknowledged."""
        multiple = "every" in rules and (step + 1) % rules["every"] == 0
        loss = min(self.loss, float(str(metadata_of(step)["loss"]))) if "best" in rules else self.loss
        return replace(self, multiples=self.multiples | ({step} if multiple else set()), loss=loss)

    def broken_by(self, found: list[Listed]) -> str | None:
        """Say which one a list of checkpoints breaks, None where it keeps all of them."""
        if lost := self.pinned - {info.step for info, _ in found if info.pinned}:
            return f"the pinned steps {sorted(lost)} are lost"
        if lost := self.multiples - {info.step for info, _ in found}:
            return f"the steps {sorted(lost)}, which end multiples of Keep(every=...), are lost"
        steps = {info.step for info, _ in found}
        if self.kept - steps or self.removed & steps:
            return f"of the steps {sorted(steps)}, {sorted(self.kept)} are kept and {sorted(self.removed)} removed"
        if min((float(str(info.metadata["loss"])) for info, _ in found), default=math.inf) > self.loss:
            return f"the best, of loss {self.loss}, is lost"
        return None


@dataclass(frozen=True, slots=True)
class Moment:
    """A boundary: the disk, and what was promised by then."""

    snapshot: DiskSnapshot
    promises: Promises


@dataclass(slots=True)
class Findings:
    """What was run and found."""

    boundaries: int = 0
    exhausted: int = 0
    images: int = 0
    states: set[bytes] = field(default_factory=set)
    events: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return one line for the log."""
        return (
            f"{len(self.states)} distinct crash states of {self.images} power losses at {self.boundaries} boundaries "
            f"({self.exhausted} with all subsets of what was not flushed); "
            + ", ".join(f"{count} {name}" for name, count in sorted(self.events.items()))
            + f"; {len(self.violations)} violations"
        )


class Judge:
    """Recovers from images and compares what comes back with what was saved and promised."""

    def __init__(self, findings: Findings, scenario: Scenario) -> None:
        self.failed: set[int] = set()
        """Steps of checkpoints that failed: they must never come back."""
        self._findings = findings
        self._scenario = scenario
        self._recovered: dict[bytes, Recovered] = {}
        self._listed: dict[bytes, list[Listed] | str] = {}

    def power_losses(self, moment: Moment, *, sector: int, rng: random.Random) -> None:
        """Fail the power at one moment in many ways."""
        snapshot, scenario = moment.snapshot, self._scenario
        limit, subsets = scenario.images, 2**snapshot.undecided
        if snapshot.undecided <= scenario.subsets:
            limit = max(limit, subsets)
        self._findings.boundaries += 1
        self._findings.exhausted += subsets <= limit
        for image in power_loss_images(snapshot, sector=sector, limit=limit, rng=rng):
            self._findings.images += 1
            if image.digest not in self._findings.states:
                self._findings.states.add(image.digest)
                if whole := scenario.sampled == 1 or rng.random() < scenario.sampled:
                    self._findings.events["read as a whole"] += 1
                    self._recovered[image.digest] = recover(image)
                if scenario.rules or scenario.pins or scenario.removals or not whole:
                    self._listed[image.digest] = all_of(image)
            trouble = None
            if (recovered := self._recovered.get(image.digest)) is not None:
                trouble = recovered.trouble(snapshot.acknowledged, self.failed)
            if trouble is None and (found := self._listed.get(image.digest)) is not None:
                trouble = self._trouble_in(found, moment)
            self.note(f"power loss at {snapshot.boundary!r}", trouble)

    def _trouble_in(self, found: list[Listed] | str, moment: Moment) -> str | None:
        if isinstance(found, str):
            return found
        for info, read in found:
            if info.step != read:
                return f"step {info.step}, which the record names: {read}"
            if info.step in self.failed:
                return f"step {info.step} came back, which was never committed"
        promised = moment.snapshot.acknowledged
        if promised is not None and (not found or found[0][0].step < promised):
            return f"the newest of {[info.step for info, _ in found]} is older than the acknowledged step {promised}"
        return moment.promises.broken_by(found)

    def note(self, when: str, trouble: str | None) -> None:
        """Keep a violation; stop the exploration after enough of them."""
        if trouble is not None:
            self._findings.violations.append(f"{when}: {trouble}")
            if len(self._findings.violations) >= self._scenario.enough:
                raise EnoughSeen


class EnoughSeen(Exception):  # noqa: N818 - not an error
    """There were enough violations."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What recovery made of a folder: a checkpoint, nothing, or an error."""

    info: CheckpointInfo | None = None
    state: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    def trouble(self, promised: int | None, failed: set[int]) -> str | None:
        """Say which promise it breaks, None where it keeps all of them."""
        if self.error is not None:
            return self.error
        if self.info is None:
            return None if promised is None else f"nothing is left of the acknowledged step {promised}"
        step = self.info.step
        if step in failed:
            return f"step {step} came back, which was never committed"
        if promised is not None and step < promised:
            return f"step {step} came back, older than the acknowledged step {promised}"
        if self.info.metadata != metadata_of(step):
            return f"the metadata of step {step} are not its own"
        if not is_state_of(self.state, step):
            return f"the state of step {step} differs from what was saved"
        return None


def loaded(image: Image) -> Recovered:
    """Let a reader find what it may in an image whose newest checkpoint is damaged."""
    try:
        state = load_sync("image", io=ImageWriter(image), host_memory=1 << 20)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the exploration looks for
        return Recovered(error=f"recovery fails: {error!r}")
    step = state["step"]
    return Recovered(CheckpointInfo(step=step, counter=step, nbytes=0, time=0.0, metadata=metadata_of(step)), state)


def recover(image: Image) -> Recovered:
    """Let the readers of the package find the newest checkpoint of an image."""
    try:
        with fallbacks_raise():
            newest = next(iter(list_checkpoints("image", io=ImageWriter(image))), None)
            try:
                state = load_sync("image", io=ImageWriter(image), host_memory=1 << 20)
            except NoCheckpointError:
                return Recovered(error=f"load finds nothing, list_checkpoints {newest}" if newest else None)
            return Recovered(newest, state)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the exploration looks for
        return Recovered(error=f"recovery fails: {error!r}")


def all_of(image: Image) -> list[Listed] | str:
    """Return every checkpoint of an image, or why there is no telling."""
    try:
        return listed(image) or []
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the exploration looks for
        return f"recovery fails: {error!r}"


@contextmanager
def fallbacks_raise() -> Iterator[None]:
    """No crash damages a checkpoint that a record names (I2), so having to pass one over is a violation."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Unsteady(WrappingWriter):
    """Fails some writes and flushes, and lets some writes take so long that newer checkpoints overtake."""

    def __init__(self, inner: Medium, scenario: Scenario, rng: random.Random) -> None:
        super().__init__(inner)
        self._slot_share = scenario.trouble / 4
        self._record_share = scenario.record_trouble
        self._rng = rng
        self.chains = scenario.seed % 2 == 0

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        if access.kind == "write" and access.name != COMMIT_NAME:
            self._fail(access, self._slot_share)
            for _ in range(self._rng.choice((0, 0, 0, 40))):
                await asyncio.sleep(0)
        elif access.kind in ("write", "flush") and access.name == COMMIT_NAME:
            self._fail(access, self._record_share)
        return await call()

    def _fail(self, access: Access, share: float) -> None:
        if self._rng.random() < share:
            raise WriteError(errno.EIO, "planted", access.name)


class Exploration:
    """One scenario on its way."""

    def __init__(self, scenario: Scenario) -> None:
        self.findings = Findings()
        self._scenario = scenario
        self._rng = random.Random(scenario.seed)
        self._steps = itertools.count()
        self._judge = Judge(self.findings, scenario)
        self._promises = Promises()

    def run(self) -> Findings:
        """Train, fail the power at every boundary, let processes die and go on training from there."""
        with suppress(EnoughSeen):
            self._explore()
        return self.findings

    def _explore(self) -> None:
        first = self.train(CrashDisk(block_bytes=BLOCK), self._scenario.bursts)
        self.judge(first)
        for death in range(10 * self._scenario.deaths):
            if death >= self._scenario.deaths and len(self.findings.states) >= self._scenario.states:
                break
            history = first
            for _ in range(2):  # the second death may come before anything was committed: that must lose nothing either
                self.findings.events["process deaths"] += 1
                moment = self._rng.choice([m for m in history if self._scenario.dying(m.snapshot)] or history)
                self._promises = moment.promises
                history = self.train(self._die(moment.snapshot), bursts=1)
                self.judge(history)

    def judge(self, history: list[Moment]) -> None:
        """Fail the power at every boundary."""
        for number, moment in enumerate(history):
            sector = self._scenario.sectors[number % len(self._scenario.sectors)]
            self._judge.power_losses(moment, sector=sector, rng=self._rng)

    def train(self, disk: CrashDisk, bursts: int) -> list[Moment]:
        """Train on ``disk`` and return its boundaries."""
        history = [Moment(disk.snapshot("process started"), self._promises)]
        disk.observer = lambda snapshot: history.append(Moment(snapshot, self._promises))
        asyncio.run(self._train(disk, bursts))
        return [*history, Moment(disk.snapshot("process ended"), self._promises)]

    def _die(self, snapshot: DiskSnapshot) -> CrashDisk:
        lingering = self._rng.choice((0, 0, 12))
        return CrashDisk.after_process_death(
            snapshot, rng=self._rng, sector=self._rng.choice(self._scenario.sectors), lingering=lingering
        )

    async def _train(self, disk: CrashDisk, bursts: int) -> None:
        scenario = self._scenario
        writer: Medium = scenario.medium(disk, seed=self._rng.randrange(1 << 30))
        engine = CheckpointEngine(
            "memory",
            max_in_flight=scenario.max_in_flight,
            keep_last=scenario.keep_last,
            keep=Keep(**scenario.rules),
            storage=StorageOptions(
                chunk_bytes=scenario.chunk_blocks * BLOCK,
                host_memory=scenario.buffers * scenario.chunk_blocks * BLOCK,
                io=scenario.wrap(Unsteady(writer, scenario, self._rng)),
            ),
        )
        try:
            await engine.open()
        except WriteError:
            if not scenario.record_trouble:
                raise
            self.findings.events["not opened"] += 1
            return
        try:
            await self._resume(engine, disk.acknowledged)
            for _ in range(bursts):
                count = self._rng.randint(1, 2 * scenario.max_in_flight + 2)
                burst = [self._checkpoint(engine, disk) for _ in range(count)]
                await asyncio.gather(*burst, self._read_beside(disk), self._pin(engine), self._remove(engine))
        finally:
            # What fails after it was cancelled, when its capture had just ended, nobody awaited: closing tells it.
            with suppress(CheckpointError, OSError):
                await engine.close()

    async def _resume(self, engine: CheckpointEngine, promised: int | None) -> None:
        """Restore as a trainer would, into a state of the right shape, and judge what came back."""
        info = engine.latest
        state: dict[str, Any] = (
            {}
            if info is None
            else {
                name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1
                for name, value in state_of(info.step).items()
            }
        )
        try:
            with fallbacks_raise():
                recovered = Recovered(await engine.restore(state), state)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the exploration looks for
            recovered = Recovered(error=f"restoring fails: {error!r}")
        self._judge.note("after a process death", recovered.trouble(promised, self._judge.failed))

    async def _read_beside(self, disk: CrashDisk) -> None:
        """Load as another process would, while the engine writes."""
        promised = disk.acknowledged
        reader = CrashWriter(disk, seed=self._rng.randrange(1 << 30), read_only=True)
        try:
            state = await load("memory", io=reader, host_memory=1 << 20)
        except NoCheckpointError:
            trouble = None if promised is None else f"it finds nothing of the acknowledged step {promised}"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the exploration looks for
            trouble = f"it fails: {error!r}"
        else:
            self.findings.events["read beside the writer"] += 1
            step = state["step"]
            if promised is not None and step < promised:
                trouble = f"it finds step {step}, older than the acknowledged step {promised}"
            else:
                trouble = None if is_state_of(state, step) else f"the state of step {step} differs from what was saved"
        self._judge.note("a reader beside the writer", trouble)

    async def _pin(self, engine: CheckpointEngine) -> None:
        """Pin one of the checkpoints, or unpin one, while others are written."""
        if self._rng.random() >= self._scenario.pins:
            return
        for _ in range(self._rng.choice((0, 5, 20))):
            await asyncio.sleep(0)
        infos = engine.checkpoints()
        pinned = [info.step for info in infos if info.pinned]
        try:
            if pinned and (len(pinned) > 3 or self._rng.random() < 0.4):
                step = self._rng.choice(pinned)
                self._promises = replace(self._promises, pinned=self._promises.pinned - {step})
                await engine.unpin(step=step)
                self.findings.events["unpinned"] += 1
            elif infos:
                step = self._rng.choice(infos).step
                await engine.pin(step=step)
                self._promises = replace(self._promises, pinned=self._promises.pinned | {step})
                self.findings.events["pinned"] += 1
        except NoCheckpointError:
            self.findings.events["dropped before it was pinned"] += 1
        except CheckpointError:  # a record failed, now or before
            self.findings.events["not pinned"] += 1

    async def _remove(self, engine: CheckpointEngine) -> None:
        """Remove one of the checkpoints that are not the newest, while others are written."""
        if self._rng.random() >= self._scenario.removals or len(infos := engine.checkpoints()) < 2:
            return
        step = self._rng.choice(infos[1:]).step
        self._promises = replace(self._promises, kept=self._promises.kept - {step})
        await engine.remove(step=step)
        self._promises = replace(self._promises, removed=self._promises.removed | {step})
        self.findings.events["removed"] += 1

    async def _checkpoint(self, engine: CheckpointEngine, disk: CrashDisk) -> None:
        step = next(self._steps)
        saving = asyncio.ensure_future(engine.checkpoint(state_of(step), step=step, metadata=metadata_of(step)))
        try:
            if self._rng.random() < self._scenario.trouble:
                for _ in range(self._rng.randint(1, 4)):
                    await asyncio.sleep(0)
                saving.cancel()
            pending = await saving
            info = await pending.durable()
        except asyncio.CancelledError:
            self.findings.events["cancelled"] += 1  # it commits nevertheless where its capture had just ended
        except (CheckpointError, OSError):
            self.findings.events["failed"] += 1
            if not self._scenario.record_trouble:  # a record whose flush failed may have become durable nevertheless
                self._judge.failed.add(step)
        else:
            self.findings.events["superseded" if pending.superseded else "committed"] += 1
            disk.acknowledge(info.step)
            if not pending.superseded:
                self._promises = self._promises.with_saved(step, self._scenario.rules)
                if self._scenario.keep_last == "all":
                    self._promises = replace(self._promises, kept=self._promises.kept | {step})


def explore(scenario: Scenario) -> Findings:
    """Run ``scenario`` and judge every power loss drawn from it."""
    return Exploration(scenario).run()


def explore_damage(keep_last: int, *, images: int, seed: int = 0) -> Findings:
    """Damage sectors of a store at rest: what was saved must come back, or an error, never anything else."""
    exploration = Exploration(Scenario(2, keep_last, seed=seed, bursts=4, trouble=0.0))
    *_, last = exploration.train(CrashDisk(block_bytes=BLOCK), bursts=4)
    whole = list(power_loss_images(last.snapshot, limit=2))[-1]
    findings, rng = exploration.findings, random.Random(seed)
    for _ in range(images):
        image = damaged(whole, rng)
        findings.images += 1
        findings.states.add(image.digest)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                state = load_sync("image", io=ImageWriter(image), host_memory=1 << 20)
        except CorruptStoreError:
            findings.events["refused"] += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the exploration looks for
            findings.violations.append(f"recovery fails with the wrong error: {error!r}")
        else:
            findings.events["older instead" if warned else "whole"] += 1
            step = state.get("step")
            if not isinstance(step, int) or step < 0 or not is_state_of(state, step):
                findings.violations.append(f"the state of step {step} differs from what was saved")
    return findings


def explore_falling_back(seed: int, at: str = "", images: int = 6) -> Findings:
    """Damage the only checkpoint, fall back to the one that it superseded, train on, fail the power everywhere, die.

    Args:
        seed: Decides everything but the pace of the engine's threads.
        at: The power fails at the boundaries that begin so.
        images: Power losses drawn at each.
    """
    alike = [step for step in range(12) if _FLOATS[step % len(_FLOATS)] == _FLOATS[3]]
    findings, rng = Findings(), random.Random(seed)
    disk = CrashDisk(block_bytes=BLOCK)

    def engine() -> SyncCheckpointEngine:
        writer = CrashWriter(disk, seed=rng.randrange(1 << 30))
        return SyncCheckpointEngine("memory", storage=StorageOptions(io=writer, chunk_bytes=2 * BLOCK), max_in_flight=1)

    with engine() as before:
        for step in alike[:2]:
            before.checkpoint(state_of(step), step=step, metadata=metadata_of(step)).result(30)
    files = dict(disk.contents())
    record = newest_record(files[COMMIT_NAME], decode_identity(files[IDENTITY_NAME]).id_bytes)
    assert record is not None
    slot = slot_name(record.entries[0].slot)
    disk = CrashDisk.from_image(Image.of(files | {slot: bytes(BLOCK) + files[slot][BLOCK:]}), block_bytes=BLOCK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(3):
            history: list[DiskSnapshot] = []
            disk.observer = history.append
            with engine() as training:
                live = {
                    name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1
                    for name, value in state_of(alike[0]).items()
                }
                try:
                    restored = training.restore(live)
                    found = Recovered(restored, live)
                except CheckpointError as error:
                    found = Recovered(error=f"restoring fails: {error!r}")
                if (trouble := found.trouble(alike[0], set())) is not None:
                    findings.violations.append(f"after a process death: {trouble}")
                    return findings
                assert restored is not None
                disk.acknowledge(alike[0])
                if rng.random() < 0.5:
                    with suppress(NoCheckpointError):  # where it is not kept: that is what is to be found then
                        training.pin(step=restored.step)
                        training.unpin(step=restored.step)
                for step in alike[2:]:
                    training.checkpoint(state_of(step), step=step, metadata=metadata_of(step)).result(30)
                    disk.acknowledge(step)
            for snapshot in history:
                wanted = images if snapshot.boundary.startswith(at) else 0
                for image in power_loss_images(snapshot, limit=wanted, rng=rng, sector=SECTORS[0]):
                    findings.images += 1
                    if image.digest not in findings.states:
                        findings.states.add(image.digest)
                        if (trouble := loaded(image).trouble(snapshot.acknowledged or alike[0], set())) is not None:
                            findings.violations.append(f"power loss at {snapshot.boundary!r}: {trouble}")
                            return findings
            early = [snapshot for snapshot in history if snapshot.acknowledged in (None, alike[0])]
            disk = CrashDisk.after_process_death(rng.choice(early), rng=rng, lingering=rng.choice((0, 12)))
    return findings


def damaged(image: Image, rng: random.Random) -> Image:
    """Flip bits in one sector that holds something."""
    files = {name: bytearray(content) for name, content in image.files.items()}
    content = files[rng.choice(sorted(name for name in files if any(files[name])))]  # a new slot holds nothing yet
    start = rng.choice([start for start in range(0, len(content), 512) if any(content[start : start + 512])])
    end = min(start + 512, len(content))
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(start, end)] ^= rng.randint(1, 255)
    return Image.of({name: bytes(content) for name, content in files.items()})
