"""One opening of a group on one rank: carries out its member's actions, on the engine's loop."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import structs

from pccheck_async.engine import EngineConfig
from pccheck_async.errors import CheckpointError, GroupError, NoCheckpointError, ReplicasDifferError, StoreError
from pccheck_async.format import Entry, Key, Metadata, Which
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
from pccheck_async.group.control import Address, Client, Server
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.elsewhere import ReceivedPart, remove_fetched, send_part
from pccheck_async.group.folder import domain_of, remove_store, seen_stores, write_parts
from pccheck_async.group.member import Member
from pccheck_async.group.messages import AnyDecision, AnyMessage, Failed, Ok, Preempted
from pccheck_async.group.parts import SeenStore
from pccheck_async.group.schedule import Verdict
from pccheck_async.group.slow import name_slow_ranks
from pccheck_async.group.view import Complete
from pccheck_async.medium.files import Files
from pccheck_async.medium.open_medium import OpenMedium, open_medium
from pccheck_async.store import FolderPart, OwnSlot, Retention, Source, Store, open_store, rank_name
from pccheck_async.telemetry import write
from pccheck_async.transfer import uninterrupted
from pccheck_async.transfer.operations import Operations

__all__ = ["GroupRun", "group_retention", "serve"]

_REFUSED = {"missing": NoCheckpointError, "refused": StoreError, "lost": GroupError}
_GOODBYE_SECONDS = 60.0
"""Seconds that rank 0 waits for the others to leave before it takes the log away."""


class GroupRun:
    """One rank's work between opening and closing. Methods run on the engine's loop, but for those of the schedule.

    Args:
        folder: The group's.
        rank: This one.
        world: Ranks in the group.
        config: Of the engine.
        store: This rank's.
        own: Of its newest record.
        cancel: Ends a checkpoint that is being written with an error.
        operations: Of the engine: they read the parts of other ranks, and call blocking functions on a thread, also
            when the interpreter exits and loops have none any more.

    Attributes:
        call: Calls a blocking function on a thread of ``operations``.
        server: On rank 0: the control plane.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world: int,
        config: EngineConfig,
        store: Store,
        own: SeenStore,
        cancel: Callable[[int, CheckpointError], None],
        operations: Operations,
    ) -> None:
        self._folder = folder
        self._config = config
        self._store = store
        self._cancel = cancel
        self.call = operations.call
        self._opened_folder = OpenMedium(operations, Files(folder, operations), "")
        self._loop = asyncio.get_running_loop()
        self.member = Member(
            rank, world, max_in_flight=config.max_in_flight, reserved=config.retention.reserved, own=own
        )
        self.server: Server | None = None
        self._client: Client | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._admissions: dict[int, asyncio.Future[None]] = {}
        self._outcomes: dict[int, asyncio.Future[Resolve]] = {}
        self._prepared: dict[int, asyncio.Future[bool]] = {}
        self._cancelled: set[int] = set()
        self._changes: dict[int, asyncio.Future[None]] = {}
        self._changes_asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._naming: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._scheduled = threading.Condition()  # held around every use of the schedule
        self._published: int | None = None
        self._preempted = False
        self.restoring: asyncio.Queue[MatchManifest | FillArrays | ChangeState | EndRestore] = asyncio.Queue()

    # -- opening

    async def join(self, address: Address) -> None:
        """Meet the other ranks, and agree on the checkpoints.

        Raises GroupError: they do not fit together, or did not come in time.
        """
        loop, member = self._loop, self.member

        def learn(decision: AnyDecision) -> None:
            loop.call_soon_threadsafe(self._learn, decision)

        def lost(why: str) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._note_lost, why)

        domain = await self.call(domain_of, self._folder)
        await self._opened_folder.medium.prepare(create=False)
        self._client = await self.call(Client, address, member.rank, learn, lost)
        self._do(member.hello(domain=domain, host=socket.gethostname(), settings=_settings(self._folder, self._config)))
        await self._opened
        if self.server is not None:
            self._naming = loop.create_task(name_slow_ranks(self.server.awaited, self._folder))
        self._warn_of_incomplete()

    def _warn_of_incomplete(self) -> None:
        """Warn of checkpoints newer than the newest complete one were complete once, and lack parts now."""
        view = self.member.view
        assert view is not None
        newest = view.complete[0].key.counter if view.complete else -1
        for one in view.incomplete:
            if one.committed and one.key.counter > newest and self.member.rank == 0:
                hosts = ", ".join(one.hosts) or "no host of this run"
                text = "the checkpoint of step %d lacks the parts of %s (they run on %s): an older one is restored"
                write("incomplete", text, one.step, one.lacking, hosts, store=os.fspath(self._folder))

    def _note_lost(self, why: str) -> None:
        if not self._opened.done():
            self._opened.set_exception(GroupError(why))
        with self._scheduled:
            actions = self.member.lost(why)
            self._scheduled.notify_all()
        # The others wait for this rank's parts, if rank 0 is still there.
        self._do([*actions, Post(Failed(self.member.rank, self.member.counter, why, latched=True))])

    def _learn(self, decision: AnyDecision) -> None:
        try:
            with self._scheduled:
                actions = self.member.learn(decision)
                self._scheduled.notify_all()
            self._do(actions)
        except Exception as error:  # noqa: BLE001 - else its waiting callers wait for ever
            name = type(decision).__name__
            self._note_lost(f"rank {self.member.rank} cannot take a decision in ({name}: {error!r})")
        if self.member.stopped is not None and not self._opened.done():
            self._opened.set_exception(GroupError(self.member.stopped.why))

    # -- called by the engine

    def complete(self) -> list[Entry]:
        """Return the entries of the checkpoints that are complete and kept, newest first.

        Those of this rank, or of rank 0 if this one has no part, as it ran elsewhere, or not, when they were saved.
        """
        member, found = self.member, []
        there = {one.key: one.entry for one in member.view.complete} if member.view is not None else {}
        for key in there if member.run is None else member.keep:  # None: nothing was saved in this run
            if key in member.parts:
                found.append(member.parts[key].entry)
            elif key in there:
                found.append(structs.replace(there[key], pinned=member.keep.get(key, there[key].pinned)))
            if key in member.rejected and key in {*member.parts, *there}:
                found[-1] = found[-1].as_rejected()
        return sorted(found, key=lambda entry: -entry.counter)

    def source(self, key: Key) -> Source | None:
        """Return the source of the part that this rank restores; None if it is gone."""
        member = self.member
        if not self.has_world_of(key) and member.rank == 0:
            old = len(self._places(key))
            text = (
                "this checkpoint is of %d ranks, here are %d: what was each rank's own, rank r restores of rank r "
                "modulo %d; RNGState stays as it is"
            )
            write("other_world", text, old, member.world, old, store=os.fspath(self._folder))
        if (part := member.parts.get(key)) is not None:
            return OwnSlot(self._store, part.entry)
        if (found := self._complete(key)) is None:
            return None
        source, domain = _source(found, member.rank)
        if domain == member.homes[member.rank]:
            return FolderPart(self._opened_folder, rank_name(source), key)
        assert self._client is not None
        prefix, own = self._prefix(member.rank), rank_name(member.rank)
        return ReceivedPart(self._client.another(), prefix, self._opened_folder, self._folder, own)

    def sources(self, key: Key) -> tuple[dict[int, Source], list[int]]:
        """Return the sources of the parts in this rank's domain, by rank, and the ranks whose parts are not in it."""
        member, sources, elsewhere = self.member, dict[int, Source](), []
        for rank, domain in enumerate(self._places(key)):
            if domain != member.homes[member.rank]:
                elsewhere.append(rank)
            elif rank == member.rank and key in member.parts:
                sources[rank] = OwnSlot(self._store, member.parts[key].entry)
            else:
                sources[rank] = FolderPart(self._opened_folder, rank_name(rank), key)
        return sources, elsewhere

    def has_world_of(self, key: Key) -> bool:
        """Whether a checkpoint is of as many ranks as there are now."""
        return len(self._places(key)) == self.member.world

    def own_part(self, key: Key) -> int:
        """Return the rank whose part this rank restores."""
        return self.member.rank % len(self._places(key))

    def _places(self, key: Key) -> tuple[int, ...]:
        """Return the domain of each part of a complete checkpoint: parts of this run are in their ranks' domains."""
        found = self._complete(key)
        return self.member.homes if found is None else found.places

    def _complete(self, key: Key) -> Complete | None:
        complete = self.member.view.complete if self.member.view is not None else ()
        return next((one for one in complete if one.key == key), None)

    def _prefix(self, rank: int) -> str:
        """Return the prefix of the keys under which a rank receives the part that it restores."""
        return f"part/{self.member.restore.index}/{self.member.restore.attempt}/{rank}"

    def _send_parts(self, key: Key) -> None:
        """Send the parts that other hosts restore and only this one has."""
        member, found = self.member, self._complete(key)
        if found is None:
            return
        for rank, home in enumerate(member.homes):
            source, domain = _source(found, rank)
            if domain != home and member.homes.index(domain) == member.rank:
                assert self._client is not None
                part = FolderPart(self._opened_folder, rank_name(source), key)
                self._start(send_part(self._client.another(), self._prefix(rank), part))

    def request(
        self, counter: int, step: int, metadata: Metadata, sums: Mapping[str, int], differing: Collection[int]
    ) -> None:
        """Request a checkpoint, in the order of counters."""
        self._admissions[counter] = self._loop.create_future()
        self._outcomes[counter] = self._loop.create_future()
        self._prepared[counter] = self._loop.create_future()
        actions = self.member.request(step, dict(metadata), sums, differing)
        assert self.member.counter == counter, (self.member.counter, counter)
        self._do(actions)

    def request_failed(self, counter: int, step: int, why: str) -> None:
        """Request a checkpoint that failed already, so that ranks keep counting alike."""
        self.request(counter, step, {}, {}, ())
        self._do(self.member.failed(counter, why))
        del self._admissions[counter], self._outcomes[counter], self._prepared[counter]

    async def admitted(self, counter: int) -> None:
        """Wait until a checkpoint may be written. Raises GroupError: it ended before."""
        admission, outcome = self._admissions[counter], self._outcomes[counter]
        await asyncio.wait((admission, outcome), return_when=asyncio.FIRST_COMPLETED)
        if outcome.done() and (error := _error(outcome.result())) is not None:
            raise error

    async def decided(self, entry: Entry, replicas: Mapping[int, tuple[int, int]], digests: Mapping[str, int]) -> bool:
        """Report that all of a checkpoint is durable in its slot; return whether it committed, False: superseded.

        The last two arguments are those of :class:`Ok` and :class:`Digests`.
        """
        self._do(self.member.written(entry.counter, entry, replicas, digests))
        outcome = await asyncio.shield(self._outcomes[entry.counter])
        if (error := _error(outcome)) is not None:
            raise error
        return outcome.outcome == "durable"

    async def prepared(self, counter: int) -> bool:
        """Wait until this rank's durable record names its part of a checkpoint; False if it ended before that."""
        prepared = self._prepared.get(counter)
        return prepared is not None and await asyncio.shield(prepared)

    def is_cancelled(self, counter: int) -> bool:
        """Whether the group decided about a checkpoint before a record of this rank could name it."""
        return counter in self._cancelled

    def note_end(self, counter: int, error: Exception | None) -> None:
        """Called when nothing of a checkpoint is being written any more."""
        self._admissions.pop(counter, None)
        outcome = self._outcomes.pop(counter, None)
        _set(self._prepared.pop(counter, None), False)
        if counter in self._cancelled:
            self._cancelled.discard(counter)
            self._do(self.member.released(counter))
        elif error is not None and outcome is not None and not outcome.done():
            self._do(self.member.failed(counter, str(error)))

    async def pin(self, step: int, pinned: bool) -> None:
        """Pin or unpin; returns when this rank's record has it. Raises NoCheckpointError, GroupError."""
        await self._change(partial(self.member.pin, step, pinned))

    async def remove(self, which: int | str, *, force: bool) -> None:
        """Remove checkpoints; returns when this rank's record has it. Raises StoreError, GroupError."""
        await self._change(partial(self.member.remove, which, force=force))

    async def reject(self, step: int, until: int) -> None:
        """Reject checkpoints; returns when the records of all ranks have it. Raises the errors of :meth:`remove`.

        Cancellation: raised when it has ended: the others wait for this rank's second request.
        """
        await uninterrupted(self._reject(step, until))

    async def _reject(self, step: int, until: int) -> None:
        await self._change(partial(self.member.reject, step, until))
        # Each rank requests this once its own record is durable. Without it: a rank that has no part of them returns
        # first, all are killed, and no record has the rejection.
        await self._change(partial(self.member.was_rejected, step, until))

    async def _change(self, ask: Callable[[], list[Action]]) -> None:
        answer = self._changes[self._changes_asked] = self._loop.create_future()
        self._changes_asked += 1
        self._do(ask())
        await answer

    async def ask_restore(self, which: Which) -> None:
        """Request the newest checkpoint, or that of a step or name; the answers come by :attr:`restoring`."""
        if self.member.stopped is not None:
            raise GroupError(self.member.stopped.why)
        self._do(self.member.restore.request(which))

    async def tell_matched(self, outcome: Literal["ok", "mismatch", "damaged"], why: str) -> None:
        """Report how this rank's part of the candidate compares with its state."""
        self._do(self.member.restore.matched(outcome, why))

    async def tell_ended(self, why: str) -> None:
        """Report that this rank's call ended before all agreed: no later call receives its decisions."""
        while not self.restoring.empty():
            self.restoring.get_nowait()
        self._do(self.member.restore.abandon(why))

    async def tell_verified(self, damage: str | None, differing: Collection[int]) -> None:
        """Report whether this rank's part of the candidate is whole, and which ranks saved different replicas."""
        self._do(self.member.restore.verified(damage, differing))

    # -- the schedule: called on the trainer's thread

    def begin_step(self, step: int) -> None:
        """Called when the trainer begins a step."""
        with self._scheduled:
            self.member.schedule.begin(step)
            if self.server is not None:
                self.server.step = step

    def at_end(self, step: int) -> Verdict:
        """Return the verdict for the end of a step."""
        with self._scheduled:
            return self.member.schedule.at_end(step)

    def lacks_schedule(self, step: int) -> bool:
        """On rank 0: whether no step behind this one is scheduled."""
        published = self._published
        return published is None or published <= step

    def publish(self, step: int, *, save: bool) -> None:
        """On rank 0: schedule the next step."""
        assert self.server is not None
        self._published = step
        self.server.decide(lambda coordinator: coordinator.schedule.publish(step, save=save))

    def wait_for_schedule(self, step: int) -> None:
        """Block until the schedule covers the step. Raises GroupError: it never will."""
        with self._scheduled:
            while True:
                if (stopped := self.member.stopped) is not None:
                    raise GroupError(stopped.why)
                if self.member.schedule.at_end_waits(step):
                    self._scheduled.wait()
                else:
                    return

    def tell_preempted(self) -> None:
        """Report that this rank was preempted; once."""
        if not self._preempted:
            self._preempted = True
            self._loop.call_soon_threadsafe(self._post, Preempted(self.member.rank))

    def _post(self, message: AnyMessage) -> None:
        self._do([Post(message)])

    def end_schedule(self) -> None:
        """Called when this rank makes no more steps."""
        with self._scheduled:
            self.member.schedule.end()

    async def leave(self, seconds: float | None, why: str | None = None) -> None:
        """Apply all decisions, say goodbye, and on rank 0 wait for the others; at most ``seconds``."""
        limit = _GOODBYE_SECONDS if seconds is None else seconds
        if self._client is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    self._do(self.member.leave(why))
                    await self._idle.wait()
                    while self._tasks:
                        await asyncio.wait(set(self._tasks))
        if self._naming is not None:
            self._naming.cancel()
        for answer in self._changes.values():
            if not answer.done():
                answer.set_exception(GroupError("this rank left before all ranks had asked for this change"))
        client, server, self._client = self._client, self.server, None
        if client is not None:
            await uninterrupted(self.call(client.close))
        if server is not None:
            wait = limit if self.member.view is not None and self.member.stopped is None else 0.0
            if (remaining := await uninterrupted(self.call(server.close, wait))) and wait:
                text = "rank 0 of the group of %s goes although ranks %s have not left"
                write("group_left", text, self._folder, ", ".join(map(str, remaining)))

    # -- the member's actions

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Post():
                    if self._client is not None:  # else this rank has left
                        self._client.post(action.message)
                    if isinstance(action.message, Ok):
                        _set(self._prepared.get(action.message.counter), True)
                case Admit():
                    _set(self._admissions.get(action.counter), None)
                case Resolve():
                    _set(self._outcomes.get(action.counter), action)
                case Cancel():
                    self._cancelled.add(action.counter)
                    outcome = self._outcomes.get(action.counter)
                    # One that a newer one overtook is written to its end: it did not fail.
                    if outcome is not None and outcome.done() and (error := _error(outcome.result())) is not None:
                        self._cancel(action.counter, error)
                case WriteRecord():
                    self._start(self._write_record(action))
                case TakeOver():
                    self._start(self._take_over(action))
                case Scan():
                    self._start(self._scan())
                case RemoveOrphans():
                    self._start(self._remove(action.stores))
                case Ready():
                    _set(self._opened, None)
                case Unopened():
                    if not self._opened.done():
                        self._opened.set_exception(GroupError(action.why))
                case ResolveChange():
                    answer = self._changes.pop(action.index, None)
                    if action.why is None:
                        _set(answer, None)
                    elif answer is not None and not answer.done():
                        answer.set_exception(_REFUSED[action.refused](action.why))
                case MatchManifest():
                    self._send_parts(action.key)
                    self.restoring.put_nowait(action)
                case FillArrays() | ChangeState() | EndRestore():
                    self.restoring.put_nowait(action)
                case Free():
                    pass  # publishing the record freed them
        self._look_idle()

    def _look_idle(self) -> None:
        if self.member.idle or self.member.stopped is not None:
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

    async def _write_record(self, action: WriteRecord) -> None:
        try:
            await write_parts(self._store, action.parts, action.applied)
        except Exception as error:  # noqa: BLE001 - reported to all ranks
            self._do(self.member.record_failed(str(error)))
        else:
            self._do(self.member.record_durable())

    async def _take_over(self, action: TakeOver) -> None:
        try:
            async with self._store.slots.lock:
                self._store.latch.check()
                await self._store.take_over()
            await self.call(remove_fetched, self._folder / rank_name(self.member.rank))
            for orphan in action.orphans:
                await self._take_over_orphan(orphan)
        except Exception as error:  # noqa: BLE001 - reported to all ranks
            self._do(self.member.record_failed(str(error)))
        else:
            self._do(self.member.took_over(self._store.file.identity.id_bytes))

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
                lock_timeout=self._config.lock_timeout,
                version=GROUP_VERSION,
            )
            async with store.slots.lock:
                await store.take_over()
        finally:
            await opened.close()

    async def _scan(self) -> None:
        try:
            found = await self.call(lambda: list(seen_stores(self._folder)))
        except Exception as error:  # noqa: BLE001 - reported to all ranks
            self._do(self.member.record_failed(str(error)))
        else:
            self._do(self.member.found(found))

    async def _remove(self, stores: tuple[SeenStore, ...]) -> None:
        for store in stores:
            try:
                await self.call(remove_store, self._folder, store.rank)
            except (OSError, CheckpointError) as error:  # it costs space, and no checkpoint
                path = self._folder / rank_name(store.rank)
                write("surplus", "%s is not needed any more, and cannot be removed: %s", path, error)


