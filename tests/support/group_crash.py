"""Crash states of a group: engines of W ranks save to W disks in memory, and the power of each fails at its own moment.

All ranks run in this process. What happens on a node is recorded in one order: its disks after every operation, what
its rank tells and hears, what it acknowledges. A *cut* is a moment of each node, such that nobody heard what was not
said before. What the power leaves there are all combinations of what :func:`power_loss_images` leaves of each disk.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import random
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec import structs
from torch.distributed import HashStore  # type: ignore[attr-defined]

from pccheck_async import CheckpointEngine, CheckpointError, Group, StorageOptions
from pccheck_async.errors import StoreFailedError, WriteError
from pccheck_async.format.record import COMMIT_NAME
from pccheck_async.group import Coordinator, Key, SeenStore, driver, ranks, view_of
from pccheck_async.group.control import Client, Server
from pccheck_async.group.folder import seen_store
from pccheck_async.group.messages import AnyDecision, AnyMessage, Commit
from pccheck_async.group.ranks import Ranks
from pccheck_async.medium import File, Medium
from pccheck_async.medium.files import Files
from pccheck_async.medium.open_medium import IO, open_medium
from pccheck_async.store import rank_folders, rank_name
from pccheck_async.testing import (
    Access,
    CrashDisk,
    CrashWriter,
    DiskSnapshot,
    Image,
    WrappingWriter,
    power_loss_images,
)
from tests.support.crash_harness import BLOCK, SECTORS, is_state_of, metadata_of, state_of
from tests.support.image_reader import loaded, newest_in
from tests.support.ranks import PATIENCE

Cut = tuple[int, ...]
_AROUND = 8
"""Moments of each node before its vote, and after it learnt the decision, that are looked at for each commit."""
_ONLY_HEARD = ("post", "receive", "publish", "learn")
"""A cut right after one of these leaves the same disks and promises as the cut right before it."""


@dataclass(frozen=True, slots=True)
class Life:
    """One opening of the group.

    Attributes:
        steps: Checkpoints to save.
        before: How the ranks of the life before ended: they left, they were killed at a cut, or when one of them was
            "flushing" its record, or the power failed; "mixed": they were killed, or the power failed, on each node.
        nodes: Where each rank runs; none: rank r on node r.
        pin: The checkpoint of these to pin, by its place.
        reject: The checkpoint of these to reject, once it is durable; an older one is there.
        fails: The rank of which a write to a slot fails.
        latches: The rank of which the flush of a record fails.
    """

    steps: int = 4
    before: str = "left"
    nodes: tuple[int, ...] = ()
    pin: int | None = None
    reject: int | None = None
    fails: int | None = None
    latches: int | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is run, and how closely it is looked at.

    Attributes:
        world: W.
        keep_last: K.
        lives: One after the other over the same disks; again from the beginning until there are enough ``states``.
        seed: Decides everything but the pace of threads.
        states: Distinct images to judge, at least.
        cuts: Around each commit, and anywhere in a life: all of them, or so many drawn.
        images: Of each disk at each moment, and combinations of these at each cut.
        reopened: Cuts of each life after which engines open what is left, restore, and save.
    """

    world: int
    keep_last: int = 1
    lives: tuple[Life, ...] = (Life(),)
    seed: int = 0
    states: int = 0
    cuts: int = 400
    images: int = 4
    reopened: int = 0


class Promises(NamedTuple):
    """What was acknowledged, and what was given up: steps of the run.

    Attributes:
        durable: What ``durable()`` returned.
        saved: Those of them that were not superseded.
        pinned: Pinned ones.
        rejected: Rejected ones.
        given_up: Those that a user asked to reject. From then on they may be gone: one that is rejected counts for no
            rule, and the next commit, also of an older step in flight, drops it before the call returns.
    """

    durable: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    pinned: frozenset[int] = frozenset()
    rejected: frozenset[int] = frozenset()
    given_up: frozenset[int] = frozenset()

    @classmethod
    def joined(cls, every: Iterable[Promises]) -> Promises:
        return cls(*(frozenset().union(*each) for each in zip(*every, strict=True)))

    @property
    def newest(self) -> int:
        """The newest step that has to be there, or a newer one; -1: none."""
        return max(self.durable - self.given_up, default=-1)

    def left(self, keep_last: int) -> frozenset[int]:
        """Return the newest ``keep_last``, without those given up: so many have to be there at least."""
        return frozenset(sorted(self.saved)[-keep_last:]) - self.given_up


