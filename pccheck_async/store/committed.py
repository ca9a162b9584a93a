"""What the newest record of a store names, and what the next one will."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from pccheck_async.format import Entry, Record
from pccheck_async.format.record import MOST_ENTRIES
from pccheck_async.store.retention import Kept, Retention
from pccheck_async.telemetry import write

__all__ = ["Committed"]


class Committed:
    """The committed checkpoints of one store.

    Args:
        record: The newest durable one.
        retention: Which checkpoints are kept.

    Attributes:
        record: The newest durable one.
        retention: The rules.
        adopted: Superseded ones that were fallen back to: the next record may name them, and must not be written where
            the only one is that does.
    """

    def __init__(self, record: Record, retention: Retention) -> None:
        self.record = record
        self.adopted: tuple[Entry, ...] = ()
        self.retention = retention
        self._damaged: set[int] = set()
        self._without_metric = False

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Committed and adopted checkpoints, newest first, those known to be damaged left out."""
        known = sorted((*self.record.entries, *self.adopted), key=lambda entry: -entry.counter)
        return tuple(entry for entry in known if entry.counter not in self._damaged)

    @property
    def largest_counter(self) -> int:
        """The largest counter that was ever committed and is still known, -1 for none."""
        return max((entry.counter for entry in self.record.entries), default=-1)

    def mark_damaged(self, counter: int) -> None:
        """Leave a checkpoint whose bytes are not what was written out of the next record."""
        self._damaged.add(counter)

    def adopt(self, entry: Entry) -> None:
        """Count a superseded checkpoint as committed, all of which was verified."""
        self.adopted = (*self.adopted, entry)

    def record_naming(self, entries: Iterable[Entry]) -> Record:
        """Return the record that comes next where it names ``entries``. Changes nothing.

        It goes where the one before the newest is. Where that alone names what was adopted, a crash must not tear it:
        then it goes where the newest is, of which nothing newer was whole.
        """
        named, before = tuple(entries), self.record
        if self.adopted:
            return Record(before.generation + 2, named, before.before)
        return Record(before.generation + 1, named, before.entries)

    def publish(self, record: Record) -> None:
        """Note that ``record`` is durable."""
        self.record = record
        self.adopted = ()
        self._damaged.intersection_update(entry.counter for entry in record.entries)

    def check_rules(self) -> None:
        """Log which checkpoints no rule keeps: the next commit drops them.

        Raises:
            StoreFullError: more are pinned than a record has room for.
        """
        self.retention.check_room(self.record.entries)
        dropped = [entry.step for entry in self.retention.dropped(self.record.entries)]
        if dropped:
            text = "the next checkpoint drops those of steps %s: no rule of this engine keeps them"
            write(logging.WARNING, "dropping", text, dropped)

    def retain(self, new: Entry) -> Kept:
        """Return what the next record names; ``new`` is not among it where it is superseded (I6). Changes nothing."""
        return self.retention.retain((*self.record.entries, *self.adopted), new, self._damaged)

    def warn_of(self, new: Entry, kept: Kept) -> None:
        """Log which checkpoints are dropped for want of room, and, once, that ``keep_best`` cannot rank ``new``."""
        for entry in kept.crowded_out:
            text = "the checkpoint of step %d is dropped although keep_every keeps it: a record names %d"
            write(logging.WARNING, "crowded_out", text, entry.step, MOST_ENTRIES)
        best = self.retention.keep_best
        if best is not None and not self._without_metric and best.number(new) is None:
            self._without_metric = True
            text = (
                "keep_best takes no notice of checkpoints without a number %r in their metadata; that of step %d is %s"
            )
            write(logging.WARNING, "no_metric", text, best.metric, new.step, new.metadata or "empty")
