# SPDX-License-Identifier: Apache-2.0
"""Signals that request the end of the process: one last checkpoint at the next safe point, then the process exits.

The effects for a user, and job scripts for schedulers, are in ``examples/guide/preemption.md``. If forked workers of a
``DataLoader`` die of a signal that the whole process group gets, the trainer's next batch raises. If that happens
outside a step, leaving the engine's context still saves the last finished step; inside a step nothing more is saved.

A signal handler runs in the main thread between any two of its instructions. So on the first signal it takes no lock,
writes no log and raises nothing: it records the request and starts a thread that may do all that. A lock, which is
acquired without blocking, decides whether the training step that saved, or that thread at the deadline, ends the
process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from pccheck_async.engine import EngineCore
from pccheck_async.telemetry import write

__all__ = ["Preemption"]

_SAME_SECONDS = 1.0
"""Seconds after the first signal in which another is ignored: launchers pass on signals that the group got anyway."""
_LATE_SECONDS = 0.5
"""Seconds after the deadline in which a training step that gave up waiting may still end the process itself."""


class _Request:
    """A signal that came: the engines that watch it, the deadline, and the lock of the thread that ends the process."""

    def __init__(self, signum: int, seconds: float, asked: list[Preemption]) -> None:
        self.signum = signum
        self.seconds = seconds
        self.asked = asked
        self.began = time.monotonic()
        self.until = self.began + seconds
        self.left = False
        self.again = False
        self.claim_lock = threading.Lock()
        self._wake = threading.Lock()
        self._gone = threading.Lock()
        self._wake.acquire()
        self._gone.acquire()

    def claim(self) -> bool:
        """Claim to be the thread that ends the process; only the first call returns True."""
        return self.claim_lock.acquire(blocking=False)

    def wake(self) -> None:
        """Wake the thread that waits for the deadline."""
        with suppress(RuntimeError):  # it was woken before
            self._wake.release()

    def wait_woken(self) -> None:
        self._wake.acquire(timeout=max(0.0, self.until + _LATE_SECONDS - time.monotonic()))

    def leave(self) -> bool:
        """Mark the process as ending; return False if it was marked before."""
        if self.left:
            return False
        self.left = True
        self._gone.release()
        return True

    def wait_left(self) -> None:
        self._gone.acquire(timeout=1.0)


class _Signals:
    """The signal handlers of this process, and the engines that installed them."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        self.engines: list[Preemption] = []
        self._request: _Request | None = None

    def watch(self, preemption: Preemption) -> None:
        """Install handlers for the signals of ``preemption``. Main thread only."""
        if preemption not in self.engines:
            self.engines.append(preemption)
        for signum in preemption.signals:
            current = signal.getsignal(signum)
            if current != self._on_signal:
                self._previous[signum] = signal.SIG_DFL if current is None else current  # None: not from Python
                signal.signal(signum, self._on_signal)

    def forget(self, preemption: Preemption) -> None:
        """Remove an engine, and put back handlers that no engine needs any more, unless a request is pending."""
        if preemption in self.engines:
            self.engines.remove(preemption)
        if self._request is None or self._request.left:
            self._put_back(set(self._previous) - {each for other in self.engines for each in other.signals})

    def let_go(self, request: _Request) -> None:
        """End the process: raise SystemExit, or let a previous handler run in the main thread. May be on any thread."""
        mine, main = request.claim(), threading.current_thread() is threading.main_thread()
        request.wake()
        if main:
            if not mine:
                request.wait_left()  # the handler runs here, in this thread
            self._leave(request, sys._getframe())
        elif mine:
            callable_before = callable(self._previous.get(request.signum))
            self._wake_main(request)
            if not callable_before:
                raise SystemExit(128 + request.signum)

    def drop(self, request: _Request) -> None:
        """Withdraw a request, because an error ends the process already, and put the previous handlers back."""
        if request.claim():
            request.leave()
            request.wake()
            self._put_back(set(self._previous))

    def forked(self) -> None:
        """Called in a forked child: forget the parent's engines and request, and put the earlier handlers back."""
        self._pid = os.getpid()
        for each in self.engines:
            each.request = None
        self.engines, self._request = [], None
        previous = dict(self._previous)
        self._put_back(set(previous))
        for signum, handler in previous.items():
            # multiprocessing ends its children with SIGTERM. Any other signal that nobody handled is for the parent,
            # which dies of a data loader's worker that dies.
            if handler == signal.SIG_DFL and signum not in (signal.SIGTERM, signal.SIGINT):
                with suppress(ValueError):
                    signal.signal(signum, signal.SIG_IGN)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            request = self._request
            if request is not None and not request.left:
                if request.claim_lock.locked():
                    self._leave(request, frame)
                elif time.monotonic() - request.began >= _SAME_SECONDS:
                    request.again = True
                    request.wake()
                return
            asked = [each for each in self.engines if signum in each.signals]
            if asked:
                request = self._request = _Request(signum, min(each.seconds for each in asked), asked)
                for each in asked:
                    each.request = request
                with suppress(RuntimeError):  # no thread can be started any more: then nobody watches the time
                    threading.Thread(
                        target=self._watch_time, args=(request,), name="pccheck-preemption", daemon=True
                    ).start()
                return
        self._pass_on(signum, frame)

    def _watch_time(self, request: _Request) -> None:
        name = _name(request.signum)
        text = "got %s: saving once more after this training step, then %s, in %g s at the latest"
        handled = callable(self._previous.get(request.signum))
        write("preemption", text, name, "its former handler runs" if handled else "the process goes", request.seconds)
        for each in request.asked:
            each.end_last_drains_at(request.until)
        request.wait_woken()
        if not request.claim():
            return
        for each in request.asked:
            each.end_last_drains_at(time.monotonic())
        why = f"{name} came again" if request.again else f"{request.seconds:g} s after {name}"
        for each in [each for each in request.asked if each.in_use and not each.finished] or request.asked:
            each.write("%s: the process goes now; nothing newer than %s", why, each.newest)
        self._wake_main(request)

    def _wake_main(self, request: _Request) -> None:
        """Send the signal to the main thread, so that the handler runs there also if a system call blocks it."""
        ident = threading.main_thread().ident
        if ident is not None and signal.getsignal(request.signum) == self._on_signal:
            signal.pthread_kill(ident, request.signum)

    def _leave(self, request: _Request, frame: FrameType | None) -> None:
        if not request.leave():
            return
        previous = self._previous.get(request.signum)
        self.engines = []
        self._put_back(set(self._previous))
        if not callable(previous):
            raise SystemExit(128 + request.signum)
        previous(request.signum, frame)

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        """Put the previous handler back and let it handle the signal: the thread that closed the engine could not."""
        previous = self._previous.get(signum)
        ours = signal.getsignal(signum) == self._on_signal
        self._put_back({signum} & set(self._previous))
        if callable(previous):
            previous(signum, frame)
        elif previous == signal.SIG_DFL and ours:
            os.kill(os.getpid(), signum)
        elif previous == signal.SIG_DFL:
            raise SystemExit(128 + signum)

    def _put_back(self, signums: set[int]) -> None:
        for signum in signums:
            if signal.getsignal(signum) == self._on_signal:
                try:
                    signal.signal(signum, self._previous.get(signum, signal.SIG_DFL))
                except ValueError:  # not the main thread: the next signal passes through, and puts it back
                    continue
            self._previous.pop(signum, None)


