from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck_async.errors import CorruptStoreError
from pccheck_async.format.found_manifest import SIGNATURES, find_signatures, manifest_at, object_length
from pccheck_async.format.manifest import VERSION, ChunkEntry, Manifest, encode, version_of
from pccheck_async.format.record import MIN_BLOCK
from pccheck_async.format.skeleton import DictNode, Node, OrderedDictNode

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=60,
)


def manifest(**changes: Any) -> Manifest:
    whole = Manifest(VERSION, 7, 70, 1.5, {"loss": 0.5}, DictNode([], []), (), (), (ChunkEntry(0, 512, 1),), 512)
    return msgspec.structs.replace(whole, **changes)


@pytest.mark.slow
@given(values, st.binary(max_size=20))
def test_the_length_of_an_object(value: object, behind: bytes) -> None:
    data = msgspec.msgpack.encode(value)
    assert object_length(data + behind) == len(data)


@pytest.mark.slow
@given(values, st.data())
def test_an_object_that_is_cut_goes_on(value: object, data: st.DataObject) -> None:
    encoded = msgspec.msgpack.encode(value)
    assert object_length(encoded[: data.draw(st.integers(0, len(encoded) - 1))]) is None


@pytest.mark.parametrize("nbytes", [31, 32, 255, 256, 65535, 65536])
def test_every_width_of_a_length(nbytes: int) -> None:
    for value in ("x" * nbytes, b"x" * nbytes, [1] * nbytes, {str(n): n for n in range(nbytes)}):
        data = msgspec.msgpack.encode(value)
        assert object_length(data + b"\xc1") == len(data)


@given(st.binary(max_size=200))
def test_garbage_has_a_length_or_none_or_is_malformed(data: bytes) -> None:
    try:
        length = object_length(data)
    except CorruptStoreError:
        return
    assert length is None or 0 < length <= len(data)


def test_every_manifest_has_the_signature() -> None:
    for counter in (0, 200, 2**40):
        roots: tuple[Node, ...] = (DictNode([], []), OrderedDictNode([], [], []))
        for root, pieces in product(roots, (None, (), (b"\1\0\0\0",))):
            version = version_of(root, with_pieces=pieces is not None)
            made = {"version": version, "counter": counter, "metadata": {"a": "b" * 100}, "pieces": pieces}
            assert sum(encode(manifest(**made, skeleton=root)).startswith(one) for one in SIGNATURES) == 1


def test_signatures_are_found_at_multiples_from_the_end() -> None:
    data = bytearray(8 * MIN_BLOCK)
    for number, offset in enumerate((0, 2 * MIN_BLOCK, 5 * MIN_BLOCK, 6 * MIN_BLOCK + 4)):
        data[offset : offset + len(SIGNATURES[0])] = SIGNATURES[number % 2]
    assert find_signatures(memoryview(data)) == [5 * MIN_BLOCK, 2 * MIN_BLOCK, 0]
    assert find_signatures(memoryview(data), 4 * MIN_BLOCK) == [0]
    assert find_signatures(memoryview(b"")) == []


def test_a_manifest_with_bytes_behind_it() -> None:
    data = encode(manifest())
    assert manifest_at(data + bytes(100), 512) == (manifest(), len(data))
    assert manifest_at(data[:-1], 512) is None


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        (encode(manifest()), 511),  # the payload would reach into it
        (encode(manifest(version=3)), 512),
        (encode(manifest(payload_nbytes=1024)), 1024),
        (SIGNATURES[0] + b"\xc1", 512),
        (SIGNATURES[0] + bytes(100), 512),
        (b"\xc1", 512),
    ],
)
def test_what_is_no_manifest(data: bytes, offset: int) -> None:
    with pytest.raises(CorruptStoreError):
        manifest_at(data, offset)