@dataclass(frozen=True, slots=True)
class Moment:
    """One node after one more thing happened there: ``what``.

    Attributes:
        disks: Of each rank that has a folder there: what is on it, or where it was removed, that or nothing.
        heard: The moment of every node that this one may know of; its own is this one.
        promised: On this node.
    """

    what: str
    disks: Mapping[int, tuple[DiskSnapshot | None, ...]]
    heard: Cut
    promised: Promises


class Recording:
    """One life, as it happened on each node. Its methods may be called from any thread."""

    def __init__(self, world: int, life: Life, disks: list[dict[int, CrashDisk]], promised: Promises) -> None:
        self.nodes = life.nodes or tuple(range(world))
        self.disks = disks
        self.moments = [
            [Moment("opened", {rank: (disk.snapshot(),) for rank, disk in there.items()}, (0,) * world, promised)]
            for there in disks
        ]
        self.commits: list[int] = []
        self._posts: list[list[int]] = [[] for _ in range(world)]
        self._received = [0] * world
        self._published: list[int] = []
        self._lock = threading.Lock()
        for node, there in enumerate(disks):
            for rank, disk in there.items():
                self._watch(node, rank, disk)

    def note(
        self,
        node: int,
        what: str,
        *,
        heard: tuple[int, int] | None = None,
        disks: Mapping[int, tuple[DiskSnapshot | None, ...]] | None = None,
        promised: Promises | None = None,
    ) -> int:
        """Add a moment to a node, and return its number; ``heard``: what another node said in that moment."""
        with self._lock:
            last = self.moments[node][-1]
            said = last if heard is None else self.moments[heard[0]][heard[1]]
            knows = [max(pair) for pair in zip(last.heard, said.heard, strict=True)]
            knows[node] = len(self.moments[node])
            together = last.promised if promised is None else Promises.joined((last.promised, promised))
            self.moments[node].append(Moment(what, {**last.disks, **(disks or {})}, tuple(knows), together))
            return knows[node]

    def acknowledge(self, rank: int, promised: Promises) -> None:
        """Note that a call for which a user waits returned."""
        self.note(self.nodes[rank], "acknowledged", promised=promised)

    def disk(self, path: str | Path) -> CrashDisk:
        """Return what lies at ``.../<node>/run/rank-<rank>``, a new disk where there is none."""
        node, rank = int(Path(path).parts[-3]), int(Path(path).name.removeprefix("rank-"))
        if rank not in self.disks[node]:
            self.disks[node][rank] = CrashDisk(block_bytes=BLOCK)
            self._watch(node, rank, self.disks[node][rank])
        return self.disks[node][rank]

    def _watch(self, node: int, rank: int, disk: CrashDisk) -> None:
        def observe(snapshot: DiskSnapshot) -> None:
            self.note(node, snapshot.boundary, disks={rank: (snapshot,)})

        disk.observer = observe

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record what ranks tell each other, and let them find these disks in the places of their folders."""
        post, receive, publish, learn = Client.post, Coordinator.receive, Server._publish, Ranks._learn
        home = self.nodes[0]

        def posts(client: Client, message: AnyMessage) -> None:
            number = self.note(self.nodes[message.rank], f"post {type(message).__name__}")
            self._posts[message.rank].append(number)
            post(client, message)

        def receives(coordinator: Coordinator, message: AnyMessage) -> Sequence[AnyDecision]:
            said = self._posts[message.rank][self._received[message.rank]]
            self._received[message.rank] += 1
            self.note(home, f"receive {type(message).__name__}", heard=(self.nodes[message.rank], said))
            return receive(coordinator, message)

        def publishes(server: Server, decisions: Sequence[AnyDecision]) -> None:
            for decision in decisions:
                self._published.append(self.note(home, f"publish {type(decision).__name__}"))
                if isinstance(decision, Commit):
                    self.commits.append(self._published[-1])
                publish(server, [decision])

        def learns(one: Ranks, decision: AnyDecision) -> None:
            said = self._published[one.member.learned]
            self.note(self.nodes[one.member.rank], f"learn {type(decision).__name__}", heard=(home, said))
            learn(one, decision)

        def seen_stores(folder: Path, *, passes_over: bool) -> Iterator[SeenStore]:
            found = sorted(self.disks[int(folder.parts[-2])].items())
            seen = (Seen.of(rank, Image.of(disk.contents()), whole=False).store for rank, disk in found)
            return filter(None, seen)

        def opens(path: str | Path, io: IO, **threads: Any) -> Any:
            # A rank has a true folder, for what it receives from another node.
            return open_medium(path, io if os.path.exists(path) else CrashWriter(self.disk(path)), **threads)

        def removes(folder: Path, rank: int) -> None:
            node = int(folder.parts[-2])
            del self.disks[node][rank]
            self.note(node, "removed", disks={rank: (*self.moments[node][-1].disks[rank], None)})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Client, "post", posts)
            patch.setattr(Coordinator, "receive", receives)
            patch.setattr(Server, "_publish", publishes)
            patch.setattr(Ranks, "_learn", learns)
            patch.setattr(driver, "seen_stores", seen_stores)
            patch.setattr(driver, "open_medium", opens)
            patch.setattr(ranks, "Files", partial(_FolderOfDisks, self.disk))
            patch.setattr(driver, "remove_store", removes)
            yield

    def at(self, cut: Cut) -> list[Moment]:
        """Return the moments of a cut."""
        return [moments[index] for moments, index in zip(self.moments, cut, strict=True)]

    def cuts(self, rng: random.Random, most: int) -> Iterator[Cut]:
        """Yield cuts around every commit, and anywhere: of each of these all, where that is at most ``most``."""
        places = [[i for i, one in enumerate(each) if not one.what.startswith(_ONLY_HEARD)] for each in self.moments]
        home = self.nodes[0]
        for commit in self.commits:
            around = []
            for node, moments in enumerate(self.moments):
                voted = self.moments[home][commit].heard[node]
                learnt = next((i for i, one in enumerate(moments) if one.heard[home] >= commit), len(moments))
                begin, end = (bisect_left(places[node], index) for index in (voted, learnt))
                around.append(places[node][max(0, begin - _AROUND) : end + _AROUND])
            yield from self._some_of(around, rng, most)
        yield from self._some_of(places, rng, most)

    def _some_of(self, places: list[list[int]], rng: random.Random, most: int) -> Iterator[Cut]:
        if prod(map(len, places)) <= most:
            yield from (cut for cut in itertools.product(*places) if self.latest_cut(cut) == cut)
        else:
            for _ in range(most):
                yield self.latest_cut(tuple(rng.choice(there) for there in places))

    def latest_cut(self, cut: Cut) -> Cut:
        """Return the latest moments, none later than these, of which none knows more than the others have said."""
        before: Cut = ()
        while cut != before:
            before = cut
            cut = tuple(
                next(i for i in range(last, -1, -1) if all(map(int.__le__, moments[i].heard, before)))
                for last, moments in zip(before, self.moments, strict=True)
            )
        return cut


@dataclass(frozen=True, slots=True)
class Seen:
    """What an opening sees of an image of one rank's disk, and the number of the state in each part or what it is."""

    digest: bytes
    store: SeenStore | None = None
    parts: Mapping[Key, int | str] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: int, image: Image, *, whole: bool = True) -> Seen:
        """Read an image; the parts only where it is read as a ``whole``. Raises CheckpointError."""
        found = newest_in(image)
        if found is None:
            return cls(image.digest)
        store = seen_store(rank, *found)
        return cls(image.digest, store, {part.key: loaded(image, part.entry) for part in store.parts if whole})


