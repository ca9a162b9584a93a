"""The records of commits in a bucket, the protocol's decisions one by one, and one owner beside a store that lies."""

from __future__ import annotations

import asyncio
import random
import struct
import time
import zlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccheck_async.bucket import protocol
from pccheck_async.bucket.medium import BucketMedium
from pccheck_async.bucket.names import commit_key, commit_number, data_key, data_name, digest
from pccheck_async.bucket.objects import Patient, RefusedError
from pccheck_async.bucket.owner import Owner, read_index
from pccheck_async.bucket.record import (
    CommitRecord,
    Kept,
    PartIndex,
    PartName,
    decode_commit,
    decode_index,
    encode_commit,
    encode_index,
)
from pccheck_async.bucket.upload import Draft, _FreshBuffers
from pccheck_async.errors import (
    CorruptStoreError,
    DamagedError,
    NewerFormatError,
    ReadError,
    StoreLockedError,
    WriteError,
)
from pccheck_async.format import Line, Link
from tests.support.lying_objects import LyingObjects, entry_of

T = TypeVar("T")
KEY = data_key(2, 0, 0, "ab" * 16)
RECORD = CommitRecord(
    b"o" * 16, b"p" * 16, b"s" * 16, Line(b"r" * 16, 4, (Link(b"q" * 16, 3),)),
    (Kept(2, b"k" * 16), Kept(1, b"j" * 16)), (2,), (PartName(KEY, 100, entry_of(5, 4096)),),
)  # fmt: skip


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


async def sent(owner: Owner, counter: int, content: bytes = b"", members: int | None = None) -> bool:
    draft = Draft.of(owner)
    data = content or b"payload %d" % counter
    await draft.send(0, data, digest(data))
    return await owner.commit([await draft.finish(entry_of(counter, len(data)), 512, b"manifest")], members)


# -- names and records


def test_names_are_read_as_they_are_written() -> None:
    assert commit_number(commit_key(7)) == 7
    assert commit_key(7) < commit_key(10) < commit_key(999_999_999)
    assert data_name(data_key(7, 3, 2, "0f" * 16)) == (7, 3, 2, "0f" * 16)
    for strange in ("commits/7", "commits/0000000007", "commits/00000000a", "x/commits/000000007", ""):
        assert commit_number(strange) is None
    for strange in ("data/7/0/0-ab", KEY + "0", KEY.upper(), f"{KEY}/x", "data/../../etc"):
        assert data_name(strange) is None


def test_a_record_is_read_as_it_is_written() -> None:
    assert decode_commit(encode_commit(RECORD, 3), 3) == RECORD
    assert RECORD.run == b"r" * 16
    index = PartIndex(512, ((KEY, 4096),), b"manifest")
    assert decode_index(encode_index(index), RECORD.parts[0]) == index


@given(st.data())
def test_no_damaged_record_is_believed(data: st.DataObject) -> None:
    encoded = bytearray(encode_commit(RECORD, 3))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptStoreError):
        decode_commit(bytes(encoded), 3)
    with pytest.raises(CorruptStoreError):
        decode_commit(bytes(encoded[:at]), 3)


def with_checksum(body: bytes, version: int = 1) -> bytes:
    head = struct.pack("<8sII", b"PCCHKBKT", version, len(body))
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


@given(st.recursive(st.none() | st.integers() | st.binary(max_size=20), st.lists, max_leaves=20))
def test_no_strange_record_is_believed(body: object) -> None:
    try:
        encoded = msgspec.msgpack.encode(body)
    except (OverflowError, msgspec.MsgspecError):
        return
    with pytest.raises(CorruptStoreError):
        decode_commit(with_checksum(encoded), 3)


