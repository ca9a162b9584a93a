# SPDX-License-Identifier: Apache-2.0
"""The drain of one rank: rank 0 owns the bucket, and every rank uploads its parts when rank 0 requests them.

Requests, answers and the state of the bucket go through the log of the control plane, so all ranks know them in one
order with the decisions about the disk.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping
from dataclasses import dataclass, field

from pccheck_async.bucket import BucketState, RefusedError, Upload
from pccheck_async.engine import Draining, UploadedParts
from pccheck_async.errors import CheckpointError, DamagedError, GroupError, ReadError, WriteError
from pccheck_async.format import Key
from pccheck_async.group.driver import Driver, set_future
from pccheck_async.group.messages import (
    AnyDecision,
    AskParts,
    Commit,
    InBucket,
    Opened,
    PartsSent,
    SendParts,
    SentParts,
    Start,
    UploadFailure,
)
from pccheck_async.group.parts import link_to
from pccheck_async.group.view import Complete, FoundBucket, View
from pccheck_async.store import DroppedMeanwhileError, FolderPart, OwnSlot, Source, rank_name, ranks_in_words

__all__ = ["GroupDrain"]

_KINDS: tuple[tuple[UploadFailure, type[Exception]], ...] = (
    ("damaged", DamagedError),
    ("dropped", DroppedMeanwhileError),
    ("refused", RefusedError),
    ("failed", OSError),
    ("ended", Exception),
)


@dataclass(eq=False)
class GroupDrain:
    """One rank's side of the drain. All methods run on the engine's loop.

    Attributes:
        draining: The drain of this rank's engine.
        disk: This rank's driver of the disk.
    """

    draining: Draining
    disk: Driver
    _number: int = -1
    _answer: asyncio.Future[PartsSent] | None = None
    _sending: set[asyncio.Task[None]] = field(default_factory=set)

    def found(self, path: str, *, overwrite: bool) -> FoundBucket | None:
        """Return the bucket as this rank has taken it over; None on other ranks than rank 0."""
        draining = self.draining
        return None if draining.owner is None else FoundBucket(draining.state, path, draining.url, overwrite)

    def _open(self, view: View, bucket: BucketState) -> None:
        """Take over what the ranks agreed on, in the order of the log: later decisions change it."""
        self.disk.store.committed.line = view.line  # until this run writes its own
        self.draining.adopt(bucket)
        self.draining.note_dropped(one.entry.counter for one in view.restorable if one.entry.rejected)

    # -- what the group decides

    def learn(self, decision: AnyDecision) -> None:
        """Take a decision, after the driver of the disk has."""
        match decision:
            case SendParts():
                task = self.disk.loop.create_task(self._send(decision))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)
            case PartsSent() if decision.number == self._number:
                set_future(self._answer, decision)
            case Opened(view, _, bucket) if bucket is not None:
                self._open(view, bucket)
            case InBucket(state):
                self.draining.learn(state)
            case Start():
                self.draining.note_begun()
            case Commit() if self.draining.owner is not None:
                self.draining.owner.wake()

    async def _send(self, request: SendParts) -> None:
        sent = SentParts(self.disk.member.rank, request.number, (), "refused", "it is leaving")
        try:
            sent = SentParts(sent.rank, sent.number, tuple(await self.draining.send(request.upload)))
        except Exception as error:  # noqa: BLE001 - rank 0 waits for an answer, whatever it is
            kind = next(kind for kind, of in _KINDS if isinstance(error, of))
            sent = SentParts(sent.rank, sent.number, (), kind, str(error) or repr(error))
        finally:
            self.disk.around.post(sent)

    async def upload(self, request: Upload) -> UploadedParts:
        """Make all ranks upload their parts of a checkpoint. Called on rank 0.

        Raises DroppedMeanwhileError, DamagedError, WriteError, RefusedError, GroupError: rank 0 answers no more.
        """
        key, found = self._find(request.counter)
        world, line = self.disk.member.world if found is None else found.world, self.disk.store.committed.line
        if line is None or line.run_of(request.counter) != link_to(key).run:  # a link covers older runs' ones, too
            raise DamagedError("the line of the disks does not name its run")
        self._number += 1
        self._answer = self.disk.loop.create_future()
        self.disk.around.post(AskParts(self.disk.member.rank, self._number, request))
        sent = await self._answer
        if sent.failed == "failed":
            raise WriteError(errno.EIO, sent.why)
        if sent.failed:
            kind = dict(_KINDS)[sent.failed]
            raise (CheckpointError if kind is Exception else kind)(sent.why)
        # Without this: a checkpoint without a part is committed, and replaces a whole one.
        if missing := {*range(world)} ^ {part.rank for part in sent.parts}:
            raise ReadError(errno.EIO, f"the parts of {ranks_in_words(sorted(missing), len(missing))} were not sent")
        return UploadedParts(sent.parts, key.run.members)

    def _find(self, counter: int) -> tuple[Key, Complete | None]:
        """Return the key of a committed checkpoint on the disks; and of one from before this run, where its parts lie.

        Raises DroppedMeanwhileError.
        """
        member = self.disk.member
        assert member.view is not None
        before = {one.key: one for one in member.view.complete}
        for key in before if member.run is None else member.keep:
            if key.counter == counter:
                return key, before.get(key)
        raise DroppedMeanwhileError(f"checkpoint {counter} was replaced, removed or rejected meanwhile")

    def parts_to_send(self, counter: int) -> Mapping[int, Source]:
        """Return the parts of a checkpoint that this rank uploads, by rank: its own, and in its domain ownerless ones.

        Raises DroppedMeanwhileError.
        """
        member, (key, found) = self.disk.member, self._find(counter)
        rank, homes = member.rank, member.homes
        sources = dict[int, Source]()
        for part, domain in enumerate(homes if found is None else found.places):
            own = part < member.world and homes[part] == domain
            if (part if own else homes.index(domain)) != rank:
                continue
            if part != rank:
                sources[part] = FolderPart(self.disk.opened, rank_name(part), key)
            elif key in member.parts:
                sources[part] = OwnSlot(self.disk.store, member.parts[key].entry)
            else:
                raise DroppedMeanwhileError(f"checkpoint {counter} was replaced, removed or rejected meanwhile")
        return sources

    # -- the end

    def lost(self, why: str) -> None:
        """Called when rank 0 is gone, or cannot be reached: nothing more is copied."""
        set_future(self._answer, GroupError(why))
        self.draining.end(why)
