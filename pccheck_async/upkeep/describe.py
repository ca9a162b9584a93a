"""What one checkpoint holds, and where."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pccheck_async.format import CheckpointInfo, check_step
from pccheck_async.format.manifest import ChunkEntry
from pccheck_async.format.record import slot_name
from pccheck_async.medium.open_medium import IO, Session
from pccheck_async.state import StoredLeaf, list_leaves
from pccheck_async.upkeep.reading import hold, open_reader, run_with_session

__all__ = ["Description", "describe_checkpoint"]


@dataclass(frozen=True, slots=True)
class Description:
    """A committed checkpoint and where it lies. Sizes and offsets in bytes.

    Attributes:
        info: What the commit record says of it.
        leaves: Its tensors, arrays and plain values, in the order of the state.
        branches: Types of its containers by their paths, the root's empty.
        slot: The file that holds it.
        slot_nbytes: Size of that file.
        chunks: Pieces of the payload as they were written, each with its checksum.
        manifest_offset: Where in the slot the manifest begins, behind the payload.
        manifest_nbytes: Its length.
        store_id: Of the store.
        block_bytes: Of the store: what offsets and lengths are multiples of.
    """

    info: CheckpointInfo
    leaves: tuple[StoredLeaf, ...]
    branches: dict[str, str]
    slot: str
    slot_nbytes: int
    chunks: tuple[ChunkEntry, ...]
    manifest_offset: int
    manifest_nbytes: int
    store_id: str
    block_bytes: int

    @property
    def array_nbytes(self) -> int:
        """Bytes of all tensors and arrays, each counted for itself."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def aliases(self) -> int:
        """Leaves that share bytes with an earlier one: those are stored once."""
        return sum(leaf.alias_of is not None for leaf in self.leaves)


def describe_checkpoint(path: str | os.PathLike[str], *, step: int | None = None, io: IO = "auto") -> Description:
    """Describe the newest checkpoint, or the newest of ``step``. Reads its manifest and no tensor.

    Raises:
        NoCheckpointError: there is none.
        CorruptStoreError: no record is valid, or the manifest is damaged.
        ReadError: the device failed.
    """
    step = check_step(step)

    async def work(session: Session) -> Description:
        reader = await open_reader(session, path)
        async with hold(reader, path, step) as held:
            listing = list_leaves(held.manifest)
            return Description(
                info=held.entry.info,
                leaves=tuple(listing.leaves),
                branches=listing.branches,
                slot=slot_name(held.entry.slot),
                slot_nbytes=held.file.nbytes,
                chunks=held.manifest.chunks,
                manifest_offset=held.entry.manifest_offset,
                manifest_nbytes=held.entry.manifest_nbytes,
                store_id=reader.identity.store_id,
                block_bytes=reader.identity.block_bytes,
            )

    return run_with_session(path, io, work, small=True)
