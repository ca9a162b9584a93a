"""Training that is killed by SIGKILL at a named moment, started again, and compared bit by bit with a run that was not.

A life is a fork of the test's process, which has the framework imported. It writes what it computes into a journal,
one line at a time, so that what a killed life computed is known, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.children import fork

PATIENCE = 120.0


class Journal:
    """What one life computed: bits by key, such as ``train 7`` or ``validation 1``; and where it dies.

    Args:
        path: The file, made if it is not there.
        die_at: The moment at which this process kills itself, ``KEY`` or ``KEY#N`` for the N-th time it is reached
            (from 1).
    """

    def __init__(self, path: Path, die_at: str | None = None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._die_at, _, times = (die_at or "").partition("#")
        self._times = int(times or 1)

    def note(self, key: str, value: Any) -> None:
        """Write what was computed, then reach the moment ``key``."""
        os.write(self._file, (json.dumps([key, bits(value)]) + "\n").encode())
        self.reach(key)

    def reach(self, moment: str) -> None:
        """Die if this is the moment."""
        if moment == self._die_at:
            self._times -= 1
            if self._times == 0:
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Life:
    """How one life ended, and what it computed, in order."""

    killed: bool
    lines: list[tuple[str, str]] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self.lines]


def bits(value: Any) -> str:
    """Return a digest of every bit of a value: tensors, numbers, strings, nested in dicts and lists."""
    digest = hashlib.blake2b(digest_size=12)
    _add(digest, value)
    return digest.hexdigest()


def live(work: Callable[[Journal], object], path: Path, die_at: str | None = None) -> Life:
    """Run ``work`` in a fork until it returns or dies. Fails where it raises, hangs, or does not reach ``die_at``."""
    path.unlink(missing_ok=True)
    child = fork(lambda: _work(work, path, die_at))
    deadline = time.monotonic() + PATIENCE
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the training hung: {read(path)[-3:]}")
        time.sleep(0.005)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the workers of its loaders
    code = os.waitstatus_to_exitcode(status)
    assert code == (-signal.SIGKILL if die_at else 0), f"ended with {code}, to die at {die_at}; see the output above"
    return Life(code != 0, read(path))


def agree(whole: Life, lives: Iterable[Life], *, but: Callable[[str], bool] = lambda _: False) -> None:
    """Assert that lives of one interrupted run computed what the uninterrupted one did, all of it, and nothing else.

    Steps after the last save are computed again: equal bits each time. ``but`` says which keys are not compared.
    """
    expected = dict(whole.lines)
    assert len(expected) == len(whole.lines), "a key was noted twice in one life"
    seen: set[str] = set()
    for number, life in enumerate(lives):
        for key, value in life.lines:
            assert but(key) or value == expected.get(key), f"life {number}: {key} differs"
            seen.add(key)
    assert seen == set(expected), sorted(set(expected) - seen)


def _work(work: Callable[[Journal], object], path: Path, die_at: str | None) -> None:
    import traceback

    try:
        work(Journal(path, die_at))
    except BaseException:  # noqa: BLE001 - a forked child must not return into the test runner
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def read(path: Path) -> list[tuple[str, str]]:
    """Return the lines of a journal."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(key, value) for key, value in map(json.loads, lines)]


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        digest.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            _add(digest, one)
    else:
        digest.update(value.hex().encode() if isinstance(value, float) else repr(value).encode())
