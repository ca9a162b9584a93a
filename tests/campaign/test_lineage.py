"""Histories of runs, hosts and deaths: memory gives back what the disk's line accepts, and nothing left behind.

Each has six openings of one store by two hosts, which have a folder in memory each, in processes that die by themselves
or are killed at any moment. They restore the newest checkpoint or the oldest one, or begin anew; in between a host may
lose its memory, and an older image of the disk may be put back.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import MemoryTier, SyncCheckpointEngine, list_checkpoints
from tests.support.children import end, fork

HISTORIES = 10_000
OPENINGS = 6
HOSTS = ("here", "there")


def state_of(serial: int) -> dict[str, Any]:
    return {"tensor": torch.arange(300) + serial, "serial": serial}


@dataclass(frozen=True)
class Opening:
    """What one process does: ``saves`` says of each checkpoint its tier, and whether its end is waited for."""

    host: str
    begins: str  # "newest", "oldest" or "anew"
    saves: tuple[tuple[str, bool], ...]
    first: int  # the serial number of its first checkpoint
    killed_after: float | None  # seconds from its restore on


def run(folder: Path, memory: Path, opening: Opening) -> Iterator[list[Any]]:
    """Run an opening in a process; yield what it said until its death: restored, trying, or saved, and the serial."""
    reader, writer = os.pipe()
    child = fork(lambda: _work(folder, memory, opening, writer))
    os.close(writer)
    with os.fdopen(reader) as said:
        for line in said:
            words = json.loads(line)
            yield words
            if words[0] == "restored" and opening.killed_after is not None:
                time.sleep(opening.killed_after)
                os.kill(child, signal.SIGKILL)
    end(child)


def _work(folder: Path, memory: Path, opening: Opening, writer: int) -> None:
    def say(*words: object) -> None:
        os.write(writer, (json.dumps(words) + "\n").encode())

    tier = MemoryTier(interval=1, path=str(memory))
    anew = opening.begins == "anew"
    engine = SyncCheckpointEngine(folder, memory=tier, save_last=False, keep_last=2, overwrite=anew).open()
    state = state_of(-1)
    there = list_checkpoints(folder)
    step = there[-1].step if there and opening.begins == "oldest" else None
    restored = None if anew else engine.restore(state, step=step)
    assert torch.equal(state["tensor"], state_of(state["serial"])["tensor"])
    say("restored", state["serial"], "none" if restored is None else restored.source)
    number = 0 if restored is None else restored.step + 1
    for serial, (where, waits) in enumerate(opening.saves, opening.first):
        say("trying", serial, number)
        pending = engine.checkpoint(
            state_of(serial), step=number, tier=where, metadata={"serial": serial}  # type: ignore[arg-type]
        )  # fmt: skip
        number += 1
        if waits:
            pending.wait_reached("memory", 60)
            say("memory", serial)
            if where == "disk":
                pending.result(60)
                say("disk", serial)
    say("ended")
    os._exit(0)


@dataclass
class History:
    """One store, and what its users believe.

    Attributes:
        heads: The checkpoints that may be the newest of the line that they are on; None for its beginning.
        parents: Of each checkpoint that was tried, the one that its state goes back to.
        steps: Of each checkpoint that was tried, its step.
        intact: Of each host, the checkpoint that is the newest in its memory, if that is known.
        image: A copy of the disk, and the heads of then.
    """

    folder: Path
    memory: Path
    heads: set[int | None] = field(default_factory=lambda: {None})
    parents: dict[int, int | None] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    intact: dict[str, int | None] = field(default_factory=dict)
    image: tuple[Path, set[int | None]] | None = None
    told: list[str] = field(default_factory=list)

    def on_disk(self) -> list[tuple[int, int]]:
        """The checkpoints on disk, newest first: step and serial number."""
        return [(info.step, int(str(info.metadata["serial"]))) for info in list_checkpoints(self.folder)]

    def line(self) -> set[int]:
        """All checkpoints from which a head goes on, and the heads."""
        found: set[int] = set()
        for head in self.heads:
            one = head
            while one is not None:
                found.add(one)
                one = self.parents[one]
        return found

    def opens(self, opening: Opening) -> str:
        """Run an opening, check what it restored, and return where that came from."""
        self.told.append(repr(opening))
        there = self.on_disk()
        before, source = set(self.heads), "died"
        base: int | None = None
        tried: list[int] = []
        acknowledged: list[int] = []
        ended = False
        for word, *rest in run(self.folder, self.memory / opening.host, opening):
            self.told.append(f"    {word} {rest}")
            if word == "restored":
                serial, source = rest
                base = None if source == "none" else serial
                self.check(opening, base, source, there)
            elif word == "trying":
                self.parents[rest[0]] = tried[-1] if tried else base
                self.steps[rest[0]] = rest[1]
                tried.append(rest[0])
            elif word == "ended":
                ended = True
            else:
                acknowledged.append(rest[0])
        assert opening.killed_after is not None or ended, self.told
        if tried:
            sure = max(acknowledged, default=None)
            unsure = [serial for serial in tried if sure is None or serial > sure]
            self.heads = {base if sure is None else sure, *unsure} | (before if sure is None else set())
            self.intact[opening.host] = sure if not unsure else None
        return source

    def check(self, opening: Opening, base: int | None, source: str, there: list[tuple[int, int]]) -> None:
        if opening.begins == "anew":
            return
        if opening.begins == "oldest":
            asked = next((serial for step, serial in there if step == there[-1][0]), None)
            if there and source == "memory" and base is not None and base in self.line():  # a newer one of that step
                asked = base if self.steps[base] == there[-1][0] else asked
            assert not there or base == asked, ("not the step that was asked for", there, self.told)
            return
        if source == "memory":
            assert base in self.line(), ("resurrected", self.heads, self.told)
        newest = [serial for _, serial in there[:1]]
        if source == "disk":
            assert [base] == newest, ("not the newest on disk", there, self.told)
        if len(self.heads) == 1:
            (head,) = self.heads
            if head is not None and head in (self.intact.get(opening.host), *newest):
                assert base == head, ("lost", self.heads, there, self.told)

    def take_image(self, place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        if self.folder.exists():
            shutil.copytree(self.folder, place, ignore=shutil.ignore_patterns("status*", "store.json"))
            self.image = place, set(self.heads)

    def put_image_back(self) -> None:
        """In place, and all but ``store.json``: a new one of that, or one that was written to, has no memory at all."""
        assert self.image is not None
        place, self.heads = self.image[0], set(self.image[1])
        for file in place.iterdir():
            if (self.folder / file.name).exists():
                (self.folder / file.name).write_bytes(file.read_bytes())
        there = self.on_disk()
        # What was in flight when the image was taken is on it, or is not: now that is known.
        self.heads |= {serial for _, serial in there[:1]}
        self.told.append(f"an image is put back: {there}, heads {self.heads}")

    def loses(self, host: str) -> None:
        for each in (self.memory / host).iterdir():
            shutil.rmtree(each)
        self.intact.pop(host, None)
        self.told.append(f"{host} loses its memory")


def explore(seed: int, folder: Path, memory: Path) -> dict[str, int]:
    """Go through one history; return from where its openings restored."""
    rng = random.Random(seed)
    history, serial = History(folder / "run", memory, told=[f"seed {seed}"]), 0
    counts: dict[str, int] = {}
    for host in HOSTS:
        (memory / host).mkdir()
    for _ in range(OPENINGS):
        host = rng.choice(HOSTS)
        begins = rng.choices(("newest", "oldest", "anew"), (10, 1, 1))[0]
        saves = tuple((rng.choice(("memory", "memory", "disk")), rng.random() < 0.7) for _ in range(rng.randrange(5)))
        killed = rng.random() * 0.05 if rng.random() < 0.3 else None
        source = history.opens(Opening(host, begins, saves, serial, killed))
        counts[source] = counts.get(source, 0) + 1
        serial += len(saves)
        if rng.random() < 0.1:
            history.loses(rng.choice(HOSTS))
        if rng.random() < 0.2:
            history.take_image(folder / "image")
        if history.image is not None and rng.random() < 0.15:
            history.put_image_back()
    return counts


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(10))
def test_histories(part: int, shared_memory: Path) -> None:
    total: dict[str, int] = {}
    for seed in range(part * HISTORIES // 10, (part + 1) * HISTORIES // 10):
        # The disk's folder, too: no power is lost here, and flushes would take most of the time.
        folder, memory = shared_memory / f"disk-{seed}", shared_memory / f"memory-{seed}"
        folder.mkdir()
        memory.mkdir()
        for source, count in explore(seed, folder, memory).items():
            total[source] = total.get(source, 0) + count
        shutil.rmtree(folder)
        shutil.rmtree(memory)
    print(total)
    assert min(total["memory"], total["disk"], total["none"]) > HISTORIES // 10, total


def test_some_histories(tmp_path: Path, shared_memory: Path) -> None:
    for seed in range(1_000_000, 1_000_003):
        folder, memory = tmp_path / str(seed), shared_memory / str(seed)
        folder.mkdir()
        memory.mkdir()
        explore(seed, folder, memory)
