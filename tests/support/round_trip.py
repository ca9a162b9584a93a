"""A save and a load without any I/O: the whole pure layer, from state to bytes and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pccheck_async.format import crc32
from pccheck_async.format.manifest import ChunkEntry, Manifest, decode, encode, version_of
from pccheck_async.state import Owners, Restoration, allocate, arrange, flatten, match
from pccheck_async.transfer.operations.python import gather, scatter
from pccheck_async.transfer.plan import Chunk, Planner, scatter_runs, segments


class Part(NamedTuple):
    """Bytes of one source in one chunk."""

    source: int
    source_offset: int
    buffer_offset: int
    length: int


def parts(chunk: Chunk) -> tuple[Part, ...]:
    """What a chunk is made of, in the order of the buffer."""
    return tuple(Part(*row) for row in chunk.table.tolist())


@dataclass(frozen=True)
class Saved:
    """What storage would hold."""

    manifest: bytes
    payload: bytearray

    @property
    def decoded(self) -> Manifest:
        return decode(self.manifest)

    def load(self, keys: Sequence[str] | None = None, device: str = "cpu") -> dict[str, Any]:
        loaded: dict[str, Any] = self.fill(allocate(self.decoded, keys, device))
        return loaded

    def restore(self, state: Mapping[str, Any]) -> None:
        assert self.fill(match(state, self.decoded)) is state

    def fill(self, restoration: Restoration) -> Any:
        chunks, end = self.decoded.chunks, self.decoded.payload_nbytes
        for number, _, table in scatter_runs(np.array([*(x.offset for x in chunks), end]), end, restoration.targets):
            chunk = chunks[number]
            scatter(memoryview(self.payload)[chunk.offset : chunk.offset + chunk.nbytes], chunk.checksum, table.host)
        return restoration.finish()


def save(
    state: Mapping[str, Any], chunk_bytes: int = 1024, block_bytes: int = 512, owners: Owners | None = None
) -> Saved:
    """Save ``state`` in memory, in chunks small enough that most tensors cross a border; ``owners`` as a rank does."""
    flat = flatten(state, None if owners is None else owners.begin(state))
    layout = arrange(flat.leaves)
    plan = Planner(chunk_bytes, block_bytes).plan(layout)
    payload = bytearray(b"\xee" * plan.payload_nbytes)
    chunks = []
    for chunk in plan.chunks:
        buffer = memoryview(payload)[chunk.offset : chunk.offset + chunk.nbytes]
        found = segments(chunk, layout.sources)
        gather(found.host, buffer)
        for source, low, high, offset in found.packed:
            source.copy(low, high, buffer[offset : offset + high - low])
        chunks.append(ChunkEntry(chunk.offset, chunk.nbytes, crc32(buffer)))
    manifest = Manifest(
        version=version_of(flat.skeleton, with_pieces=False, composed=flat.has_composed),
        counter=3,
        step=7,
        time=1.5,
        metadata={"loss": 0.5},
        skeleton=flat.skeleton,
        tensors=layout.tensors,
        storages=plan.storages,
        chunks=tuple(chunks),
        payload_nbytes=plan.payload_nbytes,
    )
    return Saved(encode(manifest), payload)
