"""Groups of forked ranks that live, are killed with SIGKILL, and live again; every restart is compared bit for bit.

Each rank is a fork of this process, which holds torch already but has no engine. Nodes are folders: the group's folder
has one name in all of them, and ranks of different nodes do not see each other's.
"""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pccheck_async import Group, GroupError, MemoryTier, PendingCheckpoint, SyncCheckpointEngine
from pccheck_async.format import Tier
from pccheck_async.group import actions, messages
from pccheck_async.group.actions import Action, Post
from pccheck_async.group.control import Server
from pccheck_async.group.driver import Driver
from tests.support.ranks import meet, meeting_place

_MESSAGE = struct.Struct("=Bqq")
_RESTORED, _DURABLE, _ENDED, _WRONG, _LOST = range(5)
PATIENCE = 60.0
"""Seconds without a word from any rank that lives, after which it hangs."""

Point = Callable[[object], bool]


def _posts(kind: type) -> Point:
    return lambda action: isinstance(action, actions.Post) and isinstance(action.message, kind)


POINTS: dict[str, Point] = {
    "join": lambda action: isinstance(action, actions.TakeOver),
    "joined": _posts(messages.Joined),
    "admit": lambda action: isinstance(action, actions.Admit),
    "record": lambda action: isinstance(action, actions.WriteRecord),
    "vote": _posts(messages.Ok),
    "decide": lambda said: isinstance(getattr(said, "decision", said), messages.Commit),
    "learn": lambda action: isinstance(action, actions.Resolve),
    "free": lambda action: isinstance(action, actions.Free),
}
"""Where a rank may be killed, before or after: the steps of the commit. "decide" is rank 0's alone."""


def state_of(step: int, rank: int, elements: int) -> dict[str, Any]:
    """Every byte follows from step and rank."""
    tensor = torch.arange(elements, dtype=torch.int64).mul_(step + 2).add_(rank)
    return {"tensor": tensor, "step": step, "rank": rank, "text": f"step {step} of rank {rank}"}


@dataclass(frozen=True)
class Kill:
    """Rank ``rank`` (None: all at once) dies when it comes to ``point`` for the ``count``-th time, or some time on."""

    rank: int | None
    point: str | None = None
    after: bool = False
    count: int = 1
    seconds: float = 0.0


