"""Random histories of the real group protocol with both tiers: deaths, losses of memory and of unflushed records.

Beside :mod:`tests.support.group_explorer`, which explores one tier in every interleaving. Ranks are on one shared disk,
each host has a memory of its own. A history is a row of runs; each ends by the death of all ranks at any moment, after
which memory of some hosts may be lost, and records that were not flushed. A run restores the newest checkpoint, an
older one, or none; or it has no tier in memory.

Judged is what users are promised:

- ``MEMORY``: what was committed in memory, or restored, is found again, or something newer, if no memory was lost;
- ``DISK``: so is what was committed on disk, whatever memory is lost, and any records that were not durable;
- ``BRANCH``: nothing comes back of a branch that a later run has left behind;
- ``CROSS``: a checkpoint fails in one tier only if some rank failed it there;
- ``RECORD``: a record can be written;
- ``COPIES``: with replicas, what was copied to other hosts is found again although one host was lost;
- ``OPENING``: opening and restoring write nothing; ``PARTS``: each part of what is restored has a source;
- ``SLOTS``: the slots in memory are bounded; ``STUCK``: something can always happen until all has ended.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pccheck_async.format import Entry, Line
from pccheck_async.group import (
    Applied,
    Coordinator,
    Key,
    Member,
    Part,
    SeenStore,
    decode_decision,
    decode_message,
    encode,
)
from pccheck_async.group.actions import (
    Action,
    Admit,
    Cancel,
    EndRestore,
    EndRound,
    FillArrays,
    MatchManifest,
    Post,
    RemoveOrphans,
    Resolve,
    Scan,
    SendCopies,
    TakeOver,
    Unopened,
    WriteRecord,
)
from pccheck_async.group.messages import (
    AnyDecision,
    AnyMessage,
    Commit,
    InMemory,
    Restored,
    Round,
    RoundEnd,
    Start,
    about_memory,
)
from pccheck_async.group.tiers import Tiers
from pccheck_async.store import Retention

_UNDECIDED = 2
"""Checkpoints in memory that are written or not decided, at most."""
DISK, MEMORY = 0, 1


@dataclass(frozen=True)
class Body:
    """The contents of a store's record."""

    store_id: bytes
    applied: Applied | None = None
    parts: tuple[Part, ...] = ()
    line: Line | None = None

    @property
    def keys(self) -> set[Key]:
        return {part.key for part in self.parts}


@dataclass(frozen=True)
class World:
    """What the histories of one exploration have in common."""

    hosts: tuple[int, ...] = (0, 1)  # of each rank
    worlds: tuple[int, ...] = (2,)
    runs: int = 4
    loses_memory: bool = True
    loses_records: bool = True
    goes_back: bool = True  # to an older checkpoint, or begins anew
    without_memory: bool = True  # some runs
    fails: bool = True  # writes, in either tier
    keep: int = 1
    replicas: int = 0

    @property
    def kept(self) -> int:
        return self.keep + (2 if self.replicas else 0)


def seen(rank: int, body: Body) -> SeenStore:
    return SeenStore(0, rank, body.store_id, body.applied, body.parts, body.line)


class BrokenRuleError(AssertionError):
    """Something that users are promised does not hold; begins with its kind."""


Move = tuple[Any, ...]
"""A method of a side or a run, which lets something happen, and its arguments."""


