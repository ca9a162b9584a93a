# SPDX-License-Identifier: Apache-2.0
"""Captures that run while training goes on: the guard that makes steps wait for them, and the detection of torn ones.

Parameters and the tensors that an optimizer keeps for them change only in its step, so they may be copied during the
next forward and backward if the step waits for the copy (CheckFreq, section 4.1). The guard makes steps of attached
optimizers wait. If all copies that are left are queued on devices, the devices wait and not the training thread:
the step's work there is queued after a fence. Python code that accesses the memory of tensors being captured without
torch's version counters, as code that swaps weights for an evaluation does, waits as well
(:mod:`pccheck_async.state.tensor_access`). Changes that cannot be made to wait tear the capture, which is detected as
far as possible:

- a step that begins in the middle of a capture, by hooks on the attached optimizers and on all others;
- other changes, by version counters, addresses and sizes, compared when the training thread next waits for the capture,
  and before the commit if it did not (:mod:`pccheck_async.state.save.torn`);
- with ``check_captures``, any change at all, by a comparison with a copy that was made before the call returned.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property, wraps
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pccheck_async.engine.flight import Flight, Promise
from pccheck_async.errors import TornCaptureError
from pccheck_async.state import LazyPart, Versions
from pccheck_async.state.ambient import no_functions
from pccheck_async.state.tensor_access import (
    call_before_accesses,
    stop_calling,
    stop_watching_accesses,
    storage_address,
    watch_accesses,
)
from pccheck_async.transfer.copying import Fence

__all__ = ["Guard", "Overlapped", "StepHooks", "hooks_of", "hooks_of_all", "unwrapped"]


Callback = Callable[[torch.optim.Optimizer], None]
_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class StepHooks:
    """The callbacks before and after each step of one optimizer, or of all optimizers.

    torch's hooks that run the callbacks are never removed: torch iterates over its table of hooks during a step, and
    removing one as an engine closes would raise an error in another thread's step. Without callbacks hooks do nothing.

    ``step(closure)`` computes the gradients inside the step. If the optimizer calls the closure before it changes
    anything, the callbacks run after the closure, so that forward and backward do not wait for captures. That holds
    for torch's optimizers, except L-BFGS, while their closures leave the parameters unchanged. As long as that is not
    known, the callbacks run before the closure, too.
    """

    def __init__(self) -> None:
        self.before: tuple[Callback, ...] = ()
        self.after: tuple[Callback, ...] = ()
        self._lock = threading.RLock()

    def add(self, *, before: Callback | None = None, after: Callback | None = None) -> None:
        """Call ``before`` before each step, and ``after`` after each step, from now on."""
        with self._lock:
            self.before += () if before is None else (before,)
            self.after += () if after is None else (after,)

    def remove(self, callback: Callback) -> None:
        """Remove a callback: it is not called any more."""
        with self._lock:
            self.before = tuple(each for each in self.before if each != callback)
            self.after = tuple(each for each in self.after if each != callback)

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        """Called by torch before a step; returns the arguments that replace those of the step, None to keep these."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first one is the optimizer
        if closure is None or not self.before or not _calls_closure_first(optimizer):
            self.call_before(optimizer)
            return None
        if not _unchanging.get(optimizer, False):
            self.call_before(optimizer)

        def closure_and_calls() -> Any:
            versions = _versions(optimizer)
            result = closure()
            _unchanging[optimizer] = versions == _versions(optimizer)
            self.call_before(optimizer)
            return result

        if len(args) > 1:
            return (args[0], closure_and_calls, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_and_calls}

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called by torch after a step."""
        for callback in self.after:
            callback(optimizer)

    def call_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the callbacks before a step, or before another change of all parameters by the optimizer."""
        for callback in self.before:
            callback(optimizer)


_unchanging: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
"""Whether the last closure in a step of an optimizer left the parameters as they were."""


def _calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's step is one of torch's that call their closure once, before any change."""
    step = type(optimizer).step
    return step.__module__.startswith("torch.optim.") and step.__qualname__ != "LBFGS.step"


def _versions(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return torch's version counter of each parameter: how often it was changed, as far as torch counts that."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with no_functions():  # lazy parameters, and classes of users, refuse unknown functions
        return [0 if parameter.is_inference() else parameter._version for parameter in parameters]


_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepHooks] = weakref.WeakKeyDictionary()


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer whose ``step`` calls hooks: ``optimizer``, or the one inside a trainer's wrapper.

    Wrappers of Accelerate, Lightning and Fabric inherit the class, but call no hooks. torch marks the ``step`` of a
    class as ``hooked`` when an optimizer of that class is made.
    """
    seen: list[object] = []
    while not getattr(getattr(type(optimizer), "step", None), "hooked", False) and all(
        each is not optimizer for each in seen
    ):
        seen.append(optimizer)
        try:
            inner = optimizer.optimizer  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 - a property of other code; training must not end by it
            break
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def _hook_switches(optimizer: torch.optim.Optimizer, hooks: StepHooks) -> None:
    """Make ``train`` and ``eval`` of an optimizer run the callbacks: in schedule-free ones they swap the parameters."""
    here = weakref.ref(optimizer)
    for name in ("train", "eval"):
        if name not in vars(optimizer) and callable(method := getattr(type(optimizer), name, None)):

            @wraps(method)
            def switch(*args: Any, method: Callable[..., Any] = method, **kwargs: Any) -> Any:
                optimizer = here()
                assert optimizer is not None  # it has this method
                hooks.call_before(optimizer)
                return method(optimizer, *args, **kwargs)

            setattr(optimizer, name, switch)


