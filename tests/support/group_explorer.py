"""Every interleaving of the real group protocol, deaths, power losses and restarts included, up to a bound.

A death of any ranks is "these ranks take no more steps, then the whole job restarts": the restart may come at any
moment, so that every set of ranks may have stopped before it, at any step. A store is two records, the durable one and
the one that is visible to a restart of processes; a power failure leaves either, on each store by itself.

A state is a tuple of small integers, each the number of a value in a table: members and coordinators are real objects,
and what one of them does is computed once and remembered. A restart renames runs and counters densely, in their order:
what comes after it depends on no more than that.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, permutations, product
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from pccheck_async.format import Entry
from pccheck_async.group import (
    Applied,
    Coordinator,
    Key,
    Member,
    Part,
    Run,
    SeenStore,
    View,
    decode_decision,
    decode_message,
    encode,
)
from pccheck_async.group.actions import (
    Action,
    Admit,
    Cancel,
    FillArrays,
    Free,
    MatchManifest,
    Post,
    RemoveOrphans,
    Resolve,
    ResolveChange,
    Scan,
    TakeOver,
    Unopened,
    WriteRecord,
)
from pccheck_async.group.messages import Abort, AnyDecision, Change, Commit, NotRestored, Ok, Restored, Start
from pccheck_async.store import Retention

_EVERYONE = 7
"""A hash of all ranks."""
_RESTART = 0.03
"""Of the steps of a random history, while others are possible."""
WRITES = (TakeOver, Admit, WriteRecord, Free, RemoveOrphans)
"""Actions that write to a store."""


@dataclass(frozen=True)
class Scenario:
    """What is explored; for each run the verbs that every rank calls.

    ``s`` saves, ``p`` pins the run's first, ``r`` rejects all from ``rejects_from`` on, ``q`` leaves, ``x`` leaves with
    an error.
    """

    name: str
    programs: tuple[str, ...]
    nodes: int = 1  # 1: a shared filesystem
    worlds: tuple[int, ...] = (2,)  # that a run may have; the first one has the first
    memberships: tuple[tuple[int, ...], ...] | None = None  # the node of each rank, in any run; None: all there are
    route: tuple[tuple[int, ...], ...] | None = None  # the node of each rank, run by run
    keep: int = 1
    max_in_flight: int = 2
    power: bool = True
    pins: int = 0  # that programs set, at most
    rejects_from: int = -1  # the number in its run of the first that is rejected; -1: the newest, restored or requested
    fails: int = 0  # data writes that fail
    latches: int = 0  # flushes of a record that fail
    force: bool = False  # a user goes on where parts of the only checkpoints are out of sight
    steps: tuple[int, ...] | None = None  # of the checkpoints of a run; None: each its own
    diverges: bool = False  # rank 1 saves another step at its second save
    leaves: str = ""  # what rank 1 does instead of all but its first verb
    differs: bool = False  # what is believed to be alike on all ranks is not
    slow: bool = False  # rank 0 takes messages in later, and what is cancelled ends later

    @property
    def rejects(self) -> bool:
        return any("r" in program for program in self.programs)


class Disk(NamedTuple):
    """What a store holds: its id, and the number of the body of its record."""

    store_id: bytes
    body: int


class Body(msgspec.Struct, frozen=True, array_like=True):
    applied: Applied | None
    parts: tuple[Part, ...]


class RankState(NamedTuple):
    member: int
    calls: int = 0  # verbs called so far
    changes: tuple[str, ...] = ()  # of the kept checkpoints, requested so far
    rejects: tuple[int, int] | None = None  # the counters from which and up to which a call rejects
    marked: bool = False  # its own record has the marks of that, and the second request is to be made
    takes_over: tuple[int, ...] | None = None  # places of the orphans that are made durable, too
    flushes: bool = False
    writes: tuple[int, ...] = ()  # admitted, not yet written
    leases: tuple[int, ...] = ()  # slots that no record names
    cancelled: tuple[int, ...] = ()  # being written all the same
    drained: bool = False
    latched: bool = False
    outcomes: tuple[tuple[int, str], ...] = ()


class Env(NamedTuple):
    """What does not change in a run."""

    members: tuple[int, ...]  # the node of each rank
    base: int
    surplus: int  # unproven ones and rejected ones, which have slots beside those that are kept
    restored: Key | None
    step: int  # of that
    program: str


class Best(NamedTuple):
    """The newest checkpoint that durable() or restore() returned, and the nodes that have its parts."""

    key: Key
    nodes: tuple[int, ...]


class Rejection(NamedTuple):
    """What a call of ``reject`` covers, and whether it returned on some rank, or a run began that passed over it."""

    keys: frozenset[Key]
    lasts: bool = False


class Promised(NamedTuple):
    """What the returns of ``pin`` and ``reject`` promise."""

    pins: frozenset[Key] = frozenset()
    rejections: frozenset[Rejection] = frozenset()

    @property
    def rejected(self) -> frozenset[Key]:
        return frozenset().union(*(one.keys for one in self.rejections))


class State(NamedTuple):
    disks: tuple[int, ...]  # two for each place
    best: int
    promised: int
    budget: int
    era: int
    env: int  # -1: nobody runs
    coordinator: int
    log: int
    ranks: tuple[int, ...]
    inbox: tuple[int, ...] = ()


class Table:
    """Numbers for values, equal ones the same."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.values: list[Any] = []

    def add(self, value: Any, key: Hashable = None) -> int:
        key = value if key is None else key
        number = self._numbers.setdefault(key, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number

    def __getitem__(self, number: int) -> Any:
        return self.values[number]


def frozen(value: Any) -> Any:
    """Return what two objects have in common where they behave alike."""
    if value is None or isinstance(value, (int, str, bytes, Enum)):
        return value
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, msgspec.msgpack.encode(value)
    if isinstance(value, tuple | list):
        return tuple(map(frozen, value))
    if isinstance(value, dict):
        return tuple((frozen(key), frozen(one)) for key, one in value.items())
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(frozen, value)))
    if isinstance(value, Retention):
        return value
    return type(value).__name__, *(frozen(getattr(value, name)) for name in _attributes(value))


