"""The ranks of a group, as the engine of one of them sees them: each answer is agreed on with the others."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final, Literal

from pccheck_async.engine import (
    Caller,
    Connected,
    EngineConfig,
    Peers,
    Policy,
    RestoreCandidate,
    RestoreCandidates,
    StepEnd,
    StepReport,
)
from pccheck_async.errors import (
    CheckpointError,
    DamagedError,
    GroupError,
    IncompleteCheckpointError,
    NoCheckpointError,
    StateMismatchError,
    StoreError,
    is_exhausted,
)
from pccheck_async.format import Entry, Key, Metadata, Which
from pccheck_async.format.record import GROUP_VERSION
from pccheck_async.group.actions import ChangeState, EndRestore, FillArrays, MatchManifest
from pccheck_async.group.control import Address, Client, Server
from pccheck_async.group.folder import seen_store
from pccheck_async.group.group import Group
from pccheck_async.group.messages import Failed
from pccheck_async.group.run import GroupRun, group_retention, serve
from pccheck_async.group.schedule import Verdict
from pccheck_async.medium import Piece
from pccheck_async.state import Owners, Sample
from pccheck_async.store import Retention, SlotLease, Store, UnreadableError, rank_name
from pccheck_async.transfer.operations import Operations

__all__ = ["Ranks"]

_AHEAD_SECONDS: Final = 0.05
"""How far ahead of the training a schedule is published at the least: the time of a message, on a busy machine."""
_MOST_AHEAD: Final = 64
"""The most steps."""


class Ranks(Peers):
    """The peers of one rank's engine (see :class:`pccheck_async.engine.Peers`).

    A commit is split at its record: the data becomes durable here, then the rank's record names it as prepared, the
    group decides, and a later record applies that and frees slots (see :mod:`pccheck_async.group.member`).

    Attributes:
        address: Of the control plane, from the meeting on.
        run: This opening of the group, from the beginning of the join on.
    """

    collective: ClassVar[bool] = True
    record_version: ClassVar[int] = GROUP_VERSION
    run: GroupRun
    _store: Store
    address: Address

    def __init__(self, group: Group) -> None:
        self.group = group
        self._server: Server | None = None
        self._due, self._first = False, True

    # -- opening and closing

    def retention(self, config: EngineConfig) -> Retention:
        if config.on_busy == "skip":
            raise ValueError("on_busy='skip' is not for groups: what one rank skips, another one saves")
        return group_retention(config)

    def folder(self, path: str) -> str:
        return os.fspath(Path(path) / rank_name(self.group.rank))

    def meet(self, config: EngineConfig) -> None:
        if self.group.rank == 0:
            self._server = serve(self.group.world_size, config, self.group.timeout)
        self.address = self.group.share(None if self._server is None else self._server.address)

    async def join(
        self,
        path: str,
        config: EngineConfig,
        store: Store,
        operations: Operations,
        end_with: Callable[[int, CheckpointError], None],
    ) -> Connected:
        group, self._store = self.group, store
        own = seen_store(group.rank, store.file.identity, store.committed.record)
        self.run = run = GroupRun(Path(path), group.rank, group.world_size, config, store, own, end_with, operations)
        run.server = self._server
        await run.join(self.address)
        owners = Owners(
            group.rank, run.member.homes, group.world_ranks(), config.replicated, config.trusted_replicas,
            lambda: run.member.differing,
        )  # fmt: skip
        return Connected(run.member.counter, owners)

    def unopened(self, error: BaseException) -> None:
        if hasattr(self, "run"):  # this rank said hello, and leaves
            return
        failed = Failed(self.group.rank, -1, f"cannot open its store: {error}", latched=True)
        if self._server is not None:
            self._server.decide(lambda coordinator: coordinator.receive(failed))  # its store stays, to be read
            self._server.close(0.0)
        elif hasattr(self, "address"):
            with suppress(CheckpointError):  # the others wait for this rank, which could not open its store
                client = Client(self.address, self.group.rank, lambda _: None, lambda _: None)
                client.post(failed)
                client.close()

    async def leave(self, seconds: float | None) -> None:
        if hasattr(self, "run"):
            await self.run.leave(seconds)

    @property
    def stopped(self) -> str | None:
        return None if (broken := self.run.member.stopped) is None else broken.why

    # -- one checkpoint

    def request(
        self, counter: int, step: int, metadata: Metadata, sums: Mapping[str, int], differing: Collection[int]
    ) -> None:
        self.run.request(counter, step, metadata, sums, differing)

    def request_failed(self, counter: int, step: int, why: str) -> None:
        self.run.request_failed(counter, step, why)

    async def admitted(self, counter: int) -> None:
        await self.run.admitted(counter)

    async def commit(
        self,
        lease: SlotLease,
        entry: Entry,
        rest: Sequence[Piece],
        check: Callable[[], None] | None,
        sample: Sample | None,
    ) -> bool:
        await self._store.finish_data(lease, entry, rest, check)
        asked = False
        try:
            digests = ({}, {}) if sample is None else await self.run.call(sample.digest)
            asked = True
            return await self.run.decided(entry, *digests)
        finally:
            if not asked or self.run.is_cancelled(entry.counter):  # else a record names it, or is about to
                await self._store.release(lease, entry.manifest_offset)

    async def prepared(self, counter: int) -> bool:
        return await self.run.prepared(counter)

    def ended(self, counter: int, error: Exception | None) -> None:
        self.run.note_end(counter, error)

    # -- committed checkpoints

    def candidates(self, which: Which) -> RestoreCandidates:
        return _AgreedCandidates(self.group, self.run, which)

    @property
    def entries(self) -> Sequence[Entry]:
        return self.run.complete() if hasattr(self, "run") else ()

    @property
    def newest(self) -> Entry | None:
        there = self.run.complete()
        return next((entry for entry in there if not entry.rejected), there[0] if there else None)

    async def pin(self, step: int, pinned: bool) -> Entry:
        await self.run.pin(step, pinned)
        return next(entry for entry in self.entries if entry.step == step)

    async def reject(self, step: int, in_flight: Mapping[int, int], until: int) -> list[Entry]:
        before = [entry for entry in self.entries if not entry.rejected]
        await self.run.reject(step, until)  # rank 0 knows the checkpoints in flight
        rejected = {key.counter for key in self.run.member.rejected}  # the next save may have dropped them by now
        return [entry.as_rejected() for entry in before if entry.counter in rejected]

    async def remove(self, which: Which, *, force: bool) -> list[Entry]:
        assert which is not None
        before = self.entries
        await self.run.remove(which, force=force)
        await self._store.slots.remove_surplus()
        return [entry for entry in before if entry.matches(which)]

    # -- training steps: the policy is rank 0's, and its answers come from the group's schedule

    def begin_step(self, step: int) -> None:
        self.run.begin_step(step)

    def due(self, policy: Policy, report: StepReport, *, preempted: bool) -> StepEnd:
        """Return what all ranks do after this step. Waits if the schedule does not cover it yet.

        A policy that has ``next_after(step)`` is followed to the step. The saves of another one are made a little
        later: 1 to 2 times 50 ms, or 1 to 2 steps if these are longer.
        """
        run, leads, save = self.run, self.group.rank == 0, False
        if leads:
            self._due = policy.due(report) or self._due
        if preempted:
            run.tell_preempted()
        while True:
            if leads and run.lacks_schedule(report.step):
                self._publish(policy, report)
            match run.at_end(report.step):
                case Verdict.SAVE:
                    save = True
                case Verdict.GO:
                    return StepEnd(save)
                case Verdict.STOP:
                    return StepEnd(True, last=True)
                case Verdict.WAIT:
                    run.wait_for_schedule(report.step)

    def _publish(self, policy: Policy, report: StepReport) -> None:
        if (next_after := getattr(policy, "next_after", None)) is not None:
            self.run.publish(next_after(report.step - 1 if self._first else report.step), save=True)
        else:
            ahead = math.ceil(_AHEAD_SECONDS / report.seconds) if report.seconds > 0 else _MOST_AHEAD
            self.run.publish(report.step + max(1, min(_MOST_AHEAD, ahead)), save=self._due)
            self._due = False
        self._first = False

    def end_steps(self) -> None:
        if hasattr(self, "run"):
            self.run.end_schedule()  # no step is agreed on that this rank would not reach


class _AgreedCandidates(RestoreCandidates):
    """The candidates that rank 0 proposes: all ranks restore the same one, or none and raise the same error."""

    def __init__(self, group: Group, run: GroupRun, which: Which) -> None:
        self._ranks = group.rank, group.world_size
        self._run = run
        self._which = which
        self._asked, self._agreed = False, False
        self._next: MatchManifest | FillArrays | ChangeState | EndRestore | None = None
        self._mismatch: Exception | None = None

    async def next(self, caller: Caller) -> RestoreCandidate | None:
        if not self._asked:
            await caller.run(self._run.ask_restore(self._which))
            self._asked = True
            self._next = await caller.run(self._run.restoring.get())
        while True:
            match self._next:
                case MatchManifest(key):
                    if (found := self._candidate(key)) is not None:
                        return found
                    await self._tell_matched(caller, "damaged", "its part is not in its store")
                case EndRestore(reason, why):
                    self._agreed = True
                    if reason == "none":
                        return None
                    raise self._mismatch or _error(reason, why)
                case other:
                    raise GroupError(f"the restore cannot go on with {other!r}")

    async def matched(self, caller: Caller, error: Exception | None) -> bool:
        outcome: Literal["ok", "mismatch", "damaged"] = "ok" if error is None else "mismatch"
        self._mismatch = error
        if isinstance(error, UnreadableError):
            if is_exhausted(error.error):  # the checkpoint is whole, and must not be dropped for it
                self._mismatch = error.error
            else:
                outcome, self._mismatch = "damaged", None
        await self._tell_matched(caller, outcome, "" if error is None else str(error))
        return isinstance(self._next, FillArrays)

    async def _tell_matched(self, caller: Caller, outcome: Literal["ok", "mismatch", "damaged"], why: str) -> None:
        await caller.run(self._run.tell_matched(outcome, why))
        self._next = await caller.run(self._run.restoring.get())

    async def filled(self, caller: Caller, error: UnreadableError | None, differing: Collection[int]) -> bool:
        await caller.run(self._run.tell_verified(None if error is None else str(error), differing))
        self._next = await caller.run(self._run.restoring.get())
        self._agreed = isinstance(self._next, ChangeState)
        return self._agreed

    async def abandon(self, caller: Caller, error: BaseException) -> None:
        if self._asked and not self._agreed:  # the others wait for an answer
            await caller.run(self._run.tell_ended(f"the restore ended: {error!r}"))

    def _candidate(self, key: Key) -> RestoreCandidate | None:
        """Return a checkpoint, of which this rank restores one part; None if that is gone."""
        run = self._run
        if (source := run.source(key)) is None:
            return None
        own, (sources, elsewhere) = run.own_part(key), run.sources(key)
        other_world = None if run.has_world_of(key) else self._ranks
        return RestoreCandidate({**sources, own: source}, own, elsewhere, other_world=other_world)


def _error(reason: str, why: str) -> Exception:
    kind = {
        "incomplete": IncompleteCheckpointError,
        "no step": NoCheckpointError,
        "mismatch": StateMismatchError,
        "damaged": DamagedError,
        "rejected": StoreError,
    }.get(reason, GroupError)
    error: Exception = kind(why)
    return error