@pytest.mark.parametrize(
    "change",
    [
        {"owner": b"short"}, {"keep": (Kept(3, b"k" * 16),)}, {"keep": (Kept(1, b"k" * 16), Kept(2, b"k" * 16))},
        {"spare": (4,)}, {"spare": (0,)}, {"parts": (PartName("../x", 1, entry_of(5, 1)),)},
        {"parts": (PartName(data_key(4, 0, 0, "ab" * 16), 1, entry_of(5, 1)),)},
        {"parts": (PartName(data_key(1, 1, 0, "ab" * 16), 1, entry_of(5, 1)),)},
        {"parts": (PartName(KEY, 1, entry_of(-1, 1)),)},
        {"parts": (PartName(KEY, 1, msgspec.structs.replace(entry_of(5, 1), metadata={"x": "y" * 2000})),)},
        {"line": Line(b"short", 3)}, {"members": -1}, {"members": 7, "parts": (), "keep": ()},
    ],
)  # fmt: skip
def test_an_impossible_record_is_neither_written_nor_read(change: dict[str, Any]) -> None:
    record = msgspec.structs.replace(RECORD, **change)
    with pytest.raises(ValueError, match="impossible"):
        encode_commit(record, 3)
    with pytest.raises(CorruptStoreError, match=r"impossible|damaged"):
        decode_commit(with_checksum(msgspec.msgpack.encode(record)), 3)


def test_a_record_of_a_newer_version_is_not_damaged() -> None:
    with pytest.raises(NewerFormatError):
        decode_commit(with_checksum(msgspec.msgpack.encode(RECORD), 3), 3)


def test_only_records_of_a_group_have_the_newer_format() -> None:
    """Earlier versions read the checkpoints of one process, and say of a group's that they are newer."""
    group = msgspec.structs.replace(RECORD, members=(1 << 64) - 1)
    assert decode_commit(encode_commit(group, 3), 3) == group
    assert encode_commit(group, 3)[8] == 2
    assert encode_commit(RECORD, 3)[8] == 1
    assert len(msgspec.msgpack.decode(encode_commit(RECORD, 3)[20:])) == 7


@pytest.mark.parametrize(("members", "newest"), [(7, 2), (None, 1)], ids=["group", "one process"])
def test_all_records_that_keep_a_groups_checkpoint_have_the_newer_format(members: int | None, newest: int) -> None:
    """Else an earlier version passes over the checkpoint, and deletes it with its first own one."""
    objects, formats = LyingObjects(), list[tuple[int, int | None]]()

    async def take_over() -> Owner:
        owner = Owner(objects, b"s" * 16, keep_last=3)
        await owner.take_over()
        note(owner)
        return owner

    def note(owner: Owner) -> None:
        data = objects.stored[commit_key(owner.base)]
        formats.append((data[8], decode_commit(data, owner.base).members))

    async def work() -> None:
        owner = await take_over()
        for counter in (1, 2, 3):
            await sent(owner, counter, members=members)
            note(owner)
        await owner.amend({owner.now[0].number})
        note(owner)
        await take_over()
        owner = await take_over()
        await owner.amend(())
        note(owner)
        await owner.amend({kept.number for kept in owner.now})
        note(owner)
        await take_over()

    run(work())
    assert formats == [(1, None), *[(newest, members)] * 7, (1, None), (1, None)]


@pytest.mark.parametrize(
    "index",
    [
        PartIndex(512, ((KEY, 4095),), b"manifest"), PartIndex(500, ((KEY, 4096),), b"manifest"),
        PartIndex(512, (("../../etc", 4096),), b"manifest"), PartIndex(512, ((KEY, 4096),), b"other"),
        PartIndex(512, ((KEY, 5000), (KEY, -904)), b"manifest"),
    ],
)  # fmt: skip
def test_an_index_fits_its_part(index: PartIndex) -> None:
    with pytest.raises(CorruptStoreError):
        decode_index(encode_index(index), RECORD.parts[0])


# -- decisions


def test_another_record_in_the_place_of_a_kept_one_means_that_nothing_is_deleted() -> None:
    """The rule "keep-by-number": what lies at a number may be a late creation of another run's."""
    listing = protocol.Listing({1: 1, 2: 1, 3: 1}, {data_key(1, 0, 0, "cd" * 16): 1, KEY: 1})
    kept, newest = Kept(2, b"k" * 16), Kept(3, b"p" * 16)
    own = {newest: (RECORD, {KEY})}
    whole = protocol.deletable(3, own | {kept: (msgspec.structs.replace(RECORD, put=b"k" * 16), {KEY})}, listing)
    assert whole == [commit_key(1), data_key(1, 0, 0, "cd" * 16)]
    assert protocol.deletable(3, own | {kept: (RECORD, {KEY})}, listing) == []
    assert protocol.deletable(3, own | {kept: None}, listing) == []


