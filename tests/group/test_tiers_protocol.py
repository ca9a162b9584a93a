"""Both tiers of a group in random histories of the real protocol, and every rule that joins them broken once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from pccheck_async.format import Entry, Line, Link
from pccheck_async.group import coordinator, view
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.messages import Copied, Failed, Round, Start
from pccheck_async.group.parts import Key, Part, Run, SeenStore
from pccheck_async.group.rounds import LeadRounds
from pccheck_async.group.view import View
from pccheck_async.store import Retention
from tests.support.tiers_explorer import MEMORY, Side, World, explore

pytestmark = pytest.mark.slow

ONE_HOST = World(hosts=(0, 0), goes_back=False, without_memory=False)
HOSTS = World(hosts=(0, 1), goes_back=False, without_memory=False)
WORLDS = {
    "one host": ONE_HOST,
    "two hosts": HOSTS,
    "runs go back": World(hosts=(0, 1), without_memory=False),
    "runs without memory": World(hosts=(0, 0), goes_back=False, loses_memory=False),
    "three ranks or two, all of it": World(hosts=(0, 1, 1), worlds=(2, 3)),
    "two are kept": World(hosts=(0, 1), keep=2),
    "copies": World(hosts=(0, 1), goes_back=False, without_memory=False, replicas=1),
    "copies on three hosts": World(hosts=(0, 1, 2), worlds=(3,), without_memory=False, replicas=1),
    "copies, all of it": World(hosts=(0, 1, 1), worlds=(2, 3), replicas=1),
}
SUITE = ["two hosts", "copies", "copies, all of it"]
"""The worlds that are explored outside the campaign, too."""


@pytest.mark.parametrize("world", [WORLDS[name] for name in SUITE], ids=SUITE)
def test_every_history_keeps_what_is_promised(world: World) -> None:
    broken, reached = explore(world, 600)
    assert not broken, next(iter(broken.values())).told()
    wanted = {"Start", "Commit 0", "Commit 1", "restored from [1]", "restored from [0, 1]", "ended", "saved late"}
    assert wanted <= reached
    if world.replicas:
        assert {"a round ended", "a round failed", "a host is lost, and there are copies"} <= reached
    if len({*world.hosts}) > 1:
        assert "restored from both together" in reached


def test_a_report_about_a_round_that_has_failed_does_not_count_in_the_next_one() -> None:
    """The slow rank's copies of the next checkpoint are not there yet: a host that is lost now would take it."""
    run = Run(1, 2, 3)
    lead = LeadRounds(2)
    assert lead.begin(Key(1, run), 1) is not None
    assert lead.receive(Copied(0, 0, "no connection")) is not None
    second = lead.begin(Key(2, run), 2)
    assert lead.receive(Copied(1, 0)) is None
    assert lead.receive(Copied(0, 1)) is None
    assert lead.floor is None
    assert lead.receive(Copied(1, 1)) == second
    assert lead.floor == Key(2, run)


def test_the_end_of_a_round_leaves_the_checkpoint_that_a_restore_reads() -> None:
    run = Run(1, 2, 3)
    lead = Coordinator(2, Retention(), 2, replicas=1)
    lead.run, lead.restore.candidate = run, Key(1, run)
    lead.committed = {
        counter: (run, Entry(counter, counter, 0.0, 0, counter, 0, 0, 0, False, {})) for counter in (1, 2)
    }
    assert lead.rounds.begin(Key(2, run), 2) is not None
    assert not lead.receive(Copied(0, 0))
    assert lead.receive(Copied(1, 0))
    assert lead.committed.keys() == {1, 2}


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_campaign(world: World) -> None:
    broken, _ = explore(world, 8_000, seed=1)
    assert not broken, next(iter(broken.values())).told()


def _all_count(stores: Sequence[SeenStore], line: Line | None) -> Sequence[SeenStore]:
    return [replace_parts(store) for store in stores]


def replace_parts(store: SeenStore) -> SeenStore:
    return SeenStore(store.domain, store.rank, store.store_id, None, store.parts)


def _starts_empty(self: Coordinator, disk: Coordinator, seen: View) -> Start:
    start = _start_in_memory(self, disk, seen)
    self.committed = {}
    return Start(start.run, (), ())


def _fails_both(self: Coordinator, message: Failed) -> list[Any]:
    decisions = _receive_failed(self, message)
    other = self.memory or self.disk
    if other is not None and message.counter not in other.settled:
        also = _receive_failed(other, message)
        decisions += coordinator._in_memory(also) if self.memory is not None else []
    return decisions


def _base_on_disk(stores: Sequence[SeenStore], complete: Sequence[object]) -> int:
    """In memory, stores have none of their marks of applied decisions."""
    return max((part.entry.counter for store in stores if store.line for part in store.parts), default=-1)


def _forgets_chain(before: Line | None, run: bytes, base: int, came_from: Link | None) -> Line:
    return Line(run, base)


def _number_without_lines(stores: Sequence[SeenStore]) -> int:
    return 1 + max((run.number for store in stores for run in store.runs), default=0)


_start_in_memory, _receive_failed = Coordinator._start_in_memory, Coordinator._receive_failed


class Mutant(NamedTuple):
    name: str
    breaks: set[str]
    world: World
    owner: Any
    attribute: str
    wrong: Callable[..., Any] | property


COPIES = World(hosts=(0, 1, 2), worlds=(3,), goes_back=False, without_memory=False, loses_records=False, replicas=1)


def _own_pace(self: Side, running: Round, taker: Side) -> Part | None:
    """Each rank sends the newest that it has, and not what the round is about."""
    parts = self.run.history.visible[MEMORY][self.rank].parts
    return max((part for part in parts if part.key in self.member.keep), key=lambda part: part.key, default=None)


MUTANTS = [
    Mutant("all memory counts", {"BRANCH"}, replace(HOSTS, goes_back=True), view, "on_the_line", _all_count),
    Mutant("no chain", {"MEMORY"}, ONE_HOST, Line, "begin", _forgets_chain),
    Mutant("a part on disk of what was restored is dropped", {"MEMORY"}, HOSTS, Coordinator, "_came_from_in_part",
           lambda self, view: ()),
    Mutant("counters of memory are not looked at", {"RECORD"}, replace(HOSTS, goes_back=True), view, "base_counter",
           _base_on_disk),
    Mutant("memory begins without what was restored", {"MEMORY"}, ONE_HOST, Coordinator, "_start_in_memory",
           _starts_empty),
    Mutant("a failure fails both tiers", {"CROSS"}, ONE_HOST, Coordinator, "_receive_failed", _fails_both),
    Mutant("runs that wrote no more than a line have no number", {"MEMORY", "BRANCH"},
           replace(HOSTS, goes_back=True), view, "run_number", _number_without_lines),
    Mutant("the floor and the running round are not kept", {"MEMORY", "COPIES"}, COPIES, LeadRounds, "kept",
           property(lambda self: set())),
    Mutant("a round ends with the first vote", {"MEMORY", "COPIES"}, COPIES, LeadRounds, "_is_complete",
           lambda self: bool(self.votes)),
    Mutant("each pair copies at its own pace", {"MEMORY", "COPIES"}, COPIES, Side, "part_to_send", _own_pace),
    Mutant("a restart forgets the floor", {"MEMORY"}, COPIES, Coordinator, "_floor_found", lambda *_: []),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_broken_rule_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
    for seed in range(40):
        broken, _ = explore(mutant.world, 50, seed)
        if broken.keys() & mutant.breaks:
            return
    pytest.fail(f"nothing found: {mutant.name}")