def hooks_of(optimizer: torch.optim.Optimizer) -> StepHooks:
    """Return the callbacks of an optimizer; the first call registers the hooks. Raises TypeError if it takes none."""
    try:
        _ = optimizer.param_groups
        hooks = _hooks.get(optimizer)
        if hooks is None:
            hooks = StepHooks()
            optimizer.register_step_pre_hook(hooks.before_step)
            optimizer.register_step_post_hook(hooks.after_step)
            _hook_switches(optimizer, hooks)
            _hooks[optimizer] = hooks
    except AttributeError:  # wrappers may inherit the methods, and have nothing that calls hooks
        if not hasattr(optimizer, "step"):
            raise TypeError(f"attach takes optimizers, not {type(optimizer).__qualname__} objects") from None
        raise TypeError(
            f"a {type(optimizer).__qualname__} has no hooks around its step; attach the torch.optim.Optimizer "
            "inside it, or call engine.wait_captured() before each of its steps"
        ) from None
    return hooks


@cache
def hooks_of_all() -> StepHooks:
    """Return the callbacks around the steps of all optimizers; the first call registers the hooks."""
    hooks = StepHooks()
    register_optimizer_step_pre_hook(hooks.before_step)
    register_optimizer_step_post_hook(hooks.after_step)
    return hooks


