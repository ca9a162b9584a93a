# SPDX-License-Identifier: Apache-2.0
"""The ranks of a group, as the engine of one of them sees them: each answer is agreed on with the others."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import msgspec
from msgspec import structs

from pccheck_async.bucket import BucketState, Upload, shown
from pccheck_async.engine import (
    Connected,
    Draining,
    EngineConfig,
    Memory,
    Peers,
    Policy,
    RestoreCandidates,
    StepEnd,
    StepReport,
    UploadedParts,
    memory_folder,
)
from pccheck_async.errors import (
    CheckpointError,
    GroupError,
)
from pccheck_async.format import Entry, Metadata, Reach, Which
from pccheck_async.format.record import GROUP_NAME, GROUP_VERSION, MOST_ENTRIES
from pccheck_async.group.actions import Action, Post
from pccheck_async.group.candidates import AgreedCandidates, PartSources
from pccheck_async.group.control import Address, Client, Server, name_slow_ranks
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.drain import GroupDrain
from pccheck_async.group.driver import Driver, RestoreAction, Surroundings, set_future
from pccheck_async.group.folder import domain_of, seen_store, wait_for_made
from pccheck_async.group.group import Group
from pccheck_async.group.member import Member
from pccheck_async.group.memory import UNDECIDED, GroupMemory
from pccheck_async.group.messages import AnyDecision, AnyMessage, BucketChanged, Failed, InMemory, NoMoreParts
from pccheck_async.group.steps import Steps
from pccheck_async.group.tiers import set_line
from pccheck_async.group.wire import Listener, local_address
from pccheck_async.medium.files import Files
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.state import Owners, ReplicaSample
from pccheck_async.store import Retention, Source, Store, Written, rank_name
from pccheck_async.telemetry import write
from pccheck_async.transfer import uninterrupted
from pccheck_async.transfer.operations import Operations

__all__ = ["Ranks"]

_GOODBYE_SECONDS: Final = 60.0
"""Seconds that rank 0 waits for the others to leave before it takes the log away."""
_LAST_WORDS_SECONDS: Final = 0.5
"""Seconds that rank 0 waits for the others to leave, if the group is broken or was never opened."""


class Ranks(Peers):
    """The peers of one rank's engine (see :class:`pccheck_async.engine.Peers`).

    A commit is split at its record: the data becomes durable here, then the rank's record names it as prepared, the
    group decides, and a later record applies the decision and frees slots. :class:`.member.Member` returns actions, and
    :class:`.driver.Driver` carries them out. With a memory tier there is one more of both (:mod:`.tiers`); with a drain
    rank 0 owns the bucket (:mod:`.drain`).

    Attributes:
        address: Address of the control plane; set by :meth:`meet`.
        member: This rank's side of the protocol, on disk; set by :meth:`join`.
    """

    collective: ClassVar[bool] = True
    record_version: ClassVar[int] = GROUP_VERSION
    undecided: ClassVar[int] = UNDECIDED
    address: Address
    member: Member
    _loop: asyncio.AbstractEventLoop
    _store: Store
    _disk: Driver
    _steps: Steps
    _parts: PartSources

    def __init__(self, group: Group) -> None:
        self.group = group
        self._restoring: asyncio.Queue[RestoreAction] = asyncio.Queue()
        self._server: Server | None = None  # on rank 0
        self._client: Client | None = None
        self._said_hello = False
        self._memory: GroupMemory | None = None
        self._drain: GroupDrain | None = None
        self._listener: Listener | None = None
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

    def memory_folder(self, path: str, root: Path, store: Store) -> Path:
        folder = Path(path).parent
        domain = domain_of(folder)
        wait_for_made(folder)  # else ranks of one host may get different folders
        return memory_folder(root, folder, domain, GROUP_NAME) / Path(path).name

    @property
    def leads(self) -> bool:
        return self.group.rank == 0

    def meet(self, config: EngineConfig) -> None:
        group = self.group
        if group.rank == 0:
            tier, nonce = config.memory, secrets.randbits(64)
            memory = None
            if tier is not None:
                kept, token = Retention(keep_last=tier.keep_last), secrets.token_bytes(32)
                memory = Coordinator(group.world_size, kept, nonce, replicas=tier.replicas, token=token)
            coordinator = Coordinator(group.world_size, self._retention, nonce, memory)
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
        drain: Draining | None = None,
    ) -> Connected:
        group, folder, self._loop = self.group, Path(path), asyncio.get_running_loop()
        self._folder, self._config, self._store, self._end_with = folder, config, store, end_with
        # On a thread of the engine's, also when the interpreter exits and loops have none any more.
        self._call = operations.call
        own = seen_store(group.rank, store.file.identity, store.committed.record)
        self.member = member = Member(
            group.rank,
            group.world_size,
            max_in_flight=config.max_in_flight,
            reserved=config.retention.reserved,
            own=own,
        )
        report = lambda: self._from_thread(lambda: self._disk.do(member.preempted()))  # noqa: E731
        self._steps = Steps(member.schedule, lambda: member.stopped, self._server, report)
        opened = OpenMedium(operations, Files(folder, operations), "", os.fspath(folder))
        around = self._surroundings(end_with)
        self._disk = disk = Driver(member, store, opened, folder, around)
        if drain is not None:
            self._drain = GroupDrain(drain, disk)
            member.found_bucket = self._drain.found(path, overwrite=config.overwrite)
        domain = await self._call(domain_of, folder)
        await opened.medium.prepare(create=False)
        learn, lost = partial(self._from_thread, self._learn), partial(self._from_thread, self._note_lost)
        # Cancelled meanwhile: it is closed, and nobody else has it.
        self._client = client = await operations.obtain(Client.close, Client, self.address, group.rank, learn, lost)
        if config.memory is not None and config.memory.replicas:  # before hello, and any error is every rank's
            reached = await self._call(local_address, config.memory.interface, client.host)
            self._listener = await self._call(Listener, reached)
        self._said_hello, host = True, socket.gethostname()
        disk.do(member.hello(domain=domain, host=host, settings=_settings(folder, config, group)))
        await disk.ready
        if memory is not None:
            self._memory = GroupMemory(memory, disk, around, self._steps, self._server, operations, self._listener)
            self._memory.note_stopped(member.stopped)  # the group may have broken before there was anything to stop
            await self._memory.open(host)
        self._parts = PartSources(disk, None if self._memory is None else self._memory.driver, client, drain)
        if self._server is not None:
            self._naming = self._loop.create_task(name_slow_ranks(self._server.awaited, folder))
        self._warn_of_incomplete()
        homes = member.homes if self._memory is None else self._memory.homes
        owners = Owners(
            group.rank, homes, group.world_ranks(), group.replicated, group.trusted_replicas, self._differing,
        )  # fmt: skip
        return Connected(member.counter if self._memory is None else self._memory.driver.member.counter, owners)

    def _differing(self) -> frozenset[int]:
        return self.member.differing | (frozenset() if self._memory is None else self._memory.driver.member.differing)

    def _surroundings(self, end_with: Callable[[int, CheckpointError], None]) -> Surroundings:
        def post(message: AnyMessage) -> None:
            if self._client is not None:  # else this rank has left
                self._client.post(message)

        return Surroundings(
            call=self._call,
            post=post,
            agreed=self._restoring,
            sends=lambda action: list(self._parts.sendings(action.key, action.passed)),
            fail=end_with,
            lost=self._note_lost,
            changed=self._note_idle,
            lock_timeout=self._config.storage.lock_timeout,
        )

    def _note_idle(self) -> None:
        members = [self.member, *([] if self._memory is None else [self._memory.driver.member])]
        if all(member.idle or member.stopped is not None for member in members):
            self._idle.set()
        else:
            self._idle.clear()

    def _from_thread(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _warn_of_incomplete(self) -> None:
        """Warn of checkpoints newer than the newest complete one that were complete once, and lack parts now."""
        view = self.member.view
        assert view is not None
        there = view.restorable
        newest = max((one.key.counter for one in there), default=-1)
        for one in view.incomplete:
            if one.committed and one.key.counter > newest and self.member.rank == 0:
                hosts = ", ".join(one.hosts) or "no host of this run"
                text = "the checkpoint of step %d lacks the parts of %s (they run on %s): %s"
                then = "an older one is restored" if there else "no complete one is left to restore"
                write("incomplete", text, one.step, one.lacking, hosts, then, store=os.fspath(self._folder))

    async def unopened(self, error: BaseException) -> None:
        """Report to the other ranks that this one cannot open its store, if it has not said hello.

        Blocks the engine's loop, which has nothing else to do now.
        """
        if self._said_hello:  # this rank leaves
            return
        failed = Failed(self.group.rank, -1, f"rank {self.group.rank} cannot open its store: {error}", latched=True)
        if self._server is not None:
            self._server.decide(lambda coordinator: coordinator.receive(failed))  # its store stays, to be read
            self._server.close(0.0)
        elif hasattr(self, "address"):
            with suppress(CheckpointError):  # the others wait for this rank, which could not open its store
                client = Client(self.address, self.group.rank, lambda _: None, lambda _: None)
                client.post(failed)
                client.close()

    def leaving(self) -> None:
        if self._memory is not None:  # before the newest one there is written to disk, which all ranks do together
            self._memory.driver.do(self._memory.driver.member.leave())

    async def leave(self, seconds: float | None) -> None:
        """Announce that this rank leaves, and apply all decisions so far, for at most ``seconds``."""
        if hasattr(self, "member") and self._client is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_SECONDS if seconds is None else seconds):
                    self._disk.do(self.member.leave())
                    await self._idle.wait()
                    while tasks := self._disk.tasks | (set() if self._memory is None else self._memory.driver.tasks):
                        await asyncio.wait(tasks)

    async def disconnect(self, seconds: float | None) -> None:
        """End the connection to rank 0, and on rank 0 wait for the others; at most ``seconds``."""
        if hasattr(self, "member"):
            await self._disconnect(_GOODBYE_SECONDS if seconds is None else seconds)

    async def cut_short(self) -> None:
        await self._disconnect(_LAST_WORDS_SECONDS)
        if self._memory is not None:  # checkpoints that are cancelled wait for the decisions there, which do not come
            self._memory.driver.do(self._memory.driver.member.lost("closing was cancelled", self.member.rank))

    async def _disconnect(self, limit: float) -> None:
        if self._naming is not None:
            self._naming.cancel()
        if self._memory is not None and (replicas := self._memory.driver.replicas) is not None:
            await uninterrupted(replicas.close())
        elif self._listener is not None:
            await uninterrupted(self._listener.close())
        for answer in self._disk.changes.values():
            set_future(answer, GroupError("this rank left before all ranks had asked for this change"))
        if self._drain is not None:
            self._disk.around.post(NoMoreParts(self.member.rank))
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
        set_future(self._disk.ready, GroupError(why))
        if self._drain is not None:
            self._drain.lost(why)
        with self._steps.changed:
            actions = self.member.lost(why)
            also = [] if self._memory is None else self._memory.driver.member.lost(why)
            self._steps.changed.notify_all()
        # The others wait for this rank's parts, if rank 0 is still there.
        self._disk.do([*actions, Post(Failed(self.member.rank, self.member.counter, why, latched=True))])
        if self._memory is not None:
            self._memory.driver.do(also)

    def _learn(self, decision: AnyDecision) -> None:
        driver = self._disk
        try:
            if isinstance(decision, InMemory):
                if self._memory is None:
                    raise GroupError("there is no tier in memory here")
                driver, decision = self._memory.driver, decision.decision
            with self._steps.changed:
                actions = driver.learn(decision)
                self._steps.changed.notify_all()
            driver.do(actions)
            if self._drain is not None and driver is self._disk:
                self._drain.learn(decision)
        except Exception as error:  # noqa: BLE001 - else its waiting callers wait for ever
            name = type(decision).__name__
            self._note_lost(f"rank {self.member.rank} cannot take a decision in ({name}: {error!r})")
        if self.member.stopped is not None:
            set_future(self._disk.ready, GroupError(self.member.stopped.why))
        if self._memory is not None:
            self._memory.note_stopped(self.member.stopped)

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
        if on_disk:
            self._disk.begin(counter)
        if self._memory is None:
            self._set_line()
            actions = self.member.request(step, dict(metadata), sums, differing)
            assert self.member.counter == counter, (self.member.counter, counter)
        else:
            actions = self._memory.request(counter, step, dict(metadata), sums, differing, on_disk=on_disk)
        self._disk.do(actions)

    def _set_line(self, *, unrestored: bool = False) -> None:
        """Set the line of a run with a drain; with a memory tier :class:`.tiers.Tiers` does."""
        if self._drain is not None and (view := self.member.view) is not None:
            set_line(self.member, view, unrestored=unrestored)

    def describe(self, error: BaseException) -> str:
        try:
            return repr(error)
        except Exception:  # noqa: BLE001 - the other ranks wait for this counter all the same
            return type(error).__qualname__

    def request_failed(self, counter: int, step: int, why: str, *, on_disk: bool = True) -> None:
        # One for memory alone is no request to the disk's member.
        if counter > (self.member if self._memory is None else self._memory.driver.member).counter:
            self.request(counter, step, {}, {}, (), on_disk=on_disk)  # ranks keep counting alike
            self.ended(counter, CheckpointError(why))

    async def admitted(self, counter: int) -> bool:
        return await self._disk.admitted(counter)

    async def commit(self, written: Written, sample: ReplicaSample | None) -> bool:
        await self._store.finish_data(written)
        return await self._disk.decided(written, sample)

    async def prepared(self, counter: int) -> bool:
        return await self._disk.prepared(counter)

    def ended(self, counter: int, error: Exception | None) -> None:
        self._disk.ended(counter, error)
        self.ended_in_memory(counter, error)

    async def admitted_in_memory(self, counter: int) -> bool:
        assert self._memory is not None
        return await self._memory.admitted(counter)

    async def commit_in_memory(self, written: Written, sample: ReplicaSample | None) -> asyncio.Future[bool]:
        assert self._memory is not None
        return await self._memory.commit(written, sample)

    def in_replicas(self, counter: int) -> asyncio.Future[None] | None:
        replicas = None if self._memory is None else self._memory.driver.replicas
        return None if replicas is None else replicas.reached(counter)

    @property
    def degraded(self) -> str:
        replicas = None if self._memory is None else self._memory.driver.replicas
        return "" if replicas is None else replicas.degraded

    def ended_in_memory(self, counter: int, error: Exception | None) -> None:
        if self._memory is not None:
            self._memory.ended(counter, error)

    # -- the drain

    def parts_to_send(self, counter: int) -> Mapping[int, Source]:
        assert self._drain is not None
        return self._drain.parts_to_send(counter)

    async def upload(self, request: Upload) -> UploadedParts:
        assert self._drain is not None
        return await self._drain.upload(request)

    def publish_bucket(self, state: BucketState) -> None:
        self._disk.around.post(BucketChanged(self.group.rank, state))

    # -- committed checkpoints

    def note_restored(self, counter: int, source: Reach) -> None:
        if self._drain is not None and source == "remote":
            self._drain.draining.note_restored(counter)

    def candidates(self, which: Which, *, dry_run: bool) -> RestoreCandidates:
        ask = partial(self.member.restore.request, which, dry_run=dry_run)
        driver = self._disk if self._memory is None else self._memory.driver
        return AgreedCandidates(
            driver.member, lambda: self.member.stopped, self._parts, driver.do, self._restoring, ask
        )

    @property
    def entries(self) -> Sequence[Entry]:
        """Durable checkpoints, newest first, as in :attr:`.driver.Driver.entries`; none before the join."""
        return self._disk.entries if hasattr(self, "_disk") else ()

    @property
    def in_memory(self) -> Sequence[Entry]:
        return () if self._memory is None else self._memory.entries

    @property
    def unsaved(self) -> Entry | None:
        return None if self._memory is None else self._memory.unsaved

    def request_unsaved(self, entry: Entry) -> None:
        self._disk.begin(entry.counter)
        self._disk.do(self.member.request(entry.step, entry.metadata, counter=entry.counter))

    @property
    def disposable_memory(self) -> bool:
        return self._memory is not None and self._memory.is_disposable

    @property
    def newest(self) -> Entry | None:
        there = self.entries
        return next((entry for entry in there if not entry.rejected), there[0] if there else None)

    async def pin(self, which: int | str, pinned: bool) -> Entry:
        there = await self._change(partial(self.member.pin, which, pinned))
        return structs.replace(next(entry for entry in there if entry.matches(which)), pinned=pinned)

    @property
    def _in_any_tier(self) -> list[Entry]:
        """All committed checkpoints, on disk and in memory, newest first."""
        there = {entry.counter: entry for entry in (*self.in_memory, *self.entries)}
        return [there[counter] for counter in sorted(there, reverse=True)]

    async def remove(self, which: int | str, *, force: bool) -> list[Entry]:
        before, in_bucket = self._in_any_tier, [] if self._drain is None else self._drain.draining.entries
        removed = [entry for entry in before if entry.matches(which)]

        async def remove() -> None:
            await self._change(partial(self.member.remove, which, force=force))
            if self._drain is not None:
                gone = [*removed, *(entry for entry in in_bucket if entry.matches(which))]
                self._drain.draining.note_dropped(entry.counter for entry in gone)
            await self._store.slots.remove_surplus()

        await uninterrupted(remove())
        return removed

    async def reject(
        self, which: int | str, in_flight: Mapping[int, tuple[int, str | None]], until: int
    ) -> list[Entry]:
        """Reject checkpoints from one on, as :meth:`Store.reject`. ``in_flight`` is not used: rank 0 knows these.

        Cancellation: raised when the rejection has ended: the other ranks wait for this rank's second request.
        """
        before = self._in_any_tier

        async def reject() -> None:
            await self._change(partial(self.member.reject, which, until))
            # A second request, once this rank's own record is durable. Without it: a rank without a part of those
            # checkpoints returns first, all ranks are killed, and no record has the rejection.
            await self._change(partial(self.member.was_rejected, which, until))

        await uninterrupted(reject())
        # The next save may have dropped some by now, and some in flight may have been committed before the decision.
        there = {entry.counter: entry for entry in (*before, *self.entries)}
        rejected = {key.counter for key in self.member.rejected} - {each.counter for each in before if each.rejected}
        if self._drain is not None:
            self._drain.draining.note_dropped(rejected)
        return [there[counter].as_rejected() for counter in sorted(rejected & there.keys(), reverse=True)]

    async def _change(self, ask: Callable[[], list[Action]]) -> Sequence[Entry]:
        """Request a change by the actions of ``ask``; return the checkpoints that it left, newest first.

        Returns when this rank's records on disk and in memory have the change. Raises NoCheckpointError, StoreError,
        GroupError.
        """
        if self._memory is None:
            self._set_line(unrestored=True)
            return await self._disk.change(ask)
        followed = self._memory.follow(self.member.changes_asked)
        left = await self._disk.change(ask)
        await followed  # else a restart may find in memory what is gone on disk
        return left

    # -- training steps: on the trainer's thread

    def begin_step(self, step: int) -> None:
        self._steps.begin(step)

    def due(self, policy: Policy, report: StepReport, *, preempted: bool) -> StepEnd:
        return self._steps.due(policy, report, preempted=preempted)

    def due_in_memory(self, policy: Policy, report: StepReport) -> bool:
        return self._memory is not None and self._memory.steps.due(policy, report, preempted=False).save

    def stopping(self, *, preempted: bool) -> bool:
        return hasattr(self, "_steps") and self._steps.stopped

    def end_steps(self) -> None:
        if hasattr(self, "_steps"):
            self._steps.end()


def _settings(folder: Path, config: EngineConfig, group: Group) -> str:
    """Return the settings that must be equal on all ranks, as JSON."""
    settings = {
        "folder": folder.name,  # nodes may have it in different places
        "max_in_flight": config.max_in_flight,
        "keep_last": config.keep_last,
        "keep": config.keep,
        "replicated": group.replicated,
        "trusted_replicas": group.trusted_replicas,
        "memory": None if config.memory is None else config.memory.keep_last,
        "replicas": None if config.memory is None else config.memory.replicas,
        "drain": None if config.drain is None else (shown(config.drain.url), config.drain.keep_last),
    }
    return msgspec.json.encode(settings).decode()
