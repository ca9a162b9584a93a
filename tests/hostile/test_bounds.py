"""What somebody forged takes no more of a reader than its size: in time, and in numbers that a writer goes on from."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pccheck_async import SyncCheckpointEngine, list_checkpoints, load_sync, stores
from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from pccheck_async.format import Record
from pccheck_async.format import record as layout_of
from pccheck_async.format.found_manifest import SIGNATURES
from pccheck_async.format.record import MOST_SLOT, slot_name, slot_number
from pccheck_async.format.skeleton import (
    MOST_ALIKE,
    BigIntNode,
    CounterNode,
    DictNode,
    FrozenSetNode,
    ListNode,
    Node,
    OrderedDictNode,
    SetNode,
    TupleNode,
)
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.state import flatten
from pccheck_async.state.restore.tree import rebuild
from pccheck_async.testing import Access, WrappingWriter
from pccheck_async.transfer.operations import Operations

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
T = TypeVar("T")
MODULUS = 2**61 - 1
"""Of which Python's hash of an int is the remainder."""


def long_int(number: int) -> tuple[int, Node]:
    value = 3 + MODULUS * (2**64 + number)
    return value, BigIntNode(value.to_bytes(17, "little", signed=True))


def pair(number: int) -> tuple[Hashable, Node]:
    value, node = long_int(number)
    return (value, "x"), TupleNode([node, "x"])


def bits(number: int) -> tuple[Hashable, Node]:
    value = [-1 - (number >> bit & 1) for bit in range(9)]
    return tuple(value), TupleNode([*value])


def inner_set(number: int) -> tuple[Hashable, Node]:
    value, node = long_int(number)
    return frozenset((value,)), FrozenSetNode([node])


ALIKE: list[Callable[[int], tuple[Hashable, Node]]] = [long_int, pair, bits, inner_set]


@pytest.mark.parametrize("make", ALIKE)
@pytest.mark.parametrize("kind", [dict, OrderedDict, Counter, set, frozenset])
def test_keys_of_one_hash(make: Callable[[int], tuple[Hashable, Node]], kind: Any) -> None:
    made = [make(number) for number in range(MOST_ALIKE + 1)]
    assert len({hash(value) for value, _ in made}) == 1

    def node(some: list[tuple[Hashable, Node]]) -> Node:
        keys = [key for _, key in some]
        ones: list[Node] = [1] * len(keys)
        match kind.__name__:
            case "dict":
                return DictNode(keys, ones)
            case "OrderedDict":
                return OrderedDictNode(keys, ones, [])
            case "Counter":
                return CounterNode(keys, ones)
            case "set":
                return SetNode(keys)
            case _:
                return FrozenSetNode(keys)

    def value(some: list[tuple[Hashable, Node]]) -> Any:
        keys = [key for key, _ in some]
        return kind(keys) if kind in (set, frozenset) else kind(dict.fromkeys(keys, 1))

    def saved(state: Any) -> Any:
        flat = flatten({"state": [state, {"beside": 1}]})
        return rebuild(flat.skeleton, lambda index: index)["state"][0]

    assert saved(value(made[:-1])) == value(made[:-1])
    assert rebuild(ListNode([node(made[:-1])]), lambda index: index) == [value(made[:-1])]
    with pytest.raises(CorruptStoreError, match="the same hash"):
        rebuild(ListNode([node(made)]), lambda index: index)
    with pytest.raises(UnsupportedStateError, match=r"state\.0: more than 256 keys or items have the same hash"):
        saved(value(made))


def test_many_keys_of_every_kind_that_spreads() -> None:
    state = {"ints": dict.fromkeys(range(5000)), "floats": {2.0**n: n for n in range(-1000, 1000)}, "large": {}}
    state["large"] = {2**n: n for n in range(64, 5000)}
    flat = flatten(state)
    assert rebuild(flat.skeleton, lambda index: index) == state


def renumber(folder: Path, number: int) -> None:
    """Let the record name another slot, and call that so."""
    identity = layout_of.decode_identity((folder / "store.json").read_bytes())
    commit = bytearray((folder / "commit").read_bytes())
    record = layout_of.newest_record(commit, identity.id_bytes)
    assert record is not None
    (entry,) = record.entries
    (folder / slot_name(entry.slot)).rename(folder / slot_name(number))
    values = {name: getattr(entry, name) for name in entry.__struct_fields__}
    forged = Record(record.generation + 1, (layout_of.Entry(**{**values, "slot": number}),))
    data = layout_of.encode_record(forged, identity.id_bytes, identity.block_bytes)
    for offset in layout_of.region_offsets(forged.generation):
        commit[offset : offset + len(data)] = data
    (folder / "commit").write_bytes(commit)


@pytest.mark.parametrize("number", [MOST_SLOT, MOST_SLOT - 1])
def test_after_the_largest_slot_a_writer_goes_on(tmp_path: Path, number: int) -> None:
    with SyncCheckpointEngine(tmp_path, max_in_flight=1) as engine:
        engine.checkpoint({"step": 1, "more": ""}, step=1).result(60)
    renumber(tmp_path, number)
    for step in range(2, 6):
        with SyncCheckpointEngine(tmp_path, max_in_flight=2, keep_last=2) as engine:
            live = {"step": 0, "more": ""}
            assert engine.restore(live) is not None
            assert live["step"] == step - 1
            engine.checkpoint({"step": step, "more": "x" * 5000 * step}, step=step).result(60)
    assert [info.step for info in list_checkpoints(tmp_path)] == [5, 4]
    files = [file.name for file in tmp_path.glob("slot-*")]
    assert len(files) <= 4
    assert all(slot_number(name) is not None for name in files)
    assert load_sync(tmp_path, step=4)["step"] == 4


def test_a_record_that_names_a_slot_beyond_is_none() -> None:
    entry = layout_of.Entry(1, 1, 1.0, 0, MOST_SLOT + 1, 0, 1, 0, False, {})
    with pytest.raises(ValueError, match="too large"):
        layout_of.encode_record(Record(1, (entry,)), bytes(16), 4096)


class Counting(WrappingWriter):
    """Counts the bytes that are read, and refuses more than a reader may read."""

    nbytes = 0
    most = 0

    async def perform(self, access: Access, call: Callable[[], Awaitable[T]]) -> T:
        if access.kind == "read":
            self.nbytes += access.nbytes
            assert self.nbytes <= self.most, "no end in sight"
        return await call()


def test_a_slot_full_of_beginnings_is_searched_in_time(tmp_path: Path) -> None:
    """Each seems to go on behind the end of the slot, so that reading all of it would not be too much."""
    with SyncCheckpointEngine(tmp_path, max_in_flight=1) as engine:
        engine.checkpoint({"step": 1}, step=1).result(60)
    (tmp_path / "commit").unlink()
    (slot,) = [file for file in tmp_path.glob("slot-*") if file.read_bytes().count(SIGNATURES[0])]
    beginning = SIGNATURES[0] + b"\xc6\x7f\xff\xff\xff"  # a string of 2 GiB
    nbytes = 8 << 20
    with slot.open("r+b") as file:
        file.write(beginning.ljust(512, b"\0") * (nbytes // 512))
    made: list[Counting] = []

    def make(path: str, operations: Operations) -> Medium:
        made.append(Counting(Files(path, operations)))
        made[-1].most = 8 * nbytes + (200 << 20)
        return made[-1]

    found = stores.recover(tmp_path, search=True, io=make)
    assert [one.note for one in found.found if one.file == slot.name] == ["no manifest"]
    assert made[0].nbytes > nbytes
