"""Closing at any moment, cancelled, at a deadline, on devices that hang and fail: a restart finds what was told."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest
import torch

from pccheck_async import CheckpointEngine, CheckpointError, StorageOptions, list_checkpoints, load
from pccheck_async.engine import PendingCheckpoint
from pccheck_async.medium import Medium
from pccheck_async.testing import CrashDisk, CrashWriter, FailingWriter, StuckWriter
from pccheck_async.testing.probe import probe

FOLDER = "anywhere"


def state_of(step: int, elements: int) -> dict[str, Any]:
    return {"weights": torch.full((elements,), float(step)), "step": step}


class Run:
    """An engine that saves a few states, and is closed in some way."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = CrashDisk()
        inner: Medium = CrashWriter(self.disk, seed=seed)
        if self.rng.random() < 0.4:
            inner = FailingWriter(inner, fail_at=self.rng.randint(8, 60), kinds=("write", "flush"))
        self.medium = StuckWriter(inner, kinds=())
        self.medium.chains = self.rng.random() < 0.7
        self.how = self.rng.choice(("close", "deadline", "cancel"))
        self.pending: list[PendingCheckpoint] = []

    async def run(self) -> None:
        """Save and close; every checkpoint has ended when this returns."""
        rng = self.rng
        engine = CheckpointEngine(
            FOLDER,
            storage=StorageOptions(io=self.medium, lock_timeout=0),
            max_in_flight=rng.randint(1, 3),
            keep_last=rng.randint(1, 2),
        )
        with suppress(CheckpointError):
            await engine.open()
            with suppress(CheckpointError):
                await self.save(engine)
            await self.close(engine)

    async def save(self, engine: CheckpointEngine) -> None:
        for step in range(self.rng.randint(3, 12)):
            if self.rng.random() < 0.3:
                self.hang(0.003)
            elements = self.rng.choice((100, 100, 200_000))  # by one operation, and chunk by chunk
            self.pending.append(await engine.checkpoint(state_of(step, elements), step=step))
            if self.rng.random() < 0.2:
                await asyncio.sleep(self.rng.random() * 0.003)

    async def close(self, engine: CheckpointEngine) -> None:
        self.hang(0.02)
        closing = asyncio.create_task(engine.close(0.004 * self.rng.random() if self.how == "deadline" else None))
        if self.how == "cancel":
            await asyncio.sleep(0.004 * self.rng.random())
            closing.cancel()
        with suppress(CheckpointError, asyncio.CancelledError):
            await closing
        self.medium.release()
        if self.how == "deadline":  # what was left behind ends, so that the test leaves nothing
            core = probe(engine).core
            with suppress(Exception):
                await core.loop.run(core.assembly.close())
            core.loop.stop()

    def hang(self, seconds: float) -> None:
        """Let the device hang from some operation on, for a while."""
        self.medium.hold(self.rng.choice(("write", "flush")), after=self.rng.randint(0, 5))
        asyncio.get_running_loop().call_later(seconds * self.rng.random(), self.medium.release)

    async def check(self) -> None:
        """Compare what was told with what the next process finds."""

        def reader() -> CrashWriter:
            return CrashWriter(self.disk, read_only=True)

        assert all(pending.done() for pending in self.pending)
        found = [info.step for info in await asyncio.to_thread(list_checkpoints, FOLDER, io=reader())]
        for pending in self.pending:
            try:
                info = await pending
            except CheckpointError as error:
                if self.how != "deadline" and pending.step in found and "nothing was committed" in str(error):
                    raise AssertionError(f"step {pending.step} is there") from error
            else:
                assert found, f"step {info.step} is lost"
                assert found[0] >= info.step, found
        for step in found:
            state = await load(FOLDER, step=step, io=reader())
            assert state["step"] == step
            assert bool((state["weights"] == step).all())


@pytest.mark.campaign
@pytest.mark.parametrize("start", range(0, 2000, 500))
def test_closing(start: int) -> None:
    for seed in range(start, start + 500):
        run = Run(seed)
        try:
            asyncio.run(run.run())
            asyncio.run(run.check())
        except AssertionError as error:
            error.add_note(f"seed {seed}, {run.how}")
            raise