class Side:
    """One tier of one rank in a run."""

    def __init__(self, run: Run, rank: int, tier: int, member: Member) -> None:
        self.run, self.rank, self.tier, self.member = run, rank, tier, member
        self.takes_over: TakeOver | None = None
        self.flushes = False
        self.writes: list[int] = []
        self.leased: set[int] = set()
        self.outcomes: dict[int, str] = {}
        self.sends: list[tuple[int, Round]] = []

    def __str__(self) -> str:
        return f"rank {self.rank}, tier {self.tier}"

    def do(self, actions: Sequence[Action]) -> None:
        history, run = self.run.history, self.run
        for action in actions:
            if not run.began and isinstance(action, (TakeOver, Admit, WriteRecord, RemoveOrphans)):
                raise BrokenRuleError(f"OPENING: {type(action).__name__}")
            match action:
                case Post():
                    run.deliver(action.message if self.tier == DISK else about_memory(action.message))
                case Scan():
                    there = [rank for rank in history.there(self.tier) if self.tier == DISK or self.sees(rank)]
                    found = [history.seen(self.tier, rank) for rank in there]
                    if self.tier == MEMORY:
                        found += [
                            seen(rank, body)
                            for (host, rank), body in history.copies.items()
                            if host == history.world.hosts[self.rank]
                        ]
                    self.do(self.member.found(found))
                case TakeOver():
                    self.takes_over = action
                case Admit(counter):
                    self.writes.append(counter)
                    self.leased.add(counter)
                    self.count_slots()
                case Cancel(counter):
                    self.writes = [one for one in self.writes if one != counter]
                    self.leased.discard(counter)
                    self.do(self.member.released(counter))
                case WriteRecord(parts, applied):
                    if len({part.entry.counter for part in parts}) < len(parts):
                        raise BrokenRuleError(f"RECORD: two of one counter: {parts}")
                    before = history.visible[self.tier][self.rank]
                    history.visible[self.tier][self.rank] = Body(before.store_id, applied, parts, before.line)
                    if self.tier == DISK and run.tiers is None:
                        history.visible[DISK][self.rank] = Body(before.store_id, applied, parts)
                        history.note_run_without_memory(run)
                    self.flushes = True
                    self.apply_to_copies()
                    self.leased -= {part.entry.counter for part in parts}
                case RemoveOrphans(stores):
                    for store in stores:
                        if history.visible[self.tier].get(store.rank, Body(b"")).store_id == store.store_id:
                            del history.visible[self.tier][store.rank]
                        else:
                            del history.copies[history.world.hosts[self.rank], store.rank]
                case SendCopies(running):
                    self.sends += [(holder, running) for holder in self.member.rounds.holders[self.rank]]
                case EndRound():
                    self.sends = []
                    self.apply_to_copies()
                case Resolve(counter, outcome):
                    self.outcomes[counter] = outcome
                    run.judge(self.tier, counter, outcome)
                case MatchManifest():
                    self.do(self.member.restore.matched("ok"))
                case FillArrays():
                    self.do(self.member.restore.verified())
                case Unopened(why):
                    raise BrokenRuleError(f"OPENING: refused: {why}")
                case EndRestore(reason, why) if reason != "none":
                    raise BrokenRuleError(f"PARTS: {reason} {why}")

    def apply_to_copies(self) -> None:
        """Drop what the keep-list does not name of the copies that this rank holds."""
        copies, host = self.run.history.copies, self.run.history.world.hosts[self.rank]
        for rank, holders in enumerate(self.member.rounds.holders if self.tier == MEMORY else ()):
            if self.rank in holders and (body := copies.get((host, rank))) is not None:
                copies[host, rank] = replace(
                    body, parts=tuple(p for p in body.parts if p.key in self.member.kept_copies)
                )

    def send(self, holder: int, running: Round) -> None:
        """Send this rank's part to one that holds copies; report it once all have it, or that one fails."""
        history, taker = self.run.history, self.run.sides[holder][MEMORY]
        self.sends.remove((holder, running))
        part = self.part_to_send(running, taker)
        if part is None or (history.world.fails and history.random.random() < 0.1):
            self.sends = []
            self.do(self.member.copied(running.number, "the holder is full"))
            return
        taker.apply_to_copies()
        place = history.world.hosts[holder], self.rank
        body = history.copies.get(place) or Body(f"copy/{place}/{len(history.log)}".encode())
        history.copies[place] = replace(body, parts=(part, *body.parts))
        if len(body.parts) > 2:
            raise BrokenRuleError(f"SLOTS: copies {body.parts}")
        if not self.sends:
            self.do(self.member.copied(running.number))

    def part_to_send(self, running: Round, taker: Side) -> Part | None:
        parts = self.run.history.visible[MEMORY][self.rank].parts
        part = next((part for part in parts if part.key == running.key), None)
        if part is None:
            raise BrokenRuleError(f"COPIES: rank {self.rank} is to send {running.key}, which its record lacks")
        return part if part.key in taker.member.kept_copies else None

    def may_send(self, holder: int, running: Round) -> bool:
        """Whether the holder has learned of the round; it waits till then."""
        return self.run.sides[holder][MEMORY].member.rounds.running == running

    def sees(self, rank: int) -> bool:
        hosts = self.run.history.world.hosts
        return hosts[rank] == hosts[self.rank]

    def count_slots(self) -> None:
        named = self.run.history.visible[self.tier][self.rank].keys
        most = _UNDECIDED + self.run.history.world.kept
        if self.tier == MEMORY and len(named) + len(self.leased) > most:
            raise BrokenRuleError(f"SLOTS: {len(named)} named and {len(self.leased)} leased, at most {most}")

    def moves(self) -> list[Move]:
        found: list[Move] = []
        if self.takes_over is not None:
            found.append((self.take_over,))
        if self.flushes:
            found.append((self.flush,))
        found += [(self.send, *send) for send in self.sends if self.may_send(*send)]
        found += [(self.written, counter) for counter in self.writes]
        return found

    def take_over(self) -> None:
        assert self.takes_over is not None
        history, action, self.takes_over = self.run.history, self.takes_over, None
        name = f"{self.tier}/{self.rank}/{len(history.log)}".encode()
        body = history.visible[self.tier].setdefault(self.rank, Body(name))
        if action.line is not None:
            if not action.line.sane:
                raise BrokenRuleError(f"RECORD: {action.line}")
            body = history.visible[self.tier][self.rank] = Body(body.store_id, body.applied, body.parts, action.line)
            history.note_line(self.run)
        history.durable[self.tier][self.rank] = body
        for orphan in action.orphans if self.tier == DISK else ():
            history.durable[self.tier][orphan.rank] = history.visible[self.tier][orphan.rank]
        self.do(self.member.took_over(body.store_id))

    def flush(self) -> None:
        self.flushes = False
        self.run.history.durable[self.tier][self.rank] = self.run.history.visible[self.tier][self.rank]
        self.do(self.member.record_durable())

    def written(self, counter: int) -> None:
        history = self.run.history
        self.writes.remove(counter)
        if history.world.fails and history.random.random() < 0.1:
            self.leased.discard(counter)
            self.run.failed.add((self.tier, counter))
            self.do(self.member.failed(counter, "ENOSPC"))
        else:
            self.do(self.member.written(counter, Entry(counter, counter, 0.0, 1, counter, 0, 0, 0, False, {})))


