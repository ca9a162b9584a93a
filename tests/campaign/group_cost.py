"""What a group costs beside one engine.

``python -m tests.campaign.group_cost FOLDER [--size 268435456] [--rounds 20]``

One process, two ranks, four and eight save the same bytes in all, in turns whose order is drawn anew each round. A turn
is over when every rank has learnt that its checkpoint is durable. Printed are medians, quartiles, and ratios to the one
process of the same round; and the time from the last rank's prepare to the decision, as rank 0 sees it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pccheck_async import Group, SyncCheckpointEngine
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.messages import AnyDecision, AnyMessage, Commit, Ok
from pccheck_async.group.run import GroupRun

os.environ.setdefault("RES_OPTIONS", "timeout:1")
_ANSWER = struct.Struct("=dd")
"""Seconds until durable, and from the last vote to the decision learnt (rank 0)."""


class Config:
    """One process or a group, each rank a fork that saves when it is told to."""

    def __init__(self, folder: Path, world: int, nbytes: int) -> None:
        self.world = world
        self._pipes: list[tuple[int, int]] = []
        server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for rank in range(max(1, world)):
            down, up = os.pipe(), os.pipe()
            if os.fork() == 0:
                os.close(down[1])
                os.close(up[0])
                _serve(folder, rank, world, nbytes // max(1, world), server.port, down[0], up[1])
            os.close(down[0])
            os.close(up[1])
            self._pipes.append((down[1], up[0]))
        for _, up_end in self._pipes:
            os.read(up_end, 1)
        self._server = server

    def save(self) -> tuple[float, float]:
        """Return the slowest rank's seconds, and the decision's."""
        for down, _ in self._pipes:
            os.write(down, b"g")
        answers = [_ANSWER.unpack(os.read(up, _ANSWER.size)) for _, up in self._pipes]
        return max(durable for durable, _ in answers), answers[0][1]

    def close(self) -> None:
        for down, up in self._pipes:
            os.close(down)
            os.read(up, 1)
            os.close(up)


def _serve(folder: Path, rank: int, world: int, nbytes: int, port: int, commands: int, answers: int) -> None:
    torch.set_num_threads(1)
    votes = _watch_votes() if world and rank == 0 else []
    group = None
    if world:
        group = Group(rank, world, TCPStore("localhost", port, is_master=False, wait_for_workers=False))
    tensors = 4 if nbytes < 1 << 20 else 16
    state: dict[str, Any] = {f"t{n}": torch.ones(nbytes // tensors // 4) for n in range(tensors)}
    with SyncCheckpointEngine(folder, group=group, max_in_flight=1) as engine:
        engine.checkpoint(state, step=0).result()
        os.write(answers, b"r")
        step = 1
        while os.read(commands, 1):
            start = time.perf_counter()
            engine.checkpoint(state, step=step).result()
            end = time.perf_counter()
            os.write(answers, _ANSWER.pack(end - start, votes[-1] if votes else 0.0))
            step += 1
    os._exit(0)


def _watch_votes() -> list[float]:
    """Return a list that grows by the seconds from the last vote of each checkpoint to rank 0's learning of it."""
    receive, learn, seconds = Coordinator.receive, GroupRun._learn, list[float]()
    last = 0.0

    def receive_timed(self: Coordinator, message: AnyMessage) -> Any:
        nonlocal last
        if isinstance(message, Ok):
            last = time.perf_counter()
        return receive(self, message)

    def learn_timed(self: GroupRun, decision: AnyDecision) -> None:
        if isinstance(decision, Commit):
            seconds.append(time.perf_counter() - last)
        learn(self, decision)

    Coordinator.receive = receive_timed  # type: ignore[method-assign]
    GroupRun._learn = learn_timed  # type: ignore[method-assign]
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=args.folder))
    configs = [Config(work / str(world), world, args.size) for world in (0, *args.worlds)]
    seconds: dict[int, list[tuple[float, float]]] = {each.world: [] for each in configs}
    for _ in range(args.rounds):
        for each in random.sample(configs, len(configs)):
            seconds[each.world].append(each.save())
    for each in configs:
        each.close()
    shutil.rmtree(work)
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