@dataclass
class Lives:
    """Lives and deaths of one group."""

    root: Path
    seed: int
    elements: int = 5_000
    acknowledged: int = -1
    restored: list[int] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    memory: Path | None = None
    """A tmpfs: two of three checkpoints are saved there alone, and are acknowledged once they are there."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def live(self, nodes: Sequence[int], kill: Kill | None = None, *, steps: int = 1_000_000) -> None:
        """Let ranks run on ``nodes``, one each, until they are killed, or without a kill until they made ``steps``."""
        for node in set(nodes):
            (self.root / f"node{node}").mkdir(exist_ok=True)
        for path in self.root.glob("failed-*"):
            path.unlink()
        place = meeting_place()
        reader, writer = os.pipe()
        pids: list[int] = []
        for rank, node in enumerate(nodes):
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                folder, tier = self.root / f"node{node}" / "run", None
                if self.memory is not None:
                    (self.memory / f"node{node}").mkdir(exist_ok=True)
                    tier = MemoryTier(path=str(self.memory / f"node{node}"))
                _be_rank(rank, len(nodes), folder, place, writer, self.elements, steps, kill, tier)
            pids.append(pid)
        os.close(writer)
        before = self.acknowledged
        restored: dict[int, int] = {}
        try:
            ended = self._watch(pids, reader, kill, restored)
        finally:
            for pid in pids:
                _kill(pid)
            while data := os.read(reader, _MESSAGE.size):  # what was said before they died
                self._hear(data, restored)
            os.close(reader)
        assert kill is not None or ended == len(pids), f"only {ended} of {len(pids)} ranks ended by themselves"
        found = set(restored.values())
        assert len(found) <= 1, f"ranks restored different steps: {restored}"
        assert all(step >= before for step in found), f"restored {found}, and {before} was acknowledged"
        self.restored += found

    def _watch(self, pids: list[int], reader: int, kill: Kill | None, restored: dict[int, int]) -> int:
        """Kill at the moment that was chosen; return how many ranks ended by themselves."""
        ended, self._lost = 0, False
        begun = last = time.monotonic()
        death: float | None = None
        while ended < len(pids):
            ready, _, _ = select.select([reader], [], [], 0.01)
            now = time.monotonic()
            if ready:
                if not (data := os.read(reader, _MESSAGE.size)):
                    break
                last = now
                ended += self._hear(data, restored)
                if len(restored) == len(pids) and death is None:
                    self.slowest = max(self.slowest, now - begun)
                    death = now + (kill.seconds if kill is not None else 0.0)
            assert now - last < PATIENCE, f"nothing was heard for {PATIENCE} s: restored {restored}, {ended} ended"
            if kill is None:
                continue
            if kill.point is None and death is not None and now > death:
                for rank in range(len(pids)) if kill.rank is None else (kill.rank,):
                    _kill(pids[rank])
                self.kills["all ranks" if kill.rank is None else "some time"] += 1
                break
            if self._lost and kill.point is not None:  # its victim just died, and the others say that it did
                victim, deadline = pids[kill.rank or 0], now + 2
                while not (dead := _is_dead(victim)) and time.monotonic() < deadline:
                    time.sleep(0.01)
                why = "".join(path.read_text() for path in self.root.glob("failed-*"))
                assert dead, f"a rank failed although none was killed: {why}"
                self.kills[f"{'after' if kill.after else 'before'} {kill.point}"] += 1
                break
            if kill.point is not None and _is_dead(pids[kill.rank or 0]):
                self.kills[f"{'after' if kill.after else 'before'} {kill.point}"] += 1
                break
        if kill is not None:
            time.sleep(self.random.uniform(0, 0.05))  # until the launcher ends the others
        return ended

    def _hear(self, data: bytes, restored: dict[int, int]) -> bool:
        """Take in what a rank says; return whether it ended."""
        kind, rank, step = _MESSAGE.unpack(data)
        assert kind != _WRONG, f"rank {rank} found something else than it saved, or failed"
        if kind == _RESTORED:
            restored[rank] = step
        elif kind == _LOST:
            self._lost = True
        elif kind == _DURABLE:
            self.acknowledged = max(self.acknowledged, step)
        return bool(kind == _ENDED)


def _be_rank(
    rank: int,
    world: int,
    folder: Path,
    place: tuple[int, str],
    pipe: int,
    elements: int,
    steps: int,
    kill: Kill | None,
    memory: MemoryTier | None,
) -> None:
    """Run one rank, and never return."""

    def say(kind: int, step: int = 0) -> None:
        os.write(pipe, _MESSAGE.pack(kind, rank, step))

    ready = False
    try:
        gc.freeze()  # what it has from its parent is not its garbage, and looking at it copies every page of it
        torch.set_num_threads(1)
        if kill is not None and kill.point is not None and kill.rank == rank:
            _arm(kill)
        group = Group(rank, world, meet(place), timeout=PATIENCE / 2)
        with SyncCheckpointEngine(folder, group=group, memory=memory) as engine:
            state = state_of(-1, rank, elements)
            restored = engine.restore(state, private="modulo")
            step = -1 if restored is None else restored.step
            expected = state_of(step, state["rank"], elements)
            if restored is not None and state["rank"] != rank:
                assert state["rank"] < rank, f"rank {rank} restored the part of rank {state['rank']}"
            assert torch.equal(state.pop("tensor"), expected.pop("tensor"))
            assert state == expected, (state, expected)
            say(_RESTORED, step)
            ready = kill is not None
            waiting: list[Any] = []

            def reached(number: int, pending: PendingCheckpoint) -> None:
                if memory is not None:
                    pending.wait_reached("memory", PATIENCE)
                say(_DURABLE, number if memory is not None else pending.result().step)

            for number in range(step + 1, step + 1 + steps):
                tier: Tier = "disk" if memory is None or number % 3 == 0 else "memory"
                waiting.append((number, engine.checkpoint(state_of(number, rank, elements), step=number, tier=tier)))
                if len(waiting) == 2:
                    reached(*waiting.pop(0))
            for each in waiting:
                reached(*each)
        say(_ENDED)
    except BaseException as error:  # noqa: BLE001 - nobody else would hear of it
        (folder.parent.parent / f"failed-{rank}").write_text(traceback.format_exc())
        # The victim may have restored, saved and died before the last message of the restore came here.
        lost = ready or (kill is not None and isinstance(error, GroupError))
        if not lost:
            traceback.print_exc()
        say(_LOST if lost else _WRONG)
        time.sleep(PATIENCE)  # until the launcher ends it: a rank that another one's death made fail
    finally:
        os._exit(0)


def _arm(kill: Kill) -> None:
    """Let this process kill itself where it comes to the point."""
    matches, left = POINTS[kill.point or ""], kill.count

    def reached(thing: object, *, after: bool) -> None:
        nonlocal left
        if after == kill.after and matches(thing):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    do, publish = Driver.do, Server._publish

    def do_one_by_one(self: Driver, actions: Collection[Action]) -> None:
        for action in actions:
            reached(action, after=False)
            do(self, [action])
            if isinstance(action, Post):
                time.sleep(0.002)  # until it is sent
            reached(action, after=True)

    def publish_one_by_one(self: Server, decisions: Sequence[messages.AnyDecision]) -> None:
        publish(self, [])
        for decision in decisions:
            reached(decision, after=False)
            publish(self, [decision])
            reached(decision, after=True)

    Driver.do = do_one_by_one  # type: ignore[method-assign]
    Server._publish = publish_one_by_one  # type: ignore[method-assign]


def _is_dead(pid: int) -> bool:
    found, _ = os.waitpid(pid, os.WNOHANG)
    return found == pid


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
