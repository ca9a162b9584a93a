"""Measuring methods against each other: the same state, seed, disk and clock, in interleaved rounds.

Rules: every tensor changes before each save; nothing is dirty in the page cache when a save starts; what is written
back after it counts as its processor time; each restore starts with a cold page cache, goes into tensors that exist,
and is compared bit by bit with what was saved; a method that fails, or whose restore differs, gets a row that says so.

Run: ``python -m examples.paper run costs --folder DIR --out DIR [--methods pccheck --methods "torch.save + fsync"]``.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from examples.paper.lab.methods import Method, find_method
from examples.paper.lab.result import Measured, Result, Row, Sample, sum_up
from examples.paper.lab.rounds import Entry, Rounds
from examples.paper.lab.workloads import SlowDevice, Workload
from pccheck_async.bench.machine import survey

__all__ = ["Measured", "Result", "Row", "Sample", "measure"]


def measure(
    methods: Sequence[str | type[Method]],
    workload: Workload,
    folder: Path,
    rounds: int = 5,
    *,
    baseline: str = "pccheck",
    device: SlowDevice | None = None,
    seconds: float = math.inf,
    limits: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """Measure ``methods`` by turns.

    Args:
        methods: Names or classes.
        workload: What is saved.
        folder: Where; each method gets a new folder in it, which is deleted at the end.
        rounds: How often each method saves, and how often each restores.
        baseline: The method that ratios are to; the first one where it is not among them.
        device: Caps for the methods that can be given some; a row of another method says that it cannot.
        seconds: A method that took longer, all in all, sits out what is left after three rounds; it has fewer samples.
        limits: Measure what the disk itself can do, before and after each round, where it takes direct I/O.
        progress: Is told what is being measured, and about how long it will go on.

    Raises:
        ValueError: a name that there is not, or no round.
    """
    if rounds < 1:
        raise ValueError(f"at least one round, not {rounds}")
    kinds = [find_method(each) if isinstance(each, str) else each for each in methods]
    with tempfile.TemporaryDirectory(prefix="pccheck-bench-", dir=folder) as name, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(torch|torchsnapshot|lightning)\b")
        place = survey(Path(name))
        entries = [Entry(kind, Path(name) / str(at), _row(kind)) for at, kind in enumerate(kinds)]
        raw = Path(name) / "raw" if limits and place.direct.startswith("yes") else None
        run = Rounds(workload, entries, rounds, device=device, seconds=seconds, raw=raw, progress=progress)
        run.run()
    rows = [entry.row for entry in entries]
    names = [row.method for row in rows]
    baseline = baseline if baseline in names or not names else names[0]
    sum_up(rows, baseline, workload.nbytes)
    found = {figure: limit.between() for figure, limit in run.limits.items()}
    fastest = {figure: limit.way.name for figure, limit in run.limits.items()}
    return Result(rows, workload.name, workload.nbytes, rounds, baseline, place, found, fastest)


def _row(kind: type[Method]) -> Row:
    return Row(kind.name, kind.overlaps, kind.durable, kind.atomic, kind.resumable)
