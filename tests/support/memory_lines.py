"""Random histories of a store and the memory of two hosts: what a restart may restore from memory, and what it must.

The oracle is the line that a user believes in. Each saved state is a token with the one that it was computed from. A
restart that restores a token from memory which the last saved one does not descend from *resurrects* it; one that
passes over the newest of the line, though it is whole in this host's memory, *loses* it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pccheck_async import MemoryTier, SyncCheckpointEngine
from pccheck_async.engine import Memory
from tests.support.children import end, fork

HOSTS = ("here", "there")


@dataclass
class Believed:
    """What a user believes in.

    Attributes:
        parents: Of each token, the one that it was computed from.
        heads: The last saved token; several while it is not known which saves a death let end.
        in_memory: The newest token in each host's memory; several while it is not known which saves a death let end.
    """

    parents: dict[int, int | None] = field(default_factory=dict)
    heads: set[int | None] = field(default_factory=lambda: {None})
    in_memory: dict[str, set[int]] = field(default_factory=dict)

    def line(self) -> set[int]:
        """The tokens that the last saved ones descend from, and these."""
        found: set[int] = set()
        for head in self.heads:
            token = head
            while token is not None and token not in found:
                found.add(token)
                token = self.parents[token]
        return found


class History:
    """One history: openings on two hosts that share a disk, and deaths at any moment."""

    def __init__(self, disk: Path, memory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.disk, self.memory, self.image = disk / "run", memory, disk / "image"
        self.believed = Believed()
        self.next = 0
        self.wrong: list[str] = []
        self.openings = self.from_memory = 0
        for host in HOSTS:
            (memory / host).mkdir()

    def run(self, openings: int) -> None:
        """Open the store so many times, and change folders in between."""
        for _ in range(openings):
            self.open()
            if self.random.random() < 0.15 and self.disk.exists():
                shutil.rmtree(self.image, ignore_errors=True)
                shutil.copytree(self.disk, self.image)
            if self.random.random() < 0.1 and self.image.exists():
                shutil.rmtree(self.disk)
                shutil.copytree(self.image, self.disk)
                self.believed.heads, self.believed.in_memory = {None}, {}
            if self.random.random() < 0.1:
                shutil.rmtree(self.memory / (host := self.random.choice(HOSTS)))
                (self.memory / host).mkdir()
                self.believed.in_memory.pop(host, None)

    def open(self) -> None:
        """Open the store on one host: restore, save a few tokens, die."""
        host = self.random.choices(HOSTS, (3, 1))[0]
        how = self.random.choices(("newest", "oldest", "nothing", "no tier"), (8, 2, 1, 1))[0]
        saves = [
            self.random.choice(("memory", "memory", "disk")) for _ in range(self.random.choice((0, 1, 1, 1, 2, 3)))
        ]
        ending = self.random.choice(("after a save", "in a save", "before the slot"))
        first, self.next = self.next, self.next + len(saves)
        reader, writer = os.pipe()

        def work() -> None:
            try:
                self._live(writer, host, how, saves, first, ending)
            except BaseException:  # noqa: BLE001 - told to the parent
                os.write(writer, json.dumps(traceback.format_exc()).encode())

        child = fork(work)
        os.close(writer)
        said = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
        end(child)
        os.close(reader)
        self.openings += 1
        self._check(host, how, saves, first, [json.loads(line) for line in said.splitlines()])

    def _live(self, writer: int, host: str, how: str, saves: list[str], first: int, ending: str) -> None:
        def say(*what: Any) -> None:
            os.write(writer, json.dumps(what).encode() + b"\n")

        tier = None if how == "no tier" else MemoryTier(interval=1, path=str(self.memory / host))
        engine = SyncCheckpointEngine(self.disk, memory=tier, overwrite=True, keep_last=2).open()
        state = {"token": torch.zeros(100, dtype=torch.int64) - 1}
        on_disk = [info.step for info in engine.checkpoints() if "disk" in info.tiers]
        restored = None
        if how in ("newest", "no tier"):
            restored = engine.restore(state)
        elif how == "oldest" and on_disk:
            restored = engine.restore(state, step=on_disk[-1])
        token, source = (None, None) if restored is None else (int(state["token"][0]), restored.source)
        assert restored is None or token == restored.step
        say("restored", token, source, max(on_disk, default=-1))
        for number, where in enumerate(saves, first):
            say("saving", number)
            last = number == first + len(saves) - 1
            if last and ending == "before the slot":
                Memory.lease = _never  # type: ignore[method-assign]
            state["token"].fill_(number)
            in_memory = tier is not None
            chosen = "disk" if tier is None else where
            if last and ending == "before the slot" and in_memory:
                threading.Thread(
                    target=engine.checkpoint, args=(state,), kwargs={"step": number, "tier": chosen}
                ).start()
                time.sleep(0.02)  # the line is durable by now, or not
                break
            pending = engine.checkpoint(state, step=number, tier=chosen)  # type: ignore[arg-type]
            if not last or ending == "after a save":
                if chosen == "disk":
                    pending.result(60)
                elif in_memory:
                    pending.wait_reached("memory", 60)
                say("saved", number, in_memory)
        say("over")

    def _check(self, host: str, how: str, saves: list[str], first: int, said: list[Any]) -> None:
        believed = self.believed
        if not said or said[-1] != ["over"]:
            self.wrong.append(f"{host}, {how}, {saves}: the run failed: {said}")
            return
        _, restored, source, newest_on_disk = said[0]
        if source == "memory":
            self.from_memory += 1
            if restored not in believed.line():
                self.wrong.append(f"{host}, {how}: {restored} is resurrected; the line is {sorted(believed.line())}")
        there = believed.in_memory.get(host, set())
        must = how == "newest" and there and believed.heads <= there and newest_on_disk <= min(there)
        if must and restored not in there:
            self.wrong.append(f"{host}: {sorted(there)} is in memory, and {restored} ({source}) was restored")
        if not saves:
            return
        parent = restored
        if restored is None or restored not in believed.in_memory.get(host, ()):
            believed.in_memory.clear()  # this run leaves it behind, unless it dies before
        if how == "no tier":
            believed.in_memory.clear()
        for kind, *rest in said[1:-1]:
            if kind == "saving":
                (token,) = rest
                believed.parents[token] = parent
                believed.heads = {*believed.heads, parent, token}
                if token != restored:
                    believed.in_memory.setdefault(host, set()).add(token)
                parent = token
            else:
                token, in_memory = rest
                believed.heads = {token}
                believed.in_memory[host] = {token} if in_memory else set()


async def _never(self: Memory, nbytes: int) -> None:
    await asyncio.Event().wait()
