# SPDX-License-Identifier: Apache-2.0
"""Carrying out the actions of one member, which are about one store of this rank: on disk, or in memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from pccheck_async.errors import (
    CheckpointError,
    GroupError,
    NoCheckpointError,
    ReplicasDifferError,
    StoreError,
    TornCaptureError,
)
from pccheck_async.format import Entry, Line
from pccheck_async.format.record import GROUP_VERSION
from pccheck_async.group.actions import (
    Action,
    Admit,
    Cancel,
    ChangeState,
    EndRestore,
    EndRound,
    FillArrays,
    Free,
    MatchManifest,
    Post,
    Ready,
    RemoveOrphans,
    Resolve,
    ResolveChange,
    Scan,
    SendCopies,
    TakeOver,
    Unopened,
    WriteRecord,
)
from pccheck_async.group.elsewhere import remove_fetched
from pccheck_async.group.folder import remove_store, seen_stores, write_parts
from pccheck_async.group.member import Member
from pccheck_async.group.messages import AnyDecision, AnyMessage, Change, Ok
from pccheck_async.group.parts import SeenStore
from pccheck_async.group.replicas import Replicas
from pccheck_async.medium.open_medium import OpenMedium, open_medium
from pccheck_async.state import ReplicaSample
from pccheck_async.store import Retention, Store, Written, open_store, rank_name
from pccheck_async.telemetry import write

__all__ = ["Driver", "RestoreAction", "Surroundings", "set_future"]

T = TypeVar("T")
RestoreAction = MatchManifest | FillArrays | ChangeState | EndRestore
_REFUSED = {"missing": NoCheckpointError, "refused": StoreError, "lost": GroupError}
_FAILURES = {"failed": GroupError, "differs": ReplicasDifferError, "torn": TornCaptureError}


@dataclass(slots=True, eq=False)
class _Checkpoint:
    """The futures and flags of a checkpoint, from its request until nothing of it is being written any more."""

    admission: asyncio.Future[None]
    outcome: asyncio.Future[Resolve]
    prepared: asyncio.Future[bool]
    cancelled: bool = False
    """Whether the group decided about it before a record of this rank could name it."""
    committing: bool = False
    """Whether all of it is written, and only the decision is waited for."""

    @property
    def error(self) -> CheckpointError | None:
        """The checkpoint's error, if the group decided that it failed; else None."""
        resolved = self.outcome.result() if self.outcome.done() else None
        if resolved is None or (kind := _FAILURES.get(resolved.outcome)) is None:
            return None
        who = f"rank {resolved.rank}: " if resolved.rank >= 0 else ""
        error: CheckpointError = kind(f"the checkpoint {resolved.counter} of the group failed: {who}{resolved.why}")
        return error


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The callables that a driver needs of its rank.

    Attributes:
        call: Calls a function on a thread of the engine's.
        post: Posts a message to rank 0, unless this rank has left.
        agreed: The queue that the actions of restores are put into.
        sends: Returns coroutines that send parts of a candidate to ranks on other hosts.
        fail: Makes a checkpoint that is being written, given by its counter, fail with an error.
        lost: Called with the reason why this rank cannot go on.
        changed: Called after actions were carried out: the member may be idle, or stopped.
        lock_timeout: Seconds to wait for the lock of a store whose writer is dying.
    """

    call: Callable[..., Awaitable[Any]]
    post: Callable[[AnyMessage], None]
    agreed: asyncio.Queue[RestoreAction]
    sends: Callable[[MatchManifest], Sequence[Coroutine[Any, Any, None]]]
    fail: Callable[[int, CheckpointError], None]
    lost: Callable[[str], None]
    changed: Callable[[], None]
    lock_timeout: float


@dataclass(eq=False)
class Driver:
    """Carries out the actions of a member, and reports the results to it. All methods run on the engine's loop.

    Attributes:
        member: This rank's member of this tier.
        store: This rank's store in this tier.
        opened: The medium of the group's folder.
        folder: The group's folder.
        around: The rest of this rank.
        ready: Future that is done when the group is open, and fails if it cannot be.
        changes: Futures of the requested changes, by index.
        tasks: The tasks that carry out actions.
        replicas: The copies on other hosts, of the memory tier; None if there are to be none.
    """

    member: Member
    store: Store
    opened: OpenMedium
    folder: Path
    around: Surroundings
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self._checkpoints: dict[int, _Checkpoint] = {}
        self.changes: dict[int, asyncio.Future[Sequence[Entry]]] = {}
        self._changed: dict[int, Sequence[Entry]] = {}
        """The checkpoints that each change left, by index: later commits may drop some before the caller gets them."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.not_scanned: Exception | None = None
        """The error of reading the stores in memory, which are taken for none then; those on disk have to be read."""
        self.replicas: Replicas | None = None

    # -- one checkpoint

    def begin(self, counter: int) -> None:
        """Register a checkpoint, so that its outcome can be awaited. Called before its request."""
        new = self.loop.create_future
        self._checkpoints[counter] = _Checkpoint(new(), new(), new())

    async def admitted(self, counter: int) -> bool:
        """Wait until a checkpoint may be written; return False if it is superseded. Raises the checkpoint's error."""
        one = self._checkpoints[counter]
        await asyncio.wait((one.admission, one.outcome), return_when=asyncio.FIRST_COMPLETED)
        if one.error is not None:
            raise one.error
        return one.admission.done()

    async def decided(self, written: Written, sample: ReplicaSample | None) -> bool:
        """Have a record name a checkpoint whose data is durable, and wait for the decision.

        Returns False if it is superseded. Raises the checkpoint's error. Releases the slot if no record will name it.
        """
        entry = written.entry
        one, asked = self._checkpoints[entry.counter], False
        try:
            digests = ({}, {}) if sample is None else await self.around.call(sample.digest)
            asked = True
            self.do(self.member.written(entry.counter, entry, *digests))
            outcome = await asyncio.shield(one.outcome)
            if one.error is not None:
                raise one.error
            return outcome.outcome == "durable"
        finally:
            if not asked or one.cancelled:  # else a record names it, or is about to
                await self.store.release(written.lease, entry.manifest_offset)

    def note_written(self, counter: int) -> None:
        """Called when all of a checkpoint is written, before :meth:`decided`: it ends by the decision from then on."""
        self._checkpoints[counter].committing = True

    def is_committing(self, counter: int) -> bool:
        """Return whether :meth:`note_written` was called for a checkpoint."""
        one = self._checkpoints.get(counter)
        return one is not None and one.committing

    async def prepared(self, counter: int) -> bool:
        """Wait until a durable record names this rank's part; return False if the checkpoint ended before that."""
        one = self._checkpoints.get(counter)
        return one is not None and await asyncio.shield(one.prepared)

    def ended(self, counter: int, error: Exception | None) -> None:
        """Called when nothing of a checkpoint is being written any more."""
        if (one := self._checkpoints.pop(counter, None)) is None:
            return
        set_future(one.prepared, False)
        if one.cancelled:
            self.do(self.member.released(counter))
        elif error is not None and not one.outcome.done():
            self.do(self.member.failed(counter, str(error), torn=isinstance(error, TornCaptureError)))

    # -- committed checkpoints

    @property
    def entries(self) -> Sequence[Entry]:
        """The committed checkpoints, newest first, with the entries of this rank's parts.

        Where this rank has no part, as it ran elsewhere, or not, when the checkpoint was saved, with rank 0's entry.
        """
        member, found, parts = self.member, list[Entry](), self.member.parts  # replaced on the loop
        there = {one.key: one.entry for one in member.view.complete} if member.view is not None else {}
        for key in there if member.run is None else member.keep:  # None: nothing was saved in this run
            if key in parts:
                found.append(parts[key].entry)
            elif key in there:
                found.append(structs.replace(there[key], pinned=member.keep.get(key, there[key].pinned)))
            if key in member.rejected and key in {*parts, *there}:
                found[-1] = found[-1].as_rejected()
        return sorted(found, key=lambda entry: -entry.counter)

    async def change(self, ask: Callable[[], list[Action]]) -> Sequence[Entry]:
        """Request a change by the actions of ``ask``; return the checkpoints that it left, newest first.

        Returns when this rank's record has the change. Raises NoCheckpointError, StoreError, GroupError.
        """
        answer: asyncio.Future[Sequence[Entry]] = self.loop.create_future()
        self.changes[self.member.changes_asked] = answer
        self.do(ask())
        return await answer

    # -- the member's actions

    def learn(self, decision: AnyDecision) -> list[Action]:
        """Hand a decision to the member; return its actions."""
        actions = self.member.learn(decision)
        if isinstance(decision, Change) and decision.why is None:
            self._changed[decision.index] = self.entries
        return actions

    def do(self, actions: Collection[Action]) -> None:
        """Carry out actions, in order; those that take time are started as tasks."""
        for action in actions:
            match action:
                case Post():
                    self.around.post(action.message)
                    if isinstance(action.message, Ok) and (one := self._checkpoints.get(action.message.counter)):
                        set_future(one.prepared, True)
                case Admit():
                    if (one := self._checkpoints.get(action.counter)) is not None:
                        set_future(one.admission, None)
                case Resolve():
                    if (one := self._checkpoints.get(action.counter)) is not None:
                        set_future(one.outcome, action)
                case Cancel():
                    if (one := self._checkpoints.get(action.counter)) is not None:
                        one.cancelled = True
                        if (error := one.error) is not None:  # one that a newer one overtook is written to its end
                            self.around.fail(action.counter, error)
                case WriteRecord():
                    self.start(self._report(self._write(action), lambda _: self.member.record_durable()))
                case TakeOver():
                    self.start(self._report(self._take_over(action.orphans, action.line), self.member.took_over))
                case Scan():
                    finding = self.around.call(self._scan)
                    self.start(self._report(finding, self.member.found))
                case RemoveOrphans():
                    self.start(self._remove(action.stores))
                case Ready():
                    set_future(self.ready, None)
                case Unopened():
                    set_future(self.ready, GroupError(action.why))
                case ResolveChange(index, why, refused):
                    left = self._changed.pop(index, ())
                    set_future(self.changes.pop(index, None), left if why is None else _REFUSED[refused](why))
                case MatchManifest():
                    for sending in self.around.sends(action):
                        self.start(sending)
                    self.around.agreed.put_nowait(action)
                case FillArrays() | ChangeState() | EndRestore():
                    self.around.agreed.put_nowait(action)
                case SendCopies(running):
                    if self.replicas is not None:
                        self.replicas.begin(running)
                case EndRound(end):
                    if self.replicas is not None:
                        self.replicas.end(end)
                case Free():
                    pass  # publishing the record freed them
        self.around.changed()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task; if it fails, this rank is reported as lost."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._note_task)

    def _note_task(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.around.lost(f"rank {self.member.rank} failed: {error!r}")

    async def _report(self, work: Awaitable[T], done: Callable[[T], list[Action]]) -> None:
        try:
            result = await work
        except Exception as error:  # noqa: BLE001 - reported to all ranks
            self.do(self.member.record_failed(str(error)))
        else:
            self.do(done(result))

    async def _write(self, action: WriteRecord) -> None:
        await write_parts(self.store, action.parts, action.applied)
        if self.replicas is not None:  # what is removed or rejected goes from all stores before that is said
            await self.replicas.apply()

    def _scan(self) -> list[SeenStore]:
        try:
            return list(seen_stores(self.folder, passes_over=self.member.in_memory))
        except (CheckpointError, OSError) as error:
            if not self.member.in_memory:
                raise
            self.not_scanned = error
            return []

    async def _take_over(self, orphans: Sequence[SeenStore], line: Line | None) -> bytes:
        await self.store.take_over_once()
        await self.around.call(remove_fetched, self.folder / rank_name(self.member.rank))
        for orphan in orphans:
            await self._take_over_orphan(orphan)
        if line is not None:
            # Before any rank of the run prepares a checkpoint. Without this: a restart finds one in memory, and no
            # record on disk that says whether the disk goes on from there.
            await self.store.begin_line(line)
        return self.store.file.identity.id_bytes

    async def _take_over_orphan(self, orphan: SeenStore) -> None:
        """Make the newest record of a store that no rank writes to durable (I12)."""
        path = os.fspath(self.folder / rank_name(orphan.rank))
        opened = await open_medium(path, "auto", writers=1, copiers=1)
        try:
            store = await open_store(
                opened.medium,
                path=path,
                retention=Retention(),
                max_in_flight=1,
                lock_timeout=self.around.lock_timeout,
                version=GROUP_VERSION,
            )
            await store.take_over_once()
        finally:
            await opened.close()

    async def _remove(self, stores: tuple[SeenStore, ...]) -> None:
        for store in stores:
            try:
                await self.around.call(remove_store, self.folder, store.rank)
            except (OSError, CheckpointError) as error:  # it costs space, and no checkpoint
                path = self.folder / rank_name(store.rank)
                write("surplus", "%s is not needed any more, and cannot be removed: %s", path, error)


def set_future(future: asyncio.Future[Any] | None, result: object) -> None:
    """Set the result of a future, or its error if ``result`` is one; do nothing if it is None, or done."""
    if future is None or future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
