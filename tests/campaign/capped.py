"""Slowdown of training on a device that caps each stream, by N and f, beside max(1, Tw / (N f t)) (PCcheck, figure 12).

Run: ``python -m tests.campaign.capped [--folder DIR]``. The step sleeps for a fixed time and changes every tensor.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from pccheck_async import SyncCheckpointEngine
from pccheck_async.operations.base import Operations
from pccheck_async.testing import ThrottledWriter
from pccheck_async.writer import Writer
from pccheck_async.writer.posix import PosixWriter

_STEP_SECONDS = 0.02
_NBYTES = 4 << 20
_CAP = 20e6
"""Bytes per second of each stream: a checkpoint takes ten steps."""


def capped(path: str, operations: Operations) -> Writer:
    return ThrottledWriter(PosixWriter(path, operations), per_stream=_CAP)


def slowdown(folder: Path, in_flight: int, interval: int) -> tuple[float, float]:
    """Measured slowdown and the formula's, with Tw as it was measured when nothing else was in flight."""
    parameter = torch.nn.Parameter(torch.zeros(_NBYTES // 4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones_like(parameter)
    state: dict[str, Any] = {"x": parameter}

    def train() -> None:
        end = time.perf_counter() + _STEP_SECONDS
        optimizer.step()
        time.sleep(max(0.0, end - time.perf_counter()))

    with SyncCheckpointEngine(folder, max_in_flight=in_flight, interval=interval, io=capped) as engine:
        engine.attach(optimizer)
        alone = []
        for _ in range(in_flight + 2):
            start = time.perf_counter()
            engine.checkpoint(state).result()
            alone.append(time.perf_counter() - start)
        lead, timed = (in_flight + 1) * interval, max(4 * in_flight, 10) * interval
        start = 0.0
        for step in range(lead + timed):
            if step == lead:
                start = time.perf_counter()  # from here on as many as may be are in flight
            with engine.step(state, step):
                train()
        seconds = (time.perf_counter() - start) / timed
    return seconds / _STEP_SECONDS, max(1.0, alone[-1] / (in_flight * interval * _STEP_SECONDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        for interval in (1, 2, 5, 10, 20, 50):
            for in_flight in (1, 2, 4):
                measured, formula = slowdown(Path(name) / f"{in_flight}-{interval}", in_flight, interval)
                found[in_flight, interval] = measured
                print(
                    f"N {in_flight}, f {interval:2}: slowdown {measured:6.3f}, formula {formula:6.3f}, "
                    f"ratio {measured / formula:.3f}"
                )
    for interval in (1, 2):
        print(f"f {interval}: N = 1 is {found[1, interval] / found[4, interval]:.2f} times slower than N = 4")


if __name__ == "__main__":
    main()
