"""How much code one save and one restore go through: frames and instructions of this package, and files that have them.

Run: ``python -m tests.campaign.frames [--linears 1]``.

Counted are the frames that begin in the package (each resumption of a generator or a coroutine is one), and Python's
instructions in them, on all threads, of one call that is warm: of ``checkpoint``, overlapped and not, until it is
durable, in chunks and inline, and of ``restore``. The state is ``Linear(2600, 2600)``, or so many smaller ones, and SGD
with momentum.

Instructions are the same in each run, and the time of a small checkpoint follows them: they show the 1 % between two
commits that a stopwatch does not.
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
    """Counts entered and resumed functions of the package, and instructions, on this thread and those begun within."""

    def __init__(self) -> None:
        self.counts: Counter[CodeType] = Counter()
        self.instructions = 0

    def __enter__(self) -> Frames:
        threading.settrace(self._see)
        sys.settrace(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def of(self, work: Callable[[], Any]) -> tuple[Counter[CodeType], int]:
        """Return the frames and instructions of a call that is done the third time."""
        for _ in range(3):
            self.counts, self.instructions = Counter(), 0
            work()
        return self.counts, self.instructions

    def _see(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "call":
            self.counts[frame.f_code] += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.instructions += 1
        return self._see


def report(what: str, of: tuple[Counter[CodeType], int]) -> None:
    counts, instructions = of
    files = {code.co_filename for code in counts}
    print(f"{what}: {counts.total()} frames, {len(counts)} functions, {len(files)} files, {instructions} instructions")


def measure(what: str, linears: int, size: int, folder: str) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(linears)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(torch.ones(1, size)).sum().backward()
    optimizer.step()
    state, steps = {"model": model, "optimizer": optimizer}, count()
    # The engine's threads begin while frames are counted.
    with Frames() as frames, SyncCheckpointEngine(folder) as engine:
        engine.attach(optimizer)
        for how, overlap in (("overlapped", True), ("eager", False)):

            def save(overlap: bool = overlap) -> None:
                engine.checkpoint(state, step=next(steps), overlap=overlap).result()

            report(f"checkpoint {what}, {how}", frames.of(save))
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
