"""One process that saves alone: its answers to the questions of :mod:`.peers`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, ClassVar

from pccheck_async.engine.caller import Caller
from pccheck_async.engine.config import EngineConfig
from pccheck_async.engine.peers import Connected, Peers, RestoreCandidate, RestoreCandidates, StepEnd
from pccheck_async.engine.policy import Policy, StepReport
from pccheck_async.errors import CheckpointError, DamagedError
from pccheck_async.format import Entry, Which
from pccheck_async.format.record import FORMAT_VERSION
from pccheck_async.state import ReplicaSample
from pccheck_async.store import (
    DroppedMeanwhileError,
    Fallback,
    OwnSlot,
    Retention,
    Store,
    UnreadableError,
    Written,
    choose,
    only_rejected,
)
from pccheck_async.transfer.operations import Operations

__all__ = ["Alone"]


class Alone(Peers):
    """One process that saves everything by itself."""

    collective: ClassVar[bool] = False
    record_version: ClassVar[int] = FORMAT_VERSION
    stopped = None
    _store: Store
    _path: str

    def retention(self, config: EngineConfig) -> Retention:
        return config.retention

    def folder(self, path: str) -> str:
        return path

    async def join(
        self,
        path: str,
        config: EngineConfig,
        store: Store,
        operations: Operations,
        end_with: Callable[[int, CheckpointError], None],
    ) -> Connected:
        self._store, self._path = store, path
        return Connected(store.committed.largest_counter, None)

    def commit(self, written: Written, sample: ReplicaSample | None) -> Coroutine[Any, Any, bool]:
        return self._store.commit(written)

    async def prepared(self, counter: int) -> bool:
        return False

    def candidates(self, which: Which) -> RestoreCandidates:
        return _OwnCandidates(self._store, self._path, which)

    @property
    def entries(self) -> Sequence[Entry]:
        return self._store.committed.entries

    @property
    def newest(self) -> Entry | None:
        return self._store.committed.newest

    async def pin(self, step: int, pinned: bool) -> Entry:
        return await self._store.pin(step, pinned)

    async def reject(self, step: int, in_flight: Mapping[int, int], until: int) -> list[Entry]:
        return await self._store.reject(step, in_flight, until)

    async def remove(self, which: Which, *, force: bool) -> list[Entry]:
        return await self._store.remove(which, force=force)

    def due(self, policy: Policy, report: StepReport, *, preempted: bool) -> StepEnd:
        return StepEnd(policy.due(report))

    def stopping(self, *, preempted: bool) -> bool:
        return preempted


class _OwnCandidates(RestoreCandidates):
    """Those of a store of one process: committed ones, then damaged ones for their error, superseded ones last."""

    def __init__(self, store: Store, path: str, which: Which) -> None:
        committed = store.committed
        if error := only_rejected((*committed.record.entries, *committed.adopted), which, path):
            raise error
        self._store = store
        self._which = which
        self._fallback = Fallback(which)

    def _find(self) -> tuple[Entry, bool] | None:
        """Return the checkpoint to read, and whether it was superseded."""
        committed, unreadable = self._store.committed, self._fallback.unreadable
        entries, record = committed.entries, committed.record
        if (entry := choose(entries, self._which, unreadable, record.superseded)) is not None:
            return entry, entry not in entries
        damaged = choose(record.entries, self._which, unreadable)
        return None if damaged is None else (damaged, False)

    async def next(self, caller: Caller) -> RestoreCandidate | None:
        if (found := self._find()) is None:
            return None
        self._entry, self._superseded = entry, superseded = found
        if superseded and self._fallback.failure is None:
            newest, error = self._store.committed.record.entries[0], DamagedError("found damaged by an earlier restore")
            self._fallback.failure = newest, error
        return RestoreCandidate({0: OwnSlot(self._store, entry, superseded=superseded)}, must_verify=superseded)

    async def matched(self, caller: Caller, error: Exception | None) -> bool:
        if error is None:
            return True
        if not isinstance(error, DroppedMeanwhileError | UnreadableError):
            raise error
        if isinstance(error, UnreadableError) and isinstance(error.error, DamagedError) and not self._superseded:
            await caller.run(self._store.note_damaged(self._entry))
        self._fallback.failed(self._entry, self._superseded, error, self._find)
        return False

    async def filled(self, caller: Caller, error: UnreadableError | None, differing: Collection[int]) -> bool:
        if error is not None:
            return await self.matched(caller, error)
        self._fallback.succeeded(self._entry, self._superseded)
        return True
