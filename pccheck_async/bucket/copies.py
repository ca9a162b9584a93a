# SPDX-License-Identifier: Apache-2.0
"""The checkpoints in a bucket as the processes of one engine know them, and which are valid beside those on disk.

No I/O. The disk's line (:class:`pccheck_async.format.Line`) decides which checkpoints in the bucket are valid. If the
newest one there is of another branch, opening an engine raises an error that names both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from pccheck_async.bucket.record import CommitRecord, Kept
from pccheck_async.format import Entry, Key, Line, Run

__all__ = ["BucketState", "Copied", "Phase", "copies_of"]

Phase: TypeAlias = Literal["", "closing", "ended", "stopped"]


class Copied(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that the newest record in a bucket names."""

    entry: Entry
    """Rank 0's entry; its slot is the number of the commit."""
    world: int
    """Number of its parts."""
    line: Line | None
    """The line of the store that it comes from, as it was when the checkpoint was committed."""
    store: bytes
    """The id of that store."""
    members: int | None
    """:attr:`.CommitRecord.members`."""

    @classmethod
    def of(cls, kept: Kept, record: CommitRecord) -> Copied:
        """Return the checkpoint of a live commit."""
        entry = replace(record.entry, slot=kept.number)
        return cls(entry, len(record.parts), record.line, record.store, record.members)

    @property
    def number(self) -> int:
        """The number of the commit."""
        return self.entry.slot

    @property
    def run(self) -> bytes | None:
        """The run that saved the checkpoint; None if it is not known."""
        return None if self.line is None else self.line.run_of(self.entry.counter)

    @property
    def key(self) -> Key | None:
        """The key of a group's checkpoint; None for one of one process, or if its run is not known."""
        run = self.run
        return None if run is None or self.members is None else Key(self.entry.counter, Run.of_id(run, self.members))


class BucketState(msgspec.Struct, frozen=True, array_like=True):
    """The state of a drain, which its owner publishes to all processes of the engine."""

    copies: tuple[Copied, ...] = ()
    """The committed checkpoints there, newest first."""
    line: Line | None = None
    """The line of the newest record when this run took the bucket over."""
    foreign: tuple[int, ...] = ()
    """Numbers of the commits that were not valid beside the disk at the opening: their counters mean nothing here."""
    count: int = 0
    """Checkpoints that this run has copied."""
    settled: int = -1
    """A counter: no checkpoint up to it that is not there yet will be copied."""
    trouble: str = ""
    """Why nothing is copied at the moment, or any more; empty while all is well."""
    phase: Phase = ""
    """``stopped``: after an error that another attempt does not avoid; ``ended``: the engine was closed."""
    left: str = ""
    """The checkpoints that are not in the bucket as they are on disk, in words, once the engine was closed."""
    owner: bytes = b""
    """The run that owned the bucket before this one took it over; empty for none."""

    @property
    def newest(self) -> int:
        """The largest counter of a checkpoint there, of any branch; -1 for none."""
        return max((copy.entry.counter for copy in self.copies), default=-1)

    @property
    def valid(self) -> list[Copied]:
        """The checkpoints that are valid beside those on disk, newest first."""
        return [copy for copy in self.copies if copy.number not in self.foreign]

    def beyond(self, line: Line | None) -> Line | None:
        """Return the line of the newest valid checkpoint if ``line``, that of the disk, does not accept that one.

        Then another run has gone on from what is on disk: what this disk's run has saved since does not count, wherever
        it is. None: the disk's line accepts it, or there is none.
        """
        newest = next(iter(self.valid), None)
        return None if newest is None or _accepts(line, newest) or self._was_last(line) else newest.line

    def _was_last(self, line: Line | None) -> bool:
        """Whether the run with this line had the bucket last, so that no other run has gone on from what is there.

        It had if it made the newest record, or its line is in that. Or if the line there is that of a run that it
        descends from, and nothing was copied since it began: the bucket was not told of it then, as that is done in the
        background.
        """
        if line is None:
            return False
        there = None if self.line is None else self.line.run
        untold = any(link.run == there for link in line.chain) and self.newest <= line.base
        return line.run in (self.owner, there) or untold

    def beside(self, line: Line | None, newest: int | None, *, of_group: bool) -> BucketState:
        """Return this state with :attr:`foreign` set: all are, if the newest one is of another branch.

        Args:
            line: The line of the store on disk.
            newest: The largest counter of a checkpoint on disk; None: there is none, and the newest here is valid.
            of_group: Whether the engine is a group's: checkpoints of the other kind are foreign.
        """
        valid = self._accepted(line, newest)
        numbers = {copy.number for copy in valid or () if (copy.members is not None) == of_group}
        return replace(self, foreign=tuple(copy.number for copy in self.copies if copy.number not in numbers))

    def _accepted(self, line: Line | None, newest: int | None) -> list[Copied] | None:
        """Return the checkpoints that the disk's line accepts, or that descend from it; None: the newest one does not.

        If the disk's own run had the bucket last (:meth:`_was_last`), the disk's line alone decides. With an empty disk
        the bucket's line does, or, if it accepts none, the newest one is valid.
        """
        if not self.copies:
            return []
        if self._was_last(line):
            own = [copy for copy in self.copies if _accepts(line, copy)]
            if own or newest is not None:
                return own
        if newest is not None and not _accepts(line, self.copies[0]):
            run = None if line is None else line.run_of(newest)
            if run is None or self.line is None or not self.line.accepts(run, newest):
                return None
        return [copy for copy in self.copies if _accepts(self.line, copy) or _accepts(line, copy)] or [self.copies[0]]

    def trouble_beside(self, line: Line | None, newest: Entry | None, path: str, url: str, *, of_group: bool) -> str:
        """Return why an engine of ``path`` may not go on beside this bucket; empty if it may.

        ``newest``: the entry of the newest checkpoint on disk; the others are as for :meth:`beside`.
        """
        other = next((copy for copy in self.copies if (copy.members is not None) != of_group), None)
        if other is not None:
            kinds = ("one process", "a group of ranks")
            return (
                f"{url} holds checkpoints of {kinds[not of_group]} (step {other.entry.step}), and {path} is for "
                f"{kinds[of_group]}: give Drain another prefix, or the engine overwrite=True, and they are replaced"
            )
        if newest is None or self._accepted(line, newest.counter) is not None:
            return ""
        return _branches(path, url, newest, self.copies[0], known=line is not None)


def _branches(path: str, url: str, newest: Entry, other: Copied, *, known: bool) -> str:
    """Return the text for a disk and a bucket of different branches. ``known``: whether the disk has a line."""
    why = ""
    if not known:
        why = (
            " (since it was copied there, an engine without drain= and memory=, or a command such as `pccheck remove`, "
            "has written to the folder, which no longer says what it goes on from)"
        )
    return (
        f"{path} and {url} hold checkpoints of different runs, and neither goes on from the other: step {newest.step} "
        f"(counter {newest.counter}) on disk, step {other.entry.step} (counter {other.entry.counter}, of store "
        f"{other.store.hex()[:8]}) in the bucket{why}. To go on from the disk, give Drain another prefix, or the "
        "engine overwrite=True, and the bucket's are replaced; to go on from the bucket, open the engine on an empty "
        "folder"
    )


def copies_of(records: Iterable[tuple[Kept, CommitRecord]]) -> tuple[Copied, ...]:
    """Return the checkpoints of live commits."""
    return tuple(Copied.of(kept, record) for kept, record in records if record.parts)


def _accepts(line: Line | None, copy: Copied) -> bool:
    return line is not None and copy.run is not None and line.accepts(copy.run, copy.entry.counter)
