"""Real interrupts, at moments that nobody chose: SIGINT from a process beside, as Ctrl-C in a terminal is."""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["Interrupter", "interrupter"]


class Interrupter:
    """A child process that sends this one a SIGINT, a random while after it is asked to.

    Attributes:
        swallowed: Interrupts that came and were not raised in the code that was interrupted.
        ignored: Interrupts that Python reported as ignored: they were raised in a finalizer.
        patience: Seconds after which an interrupt that was sent counts as swallowed.
    """

    patience = 5.0

    def __init__(self, seed: int) -> None:
        self.swallowed = self.ignored = 0
        self._asked = 0
        self._begun = mmap.mmap(-1, 8)  # how many, by the child
        self._sent = mmap.mmap(-1, 8)
        self._random = random.Random(seed)
        self._reader, self._writer = os.pipe()
        parent = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._writer)
            count = 0
            while len(word := os.read(self._reader, 8)) == 8:
                count += 1
                until = time.perf_counter() + int.from_bytes(word, "little") / 1e9
                self._begun[:] = count.to_bytes(8, "little")
                while time.perf_counter() < until:
                    pass
                os.kill(parent, signal.SIGINT)
                self._sent[:] = count.to_bytes(8, "little")
            os._exit(0)
        os.close(self._reader)

    def ask(self, most_seconds: float) -> None:
        """Let one come within so many seconds of the return; on a busy machine it may come here."""
        self._asked += 1
        os.write(self._writer, int(self._random.uniform(0, most_seconds) * 1e9).to_bytes(8, "little"))
        while int.from_bytes(self._begun[:], "little") < self._asked:  # the child takes longer to wake than a change
            os.sched_yield()

    def wait(self) -> NoReturn:
        """Wait for it to be raised here, and let another come where Python swallowed it, in a finalizer.

        ``signal.pause()`` would wait for ever: for one that was swallowed, and for one that arrives between Python's
        last look for signals and the call, since its handler runs after the call.
        """
        for _ in range(20):
            while int.from_bytes(self._sent[:], "little") < self._asked:
                time.sleep(0.001)
            time.sleep(self.patience)  # ends early, by the KeyboardInterrupt
            self.swallowed += 1
            self.ask(0)
        raise AssertionError("twenty interrupts in a row were swallowed")

    def close(self) -> None:
        """End the child."""
        os.close(self._writer)
        os.waitpid(self._child, 0)


@contextmanager
def interrupter(seed: int) -> Iterator[Interrupter]:
    """Have one, under Python's own handler of SIGINT; fails if an interrupt was swallowed other than by a finalizer."""
    before, report = signal.signal(signal.SIGINT, signal.default_int_handler), sys.unraisablehook
    it = Interrupter(seed)

    def note(ignored: sys.UnraisableHookArgs) -> None:
        if ignored.exc_type is KeyboardInterrupt:
            it.ignored += 1
        else:
            report(ignored)

    sys.unraisablehook = note
    try:
        yield it
        assert it.swallowed == it.ignored, f"{it.swallowed} interrupts were swallowed, {it.ignored} in finalizers"
    finally:
        it.close()
        sys.unraisablehook = report
        signal.signal(signal.SIGINT, before)