def _settings(folder: Path, config: EngineConfig) -> str:
    """Return the settings that must be equal on all ranks, as JSON."""
    best = config.retention.keep_best
    settings = {
        "folder": folder.name,  # nodes may have it in different places
        "max_in_flight": config.max_in_flight,
        "keep_last": config.keep_last,
        "keep_every": config.keep_every,
        "replicated": [*config.replicated],
        "trusted_replicas": [*config.trusted_replicas],
        "keep_best": None if best is None else (best.metric, best.count, best.mode),
        "spaced": config.retention.spaced,
    }
    return msgspec.json.encode(settings).decode()


def _source(found: Complete, rank: int) -> tuple[int, int]:
    """Return the rank whose part a rank restores, and the domain of that part."""
    source = rank % found.world
    return source, found.places[source]


def serve(world: int, config: EngineConfig, seconds: float) -> Server:
    """Start the control plane, on rank 0; all have to come within so many seconds."""
    return Server(Coordinator(world, group_retention(config), secrets.randbits(64)), world, seconds)


def group_retention(config: EngineConfig) -> Retention:
    """Return the rules, with room for the prepared checkpoints in records. Raises ValueError: it does not fit."""
    return replace(config.retention, most=MOST_ENTRIES - 2 * config.max_in_flight)


def _set(future: asyncio.Future[Any] | None, result: object) -> None:
    if future is not None and not future.done():
        future.set_result(result)


def _error(resolved: Resolve) -> GroupError | None:
    if resolved.outcome not in ("failed", "differs"):
        return None
    who = f"rank {resolved.rank}: " if resolved.rank >= 0 else ""
    kind = GroupError if resolved.outcome == "failed" else ReplicasDifferError
    return kind(f"the checkpoint {resolved.counter} of the group failed: {who}{resolved.why}")