def test_readers_pass_over_another_record_in_the_place_of_a_kept_one() -> None:
    objects = LyingObjects()

    async def work() -> list[int]:
        owner = Owner(objects, b"s" * 16, keep_last=2)
        await owner.take_over()
        for counter in (1, 2):
            await sent(owner, counter)
        other = msgspec.structs.replace(RECORD, keep=(), spare=(), line=None)
        assert [number for (number, _), _ in (await BucketMedium(objects).look())[1]] == [3, 2]
        objects.stored[commit_key(2)] = encode_commit(other, 2)
        return [number for (number, _), _ in (await BucketMedium(objects).look())[1]]

    assert run(work()) == [3]


# -- one owner beside a store that lies


def test_a_commit_counts_and_old_ones_go() -> None:
    objects = LyingObjects()

    async def work() -> list[int]:
        owner = Owner(objects, b"s" * 16, keep_last=2)
        await owner.take_over()
        for counter in range(1, 5):
            assert await sent(owner, counter)
            await owner.collect()
        assert not await sent(owner, 3), "as new a one is there"
        return owner.counters

    assert run(work()) == [4, 3]
    assert sorted(key for key in objects.stored if key.startswith("commits/")) == [commit_key(4), commit_key(5)]


@pytest.mark.parametrize("lie", ["conflict after success", "no answer"])
def test_a_creation_whose_answer_is_wrong_or_lost_is_found(lie: str) -> None:
    objects = LyingObjects()

    async def work() -> None:
        owner = Owner(Patient(objects, deadline=5, pause=0.001), b"s" * 16, keep_last=1)
        objects.lies, objects.times = {lie}, 3
        await owner.take_over()
        objects.times = 3
        assert await sent(owner, 1)
        assert owner.counters == [1]

    run(work())


@pytest.mark.parametrize(
    ("lie", "said"), [("ignored preconditions", "ignores preconditions"), ("stale list", "does not list"),
                      ("vanished", "no such bucket")],
)  # fmt: skip
def test_a_store_that_cannot_be_trusted_is_refused(lie: str, said: str) -> None:
    objects = LyingObjects()
    objects.lies = {lie}
    with pytest.raises(RefusedError, match=said):
        run(Owner(objects, b"s" * 16, keep_last=1).take_over())


def test_the_last_of_two_runs_that_take_over_wins_and_the_other_says_so() -> None:
    objects = LyingObjects()

    async def work() -> None:
        first, second = (Owner(objects, b"s" * 16, keep_last=1) for _ in range(2))
        await first.take_over()
        await sent(first, 1)
        await second.take_over()
        assert second.counters == [1]
        with pytest.raises(StoreLockedError, match=r"another run .* took lying://bucket over"):
            await sent(first, 2)
        assert await sent(second, 3)
        await second.collect()
        assert (await BucketMedium(objects).look())[1][0][1].entry.counter == 3

    run(work())


def test_a_draft_goes_on_with_what_an_earlier_run_sent() -> None:
    objects = LyingObjects()

    async def work() -> tuple[int, int]:
        first = Owner(objects, b"s" * 16, keep_last=1)
        await first.take_over()
        draft = Draft.of(first)
        for number in range(3):
            data = bytes([number]) * 1000
            await draft.send(number, data, digest(data))
        second = Owner(objects, b"s" * 16, keep_last=1)
        await second.take_over()
        again = Draft.of(second)
        for number in range(4):
            data = bytes([number]) * 1000
            await again.send(number, data, digest(data))
        await second.commit([await again.finish(entry_of(1, 4000), 512, b"manifest")])
        await second.collect()
        part = next(iter(second.records.values())).parts[0]
        assert all(key in objects.stored for key, _ in (await read_index(objects, part)).objects)
        return draft.sent, again.sent - part.nbytes

    assert run(work()) == (3000, 1000)


