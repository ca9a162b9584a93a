"""An object store in this process that delays, loses and lies, and histories of runs that share it.

No event loop: a run is a coroutine that stops at each of its requests, and a :class:`World` decides which one goes on
next, and what becomes of its request. So the order of all requests, late ones too, is played in microseconds.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from pccheck_async.bucket import BucketMedium, protocol
from pccheck_async.bucket.names import commit_number, data_name, digest
from pccheck_async.bucket.objects import Data, MissingObjectError, Objects, Patient, RefusedError
from pccheck_async.bucket.owner import Owner
from pccheck_async.bucket.record import CommitRecord, PartIndex, PartName, decode_commit, decode_index
from pccheck_async.bucket.upload import Draft
from pccheck_async.engine import drain, drain_owner
from pccheck_async.errors import DamagedError, ReadError, StoreLockedError, WriteError
from pccheck_async.format import Entry, crc32
from pccheck_async.format.record import slot_name

MAY_BE_LATE = ("put", "create", "delete")
MOST_ATTEMPTS = 2
"""Times that a record is sent until a run may give up."""


class BrokenError(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Request:
    """One request of a run."""

    run: int
    kind: str
    key: str = ""
    data: bytes = b""
    keys: tuple[str, ...] = ()

    def __await__(self) -> Generator[Request, Any, Any]:
        return (yield self)


class PlayedObjects(Objects):
    """The objects as one run sees them: each request stops its coroutine."""

    def __init__(self, run: int) -> None:
        self.url, self._run = "played://bucket", run

    async def put(self, key: str, data: Data) -> None:
        await Request(self._run, "put", key, bytes(data))

    async def create(self, key: str, data: bytes) -> bool:
        return bool(await Request(self._run, "create", key, data))

    async def get(self, key: str, most: int) -> bytes | None:
        found: bytes | None = await Request(self._run, "get", key)
        return found

    async def read(self, key: str, start: int, nbytes: int) -> memoryview:
        data = await self.get(key, 1 << 30)
        if data is None or len(data) < start + nbytes:
            raise MissingObjectError(key)
        return memoryview(data)[start : start + nbytes]

    async def list(self, prefix: str, after: str = "") -> Sequence[tuple[str, int]]:
        found: list[tuple[str, int]] = await Request(self._run, "list", prefix, after.encode())
        return found

    async def delete(self, keys: Collection[str]) -> None:
        for key in keys:  # not one request for all: some of them may be lost
            await Request(self._run, "delete", keys=(key,))

    async def pause(self, attempt: int) -> None:
        await Request(self._run, "pause")


class FolderOfObjects(MutableMapping[str, bytes]):
    """Objects in a folder, for processes that share them; forks, too, in which obstore's threads would be missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, key: str) -> bytes:
        try:
            return (self._folder / key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, data: bytes) -> None:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".new-{os.getpid()}-{threading.get_ident()}")
        new.write_bytes(data)
        new.rename(path)

    def __delitem__(self, key: str) -> None:
        (self._folder / key).unlink()

    def __iter__(self) -> Iterator[str]:
        files = [path for path in self._folder.rglob("*") if path.is_file() and not path.name.startswith(".new-")]
        return iter([path.relative_to(self._folder).as_posix() for path in files])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class LyingObjects(Objects):
    """Objects in this process, for code on an event loop, that lie as ``lies`` say.

    "ignored preconditions", "stale list" (without what was written last), "short body", "conflict after success" (a
    creation that was done is answered as refused), "no answer" (everything is done, and nothing answered), "vanished"
    (every request is refused), "slow" (nothing is done, or answered). ``times``: how many answers are lies; None: all.

    Attributes:
        stored: The objects.
        requests: Each with its kind and key.
    """

    def __init__(self, stored: MutableMapping[str, bytes] | None = None) -> None:
        self.url = "lying://bucket"
        self.stored: MutableMapping[str, bytes] = {} if stored is None else stored
        self.lies: set[str] = set()
        self.times: int | None = None
        self.requests: list[tuple[str, str]] = []
        self._last = ""

    def _lies(self, *kinds: str) -> bool:
        if not self.lies.intersection(kinds) or self.times == 0:
            return False
        self.times = None if self.times is None else self.times - 1
        return True

    async def _begin(self, kind: str, key: str) -> None:
        self.requests.append((kind, key))
        if "vanished" in self.lies:
            raise RefusedError(f"{self.url}: there is no such bucket")
        if self._lies("slow"):
            await asyncio.sleep(3600)

    def _end(self, kind: type[ReadError | WriteError]) -> None:
        if self._lies("no answer"):
            raise kind(errno.EIO, "no answer")

    async def put(self, key: str, data: Data) -> None:
        await self._begin("put", key)
        self.stored[key], self._last = bytes(data), key
        self._end(WriteError)

    async def create(self, key: str, data: bytes) -> bool:
        await self._begin("create", key)
        is_new = key not in self.stored or self._lies("ignored preconditions")
        if is_new:
            self.stored[key], self._last = data, key
        self._end(WriteError)
        return is_new and not self._lies("conflict after success")

    async def get(self, key: str, most: int) -> bytes | None:
        await self._begin("get", key)
        data = self.stored.get(key)
        if data is not None and len(data) > most:
            raise MissingObjectError(f"{key} is too long")
        self._end(ReadError)
        return data

    async def read(self, key: str, start: int, nbytes: int) -> memoryview:
        await self._begin("read", key)
        data = self.stored.get(key)
        if data is None or len(data) < start + nbytes:
            raise MissingObjectError(f"there is no object {key}")
        if self._lies("short body"):
            raise ReadError(errno.EIO, "a body was cut short")
        self._end(ReadError)
        return memoryview(data)[start : start + nbytes]

    async def list(self, prefix: str, after: str = "") -> Sequence[tuple[str, int]]:
        await self._begin("list", prefix)
        hidden = self._last if self._lies("stale list") else ""
        found = [(key, len(data)) for key, data in sorted(self.stored.items()) if key.startswith(prefix)]
        return [(key, nbytes) for key, nbytes in found if key > after and key != hidden]

    async def delete(self, keys: Collection[str]) -> None:
        await self._begin("delete", " ".join(keys))
        for key in keys:
            self.stored.pop(key, None)
        self._end(WriteError)

    async def pause(self, attempt: int) -> None:
        await asyncio.sleep(0)


