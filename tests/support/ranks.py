"""Forked ranks that run one function each and send back what it returns."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - what a rank that opens a socket would import by itself
import gc
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pccheck_async import Group

# torch looks up the name of every address that it connects to: without a try, as a server may not answer for seconds.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
PATIENCE: Final = 30.0
_ports: list[int] = []
_used = 0


class RankFailedError(AssertionError):
    """A rank raised; says what."""


def run_ranks(
    world: int,
    function: Callable[[Group], Any],
    *,
    meanwhile: Callable[[list[int]], None] = lambda _: None,
    statuses: list[int] | None = None,
) -> list[Any]:
    """Run ``function`` on every rank, each in a fork of this process; return what each returned, by rank.

    ``meanwhile`` is called with their process ids. Where ``statuses`` is given, ranks may end by SystemExit, and that
    is where their exit statuses go. Raises RankFailedError, and TimeoutError after a minute; all ranks are dead then.
    """
    place = meeting_place()
    pids, pipes = [], []
    for rank in range(world):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _be(rank, world, place, function, writer)
        os.close(writer)
        pids.append(pid)
        pipes.append(reader)
    answers, deadline = list[tuple[bool, Any]](), 0.0
    try:
        meanwhile(pids)
        deadline = time.monotonic() + PATIENCE
        if statuses is None:  # else ranks may be killed, and their own children keep a pipe open for seconds
            answers = [_read_all(pipe, deadline) for pipe in pipes]
    finally:
        codes = []
        for pid, pipe in zip(pids, pipes, strict=True):
            codes.append(_end(pid, deadline))
            os.close(pipe)
    if statuses is not None:
        statuses[:] = codes
        return []
    failed = [answer[1] for answer in answers if not answer[0]]
    if failed:
        raise RankFailedError("\n".join(failed))
    return [answer[1] for answer in answers]


def meeting_place() -> tuple[int, str]:
    """Return the port of a store, and a prefix that nobody used there.

    It is one store for all, in a process of its own: a fork while its thread looks a name up would never look one up.
    """
    global _used  # noqa: PLW0603 - a counter
    if not _ports:
        reader, writer = os.pipe()
        parent = os.getpid()
        if os.fork() == 0:
            server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            os.write(writer, server.port.to_bytes(4, "little"))
            while os.getppid() == parent:
                time.sleep(0.5)
            os._exit(0)
        _ports.append(int.from_bytes(os.read(reader, 4), "little"))
        os.close(reader)
        os.close(writer)
    _used += 1
    return _ports[0], f"{os.getpid()}-{_used}"


def meet(place: tuple[int, str]) -> Store:
    """Return a client of that store."""
    port, prefix = place
    return PrefixStore(prefix, TCPStore("localhost", port, is_master=False, wait_for_workers=False))


def wait_for(*paths: Path) -> None:
    """Wait until all these files exist."""
    deadline = time.monotonic() + PATIENCE
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} never came"
        time.sleep(0.01)


def _be(rank: int, world: int, place: tuple[int, str], function: Callable[[Group], Any], pipe: int) -> None:
    status = 0
    try:
        gc.freeze()  # what it has from its parent is not its garbage, and looking at it copies every page of it
        torch.set_num_threads(1)
        answer: tuple[bool, Any] = True, function(Group(rank, world, meet(place), timeout=PATIENCE / 3))
    except SystemExit as error:
        status, answer = int(error.code or 0), (True, None)
    except BaseException:  # noqa: BLE001 - it is told in the parent
        status, answer = 1, (False, f"rank {rank}: {traceback.format_exc()}")
        traceback.print_exc()  # also where nobody reads answers
    with os.fdopen(pipe, "wb") as file:
        file.write(pickle.dumps(answer))
    os._exit(status)


def _read_all(pipe: int, deadline: float) -> tuple[bool, Any]:
    data = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"a rank said nothing for {PATIENCE} s")
        piece = os.read(pipe, 1 << 16)
        if not piece:
            return pickle.loads(data) if data else (False, "a rank died")
        data += piece


def _end(pid: int, deadline: float) -> int:
    """Reap a rank; kill it where it has not ended by then. Returns its exit status, negative for a signal."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