class Run:
    """One run of all ranks."""

    def __init__(self, history: History, ranks: int, *, with_memory: bool) -> None:
        world = history.world
        self.history, self.number = history, history.runs
        self.began = False
        self.log: list[AnyDecision] = []
        self.learned = [0] * ranks
        self.failed: set[tuple[int, int]] = set()
        self.restored: Key | None = None
        self.came_from: Key | None = None
        self.calls = [0] * ranks
        self.program = ""
        self.late: Key | None = None
        retention = Retention(keep_last=world.keep)
        memory = Coordinator(ranks, retention, self.number, replicas=world.replicas) if with_memory else None
        self.coordinator = Coordinator(ranks, retention, self.number, memory)
        self.sides: list[list[Side]] = []
        for rank in range(ranks):
            own = [history.seen(tier, rank) if rank in history.visible[tier] else None for tier in (DISK, MEMORY)]
            members = [
                Member(rank, ranks, max_in_flight=2, reserved=world.keep, own=own[DISK]),
                Member(
                    rank,
                    ranks,
                    max_in_flight=_UNDECIDED,
                    reserved=world.kept,
                    own=own[MEMORY],
                    in_memory=True,
                    replicas=world.replicas,
                ),
            ]
            sides = [Side(self, rank, tier, members[tier]) for tier in ((DISK, MEMORY) if with_memory else (DISK,))]
            self.sides.append(sides)
        self.tiers = [Tiers(one[DISK].member, one[MEMORY].member) for one in self.sides] if with_memory else None

    def __str__(self) -> str:
        return f"run {self.number}"

    def open(self) -> None:
        """Open and restore: all take part at once, as nothing else happens meanwhile."""
        for tier in (DISK, MEMORY) if self.tiers is not None else (DISK,):
            for rank, sides in enumerate(self.sides):
                domain = "disk" if tier == DISK else str(self.history.world.hosts[rank])
                sides[tier].do(sides[tier].member.hello(domain=domain, host="", settings=""))
            self.deliver_all()

    def restore(self, which: int | None) -> Key | None:
        for sides in self.sides:
            sides[-1].do(sides[-1].member.restore.request(which))
        self.deliver_all()
        found = self.sides[0][-1].member.restore.restored
        for sides in self.sides:
            assert sides[-1].member.restore.restored == found
        self.restored = self.came_from = found
        return found

    def deliver(self, message: AnyMessage) -> None:
        decisions = self.coordinator.receive(decode_message(encode(message)))
        self.log += [decode_decision(encode(one)) for one in decisions]
        for one in decisions:
            self.history.log.append(one)
            if isinstance(one, Start):
                self.history.note_start(self)

    def deliver_all(self) -> None:
        while any(learned < len(self.log) for learned in self.learned):
            for rank in range(len(self.sides)):
                if self.learned[rank] < len(self.log):
                    self.learn(rank)

    def learn(self, rank: int) -> None:
        decision = self.log[self.learned[rank]]
        self.learned[rank] += 1
        side, tier = self.sides[rank][DISK], DISK
        if isinstance(decision, InMemory):
            side, tier, decision = self.sides[rank][MEMORY], MEMORY, decision.decision
        if isinstance(decision, Commit | Restored):
            self.history.reached.add(f"{type(decision).__name__} {tier}")
        if isinstance(decision, RoundEnd):
            self.history.reached.add("a round failed" if decision.why else "a round ended")
            if decision.why is None:
                self.history.copied = decision.key
        side.do(side.member.learn(decision))

    def call(self, rank: int) -> None:
        self.began = True
        on_disk = self.program[self.calls[rank]] == "d"
        self.calls[rank] += 1
        sides = self.sides[rank]
        if self.tiers is None:
            sides[DISK].do(sides[DISK].member.request(sides[DISK].member.counter + 1))
            return
        one = self.tiers[rank]
        step = max(one.disk.counter, one.memory.counter) + 1
        for side, actions in zip(sides, one.request(step, {}, {}, (), on_disk=on_disk), strict=True):
            side.do(actions)

    def judge(self, tier: int, counter: int, outcome: str) -> None:
        if outcome == "durable":
            run = self.coordinator.run
            assert run is not None
            self.history.note_committed(self, tier, Key(counter, run))
        elif outcome != "superseded" and (tier, counter) not in self.failed:
            raise BrokenRuleError(f"CROSS: {counter} is {outcome} in tier {tier}, and no rank failed it there")

    def moves(self) -> list[Move]:
        found: list[Move] = []
        for rank, sides in enumerate(self.sides):
            for side in sides:
                found += side.moves()
            if self.learned[rank] < len(self.log):
                found.append((self.learn, rank))
            if self.calls[rank] < len(self.program):
                found.append((self.call, rank))
        return found

    def drain(self) -> None:
        """Let all ranks end well, as far as they come."""
        for sides in self.sides:
            for side in sides:
                side.do(side.member.drain())

    def leave(self) -> None:
        """Let all ranks leave: what is in memory alone is made durable first, by a late checkpoint on disk."""
        for one in self.tiers or ():
            disk, memory = self.sides[one.disk.rank]
            memory.do(memory.member.leave())
            newest = max((key for key in one.memory.keep if key.run == one.memory.run), default=None)
            on_disk = max((key.counter for key in one.disk.keep), default=-1)
            if newest is not None and newest.counter > on_disk and newest.counter not in one.disk.settled:
                self.late = newest
                disk.do(disk.member.request(newest.counter, counter=newest.counter))

    def check_ended(self) -> None:
        for sides in self.sides:
            for side in sides:
                if not side.member.idle:
                    raise BrokenRuleError(f"STUCK: rank {side.rank}, tier {side.tier}")