@lru_cache(4096)
def record_of(data: bytes, number: int) -> CommitRecord:
    return decode_commit(data, number)


@lru_cache(4096)
def index_of(data: bytes, part: bytes, nbytes: int) -> PartIndex:
    return decode_index(data, PartName(part.decode(), len(data), entry_of(0, nbytes)))


def entry_of(counter: int, nbytes: int) -> Entry:
    manifest = b"manifest"
    return Entry(counter, counter, 1.0, nbytes, 0, nbytes, len(manifest), crc32(manifest), False, {})


@dataclass
class Run:
    """One run, as the world knows it."""

    work: Coroutine[Any, Any, None]
    disk: str
    answer: Any = None
    request: Request | None = None
    state: str = "off"  # then "runs", "done", "dead", "stopped"
    first: int = 0  # the number of the record with which it first owned the prefix
    lost_opening: bool = False


@dataclass
class World:
    """The bucket, and the runs that share it.

    ``budgets``: how many requests may be late or lost, how many runs may die, how many drafts may be given up.
    """

    random: random.Random
    objects: dict[str, bytes] = field(default_factory=dict)
    flying: list[Request] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    late: int = 2
    deaths: int = 1
    gives: int = 0
    created: dict[bytes, int] = field(default_factory=dict)  # put-ids in the order of their creation
    reported: int = 0
    clones: bool = False
    frozen: bool = False
    trace: list[str] = field(default_factory=list)

    # -- the bucket

    @property
    def top(self) -> int:
        return max((number for key in self.objects if (number := commit_number(key))), default=0)

    def record(self, number: int) -> CommitRecord | None:
        data = self.objects.get(f"commits/{number:09d}")
        return None if data is None else record_of(data, number)

    @property
    def live(self) -> tuple[Any, ...]:
        newest = self.record(self.top)
        return () if newest is None else ((self.top, newest.put),) * bool(newest.parts) + newest.keep

    def named(self, parts: Sequence[PartName]) -> list[str]:
        names = []
        for part in parts:
            names.append(part.key)
            if (data := self.objects.get(part.key)) is not None:
                names += [key for key, _ in index_of(data, part.key.encode(), part.entry.nbytes).objects]
        return names

    def apply(self, request: Request) -> Any:
        if request.kind == "put":
            self.objects[request.key] = request.data
        elif request.kind == "delete":
            for key in request.keys:
                self.objects.pop(key, None)
        elif request.kind == "create":
            if request.key in self.objects:
                return False
            self.check_new(request)
            self.objects[request.key] = request.data
        elif request.kind == "get":
            return self.objects.get(request.key)
        elif request.kind == "list":
            after = request.data.decode()
            keys = sorted(key for key in self.objects if key.startswith(request.key) and key > after)
            return [(key, len(self.objects[key])) for key in keys]
        return True

    def check_new(self, request: Request) -> None:
        number = commit_number(request.key)
        assert number is not None
        made = record_of(request.data, number)
        self.created.setdefault(made.put, len(self.created) + 1)
        if number <= self.top:
            return
        run = request.run
        if any(other.first > self.runs[run].first > 0 for n, other in enumerate(self.runs) if n != run):
            raise BrokenError(f"ZOMBIE: run {run} makes the newest record {number} after another one took over")
        origins = {self.origin(part) for part in made.parts}
        if len(origins) > 1:
            raise BrokenError(f"MIX: record {number} has parts of {sorted(origins)}")
        if made.parts and not self.clones:
            before = [self.record(kept[0]) for kept in self.live]
            same = [r.entry.counter for r in before if r is not None and r.parts and r.store == made.store]
            if any(made.entry.counter < counter for counter in same):
                raise BrokenError(f"ORDER: counter {made.entry.counter} becomes the newest after {same} of its store")

    def origin(self, part: PartName) -> bytes:
        """Return the content of a part, without its rank."""
        if part.key not in self.objects:
            raise BrokenError(f"WHOLE: a record names {part.key}, which is not there")
        index = index_of(self.objects[part.key], part.key.encode(), part.entry.nbytes)
        if gone := [key for key, _ in index.objects if key not in self.objects]:
            raise BrokenError(f"WHOLE: a record needs {gone}, which is not there")
        return self.objects[index.objects[0][0]].partition(b"|")[0] if index.objects else b""

    def check(self) -> None:
        """Raise BrokenError if a checkpoint that counts is not whole, or one that was reported is not found."""
        live = self.live
        for number, put in live:
            record = self.record(number)
            if record is None or record.put != put:
                raise BrokenError(f"WHOLE: the newest record keeps {number}, which is gone, or another one's")
            for part in record.parts:
                for key in self.named([part]):
                    name, data = data_name(key), self.objects.get(key)
                    if data is None:
                        raise BrokenError(f"WHOLE: {key}, which commit {number} needs, is gone")
                    if name is None or not key.endswith(digest(data)):
                        raise BrokenError(f"WHOLE: {key}, which commit {number} needs, has other bytes")
        newest = max((self.created[put] for _, put in live), default=0)
        if newest < self.reported:
            raise BrokenError("FOUND: a checkpoint that was reported is not found by a restart, nor a newer one")

    def check_end(self) -> None:
        """Raise BrokenError if a run stopped for nothing, or nobody collects what does not count."""
        writers = [run for run in self.runs if run.disk != "reader"]
        for number, run in enumerate(writers):
            newest = self.record(self.top)
            is_newest = newest is not None and newest.owner == self.owners[number].run
            if run.state == "stopped" and run.first and is_newest:
                raise BrokenError(f"STUCK: run {number} stops, though nobody took over")
            later = any(other.state != "off" for other in writers[number + 1 :])
            if run.state == "stopped" and not run.first and not run.lost_opening and not later:
                raise BrokenError(f"STUCK: run {number} stops, though no later run began")
        last = writers[-1]
        if last.state == "done" and not self.flying and last.first and last.first == max(r.first for r in writers):
            newest = self.record(self.top)
            assert newest is not None
            if newest.owner != self.owners[-1].run or self.owners[-1].base != self.top:
                return  # a creation that was given up came late: the next record goes on from there
            collecting: Coroutine[Any, Any, int] = self.owners[-1].collect()  # what arrived late, the next one deletes
            answer = None
            try:
                while True:
                    answer = self.apply(collecting.send(answer))
            except StopIteration:
                self.check()
            needed = {key for n, _ in self.live if (r := self.record(n)) for key in self.named(r.parts)}
            waste = [
                key
                for key in self.objects
                if (name := data_name(key))
                and key not in needed
                and name.target <= self.top
                and name.target not in newest.spare
            ]
            numbers = {n for n, _ in self.live} | {self.top}
            waste += [key for key in self.objects if (n := commit_number(key)) and n not in numbers]
            if waste:
                raise BrokenError(f"GARBAGE: nobody collects {waste}")

    # -- the runs

    def note_owner(self, number: int) -> None:
        """Note when a run first owns the prefix."""
        owner, record = self.owners[number], self.record(self.owners[number].base)
        if not self.runs[number].first and record is not None and record.owner == owner.run:
            self.runs[number].first = owner.base

    def begin(self, number: int) -> None:
        self.runs[number].state = "runs"
        self.advance(number)

    def advance(self, number: int, error: Exception | None = None, answer: Any = None) -> None:
        run = self.runs[number]
        try:
            run.request = run.work.throw(error) if error is not None else run.work.send(answer)
        except StopIteration:
            run.state, run.request = "done", None
        except (ReadError, WriteError) as failed:
            run.state, run.request = "dead", None  # it cannot take over
            self.trace.append(f"run {number} gives up: {failed}")
        except StoreLockedError as stopped:
            run.state, run.request = "stopped", None
            run.lost_opening = " over at the same time" in str(stopped) or " over all the time" in str(stopped)
            self.trace.append(f"run {number} stops: {stopped}")

    def step(self) -> bool:
        """Let something happen; False: nothing is left to."""
        waiting = [n for n, run in enumerate(self.runs) if run.state == "runs"]
        starting = [n for n, run in enumerate(self.runs) if run.state == "off" and (n == 0 or self.may_start(n))]
        choices: list[tuple[str, int]] = [("go", n) for n in waiting] * 6
        choices += [("begin", n) for n in starting] * (1 if waiting else 6)
        choices += [("arrive", n) for n in range(len(self.flying))]
        if self.deaths and waiting:
            choices += [("die", self.random.choice(waiting))] * (self.random.random() < 0.1)
        if not choices:
            return False
        what, number = self.random.choice(choices)
        if what == "begin":
            self.trace.append(f"run {number} ({self.runs[number].disk}) begins")
            self.begin(number)
        elif what == "arrive":
            request = self.flying.pop(number)
            self.trace.append(f"late {request.kind} {request.key or request.keys} of run {request.run} arrives")
            self.apply(request)
        elif what == "die":
            self.deaths -= 1
            self.trace.append(f"run {number} dies")
            self.runs[number].work.close()
            self.runs[number].state = "dead"
        else:
            self.go(number)
        self.check()
        return True

    rush = False
    only = ""

    def may_start(self, number: int) -> bool:
        if self.runs[number].disk == "reader":
            return self.top > 0
        before = self.runs[number - 1]
        return before.state != "off" and (self.rush or before.state != "runs" or before.first > 0)

    def go(self, number: int) -> None:
        request = self.runs[number].request
        assert request is not None
        said = f"run {number} {request.kind} {request.key or request.keys}"
        fate = self.random.random()
        may_be_late = request.kind == self.only if self.only else request.kind in MAY_BE_LATE
        if self.late and may_be_late and fate < (0.6 if self.only else 0.25):
            self.late -= 1
            if fate < 0.1:
                self.trace.append(f"{said}: applied, no answer")
                self.apply(request)
            else:
                self.trace.append(f"{said}: late")
                self.flying.append(request)
            self.advance(number, WriteError(errno.ETIMEDOUT, "no answer"))
            return
        if self.late and request.kind in ("get", "list") and fate < 0.02:
            self.late -= 1
            self.trace.append(f"{said}: no answer")
            self.advance(number, ReadError(errno.ETIMEDOUT, "no answer"))
            return
        answer = self.apply(request)
        self.trace.append(f"{said}: {answer if request.kind in ('create', 'list') else 'answered'}")
        self.advance(number, answer=answer)


