"""Changes to a shelf on a disk in memory; a crash on the way must leave what some transaction left, and all of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pccheck_async import CheckpointError, Shelf
from pccheck_async.errors import StoreFullError
from pccheck_async.shelf.shelf import empty_shelf
from pccheck_async.testing import ATOM, CrashDisk, CrashShelfFile, DiskSnapshot, Image, power_loss_images
from tests.support.state_strategies import difference

State = dict[str, Any]
NAMES = ("a", "b", "c", "d")
PAGES = 14


class Died(BaseException):
    """The process ends here."""


class Undone(BaseException):
    """The transaction is to be aborted."""


@dataclass(frozen=True)
class Course:
    """What is done, and how closely it is looked at.

    Attributes:
        seed: Decides everything.
        durable: Whether the file is persistent memory; else the kernel flushes it.
        changes: Transactions of each life.
        lives: Processes, each but the last of which dies somewhere, maybe in its recovery.
        images: Power losses drawn at each boundary.
        file: Where a mistake may be planted,
        shelf: or here.
        enough: Violations after which to look no further.
    """

    seed: int
    durable: bool = True
    changes: int = 8
    lives: int = 4
    images: int = 6
    file: type[CrashShelfFile] = CrashShelfFile
    shelf: type[Shelf] = Shelf
    enough: int = 3


@dataclass
class Findings:
    """What was seen."""

    images: set[bytes] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """Say it in one line."""
        return f"{len(self.images)} distinct images, {len(self.violations)} violations, {dict(self.events)}"


class Explorer:
    """One course. ``allowed`` is what may be found after a crash now: the last state, at a commit also the next."""

    def __init__(self, course: Course, findings: Findings) -> None:
        self.course, self.findings = course, findings
        self.random = random.Random(course.seed)
        self.state: State = {}
        self.allowed: list[State] = [self.state]
        self.countdown = 0  # boundaries until the process dies; 0: it does not
        self.last: DiskSnapshot | None = None
        self.value = 0

    def run(self) -> Findings:
        size, head = empty_shelf(PAGES * 4096)
        disk = CrashDisk.from_image(Image.of({"shelf": head + bytes(size - len(head))}), block_bytes=1)
        for life in range(self.course.lives):
            dies = life < self.course.lives - 1
            self.countdown = self.random.choice((self.random.randint(1, 3), self.random.randint(3, 150))) if dies else 0
            disk.observer = self.look
            try:
                self.live(disk)
            except Died:
                assert self.last is not None
                self.findings.events["deaths"] += 1
                disk = CrashDisk.after_process_death(self.last, rng=self.random, sector=ATOM)
            if len(self.findings.violations) >= self.course.enough:
                break
        return self.findings

    # -- what is seen

    def look(self, snapshot: DiskSnapshot) -> None:
        """Draw power losses at a boundary; die, where it is time."""
        if self.countdown < 0:
            return  # dead: what Python still does on its way out happens to nobody
        self.last = snapshot
        for image in power_loss_images(snapshot, sector=ATOM, limit=self.course.images, rng=self.random):
            if image.digest not in self.findings.images and len(self.findings.violations) < self.course.enough:
                self.findings.images.add(image.digest)
                if trouble := self.trouble(image):
                    self.findings.violations.append(f"seed {self.course.seed}, {snapshot.boundary}: {trouble}")
        self.countdown -= self.countdown > 0
        if self.countdown == 0 and self.course.lives > 1 and self.dying:
            self.countdown = -1
            raise Died

    @property
    def dying(self) -> bool:
        return self._dies

    _dies = False

    def trouble(self, image: Image) -> str:
        """What is wrong with a shelf after a power loss; empty where nothing is."""
        try:
            shelf = Shelf.on(CrashShelfFile(CrashDisk.from_image(image, block_bytes=1)))
            found = dict(shelf)
            if not any(_same(found, state) for state in self.allowed):
                return f"found {difference(found, self.allowed[-1])}"
            if unwhole := shelf.verify():
                return f"{unwhole} fail their checksums"
            if self.random.random() < 0.02:
                with suppress(StoreFullError):
                    shelf["after"] = np.ones(5)
                    shelf[NAMES[0]] = np.ones(700)
                rest = {name: value for name, value in dict(shelf).items() if name in found and name != NAMES[0]}
                return difference({name: found[name] for name in rest}, rest)
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    # -- what is done

    def live(self, disk: CrashDisk) -> None:
        """Recover, and make changes until the end, or death."""
        self._dies = self.countdown > 0
        file = self.course.file(disk, durable=self.course.durable)
        shelf = self.course.shelf.on(file)
        found = dict(shelf)
        if not any(_same(found, state) for state in self.allowed):
            self.findings.violations.append(f"seed {self.course.seed}, after a death: {difference(found, self.state)}")
        self.state = _copy(found)
        self.allowed = [self.state]
        for _ in range(self.course.changes):
            with self.committing(shelf):
                self.change(shelf, file)
        shelf.close()

    @contextmanager
    def committing(self, shelf: Shelf) -> Iterator[None]:
        """One transaction, the outermost or an assignment of its own: before and after, one state is allowed."""
        self.next: State = _copy(self.state)
        yield
        if not _same(dict(shelf), self.next):
            self.findings.violations.append(f"seed {self.course.seed}, live: {difference(dict(shelf), self.next)}")
        self.state, self.allowed = self.next, [self.next]

    def change(self, shelf: Shelf, file: CrashShelfFile) -> None:
        match self.random.randrange(8):
            case 0:
                self.assign(shelf, alone=True)
            case 1 if self.state:
                name = self.random.choice([*self.state])
                self.next.pop(name)
                self.allowed = [self.state, self.next]
                del shelf[name]
                self.findings.events["deletions"] += 1
            case 2 if shelf.nbytes < 2 * PAGES * 4096:
                shelf.grow(shelf.nbytes + 4096 * self.random.randint(1, 4))
                self.findings.events["growths"] += 1
            case _:
                self.transaction(shelf, file)

    def transaction(self, shelf: Shelf, file: CrashShelfFile) -> None:
        """Several changes as one, a nested one among them maybe; undone maybe."""
        before = _copy(self.state)
        try:
            with self.entered(shelf, file, depth=1):
                self.allowed = [self.state, self.next]  # from here on it is committed
            self.findings.events["commits"] += 1
        except (Undone, StoreFullError) as error:
            self.next = before
            self.findings.events[f"aborts by {type(error).__name__}"] += 1

    @contextmanager
    def entered(self, shelf: Shelf, file: CrashShelfFile, depth: int) -> Iterator[None]:
        arrays = [name for name, value in self.next.items() if isinstance(value, np.ndarray | dict)]
        names = self.random.sample(arrays, self.random.randint(0, len(arrays)))
        with shelf.transaction(*names):
            for name in names:
                self.store_into(shelf, file, name)
            while self.random.random() < 0.4:
                name = self.assign(shelf)
                if isinstance(self.next.get(name), np.ndarray | dict) and self.random.random() < 0.3:
                    self.store_into(shelf, file, name)
            if depth < 3 and self.random.random() < 0.4:
                before = _copy(self.next)
                try:
                    with self.entered(shelf, file, depth + 1):
                        pass
                except (Undone, StoreFullError):
                    self.next = before
            if self.random.random() < 0.2:
                raise Undone
            yield

    def store_into(self, shelf: Shelf, file: CrashShelfFile, name: str) -> None:
        """Change an array in place."""
        value = shelf[name]
        array = value if isinstance(value, np.ndarray) else value["w"]
        for _ in range(self.random.randint(1, 3)):
            low = self.random.randrange(len(array))
            self.value += 1
            array[low : low + self.random.choice((1, 2, 40))] = self.value
            if self.random.random() < 0.5:
                file.notice()
                file.disk.boundary("stored by the user")
        if isinstance(value, dict):
            value["n"] = self.value
        self.next[name] = _copy(value)

    def assign(self, shelf: Shelf, *, alone: bool = False) -> str:
        """Assign something to something; return its name, "" where there was no space."""
        self.value += 1
        name = self.random.choice(NAMES)
        before = self.next.get(name)
        elements = self.random.choice((3, 70, 200, 520))
        kinds = (
            np.full(elements, float(self.value)),
            {"w": np.full(elements, self.value), "n": self.value},
            self.value,
        )
        self.next[name] = self.random.choice(kinds)
        if alone:
            self.allowed = [self.state, self.next]
        try:
            shelf[name] = self.next[name]
            self.next[name] = _copy(self.next[name])
            return name
        except StoreFullError:
            if before is None:
                del self.next[name]
            else:
                self.next[name] = before
            self.findings.events["full"] += 1
            return ""


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def _same(one: Any, other: Any) -> bool:
    """What :func:`difference` is empty for, of the values that are drawn here: quicker."""
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(_same(each, other[key]) for key, each in one.items())
        )
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return type(one) is type(other) and bool(one == other)


def explore(course: Course, findings: Findings | None = None) -> Findings:
    """Run one course, adding to what others found."""
    return Explorer(course, findings or Findings()).run()
