"""One error out of a group of concurrent ones."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["first_failure"]


def first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the group's first error; the others become notes on it, so that nothing is lost."""
    first, *others = _leaves(group)
    for other in others:
        first.add_note(f"also failed at the same time: {type(other).__name__}: {other}")
    return first


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
