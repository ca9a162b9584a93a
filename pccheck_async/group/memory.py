# SPDX-License-Identifier: Apache-2.0
"""The memory tier of one rank: a store of its own on tmpfs, on whose checkpoints the ranks vote as on those on disk.

The stores of one host lie in one folder, whose name follows from the group's folder on disk as this host sees it. Ranks
tell hosts apart by the tmpfs, not by a file in that folder, as the last rank that leaves removes the folder.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pccheck_async.engine import Memory, note_ignored
from pccheck_async.errors import CheckpointError, GroupError
from pccheck_async.format import Entry, Key
from pccheck_async.group.actions import Action
from pccheck_async.group.control import Server
from pccheck_async.group.driver import Driver, Surroundings, set_future
from pccheck_async.group.folder import seen_store
from pccheck_async.group.member import Member
from pccheck_async.group.messages import Broken, Failed, Metadata, about_memory
from pccheck_async.group.parts import link_to
from pccheck_async.group.replicas import Replicas
from pccheck_async.group.steps import Steps
from pccheck_async.group.tiers import Tiers
from pccheck_async.group.wire import Listener
from pccheck_async.medium.files import Files
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.state import ReplicaSample
from pccheck_async.store import Written
from pccheck_async.transfer.operations import Operations

__all__ = ["UNDECIDED", "GroupMemory"]

UNDECIDED = 2
"""Most checkpoints in memory that are being written, or wait for the decision, beside the last one decided about."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class GroupMemory:
    """One rank's side of the memory tier.

    Args:
        memory: The memory tier, whose store is open.
        disk: The driver of the disk, with which the group is open.
        around: The surroundings of that driver.
        steps: The training steps of the disk.
        server: The control plane, on rank 0; else None.
        operations: The engine's threads.
        listener: Takes connections for copies of other ranks' checkpoints; None if there are to be no copies.
    """

    def __init__(
        self,
        memory: Memory,
        disk: Driver,
        around: Surroundings,
        steps: Steps,
        server: Server | None,
        operations: Operations,
        listener: Listener | None,
    ) -> None:
        self._memory = memory
        self._disk = disk
        other, store, folder = disk.member, memory.store, memory.folder.parent
        own = seen_store(other.rank, store.file.identity, store.committed.record)
        reserved = store.committed.retention.reserved
        replicas = 0 if listener is None else memory.tier.replicas
        member = Member(
            other.rank, other.world, max_in_flight=UNDECIDED, reserved=reserved, own=own, in_memory=True,
            replicas=replicas,
        )  # fmt: skip
        self.tiers = Tiers(other, member)
        opened = OpenMedium(operations, Files(folder, operations), "", os.fspath(folder))
        around = replace(
            around,
            post=lambda message: post(about_memory(message)),
            fail=lambda *_: None,
            lost=lambda why: memory.turn_off(GroupError(why)),
        )
        self.driver = Driver(member, store, opened, folder, around)
        post = disk.around.post
        self._address = None if listener is None else listener.address
        if listener is not None:
            self.driver.replicas = Replicas(memory.tier, member, memory, operations, self.driver.do, listener)
        self.steps = Steps(member.schedule, lambda: member.stopped, server, disk=steps)
        memory.on_off = lambda why: self.driver.do(member.record_failed(why))

    async def open(self, host: str) -> None:
        """Meet the other ranks in this tier. Raises GroupError. Logs which checkpoints in memory are not valid."""
        driver = self.driver
        try:
            await driver.opened.medium.prepare(create=False)
            domain = await driver.around.call(_domain_of, driver.folder)
        except BaseException as error:  # the others wait for this rank
            why = f"rank {driver.member.rank} cannot open its tier in memory: {error!r}"
            self._disk.around.post(Failed(driver.member.rank, -1, why, latched=True))
            raise
        driver.do(driver.member.hello(domain=domain, host=host, settings="", address=self._address))
        await driver.ready
        if driver.not_scanned is not None:
            self._memory.turn_off(driver.not_scanned)
        if driver.replicas is not None:
            await driver.replicas.open()
        view, bucket, parts = self._disk.member.view, self._disk.member.bucket, driver.member.parts.values()
        line = None if view is None else view.line
        beyond = None if bucket is None else bucket.beyond(line)
        lines = [line] if beyond is None else [line, beyond]
        links = {part.entry.step: link_to(part.key) for part in parts}
        if ignored := [step for step, link in links.items() if not all(one and one.accepts(*link) for one in lines)]:
            note_ignored(ignored, self._memory.folder, beyond)

    @property
    def homes(self) -> Sequence[int]:
        """The domain of each rank: ranks with equal domains see each other's parts in both tiers."""
        pairs = [*zip(self._disk.member.homes, self.driver.member.homes, strict=True)]
        return [pairs.index(pair) for pair in pairs]

    # -- one checkpoint

    def request(
        self,
        counter: int,
        step: int,
        metadata: Metadata,
        sums: Mapping[str, int],
        differing: Collection[int],
        *,
        on_disk: bool,
    ) -> list[Action]:
        """Request a checkpoint in memory, and also ``on_disk``; return the actions for the disk."""
        self.driver.begin(counter)
        on_disk_too, actions = self.tiers.request(step, metadata, sums, differing, on_disk=on_disk)
        assert self.driver.member.counter == counter, (self.driver.member.counter, counter)
        self.driver.do(actions)
        return on_disk_too

    async def admitted(self, counter: int) -> bool:
        """Wait until a checkpoint may be written in memory; return False if the group decided about it already."""
        try:
            return await self.driver.admitted(counter)
        except CheckpointError:
            return False

    async def commit(self, written: Written, sample: ReplicaSample | None) -> asyncio.Future[bool]:
        """Vote for a checkpoint, once its data is durable in memory. Raises the errors of :meth:`Store.finish_data`.

        Returns a future: True if this checkpoint, or a newer one, is committed, False if it failed.
        """
        await self._memory.store.finish_data(written)
        self.driver.note_written(written.entry.counter)
        return asyncio.ensure_future(self._decided(written, sample))

    async def _decided(self, written: Written, sample: ReplicaSample | None) -> bool:
        error: Exception | None = None
        try:
            await self.driver.decided(written, sample)
            return True  # or a newer one is there
        except Exception as failure:
            error = failure  # the others wait for this rank's vote, whatever it is
            if isinstance(failure, CheckpointError):
                return False
            raise
        finally:
            self.driver.ended(written.entry.counter, error)

    def ended(self, counter: int, error: Exception | None) -> None:
        """Called when nothing of a checkpoint is being written; does nothing if it was written, and waits for votes."""
        if not self.driver.is_committing(counter):
            self.driver.ended(counter, error or GroupError("it was not saved in memory"))

    # -- committed checkpoints

    @property
    def entries(self) -> Sequence[Entry]:
        """The checkpoints of which a part is in memory, on any host, newest first: the same on all ranks."""
        member = self.driver.member
        if (view := member.view) is None:
            return ()
        hosts = len({*member.homes})
        found = {one.key: one for one in view.complete}

        def is_there(key: Key) -> bool:
            return key not in found or any(place < hosts for place in found[key].places)

        keys = found if member.run is None else member.keep
        entries = {key: member.parts[key].entry if key in member.parts else found[key].entry
                   for key in keys if is_there(key) and (key in member.parts or key in found)}  # fmt: skip
        return [entries[key] for key in sorted(entries, reverse=True)]

    @property
    def unsaved(self) -> Entry | None:
        """The newest checkpoint in memory, if it is of this run, newer than all on disk, and did not fail there."""
        member, newest = self.driver.member, next(iter(self.entries), None)
        on_disk = max((entry.counter for entry in self._disk.entries), default=-1)
        if newest is None or member.run is None or newest.counter <= on_disk:
            return None
        if self._disk.member.is_over(newest.counter):  # it failed on disk
            return None
        part = member.parts.get(Key(newest.counter, member.run))
        return None if part is None else part.entry

    def follow(self, index: int) -> asyncio.Future[Sequence[Entry]]:
        """Join the run in both tiers, before the change ``index`` of the kept checkpoints on disk; memory follows it.

        Returns a future that is done when this rank's record in memory has the change, or the tier is broken.
        """
        self._disk.do(self.tiers.join(unrestored=True))
        self.driver.do(self.driver.member.join())
        done: asyncio.Future[Sequence[Entry]] = self.driver.loop.create_future()
        if self.driver.member.stopped is None:
            self.driver.changes[index] = done
        else:
            done.set_result(())
        return done

    @property
    def is_disposable(self) -> bool:
        """Whether the disk has all checkpoints that are in memory, so that memory need not be kept."""
        member = self.driver.member
        if self._disk.member.stopped is not None or (member.run is None and member.parts):
            return False
        newest, on_disk = next(iter(self.entries), None), next(iter(self._disk.entries), None)
        return newest is None or (on_disk is not None and on_disk.counter >= newest.counter)

    def note_stopped(self, disk: Broken | None) -> None:
        """Called after each decision: if a tier is broken, end the waiting for memory; if this one is, turn it off.

        ``disk``: why nothing more is decided in the disk's tier; None while decisions are made.
        """
        own = self.driver.member.stopped
        if (broken := disk or own) is not None:
            set_future(self.driver.ready, GroupError(broken.why))
            for change in self.driver.changes.values():
                set_future(change, ())
            if self.driver.replicas is not None:
                self.driver.replicas.stop(broken.why)
        if own is not None and disk is None:
            self._memory.turn_off(GroupError(own.why))


def _domain_of(folder: Path) -> str:
    """Return an id of a folder on a tmpfs: equal for ranks that see the same folder."""
    try:
        boot = Path(_BOOT_ID).read_text().strip()
    except OSError:
        boot = os.uname().nodename
    return f"{boot} {folder.stat().st_dev} {folder}"
