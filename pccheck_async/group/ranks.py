# SPDX-License-Identifier: Apache-2.0
"""The ranks of a group, as the engine of one of them sees them: each answer is agreed on with the others."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import msgspec
from msgspec import structs

from pccheck_async.engine import (
    Connected,
    EngineConfig,
    Memory,
    Peers,
    Policy,
    RestoreCandidates,
    StepEnd,
    StepReport,
)
from pccheck_async.errors import (
    CheckpointError,
    GroupError,
    NoCheckpointError,
    ReplicasDifferError,
    StoreError,
    TornCaptureError,
)
from pccheck_async.format import Entry, Metadata, Which
from pccheck_async.format.record import GROUP_VERSION, MOST_ENTRIES
from pccheck_async.group.actions import (
    Action,
    Admit,
    Cancel,
    ChangeState,
    EndRestore,
    FillArrays,
    Free,
    MatchManifest,
    Post,
    Ready,
    RemoveOrphans,
    Resolve,
    ResolveChange,
    Scan,
    TakeOver,
    Unopened,
    WriteRecord,
)
from pccheck_async.group.candidates import AgreedCandidates, PartSources, RestoreAction
from pccheck_async.group.control import Address, Client, Server, name_slow_ranks
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.elsewhere import remove_fetched
from pccheck_async.group.folder import domain_of, remove_store, seen_store, seen_stores, write_parts
from pccheck_async.group.group import Group
from pccheck_async.group.member import Member
from pccheck_async.group.messages import AnyDecision, Change, Failed, Ok
from pccheck_async.group.parts import SeenStore
from pccheck_async.group.steps import Steps
from pccheck_async.medium.files import Files
from pccheck_async.medium.open_medium import OpenMedium, open_medium
from pccheck_async.state import Owners, ReplicaSample
from pccheck_async.store import Retention, Store, Written, open_store, rank_name
from pccheck_async.telemetry import write
from pccheck_async.transfer import uninterrupted
from pccheck_async.transfer.operations import Operations

__all__ = ["Ranks"]

T = TypeVar("T")
_REFUSED = {"missing": NoCheckpointError, "refused": StoreError, "lost": GroupError}
_FAILURES = {"failed": GroupError, "differs": ReplicasDifferError, "torn": TornCaptureError}
_GOODBYE_SECONDS: Final = 60.0
"""Seconds that rank 0 waits for the others to leave before it takes the log away."""
_LAST_WORDS_SECONDS: Final = 0.5
"""The same, of a group that is broken or was never opened."""


@dataclass(slots=True, eq=False)
class _Checkpoint:
    """A checkpoint from its request until nothing of it is being written any more."""

    admission: asyncio.Future[None]
    outcome: asyncio.Future[Resolve]
    prepared: asyncio.Future[bool]
    cancelled: bool = False
    """The group decided about it before a record of this rank could name it."""

    @property
    def error(self) -> CheckpointError | None:
        """Its error, if the group decided that it failed."""
        resolved = self.outcome.result() if self.outcome.done() else None
        if resolved is None or (kind := _FAILURES.get(resolved.outcome)) is None:
            return None
        who = f"rank {resolved.rank}: " if resolved.rank >= 0 else ""
        error: CheckpointError = kind(f"the checkpoint {resolved.counter} of the group failed: {who}{resolved.why}")
        return error


class Ranks(Peers):
    """The peers of one rank's engine (see :class:`pccheck_async.engine.Peers`).

    A commit is split at its record: the data becomes durable here, then the rank's record names it as prepared, the
    group decides, and a later record applies that and frees slots. :class:`.member.Member` says what comes next; this
    class carries its actions out, on the engine's loop, and reports their results to it.

    Attributes:
        address: Of the control plane, from the meeting on.
        member: This rank's side of the protocol, from the beginning of the join on.
    """

    collective: ClassVar[bool] = True
    record_version: ClassVar[int] = GROUP_VERSION
    address: Address
    member: Member
    _loop: asyncio.AbstractEventLoop
    _store: Store
    _steps: Steps
    _parts: PartSources

    def __init__(self, group: Group) -> None:
        self.group = group
        self._restoring: asyncio.Queue[RestoreAction] = asyncio.Queue()
        self._server: Server | None = None  # on rank 0
        self._client: Client | None = None
        self._said_hello = False
        self._checkpoints: dict[int, _Checkpoint] = {}
        self._changes: dict[int, asyncio.Future[Sequence[Entry]]] = {}
        self._changed: dict[int, Sequence[Entry]] = {}
        """By change, the checkpoints that it left: later commits may drop some before its caller gets them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._naming: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()

    # -- opening and closing

    def retention(self, config: EngineConfig) -> Retention:
        if config.on_busy == "skip":
            raise ValueError("on_busy='skip' is not for groups: a step that one rank skips is saved by another")
        # Records also name prepared checkpoints.
        self._retention = replace(config.retention, most=MOST_ENTRIES - 2 * config.max_in_flight)
        return self._retention

    def folder(self, path: str) -> str:
        return os.fspath(Path(path) / rank_name(self.group.rank))

    def meet(self, config: EngineConfig) -> None:
        group = self.group
        if group.rank == 0:
            coordinator = Coordinator(group.world_size, self._retention, secrets.randbits(64))
            self._server = Server(coordinator, group.world_size, group.timeout)
        self.address = group.share(None if self._server is None else self._server.address)

    async def join(
        self,
        path: str,
        config: EngineConfig,
        store: Store,
        operations: Operations,
        end_with: Callable[[int, CheckpointError], None],
        memory: Memory | None = None,
    ) -> Connected:
        assert memory is None  # refused by the engine's settings
        group, folder, self._loop = self.group, Path(path), asyncio.get_running_loop()
        self._folder, self._config, self._store, self._end_with = folder, config, store, end_with
        # On a thread of the engine's, also when the interpreter exits and loops have none any more.
        self._call = operations.call
        self._opened: asyncio.Future[None] = self._loop.create_future()
        own = seen_store(group.rank, store.file.identity, store.committed.record)
        self.member = member = Member(
            group.rank,
            group.world_size,
            max_in_flight=config.max_in_flight,
            reserved=config.retention.reserved,
            own=own,
        )
        self._steps = Steps(member, self._server, lambda: self._from_thread(lambda: self._do(member.preempted())))
        domain = await self._call(domain_of, folder)
        opened = OpenMedium(operations, Files(folder, operations), "", os.fspath(folder))
        await opened.medium.prepare(create=False)
        learn, lost = partial(self._from_thread, self._learn), partial(self._from_thread, self._note_lost)
        # Cancelled meanwhile: it is closed, and nobody else has it.
        self._client = client = await operations.obtain(Client.close, Client, self.address, group.rank, learn, lost)
        self._parts = PartSources(member, store, opened, folder, client)
        self._said_hello = True
        self._do(member.hello(domain=domain, host=socket.gethostname(), settings=_settings(folder, config, group)))
        await self._opened
        if self._server is not None:
            self._naming = self._loop.create_task(name_slow_ranks(self._server.awaited, folder))
        self._warn_of_incomplete()
        owners = Owners(
            group.rank, member.homes, group.world_ranks(), group.replicated, group.trusted_replicas,
            lambda: member.differing,
        )  # fmt: skip
        return Connected(member.counter, owners)

    def _from_thread(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _warn_of_incomplete(self) -> None:
        """Warn of checkpoints newer than the newest complete one that were complete once, and lack parts now."""
        view = self.member.view
        assert view is not None
        newest = view.complete[0].key.counter if view.complete else -1
        for one in view.incomplete:
            if one.committed and one.key.counter > newest and self.member.rank == 0:
                hosts = ", ".join(one.hosts) or "no host of this run"
                text = "the checkpoint of step %d lacks the parts of %s (they run on %s): %s"
                then = "an older one is restored" if view.complete else "no complete one is left to restore"
                write("incomplete", text, one.step, one.lacking, hosts, then, store=os.fspath(self._folder))

    async def unopened(self, error: BaseException) -> None:
        """See :meth:`Peers.unopened`. It blocks the engine's loop, which has nothing else to do now."""
        if self._said_hello:  # this rank leaves
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
        """Apply all decisions, say goodbye, and on rank 0 wait for the others; at most ``seconds``."""
        if not hasattr(self, "member"):
            return
        limit = _GOODBYE_SECONDS if seconds is None else seconds
        if self._client is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    self._do(self.member.leave())
                    await self._idle.wait()
                    while self._tasks:
                        await asyncio.wait(set(self._tasks))
        await self._disconnect(limit)

    async def cut_short(self) -> None:
        await self._disconnect(_LAST_WORDS_SECONDS)

    async def _disconnect(self, limit: float) -> None:
        if self._naming is not None:
            self._naming.cancel()
        for answer in self._changes.values():
            _set(answer, GroupError("this rank left before all ranks had asked for this change"))
        client, self._client = self._client, None
        if client is not None:
            await uninterrupted(self._call(client.close))
        server, self._server = self._server, None
        if server is not None:
            well = self.member.view is not None and self.member.stopped is None
            # Else the others read why before the connection is gone, as this process may end now.
            wait = limit if well else min(limit, _LAST_WORDS_SECONDS)
            if (remaining := await uninterrupted(self._call(server.close, wait))) and well:
                text = "rank 0 of the group of %s goes although ranks %s have not left"
                write("group_left", text, self._folder, ", ".join(map(str, remaining)))

    @property
    def stopped(self) -> str | None:
        return None if (broken := self.member.stopped) is None else broken.why

    def _note_lost(self, why: str) -> None:
        _set(self._opened, GroupError(why))
        with self._steps.changed:
            actions = self.member.lost(why)
            self._steps.changed.notify_all()
        # The others wait for this rank's parts, if rank 0 is still there.
        self._do([*actions, Post(Failed(self.member.rank, self.member.counter, why, latched=True))])

    def _learn(self, decision: AnyDecision) -> None:
        try:
            with self._steps.changed:
                actions = self.member.learn(decision)
                if isinstance(decision, Change) and decision.why is None:
                    self._changed[decision.index] = self.entries
                self._steps.changed.notify_all()
            self._do(actions)
        except Exception as error:  # noqa: BLE001 - else its waiting callers wait for ever
            name = type(decision).__name__
            self._note_lost(f"rank {self.member.rank} cannot take a decision in ({name}: {error!r})")
        if self.member.stopped is not None:
            _set(self._opened, GroupError(self.member.stopped.why))

    # -- one checkpoint

    def request(
        self, counter: int, step: int, metadata: Metadata, sums: Mapping[str, int], differing: Collection[int]
    ) -> None:
        new = self._loop.create_future
        self._checkpoints[counter] = _Checkpoint(new(), new(), new())
        actions = self.member.request(step, dict(metadata), sums, differing)
        assert self.member.counter == counter, (self.member.counter, counter)
        self._do(actions)

    def describe(self, error: BaseException) -> str:
        try:
            return repr(error)
        except Exception:  # noqa: BLE001 - the other ranks wait for this counter all the same
            return type(error).__qualname__

    def request_failed(self, counter: int, step: int, why: str) -> None:
        if counter > self.member.counter:
            self.request(counter, step, {}, {}, ())  # ranks keep counting alike
            self._do(self.member.failed(counter, why))
            del self._checkpoints[counter]

    async def admitted(self, counter: int) -> bool:
        one = self._checkpoints[counter]
        await asyncio.wait((one.admission, one.outcome), return_when=asyncio.FIRST_COMPLETED)
        if one.error is not None:
            raise one.error
        return one.admission.done()

    async def commit(self, written: Written, sample: ReplicaSample | None) -> bool:
        await self._store.finish_data(written)
        entry = written.entry
        one, asked = self._checkpoints[entry.counter], False
        try:
            digests = ({}, {}) if sample is None else await self._call(sample.digest)
            asked = True
            self._do(self.member.written(entry.counter, entry, *digests))
            outcome = await asyncio.shield(one.outcome)
            if one.error is not None:
                raise one.error
            return outcome.outcome == "durable"
        finally:
            if not asked or one.cancelled:  # else a record names it, or is about to
                await self._store.release(written.lease, entry.manifest_offset)

    async def prepared(self, counter: int) -> bool:
        one = self._checkpoints.get(counter)
        return one is not None and await asyncio.shield(one.prepared)

    def ended(self, counter: int, error: Exception | None) -> None:
        if (one := self._checkpoints.pop(counter, None)) is None:
            return
        _set(one.prepared, False)
        if one.cancelled:
            self._do(self.member.released(counter))
        elif error is not None and not one.outcome.done():
            self._do(self.member.failed(counter, str(error), torn=isinstance(error, TornCaptureError)))

    # -- committed checkpoints

    def candidates(self, which: Which, *, dry_run: bool) -> RestoreCandidates:
        ask = partial(self.member.restore.request, which, dry_run=dry_run)
        return AgreedCandidates(self.member, self._parts, self._do, self._restoring, ask)

    @property
    def entries(self) -> Sequence[Entry]:
        """Those of this rank, or of rank 0 if this one has no part, as it ran elsewhere, or not, when it was saved."""
        if not hasattr(self, "member"):
            return ()
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

    @property
    def newest(self) -> Entry | None:
        there = self.entries
        return next((entry for entry in there if not entry.rejected), there[0] if there else None)

    async def pin(self, which: int | str, pinned: bool) -> Entry:
        there = await self._change(partial(self.member.pin, which, pinned))
        return structs.replace(next(entry for entry in there if entry.matches(which)), pinned=pinned)

    async def remove(self, which: int | str, *, force: bool) -> list[Entry]:
        before = self.entries
        await self._change(partial(self.member.remove, which, force=force))
        await self._store.slots.remove_surplus()
        return [entry for entry in before if entry.matches(which)]

    async def reject(
        self, which: int | str, in_flight: Mapping[int, tuple[int, str | None]], until: int
    ) -> list[Entry]:
        """See :meth:`Store.reject`; rank 0 knows the checkpoints in flight.

        Cancellation: raised when it has ended: the others wait for this rank's second request.
        """
        before = self.entries

        async def reject() -> None:
            await self._change(partial(self.member.reject, which, until))
            # A second request, once this rank's own record is durable. Without it: a rank without a part of those
            # checkpoints returns first, all ranks are killed, and no record has the rejection.
            await self._change(partial(self.member.was_rejected, which, until))

        await uninterrupted(reject())
        # The next save may have dropped some by now, and some in flight may have been committed before the decision.
        there = {entry.counter: entry for entry in (*before, *self.entries)}
        rejected = {key.counter for key in self.member.rejected} - {each.counter for each in before if each.rejected}
        return [there[counter].as_rejected() for counter in sorted(rejected & there.keys(), reverse=True)]

    async def _change(self, ask: Callable[[], list[Action]]) -> Sequence[Entry]:
        """Request a change; returns the checkpoints that it left, newest first, when this rank's record has it.

        Raises NoCheckpointError, StoreError, GroupError.
        """
        answer: asyncio.Future[Sequence[Entry]] = self._loop.create_future()
        self._changes[self.member.changes_asked] = answer
        self._do(ask())
        return await answer

    # -- training steps: on the trainer's thread

    def begin_step(self, step: int) -> None:
        self._steps.begin(step)

    def due(self, policy: Policy, report: StepReport, *, preempted: bool) -> StepEnd:
        return self._steps.due(policy, report, preempted=preempted)

    def stopping(self, *, preempted: bool) -> bool:
        return hasattr(self, "_steps") and self._steps.stopped

    def end_steps(self) -> None:
        if hasattr(self, "_steps"):
            self._steps.end()

    # -- the member's actions

    def _do(self, actions: list[Action]) -> None:
        member = self.member
        for action in actions:
            match action:
                case Post():
                    if self._client is not None:  # else this rank has left
                        self._client.post(action.message)
                    if isinstance(action.message, Ok) and (one := self._checkpoints.get(action.message.counter)):
                        _set(one.prepared, True)
                case Admit():
                    if (one := self._checkpoints.get(action.counter)) is not None:
                        _set(one.admission, None)
                case Resolve():
                    if (one := self._checkpoints.get(action.counter)) is not None:
                        _set(one.outcome, action)
                case Cancel():
                    if (one := self._checkpoints.get(action.counter)) is not None:
                        one.cancelled = True
                        if (error := one.error) is not None:  # one that a newer one overtook is written to its end
                            self._end_with(action.counter, error)
                case WriteRecord():
                    writing = write_parts(self._store, action.parts, action.applied)
                    self._start(self._report(writing, lambda _: member.record_durable()))
                case TakeOver():
                    self._start(self._report(self._take_over(action.orphans), member.took_over))
                case Scan():
                    finding = self._call(lambda: list(seen_stores(self._folder)))
                    self._start(self._report(finding, member.found))
                case RemoveOrphans():
                    self._start(self._remove(action.stores))
                case Ready():
                    _set(self._opened, None)
                case Unopened():
                    _set(self._opened, GroupError(action.why))
                case ResolveChange(index, why, refused):
                    left = self._changed.pop(index, ())
                    _set(self._changes.pop(index, None), left if why is None else _REFUSED[refused](why))
                case MatchManifest():
                    for sending in self._parts.sendings(action.key):
                        self._start(sending)
                    self._restoring.put_nowait(action)
                case FillArrays() | ChangeState() | EndRestore():
                    self._restoring.put_nowait(action)
                case Free():
                    pass  # publishing the record freed them
        if member.idle or member.stopped is not None:
            self._idle.set()
        else:
            self._idle.clear()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_task)

    def _note_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note_lost(f"rank {self.member.rank} failed: {error!r}")

    async def _report(self, work: Awaitable[T], done: Callable[[T], list[Action]]) -> None:
        try:
            result = await work
        except Exception as error:  # noqa: BLE001 - reported to all ranks
            self._do(self.member.record_failed(str(error)))
        else:
            self._do(done(result))

    async def _take_over(self, orphans: Sequence[SeenStore]) -> bytes:
        await self._store.take_over_once()
        await self._call(remove_fetched, self._folder / rank_name(self.member.rank))
        for orphan in orphans:
            await self._take_over_orphan(orphan)
        return self._store.file.identity.id_bytes

    async def _take_over_orphan(self, orphan: SeenStore) -> None:
        """Make the record of a store that no rank writes to durable (I12)."""
        path = os.fspath(self._folder / rank_name(orphan.rank))
        opened = await open_medium(path, "auto", writers=1, copiers=1)
        try:
            store = await open_store(
                opened.medium,
                path=path,
                retention=Retention(),
                max_in_flight=1,
                lock_timeout=self._config.storage.lock_timeout,
                version=GROUP_VERSION,
            )
            await store.take_over_once()
        finally:
            await opened.close()

    async def _remove(self, stores: tuple[SeenStore, ...]) -> None:
        for store in stores:
            try:
                await self._call(remove_store, self._folder, store.rank)
            except (OSError, CheckpointError) as error:  # it costs space, and no checkpoint
                path = self._folder / rank_name(store.rank)
                write("surplus", "%s is not needed any more, and cannot be removed: %s", path, error)


def _settings(folder: Path, config: EngineConfig, group: Group) -> str:
    """Return the settings that must be equal on all ranks, as JSON."""
    settings = {
        "folder": folder.name,  # nodes may have it in different places
        "max_in_flight": config.max_in_flight,
        "keep_last": config.keep_last,
        "keep": config.keep,
        "replicated": group.replicated,
        "trusted_replicas": group.trusted_replicas,
    }
    return msgspec.json.encode(settings).decode()


def _set(future: asyncio.Future[Any] | None, result: object) -> None:
    if future is None or future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
