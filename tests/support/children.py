"""Code that runs in a forked process of its own: what it leaves behind, process groups and threads, goes with it."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import torch


def in_child(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returned in a child: something that JSON can carry. Its failure fails here."""
    reader, writer = os.pipe()
    child = fork(lambda: os.write(writer, json.dumps(_outcome(work)).encode()))
    os.close(writer)
    try:
        said = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
    finally:
        end(child)
        os.close(reader)
    assert said, "the child died by itself"
    result, failure = json.loads(said)
    assert not failure, failure
    return result


def fork(work: Callable[[], object]) -> int:
    """Run ``work`` in a child that leads a process group of its own; return its id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        torch.set_num_threads(1)  # the parent's OpenMP threads are not here
        work()
    finally:
        os._exit(1)


def end(child: int) -> None:
    """Kill a child and its descendants, and wait for it."""
    for kill in (os.killpg, os.kill):  # it may be too young to lead a group
        try:
            kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.waitpid(child, 0)


def _outcome(work: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return work(), ""
    except BaseException:  # noqa: BLE001 - told to the parent
        return None, traceback.format_exc()