def cloned(value: Any) -> Any:
    """Copy what may change, and share what may not."""
    if isinstance(value, dict):
        return {key: cloned(one) for key, one in value.items()}
    if isinstance(value, set):
        return set(value)
    if value is None or isinstance(value, (int, str, bytes, Enum, tuple, frozenset, msgspec.Struct, Retention)):
        return value
    copy = object.__new__(type(value))
    for name in _attributes(value):
        object.__setattr__(copy, name, cloned(getattr(value, name)))
    return copy


def _attributes(value: Any) -> list[str]:
    slots = getattr(type(value), "__slots__", None)
    return sorted(slots if slots is not None else vars(value))


def entry(counter: int, step: int) -> Entry:
    return Entry(counter, step, 0.0, 1, 0, 0, 0, 0, False, {})


def age(key: Key) -> tuple[int, int]:
    """Orders checkpoints in time: the explorer numbers runs by ``nonce``, in the order of their opening."""
    return key.run.nonce, key.counter


class Explorer:
    """Explores one scenario, breadth first."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        width = max(scenario.worlds)
        self.places = [(node, rank) for node in range(scenario.nodes) for rank in range(width)]
        self.place = {place: at for at, place in enumerate(self.places)}
        self.retention = Retention(keep_last=scenario.keep)
        self.bodies, self.disks, self.members, self.coordinators = Table(), Table(), Table(), Table()
        self.logs, self.ranks, self.envs, self.bests, self.promised, self.budgets = (Table() for _ in range(6))
        self.messages, self.decisions = Table(), Table()
        self.disks.add(None, "none")
        self.bests.add(None, "none")
        self._member_steps: dict[Any, tuple[int, tuple[Action, ...]]] = {}
        self._coordinator_steps: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self._keys: dict[int, frozenset[Key]] = {}
        self._labels: dict[str, str] = {}
        self._starts: dict[Any, list[tuple[str, State, list[str]]]] = {}
        self._restarted: set[Any] = set()
        self._complete: dict[tuple[int, ...], frozenset[Key]] = {}
        self.found: dict[str, tuple[str, list[str]]] = {}
        """Violations by their kind, each with the history that leads there."""
        self.states = 0
        self.transitions = 0
        self.whole = False
        """Whether everything was explored."""
        self.reached: set[str] = set()
        """What happened at all: a scenario that never gets there shows nothing."""

    # -- search

    def first(self) -> State:
        """Empty disks, and nobody runs."""
        return State(
            (0, 0) * len(self.places), 0, self.promised.add(Promised()),
            self.budgets.add((self.scenario.fails, self.scenario.latches)), 0, -1, -1, -1, (),
        )  # fmt: skip

    def explore(self, most: int = 3_000_000, *, stop: bool = False) -> Explorer:
        """Explore at most so many states; ``stop``: until something is found."""
        first = self.first()
        parents: dict[State, tuple[State | None, str]] = {first: (None, "")}
        queue = deque([first])
        while queue and len(parents) < most and not (stop and self.found):
            state = queue.popleft()
            for label, after, notes in chain(self.restarts(state), self.steps(state)):
                self.transitions += 1
                for note in notes:
                    self._note(note, parents, state, label)
                if after is not None and after not in parents:
                    parents[after] = (state, label)
                    if not notes:
                        queue.append(after)
        self.states, self.whole = len(parents), not queue
        return self

    def wander(self, steps: int, *, until: str = "", seed: int = 0) -> Explorer:
        """Take so many random steps, each history to its end, or until a violation of that kind is found."""
        choose = random.Random(seed)
        while self.transitions < steps and until not in self.found:
            state: State | None = self.first()
            parents: dict[State, tuple[State | None, str]] = {self.first(): (None, "")}
            while state is not None:
                self._restarted.clear()
                moves = list(self.steps(state)) if choose.random() > _RESTART else []
                moves = moves or list(self.restarts(state)) or list(self.steps(state))
                if not moves:
                    break
                label, after, notes = choose.choice(moves)
                self.transitions += 1
                for note in notes:
                    self._note(note, parents, state, label)
                if after is not None:
                    parents.setdefault(after, (state, label))
                state = None if notes else after
            self.states += len(parents)
        return self

    def _note(self, note: str, parents: dict[State, tuple[State | None, str]], state: State | None, label: str) -> None:
        kind = note.split(":", maxsplit=1)[0]
        if kind not in self.found:
            history = [label]
            while state is not None:
                state, before = parents[state]
                history.append(before)
            self.found[kind] = note, history[-2::-1]

    def summary(self) -> str:
        text = f"{self.scenario.name}: {self.states} states, {self.transitions} transitions"
        text += "" if self.whole else ", cut off"
        for note, history in self.found.values():
            text += f"\n  {note}\n    " + "\n    ".join(history)
        return text

    # -- records

    def body(self, disk: int) -> Body:
        value = self.disks[disk]
        return Body(None, ()) if value is None else self.bodies[value.body]

    def add_body(self, body: Body) -> int:
        return self.bodies.add(body, msgspec.msgpack.encode(body))

    def add_disk(self, store_id: bytes, body: Body) -> int:
        return self.disks.add(Disk(store_id, self.add_body(body)))

    def keys(self, disk: int) -> frozenset[Key]:
        """The checkpoints that a store names."""
        if disk not in self._keys:
            self._keys[disk] = frozenset(part.key for part in self.body(disk).parts)
        return self._keys[disk]

    def complete(self, disks: Sequence[int], which: int) -> frozenset[Key]:
        """The checkpoints that all their ranks' durable (0) or visible (1) records name, on whatever node."""
        chosen = tuple(disks[which::2])
        if chosen not in self._complete:
            ranks: dict[tuple[Key, int, int], set[int]] = {}
            for (_, rank), disk in zip(self.places, chosen, strict=True):
                for part in self.body(disk).parts:
                    ranks.setdefault((part.key, part.world, part.entry.step), set()).add(rank)
            self._complete[chosen] = frozenset(key for (key, world, _), there in ranks.items() if len(there) == world)
        return self._complete[chosen]

    # -- restarts

    def restarts(self, state: State) -> Iterator[tuple[str, State, list[str]]]:
        key = state.disks, state.best, state.promised, state.budget, state.era
        if state.era >= len(self.scenario.programs) or key in self._restarted:
            return
        self._restarted.add(key)
        for disks in self._losses(state.disks):
            canonical = self._rename(disks, self.bests[state.best], self.promised[state.promised])
            start = *canonical, state.budget, state.era
            if start not in self._starts:
                self._starts[start] = [self._start(*start, nodes) for nodes in self._memberships(state.era)]
            lost = "" if disks == state.disks else "power fails, "
            for label, after, notes in self._starts[start]:
                yield lost + label, after, notes

    def restart(self, state: State, lost: Sequence[bool], nodes: tuple[int, ...]) -> tuple[State, list[str]]:
        """Restart on these nodes; the places of which ``lost`` says so fall back to their durable records."""
        disks = list(state.disks)
        for at, one in enumerate(lost):
            disks[2 * at + 1] = disks[2 * at] if one else disks[2 * at + 1]
        canonical = self._rename(tuple(disks), self.bests[state.best], self.promised[state.promised])
        _, after, notes = self._start(*canonical, state.budget, state.era, nodes)
        return after, notes

    def _losses(self, disks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        pairs = [disks[at : at + 2] for at in range(0, len(disks), 2)]
        if not self.scenario.power:
            yield disks
            return
        for chosen in product(*((pair[1], pair[0]) if pair[0] != pair[1] else (pair[0],) for pair in pairs)):
            # What processes left visible is not durable for that.
            yield tuple(
                one
                for pair, kept in zip(pairs, chosen, strict=True)
                for one in (pair if kept == pair[1] else (kept, kept))
            )

    def _memberships(self, era: int) -> Iterator[tuple[int, ...]]:
        scenario = self.scenario
        if scenario.route is not None:
            yield scenario.route[era]
        elif scenario.memberships is not None:
            yield from scenario.memberships[:1] if era == 0 else scenario.memberships
        elif era == 0:
            yield tuple(range(scenario.worlds[0])) if scenario.nodes > 1 else (0,) * scenario.worlds[0]
        else:
            for world in scenario.worlds:
                yield from permutations(range(scenario.nodes), world) if scenario.nodes > 1 else [(0,) * world]

    def _rename(
        self, disks: tuple[int, ...], best: Best | None, promised: Promised
    ) -> tuple[tuple[int, ...], Best | None, Promised]:
        """Number runs, counters and decisions densely, in their order; forget rejected ones that no store names."""
        bodies = [self.body(disk) for disk in disks]
        applied = [body.applied for body in bodies if body.applied is not None]
        keys = {part.key for body in bodies for part in body.parts} | {key for one in applied for key in one.pinned}
        rejections = [one._replace(keys=one.keys & keys) for one in promised.rejections]
        keys |= promised.pins | ({best.key} if best is not None else set())
        runs = {key.run for key in keys} | {one.run for one in applied}
        nonces = _dense(run.nonce for run in runs)
        numbers = _dense(run.number for run in runs)
        counters = _dense(key.counter for key in keys)
        decisions = _dense(one.decisions for one in applied)

        def run(old: Run) -> Run:
            return Run(1 + numbers[old.number], 1 + nonces[old.nonce], old.members)

        def key(old: Key) -> Key:
            return Key(counters[old.counter], run(old.run))

        def renamed(disk: int) -> int:
            if disk == 0:
                return 0
            body = self.body(disk)
            mark = body.applied and Applied(
                run(body.applied.run), decisions[body.applied.decisions], tuple(map(key, body.applied.pinned))
            )
            parts = tuple(
                replace(part, run=run(part.run), entry=replace(part.entry, counter=counters[part.entry.counter]))
                for part in body.parts
            )
            return self.add_disk(self.disks[disk].store_id, Body(mark, parts))

        table = {disk: renamed(disk) for disk in set(disks)}
        new_best = None if best is None else Best(key(best.key), best.nodes)
        new_promised = Promised(
            frozenset(map(key, promised.pins)),
            frozenset(one._replace(keys=frozenset(map(key, one.keys))) for one in rejections if one.keys),
        )
        return tuple(table[disk] for disk in disks), new_best, new_promised

    def _start(
        self, disks: tuple[int, ...], best: Best | None, promised: Promised, budget: int, era: int,
        nodes: tuple[int, ...],
    ) -> tuple[str, State, list[str]]:  # fmt: skip
        """Open the group on these nodes, and restore, with the real protocol; nothing is written meanwhile."""
        notes: list[str] = []
        world = len(nodes)
        seen = [
            SeenStore(node, rank, self.disks[disk].store_id, self.body(disk).applied, self.body(disk).parts)
            for (node, rank), disk in zip(self.places, disks[1::2], strict=True)
            if disk != 0
        ]
        own = {(one.domain, one.rank): one for one in seen}
        runs = [one.nonce for one in self._runs(disks)]
        nonce = max([0, *runs, *([best.key.run.nonce] if best else []), *(key.run.nonce for key in promised.pins)]) + 1
        coordinator = Coordinator(world, self.retention, nonce)
        members = [
            Member(rank, world, max_in_flight=self.scenario.max_in_flight, reserved=self.scenario.keep,
                   own=own.get((nodes[rank], rank)))
            for rank in range(world)
        ]  # fmt: skip
        log: list[AnyDecision] = []
        found: list[Restored | NotRestored] = []
        refused: list[str] = []
        views: list[View] = []

        def carry_out(rank: int, actions: Sequence[Action]) -> None:
            member = members[rank]
            for action in actions:
                match action:
                    case Post():
                        log.extend(coordinator.receive(action.message))
                    case Scan():
                        there = [one for one in seen if one.domain == nodes[rank]]
                        carry_out(rank, member.found(there))
                    case MatchManifest():
                        carry_out(rank, member.restore.matched("ok"))
                    case FillArrays():
                        carry_out(rank, member.restore.verified())
                    case Unopened():
                        refused.append(action.why)
                if isinstance(action, WRITES):
                    notes.append(f"G6: opening does {type(action).__name__}")

        def deliver() -> None:
            while any(member.learned < len(log) for member in members):
                for rank, member in enumerate(members):
                    while member.learned < len(log):
                        decision = log[member.learned]
                        if rank == 0 and isinstance(decision, Restored | NotRestored):
                            found.append(decision)
                        carry_out(rank, member.learn(decision))

        for rank, member in enumerate(members):
            carry_out(rank, member.hello(domain=str(nodes[rank]), host=str(nodes[rank]), settings=""))
        deliver()
        label = f"restart on nodes {nodes}"
        key = None
        if not refused:
            view = members[0].view
            assert view is not None
            views.append(view)
            for rank, member in enumerate(members):
                carry_out(rank, member.restore.request(None))
            deliver()
            key = found[0].key if isinstance(found[0], Restored) else None
            label += f", restores {key and (key.counter, key.run.nonce)}"
            notes += self._judge_view(view, disks, nodes)
            notes += self._judge_rejections(view, key, promised)
            promised = promised._replace(rejections=frozenset(self._not_undone(view, promised)))
        notes += self._judge_start(key, best, refused, found, disks, nodes)
        stops = bool(refused) or (bool(found) and isinstance(found[0], NotRestored) and found[0].reason != "none")
        if stops and not (found and self.scenario.force):
            return f"{label}, and stops", self._state(disks, best, promised, budget, era + 1), notes
        view = views[0]
        program = self.scenario.programs[min(era, len(self.scenario.programs) - 1)]
        step = next((one.entry.step for one in view.complete if one.key == key), -1)
        surplus = len(view.unproven) + sum(one.entry.rejected for one in view.complete)
        env = Env(nodes, view.base, surplus, key, step, program)
        ranks = tuple(self.ranks.add(RankState(self._add_member(member))) for member in members)
        after = self._state(disks, best, promised, budget, era + 1)._replace(
            env=self.envs.add(env),
            coordinator=self.coordinators.add(coordinator, frozen(coordinator)),
            log=self.logs.add(tuple(self._add_decision(one) for one in log)),
            ranks=ranks,
        )
        return label, after, notes

    def _state(self, disks: tuple[int, ...], best: Best | None, promised: Promised, budget: int, era: int) -> State:
        return State(disks, self._add_best(best), self.promised.add(promised), budget, era, -1, -1, -1, ())

    def _add_best(self, best: Best | None) -> int:
        return 0 if best is None else self.bests.add(best)

    def _add_member(self, member: Member) -> int:
        return self.members.add(member, frozen(member))

    def _add_decision(self, decision: AnyDecision) -> int:
        data = encode(decision)
        return self.decisions.add(decode_decision(data), data)

    def _runs(self, disks: Sequence[int]) -> Iterator[Run]:
        for disk in disks:
            body = self.body(disk)
            yield from (part.run for part in body.parts)
            if body.applied is not None:
                yield body.applied.run

    def _judge_view(self, view: View, disks: Sequence[int], nodes: Sequence[int]) -> list[str]:
        for one in view.complete:
            for rank, domain in enumerate(one.places):
                node = list(dict.fromkeys(nodes))[domain]
                if one.key not in self.keys(disks[2 * self.place[node, rank] + 1]):
                    return [f"G3: parts of other checkpoints count for {one.key}"]
        return []

    def _judge_rejections(self, view: View, key: Key | None, promised: Promised) -> list[str]:
        notes = []
        for one in promised.rejections:
            found = {each.key: each.entry.rejected for each in view.complete if each.key in one.keys}
            if one.lasts and (key in one.keys or not all(found.values())):
                notes.append(f"REJECT: reject() returned, and {key} is restored; of {one.keys} are there {found}")
            elif len({*found.values()}) > 1:
                notes.append(f"REJECT: a crash left some of {one.keys} rejected: {found}")
        return notes

    def _not_undone(self, view: View, promised: Promised) -> Iterator[Rejection]:
        """Give those of which no rank had a mark durable before a crash: they are as if they had not been called."""
        whole = {one.key for one in view.complete if not one.entry.rejected}
        return (one for one in promised.rejections if one.lasts or not one.keys & whole)

    def _judge_start(
        self, key: Key | None, best: Best | None, refused: list[str], found: Sequence[Restored | NotRestored],
        disks: Sequence[int], nodes: Sequence[int],
    ) -> list[str]:  # fmt: skip
        complete = self.complete(disks, 1)
        if refused and len({one.counter for one in complete}) < len(complete):
            return []  # two runs that could not see each other both got so far: nobody can tell which one is wanted
        due = best is not None and set(best.nodes) <= set(nodes)
        if best is not None and due:
            if refused:
                return [f"L: opening is refused though all parts of the newest are there: {refused[0]}"]
            if key is None or age(key) < age(best.key):
                return [f"G4: {best.key} was durable, recovery finds {key}"]
        there = {node for (node, _), disk in zip(self.places, disks[1::2], strict=True) if disk}
        stops = refused or (found and isinstance(found[0], NotRestored) and found[0].reason != "none")
        if best is None and stops and there <= set(nodes):
            return [f"L: nothing was ever durable, all is in sight, and yet {refused or found[0]}"]
        return []

    # -- one run

    def steps(self, state: State) -> Iterator[tuple[str, State | None, list[str]]]:
        """What each rank may do next."""
        if state.env < 0:
            return
        progress, ended = False, True
        for rank, number in enumerate(state.ranks):
            one: RankState = self.ranks[number]
            member: Member = self.members[one.member]
            ended = ended and one.drained and member.idle and not state.inbox
            for move in self._moves(state, rank, one, member):
                progress = True
                step = Step(self, state)
                step.run(rank, *move)
                yield self._label(rank, move), step.state(), step.notes
        if state.inbox:
            progress = True
            step = Step(self, state)
            step.receive()
            yield self._label(0, ("receive",)), step.state(), step.notes
        if not progress and not ended and self.budgets[state.budget][1] == self.scenario.latches:
            broken = all(self.members[self.ranks[number].member].stopped for number in state.ranks)
            if not broken:
                yield "nothing can happen any more", None, ["L: deadlock"]
        coordinator: Coordinator = self.coordinators[state.coordinator]
        if not progress and self.envs[state.env].program[-1] in "qx" and coordinator.remaining:
            yield "nothing can happen any more", None, ["L: rank 0 waits for a rank that left"]

    def _label(self, rank: int, move: tuple[Any, ...]) -> str:
        label = f"rank {rank}: {' '.join(map(str, move))}"
        return self._labels.setdefault(label, label)

    def _moves(self, state: State, rank: int, one: RankState, member: Member) -> Iterator[tuple[Any, ...]]:
        fails, latches = self.budgets[state.budget]
        env: Env = self.envs[state.env]
        if one.takes_over is not None:
            yield ("take over",)
        if one.flushes:
            yield ("flush",)
            if latches:
                yield ("flush fails",)
        if member.learned < len(self.logs[state.log]):
            decision = self.decisions[self.logs[state.log][member.learned]]
            yield "learn", type(decision).__name__, getattr(decision, "counter", "")
        for counter in one.cancelled:
            yield "released", counter
        for counter in one.writes:
            yield "written", counter
            if fails:
                yield "fails", counter
        program = env.program[:1] + self.scenario.leaves if self.scenario.leaves and rank == 1 else env.program
        if one.calls < len(program):
            verb = program[one.calls]
            if one.rejects is not None and verb != "s":
                pass  # until that call returned
            elif verb != "p" or env.base + 1 in dict(one.outcomes) or member.stopped is not None:
                yield ("call", verb)
        elif not one.drained and one.rejects is None:
            yield ("drain",)
        if one.marked:
            yield ("ask again",)


def _dense(values: Iterator[int]) -> dict[int, int]:
    return {value: number for number, value in enumerate(sorted(set(values)))}


@dataclass
class Step:
    """One move of one rank, and what follows from it at once."""

    explorer: Explorer
    before: State
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        x, before = self.explorer, self.before
        self.disks = list(before.disks)
        self.best: Best | None = x.bests[before.best]
        self.promised: Promised = x.promised[before.promised]
        self.fails, self.latches = x.budgets[before.budget]
        self.env: Env = x.envs[before.env]
        self.coordinator = before.coordinator
        self.log: tuple[int, ...] = x.logs[before.log]
        self.inbox = before.inbox
        self.ranks: list[RankState] = [x.ranks[number] for number in before.ranks]

    def state(self) -> State:
        x = self.explorer
        return State(
            tuple(self.disks), x._add_best(self.best), x.promised.add(self.promised),
            x.budgets.add((self.fails, self.latches)), self.before.era, self.before.env, self.coordinator,
            x.logs.add(self.log), tuple(x.ranks.add(one) for one in self.ranks), self.inbox,
        )  # fmt: skip

    def run(self, rank: int, move: str, *arguments: Any) -> None:
        one = self.ranks[rank]
        at = 2 * self._place(rank)
        match move:
            case "take over":
                self._take_over(rank)
            case "flush":
                self._change(rank, flushes=False)
                self.disks[at] = self.disks[at + 1]
                self._call(rank, "record_durable")
            case "flush fails":
                self.latches -= 1
                self._change(rank, flushes=False, latched=True)
                self._call(rank, "record_failed", "EIO")
            case "learn":
                self._call(rank, "learn", self.log[self._member(rank).learned])
            case "written":
                self._end_write(rank, arguments[0])
                self._call(rank, "written", arguments[0], self._step(rank, arguments[0]))
            case "fails":
                self.fails -= 1
                self._end_write(rank, arguments[0])
                self._end_lease(rank, arguments[0])
                self._call(rank, "failed", arguments[0], "ENOSPC")
            case "drain":
                self._change(rank, drained=True)
                self._call(rank, "drain")
            case "call":
                self._change(rank, calls=one.calls + 1)
                match arguments[0]:
                    case "s":
                        known = tuple(sorted(self._member(rank).differing))
                        claims = (None, None, known) if known else ()
                        self._call(rank, "request", self._step(rank, self._member(rank).counter + 1), *claims)
                    case "p":
                        self._change(rank, changes=(*one.changes, "pin"))
                        self._call(rank, "pin", self._step(0, self.env.base + 1), True)
                    case "r":
                        index, until = self.explorer.scenario.rejects_from, self._member(rank).counter
                        first = until if index < 0 else min(until, self.env.base + 1 + index)
                        self._change(rank, changes=(*one.changes, "reject"), rejects=(first, until))
                        self._call(rank, "reject", self._rejected_step(first), until)
                    case verb:
                        self._call(rank, "leave", None if verb == "q" else "an error")
            case "ask again":
                assert one.rejects is not None
                first, until = one.rejects
                self._change(rank, changes=(*one.changes, "was rejected"), marked=False)
                self._call(rank, "was_rejected", self._rejected_step(first), until)
            case "released":
                self._change(rank, cancelled=tuple(each for each in one.cancelled if each != arguments[0]))
                self._end_lease(rank, arguments[0])
                self._call(rank, "released", arguments[0])

    def _step(self, rank: int, counter: int) -> int:
        index = counter - self.env.base - 1
        steps = self.explorer.scenario.steps
        diverged = self.explorer.scenario.diverges and rank == 1 and index == 1
        later = self.before.era if self.explorer.scenario.rejects else 1  # steps grow from run to run
        return 100 * later + counter if steps is None else steps[index] if not diverged else -1

    def _rejected_step(self, counter: int) -> int:
        return self._step(0, counter) if counter > self.env.base else self.env.step

    def _place(self, rank: int) -> int:
        return self.explorer.place[self.env.members[rank], rank]

    def _member(self, rank: int) -> Member:
        member: Member = self.explorer.members[self.ranks[rank].member]
        return member

    def _change(self, rank: int, **fields: Any) -> None:
        self.ranks[rank] = self.ranks[rank]._replace(**fields)

    def _call(self, rank: int, name: str, *arguments: Any) -> None:
        x = self.explorer
        key = self.ranks[rank].member, name, arguments
        known = x._member_steps.get(key)
        if known is None:
            member = cloned(x.members[key[0]])
            match name:
                case "learn":
                    actions = member.learn(x.decisions[arguments[0]])
                case "written":
                    shares = x.scenario.differs and not member._jobs[arguments[0]].differing
                    sample = ({_EVERYONE: (0, rank)}, {"weights": rank}) if shares else ({}, {})
                    actions = member.written(arguments[0], entry(*arguments), *sample)
                case _:
                    actions = getattr(member, name)(*arguments)
            known = x._member_steps[key] = x._add_member(member), tuple(actions)
        self._change(rank, member=known[0])
        for action in known[1]:
            self._carry_out(rank, action)

    def _carry_out(self, rank: int, action: Action) -> None:
        x, at = self.explorer, 2 * self._place(rank)
        match action:
            case Post():
                self._deliver(rank, action)
            case TakeOver():
                places = [x.place[self.env.members[rank], store.rank] for store in action.orphans]
                self._change(rank, takes_over=tuple(places))
            case Admit():
                one = self.ranks[rank]
                self._change(rank, writes=(*one.writes, action.counter), leases=(*one.leases, action.counter))
                self._count_slots(rank)
            case Cancel():
                self._end_write(rank, action.counter)
                if x.scenario.slow:
                    self._change(rank, cancelled=(*self.ranks[rank].cancelled, action.counter))
                else:
                    self._end_lease(rank, action.counter)
                    self._call(rank, "released", action.counter)
            case WriteRecord():
                self._replace(at, x.add_disk(x.disks[self.disks[at + 1]].store_id, Body(action.applied, action.parts)))
                self._change(rank, flushes=True)
                for part in action.parts:
                    self._end_lease(rank, part.entry.counter)
            case Free():
                if x.keys(self.disks[at]) & {part.key for part in action.parts}:
                    self.notes.append("G1: a slot is free that the durable record names (I3)")
            case RemoveOrphans():
                x.reached.add("orphan removed")
                for store in action.stores:
                    self._replace(2 * x.place[self.env.members[rank], store.rank], 0)  # power loss may bring it back
            case Resolve():
                self._resolve(rank, action)
            case ResolveChange():
                self._resolve_change(rank, action)

    def _deliver(self, rank: int, post: Post) -> None:
        """Put a message into the inbox; unless ``slow``, rank 0 takes it at once.

        That it takes it later is the same as that all learn later, but for what it reads of its own step.
        """
        x, message = self.explorer, post.message
        if isinstance(message, Ok):
            key = Key(message.counter, message.run)
            if key not in x.keys(self.disks[2 * self._place(rank)]):
                self.notes.append(f"G2: rank {rank} says ok to {key}, which its durable record does not name")
        self.inbox += (x.messages.add(decode_message(encode(message)), frozen(message)),)
        if not x.scenario.slow:
            self.receive()

    def receive(self) -> None:
        """Let rank 0 take the next message."""
        x, number, self.inbox = self.explorer, self.inbox[0], self.inbox[1:]
        known = x._coordinator_steps.get((self.coordinator, number))
        if known is None:
            coordinator = cloned(x.coordinators[self.coordinator])
            decisions = coordinator.receive(x.messages[number])
            known = x.coordinators.add(coordinator, frozen(coordinator)), tuple(map(x._add_decision, decisions))
            x._coordinator_steps[self.coordinator, number] = known
        self.coordinator = known[0]
        self.log += known[1]
        for one in known[1]:
            decision = x.decisions[one]
            x.reached.add(type(decision).__name__)
            if isinstance(decision, Commit):
                self._judge_commit(decision)
            elif isinstance(decision, Start) and self.env.restored is not None:
                self._note_best(self.env.restored)  # what restore() returned: all took over by now
                view: View = x.coordinators[self.coordinator]._view  # its marks are durable by now
                self._make_last({one.key for one in view.complete if one.entry.rejected})
            elif isinstance(decision, Change) and decision.why is None and self._change_of(0, decision) == "reject":
                self._note_rejection()

    def _change_of(self, rank: int, answer: Change | ResolveChange) -> str:
        return self.ranks[rank].changes[answer.index]

    def _note_rejection(self) -> None:
        """Record a rejection that was decided; what is to be found after it is the newest that it left."""
        keys = self._rejected_keys(0)
        self.promised = self.promised._replace(rejections=self.promised.rejections | {Rejection(keys)})
        if self.best is not None and self.best.key in keys:
            self.best = None
            coordinator: Coordinator = self.explorer.coordinators[self.coordinator]
            committed = [Key(entry.counter, run) for run, entry in coordinator._newest_first()]
            self._note_best(next(key for key in committed if key not in self.promised.rejected))

    def _rejected_keys(self, rank: int) -> frozenset[Key]:
        rejects, base, run = self.ranks[rank].rejects, self.env.base, self.explorer.coordinators[self.coordinator].run
        assert rejects is not None
        first, until = rejects
        keys = {self.env.restored} if first <= base and self.env.restored is not None else set[Key]()
        return frozenset(keys | {Key(counter, run) for counter in range(max(first, base + 1), until + 1) if run})

    def _make_last(self, keys: Set[Key]) -> None:
        rejections = {one._replace(lasts=one.lasts or bool(one.keys & keys)) for one in self.promised.rejections}
        self.promised = self.promised._replace(rejections=frozenset(rejections))

    def _resolve_change(self, rank: int, action: ResolveChange) -> None:
        x, one, member = self.explorer, self.ranks[rank], self._member(rank)
        change = self._change_of(rank, action)
        if action.why is not None:
            x.reached.add(f"no {change}")
            self._change(rank, rejects=None if "reject" in change else one.rejects)
        elif change == "pin" and member.run is not None:
            x.reached.add("pinned")
            self.promised = self.promised._replace(pins=self.promised.pins | {Key(self.env.base + 1, member.run)})
        elif one.rejects is None:
            pass  # the group broke, and the call had an answer, before the record was durable
        elif change == "reject":
            self._change(rank, marked=True)
        else:
            x.reached.add("rejected")
            self._make_last(self._rejected_keys(rank))
            self._change(rank, rejects=None)

    def _judge_commit(self, commit: Commit) -> None:
        x = self.explorer
        run: Run = x.coordinators[self.coordinator].run
        key = Key(commit.counter, run)
        if commit.superseded:
            x.reached.add("superseded")
        if key not in x.complete(self.disks, 0):
            self.notes.append(f"G3: {key} is committed, and not all durable records name it")
        jobs = [self._member(rank)._jobs[commit.counter] for rank in range(len(self.ranks))]
        if x.scenario.differs and not all(job.differing for job in jobs):
            self.notes.append(f"G11: {key} is committed, and some rank left what differs to another one")
        steps = {part.entry.step for disk in self.disks[::2] for part in x.body(disk).parts if part.key == key}
        if len(steps) > 1:
            self.notes.append(f"G7: {key} is committed, and its parts are of steps {steps}")

    def _resolve(self, rank: int, action: Resolve) -> None:
        x = self.explorer
        for other in self.ranks:
            outcome = dict(other.outcomes).get(action.counter)
            if outcome not in (None, action.outcome):
                self.notes.append(f"G8: {action.counter} is {action.outcome} on rank {rank}, {outcome} on another")
        one = self.ranks[rank]
        self._change(rank, outcomes=tuple(sorted({*one.outcomes, (action.counter, action.outcome)})))
        x.reached.add(action.outcome)
        if action.outcome == "durable":
            run = self._member(rank).run
            assert run is not None
            key = Key(action.counter, run)
            if not any(age(newer) >= age(key) for newer in x.complete(self.disks, 0)):
                self.notes.append(f"G3: durable() returns {key}, which is not complete, nor is a newer one")
            self._note_best(key)

    def _note_best(self, key: Key) -> None:
        if key in self.promised.rejected:  # a rank learns late that it was durable
            return
        if self.best is None or age(key) > age(self.best.key):
            x = self.explorer
            nodes = {node for (node, _), disk in zip(x.places, self.disks[::2], strict=True) if key in x.keys(disk)}
            self.best = Best(key, tuple(sorted(nodes & set(self.env.members))))

    def _take_over(self, rank: int) -> None:
        x = self.explorer
        at = 2 * self._place(rank)
        orphans = self.ranks[rank].takes_over or ()
        self._change(rank, takes_over=None)
        if self.disks[at + 1] == 0:
            store_id = f"{at // 2}/{self.before.era}".encode()
            self.disks[at + 1] = x.add_disk(store_id, Body(None, ()))
        self.disks[at] = self.disks[at + 1]
        for place in orphans:
            self.disks[2 * place] = self.disks[2 * place + 1]
        self._call(rank, "took_over", x.disks[self.disks[at]].store_id)

    def _end_write(self, rank: int, counter: int) -> None:
        self._change(rank, writes=tuple(one for one in self.ranks[rank].writes if one != counter))

    def _end_lease(self, rank: int, counter: int) -> None:
        self._change(rank, leases=tuple(one for one in self.ranks[rank].leases if one != counter))

    def _count_slots(self, rank: int) -> None:
        """G10, over what the durable and the visible record name, and what is being written."""
        x, at, scenario = self.explorer, 2 * self._place(rank), self.explorer.scenario
        named = x.keys(self.disks[at]) | x.keys(self.disks[at + 1])
        slots = len(named) + len(self.ranks[rank].leases)
        most = scenario.max_in_flight + scenario.keep + scenario.pins + self.env.surplus
        if slots > most:
            self.notes.append(f"G10: rank {rank} has {slots} slots, at most {most}")

    def _differs(self, key: Key) -> bool:
        """Whether it was aborted although all prepared it: what is alike on all ranks was not."""
        run: Run = self.explorer.coordinators[self.coordinator].run
        decisions = map(self.explorer.decisions.__getitem__, self.log)
        aborted = {each.counter for each in decisions if isinstance(each, Abort) and each.cause == "differs"}
        return key.run == run and key.counter in aborted

    def _replace(self, at: int, new: int) -> None:
        """Replace a visible record; judge what is dropped by that (G1)."""
        x, old, rejected = self.explorer, self.disks[at + 1], self.promised.rejected
        for key in x.keys(old) - x.keys(new):
            if key in self.promised.pins:
                self.notes.append(f"PIN: {key} is dropped though pin() returned")
            newer = any(age(other) > age(key) for other in x.complete(self.disks, 0) - rejected)
            if not newer and key in x.complete(self.disks, 1) - rejected and not self._differs(key):
                self.notes.append(f"G1: {key} is complete, nothing newer is, and a part is dropped")
        self.disks[at + 1] = new
