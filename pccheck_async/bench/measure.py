"""Measuring methods against each other: the same state, seed, disk and clock, in interleaved rounds.

Rules: every tensor changes before each save; nothing is dirty in the page cache when a save starts; what is written
back after it counts as its processor time; each restore starts with a cold page cache, goes into tensors that exist,
and is compared bit by bit with what was saved; a method that fails, or whose restore differs, gets a row that says so.

Run: ``python -m pccheck_async.bench.measure --folder DIR [--methods pccheck "torch.save + fsync"] [--gib 0.5]``.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from pccheck_async.bench.methods import METHODS, Method, find_method
from pccheck_async.bench.place import survey
from pccheck_async.bench.result import Measured, Result, Row, Sample, sum_up
from pccheck_async.bench.rounds import Entry, Rounds
from pccheck_async.bench.workloads import Raw, Sleeping, SlowDevice, Workload

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


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="a trainer that sleeps for so long; 0: none")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    nbytes = int(args.gib * 2**30)
    workload = Sleeping(nbytes, args.tensors, args.step_seconds) if args.step_seconds else Raw(nbytes, args.tensors)
    result = measure(args.methods, workload, args.folder, args.rounds)
    print(result.place)
    print(f"{result.workload}, {result.state_bytes} bytes, {result.rounds} rounds, ratios to {result.baseline}")
    for row in result.rows:
        flags = "".join(
            letter if on else "-" for letter, on in zip("dar", (row.durable, row.atomic, row.resumable), strict=True)
        )
        print(f"{row.method} ({flags}): {row.problem or f'verified {row.verified}'}")
        for name, one in row.figures.items():
            print(
                f"    {name:10} {one.median:8.4f} [{one.low:.4f}, {one.high:.4f}]"
                f"  ratio {one.ratio:6.2f} [{one.ratio_low:.2f}, {one.ratio_high:.2f}]"
            )
        mib = [f"{value >> 20} MiB" for value in (row.dirty_bytes or 0, row.memory_bytes, row.stored_bytes)]
        print("    dirty {}, memory {}, stored {}".format(*mib))


if __name__ == "__main__":
    main()
