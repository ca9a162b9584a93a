"""What members and the coordinator say in single situations; what they do together is in test_protocol."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from pccheck_async import Keep
from pccheck_async.format import Entry
from pccheck_async.format.record import MOST_ENTRIES
from pccheck_async.group import (
    Applied,
    Coordinator,
    Key,
    Member,
    Part,
    Run,
    SeenStore,
    decode_decision,
    decode_message,
    encode,
)
from pccheck_async.group.actions import (
    Action,
    Admit,
    Cancel,
    ChangeState,
    EndRestore,
    Free,
    MatchManifest,
    Post,
    Ready,
    Resolve,
    ResolveChange,
    Scan,
    TakeOver,
    Unopened,
    WriteRecord,
)
from pccheck_async.group.control import name_slow_ranks
from pccheck_async.group.messages import (
    VERSION,
    Abort,
    AnyDecision,
    AnyMessage,
    Change,
    Commit,
    Compare,
    Digests,
    Found,
    Hello,
    Ok,
    Refused,
    Start,
)
from pccheck_async.group.parts import members_digest
from pccheck_async.group.restore import Restore
from pccheck_async.store import Retention

T = TypeVar("T")


class Group:
    """Members and a coordinator whose operations end when a test says so; messages arrive at once."""

    def __init__(
        self, world: int = 2, retention: Retention | None = None, *, max_in_flight: int = 2,
        stores: Sequence[SeenStore] = (), domains: Sequence[str] | None = None, settings: Sequence[str] | None = None,
        order: Callable[[list[int]], None] = lambda ranks: None,
    ) -> None:  # fmt: skip
        retention = retention or Retention()
        self.coordinator = Coordinator(world, retention, nonce=7)
        self.domains, self.stores = domains or ["d"] * world, stores
        self.members = [
            Member(rank, world, max_in_flight=max_in_flight, reserved=retention.reserved, own=self.own(rank))
            for rank in range(world)
        ]
        self.log: list[bytes] = []
        self.done: list[list[Action]] = [[] for _ in range(world)]
        ranks = list(range(world))
        order(ranks)
        for rank in ranks:
            said = "" if settings is None else settings[rank]
            self.carry_out(rank, self.members[rank].hello(domain=self.domains[rank], host=f"h{rank}", settings=said))
        self.deliver(order)

    def own(self, rank: int) -> SeenStore | None:
        domain = list(dict.fromkeys(self.domains)).index(self.domains[rank])
        return next((one for one in self.stores if (one.domain, one.rank) == (domain, rank)), None)

    def carry_out(self, rank: int, actions: Sequence[Action]) -> None:
        for action in actions:
            self.done[rank].append(action)
            match action:
                case Post():
                    for decision in self.coordinator.receive(decode_message(encode(action.message))):
                        self.log.append(encode(decision))
                case Scan():
                    home = self.members[rank].homes[rank]
                    self.carry_out(rank, self.members[rank].found([one for one in self.stores if one.domain == home]))
                case TakeOver():
                    self.carry_out(rank, self.members[rank].took_over(f"store {rank}".encode()))

    def deliver(self, order: Callable[[list[int]], None] = lambda ranks: None) -> None:
        while behind := [rank for rank, one in enumerate(self.members) if one.learned < len(self.log)]:
            order(behind)
            member = self.members[behind[0]]
            self.carry_out(behind[0], member.learn(decode_decision(self.log[member.learned])))

    def save(self, rank: int, step: int) -> int:
        self.carry_out(rank, self.members[rank].request(step, {"loss": step}))
        self.deliver()
        return self.members[rank].counter

    def write(self, rank: int, counter: int, step: int) -> None:
        written = Entry(counter, step, 0.0, 1, 0, 0, 0, 0, False, {"loss": step})
        self.carry_out(rank, self.members[rank].written(counter, written))
        self.deliver()

    def flush(self, rank: int) -> None:
        self.carry_out(rank, self.members[rank].record_durable())
        self.deliver()

    def save_all(self, step: int, *, leave_out: int | None = None) -> None:
        counters = [self.save(rank, step) for rank in range(len(self.members))]
        for rank, counter in enumerate(counters):
            if rank != leave_out:
                self.write(rank, counter, step)
                self.flush(rank)

    def decisions(self) -> list[AnyDecision]:
        return [decode_decision(one) for one in self.log]

    def last(self, rank: int, kind: type[T]) -> T:
        return [one for one in self.done[rank] if isinstance(one, kind)][-1]


def test_a_checkpoint_of_two_ranks() -> None:
    group = Group()
    assert [type(one) for one in group.done[0]] == [Post, Scan, Post, Ready]
    assert [type(one) for one in group.done[1]] == [Post, Ready]
    assert group.save(0, 10) == 0
    assert Admit(0) not in group.done[0]  # before all took over
    assert group.save(1, 10) == 0
    assert Admit(0) in group.done[0]
    group.write(0, 0, 10)
    group.flush(0)
    group.write(1, 0, 10)
    assert not any(isinstance(one, Commit) for one in group.decisions())
    group.flush(1)
    assert Resolve(0, "durable") in group.done[0]
    assert Resolve(0, "durable") in group.done[1]
    record = group.last(1, WriteRecord)
    assert [part.committed for part in record.parts] == [False]
    group.carry_out(1, group.members[1].drain())
    record = group.last(1, WriteRecord)
    assert [part.committed for part in record.parts] == [True]
    assert record.applied.decisions == len(group.log)
    assert not group.members[1].idle
    group.flush(1)
    assert group.members[1].idle


def test_an_apply_waits_for_the_next_prepare_unless_somebody_waits_for_it() -> None:
    group = Group(max_in_flight=2)
    group.save_all(1)
    records = len([one for one in group.done[0] if isinstance(one, WriteRecord)])
    assert records == 1
    group.save_all(2)
    first = group.last(0, WriteRecord)
    assert [(part.entry.counter, part.committed) for part in first.parts] == [(1, False), (0, True)]
    assert group.save(0, 3) == 2  # has the third slot, beside what the record names
    assert Admit(2) in group.done[0]
    assert group.last(0, WriteRecord) is first
    assert group.save(0, 4) == 3
    assert Admit(3) not in group.done[0]
    assert [part.entry.counter for part in group.last(0, WriteRecord).parts] == [1]
    group.flush(0)
    assert [part.entry.counter for part in group.last(0, Free).parts] == [0]
    assert group.done[0][-1] == Admit(3)


def test_a_slot_is_free_only_when_the_record_without_it_is_durable() -> None:
    group = Group(max_in_flight=3)
    group.save_all(1)
    for rank in range(2):
        group.carry_out(rank, group.members[rank].pin(1, True))
    group.deliver()
    for rank in range(2):
        group.flush(rank)
    group.save_all(2)
    for rank in range(2):
        group.carry_out(rank, group.members[rank].drain())
        group.flush(rank)
    assert [part.entry.counter for part in group.last(0, WriteRecord).parts] == [1, 0]
    for step in (3, 4):
        for rank in range(2):
            group.save(rank, step)
    group.write(0, 2, 3)  # the record that prepares it is being written
    group.write(0, 3, 4)
    for rank in range(2):
        group.carry_out(rank, group.members[rank].remove(1, force=False))
    group.deliver()
    group.flush(0)
    assert [part.entry.counter for part in group.last(0, WriteRecord).parts] == [3, 2, 1]
    assert group.save(0, 5) == 4
    assert Admit(4) not in group.done[0]  # the durable record names the removed one, and the next one the new one
    group.flush(0)
    assert Admit(4) in group.done[0]


def test_a_failed_write_fails_it_on_all_ranks() -> None:
    group = Group()
    for rank in range(2):
        group.save(rank, 1)
    group.carry_out(1, group.members[1].failed(0, "no space"))
    group.deliver()
    failed = Resolve(0, "failed", "no space", 1)
    assert failed in group.done[0]
    assert failed in group.done[1]
    assert Cancel(0) in group.done[0]
    group.carry_out(0, group.members[0].released(0))
    assert group.members[0].idle
    assert group.members[1].idle
    group.save_all(2)
    assert Resolve(1, "durable") in group.done[0]


def test_what_was_decided_before_a_rank_came_to_it() -> None:
    group = Group()
    group.save(1, 1)
    group.carry_out(1, group.members[1].failed(0, "cancelled"))
    group.deliver()
    assert Resolve(0, "failed", "cancelled", 1) not in group.done[0]
    assert group.save(0, 1) == 0
    assert group.done[0][-1] == Resolve(0, "failed", "cancelled", 1)


def test_a_latched_store_ends_all_commits_and_drops_nothing() -> None:
    group = Group()
    group.save_all(1, leave_out=1)
    group.write(1, 0, 1)
    group.carry_out(1, group.members[1].record_failed("EIO"))
    group.deliver()
    for rank in range(2):
        assert Resolve(0, "failed", "EIO", 1) in group.done[rank]
        assert group.save(rank, 2) == 1
        assert group.done[rank][-1] == Resolve(1, "failed", "EIO", 1)
        assert group.members[rank].idle
    assert not [one for one in group.done[0] if isinstance(one, Free)]


def test_a_broken_group_restores_and_ends_all_the_same() -> None:
    group = Group()
    group.save_all(1)
    group.carry_out(1, group.members[1].record_failed("EIO"))
    group.deliver()
    for rank in range(2):
        group.carry_out(rank, group.members[rank].restore.request(None))
    group.deliver()
    assert isinstance(group.done[0][-1], MatchManifest)
    group.carry_out(1, group.members[1].preempted())
    group.deliver()
    assert group.members[0].schedule.final is not None
    for rank in range(2):
        group.carry_out(rank, group.members[rank].leave("EIO"))
    assert not group.coordinator.remaining


def test_a_restore_that_not_all_ranks_have_asked_for_ends_with_the_group() -> None:
    """The others know that the group is broken, and may not ask any more."""
    group = Group()
    group.save_all(1)
    group.carry_out(0, group.members[0].restore.request(None))
    group.carry_out(1, group.members[1].record_failed("EIO"))
    group.deliver()
    assert EndRestore("disagreement", "EIO") in group.done[0]
    assert not any(isinstance(each, EndRestore) for each in group.done[1])


def test_what_is_being_restored_stays() -> None:
    group = Group()
    group.save_all(1)
    for rank in range(2):
        group.carry_out(rank, group.members[rank].restore.request(None))
    group.deliver()
    group.save_all(2)
    kept = [[one.key.counter for one in each.keep] for each in group.decisions() if isinstance(each, Commit)]
    assert kept == [[0], [1, 0]]
    for answer in (partial(Restore.matched, outcome="ok"), Restore.verified):
        for rank in range(2):
            group.carry_out(rank, answer(group.members[rank].restore))
        group.deliver()
    assert isinstance(group.done[0][-1], ChangeState)
    group.save_all(3)
    assert [[one.key.counter for one in each.keep] for each in group.decisions() if isinstance(each, Commit)][-1] == [2]


def test_after_a_restore_all_ranks_know_what_any_of_them_found_to_differ() -> None:
    group = Group(3)
    group.save_all(1)
    for rank, member in enumerate(group.members):
        group.carry_out(rank, member.restore.request(None))
    group.deliver()
    for rank, member in enumerate(group.members):
        group.carry_out(rank, member.restore.matched("ok"))
    group.deliver()
    for rank, found in enumerate(([7, 5], [9], ())):
        group.carry_out(rank, group.members[rank].restore.verified(None, found))
    assert not any(member.differing for member in group.members)  # not before all know it
    group.deliver()
    assert [member.differing for member in group.members] == [{5, 7, 9}] * 3


def test_a_lost_log_fails_what_waits() -> None:
    group = Group()
    for rank in range(2):
        group.save(rank, 1)
    group.carry_out(1, group.members[1].pin(1, True))
    group.carry_out(1, group.members[1].restore.request(None))
    group.carry_out(1, group.members[1].lost("rank 0 is gone"))
    assert Resolve(0, "failed", "rank 0 is gone", 0) in group.done[1]
    assert Cancel(0) in group.done[1]
    assert ResolveChange(0, "rank 0 is gone") in group.done[1]
    assert group.members[1].idle
    group.write(1, 0, 1)  # it had ended just before
    assert not [one for one in group.done[1] if isinstance(one, WriteRecord)]


def test_metadata_of_rank_0_decide_what_is_kept() -> None:
    rules = Retention(keep=Keep(every=3))
    group = Group(retention=rules)
    for step in (2, 3, 4):
        group.save_all(step)
    commit = [one for one in group.decisions() if isinstance(one, Commit)][-1]
    assert [kept.key.counter for kept in commit.keep] == [2, 0]


def test_an_older_one_in_flight_is_superseded_once_for_all() -> None:
    group = Group()
    for rank in range(2):
        group.save(rank, 1)
        group.save(rank, 2)
    group.write(0, 0, 1)
    group.flush(0)
    for rank in range(2):
        group.write(rank, 1, 2)
        group.flush(rank)
    assert [one.superseded for one in group.decisions() if isinstance(one, Commit)] == [(0,)]
    assert Resolve(0, "superseded") in group.done[0]
    assert Cancel(0) in group.done[1]
    assert Cancel(0) not in group.done[0]  # its slot is named: it goes with the next record
    group.carry_out(0, group.members[0].drain())
    group.flush(0)
    assert [part.entry.counter for part in group.last(0, Free).parts] == [0]


def test_keep_last_2_lets_an_older_one_commit_late() -> None:
    group = Group(retention=Retention(keep_last=2))
    for rank in range(2):
        group.save(rank, 1)
        group.save(rank, 2)
    for counter in (1, 0):
        for rank in range(2):
            group.write(rank, counter, counter + 1)
            group.flush(rank)
    commits = [one for one in group.decisions() if isinstance(one, Commit)]
    assert [(one.counter, one.superseded) for one in commits] == [(1, ()), (0, ())]
    assert [kept.key.counter for kept in commits[1].keep] == [1, 0]


def test_a_pin_returns_when_this_ranks_record_says_so() -> None:
    group = Group()
    group.save_all(1)
    for rank in range(2):
        group.carry_out(rank, group.members[rank].pin(1, True))
    group.deliver()
    assert group.last(0, WriteRecord).applied.pinned == (group.last(0, WriteRecord).parts[0].key,)
    assert not [one for one in group.done[0] if isinstance(one, ResolveChange)]
    group.flush(0)
    assert group.done[0][-1] == ResolveChange(0, None)
    group.flush(1)
    group.save_all(2)
    commit = [one for one in group.decisions() if isinstance(one, Commit)][-1]
    assert [(kept.key.counter, kept.pinned) for kept in commit.keep] == [(1, False), (0, True)]


def test_a_rejection_returns_when_the_records_of_all_ranks_say_so() -> None:
    """A rank may have no part of what it rejects: its own record then says nothing of it."""
    group = Group(retention=Retention(keep_last=3))
    for step in (1, 2):
        group.save_all(step)
    counters = {group.save(rank, 3) for rank in range(2)}  # in flight
    for rank in range(2):
        group.carry_out(rank, group.members[rank].reject(2, 2))
    group.deliver()
    assert counters == {2}
    assert Resolve(2, "superseded") in group.done[0]
    assert Cancel(2) in group.done[1]
    group.flush(1)
    assert [(part.entry.step, part.entry.rejected) for part in group.last(1, WriteRecord).parts] == [
        (2, True),
        (1, False),
    ]
    group.carry_out(1, group.members[1].was_rejected(2, 2))  # rank 0's record is not durable
    group.deliver()
    assert ResolveChange(1, None) not in group.done[1]
    group.flush(0)
    group.carry_out(0, group.members[0].was_rejected(2, 2))
    group.deliver()
    for rank in range(2):
        group.flush(rank)
        assert group.done[rank][-1] == ResolveChange(1, None)
    for rank in range(2):
        group.carry_out(rank, group.members[rank].released(2))
    group.save_all(4)
    commit = [one for one in group.decisions() if isinstance(one, Commit)][-1]
    assert [kept.key.counter for kept in commit.keep] == [3, 0]


@pytest.mark.parametrize(("step", "refused"), [(9, "missing"), (1, "refused")])
def test_rejections_that_cannot_be(step: int, refused: str) -> None:
    group = Group(retention=Retention(keep_last=3))
    for saved in (1, 2):
        group.save_all(saved)
    for rank in range(2):
        group.carry_out(rank, group.members[rank].reject(step, 1))
    group.deliver()
    answer = group.last(1, ResolveChange)
    assert (answer.refused, bool(answer.why)) == (refused, True)
    assert not any(entry.rejected for _, entry in group.coordinator.committed.values())


@pytest.mark.parametrize("marked", [(0,), (1,), (0, 1)])
def test_one_marked_part_rejects_a_checkpoint_on_all_ranks(marked: tuple[int, ...]) -> None:
    """A crash left the others: whoever was told has the mark."""
    parts = {
        rank: [entry.as_rejected() if entry.step == 2 and rank in marked else entry for entry in entries_of(2, 1)]
        for rank in range(2)
    }
    group = Group(stores=[seen(rank, *entries) for rank, entries in parts.items()], retention=Retention(keep_last=3))
    view = group.members[0].view
    assert view is not None
    assert [(one.entry.step, one.entry.rejected) for one in view.complete] == [(2, True), (1, False)]
    for rank in range(2):
        group.carry_out(rank, group.members[rank].restore.request(None))
    group.deliver()
    assert group.last(0, MatchManifest).key == group.last(1, MatchManifest).key == view.complete[1].key
    for rank in range(2):
        group.save(rank, 3)
    assert [kept.key.counter for kept in group.decisions()[-1].keep] == [1, 0]  # type: ignore[union-attr]
    for rank in range(2):
        group.write(rank, 2, 3)
        record = group.last(rank, WriteRecord)
        assert [(part.entry.step, part.entry.rejected) for part in record.parts] == [(3, False), (2, True), (1, False)]


@pytest.mark.parametrize("which", [None, 2])
def test_a_restore_that_finds_only_rejected_ones_ends_in_an_error(which: int | None) -> None:
    marked = [entry.as_rejected() for entry in entries_of(2)]
    group = Group(stores=[seen(rank, *marked) for rank in range(2)])
    for rank in range(2):
        group.carry_out(rank, group.members[rank].restore.request(which))
    group.deliver()
    ends = [group.last(rank, EndRestore) for rank in range(2)]
    assert [end.reason for end in ends] == ["rejected"] * 2
    for rank in range(2):
        group.save(rank, 3)
    assert [kept.key.counter for kept in group.decisions()[-1].keep] == [0]  # type: ignore[union-attr]


def entries_of(*steps: int) -> list[Entry]:
    """Return entries, newest first, with the counters from 0 on."""
    return [Entry(len(steps) - 1 - n, step, 0.0, 1, n, 0, 0, 0, False, {}) for n, step in enumerate(steps)]


def seen(rank: int, *entries: Entry) -> SeenStore:
    ids = [(each, f"store {each}".encode()) for each in range(2)]
    run = Run(1, 5, members_digest(ids))
    parts = tuple(Part(run, rank, 2, True, entry) for entry in entries)
    return SeenStore(0, rank, ids[rank][1], Applied(run, 3), parts)


def test_what_is_pinned_before_the_first_save_stays_although_no_rule_of_this_run_keeps_it() -> None:
    group = Group(stores=[seen(rank, *entries_of(2, 1)) for rank in range(2)])
    for rank in range(2):
        taking_over, request = group.members[rank].pin(1, True)
        assert isinstance(taking_over, TakeOver)  # which takes a while
        group.carry_out(rank, [request])
    group.deliver()
    for rank in range(2):
        group.carry_out(rank, [taking_over])
    group.deliver()
    (start,) = [one for one in group.decisions() if isinstance(one, Start)]
    assert [(kept.key.counter, kept.pinned) for kept in start.keep] == [(1, False), (0, True)]


def test_pins_that_cannot_be() -> None:
    group = Group()
    group.save_all(1)
    for step, other in ((5, 5), (1, 2)):
        group.carry_out(0, group.members[0].pin(step, True))
        group.carry_out(1, group.members[1].pin(other, True))
    group.deliver()
    first, second = [one.why or "" for one in group.decisions() if isinstance(one, Change)]
    assert first == "there is no checkpoint of step 5; there are steps 1"
    assert second == "ranks asked for different changes: pin 1, pin 2"
    assert ResolveChange(1, second) in group.done[1]
    assert ResolveChange(0, first, "missing") in group.done[0]


def test_every_pin_and_restore_that_waits_ends_when_rank_0_is_lost() -> None:
    group = Group()
    group.save_all(1)
    for step in (1, 5):
        for rank in range(2):
            group.carry_out(rank, group.members[rank].pin(step, True))
    group.carry_out(0, group.members[0].restore.request(None))
    group.deliver()
    assert [one.index for one in group.done[0] if isinstance(one, ResolveChange)] == [1]
    group.carry_out(0, group.members[0].lost("rank 0 is gone"))
    assert [one.index for one in group.done[0] if isinstance(one, ResolveChange)] == [1, 0]
    assert group.done[0][-1] == EndRestore("lost", "rank 0 is gone")


def test_a_rank_that_leaves_early_ends_what_it_takes_no_part_in() -> None:
    group = Group()
    group.save_all(1)
    group.carry_out(1, group.members[1].leave("an error"))
    group.save(0, 2)
    assert group.done[0][-1] == Cancel(1)
    assert group.done[0][-2] == Resolve(1, "failed", "rank 1 left before: an error", 1)
    assert group.coordinator.remaining == [0]
    group.carry_out(0, group.members[0].released(1))
    group.carry_out(0, group.members[0].leave())
    assert not group.coordinator.remaining
    assert group.members[0].leave() == []


def test_whom_a_checkpoint_waits_for() -> None:
    group = Group(world=3)
    group.save_all(1, leave_out=1)
    assert group.coordinator.awaited() == {"the checkpoint of step 1": [1]}
    group.carry_out(0, group.members[0].restore.request(None))
    group.deliver()
    assert group.coordinator.awaited()["a restore"] == [1, 2]


def test_a_slow_rank_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(world=3)
    group.save_all(1, leave_out=1)
    looks = 0

    def awaited() -> dict[str, list[int]]:
        nonlocal looks
        if (looks := looks + 1) == 5:
            raise InterruptedError
        return group.coordinator.awaited()

    with pytest.raises(InterruptedError):
        asyncio.run(name_slow_ranks(awaited, Path("folder"), seconds=0.0))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["the checkpoint of step 1 has waited for ranks 1 longer than 0 s"]


def test_votes_of_another_run_do_not_count() -> None:
    group = Group()
    group.save_all(1, leave_out=1)
    start = next(one for one in group.decisions() if isinstance(one, Start))
    assert not group.coordinator.receive(Ok(1, start.run._replace(nonce=8), 0, 1, None))
    assert group.coordinator.receive(Ok(1, start.run, 0, 1, None))


@pytest.mark.parametrize(
    ("sums", "whole"), [((5, 2**64 - 5), True), ((5, 6), False), ((0, 0), True), ((None, 3), False)]
)
def test_what_does_not_make_whole_tensors_is_aborted(sums: tuple[int | None, int], whole: bool) -> None:
    group = Group()
    for rank, each in enumerate(sums):
        told = {} if each is None else {"model": each}
        group.carry_out(rank, group.members[rank].request(1, sums={**told, "optimizer": 0}))
    group.deliver()
    for rank in (0, 1):
        group.write(rank, 0, 1)
        group.flush(rank)
    ended = [one for one in group.decisions() if isinstance(one, Commit | Abort)]
    assert [isinstance(one, Commit) for one in ended] == [whole]
    if not whole:
        (outcome,) = (one for one in group.done[1] if isinstance(one, Resolve))
        assert outcome.outcome == "failed"
        assert "those under model: " in outcome.why


def test_replicas_that_differ_are_named_and_saved_by_each_rank_from_then_on() -> None:
    group = Group()

    def save(step: int, *weights: int) -> None:
        for rank, member in enumerate(group.members):
            group.carry_out(rank, member.request(step, differing=member.differing))
        group.deliver()
        for rank, (member, weight) in enumerate(zip(group.members, weights, strict=True)):
            sample = ({}, {}) if member.differing else ({5: (step % 16, weight)}, {"bias": 1, "weight": weight})
            written = Entry(member.counter, step, 0.0, 1, 0, 0, 0, 0, False, {})
            group.carry_out(rank, member.written(member.counter, written, *sample))
        for rank in range(2):
            group.flush(rank)

    save(1, 3, 3)
    save(2, 3, 4)
    assert [type(one) for one in group.decisions()[-3:]] == [Commit, Compare, Abort]
    for rank in range(2):
        outcome = group.last(rank, Resolve)
        assert (outcome.counter, outcome.outcome) == (1, "differs")
        assert "such as weight; in the next checkpoint each rank saves its own" in outcome.why
        # No record names it longer than it takes to write one.
        assert [part.entry.step for part in group.last(rank, WriteRecord).parts] == [1]
        group.flush(rank)
    save(3, 3, 4)
    assert [one.counter for one in group.decisions() if isinstance(one, Commit)] == [0, 2]


def test_whom_a_comparison_waits_for() -> None:
    group = Group(world=3)
    group.save_all(1)
    start = next(one for one in group.decisions() if isinstance(one, Start))
    for rank in range(3):
        entry = Entry(1, 2, 0.0, 1, 0, 0, 0, 0, False, {}) if rank == 0 else None
        group.coordinator.receive(Ok(rank, start.run, 1, 2, entry, replicas={5: (0, rank)}))
    group.coordinator.receive(Digests(1, 1, {"weight": 1}))
    assert group.coordinator.awaited() == {"the checkpoint of step 2": [0, 2]}


def test_samples_of_other_parts_are_not_compared() -> None:
    coordinator, group = Coordinator(2, Retention(), 1), Group()
    group.save_all(1)
    start = next(one for one in group.decisions() if isinstance(one, Start))
    coordinator.run = start.run
    for rank, part in ((0, 3), (1, 4)):
        entry = Entry(0, 1, 0.0, 1, 0, 0, 0, 0, False, {}) if rank == 0 else None
        decided = coordinator.receive(Ok(rank, start.run, 0, 1, entry, replicas={5: (part, rank)}))
    assert [type(one) for one in decided] == [Commit]


def test_captures_of_before_and_after_are_not_mixed() -> None:
    group = Group()
    group.save_all(1)
    for rank, member in enumerate(group.members):
        group.carry_out(rank, member.request(2, differing=(5,) * rank))
    group.deliver()
    for rank in range(2):
        group.write(rank, 1, 2)
        group.flush(rank)
    outcome = group.last(0, Resolve)
    assert outcome.outcome == "differs"
    assert "before they knew" in outcome.why
    assert [member.differing for member in group.members] == [{5}, {5}]  # so that the next one is not


def test_ranks_of_two_versions_are_refused() -> None:
    coordinator = Coordinator(2, Retention(), 1)
    coordinator.receive(Hello(0, VERSION, 2, "d", "h", ""))
    (refused,) = coordinator.receive(Hello(1, VERSION - 1, 2, "d", "h", ""))
    assert isinstance(refused, Refused)
    assert f"different version: ranks 0: {VERSION}; ranks 1: {VERSION - 1}" in refused.why


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["a", "a", "b"], "different settings: ranks 0, 1: a; ranks 2: b"),
        (["a", "b", "a"], "ranks 0, 2: a; ranks 1: b"),
    ],
)
def test_ranks_with_different_settings_are_refused(settings: list[str], why: str) -> None:
    group = Group(world=3, settings=settings)
    for rank in range(3):
        (refused,) = [one.why for one in group.done[rank] if isinstance(one, Unopened)]
        assert why in refused


def crowded(*, rejected: bool = False, pinned: bool = False) -> list[SeenStore]:
    """Stores of two ranks that name 60 checkpoints, all but the last one rejected, or all pinned."""
    ids = [f"store {rank}".encode() for rank in range(2)]
    run = Run(1, 7, members_digest(enumerate(ids)))
    entries = [Entry(n, n, 0.0, 1, n, 0, 0, 0, pinned, {}) for n in range(60, 0, -1)]
    entries = [one.as_rejected() if rejected and one.counter > 1 else one for one in entries]
    applied = Applied(run, 9, tuple(Key(one.counter, run) for one in entries if one.pinned))
    return [
        SeenStore(0, rank, ids[rank], applied, tuple(Part(run, rank, 2, True, one) for one in entries))
        for rank in range(2)
    ]


def test_a_record_has_room_for_all_in_flight_beside_what_an_earlier_run_left() -> None:
    """That run had fewer in flight: a record that no reader accepts would end the group."""
    most = MOST_ENTRIES - 2 * 20
    group = Group(retention=Retention(most=most), max_in_flight=20, stores=crowded(rejected=True))
    for step in range(20):
        for rank in range(2):
            group.save(rank, step)
    for rank in range(2):
        for counter in range(61, 81):
            group.write(rank, counter, counter - 61)
            group.flush(rank)
    records = [one for one in group.done[0] if isinstance(one, WriteRecord)]
    assert records
    assert max(len(one.parts) for one in records) <= MOST_ENTRIES
    assert any(one.entry.counter == 1 for one in records[0].parts)  # the only one to restore
    assert Resolve(80, "durable") in group.done[0]


def test_more_pinned_ones_than_there_is_room_for_are_refused() -> None:
    group = Group(retention=Retention(most=MOST_ENTRIES - 2 * 20), max_in_flight=20, stores=crowded(pinned=True))
    (refused,) = [one.why for one in group.done[1] if isinstance(one, Unopened)]
    assert "60 checkpoints pinned and 1 kept by rules are more than the 24" in refused
    assert "with a smaller max_in_flight" in refused


def test_whom_an_opening_waits_for_is_named() -> None:
    coordinator = Coordinator(3, Retention(), 1)
    assert coordinator.receive(Hello(1, 1, 3, "d", "h", "")) == []
    assert coordinator.missing == [0, 2]


@pytest.mark.parametrize("seed", range(20))
def test_opening_ends_alike_in_whatever_order(seed: int) -> None:
    choose = random.Random(seed)
    stores = [SeenStore(domain, rank, bytes([domain, rank]), None, ()) for domain in range(2) for rank in range(4)]
    group = Group(world=4, domains=["a", "b", "b", "a"], stores=stores, order=choose.shuffle)
    assert {member.homes for member in group.members} == {(0, 1, 1, 0)}
    assert len({msgspec.msgpack.encode(member.view) for member in group.members}) == 1
    assert [rank for rank in range(4) if Scan() in group.done[rank]] == [0, 1]
    for rank in range(4):
        group.save(rank, 1)
    assert [len(group.last(rank, TakeOver).orphans) for rank in range(4)] == [2, 2, 0, 0]


def test_messages_are_what_they_were_on_the_other_side() -> None:
    sent: deque[AnyMessage] = deque()
    group = Group()
    group.save_all(1)
    for action in (one for done in group.done for one in done):
        if isinstance(action, Post):
            sent.append(action.message)
    assert {type(one) for one in sent} >= {Hello, Found, Ok}
    assert all(decode_message(encode(one)) == one for one in sent)
    assert all(encode(decode_decision(one)) == one for one in group.log)
