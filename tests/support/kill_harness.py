"""Kill a saving process with SIGKILL in a chosen phase, restart it, and check what it finds.

Each life is a fork of a process that holds torch already but has no engine, so imports do not eat the time. The child
restores, checks every byte of what it restored against the step it claims to be, tells the parent, and saves until it
is killed.
"""

from __future__ import annotations

import mmap
import os
import random
import select
import signal
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch

PHASES = ("capture", "write", "flush", "record", "recovery", "between")
_RESTORED, _ACKNOWLEDGED, _WRONG = 0, 1, 2
_MESSAGE = struct.Struct("=Bq")


def state_of(step: int, elements: int) -> dict[str, Any]:
    """Every byte of the state follows from the step."""
    tensor = torch.arange(elements, dtype=torch.int64).mul_(step + 1).add_(step)
    return {"tensor": tensor, "step": step, "text": f"step {step}", "small": torch.full((3,), float(step))}


def is_whole(state: dict[str, Any], elements: int) -> bool:
    """Whether the state is exactly that of the step it names."""
    expected = state_of(state["step"], elements)
    return (
        torch.equal(state["tensor"], expected["tensor"])
        and torch.equal(state["small"], expected["small"])
        and state["text"] == expected["text"]
    )


@dataclass
class Outcome:
    """What a campaign saw."""

    kills: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    acknowledged: int = -1
    restored: list[int] = field(default_factory=list)


class Campaign:
    """Lives and deaths of one store.

    With ``memory``, a folder of a tmpfs, every third checkpoint is on disk, and one in memory counts as acknowledged.
    """

    def __init__(
        self,
        folder: Path,
        *,
        io: str,
        elements: int,
        seed: int,
        in_flight: int = 2,
        medium: str = "files",
        memory: Path | None = None,
    ) -> None:
        self.memory = memory
        self.folder, self.io, self.elements, self.in_flight, self.medium = folder, io, elements, in_flight, medium
        self.random = random.Random(seed)
        self.phases = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the children: operations now in each phase
        self.outcome = Outcome()

    def run(self, kills: int) -> Outcome:
        """Kill ``kills`` times, each phase in turn; before, promise something, and at the end restart once more."""
        self.live("acknowledged")
        for number in range(kills):
            self.live(PHASES[number % len(PHASES)])
        self.live(None)
        return self.outcome

    def live(self, phase: str | None) -> None:
        """Start a process and kill it in ``phase``, once it "acknowledged" a step, or (None) once it has restored."""
        self.phases[: len(PHASES)] = bytes(len(PHASES))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            status = 1
            try:
                _Child(self, writer).run()
            except BaseException as error:  # noqa: BLE001 - a forked child must not return into the test runner
                os.write(2, f"child failed: {error!r}\n".encode())
            finally:
                os._exit(status)
        os.close(writer)
        try:
            if phase == "recovery":
                phase = self._wait_for_phase(phase, reader)
            else:
                self._expect_restore(reader)
                if phase == "acknowledged":
                    self._expect_acknowledgement(reader)
                    phase = None
                if phase is not None:
                    time.sleep(self.random.uniform(0, 0.01))
                    phase = self._wait_for_phase(phase, reader)
            if phase is not None:
                time.sleep(self.random.choice([0, self.random.uniform(0, 0.003)]))
                self.outcome.kills[phase] += 1
        finally:
            self.strike(child)
            os.waitpid(child, 0)
            self._drain(reader)
            os.close(reader)
        self.recover()

    def strike(self, child: int) -> None:
        """End a process, now."""
        os.kill(child, signal.SIGKILL)

    def recover(self) -> None:
        """Do what comes between a death and the next life."""

    def _wait_for_phase(self, phase: str, reader: int) -> str:
        """Return the phase that came: a recovery may be over before anybody looks."""
        deadline = time.monotonic() + 20
        index = PHASES.index(phase)
        while phase != "between" and not self.phases[index]:
            if self._drain(reader) and phase == "recovery":
                return "between"
            assert time.monotonic() < deadline, f"phase {phase!r} never came"
        return phase

    def _expect_restore(self, reader: int) -> None:
        ready, _, _ = select.select([reader], [], [], 60)
        assert ready, "the child did not restore in time"
        kind, step = self._read(reader)
        assert kind == _RESTORED, f"the restored state of step {step} is not whole"
        assert step >= self.outcome.acknowledged, f"step {step} restored, {self.outcome.acknowledged} was acknowledged"
        self.outcome.restarts += 1
        self.outcome.restored.append(step)

    def _expect_acknowledgement(self, reader: int) -> None:
        ready, _, _ = select.select([reader], [], [], 60)
        assert ready, "the child acknowledged nothing in time"
        kind, step = self._read(reader)
        assert kind == _ACKNOWLEDGED
        assert step > self.outcome.acknowledged
        self.outcome.acknowledged = step

    def _drain(self, reader: int) -> bool:
        """Take in what the child said; return whether it said that it restored."""
        restored = False
        while select.select([reader], [], [], 0)[0]:
            data = os.read(reader, _MESSAGE.size)
            if not data:
                return restored
            kind, step = _MESSAGE.unpack(data)
            if kind == _RESTORED:  # killed during recovery, but only just too late
                restored = True
                assert step >= self.outcome.acknowledged
            else:
                assert kind == _ACKNOWLEDGED, f"the restored state of step {step} is not whole"
                self.outcome.acknowledged = max(self.outcome.acknowledged, step)
        return restored

    @staticmethod
    def _read(reader: int) -> tuple[int, int]:
        data = os.read(reader, _MESSAGE.size)
        assert len(data) == _MESSAGE.size, "the child died by itself"
        kind, step = _MESSAGE.unpack(data)
        return kind, step


