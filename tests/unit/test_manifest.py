from __future__ import annotations

import random
import zlib
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck_async.errors import CheckpointError, CorruptStoreError, UnsupportedStateError
from pccheck_async.format.manifest import (
    ChunkEntry,
    Manifest,
    StorageEntry,
    TensorEntry,
    decode,
    encode,
    encode_again,
    span,
)
from pccheck_async.format.skeleton import (
    ArrayNode,
    DictNode,
    ListNode,
    Node,
    OrderedDictNode,
    ShardedNode,
    StatefulNode,
)
from pccheck_async.state import allocate
from pccheck_async.state.storages import Known
from tests.support.round_trip import save

MIB = 1 << 20
OF_PIECES: dict[str, Any] = {"version": 2, "pieces": (b"\1\0\0\0", b"\xff\xff\xff\xff")}


def good(**changes: Any) -> Manifest:
    manifest = Manifest(
        version=1,
        counter=4,
        step=-2,
        time=2.5,
        metadata={"a": 1, "b": None, "c": "x", "d": True, "e": 0.5},
        skeleton=DictNode(["x", "y"], [ArrayNode(0), ArrayNode(1)]),
        tensors=(tensor(), tensor(storage=1, dtype="<i4", kind="ndarray")),
        storages=(StorageEntry(0, 24), StorageEntry(64, 24)),
        chunks=(ChunkEntry(0, 512, 1), ChunkEntry(512, 512, 2**32 - 1)),
        payload_nbytes=1024,
    )
    return msgspec.structs.replace(manifest, **changes)


def tensor(**changes: Any) -> TensorEntry:
    entry = TensorEntry(0, "float32", (2, 3), (3, 1), 0, "tensor", False)
    return msgspec.structs.replace(entry, **changes)


def sharded(shape: tuple[int, ...], offsets: list[tuple[int, ...]], boxes: list[int]) -> dict[str, Any]:
    """Two boxes of 2 x 3."""
    node = ShardedNode(5, "float32", False, shape, tuple(offsets), tuple(map(ArrayNode, boxes)))
    tensors = (tensor(), tensor(storage=1))
    return OF_PIECES | {"skeleton": DictNode(["x"], [node]), "tensors": tensors if boxes else ()}


ORDERED = OrderedDictNode(["x", "y"], [ArrayNode(0), ArrayNode(1)], [DictNode([""], [1])])


@pytest.mark.parametrize(
    "manifest",
    [
        good(),
        good(**sharded((4, 6), [(0, 0), (2, 3)], [0, 1])),
        good(version=3, skeleton=ORDERED),
        good(**OF_PIECES | {"version": 3, "skeleton": ORDERED}),
    ],
    ids=["", "sharded", "ordered", "ordered with pieces"],
)
def test_round_trip(manifest: Manifest) -> None:
    for data in (encode(manifest), bytearray(encode(manifest)), memoryview(encode(manifest))):
        assert decode(data) == manifest


def test_version_1_has_the_fields_that_it_had() -> None:
    fields = list(msgspec.msgpack.decode(encode(good())))
    assert fields == [
        "version", "counter", "step", "time", "metadata", "skeleton", "tensors", "storages", "chunks", "payload_nbytes",
    ]  # fmt: skip
    assert list(msgspec.msgpack.decode(encode(good(**OF_PIECES)))) == [*fields, "pieces"]


def of_pieces(*sizes: int) -> tuple[Manifest, bytes]:
    """Return a manifest with chunks of these sizes and the checksums of all their pieces, and the payload."""
    payload = random.Random(sum(sizes)).randbytes(sum(sizes))
    chunks, pieces, at = [], [], 0
    for size in sizes:
        data = payload[at : at + size]
        chunks.append(ChunkEntry(at, size, zlib.crc32(data)))
        each = [zlib.crc32(data[low : low + MIB]).to_bytes(4, "little") for low in range(0, size, MIB)]
        pieces.append(b"".join(each))
        at += size
    return good(version=2, chunks=tuple(chunks), pieces=tuple(pieces), payload_nbytes=at), payload


