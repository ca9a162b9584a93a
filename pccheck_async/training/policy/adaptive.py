"""The policy that is recommended: as often as the budget and the storage allow."""

from __future__ import annotations

from pccheck_async.training.policy.age import MOST_SECONDS
from pccheck_async.training.policy.measured import MeasuredPolicy, Wanted

__all__ = ["Adaptive"]


class Adaptive(MeasuredPolicy):
    """Checkpoint as often as a budget allows: by default 3 % of the training time, for stall and interference together.

    k = max(ceil(C / (overhead t)), ceil(Tw / (N t))), all of it measured: C is what a checkpoint costs training, t the
    time of a clean step, Tw what a checkpoint takes to become durable. Follows CheckFreq's adaptive rule (FAST'21),
    but also comes back down.

    Args:
        overhead: Budget as a share of the training time.
        max_in_flight: Checkpoints in flight (N), as the engine has it.
        most_seconds: Most age of the newest durable checkpoint, for which the budget is given up; None for no limit.
    """

    def __init__(
        self, overhead: float = 0.03, *, max_in_flight: int = 2, most_seconds: float | None = MOST_SECONDS
    ) -> None:
        super().__init__(overhead, max_in_flight, most_seconds)

    def _wanted(self, cost: float) -> Wanted:
        return max(self._for_budget(cost), self._for_storage(), key=lambda wanted: wanted.steps)
