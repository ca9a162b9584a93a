# SPDX-License-Identifier: Apache-2.0
"""The processes that save a checkpoint together: the questions that an engine asks them.

:class:`Alone` answers for one process, ``Ranks`` of the room ``group`` by agreement with the other ranks.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from pccheck_async.bucket import BucketState, Upload
from pccheck_async.engine.caller import Caller
from pccheck_async.engine.config import EngineConfig
from pccheck_async.engine.drain import Draining
from pccheck_async.engine.drain_owner import UploadedParts
from pccheck_async.engine.memory import Memory, memory_folder
from pccheck_async.engine.policy import Policy, StepReport
from pccheck_async.engine.run_line import RunLine
from pccheck_async.errors import CheckpointError, DamagedError, NoCheckpointError
from pccheck_async.format import Entry, Metadata, Reach, Which
from pccheck_async.format.record import FORMAT_VERSION
from pccheck_async.state import Owners, ReplicaSample
from pccheck_async.store import (
    DroppedMeanwhileError,
    Fallback,
    OwnSlot,
    Retention,
    Source,
    Store,
    UnreadableError,
    Written,
    choose,
    only_rejected,
)
from pccheck_async.telemetry import write
from pccheck_async.transfer import uninterrupted
from pccheck_async.transfer.operations import Operations

__all__ = ["Alone", "Connected", "Peers", "Private", "RestoreCandidate", "RestoreCandidates", "StepEnd"]

Private: TypeAlias = Literal["modulo"] | Sequence[str]
"""Private tensors that rank r may restore from rank r modulo the old number of ranks, if that was another one: all of
them ("modulo"), or those whose paths match one of these globs."""


class Connected(NamedTuple):
    """The result of joining.

    Attributes:
        counter: The largest counter of any checkpoint so far, -1 for none; the next checkpoint's is greater.
        owners: Decides which ranks save which replicas; None if this process saves everything.
    """

    counter: int
    owners: Owners | None


class StepEnd(NamedTuple):
    """The actions after a training step.

    Attributes:
        save: Whether to checkpoint.
        last: Whether it is the last step of all ranks, because one was preempted.
    """

    save: bool
    last: bool = False


@dataclass(frozen=True, slots=True)
class RestoreCandidate:
    """A checkpoint that may be restored.

    Attributes:
        sources: The parts that can be read here, by the ranks that saved them.
        own: The rank whose part this process restores.
        elsewhere: The ranks whose parts cannot be read here.
        must_verify: Whether it was superseded, so that it may be partly overwritten: valid only once all is verified.
        other_world: This rank and the present number of ranks, if another number of ranks saved it; else None.
        source: The tier that the part of ``own`` is read from.
    """

    sources: Mapping[int, Source]
    own: int = 0
    elsewhere: Sequence[int] = ()
    must_verify: bool = False
    other_world: tuple[int, int] | None = None
    source: Reach = "disk"


class RestoreCandidates(ABC):
    """The checkpoints that one restore may take, in the order of preference; all ranks try the same one at a time.

    All methods raise the error that ends the restore, on all ranks.

    Attributes:
        fell_back: Whether damaged checkpoints were passed over for the one that was restored.
    """

    fell_back = False

    @abstractmethod
    async def next(self, caller: Caller) -> RestoreCandidate | None:
        """Return the next candidate to try; None: there is none."""

    @abstractmethod
    async def matched(self, caller: Caller, error: Exception | None) -> bool:
        """Called when the candidate was compared with the state; returns whether it is to fill the state.

        ``error``: an UnreadableError, or the reason why the candidate does not match the state; None: it matches.
        """

    @abstractmethod
    async def filled(self, caller: Caller, error: UnreadableError | None, differing: Collection[int]) -> bool:
        """Called when the state's arrays were filled, or could not be; returns whether all ranks filled theirs.

        ``differing``: hashes of ranks found to have saved different replicas.
        """

    async def abandon(self, caller: Caller, error: BaseException) -> None:
        """Called when an error ends the restore, maybe before :meth:`next`: the others need not wait for this rank."""


class Peers(ABC):
    """The processes that save together, as one engine sees them. Methods that are not abstract do nothing by default.

    Coroutines run on the engine's loop; the other methods on the caller's thread, unless they name another one.

    Attributes:
        collective: Whether all ranks save after the same steps: then no clock and no metric of one rank decides.
        record_version: Format version of the records of this engine's stores.
        undecided: Most checkpoints that are being written to memory, or wait for their commit there, at a time.
    """

    collective: ClassVar[bool]
    record_version: ClassVar[int]
    undecided: ClassVar[int]

    # -- opening and closing

    @abstractmethod
    def retention(self, config: EngineConfig) -> Retention:
        """Return the rules of retention. Raises ValueError: these peers do not support the settings."""

    @abstractmethod
    def folder(self, path: str) -> str:
        """Return the folder of this engine's own store."""

    @abstractmethod
    def memory_folder(self, path: str, root: Path, store: Store) -> Path:
        """Return the folder in memory, in a tmpfs, of this engine's own ``store``, whose folder is ``path``."""

    @property
    def leads(self) -> bool:
        """Whether this process decides for all where one has to: it owns the bucket, say."""
        return True

    def meet(self, config: EngineConfig) -> None:
        """Exchange the address of rank 0. Called before the store is opened; collective with a process group."""

    @abstractmethod
    async def join(
        self,
        path: str,
        config: EngineConfig,
        store: Store,
        operations: Operations,
        end_with: Callable[[int, CheckpointError], None],
        memory: Memory | None = None,
        drain: Draining | None = None,
    ) -> Connected:
        """Connect to the others, once this engine's own store is open. Raises GroupError.

        ``operations`` are the engine's threads; ``end_with`` makes a checkpoint that is being written fail with an
        error, by its counter; ``memory`` is the memory tier, ``drain`` the drain, if there are any.
        """

    def leaving(self) -> None:
        """Called when closing begins: no more checkpoints are admitted; those in flight or memory are still saved."""

    async def unopened(self, error: BaseException) -> None:
        """Called when the opening failed: the others need not wait for this one."""

    async def leave(self, seconds: float | None) -> None:
        """Called when no more checkpoints come, those in flight have ended, and the drain still uploads.

        ``seconds``: the most time that it may take; None: a default.
        """

    async def disconnect(self, seconds: float | None) -> None:
        """Called after :meth:`leave`, when nothing is uploaded any more. ``seconds`` is as there."""

    async def cut_short(self) -> None:
        """Called when closing is cancelled, maybe before :meth:`leave`: the others find out that this one is gone."""

    @property
    @abstractmethod
    def stopped(self) -> str | None:
        """Why no checkpoint of this opening can succeed any more; None while they can."""

    @property
    def degraded(self) -> str:
        """Why the newest checkpoint in memory is not in the memory of other hosts; empty if it is, or is not to be."""
        return ""

    # -- one checkpoint

    def request(
        self,
        counter: int,
        step: int,
        metadata: Metadata,
        sums: Mapping[str, int],
        differing: Collection[int],
        *,
        on_disk: bool = True,
    ) -> None:
        """Called for each checkpoint on the engine's loop, in the order of counters.

        ``sums`` and ``differing`` are ``tally_sums`` and ``differing`` of a
        :class:`~pccheck_async.engine.capture.Capture`. ``on_disk=False``: the checkpoint is for memory alone.
        """

    def describe(self, error: BaseException) -> str | None:
        """Return the error of a call on this rank as a text for the other ranks; None if there are no others.

        Called on the caller's thread.
        """
        return None

    def request_failed(self, counter: int, step: int, why: str, *, on_disk: bool = True) -> None:
        """Called on the engine's loop instead of :meth:`request` for a checkpoint that cannot be made here.

        Does nothing if :meth:`request` was called for this counter before: an interrupt may have come after that.
        """

    async def admitted(self, counter: int) -> bool:
        """Wait until a checkpoint may be written; return False if it was superseded before, by a rejection.

        Raises GroupError: it failed on another rank.
        """
        return True

    @abstractmethod
    async def commit(self, written: Written, sample: ReplicaSample | None) -> bool:
        """Commit a checkpoint; return False if it is superseded.

        Errors and cancellation are those of :meth:`Store.commit`; ``sample`` is a sample of the tensors that ranks are
        believed to have alike. Also raises GroupError: another rank's part failed, or rank 0 is gone;
        ReplicasDifferError: those tensors differ.

        Durability: on True the parts of all ranks survive power loss.
        """

    @abstractmethod
    async def prepared(self, counter: int) -> bool:
        """Wait until a durable record names this rank's part; return False if the checkpoint ended before that.

        Returns False at once if this process saves alone.
        """

    def ended(self, counter: int, error: Exception | None) -> None:
        """Called on the engine's loop when nothing of a checkpoint is being written any more."""

    # -- the same in memory, which is asked about before the disk

    async def admitted_in_memory(self, counter: int) -> bool:
        """Wait until a checkpoint may be written in memory; False if it cannot be committed there any more."""
        return True

    @abstractmethod
    async def commit_in_memory(self, written: Written, sample: ReplicaSample | None) -> asyncio.Future[bool] | None:
        """Commit a checkpoint in memory, whose bytes are all in its slot there. Raises the errors of Store.commit.

        Returns None if it is committed, or a future of whether the group commits it in memory.
        """

    def in_replicas(self, counter: int) -> asyncio.Future[None] | None:
        """Return a future that is done once a checkpoint, or a newer one, is in the memory of other hosts.

        The future fails if it will not be; None if no other host is to have copies.
        """
        return None

    def ended_in_memory(self, counter: int, error: Exception | None) -> None:
        """Called on the engine's loop when a checkpoint is not saved in memory, as there was no room for it, say."""

    # -- the drain (:class:`.drain_owner.Savers`)

    @abstractmethod
    def parts_to_send(self, counter: int) -> Mapping[int, Source]:
        """Return the parts of a checkpoint on disk that this process uploads, by rank. Raises DroppedMeanwhileError."""

    @abstractmethod
    async def upload(self, request: Upload) -> UploadedParts:
        """Make all processes upload their parts; return when every part is there. Called where :attr:`leads` is true.

        Raises DroppedMeanwhileError, DamagedError, ReadError, WriteError, RefusedError.
        """

    @abstractmethod
    def publish_bucket(self, state: BucketState) -> None:
        """Publish the state of the bucket to all processes, this one included. Called where :attr:`leads` is true."""

    # -- committed checkpoints

    def note_restored(self, counter: int, source: Reach) -> None:
        """Called on the engine's loop when a checkpoint was restored from a tier: the run goes on from it."""

    @abstractmethod
    def candidates(self, which: Which, *, dry_run: bool) -> RestoreCandidates:
        """Return the checkpoints that a restore may take: all, the newest one first, or those of a step or name.

        A dry run marks no checkpoint as damaged.
        """

    @property
    @abstractmethod
    def entries(self) -> Sequence[Entry]:
        """Durable checkpoints, newest first."""

    @property
    def in_memory(self) -> Sequence[Entry]:
        """Valid checkpoints in memory, newest first."""
        return ()

    @property
    @abstractmethod
    def unsaved(self) -> Entry | None:
        """The newest checkpoint in memory, if it is newer than all on disk, and of this run; closing saves it on disk.

        None otherwise.
        """

    def request_unsaved(self, entry: Entry) -> None:
        """Called instead of :meth:`request` before the :attr:`unsaved` checkpoint is written to disk."""

    @property
    @abstractmethod
    def disposable_memory(self) -> bool:
        """Whether the disk has all checkpoints that are in memory, so that closing removes the store in memory."""

    @property
    @abstractmethod
    def newest(self) -> Entry | None:
        """The newest durable checkpoint that is not rejected, or the newest if all are; None: there is none."""

    @abstractmethod
    async def pin(self, which: int | str, pinned: bool) -> Entry:
        """Pin or unpin a checkpoint, as :meth:`Store.pin`."""

    @abstractmethod
    async def reject(
        self, which: int | str, in_flight: Mapping[int, tuple[int, str | None]], until: int
    ) -> list[Entry]:
        """Reject checkpoints from one on, as :meth:`Store.reject`."""

    @abstractmethod
    async def remove(self, which: int | str, *, force: bool) -> list[Entry]:
        """Remove checkpoints for good, as :meth:`Store.remove`."""

    # -- training steps

    def begin_step(self, step: int) -> None:
        """Called when a training step begins."""

    @abstractmethod
    def due(self, policy: Policy, report: StepReport, *, preempted: bool) -> StepEnd:
        """Return what to do after a step. ``preempted``: a signal requested the end of this process."""

    @abstractmethod
    def due_in_memory(self, policy: Policy, report: StepReport) -> bool:
        """Return whether to save a step in memory. Called after :meth:`due`, if there is a memory tier."""

    @abstractmethod
    def stopping(self, *, preempted: bool) -> bool:
        """Return whether no step is to come after this one. Called on the trainer's thread, also on a closed engine.

        ``preempted``: a signal requested the end of this process.
        """

    def end_steps(self) -> None:
        """Called when no more steps come, also on an engine that is not open."""


