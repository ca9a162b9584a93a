"""How much code one save and one restore go through: calls of this package's functions, and the files that they are in.

Run: ``python -m tests.campaign.frames [--linears 1]``.

Counted are the frames that begin in the package (each resumption of a generator or a coroutine is one), on all threads,
of one call that is warm: of ``checkpoint(overlap=True)`` until it is durable, in chunks and inline, and of ``restore``.
The state is ``Linear(2600, 2600)``, or so many smaller ones, and SGD with momentum.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import pccheck_async
from pccheck_async import SyncCheckpointEngine

ROOT = str(Path(pccheck_async.__file__).parent)


class Frames:
    """Counts how often functions of the package are entered, or resumed, on this thread and on those begun within."""

    def __init__(self) -> None:
        self.counts: Counter[CodeType] = Counter()

    def __enter__(self) -> Frames:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def of(self, work: Callable[[], Any]) -> Counter[CodeType]:
        """Return the frames of a call that is done the third time."""
        for _ in range(3):
            self.counts = Counter()
            work()
        return self.counts

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.counts[frame.f_code] += 1


def report(what: str, counts: Counter[CodeType]) -> None:
    files = {code.co_filename for code in counts}
    print(f"{what}: {counts.total()} frames, {len(counts)} functions, {len(files)} files")


def measure(what: str, linears: int, size: int, folder: str) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(linears)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(torch.ones(1, size)).sum().backward()
    optimizer.step()
    state, steps = {"model": model, "optimizer": optimizer}, count()
    # The engine's threads begin while frames are counted.
    with Frames() as frames, SyncCheckpointEngine(folder) as engine:
        engine.attach(optimizer)
        counts = frames.of(lambda: engine.checkpoint(state, step=next(steps), overlap=True).result())
        report(f"checkpoint {what}", counts)
        report(f"restore {what}", frames.of(lambda: engine.restore(state)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--linears", type=int, default=1)
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    for what, size in (("in chunks", 2600), ("inline", 20)):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measure(what, args.linears, size, folder)


if __name__ == "__main__":
    main()
