"""CheckFreq's policy: Algorithm 1 on profiled times, then its adaptive rule."""

from __future__ import annotations

from pccheck_async.training.policy.age import MOST_SECONDS
from pccheck_async.training.policy.formulas import CheckFreqChoice, checkfreq_interval, whole_steps
from pccheck_async.training.policy.measured import MeasuredPolicy, Wanted

__all__ = ["CheckFreqInterval"]


class CheckFreqInterval(MeasuredPolicy):
    """Checkpoint as CheckFreq does (FAST'21): one in flight, k from Algorithm 1, then from the measured cost.

    Step (Ti), copy (Tc) and persist time (Ts) are profiled; To is at first what Algorithm 1 makes of them, and from the
    first change on the measured cost. Unlike the published rule this one comes back down.

    Args:
        overhead: Budget as a share of the training time (p).
        update_seconds: Part of a step that is the weight update (CheckFreq's Tw); 0 where unknown.
        device_copy_seconds: A copy of the state on the device (Tg); None where there is none.
        device_free_bytes: Free device memory.
        most_seconds: Most age of the newest durable checkpoint, for which the budget is given up; None for no limit.
    """

    def __init__(
        self,
        overhead: float = 0.035,
        *,
        update_seconds: float = 0.0,
        device_copy_seconds: float | None = None,
        device_free_bytes: int = 0,
        most_seconds: float | None = MOST_SECONDS,
    ) -> None:
        super().__init__(overhead, 1, most_seconds)
        self._update_seconds = update_seconds
        self._device_copy_seconds = device_copy_seconds
        self._device_free_bytes = device_free_bytes
        self._choice: CheckFreqChoice | None = None

    @property
    def choice(self) -> CheckFreqChoice | None:
        """What Algorithm 1 made of the profile; None before its end."""
        return self._choice

    def _wanted(self, cost: float) -> Wanted:
        if self._choice is None:
            capture = self._captures.median
            self._choice = checkfreq_interval(
                step_seconds=self._step_seconds,
                update_seconds=self._update_seconds,
                host_copy_seconds=capture,
                persist_seconds=max(0.0, self._saves.median - capture),
                overhead=self._overhead,
                device_copy_seconds=self._device_copy_seconds,
                device_free_bytes=self._device_free_bytes,
                nbytes=self._nbytes,
            )
            return Wanted(
                self._choice.interval,
                f"Algorithm 1 of CheckFreq, copying on the {self._choice.mode}, {self._choice.overhead_seconds:.3g} s "
                "of overhead a checkpoint",
            )
        storage = self._for_storage()
        storage = Wanted(whole_steps(max(0.0, self._sustained - cost), self._step_seconds), storage.why, piling=True)
        return max(self._for_budget(cost), storage, key=lambda wanted: wanted.steps)