@dataclass
class History:
    """A row of runs."""

    world: World
    seed: int
    log: list[object] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    runs: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.visible: list[dict[int, Body]] = [{}, {}]
        self.durable: list[dict[int, Body]] = [{}, {}]
        self.promised: list[Key | None] = [None, None]
        self.copies: dict[tuple[int, int], Body] = {}  # by host, and by the rank whose parts they are
        self.copied: Key | None = None  # it survives the loss of one host
        self.branches: list[int] = [0]  # of these runs what they made counts, and what they came from
        self.came_from: dict[int, Key | None] = {0: None}

    def there(self, tier: int) -> list[int]:
        return sorted(self.visible[tier])

    def seen(self, tier: int, rank: int) -> SeenStore:
        return seen(rank, self.visible[tier][rank])

    # -- what is promised

    def note_line(self, run: Run) -> None:
        """A run's line is visible on one disk: its branch may count from here on, and one that it left may not."""
        if run.number not in self.branches:
            self.branches.append(run.number)
        if self.copied is not None and not self.descends(run.came_from, self.copied):
            self.copied = None
        promised, on_disk = self.promised[MEMORY], self.promised[DISK]
        if promised is not None and not self.descends(run.came_from, promised):
            newest = [each for each in (run.came_from, on_disk) if each is not None]
            self.promised[MEMORY] = max(newest, key=lambda key: key.counter, default=None)

    def note_start(self, run: Run) -> None:
        """Every rank joined: only this run's branch counts."""
        if run.tiers is not None:
            self.branches = [run.number]
        self.reached.add("Start")

    def descends(self, key: Key | None, older: Key) -> bool:
        """Whether training came to ``key`` by way of ``older``."""
        while key is not None and key.run != older.run:
            key = self.came_from[key.run.nonce]
        return key is not None and key.counter >= older.counter

    def note_run_without_memory(self, run: Run) -> None:
        """One that has no tier in memory wrote a record: it may be lost, and then memory counts once more."""
        self.promised[MEMORY], self.copied = self.promised[DISK], None
        if run.number not in self.branches:
            self.branches.append(run.number)

    def note_committed(self, run: Run, tier: int, key: Key) -> None:
        if run.tiers is None:
            self.branches = [run.number]
        for each in (tier, MEMORY):
            promised = self.promised[each]
            if promised is None or key.counter > promised.counter:
                self.promised[each] = key

    # -- what happens

    def lose(self) -> bool:
        """Lose memory of hosts, and records that were not durable; return whether memory is all there."""
        world, whole = self.world, True
        if world.loses_memory and self.random.random() < 0.4:
            hosts = [host for host in {*world.hosts} if self.random.random() < 0.5]
            lost = [rank for rank in self.visible[MEMORY] if world.hosts[rank] in hosts]
            gone = [place for place in self.copies if place[0] in hosts]
            whole = not lost and not gone
            if not whole:
                left = [self.promised[DISK], self.copied if len(hosts) <= world.replicas else None]
                self.promised[MEMORY] = max((one for one in left if one is not None), default=None)
                whole = self.promised[MEMORY] is not None and self.promised[MEMORY] == self.copied
                self.copied = None
                if whole:
                    self.reached.add("a host is lost, and there are copies")
            for rank in lost:
                del self.visible[MEMORY][rank]
            for place in gone:
                del self.copies[place]
            self.log.append(f"memory of hosts {hosts} is lost")
        if world.loses_records and self.random.random() < 0.4:
            self.log.append("records that were not durable are lost")
            for rank in [*self.visible[DISK]]:
                if self.random.random() < 0.5:
                    self.visible[DISK][rank] = self.durable[DISK].get(rank) or self.visible[DISK][rank]
        self.durable[DISK] = dict(self.visible[DISK])  # of those that opening finds, any may be the durable one
        return whole

    def live(self) -> None:
        """One run, until it ends or dies, and the restart after it is judged."""
        draw, world = self.random, self.world
        whole = self.lose() if self.runs else True
        self.runs += 1
        run = Run(self, draw.choice(world.worlds), with_memory=not world.without_memory or draw.random() < 0.8)
        self.log.append(f"-- run {self.runs}{'' if run.tiers else ' without memory'}")
        run.open()
        found = run.restore(None)
        self.judge_restored(run, found, whole)
        if world.goes_back and draw.random() < 0.2:
            run.came_from = None
            for sides in run.sides:
                sides[-1].member.restore.restored = None
            coordinator = run.coordinator.memory or run.coordinator
            there = [Key(entry.counter, of) for of, entry in coordinator._restorable()][1:]
            chosen = there[0] if there and draw.random() < 0.7 else None
            self.log.append(f"goes back to {chosen}")
            if chosen is not None:
                run.restore(chosen.counter)
        elif found is not None:
            self.promised[MEMORY] = found if run.tiers is not None else self.promised[MEMORY]
        self.came_from[run.number] = run.came_from
        run.program = "".join(draw.choice("mmd") for _ in range(draw.randrange(4)))
        self.log.append(f"saves {run.program}")
        steps = draw.choice([draw.randrange(60), 1000])
        while steps > 0 and (moves := run.moves()):
            self.make(draw.choice(moves))
            steps -= 1
        if not run.moves():
            self.end(run)
            self.reached.add("ended")
            if draw.random() < 0.5:
                self.leave(run)

    def make(self, move: Move) -> None:
        self.log.append(move)
        move[0](*move[1:])

    def told(self) -> str:
        """Return what happened. Only of histories that broke a rule is it put in words, which takes long."""
        lines = []
        for each in self.log:
            if isinstance(each, tuple):
                lines.append(f"{each[0].__self__}: {each[0].__name__} {' '.join(str(one)[:60] for one in each[1:])}")
            else:
                lines.append(str(each)[:120])
        return "\n".join(lines)

    def end(self, run: Run) -> None:
        for drains in (False, True):
            if drains:
                run.drain()
            while moves := run.moves():
                self.make(self.random.choice(moves))
        run.check_ended()

    def leave(self, run: Run) -> None:
        self.log.append("all leave")
        run.leave()
        self.end(run)
        if run.late is not None and (DISK, run.late.counter) not in run.failed:
            self.reached.add("saved late")
            if run.late not in self.complete_on_disk():
                raise BrokenRuleError(f"DISK: all left, and {run.late} is in memory alone")

    def complete_on_disk(self) -> set[Key]:
        parts = self.parts(DISK)
        return {one.key for one in parts if len({two.rank for two in parts if two.key == one.key}) == one.world}

    def judge_restored(self, run: Run, found: Key | None, whole: bool) -> None:
        self.log.append(f"restores {found and (found.counter, found.run.nonce)}")
        for tier in (DISK, MEMORY):
            promised = self.promised[tier]
            counts = tier == DISK or (whole and run.tiers is not None)
            if promised is not None and counts and (found is None or found.counter < promised.counter):
                raise BrokenRuleError(f"{('DISK', 'MEMORY')[tier]}: {promised} was promised, {found} is restored")
        if found is None:
            return
        parts = [{part.rank: part.world for part in self.parts(tier) if part.key == found} for tier in (DISK, MEMORY)]
        ends = [(self.came_from[number], number) for number in self.branches]
        on_disk = len(parts[DISK]) == next(iter((parts[DISK] | parts[MEMORY]).values()))  # which goes by counters alone
        if not on_disk and not any(found.run.nonce == number or self.descends(end, found) for end, number in ends):
            raise BrokenRuleError(f"BRANCH: {found}, of {ends}")
        self.reached.add("restored")
        world = next(iter((parts[DISK] | parts[MEMORY]).values()))
        if lacking := set(range(world)) - parts[DISK].keys() - parts[MEMORY].keys():
            raise BrokenRuleError(f"PARTS: of {found} the parts of {lacking} have no source")
        whole_in = [tier for tier in (DISK, MEMORY) if len(parts[tier]) == world]
        self.reached.add(f"restored from {whole_in}" if whole_in else "restored from both together")

    def parts(self, tier: int) -> list[Part]:
        copies = self.copies.values() if tier == MEMORY else ()
        return [part for body in (*self.visible[tier].values(), *copies) for part in body.parts]


def explore(world: World, histories: int, seed: int = 0) -> tuple[dict[str, History], set[str]]:
    """Live so many histories; return those that broke a rule, one for each kind, and what was reached at all."""
    broken: dict[str, History] = {}
    reached: set[str] = set()
    for number in range(histories):
        history = History(world, seed * 1_000_000 + number)
        try:
            for _ in range(world.runs):
                history.live()
        except BrokenRuleError as error:
            history.log.append(str(error))
            broken.setdefault(str(error).split(":", maxsplit=1)[0], history)
        reached |= history.reached
    return broken, reached
