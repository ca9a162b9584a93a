"""What the engine tells a policy, and what the policy answers. The policies are in ``training.policy``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Decision", "Policy", "SaveReport", "StepReport"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One training step.

    Attributes:
        step: The user's number of it.
        now: When it ended, in seconds of a monotonic clock.
        seconds: What it took, without the waiting that the engine caused.
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
    """One checkpoint that became durable, or that newer ones made pointless.

    Attributes:
        step: The user's number of the step that it captured.
        now: When it ended, in seconds of the same clock.
        seconds: From admission to the end (Tw).
        capture_seconds: From admission until it was captured (Tc).
        stall: Seconds of the training thread that it cost directly, as far as known when it ended.
        nbytes: Its size.
    """

    step: int
    now: float
    seconds: float
    capture_seconds: float
    stall: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy does at present.

    Attributes:
        interval: Steps between checkpoints; None where it goes by time, or does not know yet.
        seconds: Seconds between checkpoints; None where not known.
        reason: One sentence.
        most_seconds: Age that the newest durable checkpoint does not exceed while steps end, whatever was measured;
            twice what a checkpoint takes to become durable, where that is more. None for no limit.
    """

    interval: int | None
    seconds: float | None
    reason: str
    most_seconds: float | None = None


@runtime_checkable
class Policy(Protocol):
    """Decides after which steps to checkpoint. All methods are called on the training thread; none has a clock."""

    def due(self, report: StepReport) -> bool:
        """Tell whether to checkpoint now. Asked exactly once after every step."""

    def skipped(self, report: StepReport) -> None:
        """Hear that the checkpoint which was due after this step could not be made.

        All places were in flight, or a window of gradient accumulation had not ended.
        """

    def saved(self, report: SaveReport) -> None:
        """Hear that a checkpoint ended, before the next question."""

    def decision(self) -> Decision:
        """Return the present interval, and why."""
