# SPDX-License-Identifier: Apache-2.0
"""An engine's view of training: the protocol of a policy, and hooks. Both are implemented in rooms above."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

__all__ = ["Decision", "Policy", "SaveReport", "StepReport", "TrainingHooks"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step.

    Attributes:
        step: The user's number of the step.
        now: When it ended, in seconds of a monotonic clock.
        seconds: Duration of the step, without the waiting that the engine caused.
        stall: Seconds the engine kept the training thread waiting since the last report.
        in_flight: Checkpoints that were in flight at any time during the step; 0 is a clean step.
    """

    step: int
    now: float
    seconds: float
    stall: float
    in_flight: int


@dataclass(frozen=True, slots=True)
class SaveReport:
    """One checkpoint that became durable, or was saved in memory alone.

    Attributes:
        step: The user's number of the step that it captured.
        now: When it ended, in seconds of the same clock.
        seconds: From admission to the end (Tw).
        capture_seconds: From admission until it was captured (Tc).
        stall: Seconds of the training thread that it cost directly, as far as known when it ended.
        nbytes: Size of the checkpoint.
    """

    step: int
    now: float
    seconds: float
    capture_seconds: float
    stall: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a policy.

    Attributes:
        interval: Steps between checkpoints; None if the policy goes by time, or has none yet.
        seconds: Seconds between checkpoints; None if not known.
        reason: One sentence on why.
        most_seconds: Greatest age in seconds of the newest durable checkpoint at the end of a step, whatever is
            measured; or twice the time that a checkpoint takes to become durable, if that is more. None: no limit.
    """

    interval: int | None
    seconds: float | None
    reason: str
    most_seconds: float | None = None


@runtime_checkable
class Policy(Protocol):
    """Decides after which steps to checkpoint. Methods read no clock.

    All are called on the training thread, except that the first :meth:`decision` is called by the thread that opens
    the engine; never under a lock of the engine.
    """

    def due(self, report: StepReport) -> bool:
        """Return whether to checkpoint now. Called exactly once after every step."""

    def skipped(self, report: StepReport) -> None:
        """Called when the checkpoint due after this step was not made.

        ``max_in_flight`` were in flight, or a window of gradient accumulation had not ended.
        """

    def saved(self, report: SaveReport) -> None:
        """Called for each durable checkpoint, before the next :meth:`due`."""

    def decision(self) -> Decision:
        """Return the present interval, and why. Called at the opening, and after every :meth:`due`."""


class TrainingHooks:
    """Hooks that an engine calls for the training around it. These implementations are for code without steps."""

    last_report: StepReport | None = None
    """The last training step that went well: for the status file."""

    step_seconds: float | None = None
    """Seconds from the end of the step before the last one to the end of that: of the whole loop's iteration."""

    decision: Decision = Decision(None, None, "no policy")
    """The policy's last decision: data for statistics, which any thread reads, under locks of the engine."""

    decision_in_memory: Decision | None = None
    """The last decision of the policy of the memory tier; None without that tier."""

    @property
    def patience(self) -> float | None:
        """Seconds until the process exits on a signal; None if no signal came."""
        return None

    def opened(self) -> None:
        """Called on the caller's thread when the engine is about to be open; an error ends the opening."""

    def before_checkpoint(self, state: Mapping[str, Any]) -> bool:
        """Called by ``checkpoint(state)``; returns whether it is the last one before the process exits.

        The last one is not skipped, and no earlier failure prevents it.
        """
        return False

    def before_restore(self) -> None:
        """Called when a restore is about to change the state."""

    def found_nothing(self, state: Mapping[str, Any]) -> None:
        """Called when there was nothing to restore into ``state``, and the training begins with what it holds."""

    def rejected(self) -> None:
        """Called after checkpoints were rejected: no step that began before is saved at its end, or as the last one."""

    def closed(self) -> None:
        """Called when the engine was closed."""

    def ending(self, *, go: bool = True) -> AbstractContextManager[None]:
        """Return the context to close the engine in; leaving it ends a preempted process, unless ``go`` is False."""
        return nullcontext()
