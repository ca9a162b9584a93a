"""Draw the commit of one checkpoint of a group: ``python -m tests.campaign.group_timeline PICTURE.png [--world 4]``.

Ranks are forks; their third checkpoint is drawn, for which slots and memory are there. Of each rank, from above: copies
of chunks; writes, and the flush; the record that names the part as prepared, the vote on its way to rank 0, the wait
for the decision, and the record that applies it: written with the next prepare, or as here when the engine closes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from examples.paper.lab.timeline import recorded
from pccheck_async import Group, StorageOptions, SyncCheckpointEngine
from pccheck_async.group import driver as group_driver
from pccheck_async.group import messages
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.folder import write_parts
from pccheck_async.group.parts import Applied, Part
from pccheck_async.group.ranks import Ranks
from pccheck_async.store import Store
from tests.support.ranks import run_ranks

LANES = {"capture": 0, "write": 1, "flush": 1, "prepare": 2, "vote": 2, "wait for the decision": 2, "apply": 2}
COLORS = dict(zip(LANES, ("C0", "C1", "C3", "C4", "C2", "0.8", "C5"), strict=True))


class Seen(NamedTuple):
    """What one rank saw, all times of ``time.perf_counter()``, which is one clock for all processes."""

    stages: list[tuple[str, float, float]]
    records: list[tuple[float, float]]
    learnt: list[float]
    votes: dict[int, float]
    """On rank 0: when it received whose."""


def observe() -> Seen:
    """Note from now on what this rank does in the protocol."""
    seen = Seen([], [], [], {})
    receive, learn = Coordinator.receive, Ranks._learn

    async def timed_write(store: Store, parts: tuple[Part, ...], applied: Applied) -> None:
        start = time.perf_counter()
        await write_parts(store, parts, applied)
        seen.records.append((start, time.perf_counter()))

    def receive_vote(self: Coordinator, message: messages.AnyMessage) -> Any:
        if isinstance(message, messages.Ok):
            seen.votes[message.rank] = time.perf_counter()
        return receive(self, message)

    def learn_decision(self: Ranks, decision: messages.AnyDecision) -> None:
        if isinstance(decision, messages.Commit):
            seen.learnt.append(time.perf_counter())
        learn(self, decision)

    vars(group_driver)["write_parts"] = timed_write
    Coordinator.receive = receive_vote  # type: ignore[method-assign]
    Ranks._learn = learn_decision  # type: ignore[method-assign]
    return seen


def save(folder: Path, group: Group, nbytes: int) -> Seen:
    """Save three checkpoints on one rank, and tell of the last."""
    seen = observe()
    state = {f"t{n}": torch.ones(nbytes // 32) for n in range(8)}
    with SyncCheckpointEngine(
        folder, group=group, storage=StorageOptions(chunk_bytes=nbytes // 8, skip_unchanged=False)
    ) as engine:
        for step in range(2):
            engine.checkpoint(state, step=step).result()
        del seen.records[:], seen.learnt[:]
        with recorded(engine) as timeline:
            engine.checkpoint(state, step=2).result()
    spans = [span for span in timeline.spans if span.name in LANES and span.start < seen.records[0][0]]
    seen.stages.extend((span.name, span.start, span.end) for span in spans)
    return seen


def draw(path: Path, ranks: list[Seen], nbytes: int) -> None:
    """Draw three rows for each rank, milliseconds from the first capture on."""
    figure = Figure(figsize=(12, 1 + 1.3 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    zero = min(start for seen in ranks for _, start, _ in seen.stages)
    for rank, seen in enumerate(ranks):
        (begun, prepared), (apply, applied), *_ = seen.records
        voted, (learnt,) = ranks[0].votes[rank], seen.learnt
        protocol = [("prepare", begun, prepared), ("vote", prepared, voted), ("wait for the decision", voted, learnt)]
        for name, start, end in [*seen.stages, *protocol, ("apply", apply, applied)]:
            row = 4 * rank + LANES[name]
            axes.barh(row, (end - start) * 1e3, 0.8, (start - zero) * 1e3, color=COLORS[name], edgecolor="w", lw=0.4)
    last = max(ranks[0].votes.values())
    axes.axvline((last - zero) * 1e3, color="k", ls=":", lw=1)
    axes.set_yticks([4 * rank + 1 for rank in range(len(ranks))], [f"rank {rank}" for rank in range(len(ranks))])
    axes.invert_yaxis()
    axes.set_xlabel("ms from the first capture; dotted: rank 0 has all votes")
    axes.set_title(f"One checkpoint of {len(ranks)} ranks, {nbytes >> 20} MiB each")
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in COLORS.items()], loc="outside right center"
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (default: the system's place)")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--size", type=int, default=16 << 20, help="bytes per rank")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        draw(args.picture, run_ranks(args.world, lambda group: save(Path(folder), group, args.size)), args.size)


if __name__ == "__main__":
    main()