_signals = _Signals()
os.register_at_fork(after_in_child=_signals.forked)


class Preemption:
    """Watches, for one engine, the signals that request the end of the process, and ends it after the last save."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self.signals: frozenset[int] = frozenset()  # those that are watched
        self.seconds = 0.0  # from the signal until the process goes
        self.request: _Request | None = None
        self.in_use = False  # training steps run in this engine's step contexts: there are safe points to wait for
        self.finished = False  # the last checkpoint was taken, or failed
        self.limited = False  # the engine's last drain ends at a time

    def watch(self, signals: tuple[int, ...], deadline: float) -> None:
        """Install signal handlers. Arguments and errors: :meth:`pccheck_async.CheckpointEngine.on_preemption`."""
        if not deadline > 0:
            raise ValueError(f"deadline is seconds, more than 0, not {deadline!r}")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("only the main thread may install signal handlers; call engine.on_preemption there")
        for each in signals:
            if not isinstance(each, int):
                raise TypeError(f"signals are numbers, such as signal.SIGTERM, not {each!r}")
        chosen = frozenset(map(int, signals or (signal.SIGTERM,)))
        if odd := chosen - set(signal.valid_signals()) | chosen & {signal.SIGKILL, signal.SIGSTOP}:
            raise ValueError(f"no process can handle {', '.join(map(_name, sorted(odd)))}")
        self.signals |= chosen
        self.seconds = deadline
        if self.request is not None and self.request.left:
            self.request, self.finished = None, False
        _signals.watch(self)

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self.request is not None

    @property
    def pending(self) -> bool:
        """Whether a signal came and the process is not ending because of it yet."""
        return self.request is not None and not self.request.left

    @property
    def patience(self) -> float | None:
        """Seconds that may still be spent on checkpoints in flight; None without a limit."""
        return None if self.request is None else max(_LATE_SECONDS, self.request.until - time.monotonic())

    @property
    def newest(self) -> str:
        """A text for the log: the step of the newest checkpoint, and the store."""
        step = self._engine.newest_step
        return f"{'no checkpoint' if step is None else f'the checkpoint of step {step}'} is in {self._engine.path}"

    def end_last_drains_at(self, until: float) -> None:
        """Limit the engine's last drain: it ends at ``until`` at the latest, in seconds of the monotonic clock."""
        self.limited = True
        self._engine.end_last_drains_at(until)

    def follow(self) -> None:
        """Send this process a watched signal if none came: another rank was preempted, and all end after one step."""
        if not self.pending and self.signals:
            os.kill(os.getpid(), min(self.signals, default=signal.SIGTERM))

    def go_on(self) -> None:
        """Called when the engine is used: lifts the limit of drains if a previous handler kept the process alive."""
        if self.limited and self.request is not None and self.request.left:
            self.limited = False
            self._engine.end_last_drains_at(None)

    def finish(self) -> None:
        """Called when this engine's last checkpoint was taken or failed; ends the process once that holds for all."""
        self.finished = True
        request = self.request
        if request is not None and not request.left and not self._others(request):
            _signals.let_go(request)

    @contextmanager
    def ending(self, *, go: bool = True) -> Iterator[None]:
        """Return a context manager for closing the engine; on leaving, put handlers back and end a preempted process.

        Args:
            go: False if an error ends the process already: then the request is withdrawn.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
            raise
        finally:
            self._end(failure, go)

    def _end(self, failure: Exception | None, go: bool) -> None:
        request = self.request
        _signals.forget(self)
        if request is None or request.left or self._others(request):
            return
        if not go:
            _signals.drop(request)
            return
        if failure is not None:
            self.say("gave up: %s; nothing newer than %s", failure, self.newest)
        elif not self.finished:
            self.say("the engine was closed; %s; the process goes", self.newest)
        _signals.let_go(request)

    def _others(self, request: _Request) -> bool:
        """Return whether other engines in use still have to take their last checkpoint for this request."""
        others = (each for each in _signals.engines if each is not self and each.request is request)
        return any(each.in_use and not each.finished for each in others)

    def say(self, message: str, *arguments: Any) -> None:
        """Log the outcome of the last checkpoint."""
        if self.request is not None:
            self.write(f"%s: {message}", _name(self.request.signum), *arguments)

    def write(self, message: str, *arguments: Any) -> None:
        """Log a warning about this engine."""
        write("preemption", message, *arguments, store=self._engine.path)


def _name(signum: int) -> str:
    with suppress(ValueError):
        return signal.Signals(signum).name
    return f"signal {signum}"
