"""Time to durable of a checkpoint while the trainer blocks its event loop, or spins in pure Python on another thread.

Run: ``python -m tests.campaign.starvation [--folder DIR] [--gib 1] [--pairs 9] [--io threads]``. Ratios to the
undisturbed time of the same pair.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from examples.paper.lab.medians import summary
from pccheck_async import CheckpointEngine, StorageOptions
from tests.campaign.speed import build, change

BLOCKED_SECONDS = 5.0


@contextmanager
def spinning() -> Iterator[None]:
    """A thread that never lets go of the GIL by itself."""
    stop = False

    def spin() -> None:
        count = 0
        while not stop:
            count += 1

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


async def measure(folder: str, state: dict[str, torch.Tensor], pairs: int, io: Any) -> None:
    blocked, spun = [], []
    async with CheckpointEngine(folder, max_in_flight=1, storage=StorageOptions(io=io, skip_unchanged=False)) as engine:
        for step in range(2):
            await (await engine.checkpoint(state, step=step))
        for pair in range(pairs):

            async def undisturbed(step: int = pair) -> float:
                change(state, step)
                start = time.perf_counter()
                await (await engine.checkpoint(state, step=step))
                return time.perf_counter() - start

            plain = await undisturbed()
            change(state, pair)
            start = time.perf_counter()
            saving = asyncio.create_task(engine.checkpoint(state, step=pair))
            await asyncio.sleep(0)  # admitted; from here on the loop is blocked, in the middle of the capture
            before = engine.statistics().durable
            while engine.statistics().durable == before and time.perf_counter() - start < BLOCKED_SECONDS:
                time.sleep(0.001)  # noqa: ASYNC251 - to block the loop is the point
            ended = time.perf_counter() - start
            time.sleep(max(0, BLOCKED_SECONDS - ended))  # noqa: ASYNC251 - the rest of the blocking step
            await (await saving)
            plain = min(plain, await undisturbed())
            blocked.append(ended / plain)

            plain = await undisturbed()
            change(state, pair)
            with spinning():
                start = time.perf_counter()
                await (await engine.checkpoint(state, step=pair))
                ended = time.perf_counter() - start
            spun.append(ended / min(plain, await undisturbed()))
    print(summary(f"loop blocked for {BLOCKED_SECONDS} s: time to durable / undisturbed", blocked))
    print(summary("a thread spinning in Python: time to durable / undisturbed", spun))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--io", default="auto")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        asyncio.run(measure(folder, build(int(args.gib * (1 << 30)), 100), args.pairs, args.io))


if __name__ == "__main__":
    main()
