"""SIGKILL inside transactions of a shelf, and inside its recovery: all or nothing, and nothing acknowledged is lost."""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pccheck_async import Shelf
from pccheck_async.medium.windows import WindowedFile

_MESSAGE = struct.Struct("=cq")
FOUND, ACKNOWLEDGED, WRONG = b"f", b"a", b"w"
ELEMENTS = 40_000


def is_whole(shelf: Shelf) -> bool:
    step = shelf.step
    return bool((shelf.a == step).all() and (shelf.b == -step).all()) and shelf.log == {"steps": [step]}


def live(path: Path, say: Callable[[bytes, int], None]) -> None:
    """Recover, say what was found, and make transactions until death."""
    with Shelf(path, 8 << 20) as shelf:
        if "step" not in shelf:
            with shelf.transaction():
                shelf["step"], shelf["log"] = 0, {"steps": [0]}
                shelf["a"], shelf["b"] = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
        say(FOUND if is_whole(shelf) and shelf.verify() == () else WRONG, shelf.step)
        a = shelf.a
        while True:
            step = shelf.step + 1
            with shelf.transaction("a", "b", "log"):
                a[: ELEMENTS // 2] = step
                shelf.log["steps"].append(step)
                if step % 3:
                    shelf.b[:] = -step
                else:
                    shelf["b"] = np.full(ELEMENTS, -float(step))
                a[ELEMENTS // 2 :] = step
                del shelf.log["steps"][0]
                shelf["step"] = step
            say(ACKNOWLEDGED, step)


class Lives:
    """Lives and deaths of one shelf."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.random = path, random.Random(seed)
        self.acknowledged = -1
        self.seen: Counter[str] = Counter()

    def kill(self, *, recovering: bool) -> None:
        """Let a process live for a moment."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                live(self.path, lambda kind, step: _say(writer, kind, step))
            except BaseException as error:  # noqa: BLE001 - it must not return into the test runner
                os.write(2, f"child failed: {error!r}\n".encode())
            finally:
                os._exit(1)
        os.close(writer)
        try:
            if not recovering:
                assert select.select([reader], [], [], 60)[0], "the child recovered nothing in time"
                self.hear(reader)
            time.sleep(self.random.choice((self.random.uniform(0, 0.004), self.random.uniform(0, 0.03))))
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            while self.hear(reader):
                pass
            os.close(reader)
        assert os.WIFSIGNALED(status), "the child ended before it was killed"
        self.seen["kills"] += 1

    def hear(self, reader: int) -> bool:
        data = os.read(reader, _MESSAGE.size)
        if not data:
            return False
        kind, step = _MESSAGE.unpack(data)
        assert kind != WRONG, f"what was found is not whole: step {step}"
        assert step >= self.acknowledged, f"step {step} was found, {self.acknowledged} was acknowledged"
        self.acknowledged = step
        self.seen["recoveries" if kind == FOUND else "transactions"] += 1
        return True


def _say(writer: int, kind: bytes, step: int) -> None:
    os.write(writer, _MESSAGE.pack(kind, step))


def campaign(path: Path, kills: int, seed: int) -> None:
    lives = Lives(path, seed)
    for number in range(kills):
        lives.kill(recovering=number % 4 == 3)
    print(f"\n  {dict(lives.seen)}, step {lives.acknowledged}")
    with Shelf(path) as shelf:
        assert is_whole(shelf)
        assert shelf.step >= lives.acknowledged
        assert shelf.verify() == ()
        used = shelf.nbytes - shelf.free_bytes
    assert used < 3 * 8 * ELEMENTS  # two arrays, and what is small: nothing leaked
    assert lives.seen["transactions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["on disk", "in memory"])
def test_killed_anywhere(where: str, tmp_path: Path, shared_memory: Path) -> None:
    campaign((tmp_path if where == "on disk" else shared_memory) / "shelf", 24, seed=1)


@pytest.mark.campaign
@pytest.mark.parametrize("where", ["on disk", "in memory"])
def test_five_hundred_kills(where: str, tmp_path: Path, shared_memory: Path) -> None:
    campaign((tmp_path if where == "on disk" else shared_memory) / "shelf", 500, seed=2)


@pytest.mark.slow
def test_killed_while_it_is_made(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a whole shelf, or no file at all."""
    path, rng = shared_memory / "shelf", random.Random(3)
    for _ in range(20):
        child = os.fork()
        if child == 0:
            WindowedFile(path, writable=True) if path.exists() else Shelf(path, 8 << 20)
            os._exit(0)
        time.sleep(rng.uniform(0, 0.003))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert os.listdir(shared_memory) in ([], ["shelf"])
        if path.exists():
            with Shelf(path) as shelf:
                assert len(shelf) == 0
            path.unlink()
