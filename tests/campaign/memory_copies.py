"""How fast copies go to the memory of another host, beside a plain stream, and what they cost training.

Run: ``python -m tests.campaign.memory_copies [--mib 256] [--rounds 10] [--steps 40]``.

Two ranks stand for two hosts, each with a folder in memory of its own, on the loopback. In each round both save a
checkpoint of that size in memory and send it to the other; the time is from "in memory" to "in the memory of other
hosts": sent, received, verified, committed. Then both send as many bytes of a file in memory by ``sendfile`` to the
other, which reads them into one buffer and forgets them. CPU is of both ranks, all threads.

Then both train a module on one thread each, some steps without copies and as many with a checkpoint at each step whose
copies go at a limited rate, in turns.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.paper.lab.medians import summary
from pccheck_async import Group, MemoryTier, SyncCheckpointEngine
from tests.support import ranks

MIB = 1 << 20
Figures = dict[str, list[float]]


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


class Meeting:
    """Both ranks wait for the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def wait(self) -> None:
        self._connection.sendall(b".")
        assert self._connection.recv(1) == b"."


def stream(connection: socket.socket, file: int, nbytes: int) -> None:
    """Send a file, and receive as much."""

    def send() -> None:
        sent = 0
        while sent < nbytes:
            sent += os.sendfile(connection.fileno(), file, sent, nbytes - sent)

    sending = threading.Thread(target=send)
    sending.start()
    buffer, got = memoryview(bytearray(MIB)), 0
    while got < nbytes:
        got += connection.recv_into(buffer)
    sending.join()


def timed(found: Figures, name: str, work: Callable[[], object], meeting: Meeting) -> None:
    meeting.wait()
    start, used = time.perf_counter(), cpu()
    work()
    meeting.wait()
    found.setdefault(f"{name}, s", []).append(time.perf_counter() - start)
    found.setdefault(f"{name}, CPU s", []).append(cpu() - used)


def copies(group: Group, disk: Path, memory: Path, pairs: list[Any], nbytes: int, rounds: int) -> Figures:
    """Time the copies of one rank and its plain streams; the first round makes the slots."""
    meeting, connection = Meeting(pairs[0][group.rank]), pairs[1][group.rank]
    state = {f"t{number}": torch.rand(nbytes // 32) for number in range(8)}
    found: Figures = {}
    tier = MemoryTier(interval=1, replicas=1, path=str(memory))
    with tempfile.TemporaryFile(dir=memory) as file:
        file.write(os.urandom(MIB) * (nbytes // MIB))
        file.flush()
        with SyncCheckpointEngine(disk, group=group, memory=tier, save_last=False) as engine:
            for number in range(rounds + 3):
                for tensor in state.values():
                    tensor.add_(1)
                pending = engine.checkpoint(state, step=number, tier="memory")
                pending.wait_reached("memory", 100)
                timed(found, "copies", lambda pending=pending: pending.wait_reached("replicas", 100), meeting)  # type: ignore[misc]
                timed(found, "sendfile", lambda: stream(connection, file.fileno(), nbytes), meeting)
    return {name: values[3:] for name, values in found.items()}


def training(group: Group, disk: Path, memory: Path, pairs: list[Any], steps: int, rounds: int) -> Figures:
    """Time training steps of one rank by the rate of its copies, and without."""
    meeting = Meeting(pairs[0][group.rank])
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    data, state = torch.randn(256, 512), {"model": model, "optimizer": optimizer}
    number = 0

    def train(engine: SyncCheckpointEngine | None) -> None:
        nonlocal number
        for _ in range(steps):
            number += 1
            if engine is None:
                step()
            else:
                with engine.step(state, number):
                    step()

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(data).square().mean())
        optimizer.step()

    train(None)
    found: Figures = {}
    engines = {}
    for name, rate in {"8 MiB/s": 8 * MIB, "64 MiB/s": 64 * MIB, "memory alone": None}.items():
        tier = MemoryTier(interval=1, replicas=int(rate is not None), rate_limit=rate, path=str(memory))
        engines[name] = SyncCheckpointEngine(
            disk / name.replace("/", ""), group=group, memory=tier, save_last=False, interval=1 << 30
        )
    for turn in range(rounds + 1):
        for name, engine in [("none", None), *engines.items()][:: -1 if turn % 2 else 1]:
            if engine is not None and not turn:
                engine.open()
            figures: Figures = {}
            timed(figures, name, lambda engine=engine: train(engine), meeting)  # type: ignore[misc]
            if turn:
                found.setdefault(name, []).append(figures[f"{name}, s"][0] / steps)
    for engine in engines.values():
        engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    setattr(ranks, "PATIENCE", 3600)  # noqa: B010 - rounds take longer than a test
    with tempfile.TemporaryDirectory(dir=args.folder) as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:

        def places(group: Group, what: str) -> tuple[Path, Path]:
            made = Path(disk) / str(group.rank) / what, Path(memory) / str(group.rank) / what
            for each in made:
                each.mkdir(parents=True)
            return made

        pairs = [connected(), connected()]
        nbytes = args.mib * MIB
        one, other = ranks.run_ranks(
            2, lambda group: copies(group, *places(group, "copies"), pairs, nbytes, args.rounds)
        )
        for name in one:
            both = [a + b if "CPU" in name else max(a, b) for a, b in zip(one[name], other[name], strict=True)]
            print(summary(f"{args.mib} MiB each way, {name}", both))
            if "CPU" in name:
                print(f"    a GiB: {min(both) * 512 / args.mib:.2f} CPU s at the least")
        print(summary("share of sendfile", [a / b for a, b in zip(one["sendfile, s"], one["copies, s"], strict=True)]))
        pairs = [connected(), connected()]
        one, _ = ranks.run_ranks(
            2, lambda group: training(group, *places(group, "training"), pairs, args.steps, args.rounds)
        )
        for name, values in one.items():
            print(summary(f"a step, {name}, s", values))
            print(summary("    beside none", [a / b for a, b in zip(values, one["none"], strict=True)]))


if __name__ == "__main__":
    main()
