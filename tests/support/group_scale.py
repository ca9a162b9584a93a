"""The real protocol of many members over a simulated TCPStore: how many operations, and how long a decision takes.

The store's costs were measured with torch 2.13 on this project's machine (2 cores, loopback, values of 120 bytes,
medians): a round trip of ``add``, ``delete_key`` or one half of ``get`` (it asks whether the key is there, then for the
value) takes 18 us, a ``set`` 3 us where clients send them back to back, and a waiting ``get`` returns 118 us after the
``set``. Here the server spends the whole of each round trip on it, one after the other, which is more than it does.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter

from pccheck_async.format import Entry
from pccheck_async.group import Coordinator, Member, decode_decision, decode_message, encode
from pccheck_async.group.actions import Action, Admit, Post, Resolve, Scan, TakeOver, WriteRecord
from pccheck_async.store import Retention

ROUND_TRIP, SET, WAKE = 18e-6, 3e-6, 118e-6
RECORD = 0.24e-3
"""A record of a small store and its flush, as measured."""


@dataclass
class Store:
    """A TCPStore on a virtual clock: one server, one operation after the other."""

    now: float = 0.0
    operations: Counter[str] = field(default_factory=Counter)
    values: dict[str, bytes] = field(default_factory=dict)
    _waiting: defaultdict[str, list[Callable[[bytes], None]]] = field(default_factory=lambda: defaultdict(list))
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: count[int] = field(default_factory=count)
    _inbox: int = 0
    _free: float = 0.0

    def later(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), then))

    def run(self) -> None:
        while self._events:
            self.now, _, then = heapq.heappop(self._events)
            then()

    def add(self, then: Callable[[int], None]) -> None:
        def served() -> None:
            self._inbox += 1
            then(self._inbox - 1)

        self._serve("add", ROUND_TRIP, served)

    def set(self, key: str, value: bytes) -> None:
        def served() -> None:
            self.values[key] = value
            for then in self._waiting.pop(key, ()):
                self.later(WAKE, lambda then=then: self._read(key, then))  # type: ignore[misc]

        self._serve("set", SET, served)

    def multi_set(self, keys: Sequence[str], value: bytes) -> None:
        """One operation, which takes as long as so many that are sent back to back."""

        def served() -> None:
            for key in keys:
                self.values[key] = value
                for then in self._waiting.pop(key, ()):
                    self.later(WAKE, lambda key=key, then=then: self._read(key, then))  # type: ignore[misc]

        self._serve("multi_set", SET * len(keys), served)

    def get(self, key: str, then: Callable[[bytes], None]) -> None:
        def served() -> None:
            if key in self.values:
                self._read(key, then)
            else:
                self._waiting[key].append(then)

        self._serve("get", ROUND_TRIP, served)

    def delete(self, key: str) -> None:
        def served() -> None:
            del self.values[key]

        self._serve("delete", ROUND_TRIP, served)

    def _read(self, key: str, then: Callable[[bytes], None]) -> None:
        self._serve("", ROUND_TRIP, lambda: then(self.values[key]))

    def _serve(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        if name:
            self.operations[name] += 1
        self._free = max(self._free, self.now) + seconds
        self.later(self._free - self.now, then)


@dataclass(frozen=True)
class Timing:
    """Of one checkpoint, in seconds after the last record that prepared it was durable."""

    operations: int
    published: float
    learnt: float
    """By the last member."""
    python: float
    """Of rank 0, for all of it."""


class Cluster:
    """Members with equal disks, all of whose prepares end at once: nothing of rank 0's work is done before the last."""

    def __init__(self, world: int) -> None:
        self.world, self.store = world, Store()
        self.coordinator = Coordinator(world, Retention(), nonce=1)
        self.members = [Member(rank, world, max_in_flight=2, reserved=1, own=None) for rank in range(world)]
        self.python = 0.0
        self.prepared: list[float] = []
        self.published: list[float] = []
        self.learnt: list[float] = []
        self.posts: list[list[bytes]] = [[] for _ in range(world)]
        self.out = 0
        self.taken = 0
        for rank, member in enumerate(self.members):
            self.carry_out(rank, member.hello(domain="shared", host=str(rank), settings=""))
            self.listen(rank)
        self.take_next()
        self.store.run()

    def listen(self, rank: int) -> None:
        """Learn the next decision when it is there."""

        key = f"out/{rank}/{self.members[rank].learned}"

        def learn(data: bytes) -> None:
            self.store.delete(key)
            self.carry_out(rank, self.members[rank].learn(decode_decision(data)))
            self.listen(rank)

        self.store.get(key, learn)

    def take_next(self) -> None:
        """Rank 0's thread takes the inbox, message by message, and deletes behind."""
        key = f"in/{self.taken}"

        def take(data: bytes) -> None:
            began = perf_counter()
            decisions = [encode(one) for one in self.coordinator.receive(decode_message(data))]
            seconds = perf_counter() - began
            self.python += seconds
            self.store.delete(key)
            self.taken += 1
            self.store.later(seconds, lambda: self.publish(decisions))

        self.store.get(key, take)

    def publish(self, decisions: Sequence[bytes]) -> None:
        for data in decisions:
            self.store.multi_set([f"out/{rank}/{self.out}" for rank in range(self.world)], data)
            self.out += 1
            self.published.append(self.store.now)
        self.take_next()

    def carry_out(self, rank: int, actions: Sequence[Action]) -> None:
        member, store = self.members[rank], self.store
        for action in actions:
            match action:
                case Post():
                    self.post(rank, encode(action.message))
                case Scan():
                    self.carry_out(rank, member.found([]))
                case TakeOver():
                    self.carry_out(rank, member.took_over(rank.to_bytes(16)))
                case Admit():
                    entry = Entry(action.counter, action.counter, 0.0, 1, 0, 0, 0, 0, False, {})
                    store.later(1e-3, lambda at=action.counter, entry=entry: self.written(rank, at, entry))  # type: ignore[misc]
                case WriteRecord():
                    store.later(RECORD, lambda: self.flushed(rank))
                case Resolve():
                    assert action.outcome == "durable"
                    self.learnt.append(store.now)

    def post(self, rank: int, data: bytes) -> None:
        """One message after the other: the next ``add`` follows the ``set`` of the one before."""
        self.store.add(lambda number: self.store.set(f"in/{number}", data))

    def written(self, rank: int, counter: int, entry: Entry) -> None:
        self.carry_out(rank, self.members[rank].written(counter, entry))

    def flushed(self, rank: int) -> None:
        self.prepared.append(self.store.now)
        self.carry_out(rank, self.members[rank].record_durable())

    def checkpoint(self, step: int) -> Timing:
        self.prepared, self.published, self.learnt, self.python = [], [], [], 0.0
        self.store.operations.clear()
        for rank, member in enumerate(self.members):
            self.carry_out(rank, member.request(step))
        self.store.run()
        assert len(self.learnt) == self.world
        last = max(self.prepared)
        operations = self.store.operations.total()
        return Timing(operations, self.published[-1] - last, max(self.learnt) - last, self.python)


def measure(world: int) -> Timing:
    cluster = Cluster(world)
    cluster.checkpoint(1)  # joins
    cluster.checkpoint(2)
    timing = cluster.checkpoint(3)
    assert len(cluster.store.values) < 20  # nothing piles up, but the log
    print(
        f"\n  {world} members: {timing.operations / world:.2f} store operations each, decided "
        f"{timing.published * 1e3:.2f} ms after the last prepare, learnt by all after {timing.learnt * 1e3:.2f} ms, "
        f"{timing.python * 1e3:.1f} ms of Python on rank 0"
    )
    return timing
