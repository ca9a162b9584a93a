"""The interval that loses least work where failures come at a known rate."""

from __future__ import annotations

from pccheck_async.training.policy.age import MOST_SECONDS
from pccheck_async.training.policy.checks import check_seconds
from pccheck_async.training.policy.formulas import daly_seconds, whole_steps
from pccheck_async.training.policy.measured import MeasuredPolicy, Wanted

__all__ = ["YoungDaly"]


class YoungDaly(MeasuredPolicy):
    """Checkpoint at Daly's higher-order optimum for the measured cost, but never more often than :class:`Adaptive`.

    The optimum (:func:`~pccheck_async.training.policy.formulas.daly_seconds`) weighs the work lost at a failure against
    the cost of checkpoints; a cheap one would make it more frequent than the storage can follow, or the budget allows.
    These bounds are above the floor f_min too: at N in flight a checkpoint takes Tw / N >= m / B.

    Args:
        mtbf_seconds: Mean time between failures of the job (of one machine, divided by their number).
        overhead: Budget as a share of the training time.
        max_in_flight: Checkpoints in flight (N), as the engine has it.
        most_seconds: Most age of the newest durable checkpoint, for which the budget is given up; None for no limit.
    """

    def __init__(
        self,
        mtbf_seconds: float,
        overhead: float = 0.03,
        *,
        max_in_flight: int = 2,
        most_seconds: float | None = MOST_SECONDS,
    ) -> None:
        super().__init__(overhead, max_in_flight, most_seconds)
        self._mtbf = check_seconds("mtbf_seconds", mtbf_seconds)

    def _wanted(self, cost: float) -> Wanted:
        optimum = Wanted(
            whole_steps(daly_seconds(cost, self._mtbf), self._step_seconds),
            f"this loses least at one failure in {self._mtbf:g} s, where a checkpoint costs {cost:.3g} s of training",
        )
        return max(optimum, self._for_budget(cost), self._for_storage(), key=lambda wanted: wanted.steps)
