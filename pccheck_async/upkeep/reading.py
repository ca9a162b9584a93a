"""Describing a checkpoint, and checking the chunks of its payload."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from pccheck_async.engine import call_once
from pccheck_async.errors import ReadError
from pccheck_async.format import CheckpointInfo, combine, piece_sums, which_one
from pccheck_async.format.manifest import ChunkEntry, Manifest
from pccheck_async.format.record import slot_name
from pccheck_async.group import open_place
from pccheck_async.medium import File
from pccheck_async.medium.open_medium import IO, OpenMedium
from pccheck_async.state.restore.parts import stored_boxes
from pccheck_async.store import CheckpointReader, Staging
from pccheck_async.transfer import Tasks
from pccheck_async.upkeep.listing import Listing, ShardBox, ShardedLeaf, StoredLeaf, list_leaves

__all__ = [
    "LOCK_SECONDS",
    "ChunkRun",
    "Description",
    "Progress",
    "check_chunks",
    "counting",
    "describe_checkpoint",
    "runs",
]

LOCK_SECONDS = 1.0
"""The last requests of a writer that was killed hold its locks for a moment; a trainer holds them for good."""


@dataclass(frozen=True, slots=True)
class Description:
    """A committed checkpoint and its place. Sizes and offsets in bytes.

    Attributes:
        info: The commit record's description of it.
        leaves: Its tensors, arrays and plain values, in the order of the state.
        branches: Types of its containers by their paths, the root's empty.
        slot: The file that holds it.
        slot_nbytes: Size of that file.
        chunks: Pieces of the payload as they were written, each with its checksum.
        manifest_offset: Offset of the manifest in the slot, behind the payload.
        manifest_nbytes: Its length.
        store_id: Of the store.
        block_bytes: Of the store: offsets and lengths are multiples of it.
        rank: The rank whose part of a group's checkpoint it is, else None.
        sharded: The tensors of that part that lie on several ranks, in the order of the state, with all their boxes;
            those that the part has itself are among ``leaves``, too.
        differing: If no rank was named, paths under which other ranks have different tensors. When 20 are known, the
            bytes of others are not compared.
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
    rank: int | None = None
    sharded: tuple[ShardedLeaf, ...] = ()
    differing: tuple[str, ...] = ()

    @property
    def array_nbytes(self) -> int:
        """Bytes of all tensors and arrays, each counted for itself."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def aliases(self) -> int:
        """Leaves that share bytes with an earlier one: those are stored once."""
        return sum(leaf.alias_of is not None for leaf in self.leaves)


def describe_checkpoint(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    name: str | None = None,
    rank: int | None = None,
    io: IO = "auto",
) -> Description:
    """Describe the newest checkpoint, the newest of ``step``, or the one called ``name``.

    Reads its manifest and no tensor.

    In a group's folder it is one rank's part of a complete checkpoint. If tensors of it lie on several ranks, the
    manifests of all ranks are read. Without ``rank`` it is that of rank 0, and the values that each rank has for
    itself are compared: if checksums do not decide, tensors are read.

    Raises:
        NoCheckpointError: there is none.
        CorruptStoreError: no record is valid, or a manifest is damaged.
        ReadError: the device failed, or this process may not open a file for each part of a group's checkpoint.
    """
    which = which_one(step, name)

    async def describe() -> Description:
        async with await open_place(path, io, rank=rank) as place, place.hold(which) as checkpoint:
            entry, listing = checkpoint.entry, list_leaves(checkpoint.manifest)
            sharded = tuple([leaf async for leaf in _with_boxes(checkpoint, listing)])
            differing = tuple(await checkpoint.differing(is_needed=False)) if rank is None else ()
            return Description(
                info=entry.info,
                leaves=tuple(listing.leaves),
                branches=listing.branches,
                slot=slot_name(entry.slot),
                slot_nbytes=checkpoint.file.nbytes,
                chunks=checkpoint.manifest.chunks,
                manifest_offset=entry.manifest_offset,
                manifest_nbytes=entry.manifest_nbytes,
                store_id=place.identity.store_id,
                block_bytes=place.identity.block_bytes,
                rank=place.named(checkpoint.own_rank),
                sharded=sharded,
                differing=differing,
            )

    return call_once(describe())


async def _with_boxes(checkpoint: CheckpointReader, listing: Listing) -> AsyncIterator[ShardedLeaf]:
    """Yield the tensors that lie on several ranks; none where only one rank's store is known."""
    if not listing.sharded or not checkpoint.whole:
        return
    manifests = await checkpoint.manifests()
    stored = {rank: stored_boxes(manifest, rank) for rank, manifest in sorted(manifests.items())}
    for leaf in listing.sharded:
        boxes = {}
        for rank, there in stored.items():
            found = [box for box in there.get(leaf.path, ()) if box.mesh == leaf.mesh and 0 not in box.entry.shape]
            if found:
                boxes[rank] = tuple(ShardBox(box.offsets, box.entry.shape) for box in found)
        yield replace(leaf, boxes=boxes)