def test_pieces_that_make_other_chunks_are_refused() -> None:
    manifest, _ = of_pieces(2 * MIB + 512, MIB, 512)
    assert decode(encode(manifest)) == manifest
    first, second, third = manifest.pieces or ()
    damaged: list[tuple[bytes, ...]] = []
    for bit in range(8 * len(first)):
        flipped = bytearray(first)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append((bytes(flipped), second, third))
    damaged += [
        (first[4:8] + first[:4] + first[8:], second, third),
        (first[:-4], second, third),
        (first + bytes(4), second, third),
        (first[:-1], second, third),
        (b"", second, third),
        (first, second),
        (first, second, third, b""),
        (first, third, second),
    ]
    for pieces in damaged:
        with pytest.raises(CorruptStoreError, match=r"pieces"):
            decode(encode(msgspec.structs.replace(manifest, pieces=pieces)))


def test_a_chunk_without_end_asks_for_no_table_of_its_length() -> None:
    nbytes = 1 << 61
    forged = good(version=2, chunks=(ChunkEntry(0, nbytes, 0),), payload_nbytes=nbytes, pieces=(bytes(4),))
    with pytest.raises(CorruptStoreError, match="pieces"):
        decode(encode(forged))


def test_parts_that_are_not_encoded_again_are_the_same() -> None:
    known = Known()
    first = good()
    for manifest in (
        first,
        good(step=9, chunks=(ChunkEntry(0, 1024, 7),)),
        msgspec.structs.replace(first, step=3),
        msgspec.structs.replace(first, tensors=(tensor(requires_grad=True), *first.tensors[1:])),
        msgspec.structs.replace(first, skeleton=DictNode(["x", "y"], [ArrayNode(1), ArrayNode(0)])),
        first,
        msgspec.structs.replace(first, storages=(StorageEntry(0, 24), StorageEntry(128, 24))),  # and nothing else
        *(
            msgspec.structs.replace(first, skeleton=DictNode(["x", "y", "n"], [one, other, step]))
            for one, other, step in (
                (StatefulNode(ArrayNode(1)), StatefulNode(ListNode([ArrayNode(0)])), 1),
                (StatefulNode(ArrayNode(1)), StatefulNode(ListNode([ArrayNode(0), 5])), 2),
                (ListNode([ArrayNode(0)]), StatefulNode(ArrayNode(1)), StatefulNode(3)),
            )
        ),
        first,
    ):
        for _ in range(2):
            assert encode_again(manifest, known) == encode(manifest)
    with pytest.raises(UnsupportedStateError, match="step"):
        encode_again(good(step=1 << 64), known)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 3},
        {"version": 4},
        {"skeleton": ORDERED},
        {"skeleton": ORDERED} | OF_PIECES,
        {"version": 3, "skeleton": ListNode([ArrayNode(0), ArrayNode(1)])},
        {"version": 2},
        OF_PIECES | {"version": 1},
        OF_PIECES | {"pieces": ()},
        sharded((4, 6), [(0, 0)], [0, 1]),  # an offset for each box
        sharded((4, 6), [(0, 0)], []),
        sharded((4, 6), [(0,), (0, 0)], [0, 1]),
        sharded((1, 1), [(0, 0), (0, 0)], [0, 1]),
        sharded((4, 6), [(-1, 0), (0, 0)], [0, 1]),
        sharded((1 << 40, 1 << 40), [(0, 0), (2, 3)], [0, 1]),
        {"payload_nbytes": 1025},
        {"payload_nbytes": -1},
        {"chunks": ()},
        {"chunks": (ChunkEntry(0, 1024, -1),)},
        {"chunks": (ChunkEntry(0, 1024, 2**32),)},
        {"chunks": (ChunkEntry(512, 512, 0), ChunkEntry(0, 512, 0))},
        {"chunks": (ChunkEntry(0, 1000, 0), ChunkEntry(1000, 24, 0))},
        {"chunks": (ChunkEntry(0, 1024, 0), ChunkEntry(1024, 0, 0))},
        {"chunks": (ChunkEntry(0, 2048, 0), ChunkEntry(2048, -1024, 0))},
        {"chunks": (ChunkEntry(0, 1 << 63, 0),), "payload_nbytes": 1 << 63},
        {"storages": (StorageEntry(0, 24), StorageEntry(64, 961))},
        {"storages": (StorageEntry(0, 24), StorageEntry(0, 24))},
        {"storages": (StorageEntry(0, 65), StorageEntry(64, 24))},
        {"storages": (StorageEntry(64, 24), StorageEntry(0, 24))},
        {"storages": (StorageEntry(0, 24), StorageEntry(72, 24))},
        {"storages": (StorageEntry(-64, 24), StorageEntry(64, 24))},
        {"storages": (StorageEntry(0, -1), StorageEntry(64, 24))},
        {"storages": (StorageEntry(0, 24), StorageEntry(64, 1 << 62))},
        {"skeleton": DictNode(["x"], [ArrayNode(0)])},
        {"skeleton": DictNode(["x", "y"], [ArrayNode(0), ArrayNode(0)])},
        {"skeleton": DictNode(["x", "y"], [ArrayNode(0), ArrayNode(2)])},
        {"skeleton": DictNode(["x", "y"], [ArrayNode(0), ArrayNode(-1)])},
        {"skeleton": DictNode([1, "y"], [ArrayNode(0), ArrayNode(1)])},
        {"skeleton": ListNode([ArrayNode(0), ArrayNode(1)])},
        {"skeleton": None},
    ],
    ids=str,
)
def test_impossible_manifests(changes: dict[str, Any]) -> None:
    data = encode(good(**changes))
    with pytest.raises(CorruptStoreError):
        decode(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"storage": 2},
        {"storage": -1},
        {"storage": None},
        {"dtype": "float33"},
        {"dtype": "qint8"},
        {"dtype": "__class__"},
        {"dtype": "O", "kind": "ndarray"},
        {"dtype": "<f4", "kind": "tensor"},
        {"shape": (2,)},
        {"shape": (2, 4)},
        {"shape": (-2, 3)},
        {"shape": (0, 3)},
        {"shape": (1 << 40, 1 << 40), "stride": (0, 0)},
        {"shape": (1 << 63, 1), "stride": (0, 0)},
        {"shape": (1,) * 65, "stride": (1,) * 65},
        {"stride": (4, 1)},
        {"stride": (-3, 1)},
        {"stride": (3, 1 << 62)},
        {"offset": 4},
        {"offset": -4},
        {"offset": 1, "shape": (1, 1)},
        {"shape": (1, 1), "offset": 24},
        {"stride": (-3, 1), "kind": "ndarray", "dtype": "<f4"},
        {"kind": "ndarray", "dtype": "<f4", "requires_grad": True},
        {"dtype": "int32", "requires_grad": True},
    ],
    ids=str,
)
def test_impossible_tensors(changes: dict[str, Any]) -> None:
    data = encode(good(tensors=(tensor(**changes), tensor(storage=1))))
    with pytest.raises(CorruptStoreError):
        decode(data)


