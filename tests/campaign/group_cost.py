"""What a group costs beside one engine: ``python -m tests.campaign.group_cost FOLDER [--size BYTES] [--rounds 20]``.

One process and groups of ranks save the same bytes in all, in turns whose order is drawn anew each round; a turn
is over when every rank has learnt that its checkpoint is durable. Printed are medians, quartiles, and ratios to the one
process of the same round; and the time from the last rank's prepare to the decision, as rank 0 sees it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pccheck_async import Group, StorageOptions, SyncCheckpointEngine
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.messages import AnyDecision, AnyMessage, Commit, Ok
from pccheck_async.group.ranks import Ranks
from tests.support.commanded_ranks import commanded_ranks
from tests.support.ranks import meet, meeting_place


class Seconds(NamedTuple):
    """Until durable; and on rank 0 from the last vote until it learnt the decision."""

    durable: float
    decided: float


@contextmanager
def serve(
    folder: Path, world: int, nbytes: int, place: tuple[int, str], rank: int
) -> Iterator[Callable[[int], Seconds]]:
    """One rank of a group, or with a world of 0 the one process: it saves when it is told a step."""
    votes = _watch_votes() if world and rank == 0 else []
    group = Group(rank, world, meet(place)) if world else None
    nbytes //= max(1, world)
    tensors = 4 if nbytes < 1 << 20 else 16
    state: dict[str, Any] = {f"t{n}": torch.ones(nbytes // tensors // 4) for n in range(tensors)}

    def save(step: int) -> Seconds:
        start = time.perf_counter()
        engine.checkpoint(state, step=step).result()
        return Seconds(time.perf_counter() - start, votes[-1] if votes else 0.0)

    with SyncCheckpointEngine(
        folder, group=group, max_in_flight=1, storage=StorageOptions(skip_unchanged=False)
    ) as engine:
        save(0)
        yield save


def _watch_votes() -> list[float]:
    """Return a list that grows by the seconds from the last vote of each checkpoint to rank 0's learning of it."""
    receive, learn, seconds = Coordinator.receive, Ranks._learn, list[float]()
    last = 0.0

    def receive_timed(self: Coordinator, message: AnyMessage) -> Any:
        nonlocal last
        if isinstance(message, Ok):
            last = time.perf_counter()
        return receive(self, message)

    def learn_timed(self: Ranks, decision: AnyDecision) -> None:
        if isinstance(decision, Commit):
            seconds.append(time.perf_counter() - last)
        learn(self, decision)

    Coordinator.receive = receive_timed  # type: ignore[method-assign]
    Ranks._learn = learn_timed  # type: ignore[method-assign]
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    args = parser.parse_args()
    worlds = (0, *args.worlds)
    seconds: dict[int, list[Seconds]] = {world: [] for world in worlds}
    with tempfile.TemporaryDirectory(dir=args.folder) as work, ExitStack() as stack:
        tell = {}
        for world in worlds:
            rank = partial(serve, Path(work, str(world)), world, args.size, meeting_place())
            tell[world] = stack.enter_context(commanded_ranks(max(1, world), rank))
        for step in range(1, args.rounds + 1):
            for world in random.sample(worlds, len(worlds)):
                answers = tell[world](step)
                seconds[world].append(Seconds(max(each.durable for each in answers), answers[0].decided))
    single = [durable for durable, _ in seconds[0]]
    for world, found in seconds.items():
        ratios = [durable / one for (durable, _), one in zip(found, single, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        durable, decided = (statistics.median(each) * 1e3 for each in zip(*found, strict=True))
        who = f"{world} ranks" if world else "one process"
        print(f"{who}: {durable:.2f} ms until durable, {middle:.3f} [{low:.3f}, {high:.3f}] of one process", end="")
        print(f"; decided {decided:.2f} ms after the last prepare" if world else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
