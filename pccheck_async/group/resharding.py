"""Reading tensors that lie, or lay, on several ranks: from the parts of all of them.

Used by restores, where ranks have other boxes than when they saved, and by reading in full without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pccheck_async.errors import StateMismatchError
from pccheck_async.format.manifest import Manifest
from pccheck_async.group.differing import differing
from pccheck_async.group.elsewhere import FolderLease, check_descriptors
from pccheck_async.medium import File, Medium
from pccheck_async.state import BoxTargets, Resharding, StoredBox, Wanted, reshard, stored_boxes
from pccheck_async.store import pool_for, read_manifest, read_payload, unreadable_errors
from pccheck_async.transfer import BufferPool
from pccheck_async.transfer.copying import CopyBackend

__all__ = ["LeasedPart", "OpenPart", "Parts", "ReadablePart"]


class ReadablePart(Protocol):
    """One rank's part of a checkpoint. Its coroutines raise UnreadableError."""

    async def hold(self) -> None:
        """Keep it from being overwritten, and read its manifest."""

    @property
    def manifest(self) -> Manifest:
        """What it consists of; from :meth:`hold` on."""

    async def read(self, targets: BoxTargets) -> None:
        """Fill targets; no other bytes than those that hold them are read."""

    def release(self) -> None:
        """Let it go. Idempotent."""


class Parts:
    """The parts of one checkpoint that can be reached. Coroutines run on the loop that reads.

    Args:
        parts: By the ranks that saved them.
        own: The one that is restored, or read where a rank's own values are asked for. Whoever made this holds it, and
            lets it go.
        by_address: Whether the memory of CUDA devices can be written to.
        elsewhere: The ranks whose parts are on filesystems that this rank does not see.
    """

    def __init__(
        self, parts: Mapping[int, ReadablePart], own: int, *, by_address: bool, elsewhere: Sequence[int] = ()
    ) -> None:
        self._parts = parts
        self.elsewhere = elsewhere
        self.own = own
        self._by_address = by_address
        self._held = {own}
        self._boxes: dict[int, dict[str, list[StoredBox]]] = {}  # by part, where they were asked for
        self._plan = Resharding()

    async def manifests(self) -> dict[int, Manifest]:
        """Return what all parts consist of. Raises UnreadableError."""
        if wanted := self._parts.keys() - self._held:
            with unreadable_errors():
                check_descriptors(len(wanted))
        for rank in wanted:
            await self._parts[rank].hold()
            self._held.add(rank)
        return {rank: part.manifest for rank, part in self._parts.items()}

    async def match(self, wanted: Sequence[Wanted]) -> None:
        """Work out what is read. Raises UnreadableError; StateMismatchError: the parts do not make these tensors."""
        needed = await self.manifests() if any(one.mesh is not None for one in wanted) else (self.own,)
        for rank in needed:
            if rank not in self._boxes:
                self._boxes[rank] = stored_boxes(self._parts[rank].manifest, rank)
        self._plan = reshard(wanted, self._boxes, self.own, by_address=self._by_address)
        if troubles := self._plan.troubles:
            text = f"the tensors wanted here cannot be made of those in the checkpoint: {', '.join(troubles)}"
            if self.elsewhere:
                text += f"; the parts of ranks {', '.join(map(str, self.elsewhere))} are on filesystems not seen here"
            raise StateMismatchError(text, mismatched=troubles)

    async def differing(self, among: Callable[[str], bool], share: tuple[int, int] = (0, 1)) -> list[str]:
        """Return paths under which parts hold different tensors (see :func:`differing`). Raises UnreadableError."""
        await self.manifests()
        return await differing(self._parts, among, share=share, incomplete=bool(self.elsewhere))

    def take_own(self) -> BoxTargets | None:
        """Return what is filled from the own part, for whoever reads it anyway: :meth:`fill` leaves it out then."""
        return self._plan.targets.pop(self.own, None)

    async def fill(self) -> None:
        """Fill the tensors; :meth:`finish` follows. Raises UnreadableError; some are filled then."""
        for rank, targets in self._plan.targets.items():
            await self._parts[rank].read(targets)

    def finish(self) -> None:
        """Copy what could not be filled in place. On the caller's thread."""
        self._plan.finish()

    def release(self) -> None:
        """Let all parts go but the own one. Idempotent."""
        for rank, part in self._parts.items():
            if rank != self.own:
                part.release()


class OpenPart:
    """A part that is open already, read without an engine.

    Attributes:
        pool: Staging buffers, which all parts of a checkpoint share.
    """

    def __init__(self, medium: Medium, file: File, manifest: Manifest, backend: CopyBackend, pool: BufferPool) -> None:
        self._medium, self._file, self._backend = medium, file, backend
        self.manifest = manifest
        self.pool = pool

    async def hold(self) -> None:
        """Do nothing: it is held."""

    async def read(self, targets: BoxTargets) -> None:
        """Fill targets; no other bytes than those that hold them are read."""
        with unreadable_errors():
            pool = pool_for(self.manifest, self.pool)
            await read_payload(self._medium, self._backend, pool, self._file, self.manifest, targets)

    def release(self) -> None:
        """Do nothing: whoever opened it closes it."""


class LeasedPart:
    """A part that a lease reads, without an engine."""

    _open: OpenPart

    def __init__(self, lease: FolderLease, backend: CopyBackend, pool: BufferPool) -> None:
        self._lease, self._backend, self._pool = lease, backend, pool

    async def hold(self) -> None:
        """Lock it, and read its manifest."""
        lease = self._lease
        with unreadable_errors():
            file = await lease.acquire()
            manifest = await read_manifest(lease.medium, file, lease.entry, lease.block_bytes)
        self._open = OpenPart(lease.medium, file, manifest, self._backend, self._pool)

    @property
    def manifest(self) -> Manifest:
        """What it consists of."""
        return self._open.manifest

    async def read(self, targets: BoxTargets) -> None:
        """Fill targets; no other bytes than those that hold them are read."""
        await self._open.read(targets)

    def share(self, pool: BufferPool) -> None:
        """Use other staging buffers from now on."""
        self._open.pool = pool

    def release(self) -> None:
        """Let it go."""
        self._lease.release()

    async def close(self) -> None:
        """Let it go, and wait until nothing of it is open."""
        await self._lease.close()