class _Child:
    def __init__(self, campaign: Campaign, writer: int) -> None:
        self.campaign, self.writer = campaign, writer

    def tell(self, kind: int, step: int) -> None:
        os.write(self.writer, _MESSAGE.pack(kind, step))

    def run(self) -> None:
        from pccheck_async import MemoryTier, StorageOptions, SyncCheckpointEngine
        from pccheck_async.engine import EngineCore
        from pccheck_async.medium.files import Files
        from pccheck_async.medium.mapped import MappedFiles
        from pccheck_async.store import Store
        from pccheck_async.transfer.copying import CopyBackend

        torch.set_num_threads(1)  # the parent's OpenMP threads are not here
        campaign = self.campaign
        for owner, name, phase in (
            (CopyBackend, "gather", "capture"),
            (Files if campaign.medium == "files" else MappedFiles, "write", "write"),
            (Store, "make_data_durable", "flush"),
            (Store, "write_record", "record"),
            (EngineCore, "_open", "recovery"),
        ):
            setattr(owner, name, self._marked(getattr(owner, name), PHASES.index(phase)))
        memory = None if campaign.memory is None else MemoryTier(interval=1, path=str(campaign.memory))
        engine = SyncCheckpointEngine(
            campaign.folder,
            memory=memory,
            max_in_flight=campaign.in_flight,
            storage=StorageOptions(
                io=campaign.io,  # type: ignore[arg-type]
                medium=campaign.medium,  # type: ignore[arg-type]
                chunk_bytes=64 * 1024,
            ),
        )
        with engine:
            state = state_of(-1, campaign.elements)
            info = engine.restore(state)
            step = -1 if info is None else info.step
            whole = info is None or (state["step"] == step and is_whole(state, campaign.elements))
            self.tell(_RESTORED if whole else _WRONG, step)
            waiting: list[Any] = []
            while True:
                step += 1
                tier: Any = "disk" if memory is None or step % 3 == 0 else "memory"
                waiting.append(engine.checkpoint(state_of(step, campaign.elements), step=step, tier=tier))
                if len(waiting) >= campaign.in_flight:
                    first = waiting.pop(0)
                    if memory is None:
                        self.tell(_ACKNOWLEDGED, first.result().step)
                    else:
                        first.wait_reached("memory")
                        self.tell(_ACKNOWLEDGED, first.step)

    def _marked(self, method: Callable[..., Awaitable[Any]], index: int) -> Callable[..., Awaitable[Any]]:
        phases = self.campaign.phases

        @wraps(method)
        async def marked(*args: Any, **kwargs: Any) -> Any:
            phases[index] += 1
            try:
                return await method(*args, **kwargs)
            finally:
                phases[index] -= 1

        return marked