class Alone(Peers):
    """A process that saves everything by itself."""

    collective: ClassVar[bool] = False
    record_version: ClassVar[int] = FORMAT_VERSION
    undecided: ClassVar[int] = 1
    stopped = None
    _store: Store
    _path: str
    _memory: Memory | None
    _drain: Draining | None
    _line: RunLine | None = None
    """The line of this run; None without a tier beside the disk."""
    _unsaved: int | None = None
    """The counter of a checkpoint in memory that is written to disk; it may be of the run before."""

    def retention(self, config: EngineConfig) -> Retention:
        if config.memory is not None and config.memory.replicas:
            raise ValueError("MemoryTier(replicas=...) is for groups: one process has no other host")
        return config.retention

    def folder(self, path: str) -> str:
        return path

    def memory_folder(self, path: str, root: Path, store: Store) -> Path:
        return memory_folder(root, Path(path), store.file.identity.store_id)

    async def join(
        self,
        path: str,
        config: EngineConfig,
        store: Store,
        operations: Operations,
        end_with: Callable[[int, CheckpointError], None],
        memory: Memory | None = None,
        drain: Draining | None = None,
    ) -> Connected:
        self._store, self._path, self._memory, self._drain = store, path, memory, drain
        base, run = store.committed.largest_counter, secrets.token_bytes(16)
        if memory is not None:
            base = max(base, memory.largest_counter)
        if drain is not None:
            base = max(base, drain.newest)
            run = drain.run
        if tiers := [tier for tier in (memory, drain) if tier is not None]:
            self._line = RunLine(store, run, base, tiers)
        if memory is not None:
            memory.adopt_line(None if drain is None else drain.state.beyond(store.committed.line))
        return Connected(base, None)

    async def admitted(self, counter: int) -> bool:
        if self._line is not None and counter != self._unsaved:
            await self._line.begin()
        return True

    def commit(self, written: Written, sample: ReplicaSample | None) -> Coroutine[Any, Any, bool]:
        return self._store.commit(written)

    async def prepared(self, counter: int) -> bool:
        return False

    async def admitted_in_memory(self, counter: int) -> bool:
        assert self._line is not None
        await self._line.begin()
        return True

    async def commit_in_memory(self, written: Written, sample: ReplicaSample | None) -> None:
        assert self._memory is not None
        await self._memory.store.commit(written)

    def parts_to_send(self, counter: int) -> Mapping[int, Source]:
        entry = next((entry for entry in self.entries if entry.counter == counter), None)
        if entry is None:
            raise DroppedMeanwhileError(f"checkpoint {counter} was replaced, removed or rejected meanwhile")
        return {0: OwnSlot(self._store, entry)}

    async def upload(self, request: Upload) -> UploadedParts:
        assert self._drain is not None
        return UploadedParts(await self._drain.send(request))

    def publish_bucket(self, state: BucketState) -> None:
        assert self._drain is not None
        self._drain.learn(state)

    def note_restored(self, counter: int, source: Reach) -> None:
        line = self._drain.note_restored(counter) if self._drain is not None and source == "remote" else None
        if self._line is not None:
            self._line.note_restored(counter, line)

    def candidates(self, which: Which, *, dry_run: bool) -> RestoreCandidates:
        return _OwnCandidates(self._store, self._memory, self._drain, self._path, which, dry_run)

    @property
    def entries(self) -> Sequence[Entry]:
        return self._store.committed.entries

    @property
    def newest(self) -> Entry | None:
        return self._store.committed.newest

    @property
    def in_memory(self) -> Sequence[Entry]:
        return () if self._memory is None else self._memory.entries

    @property
    def unsaved(self) -> Entry | None:
        if self._memory is None or self._line is None:
            return None
        return self._memory.newer if self._line.begun or self._line.restored is not None else None

    def request_unsaved(self, entry: Entry) -> None:
        self._unsaved = entry.counter

    @property
    def disposable_memory(self) -> bool:
        begun = self._line is not None and self._line.begun
        return self._memory is not None and self._memory.is_disposable(begun=begun)

    async def pin(self, which: int | str, pinned: bool) -> Entry:
        return await self._store.pin(which, pinned)

    async def reject(
        self, which: int | str, in_flight: Mapping[int, tuple[int, str | None]], until: int
    ) -> list[Entry]:
        """Reject checkpoints on disk as :meth:`Store.reject`, and those that are in another tier alone.

        Cancellation: raised when all tiers know.
        """
        beside, before = self._beside_disk(), {*self._store.committed.rejected}
        others = {entry.counter: (entry.step, entry.name) for entry in beside}

        async def reject() -> list[Entry]:
            rejected = await self._store.reject(which, others | {**in_flight}, until)
            chosen = {entry.counter for entry in rejected} | (self._store.committed.rejected - before)
            await self._drop_beside_disk(chosen)
            return _newest_first([*(entry.as_rejected() for entry in beside if entry.counter in chosen), *rejected])

        return await uninterrupted(reject())

    async def remove(self, which: int | str, *, force: bool) -> list[Entry]:
        """Remove checkpoints from the disk as :meth:`Store.remove`, and those that are in the bucket alone.

        Cancellation: raised when all tiers know.
        """
        in_bucket = [] if self._drain is None else self._alone(self._drain.entries)
        matching = [entry for entry in in_bucket if entry.matches(which)]

        async def remove() -> list[Entry]:
            try:
                removed = await self._store.remove(which, force=force)
            except NoCheckpointError:
                if not matching:
                    raise
                removed = []
            await self._drop_beside_disk({entry.counter for entry in (*removed, *matching)})
            return _newest_first([*removed, *matching])

        return await uninterrupted(remove())

    def _alone(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return those of the checkpoints that are not on disk, and not rejected."""
        on_disk = {entry.counter for entry in self._store.committed.entries}
        return [entry for entry in entries if entry.counter not in on_disk and not entry.rejected]

    def _beside_disk(self) -> list[Entry]:
        """Return the checkpoints that are in memory or in the bucket, and not on disk, newest first."""
        there = {entry.counter: entry for entry in self._alone(() if self._drain is None else self._drain.entries)}
        there |= {entry.counter: entry for entry in self._alone(() if self._memory is None else self._memory.entries)}
        return [there[counter] for counter in sorted(there, reverse=True)]

    async def _drop_beside_disk(self, counters: Collection[int]) -> None:
        if self._drain is not None:
            self._drain.note_dropped(counters)
        if self._memory is not None:
            await self._memory.drop(counters)

    def due(self, policy: Policy, report: StepReport, *, preempted: bool) -> StepEnd:
        return StepEnd(policy.due(report))

    def due_in_memory(self, policy: Policy, report: StepReport) -> bool:
        return policy.due(report)

    def stopping(self, *, preempted: bool) -> bool:
        return preempted


def _newest_first(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.counter, reverse=True)


class _OwnCandidates(RestoreCandidates):
    """The candidates in a store of one process: first committed and superseded checkpoints together, newest first.

    Superseded ones are among them only if no step or name is given. Then follow those that are known to be damaged,
    for their error. Of each checkpoint the copy in memory is tried first, then that on disk, then that in the bucket;
    of a superseded one only that on disk.
    """

    def __init__(
        self, store: Store, memory: Memory | None, drain: Draining | None, path: str, which: Which, dry_run: bool
    ) -> None:
        self._store = store
        self._memory = memory
        self._drain = drain
        self._path = path
        self._passed_over: set[tuple[Reach, int]] = set()  # copies that cannot be read, by tier and counter
        self._which = which
        self._dry_run = dry_run
        self._fallback = Fallback(which, path)

    def _copies(self, tier: Reach) -> dict[int, Entry]:
        """Return the copies in memory, on disk or in the bucket that are to be tried, by counter."""
        entries: Sequence[Entry] = ()
        if tier == "disk":
            entries = self._store.committed.entries
        elif tier == "memory" and self._memory is not None:
            entries = self._memory.entries
        elif tier == "remote" and self._drain is not None:
            entries = self._drain.entries
        return {entry.counter: entry for entry in entries if (tier, entry.counter) not in self._passed_over}

    def _copy_of(self, entry: Entry, tier: Reach) -> Entry | None:
        """Return the copy of a checkpoint in a tier: the entry of its counter, if it has the same manifest.

        Checkpoints of other branches may have the same counter.
        """
        found = self._copies(tier).get(entry.counter)
        return found if found is not None and found.manifest_checksum == entry.manifest_checksum else None

    def _find(self) -> tuple[Entry, bool] | None:
        """Return the checkpoint to read, and whether it was superseded."""
        committed, unreadable = self._store.committed, self._fallback.unreadable
        entries, record = committed.entries, committed.record
        if elsewhere := self._copies("remote") | self._copies("memory"):
            there = {entry.counter: entry for entry in entries}
            entries = tuple(sorted((elsewhere | there).values(), key=lambda entry: -entry.counter))
        if (entry := choose(entries, self._which, unreadable, record.superseded)) is not None:
            return entry, entry not in entries
        damaged = choose(record.entries, self._which, unreadable)
        return None if damaged is None else (damaged, False)

    async def next(self, caller: Caller) -> RestoreCandidate | None:
        committed, in_memory = self._store.committed, () if self._memory is None else self._memory.entries
        remote = () if self._drain is None else self._drain.entries
        everywhere = (*committed.record.entries, *committed.adopted, *in_memory, *remote)
        if error := only_rejected(everywhere, self._which, self._path):
            raise error
        if (found := self._find()) is None:
            return None
        self._entry, self._superseded = entry, superseded = found
        self._tier: Reach = "disk"
        if not superseded:
            self._tier = next((tier for tier in _TIERS if self._copy_of(entry, tier) is not None), "disk")
        if self._tier == "memory":
            assert self._memory is not None
            return RestoreCandidate(
                {0: OwnSlot(self._memory.store, self._copies("memory")[entry.counter])}, source="memory"
            )
        if self._tier == "remote":
            assert self._drain is not None
            return RestoreCandidate({0: self._drain.source(self._copies("remote")[entry.counter])}, source="remote")
        if superseded and self._fallback.failure is None:
            newest, error = self._store.committed.record.entries[0], DamagedError("found damaged by an earlier restore")
            self._fallback.failure = newest, error
        return RestoreCandidate({0: OwnSlot(self._store, entry, superseded=superseded)}, must_verify=superseded)

    async def matched(self, caller: Caller, error: Exception | None) -> bool:
        if error is None:
            return True
        if not isinstance(error, DroppedMeanwhileError | UnreadableError):
            raise error
        entry, damaged = self._entry, isinstance(error, UnreadableError) and isinstance(error.error, DamagedError)
        if not self._superseded:
            others = {tier for tier in _TIERS if tier != self._tier and self._copy_of(entry, tier) is not None}
            if self._tier != "disk" or others:
                self._passed_over.add((self._tier, entry.counter))
            if isinstance(error, UnreadableError) and (self._tier != "disk" or others):
                text = "the copy %s of step %d cannot be read: %s"
                arguments = _PLACES[self._tier], entry.step, error.error
                if self._tier == "memory":
                    write("memory_unreadable", text, *arguments, step=entry.step, counter=entry.counter)
                else:
                    write("copy_unreadable", text, *arguments, step=entry.step, counter=entry.counter)
            if damaged and self._tier != "remote" and not self._dry_run:
                store = self._memory.store if self._tier == "memory" and self._memory is not None else self._store
                await caller.run(store.note_damaged(entry))
            if others:
                return False
        self._fallback.failed(entry, self._superseded, error, self._find)
        return False

    async def filled(self, caller: Caller, error: UnreadableError | None, differing: Collection[int]) -> bool:
        if error is not None:
            return await self.matched(caller, error)
        self._fallback.succeeded(self._entry, self._superseded)
        self.fell_back = self._fallback.warned
        return True


_TIERS: tuple[Reach, ...] = ("memory", "disk", "remote")
_PLACES: dict[Reach, str] = {"memory": "in memory", "disk": "on disk", "remote": "in the bucket"}
