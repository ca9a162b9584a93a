# SPDX-License-Identifier: Apache-2.0
"""The position of a loader in epochs and passes over the data, and where its next ``for`` begins."""

from __future__ import annotations

import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from pccheck_async.training.callers import count_before, fixed_passes

__all__ = ["Course", "Epoch", "EpochPlace", "unnumbered"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class EpochPlace(NamedTuple):
    """A place in the data, in the form in which it is saved.

    Attributes:
        epoch: Number of the epoch of the training loop, from 0. An epoch may consist of several passes over the data.
        number: Number of the pass over the data, from 0; order and random samples depend on it.
        position: The part of the pass that was delivered, in the loader's unit.
        earlier: For each earlier pass of this epoch, whether it ended or delivered more than one batch (a single batch
            may be a mere look at the data).
    """

    epoch: int
    number: int
    position: int = 0
    earlier: tuple[bool, ...] = ()


class Batches(Protocol[T_co]):
    """Loads one pass: yields for each batch the position after it, whether it is the last one, and (number, batch)."""

    def __call__(
        self, place: EpochPlace, steps: int | None, counted: bool, /
    ) -> Iterable[tuple[int, bool, tuple[int, T_co]]]:
        """Load from ``place.position`` up to ``steps`` batches after the start of the pass (None: to its end).

        Batches are numbered from 0 at the start of the pass. ``counted`` is whether the position of this pass is saved.
        """
        ...


class Epoch(Generic[T]):
    """One epoch of a training loop, from ``loader.epochs(n)``: iterate over it for its batches.

    Each ``for`` over it is a pass over the data. After a restore, passes that had ended yield nothing, and the one
    that was underway yields its remaining batches.

    Attributes:
        number: Number of the epoch, from 0; also ``int(epoch)`` and ``str(epoch)``.
    """

    def __init__(self, number: int, steps: int, begin: Callable[[], Iterator[tuple[int, T]]]) -> None:
        self.number, self._steps, self._begin = number, steps, begin

    def __iter__(self) -> Iterator[T]:
        return unnumbered(self._begin())

    def enumerate(self, start: int = 0) -> Iterator[tuple[int, T]]:
        """Return an iterator over pairs of number and batch, like ``enumerate(epoch, start)`` in an uninterrupted run.

        The first batch of a whole pass has the number ``start``. In the rest of a pass after a restore the numbers
        continue, where Python's ``enumerate`` would begin at ``start`` again.
        """
        return ((start + number, batch) for number, batch in self._begin())

    def __len__(self) -> int:
        """Return the number of batches in a whole pass of the epoch, on this rank."""
        return self._steps

    def __index__(self) -> int:
        return self.number

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return str(self.number)

    def __repr__(self) -> str:
        return f"<epoch {self.number}, {self._steps} batches>"


def unnumbered(numbered: Iterator[tuple[int, T]]) -> Iterator[T]:
    """Yield batches without their numbers; warn if an ``enumerate`` of the caller begins at 0 in the rest of a pass."""
    first = True
    for number, batch in numbered:
        if first and number and (count := count_before(sys._getframe())) is not None and count < number:
            warn(
                f"enumerate begins at {count} in the middle of an epoch, after {number} batches that were trained on "
                "before the restore: what depends on it (gradient accumulation, say) differs from a run that was not "
                "killed; use `for epoch in loader.epochs(n): for i, batch in epoch.enumerate()`, which continues"
            )
        first = False
        yield batch


def warn(text: str) -> None:
    """Issue a UserWarning at the line of the innermost caller outside this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("pccheck_async."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


class _Together(threading.local):
    """State of all loaders of a thread, to distinguish the end of a ``zip`` over several loaders from a ``break``."""

    ended_last: Course | None = None
    """The course whose pass ended last; None once it begins another pass, or any loader delivers a batch of an epoch.

    A ``break`` in the step in which another loader's iterator ended looks the same as the end of a ``zip``, because an
    iterator does not see its caller.
    """
    delivered = 0
    """Number of batches that all loaders delivered in loops over ``epochs()``."""


_together = _Together()


class Course:
    """The passes over the data of one loader in this process, and the current place in them.

    A ``for`` begins a new pass, unless a place is pending (of the start, of a restore, or of ``set_epoch``): then it
    begins there. The first use decides how epochs are counted: by :meth:`epochs`, or by :meth:`set_epoch`; otherwise
    every pass is an epoch.
    """

    def __init__(self) -> None:
        self._counter: Literal["passes", "set_epoch", "epochs"] = "passes"
        self._steps: int | None = None  # that each pass of epochs() is cut to
        self._own = 0  # batches in the call of epochs() that is underway
        self._loop = self._loops = 0  # which call of epochs() is underway, 0 for none; how many there were
        self._moved = False  # by load(), while a call of epochs() is underway
        self._asides = 0  # iterators underway that leave the place alone
        self._asked = self._started = False  # for the epoch; with a pass
        self._taken = False  # a batch, by a loop over the loader itself
        self._ended_since: int | None = None  # passes, since a restore in a later epoch than the first; None without it
        self._warned: set[str] = set()
        self._iterator = 0
        self._move(EpochPlace(0, 0))
        self._origin = self.place  # the start of epochs(), even after loops over the loader itself
        self._restored: EpochPlace | None = None  # until another pass has begun

    def _move(self, place: EpochPlace) -> None:
        """Set the place at which the next iterator begins; an iterator underway raises RuntimeError at its ``next``."""
        self.place = place
        self._pending: EpochPlace | None = place
        self._untouched = True  # no iterator has begun to load from here
        self._used = False
        self._earlier = [*place.earlier]  # those that this process has not come to
        self._iterator += 1
        self._restored = None
        self._fresh_pass()

    def _fresh_pass(self) -> None:
        self._delivered = 0  # batches of the pass, by this process
        self._beside = -1  # batches of epochs of all loaders at its last one
        self.complete = self._ended = self._live = False
        self._left_alone: bool | None = None  # left without another loader's pass having ended; None: not left yet

    @property
    def _worked(self) -> bool:
        """Whether a pass of the epoch ended or gave more than one batch (a single one may be a look at the data)."""
        return any(self.place.earlier) or self._ended or self._delivered > 1

    @property
    def state(self) -> EpochPlace:
        """The place at which a resumed process has to begin."""
        return self._next_epoch() if self._loop and self._is_over else self.place

    @property
    def _is_over(self) -> bool:
        """Whether the inner loop over the epoch's batches has ended, and not by ``break``.

        A loop over several loaders ends when the first of them ends (``zip``), or goes on without it (``zip_longest``).
        """
        if self._ended:
            return _together.ended_last is not None
        return self._used and not self._live and not self._alone

    @property
    def _alone(self) -> bool:
        return _together.ended_last in (None, self) if self._left_alone is None else self._left_alone

    @property
    def epoch(self) -> int:
        """Number of the epoch underway. Reading it before the first pass is recorded: the loop may count by it."""
        self._asked = self._asked or not self._started
        return self.state.epoch

    def save(self) -> EpochPlace:
        """Return :attr:`state`; warn inside a pass whose position is not saved."""
        if self._asides:
            self._warn(
                "aside",
                "saved inside a second pass over the loader in one epoch: its position is not saved, and it begins "
                "anew after a restore; iterate over the epoch of epochs() to train in it",
            )
        return self.state

    def load(self, place: EpochPlace) -> None:
        """Go to a saved place, at which the next iterator begins."""
        self._move(place)
        self._origin = self._restored = place
        self._started = self._asked = self._taken = False
        self._ended_since = 0 if place.epoch else None
        self._moved = self._loop > 0
        if not self._loop:
            self._counter = "passes"

    def set_epoch(self, epoch: int) -> None:
        """Make the next iterator begin ``epoch``, or continue it at a restored place that no iterator has used yet."""
        epoch = operator.index(epoch)
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; the first one is 0")
        if self._loop:
            if epoch != self.place.epoch:
                raise RuntimeError(
                    f"set_epoch({epoch}) in epoch {self.place.epoch} of epochs(), which counts by itself"
                )
            return
        self._counter, self._asked = "set_epoch", False
        if epoch != self.place.epoch:
            self._move(EpochPlace(epoch, epoch))
            self._origin = self.place
        else:
            self._pending = self.place if self._untouched else EpochPlace(epoch, epoch)

    def epochs(
        self, epochs: int, steps: int | None, length: Callable[[], int], begin: Callable[[int], Iterator[tuple[int, T]]]
    ) -> Iterator[Epoch[T]]:
        """Yield those of ``epochs`` epochs that are not done; ``begin`` makes a numbered iterator of a pass of one."""
        epochs, steps = operator.index(epochs), None if steps is None else operator.index(steps)
        if epochs < 0 or (steps is not None and steps < 1):
            raise ValueError(f"epochs is {epochs} and steps {steps}; they are at least 0 and 1")
        return self._epochs(epochs, steps, length, begin)

    def _epochs(
        self, epochs: int, steps: int | None, length: Callable[[], int], begin: Callable[[int], Iterator[tuple[int, T]]]
    ) -> Iterator[Epoch[T]]:
        self._leave()  # a loop that was interrupted may not be collected yet
        self._loops += 1
        self._loop = loop = self._loops
        self._own, before = 0, (_together.delivered, _together.ended_last)
        if self._taken and self._origin.position:
            self._warn(
                "before",
                "a for loop over the loader took batches between the restore and epochs(), which goes on at the "
                "restored position all the same; look at the data before the restore",
            )
        self._counter, self._steps = "epochs", steps
        self._move(self._origin)
        self._restored = self._origin
        try:
            while self.place.epoch < epochs:
                number = self.place.epoch
                yield Epoch(number, min(length(), steps or length()), partial(begin, number))
                if loop != self._loop:
                    raise RuntimeError("another call of epochs() has begun since: one loop over epochs at a time")
                if self._moved:
                    self._moved = False  # a restore inside the loop: that epoch comes next
                else:
                    if self._alone and self._delivered > 1 and not (self.complete or self._ended):
                        self._warn(
                            "left",
                            "an epoch of epochs() was left before its end: killed in such an epoch, a run resumes in "
                            "the middle of it, and counts anew how far it goes; use epochs(n, steps=...)",
                        )
                    self._move(self._next_epoch())
        finally:
            if loop == self._loop:
                self._leave()
                if _together.delivered == before[0] + self._own:  # the loop ran within a step of others
                    _together.ended_last = before[1]

    def _leave(self) -> None:
        """End the loop over epochs that is underway, if any; the next loop over epochs continues at its place."""
        if self._loop:
            self._move(self._next_epoch() if self._is_over else self.place)
            self._origin = self.place
            self._loop, self._steps, self._taken, self._moved = 0, None, False, False

    def _next_epoch(self) -> EpochPlace:
        return EpochPlace(self.place.epoch + 1, self.place.number + 1)

    def iterate(self, batches: Batches[T], *, epoch: int | None = None, on: bool = False) -> Iterator[tuple[int, T]]:
        """Return an iterator of pairs of number and batch for one ``for``. Its place is fixed now, not at ``next``.

        Only a restore or another ``for`` before its first ``next`` changes the place.

        Args:
            batches: Loads a pass.
            epoch: The number of the epoch that is iterated over; None for a loop over the loader itself.
            on: Continue at the current place, instead of beginning a new pass.

        Raises:
            RuntimeError: ``epoch`` is not the epoch underway.
        """
        self._check(epoch)
        if self._counter == "epochs":
            if on and not self._loop:
                self._counter = "passes"
            elif epoch is None and (self._live or self._worked or not self._loop):
                return self._aside(batches, self.place.number)
            elif self._earlier:
                number = self.place.number - len(self._earlier)
                return iter(()) if self._earlier.pop(0) else self._aside(batches, number)
        elif self._counter == "passes" and self._asked and not on:
            self._warn(
                "asked",
                "a for loop over the loader itself counts passes, not epochs: range(loader.epoch, n) resumes wrongly "
                "with a second pass or with epochs that are cut; use `for epoch in loader.epochs(n): for batch in "
                "epoch:` (a loop that counts steps needs neither)",
            )
        elif self._counter == "passes" and self._ended_since == 1 and not on:
            self._warn_of_fixed_passes()
        if on and self._pending is None:
            self._pending = self.place
        self._begin()
        return self._deliver(batches, epoch, self._iterator)

    def _warn_of_fixed_passes(self) -> None:
        if loop := fixed_passes(sys._getframe()):
            self._warn(
                "fixed",
                f"`{loop}` makes as many passes at each start, whatever was restored: this run resumed in epoch "
                f"{self._origin.epoch}, and will have trained more epochs than one that was not killed; use `for epoch "
                "in loader.epochs(n): for batch in epoch:`, which yields those that are left",
            )

    def _check(self, epoch: int | None) -> None:
        if epoch is not None and not (self._loop and epoch == self.place.epoch):
            raise RuntimeError(f"epoch {epoch} is over: iterate over the one that epochs() gave last")

    def _begin(self) -> None:
        """Begin an iterator: at the pending place, again at a restored place that was given up, or in a new pass."""
        place = self._pending
        if place is None and self._restored is not None:
            place = self._given_back(self._restored)
        if place is None:
            place, self._restored = self._next_pass(), None
        self._pending, self.place = None, place
        if self._loop or _together.ended_last is self:  # a loop that goes on with another pass is no zip
            _together.ended_last = None
        self._started = self._used = True
        self._iterator += 1
        self._fresh_pass()

    def _given_back(self, restored: EpochPlace) -> EpochPlace | None:
        """Return the restored place again if the iterator that took it was given up after one batch."""
        bare = self._counter != "epochs"
        if self._ended or self._delivered > 1 or not (bare or restored.position):
            return None
        if self._delivered == 1:
            self._warn(
                "look",
                "the iterator that went on at the restored position was given up after one batch: this one starts at "
                "that position again; look at the data before the restore",
            )
        elif bare and restored.position:
            self._warn(
                "unused",
                "the iterator that took the restored position was given up before its first batch: this one begins "
                "a new pass; use epochs(n) for several loaders at once",
            )
        return restored if self._delivered == 1 or not bare else None

    def _next_pass(self) -> EpochPlace:
        epoch, number, _, earlier = self.place
        if self._counter == "epochs":
            return EpochPlace(epoch, number + 1, earlier=(*earlier, self._ended or self._delivered > 1))
        if self._counter == "set_epoch":
            return EpochPlace(epoch, number + 1)
        if self._delivered > 1 and not self.complete:
            self._warn(
                "cut",
                "the for loop before this one left a pass over the data before its end, and this one begins a new "
                "pass: killed in a pass that will be left, the resumed run takes all the rest of it. For epochs of "
                "so many steps use `for epoch in loader.epochs(n, steps=...)`; a loop that counts steps and breaks off "
                "keeps one iterator, forever()",
            )
        return EpochPlace(epoch + 1, number + 1)

    def _deliver(self, batches: Batches[T], epoch: int | None, mine: int) -> Iterator[tuple[int, T]]:
        self._check(epoch)
        if self._pending is not None or mine != self._iterator:
            # An iterator that only was made follows restores and set_epoch, and begins anew after another one.
            self._begin()
            mine = self._iterator
        self._untouched, self._live = False, True
        try:
            for position, complete, batch in batches(self.place, self._steps, True):
                self.place, self.complete = self.place._replace(position=position), complete
                self._delivered += 1
                self._taken = self._taken or epoch is None
                if self._loop:
                    _together.ended_last = None
                    _together.delivered += 1
                    self._own += 1
                self._beside = _together.delivered
                yield batch
                if mine != self._iterator:
                    raise RuntimeError(
                        "this iterator has ended: another one was started since, or load_state_dict or set_epoch moved "
                        "the position; start a new for loop"
                    )
            self._ended, self._restored = True, None
            if self._loop or self._beside != _together.delivered:  # else it ran within a step of others: a validation
                _together.ended_last = self
            if self._counter == "passes":
                if self._ended_since is not None:
                    self._ended_since += 1
                self._move(EpochPlace(self.place.epoch + 1, self.place.number + 1))
        finally:
            if mine == self._iterator:
                self._left_alone, self._live = self._alone, False

    def _aside(self, batches: Batches[T], number: int) -> Iterator[tuple[int, T]]:
        """Yield the batches of a whole pass without moving the place: for batch statistics, or training accuracy."""
        self._asides += 1
        try:
            for _, _, batch in batches(EpochPlace(self.place.epoch, number), None, False):
                yield batch
        finally:
            self._asides -= 1

    def _warn(self, which: str, text: str) -> None:
        if which not in self._warned:
            self._warned.add(which)
            warn(text)