# -- chunks

Progress: TypeAlias = Callable[[int, int], None]
"""Called on another thread with the bytes done, and those of the whole."""


def counting(progress: Progress, total: int) -> Callable[[int], None]:
    """Return a function to call with the bytes of each read, which calls ``progress``."""
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(min(done, total), total)

    return add


class ChunkRun(NamedTuple):
    """Chunks that are read in one piece (small ones one by one would keep no disk busy), and where in the payload."""

    first: int
    chunks: Sequence[ChunkEntry]
    offset: int
    nbytes: int


def runs(chunks: Sequence[ChunkEntry], most: int) -> Iterator[ChunkRun]:
    """Group chunks that lie back to back into runs of at most ``most`` bytes; a larger chunk is a run of its own."""
    first = 0
    for index, chunk in enumerate(chunks, 1):
        start, end = chunks[first].offset, chunk.offset + chunk.nbytes
        if index == len(chunks) or chunks[index].offset + chunks[index].nbytes - start > most:
            yield ChunkRun(first, chunks[first:index], start, end - start)
            first = index


async def check_chunks(
    opened: OpenMedium,
    file: File,
    manifest: Manifest,
    *,
    damaged: Callable[[int, str], None],
    checked: Callable[[ChunkRun, memoryview], Awaitable[None]] | None = None,
    read: Callable[[int], None] = lambda _: None,
) -> None:
    """Read chunks at the storage's speed and compare each with its checksum.

    Args:
        opened: Moves the bytes.
        file: The slot.
        manifest: Names the chunks.
        damaged: Called with the number of every chunk that differs from the written one, and the reason.
        checked: Awaited with every run none of whose chunks is damaged, and its bytes.
        read: Called with the bytes of every run that was read.

    Cancellation: ends once every read ended.
    """

    async def check(run: ChunkRun, buffer: memoryview) -> None:
        view, whole = buffer[: run.nbytes], True
        try:
            got = await opened.medium.read(file, run.offset, view)
        except ReadError as error:
            if len(run.chunks) > 1:
                for index, chunk in enumerate(run.chunks, run.first):  # which of them it is
                    await check(ChunkRun(index, [chunk], chunk.offset, chunk.nbytes), buffer)
                return
            damaged(run.first, f"it cannot be read: {error.strerror or error}")
        else:
            sums = await opened.operations.call(_checksums, run, view)
            for index, (chunk, pieces) in enumerate(zip(run.chunks, sums, strict=True), run.first):
                if chunk.offset - run.offset + chunk.nbytes > got:
                    damaged(index, f"the file ends at byte {run.offset + got}")
                elif combine(pieces, chunk.nbytes) != chunk.checksum or expected[index] not in (None, pieces):
                    damaged(index, "checksum mismatch")
                else:
                    continue
                whole = False
            if checked is not None and whole:
                await checked(run, view)
        read(run.nbytes)

    expected = manifest.pieces or (None,) * len(manifest.chunks)
    pool = Staging().pool_for(max((chunk.nbytes for chunk in manifest.chunks), default=0))
    try:
        async with Tasks() as group:
            for run in runs(manifest.chunks, pool.buffer_bytes):
                lease = await pool.lease()
                # The lease outlives the task, also one that is cancelled before it ran at all.
                group.create_task(check(run, lease.view)).add_done_callback(lambda _, lease=lease: lease.release())  # type: ignore[misc]
    finally:
        pool.close()


def _checksums(run: ChunkRun, view: memoryview) -> list[bytes]:
    """Called on a helper thread; each table of checksums is computed without the GIL."""
    starts = [chunk.offset - run.offset for chunk in run.chunks]
    return [piece_sums(view[start : start + chunk.nbytes]) for start, chunk in zip(starts, run.chunks, strict=True)]