def test_recursion_bombs() -> None:
    for levels in (150, 100_000):
        bomb = b"\x92\xa4list\x91" * levels + b"\xc0"
        data = encode(good()).replace(msgspec.msgpack.encode(good().skeleton), b"\x93\xa4dict\x91\xa1x\x91" + bomb)
        with pytest.raises(CorruptStoreError):
            decode(data)
    deep: Node = None
    for _ in range(150):
        deep = ListNode([deep])
    with pytest.raises(CorruptStoreError, match="deep"):
        decode(encode(good(skeleton=DictNode(["x"], [deep]), tensors=())))


def test_damage_never_gives_anything_but_the_error_or_a_checked_manifest() -> None:
    state = {"a": torch.zeros(3, 4).t(), "b": [1, "x", {2: torch.arange(5)}], "c": torch.zeros(4, requires_grad=True)}
    data = save(state).manifest
    generator = random.Random(1)
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        try:
            manifest = decode(damaged)
            restoration = allocate(manifest)
            for target in restoration.targets:
                assert 0 <= target.payload_offset <= target.payload_offset + target.nbytes <= manifest.payload_nbytes
            restoration.finish()
        except CorruptStoreError:
            pass
    for end in range(len(data)):
        with pytest.raises(CorruptStoreError):
            decode(data[:end])
    with pytest.raises(CorruptStoreError):
        decode(data + b"\0")


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode(data)


@pytest.mark.parametrize("changes", [{"step": 1 << 70}, {"metadata": {"a": 1 << 70}}, {"metadata": {"\ud800": 1}}])
def test_what_msgpack_cannot_carry(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedStateError):
        encode(good(**changes))


def test_span() -> None:
    assert span((), ()) == (0, 0)
    assert span((2, 3), (3, 1)) == (0, 5)
    assert span((2, 3, 1), (-3, 1, 99)) == (-3, 2)
    assert tensor(offset=4, stride=(1, 2)).extent == (4, 4 + 6 * 4)
