"""Power losses and deaths inside transactions of a shelf: all or nothing; and mistakes that have to be found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import pytest

from pccheck_async import Shelf
from pccheck_async.shelf import format as layout
from pccheck_async.shelf.format import Extent, Variable
from pccheck_async.shelf.shelf import Layer
from pccheck_async.shelf.space import Space
from pccheck_async.testing import CrashMapping, CrashShelfFile
from tests.support.mapping_mistakes import FencedTooEarly, NothingFenced, NothingWrittenBack, OneLineShort
from tests.support.shelf_harness import Course, Findings, explore

pytestmark = pytest.mark.slow

IMAGES = 2000
FEW = 3
"""Power losses at each boundary, so that there are many boundaries among them; the campaign draws more."""
KINDS = pytest.mark.parametrize("durable", [True, False], ids=["written back", "flushed"])
SEEDS = 40
FIRST = 5
"""The first of the courses that find the mistake that is found most rarely."""


EVENTS = ("commits", "deaths", "growths", "deletions", "full", "aborts by Undone")
MOST = 500
"""Most courses of a campaign: the rarest of the events, a full shelf, comes about once in fifty."""


def many(
    durable: bool, images: int, first: int, drawn: int = Course.images, events: Sequence[str] = EVENTS[:2]
) -> Findings:
    """Explore courses until so many images were looked at, and each of these events occurred."""
    findings, seed = Findings(), first
    while len(findings.images) < images or not all(findings.events[event] for event in events):
        if findings.violations or seed - first == MOST:
            break
        explore(Course(seed, durable=durable, images=drawn), findings)
        seed += 1
    print(f"\n  {seed - first} courses: {findings.summary()}")
    return findings


@KINDS
def test_no_crash_breaks_a_transaction(durable: bool) -> None:
    findings = many(durable, IMAGES, 0, FEW)
    assert not findings.violations, "\n".join(findings.violations)
    assert findings.events["commits"] > 0
    assert findings.events["deaths"] > 0


@pytest.mark.campaign
@KINDS
def test_thirty_thousand_crashes_of_a_kind(durable: bool) -> None:
    findings = many(durable, int(os.environ.get("PCCHECK_IMAGES", "30000")), 1000, events=EVENTS)
    assert not findings.violations, "\n".join(findings.violations)
    for event in EVENTS:
        assert findings.events[event] > 0, event


# -- mistakes in how bytes become durable


class ContentsNotPersisted(CrashShelfFile):
    def persist(self, offset: int, nbytes: int) -> None:
        if nbytes == layout.ROOT.size or self._storing:
            super().persist(offset, nbytes)

    _storing = False

    def store(self, offset: int, data: memoryview) -> None:
        self._storing = True
        super().store(offset, data)
        self._storing = False


class NewContentsNotPersisted(CrashShelfFile):
    def store(self, offset: int, data: memoryview) -> None:
        if len(data) == layout.ROOT.size or bytes(data[:1]) == b"\x92":  # an array of two, as every directory is
            super().store(offset, data)
        else:
            self.put(offset, data)


class DirectoryNotPersisted(CrashShelfFile):
    def store(self, offset: int, data: memoryview) -> None:
        if len(data) == layout.ROOT.size:
            super().store(offset, data)
        else:
            self.put(offset, data)


class RootNotPersisted(CrashShelfFile):
    def store(self, offset: int, data: memoryview) -> None:
        if len(data) == layout.ROOT.size:
            self.put(offset, data)
        else:
            super().store(offset, data)


class NotFlushedBeforeTheRoot(CrashShelfFile):
    _stored_root = False

    def store(self, offset: int, data: memoryview) -> None:
        self._stored_root = len(data) == layout.ROOT.size
        super().store(offset, data)

    def flush(self) -> None:
        if self._stored_root:
            super().flush()


class NotFlushedAfterTheRoot(NotFlushedBeforeTheRoot):
    def flush(self) -> None:
        if not self._stored_root:
            CrashShelfFile.flush(self)


class Unsettled(CrashShelfFile):
    def map(self, nbytes: int) -> None:
        self.nbytes = nbytes


def with_mapping(mapping: type[CrashMapping]) -> type[CrashShelfFile]:
    return type(mapping.__name__, (CrashShelfFile,), {"mapping_type": mapping})


# -- mistakes in what a transaction does


class WithoutShadowCopy(Shelf):
    def _protect(self, layer: Layer, name: str) -> None:
        """In place: what the root in force names is stored to."""


class WindowNotMoved(Shelf):
    """There is a copy, and the user stores into the original."""

    def _protect(self, layer: Layer, name: str) -> None:
        live = self._live.pop(name, None)
        super()._protect(layer, name)
        if live is not None:
            self._live[name] = live


class StoredOnce(Shelf):
    """What is stored into a new array before the commit is neither written back nor in the checksum."""

    def _used(self, name: str, variable: Variable) -> Variable:
        return variable


class FreedTooEarly(Shelf):
    """Space of what a transaction replaces is used again before its commit."""

    def _change(self, layer: Layer, name: str, variable: Variable | None) -> None:
        super()._change(layer, name, variable)
        self._space.__class__ = LenientSpace
        if name in self._committed:
            self._space.give(self._extent(self._committed[name]))


class LenientSpace(Space):
    def give(self, extent: Extent) -> None:
        with suppress(ValueError):
            super().give(extent)


@pytest.mark.parametrize(
    ("mistake", "durable"),
    [
        *((with_mapping(each), True) for each in (NothingWrittenBack, OneLineShort, NothingFenced, FencedTooEarly)),
        *(
            (each, True)
            for each in (ContentsNotPersisted, NewContentsNotPersisted, DirectoryNotPersisted, RootNotPersisted)
        ),
        *((each, False) for each in (NotFlushedBeforeTheRoot, NotFlushedAfterTheRoot, Unsettled)),
        (Unsettled, True),
        *((each, True) for each in (WithoutShadowCopy, WindowNotMoved, StoredOnce, FreedTooEarly)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "written back" if value else "flushed",
)
def test_a_mistake_is_found(mistake: type[CrashShelfFile] | type[Shelf], durable: bool) -> None:
    for seed in range(FIRST, FIRST + SEEDS):
        where = {"shelf" if issubclass(mistake, Shelf) else "file": mistake}
        findings = explore(Course(seed, durable=durable, enough=1, **where))  # type: ignore[arg-type]
        if findings.violations:
            print(f"\n  course {seed}: {findings.violations[0]}")
            return
    pytest.fail(f"{SEEDS} courses found nothing")


def test_a_root_whose_checksum_is_not_verified_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "root_checksum", lambda header, body: 0)
    assert any(explore(Course(seed, enough=1)).violations for seed in range(SEEDS))


def test_roots_that_take_turns_nowhere_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout.Header, "place", lambda header, sequence: header.page_bytes)
    assert any(explore(Course(seed, enough=1)).violations for seed in range(SEEDS))
