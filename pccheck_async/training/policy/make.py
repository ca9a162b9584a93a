"""From what users write as ``interval=`` to a policy."""

from __future__ import annotations

from datetime import timedelta

from pccheck_async.engine import Policy
from pccheck_async.training.policy.adaptive import Adaptive
from pccheck_async.training.policy.every import EverySeconds, EverySteps

__all__ = ["make_policy"]


def make_policy(interval: int | timedelta | Policy | None, max_in_flight: int = 2) -> Policy:
    """Make the policy that ``interval`` stands for.

    Args:
        interval: Steps, a time, a policy (returned as it is), or None: :class:`~pccheck_async.training.policy.Adaptive`
            with a
            budget of 3 %.
        max_in_flight: Checkpoints in flight, as the engine has it.

    Raises:
        TypeError: it is something else (bool included).
        ValueError: it is not positive.
    """
    if interval is None:
        return Adaptive(max_in_flight=max_in_flight)
    if isinstance(interval, timedelta):
        return EverySeconds(interval.total_seconds())
    if type(interval) is int:
        return EverySteps(interval)
    if isinstance(interval, Policy) and not isinstance(interval, type):
        return interval
    raise TypeError(
        "interval is a number of steps (int), a timedelta, a policy (due, skipped, saved, decision) or None, "
        f"not {interval!r}"
    )