def test_what_a_draft_goes_on_with_outlives_a_removal() -> None:
    objects = LyingObjects()

    async def work() -> None:
        first, second = (Owner(objects, b"s" * 16, keep_last=2) for _ in range(2))
        await first.take_over()
        for counter in (1, 2):
            await sent(first, counter)
        data = b"of a run that was killed"
        await Draft.of(first).send(0, data, digest(data))
        await second.take_over()
        await second.amend({second.now[-1].number})
        await second.collect()
        draft = Draft.of(second)
        await draft.send(0, data, digest(data))
        assert draft.sent == 0
        await second.commit([await draft.finish(entry_of(3, len(data)), 512, b"manifest")])
        await second.collect()
        (_, newest), *_ = (await BucketMedium(objects).look())[1]
        assert newest.entry.counter == 3
        assert all(key in objects.stored for key, _ in (await read_index(objects, newest.parts[0])).objects)

    run(work())


def test_a_prefix_that_is_not_empty_is_refused_for_a_copy() -> None:
    objects = LyingObjects()

    async def work() -> None:
        await Owner(objects, b"s" * 16, keep_last=1).take_over()
        with pytest.raises(RefusedError, match="empty prefix"):
            await Owner(objects, b"t" * 16, keep_last=1).take_over(empty=True)

    run(work())


def test_removing_is_a_record_with_a_shorter_keep_list() -> None:
    objects = LyingObjects()

    async def work() -> None:
        owner = Owner(objects, b"s" * 16, keep_last=3)
        await owner.take_over()
        for counter in (1, 2, 3):
            await sent(owner, counter)
        await owner.amend({owner.now[0].number, owner.now[2].number})
        await owner.collect()
        assert owner.counters == [2]
        assert [record.entry.counter for _, record in (await BucketMedium(objects).look())[1]] == [2]
        assert len([key for key in objects.stored if key.startswith("data/")]) == 2
        assert await sent(owner, 4)
        assert owner.counters == [4, 2]

    run(work())


def test_a_damaged_kept_record_stops_deletion_and_nothing_else() -> None:
    objects = LyingObjects()

    async def work() -> None:
        owner = Owner(objects, b"s" * 16, keep_last=2)
        await owner.take_over()
        for counter in (1, 2):
            await sent(owner, counter)
            await owner.collect()
        objects.stored[commit_key(3)] = objects.stored[commit_key(3)][:-1] + b"?"
        before = {*objects.stored}
        await sent(owner, 3)
        assert await owner.collect() == 0
        assert before <= {*objects.stored}
        again = Owner(objects, b"s" * 16, keep_last=2)
        await again.take_over()
        assert again.counters == [3]
        for counter in (4, 5):
            await sent(again, counter)
        assert await again.collect()
        assert again.counters == [5, 4]

    run(work())


# -- readers


def test_a_reader_that_misses_an_object_looks_again() -> None:
    """The rule "no-reread": missing is damage only if the commit still counts."""
    objects = LyingObjects()

    async def work() -> None:
        owner = Owner(objects, b"s" * 16, keep_last=1)
        await owner.take_over()
        data = bytes(5000)
        await sent(owner, 1, data)
        medium = BucketMedium(objects)
        await medium.names()
        file = await medium.open("slot-002", writable=False)
        view = memoryview(bytearray(1000))
        assert await medium.read(file, 100, view) == 1000
        await sent(owner, 2)
        await owner.collect()
        with pytest.raises(ReadError, match="was replaced while it was read"):
            await medium.read(file, 100, view)
        with pytest.raises(ReadError, match="was replaced while it was read"):
            await medium.view(file, 100, 1000)
        with pytest.raises(FileNotFoundError):
            await BucketMedium(objects).open("slot-002", writable=False)
        await medium.names()
        file = await medium.open("slot-003", writable=False)
        del objects.stored[next(key for key in objects.stored if key.startswith("data/") and "/00000-" in key)]
        with pytest.raises(DamagedError, match="though the commit counts"):
            await medium.read(file, 0, view[:1])
        with pytest.raises(DamagedError, match="though the commit counts"):
            await medium.view(file, 0, 1)

    run(work())