class Overlapped:
    """One overlapped capture: which tensors must not change before it ended, and whether one did.

    Attributes:
        fence: Promise of the fence after which devices may change the captured tensors: all copies are queued.
        note_end: Called with the error that made the checkpoint fail, None if it did not.
    """

    def __init__(self, flight: Flight, lazy: LazyPart) -> None:
        self.flight = flight
        self.fence: Promise[Fence] = Promise()
        self.note_end = lazy.note_end
        self._versions: Versions | None = lazy.versions
        self._addresses = lazy.versions.memory[0]
        self._torn: TornCaptureError | None = None
        self._lock = threading.RLock()  # a finalizer that reaches for memory may find it taken by its own thread

    @property
    def running(self) -> bool:
        """Whether the capture may still read the live tensors."""
        return not self.flight.is_captured

    @property
    def compared(self) -> bool:
        """Whether the tensors were compared for the last time, and may change."""
        return self._versions is None

    @cached_property
    def storages(self) -> frozenset[int]:
        """Addresses of the storages that are captured while training goes on."""
        return frozenset(self._addresses)

    def order_after_copies(self) -> bool:
        """Make the devices' current streams wait for the copies.

        Returns False if there is no fence yet, or if they cannot wait.
        """
        fence = self.fence  # the engine's thread may replace it
        return fence.over and fence.result().order_after_copies()

    def compare(self) -> None:
        """Compare the tensors with their versions for the last time: the caller may change everything from now on.

        Called when the capture has ended, or when the devices' later work waits for its queued copies. A change makes
        :meth:`check` raise. Idempotent.
        """
        with self._lock:
            versions, self._versions = self._versions, None
            if versions is not None and self._torn is None and (paths := versions.changed()):
                what = "changed before its capture was waited for"
                self._note_torn(paths, what, TornCaptureError.ADVICE)

    def detect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Called when an optimizer is about to change ``tensors``: if the capture still runs, they tear it."""
        with self._lock:
            if self._versions is None or self._torn is not None or not self.running:
                return
            if paths := self._versions.paths_of(tensors):
                what = "is changed by an optimizer's step in the middle of its capture"
                advice = "attach that optimizer to the engine, or call engine.wait_captured() before its step"
                self._note_torn(paths, what, advice)

    def check(self) -> None:
        """Compare for the last time, and raise TornCaptureError if any change is known. Called before the commit."""
        self.compare()
        self.fence = Promise()  # the copies ended; users may keep their checkpoint for long
        if self._torn is not None:
            raise self._torn

    def _note_torn(self, paths: Sequence[str], what: str, advice: str) -> None:
        step = self.flight.step
        text = f"the checkpoint of step {step} is torn, and not committed: {paths[0]} {what}; {advice}"
        self._torn = TornCaptureError(text, paths=paths)


class Guard:
    """Makes steps of attached optimizers wait while the tensors that they change are being captured.

    Args:
        max_stall: Most seconds that training waits for captures; None: as long as they take.
        stop_capture: Ends a capture that takes longer; returns once nothing of it is running.
        waited: Called after training waited for the capture of a checkpoint, with that checkpoint and the
            ``time.perf_counter()`` at which the waiting began.

    Attributes:
        attached: Whether an optimizer was ever attached.
        fenced: For how many captures the devices waited in place of the training thread.
    """

    def __init__(
        self,
        max_stall: float | None,
        stop_capture: Callable[[Flight], None],
        waited: Callable[[Flight, float], None],
    ) -> None:
        self._pid = os.getpid()
        self._max_stall = max_stall
        self._stop_capture = stop_capture
        self._waited = waited
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepHooks] = weakref.WeakKeyDictionary()
        self._attached: list[weakref.ref[torch.optim.Optimizer]] = []
        self.attached = False
        self._others: StepHooks | None = None
        self._captures: list[Overlapped] = []  # replaced and never changed: read without the lock
        self._lock = threading.RLock()
        self.fenced = 0

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The attached optimizers that still exist."""
        return [optimizer for each in self._attached if (optimizer := each()) is not None]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make steps of ``optimizer`` wait for captures from now on. Idempotent. Raises TypeError: it has no hooks."""
        if optimizer in self._hooks:
            return
        hooks = hooks_of(optimizer)
        watch_accesses(self)
        hooks.add(before=self.before_step)
        self._attached = [each for each in self._attached if each() is not None] + [weakref.ref(optimizer)]
        self.attached = True
        self._hooks[optimizer] = hooks  # last: without it the next call takes this one for interrupted

    def watch(self, flight: Flight, lazy: LazyPart) -> Overlapped:
        """Make steps wait, from now on, until the capture of a checkpoint with a lazy part has ended."""
        capture = Overlapped(flight, lazy)
        flight.compare = capture.compare
        if self._others is None:
            self._others = hooks_of_all()
            self._others.add(before=self.before_any_step)
        with self._lock:
            self._captures = [each for each in self._captures if not each.flight.over] + [capture]
            call_before_accesses(self.before_access)
        if lazy.eager is None:
            flight.set_eager_captured()
        return capture

    def wait(self) -> None:
        """Block until no capture reads the live state any more; abandon those that last longer than ``max_stall``."""
        deadline = self._deadline()
        for capture in self._captures:
            self._block(capture, deadline, for_fence=False)
            self._compare(capture)

    def order_after_copies(self, captures: Iterable[Overlapped] | None = None) -> None:
        """Order the caller's next work on its current streams after the captures: devices wait if they can.

        The thread blocks only until all remaining copies are queued on the devices. A capture is watched until it has
        ended: another step may use other streams.
        """
        deadline = self._deadline()
        for capture in self._captures if captures is None else captures:
            self._block(capture, deadline, for_fence=True)
            if capture.running:
                if capture.order_after_copies():
                    self.fenced += not capture.compared
                else:
                    self._block(capture, deadline, for_fence=False)
            self._compare(capture)

    def _deadline(self) -> float:
        return math.inf if self._max_stall is None else time.perf_counter() + self._max_stall

    def _block(self, capture: Overlapped, deadline: float, *, for_fence: bool) -> None:
        if not capture.running:
            return
        start = time.perf_counter()
        try:
            if not capture.flight.wait_out_of_reach(deadline - start, capture.fence if for_fence else None):
                self._stop_capture(capture.flight)
        finally:
            self._waited(capture.flight, start)

    def _compare(self, capture: Overlapped) -> None:
        capture.compare()
        with self._lock:  # only now: if the wait is interrupted, it is watched at the next step
            self._captures = [each for each in self._captures if each is not capture or each.running]

    def close(self) -> None:
        """Remove the callbacks from all optimizers, and watch no captures or accesses to memory any more."""
        for hooks in self._hooks.values():
            hooks.remove(self.before_step)
        if self._others is not None:
            self._others.remove(self.before_any_step)
        stop_calling(self.before_access)
        stop_watching_accesses(self)
        self._hooks.clear()
        self._captures = []
        self._attached = []
        self._others = None

    def before_access(self, owner: Any) -> None:
        """Delay code that accesses memory that is being captured (``owner`` is a tensor or storage)."""
        with self._lock:
            running = [capture for capture in self._captures if capture.running]
            if not running:
                stop_calling(self.before_access)  # until the next capture: every access would take longer
        if not running or os.getpid() != self._pid or not (address := storage_address(owner)):
            return
        self.order_after_copies([capture for capture in running if address in capture.storages])

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make a step of an attached optimizer wait for the captures."""
        if os.getpid() == self._pid:
            self.order_after_copies()
            self._detect(optimizer)

    def before_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Detect captures that are torn by a step of an optimizer that is not attached."""
        if os.getpid() == self._pid and optimizer not in self._hooks:
            # Its step may use other streams than the attached one that came before.
            self.order_after_copies([capture for capture in self._captures if capture.compared])
            self._detect(optimizer)

    def _detect(self, optimizer: torch.optim.Optimizer) -> None:
        if running := [capture for capture in self._captures if capture.running]:
            # Listed before a capture is locked: a class of tensors may have code of its own for its attributes.
            changing = [
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad or parameter.grad is not None  # frozen ones it leaves as they are
            ]
            for capture in running:
                capture.detect(changing)
