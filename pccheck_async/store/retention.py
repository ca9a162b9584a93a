# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that a record keeps (invariant I6), the contents of the next record, and the space that they take."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, cast

from msgspec.structs import replace

from pccheck_async.errors import NoCheckpointError, StoreError, StoreFullError, first_few
from pccheck_async.format import (
    CheckpointInfo,
    Entry,
    Line,
    Record,
    Which,
    check_count,
    describe_which,
    explained,
    matches,
    there_are,
)
from pccheck_async.format.record import MOST_ENTRIES
from pccheck_async.telemetry import write

__all__ = ["Best", "Committed", "Keep", "KeepAll", "Kept", "MetricWatch", "Retention", "SpaceNeeded"]

_MANY = 16
"""Number of checkpoints without the metric of ``Keep(best=...)`` after which the log warns."""


@dataclass(frozen=True, slots=True)
class Best:
    """The rule for the best ``count`` checkpoints by the number ``metric`` in their metadata, smallest or largest."""

    metric: str
    count: int
    mode: Literal["min", "max"]

    def number(self, one: Entry | CheckpointInfo) -> float | None:
        """Return the number ``metric`` in the metadata of a checkpoint, None if there is none."""
        return self.number_in(one.metadata)

    def number_in(self, metadata: Mapping[str, Any]) -> float | None:
        """Return the number ``metric`` in metadata, None if there is none."""
        value = metadata.get(self.metric)
        return None if isinstance(value, bool) or not isinstance(value, int | float) else value

    def among(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the best of ``entries``, the first of equal ones; entries without the number, or NaN, are left out."""
        numbered = [(number, entry) for entry in entries if (number := self.number(entry)) is not None]
        ranked = sorted(
            [one for one in numbered if not math.isnan(one[0])], key=lambda one: one[0], reverse=self.mode == "max"
        )
        return [entry for _, entry in ranked[: self.count]]


class MetricWatch:
    """Warns, once, if no checkpoint of a run has the number that ``Keep(best=...)`` names: it may have another name.

    The number may be known at the ends of epochs only, so that most checkpoints lack it.
    """

    def __init__(self, best: Best | None, path: str) -> None:
        self.best, self._path = best, path  # no ``best`` any more once it was seen, or that was said
        self._names: dict[str, None] = {}
        self._saves = 0

    def note(self, metadata: Mapping[str, Any]) -> None:
        """Record the names in the metadata of a step, saved or not."""
        if self.best is not None:
            if self.best.number_in(metadata) is not None:
                self.best = None
            self._names |= dict.fromkeys(metadata)

    def note_save(self, metadata: Mapping[str, Any], there: Callable[[], Iterable[CheckpointInfo]]) -> None:
        """Count a new checkpoint, and record its metadata; warn at the 16th. ``there`` returns older checkpoints."""
        self._saves += 1
        if self.best is None:  # no rule names one, or it was seen
            return
        self.note(metadata)
        if self._saves == _MANY:
            self._warn(there)

    def end(self, there: Callable[[], Iterable[CheckpointInfo]]) -> None:
        """Warn now, unless no metadata were given: the run may have been too short. Called when the engine closes."""
        if self._saves and self._names:
            self._warn(there)

    def _warn(self, there: Callable[[], Iterable[CheckpointInfo]]) -> None:
        best, self.best = self.best, None
        if best is None or any(best.number(info) is not None for info in there()):
            return
        names = get_close_matches(best.metric, self._names) or [*self._names]
        known = f"metadata has had {first_few([*map(repr, names)], 5)}" if names else "no metadata was given"
        text = "Keep(best=...) goes by a number %r, which none of the %d checkpoints so far has in its metadata; %s"
        with suppress(Exception):  # of a handler of the log: the engine closes all the same
            write("no_metric", text, best.metric, self._saves, known, store=self._path)


class Kept(NamedTuple):
    """The checkpoints that the rules keep, and those that are dropped only because of the size of the record."""

    entries: list[Entry]
    """The entries of the checkpoints that are kept, newest first."""
    crowded_out: list[Entry]
    """Entries that ``Keep(every=...)`` keeps and that are dropped because a record has no room for all of them."""


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Checkpoints that an engine keeps beside the newest ones (``keep_last``), each as long as a rule names it.

    Args:
        every: The first checkpoint at or after each multiple of this many steps, as long as the commit record has room
            (64 checkpoints in all). As for ``interval``, s + 1 steps have ended after step s.
        best: The best by a number in their metadata, for example ``("loss", 3, "min")``; of equal ones the newest. A
            step of :meth:`pccheck_async.CheckpointEngine.step` that sets this number is saved, due by ``interval`` or
            not (not in a group).
        spaced: The first checkpoint of each slice of time, for so long: ``[(timedelta(minutes=10),
            timedelta(hours=1)), (timedelta(hours=1), timedelta(days=1))]`` keeps one per 10 minutes of the last hour,
            and one per hour of the last day (or in seconds). Slices begin at multiples of their length since the epoch;
            times are those of the captures, in a group by rank 0's clock, and count back from the newest checkpoint.

    Raises:
        ValueError: a rule is out of range.
        TypeError: a rule has a wrong type.
    """

    every: int | None = None
    best: tuple[str, int, Literal["min", "max"]] | None = None
    spaced: Sequence[tuple[timedelta | float, timedelta | float]] = ()

    def __post_init__(self) -> None:
        if self.every is not None:
            check_count("Keep(every=...)", self.every)
        if self.best is not None:
            _check_best(self.best)
        object.__setattr__(self, "spaced", _make_spaced(self.spaced))


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Rules of retention; a checkpoint stays if any of them keeps it, and as long as it is pinned.

    Attributes:
        keep_last: Number of the newest checkpoints, by counter, that are kept.
        keep: Further rules. For ``every``, the first checkpoint is the one with the smallest step, whichever was
            committed first; of equal steps, after a rollback, the newest. A checkpoint of ``spaced`` is kept until it
            is older than the newest one by more than the given time.
        most: Most checkpoints that are kept in all: the room of a record, less its other entries.

    Raises:
        ValueError: ``keep_last`` is out of range, or a record cannot name as many checkpoints.
    """

    keep_last: int = 1
    keep: Keep = field(default_factory=Keep)
    most: int = MOST_ENTRIES

    def __post_init__(self) -> None:
        check_count("keep_last", self.keep_last)
        if self.reserved > self.most:
            terms = ["keep_last"]
            terms += [] if self.best is None else ["the count of Keep(best=...)"]
            terms += ["the slices of Keep(spaced=...)"] if self.spaced else []
            what = terms[0] if len(terms) == 1 else f"{' and '.join(terms)} together"
            raise ValueError(f"{what} is at most {self.most} (the commit record's size), not {self.reserved}")

    @property
    def best(self) -> Best | None:
        """The rule for the best checkpoints, None for none."""
        return None if self.keep.best is None else Best(*self.keep.best)

    @property
    def spaced(self) -> tuple[tuple[float, float], ...]:
        """``Keep.spaced`` in seconds: pairs of the length of a slice, and the age up to which checkpoints are kept."""
        return cast("tuple[tuple[float, float], ...]", self.keep.spaced)

    @property
    def reserved(self) -> int:
        """The most checkpoints that the rules keep at a time, without those of ``every``, which have no limit."""
        best = self.best.count if self.best else 0
        return self.keep_last + best + sum(_slices(*each) for each in self.spaced)

    def check_place(self, kept: int) -> None:
        """Raise StoreFullError if a record has no room beside ``kept`` checkpoints; never here, as rules drop some."""

    def retain(self, committed: Sequence[Entry], new: Entry, damaged: Collection[int] = ()) -> Kept:
        """Return the entries of the next record; ``new`` is not among them if it is superseded.

        With ``keep_last=1`` alone this is PCcheck's rule (section 3.2: a checkpoint commits only over an older one).
        The newest of the checkpoints with one name replaces the others, also pinned ones. Rejected checkpoints are
        ignored by all rules, and stay only while they are pinned.

        ``damaged`` are the counters of checkpoints known to be damaged, which are dropped.
        """
        candidates = _candidates(committed, new, damaged)
        counted = [entry for entry in candidates if not entry.metadata or not entry.rejected]
        kept = {entry.counter for entry in counted[: self.keep_last]}
        kept.update([entry.counter for entry in candidates if entry.pinned])
        if (best := self.best) is not None:
            kept.update([entry.counter for entry in best.among(counted)])
        if self.keep.spaced:
            for every, seconds in self.spaced:
                kept.update(_first_of_slices(counted, every, seconds))
        crowded_out: list[Entry] = []
        if self.keep.every is not None:
            periodic = [entry for entry in self._periodic(counted, self.keep.every) if entry.counter not in kept]
            room = max(0, self.most - len(kept))
            kept.update([entry.counter for entry in periodic[:room]])
            crowded_out = periodic[room:]
        return Kept([entry for entry in candidates if entry.counter in kept], crowded_out)

    @staticmethod
    def remove(entries: Sequence[Entry], which: Which, *, force: bool) -> list[Entry]:
        """Return ``entries`` without those that match ``which``.

        Raises NoCheckpointError if none matches; StoreError, unless ``force``, if no checkpoint, or only rejected ones,
        would be left.
        """
        left = [entry for entry in entries if not entry.matches(which)]
        if len(left) == len(entries):
            raise NoCheckpointError(
                f"there is no checkpoint{describe_which(which)}; nothing was removed{there_are(which, entries)}"
            )
        if not force:
            Retention.check_left(left, entries)
        return left

    @staticmethod
    def check_left(left: Collection[Entry], entries: Iterable[Entry]) -> None:
        """Raise StoreError if ``left``, the rest of ``entries`` after a removal, has none that can be restored.

        If all ``entries`` are rejected, rejected ones may be left.
        """
        if not left or (all(e.rejected for e in left) and not all(e.rejected for e in entries)):
            what = "none but rejected checkpoints" if left else "no checkpoint"
            raise StoreError(f"{what} would be left; nothing was removed (--force, force=True: remove them)")

    @staticmethod
    def reject(
        entries: Sequence[Entry], which: int | str, in_flight: Mapping[int, tuple[int, str | None]], until: int
    ) -> set[int]:
        """Return the counters of the committed checkpoints, and of those in flight, to reject from ``which`` on.

        These are all with its step or a larger one, and all that were admitted after the newest checkpoint that
        matches, after a rollback also with smaller steps.

        Args:
            entries: Committed checkpoints.
            which: The first bad step, or the name of the first bad checkpoint.
            in_flight: Steps and names of the checkpoints in flight, by counter.
            until: The counter of the last checkpoint that was admitted before the call: newer ones are not rejected.

        Raises NoCheckpointError if there are none to reject, StoreError if no committed one would be left to restore.
        """
        there = dict(in_flight) | {entry.counter: (entry.step, entry.name) for entry in entries if not entry.rejected}
        there = {counter: each for counter, each in there.items() if counter <= until}
        first = max((counter for counter, each in there.items() if matches(which, *each)), default=until + 1)
        step = there[first][0] if first in there else which if isinstance(which, int) else None
        chosen = {
            counter for counter, (each, _) in there.items() if (step is not None and each >= step) or counter >= first
        }
        if not chosen:
            newer = " or newer" if isinstance(which, int) else ""
            left = there_are(which, [entry for entry in entries if not entry.rejected])
            raise NoCheckpointError(f"there is no checkpoint{describe_which(which)}{newer} that is not rejected{left}")
        if all(entry.rejected or entry.counter in chosen for entry in entries):
            raise StoreError(
                f"no checkpoint committed before step {step} would be left to restore: all others have larger steps "
                "or counters; nothing was rejected"
            )
        return chosen

    def pin(self, entries: Sequence[Entry], which: int | str, pinned: bool) -> list[Entry]:
        """Return ``entries`` (newest first) with the newest match pinned or, if not ``pinned``, all matches unpinned.

        Raises NoCheckpointError, and StoreFullError as :meth:`check_room`.
        """
        found = [at for at, entry in enumerate(entries) if entry.matches(which)]
        if not found:
            raise NoCheckpointError(f"there is no checkpoint{describe_which(which)}{there_are(which, entries)}")
        changed = list(entries)
        for at in found[:1] if pinned else found:  # after a rollback the pinned one may be an older one of that step
            changed[at] = replace(entries[at], pinned=pinned)
        self.check_room(changed)
        return changed

    def check_room(self, entries: Iterable[Entry]) -> None:
        """Raise StoreFullError if a record has no room for the pinned ones of ``entries`` and all that rules keep."""
        pinned = sum(entry.pinned for entry in entries)
        if pinned + self.reserved > self.most:
            raise StoreFullError(
                errno.ENOSPC,
                f"{pinned} checkpoints pinned and {self.reserved} kept by rules are more than the {self.most} that "
                "a commit record names: unpin some, or keep fewer",
            )

    def dropped(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the committed checkpoints that the rules do not keep."""
        kept = self.retain(entries[1:], entries[0]).entries if entries else []
        return [entry for entry in entries if entry not in kept]

    @staticmethod
    def _periodic(entries: Iterable[Entry], steps: int) -> list[Entry]:
        """Return the first checkpoint at or after each multiple of ``steps``, newest first, as ``entries`` are."""
        first: dict[int, Entry] = {}
        for entry in entries:
            multiple = (entry.step + 1) // steps
            if multiple > 0 and (multiple not in first or entry.step < first[multiple].step):
                first[multiple] = entry
        return sorted(first.values(), key=_by_counter)

    def space_needed(self, slot_bytes: int, in_flight: int, available_bytes: int) -> SpaceNeeded:
        """Return the space that the rules take for slots of ``slot_bytes``."""
        slots = {"in flight": in_flight, f"the last {self.keep_last}": self.keep_last}
        if self.best is not None:
            slots[f"the best {self.best.count} by {self.best.metric!r}"] = self.best.count
        for every, seconds in self.spaced:
            slots[f"one per {every:g} s of the last {seconds:g} s"] = _slices(every, seconds)
        return SpaceNeeded(slot_bytes, slots, self.keep.every, available_bytes)


class KeepAll(Retention):
    """Rules that drop nothing: for callers that remove checkpoints themselves, or do not know a store's rules."""

    @property
    def reserved(self) -> int:
        """0: no slots are reserved beyond those of the committed checkpoints."""
        return 0

    def space_needed(self, slot_bytes: int, in_flight: int, available_bytes: int) -> SpaceNeeded:
        """Return the space for as many checkpoints as a record may name."""
        slots = {"in flight": in_flight, "all that a commit record names": self.most}
        return SpaceNeeded(slot_bytes, slots, None, available_bytes)

    def retain(self, committed: Sequence[Entry], new: Entry, damaged: Collection[int] = ()) -> Kept:
        """Return all checkpoints but those known to be damaged, and those whose name a newer one has."""
        return Kept(_candidates(committed, new, damaged), [])

    def check_place(self, kept: int) -> None:
        """Raise StoreFullError if as many checkpoints are ``kept`` already as a record may name."""
        if kept >= self.most:
            raise StoreFullError(
                errno.ENOSPC,
                f"{kept} checkpoints are kept or on their way, and a commit record names {self.most} at most: remove "
                "some first",
            )


@dataclass(frozen=True, slots=True)
class SpaceNeeded:
    """The storage that a store takes.

    Attributes:
        slot_bytes: Bytes of the tensors of one checkpoint; its manifest adds some 100 bytes for each tensor.
        slots: Most slots that each rule needs; they are reserved with the first checkpoint.
        keep_every: Number of steps of ``Keep(every=...)``: each multiple takes one more slot; None for none.
        available_bytes: Bytes that are free on the filesystem, and those in the store's slots.
    """

    slot_bytes: int
    slots: Mapping[str, int]
    keep_every: int | None
    available_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the slots of all rules but ``Keep(every=...)``."""
        return sum(self.slots.values()) * self.slot_bytes

    def __str__(self) -> str:
        count = sum(self.slots.values())
        parts = " + ".join(f"{slots} ({rule})" for rule, slots in self.slots.items())
        text = f"{parts} = {count} slots of {self.slot_bytes} bytes: {self.nbytes} bytes"
        if self.keep_every is not None:
            text += f", and {self.slot_bytes} bytes more with every multiple of {self.keep_every} steps"
        return f"{text}; {self.available_bytes} bytes are available"


@dataclass(slots=True, eq=False)
class Committed:
    """The newest record of a store, and everything else that determines the next one."""

    record: Record
    retention: Retention
    adopted: tuple[Entry, ...] = ()
    """Superseded checkpoints that a restore fell back to. Only the older of the two records on storage names them, so
    the next record must leave that one whole (:meth:`record_naming`)."""
    damaged: set[int] = field(default_factory=set)
    """Counters of checkpoints whose checksums do not hold: the next record leaves them out."""
    rejected: set[int] = field(default_factory=set)
    """Counters of checkpoints that were rejected in flight: no record names them."""
    line: Line | None = None
    """Line of the next records; None for a writer without a tier in memory: then no checkpoint in memory is valid."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Committed and adopted checkpoints, newest first, without those known to be damaged."""
        known = sorted((*self.record.entries, *self.adopted), key=lambda entry: -entry.counter)
        return tuple(entry for entry in known if entry.counter not in self.damaged)

    @property
    def newest(self) -> Entry | None:
        """The newest of :attr:`entries` (if empty, of the record's) that is not rejected; if all are, the newest."""
        entries = self.entries or self.record.entries
        return next((entry for entry in entries if not entry.rejected), entries[0] if entries else None)

    @property
    def largest_counter(self) -> int:
        """The largest counter that the record names, -1 for none."""
        return max((entry.counter for entry in self.record.entries), default=-1)

    def record_naming(self, entries: Iterable[Entry]) -> Record:
        """Return the next record, which names ``entries``. Changes nothing.

        The generation of a record decides which of the two records on storage it overwrites: normally the older one. If
        there are adopted checkpoints, which only the older one names, the next record must overwrite the newer one
        (generation + 2, same parity) and leave the older one whole.
        """
        named, before = tuple(entries), self.record
        if self.adopted:
            return Record(before.generation + 2, named, before.before, line=self.line)
        return Record(before.generation + 1, named, before.entries, line=self.line)

    def publish(self, record: Record) -> None:
        """Make ``record`` the newest one. Called when it is durable."""
        self.record = record
        self.adopted = ()
        if self.damaged:
            self.damaged.intersection_update(entry.counter for entry in record.entries)

    def check_rules(self) -> None:
        """Log which checkpoints no rule keeps: the next commit drops them. Raises StoreFullError (``check_room``)."""
        self.retention.check_room(self.record.entries)
        dropped = [entry.step for entry in self.retention.dropped(self.record.entries)]
        if dropped:
            text = "the next checkpoint drops those of steps %s: no rule of this engine keeps them"
            write("dropping", text, dropped)

    def decide(self, new: Entry) -> Record | None:
        """Return the record that commits ``new``; None if it was superseded (I6) or rejected meanwhile.

        Changes nothing. Raises StoreFullError if all others are kept, and a record has no room for one more.
        """
        if new.counter in self.rejected:
            return None
        kept = self.retention.retain((*self.record.entries, *self.adopted), new, self.damaged)
        self.retention.check_place(len(kept.entries) - 1)
        self._warn_of(kept)
        return self.record_naming(kept.entries) if new in kept.entries else None

    def _warn_of(self, kept: Kept) -> None:
        """Log which checkpoints are dropped for want of room."""
        for entry in kept.crowded_out:
            text = "the checkpoint of step %d is dropped although Keep(every=...) keeps it: a record names %d"
            write("crowded_out", text, entry.step, MOST_ENTRIES)


def _check_best(best: object) -> None:
    if not isinstance(best, tuple) or len(best) != 3:
        text = 'Keep(best=...) is a metric, a count and "min" or "max", such as ("loss", 3, "min")'
        raise TypeError(f"{text}, not {best!r}")
    metric, count, mode = best
    if not isinstance(metric, str):
        raise TypeError(f"Keep(best=...) names a metric of the metadata, not {metric!r}")
    check_count("the count of Keep(best=...)", count)
    if mode not in ("min", "max"):
        raise ValueError(f"Keep(best=...) ends with 'min' or 'max', not {mode!r}")


def _make_spaced(spaced: object) -> tuple[tuple[float, float], ...]:
    """Return the checked pairs in seconds. Raises TypeError, ValueError."""
    if not isinstance(spaced, list | tuple) or not all(isinstance(each, tuple) and len(each) == 2 for each in spaced):
        raise TypeError(
            "Keep(spaced=...) is a list of pairs (every, for how long) of timedeltas or seconds, such as "
            f"[(timedelta(minutes=10), timedelta(hours=1))], not {spaced!r}"
        )
    pairs = [tuple(map(_seconds, each)) for each in spaced]
    for each, (every, seconds) in zip(spaced, pairs, strict=True):
        if not 0 < every <= seconds < math.inf:
            raise ValueError(
                "Keep(spaced=...): slices are longer than 0 and not longer than what is kept, and both are finite; not "
                f"so in {each}"
            )
        if seconds / every > MOST_ENTRIES:  # also if their number is infinite, as a float
            text = f"Keep(spaced=...): {seconds / every:g} slices in {each}"
            raise ValueError(f"{text}; a commit record names {MOST_ENTRIES} checkpoints")
    return tuple((every, seconds) for every, seconds in pairs)


def _seconds(value: object) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"Keep(spaced=...) takes timedeltas or seconds, not {value!r}")
    try:
        return float(value)
    except OverflowError:  # an int beyond the range of floats: refused as infinity is
        return math.inf