def test_a_reader_never_writes() -> None:
    objects = LyingObjects()

    async def work() -> None:
        owner = Owner(objects, b"s" * 16, keep_last=1)
        await owner.take_over()
        await sent(owner, 1)
        objects.requests.clear()
        medium = BucketMedium(objects)
        await medium.names()
        with pytest.raises(WriteError, match="drain"):
            await medium.open("slot-002", writable=True)
        for call in (medium.reserve("slot-003", 1), medium.remove("slot-002"), medium.replace("commit", b"")):
            with pytest.raises(WriteError):
                await call
        await medium.open("slot-002", writable=False)
        assert {kind for kind, _ in objects.requests} <= {"list", "get", "read"}

    run(work())


def test_bytes_are_read_across_objects() -> None:
    objects = LyingObjects()
    payload = random.Random(1).randbytes(10_000)

    async def work() -> None:
        owner = Owner(objects, b"s" * 16, keep_last=1)
        await owner.take_over()
        draft = Draft.of(owner)
        for number, start in enumerate(range(0, 10_000, 3000)):
            data = payload[start : start + 3000]
            await draft.send(number, data, digest(data))
        await owner.commit([await draft.finish(entry_of(1, 10_000), 512, b"manifest")])
        medium = BucketMedium(objects)
        await medium.names()
        file = await medium.open("slot-002", writable=False)
        whole = payload + b"manifest"
        in_one = [(3000, 6000), (3100, 3200), (0, 1), (9000, 10_000)]
        for low, high in [*in_one, (0, 10_008), (2999, 3001), (9_990, 20_000), (10_000, 10_008), (10_008, 10_100)]:
            view = memoryview(bytearray(high - low))
            got = await medium.read(file, low, view)
            assert bytes(view[:got]) == whole[low:high]
            seen = await medium.view(file, low, high - low)
            assert (None if seen is None else bytes(seen)) == (whole[low:high] if (low, high) in in_one else None)
        assert await medium.view(await medium.open("commit", writable=False), 0, 10) is None

    run(work())


# -- deadlines and repetitions


def test_requests_are_repeated_until_they_are_answered() -> None:
    objects = LyingObjects({"a": b"abc"})
    patient = Patient(objects, deadline=5, pause=0.001)

    async def work() -> None:
        for lie in ("no answer", "short body"):
            objects.lies, objects.times = {lie}, 2
            assert bytes(await patient.read("a", 0, 3)) == b"abc"
        objects.lies, objects.times = {"no answer"}, 2
        await patient.put("b", b"xyz")
        assert [key for key, _ in await patient.list("")] == ["a", "b"]
        await patient.delete(["b"])
        assert await patient.get("b", 10) is None

    run(work())


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda each: each.put("data/x", b"1"), WriteError, "writing data/x in lying://bucket: no answer"),
        (lambda each: each.create("commits/x", b"1"), WriteError, "writing commits/x"),
        (lambda each: each.get("commits/x", 1), ReadError, "reading commits/x"),
        (lambda each: each.list("data/"), ReadError, "listing data/"),
        (lambda each: each.delete(["a", "b"]), WriteError, "deleting 2 objects"),
    ],
)  # fmt: skip
def test_a_request_that_hangs_ends_and_names_the_object(
    call: Callable[[Patient], Coroutine[Any, Any, object]], error: type[Exception], said: str
) -> None:
    objects = LyingObjects()
    objects.lies = {"slow"}
    start = time.monotonic()
    with pytest.raises(error, match=said):
        run(call(Patient(objects, deadline=0.1, pause=0.01)))
    assert time.monotonic() - start < 5


def test_a_refusal_is_not_repeated() -> None:
    objects = LyingObjects()
    objects.lies = {"vanished"}
    with pytest.raises(RefusedError):
        run(Patient(objects, deadline=60).put("a", b""))
    assert len(objects.requests) == 1


def test_a_buffer_for_uploads_is_never_used_twice() -> None:
    """A request that was given up may still be sending from it: another content under that name would be damage."""

    async def work() -> None:
        pool = _FreshBuffers(2 * 4096, 4096)
        first, second = await pool.lease(), await pool.lease()
        sending = first.view
        sending[:] = b"1" * 4096
        first.release()
        assert not len(first.view), "a worker that keeps the lease keeps no memory"
        third = await pool.lease()
        third.view[:] = b"3" * 4096
        assert bytes(sending) == b"1" * 4096
        second.release()
        third.release()

    run(work())
