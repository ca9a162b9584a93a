"""Forked ranks that stay: all do what they are told, at once, and answer."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.support.ranks import RankFailedError


@contextmanager
def commanded_ranks(
    world: int, rank: Callable[[int], AbstractContextManager[Callable[[Any], Any]]]
) -> Iterator[Callable[[Any], list[Any]]]:
    """Fork ranks; give a function that tells all of them one command (not None), and returns their answers, by rank.

    Each fork enters ``rank`` with its number, obeys commands by what that gives, and leaves it at the end. Raises
    RankFailedError with the traceback of a rank that failed, EOFError where one was killed; the others are killed then.
    """
    pids, pipes = list[int](), list[Connection]()

    def tell(command: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send(command)
        answers = dict[Connection, Any]()
        while silent := [pipe for pipe in pipes if pipe not in answers]:
            ready = wait(silent)
            for pipe in (pipe for pipe in silent if pipe in ready):
                failure, answers[pipe] = pipe.recv()
                if failure:
                    raise RankFailedError(failure)
        return [answers[pipe] for pipe in pipes]

    try:
        for number in range(world):
            ours, theirs = Pipe()
            if (pid := os.fork()) == 0:
                ours.close()
                _be(number, rank, theirs)
            theirs.close()
            pids.append(pid)
            pipes.append(ours)
        tell(None)  # to start, now that all are forked: a fork beside a thread that looks up a name never looks one up
        yield tell
        tell(None)  # to end
    except BaseException:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        for pid, pipe in zip(pids, pipes, strict=True):
            os.waitpid(pid, 0)
            pipe.close()


def _be(number: int, rank: Callable[[int], AbstractContextManager[Callable[[Any], Any]]], parent: Connection) -> None:
    try:
        torch.set_num_threads(1)
        parent.recv()
        with rank(number) as obey:
            parent.send(("", None))
            while (command := parent.recv()) is not None:
                parent.send(("", obey(command)))
        parent.send(("", None))
    except BaseException:  # noqa: BLE001 - it is told in the parent
        with suppress(OSError):  # where there is one
            parent.send((f"rank {number}: {traceback.format_exc()}", None))
    finally:
        os._exit(0)