def number_of(step: int, rank: int) -> int:
    """Return the number of the state that a rank has after a step."""
    return 8 * step + rank


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks together find: steps of complete checkpoints, newest first, and the pinned ones; or an error."""

    complete: tuple[int, ...] = ()
    pinned: frozenset[int] = frozenset()
    rejected: frozenset[int] = frozenset()
    error: str | None = None

    @classmethod
    def of(cls, there: Sequence[tuple[int, Seen]], world: int) -> Verdict:
        """Judge what lies on each node."""
        view = view_of(
            [structs.replace(seen.store, domain=node) for node, seen in there if seen.store is not None],
            range(world), [],
        )  # fmt: skip
        steps = {one.key: one.entry.step for one in view.complete}
        wrong = [
            f"step {steps[key]} is complete, and on node {node} it is {number}"
            for node, seen in there
            for key, number in seen.parts.items()
            if key in steps and seen.store is not None and number != number_of(steps[key], seen.store.rank)
        ]
        pinned = frozenset(one.entry.step for one in view.complete if one.entry.pinned)
        rejected = frozenset(one.entry.step for one in view.complete if one.entry.rejected)
        return cls(tuple(steps.values()), pinned, rejected, view.error or next(iter(wrong), None))

    @property
    def newest(self) -> int | None:
        """What a restart restores."""
        return next((step for step in self.complete if step not in self.rejected), None)

    def trouble(self, promised: Promises, failed: set[int], keep_last: int) -> str | None:
        """Say which promise it breaks, None where it keeps all of them."""
        if self.error is not None:
            return self.error
        if next(iter(self.complete), -1) < promised.newest:
            return f"the newest of {self.complete} is older than the acknowledged step {promised.newest}"
        if len(self.complete) < len(promised.left(keep_last)):
            return f"only {self.complete} are left of {sorted(promised.saved)}"
        if lost := promised.pinned - self.pinned:
            return f"the pinned steps {sorted(lost)} are lost"
        if unmarked := promised.rejected.intersection(self.complete) - self.rejected:
            return f"the rejected steps {sorted(unmarked)} would be restored"
        if promised.rejected and self.complete and set(self.complete) <= self.rejected:
            return f"none but rejected ones are left of {sorted(promised.saved)}"
        if back := failed.intersection(self.complete):
            return f"the steps {sorted(back)} came back, of which one rank never had its part"
        return None


class Uneven(WrappingWriter):
    """Lets some operations take so long that other ranks, and newer checkpoints, overtake.

    The third operation of the kind that ``fails``, to a file whose name begins so, does nothing and fails.
    """

    def __init__(self, disk: CrashDisk, seed: int, fails: tuple[str, str] | None) -> None:
        super().__init__(CrashWriter(disk, seed=seed))
        self._rng = random.Random(seed)
        self._fails = fails
        self._until_failure = 3

    async def perform(self, access: Access, call: Callable[[], Awaitable[Any]]) -> Any:
        if access.kind in ("write", "flush"):
            await asyncio.sleep(self._rng.choice((0, 0, 0.001, 0.004)))
        if self._fails is not None and access.kind == self._fails[0] and access.name.startswith(self._fails[1]):
            self._until_failure -= 1
            if self._until_failure == 0:
                raise WriteError(errno.EIO, "planted", access.name)
        return await call()


class Exploration:
    """One scenario on its way, and what was found."""

    def __init__(self, scenario: Scenario, root: Path) -> None:
        self.scenario = scenario
        self.verdicts: dict[tuple[bytes, ...], Verdict] = {}
        """By the digests of the disks."""
        self.events: Counter[str] = Counter()
        self.violations: list[str] = []
        self._root = root
        self._rng = random.Random(scenario.seed)
        self._steps = itertools.count()
        self._folders = itertools.count()
        self._failed: set[int] = set()
        self._seen: dict[tuple[int, bytes], Seen] = {}

    def run(self) -> Exploration:
        """Live, fail the power at every cut, and live on from one of them."""
        last: Recording | None = None
        while True:
            for life in self.scenario.lives:
                disks, promised = self._end(last, life.before)
                last = self._live(life, disks, promised)
                self._judge(last)
                if self.violations:
                    return self
            if len(self.verdicts) >= self.scenario.states:
                return self
            last = None

    def summary(self) -> str:
        told = ", ".join(f"{count} {what}" for what, count in sorted(self.events.items()))
        images = f"{len(self.verdicts)} distinct images of {self.scenario.world} disks"
        return f"{images}; {told}; {len(self.violations)} violations"

    # -- one life

    def _live(self, life: Life, disks: list[dict[int, CrashDisk]], promised: Promises) -> Recording:
        recording = Recording(self.scenario.world, life, disks, promised)
        root, steps = self._folder(), list(itertools.islice(self._steps, life.steps))
        seeds = [self._rng.randrange(1 << 30) for _ in recording.nodes]

        async def be(group: Group, path: Path) -> None:
            (path / rank_name(group.rank)).mkdir(parents=True)
            fails = {life.fails: ("write", "slot"), life.latches: ("flush", COMMIT_NAME)}.get(group.rank)
            medium = Uneven(recording.disk(path / rank_name(group.rank)), seeds[group.rank], fails)
            engine = self._engine(path, group, io=medium)
            with suppress(*(() if life.latches is None else (CheckpointError,))):
                async with engine:
                    await restore(engine, group.rank)
                    await self._save(engine, group.rank, steps, life, recording.acknowledge)

        with recording.listening():
            self._run_ranks(root, recording.nodes, be)
        self.events["commits"] += len(recording.commits)
        self.events["lives"] += 1
        return recording

    def _folder(self) -> Path:
        return self._root / str(next(self._folders))

    def _engine(self, path: Path, group: Group, **options: Any) -> CheckpointEngine:
        storage = StorageOptions(chunk_bytes=2 * BLOCK, host_memory=8 * BLOCK, **options)
        keep_last = self.scenario.keep_last
        return CheckpointEngine(path, group=group, max_in_flight=2, keep_last=keep_last, storage=storage)

    def _run_ranks(self, root: Path, nodes: Cut, be: Callable[[Group, Path], Any]) -> list[Any]:
        """Run every rank on a thread of its own; return what each returned, or raise what one raised."""
        meeting, world = HashStore(), self.scenario.world

        def run_one(rank: int) -> Any:
            return asyncio.run(be(Group(rank, world, meeting, timeout=PATIENCE), root / str(nodes[rank]) / "run"))

        with ThreadPoolExecutor(world) as ranks:
            return list(ranks.map(run_one, range(world)))

    async def _save(
        self,
        engine: CheckpointEngine,
        rank: int,
        steps: Iterable[int],
        life: Life,
        acknowledge: Callable[[int, Promises], None],
    ) -> None:
        async def wait(step: int, pending: Any) -> None:
            try:
                info = await pending.durable()
            except CheckpointError as error:
                self.events["failed on a rank"] += 1
                if isinstance(error, WriteError) and not isinstance(error, StoreFailedError):
                    self._failed.add(step)
            else:
                saved = frozenset(() if pending.superseded else (step,))
                acknowledge(rank, Promises(frozenset((info.step,)), saved))

        async with asyncio.TaskGroup() as waiting:
            for index, step in enumerate(steps):
                state, metadata = state_of(number_of(step, rank)), metadata_of(step)
                try:
                    pending = await engine.checkpoint(state, step=step, metadata=metadata)
                except CheckpointError:
                    self.events["refused on a rank"] += 1
                    break  # a store takes no more commits
                saved = waiting.create_task(wait(step, pending))
                if index == life.pin:
                    await saved
                    await engine.pin(step=step)
                    acknowledge(rank, Promises(pinned=frozenset((step,))))
                if index == life.reject:
                    await saved
                    acknowledge(rank, Promises(given_up=frozenset((step,))))
                    assert [info.step for info in await engine.reject(step=step)] == [step]
                    acknowledge(rank, Promises(rejected=frozenset((step,))))
                    self.events["rejected on a rank"] += 1

    def _end(self, last: Recording | None, how: str) -> tuple[list[dict[int, CrashDisk]], Promises]:
        """Return the disks as the next life finds them, and what was promised by then."""
        if last is None:
            return [{} for _ in range(self.scenario.world)], Promises()
        cut: Cut = tuple(len(moments) - 1 for moments in last.moments)
        if how != "left":
            cuts = list(last.cuts(self._rng, 100))
            flushing = [cut for cut in cuts if any(one.what == "flush commit submitted" for one in last.at(cut))]
            cut = self._rng.choice(flushing if flushing and how == "flushing" else cuts)
        disks: list[dict[int, CrashDisk]] = []
        for moment in last.at(cut):
            fate = self._rng.choice(("killed", "power")) if how == "mixed" else how
            if fate == "power":
                left = self._power_loss(moment)
                disks.append({rank: CrashDisk.from_image(image, block_bytes=BLOCK) for rank, image in left.items()})
            else:
                there = {rank: states[-1] for rank, states in moment.disks.items()}
                disks.append({
                    rank: CrashDisk.after_process_death(state, rng=self._rng, lingering=self._rng.choice((0, 0, 12)))
                    for rank, state in there.items() if state is not None
                })  # fmt: skip
        return disks, Promises.joined(moment.promised for moment in last.at(cut))

    def _power_loss(self, moment: Moment) -> dict[int, Image]:
        """Return one image of every disk of a node."""
        chosen = {rank: self._rng.choice(states) for rank, states in moment.disks.items()}
        return {
            rank: self._rng.choice(list(power_loss_images(state, sector=SECTORS[0], limit=6, rng=self._rng)))
            for rank, state in chosen.items()
            if state is not None
        }

    # -- what is left of it

    def _judge(self, recording: Recording) -> None:
        cuts = list(dict.fromkeys(recording.cuts(self._rng, self.scenario.cuts)))
        self.events["cuts"] += len(cuts)
        pools: dict[int, list[Seen]] = {}
        for cut in cuts:
            moments = recording.at(cut)
            promised = Promises.joined(moment.promised for moment in moments)
            there = [
                (node, [seen for state in states for seen in self._pool(rank, state, pools)])
                for node, moment in enumerate(moments)
                for rank, states in moment.disks.items()
            ]
            for count in range(self.scenario.images):
                # First nothing survives that is not flushed, then all of it, then anything.
                chosen = [
                    (node, pool[count % len(pool)] if count < 2 else self._rng.choice(pool)) for node, pool in there
                ]
                digests = tuple(seen.digest for _, seen in chosen)
                if digests not in self.verdicts:
                    self.verdicts[digests] = Verdict.of(chosen, self.scenario.world)
                self._note(self.verdicts[digests].trouble(promised, self._failed, self.scenario.keep_last), moments)
            if len(self.violations) >= 5:
                return
        for cut in self._rng.sample(cuts, min(len(cuts), self.scenario.reopened)):
            moments = recording.at(cut)
            promised = Promises.joined(moment.promised for moment in moments)
            self._note(self._reopen(moments, recording.nodes, promised), moments)

    def _note(self, trouble: str | None, moments: Iterable[Moment]) -> None:
        if trouble is not None:
            self.violations.append(f"{trouble}; the power fails after {[moment.what for moment in moments]}")

    def _pool(self, rank: int, state: DiskSnapshot | None, pools: dict[int, list[Seen]]) -> list[Seen]:
        """Return what an opening sees of a disk after a power loss; an image that was read is not read again."""
        if state is None:
            return [Seen(b"")]
        if id(state) not in pools:
            pools[id(state)] = pool = []
            sector, most = self._rng.choice(SECTORS), self.scenario.images
            for image in power_loss_images(state, sector=sector, limit=most, rng=self._rng):
                if (rank, image.digest) not in self._seen:
                    try:
                        self._seen[rank, image.digest] = Seen.of(rank, image)
                    except CheckpointError as error:
                        self.violations.append(f"the store of rank {rank} after {state.boundary}: {error}")
                        self._seen[rank, image.digest] = Seen(image.digest)
                pool.append(self._seen[rank, image.digest])
        return pools[id(state)]

    def _reopen(self, moments: Sequence[Moment], nodes: Cut, promised: Promises) -> str | None:
        """Put an image into folders, let engines restore and save there, and say what is wrong."""
        self.events["reopened"] += 1
        root, step, keep_last = self._folder(), next(self._steps), self.scenario.keep_last
        for node, moment in enumerate(moments):
            for rank, image in self._power_loss(moment).items():
                folder = root / str(node) / "run" / rank_name(rank)
                folder.mkdir(parents=True)
                for name, content in image.files.items():
                    (folder / name).write_bytes(content)
        found = self._found_in(root)
        if trouble := found.trouble(promised, self._failed, keep_last):
            return trouble
        acknowledged = Promises()

        def acknowledge(_: int, more: Promises) -> None:
            nonlocal acknowledged
            acknowledged = more

        async def be(group: Group, path: Path) -> int | None:
            async with self._engine(path, group) as engine:
                restored = await restore(engine, group.rank)
                await self._save(engine, group.rank, [step], Life(), acknowledge)
                return restored

        try:
            restored = self._run_ranks(root, nodes, be)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the exploration looks for
            return f"reopening fails: {error!r}"
        if set(restored) != {found.newest} or acknowledged.newest != step:
            return f"of {found.complete} the ranks restored {restored}; {acknowledged} after step {step}"
        after = Promises.joined((promised._replace(saved=frozenset()), acknowledged))
        return self._found_in(root).trouble(after, self._failed, keep_last)

    def _found_in(self, root: Path) -> Verdict:
        there = [
            (node, Seen.of(rank, Image.of({path.name: path.read_bytes() for path in folder.iterdir()})))
            for node in range(self.scenario.world)
            for rank, folder in rank_folders(root / str(node) / "run").items()
        ]
        return Verdict.of(there, self.scenario.world)


class _FolderOfDisks(Files):
    """A group's folder on a node: the disks of its ranks in memory, and true folders, for what ranks receive."""

    def __init__(self, disk: Callable[[Path], CrashDisk], path: Path, *arguments: Any) -> None:
        super().__init__(path, *arguments)
        self._place = path
        self._disk = disk
        self._disks_of: dict[File, Medium] = {}

    def _writer(self, name: str) -> tuple[Medium, str] | None:
        folder, _, within = name.partition("/")
        if os.path.lexists(self._place / name) or not within:
            return None
        return CrashWriter(self._disk(self._place / folder), read_only=True), within

    async def read_small(self, name: str) -> bytes | None:
        found = self._writer(name)
        return await (super().read_small(name) if found is None else found[0].read_small(found[1]))

    async def open(self, name: str, *, writable: bool) -> File:
        if (found := self._writer(name)) is None:
            return await super().open(name, writable=writable)
        file = await found[0].open(found[1], writable=writable)
        self._disks_of[file] = found[0]
        return file

    async def read(self, file: File, offset: int, into: memoryview) -> int:
        medium = self._disks_of.get(file)
        return await (super().read(file, offset, into) if medium is None else medium.read(file, offset, into))

    async def lock(self, file: File, *, shared: bool = False) -> bool:
        medium = self._disks_of.get(file)
        return await (super().lock(file, shared=shared) if medium is None else medium.lock(file, shared=shared))

    async def close(self, file: File | None = None) -> None:
        for each in [*self._disks_of] if file is None else [file]:
            if (medium := self._disks_of.pop(each, None)) is not None:
                await medium.close(each)
                if each is file:
                    return
        await super().close(file)


async def restore(engine: CheckpointEngine, rank: int) -> int | None:
    """Restore the newest checkpoint as a trainer would, and compare; return its step."""
    info = engine.latest
    live: dict[str, Any] = {} if info is None else {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1
        for name, value in state_of(number_of(info.step, rank)).items()
    }  # fmt: skip
    restored = await engine.restore(live)
    assert restored is None or is_state_of(live, number_of(restored.step, rank)), restored
    return None if restored is None else restored.step


def explore(scenario: Scenario, root: Path) -> Exploration:
    """Run ``scenario`` and judge every power loss drawn from it; ``root`` is for the files of engines."""
    try:
        return Exploration(scenario, root).run()
    finally:
        gc.collect()  # stores of closed engines: no thread of theirs is to look names up while other tests fork