async def patient(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Repeat a call that can be repeated, as :class:`.Patient` does."""
    while True:
        try:
            return await call()
        except (ReadError, WriteError):
            continue


class PatientPlayed(PlayedObjects):
    """The same with repetitions, as a run uses it."""

    async def pause(self, attempt: int) -> None:
        if attempt >= MOST_ATTEMPTS:
            raise WriteError(errno.ETIMEDOUT, "the deadline has passed")
        await PlayedObjects.pause(self, attempt)

    async def put(self, key: str, data: Data) -> None:
        await patient(lambda: PlayedObjects.put(self, key, data))

    async def get(self, key: str, most: int) -> bytes | None:
        found: bytes | None = await patient(lambda: PlayedObjects.get(self, key, most))
        return found

    async def list(self, prefix: str, after: str = "") -> Sequence[tuple[str, int]]:
        found: Sequence[tuple[str, int]] = await patient(lambda: PlayedObjects.list(self, prefix, after))
        return found

    async def delete(self, keys: Collection[str]) -> None:
        for key in keys:
            try:
                await PlayedObjects.delete(self, (key,))
            except WriteError:
                continue  # the next collection deletes it


async def life(
    world: World,
    number: int,
    owner: Owner,
    counters: Sequence[int],
    content: Callable[[int, int], bytes],
    ranks: int = 1,
) -> None:
    """One run: it takes over, copies its checkpoints one after the other, and collects after each."""
    await owner.take_over()
    world.note_owner(number)
    first = first_counter(owner) if world.runs[number].disk == "empty" else 0
    for counter in counters:
        await send_one(world, owner, first + counter, content, ranks)
        world.note_owner(number)


def first_counter(owner: Owner) -> int:
    """Return what a run counts on from that restores what it found."""
    return max(owner.counters, default=0)


async def send_one(world: World, owner: Owner, counter: int, content: Callable[[int, int], bytes], ranks: int) -> None:
    if not protocol.may_send(counter, owner.counters):
        return
    parts = []
    for rank in range(ranks):
        draft, nbytes = Draft.of(owner, rank), 0
        if world.frozen:
            await draft.name_again(owner.live_parts)
        for piece in range(2):
            data = (b"frozen" if world.frozen and piece else content(counter, rank)) + b"|" + bytes([piece]) * 2
            await draft.send(piece, data, digest(data))
            nbytes += len(data)
            if given_up(world):
                return
        parts.append(await draft.finish(entry_of(counter, nbytes), 512, b"manifest"))
    while True:
        try:
            await owner.commit(parts)
            break
        except (ReadError, WriteError):
            if given_up(world):
                return
    newest = max((world.created[put] for _, put in owner.now), default=0)
    world.reported = max(world.reported, newest)
    world.trace.append(f"counter {counter} is reported")
    await owner.collect()


async def reading(objects: Objects, times: int) -> None:
    """Read the newest checkpoint some times, as a reader of the bucket does; it tells what is damaged."""
    medium = BucketMedium(objects)
    for _ in range(times):
        await medium.names()
        for name in [slot_name(number) for number in sorted(medium.counting, reverse=True)][:1]:
            try:
                file = await medium.open(name, writable=False)
                for key, nbytes in medium.objects_of(file):
                    data = await objects.get(key, nbytes)
                    if data is None:
                        raise await medium.lost(file, f"there is no object {key}")
                    assert key.endswith(digest(data))
            except DamagedError as error:
                raise BrokenError(f"READER: {error}") from error
            except (ReadError, FileNotFoundError):
                continue  # it was replaced meanwhile


def given_up(world: World) -> bool:
    if world.gives and world.random.random() < 0.2:
        world.gives -= 1
        world.trace.append("the draft is given up")
        return True
    return False


@dataclass(frozen=True)
class Scenario:
    """Runs by their disks (own, same, empty, clone), how many checkpoints each has, and the trouble there is."""

    disks: tuple[str, ...] = ("own", "same")
    counts: tuple[int, ...] = (2, 2)
    late: int = 1
    deaths: int = 1
    gives: int = 0
    rush: bool = False
    ranks: int = 1
    keep_last: int = 1
    only: str = ""  # the one kind of request that is late
    readers: int = 0
    frozen: bool = False  # the second object of each part has the same bytes in all checkpoints of all runs


SCENARIOS = (
    Scenario(counts=(1, 1), deaths=0, rush=True),
    Scenario(counts=(1, 2), deaths=0),
    Scenario(counts=(1, 1), late=3, deaths=0),
    Scenario(counts=(2, 2), late=2),
    Scenario(("own", "empty"), (2, 1), deaths=0),
    Scenario(("own", "empty"), (2, 2), late=3, keep_last=2),
    Scenario(("own", "clone"), (1, 2), late=2),
    Scenario(counts=(2, 1), gives=1, deaths=0),
    Scenario(counts=(1, 2), gives=2, late=3),
    Scenario(("own", "same", "same"), (1, 1, 1), late=1),
    Scenario(("own", "same", "empty"), (1, 1, 1), late=2, deaths=2),
    Scenario(counts=(2, 1), late=2, ranks=2),
    Scenario(("own", "clone"), (2, 3), late=2, deaths=0, ranks=2),
    Scenario(counts=(4, 2), late=4, deaths=1, keep_last=3, gives=1),
    Scenario(counts=(3, 1), late=6, deaths=0, gives=3, only="create"),
    Scenario(counts=(3, 2), late=2, readers=2),
    Scenario(("own", "empty"), (3, 2), late=1, keep_last=2, readers=2),
    Scenario(("own", "same"), (3, 3), late=3, deaths=1, gives=1, frozen=True),
    Scenario(("own", "empty", "same"), (2, 2, 2), late=3, deaths=2, gives=1, keep_last=2, frozen=True),
    Scenario(("own", "clone"), (3, 3), late=3, deaths=1, ranks=2, frozen=True),
    Scenario(("own", "same"), (3, 3), late=3, deaths=0, readers=2, frozen=True),
)


def played(scenario: Scenario, seed: int) -> World:
    """Play one history to its end; every invariant is checked after every step. Raises BrokenError."""
    world = World(random.Random(seed), late=scenario.late, deaths=scenario.deaths, gives=scenario.gives)
    world.rush, world.only, world.clones = scenario.rush, scenario.only, "clone" in scenario.disks
    world.frozen = scenario.frozen
    made = 0
    for number, (disk, count) in enumerate(zip(scenario.disks, scenario.counts, strict=True)):
        store = {"empty": bytes([number + 1]) * 16}.get(disk, b"A" * 16)
        line = f"{disk}{number}".encode() if disk in ("empty", "clone") else b"A"
        owner = Owner(PatientPlayed(number), store, scenario.keep_last, run=bytes([65 + number]) * 16)
        made = made + count if disk in ("own", "same") else count
        counters = range(1, 1 + made)

        def content(counter: int, rank: int, line: bytes = line) -> bytes:
            return line + b"%d" % counter

        world.owners.append(owner)
        world.runs.append(Run(life(world, number, owner, counters, content, scenario.ranks), disk))
    for reader in range(scenario.readers):
        number = len(scenario.disks) + reader
        world.runs.append(Run(reading(PatientPlayed(number), 4), "reader"))
    try:
        for _ in range(4000):
            if not world.step():
                break
        else:
            raise BrokenError("STUCK: it does not end")
        world.check_end()
    finally:
        for run in world.runs:
            run.work.close()
    return world


def use_in_drains(objects: LyingObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make these objects the bucket of all drains, which try again at once."""

    def made(*_: object, **settings: Any) -> Objects:
        return Patient(objects, settings["deadline"], pause=0.001)

    monkeypatch.setattr(drain, "open_objects", made)
    monkeypatch.setattr(drain_owner, "_FIRST_PAUSE", 0.01)