def _slices(every: float, seconds: float) -> int:
    """Return the most slices of length ``every`` that an interval of ``seconds`` touches, wherever it begins."""
    return math.ceil(seconds / every) + 1


def _first_of_slices(entries: Sequence[Entry], every: float, seconds: float) -> Iterable[int]:
    """Return the counters of the first checkpoint of each slice that is not too old; ``entries`` are newest first.

    Slices lie on one fixed grid, so the first checkpoint of a slice stays the first. Checkpoints with later times than
    the newest one, as after a clock was set back, are not too old; but never more are returned than an interval of
    ``seconds`` has slices, or a record would have no room for them.
    """
    first = {entry.time // every: entry for entry in entries}
    # Only now: else the next one of its slice would be wanted once the first is too old, and that one is gone by then.
    kept = [entry.counter for entry in first.values() if entries[0].time - entry.time <= seconds]
    return kept[: _slices(every, seconds)]  # those of the newest checkpoints


def _candidates(committed: Sequence[Entry], new: Entry, damaged: Collection[int]) -> list[Entry]:
    """Return the checkpoints that may be kept, newest first: not damaged, and the newest of their name."""
    there = sorted([entry for entry in (*committed, new) if entry.counter not in damaged], key=_by_counter)
    newest: dict[str, Entry] = {}
    return [one for one in there if not one.metadata or one.name is None or newest.setdefault(one.name, one) is one]


def _by_counter(entry: Entry) -> int:
    return -entry.counter
