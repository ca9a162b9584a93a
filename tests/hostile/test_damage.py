"""Whatever becomes of a store's bytes: what was saved comes back, or an older checkpoint, or an error."""

from __future__ import annotations

import errno
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Iterable
from itertools import chain

import pytest
import torch

from pccheck_async import StorageOptions, SyncCheckpointEngine, list_checkpoints, load_sync, stores
from pccheck_async.errors import ReadError, StoreFailedError
from pccheck_async.format.record import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    IDENTITY_NAME,
    REGION_NBYTES,
    decode_identity,
    newest_record,
    region_offsets,
    slot_name,
)
from pccheck_async.testing import CrashDisk, CrashWriter, Image, ImageWriter
from pccheck_async.transfer import PAGE_BYTES
from tests.support.damage import BadBlocks, Damaged, WholeStore, exchanges, flipped, garbage, pieces, truncations

pytestmark = pytest.mark.usefixtures("machine_asked_once")


def judge(store: WholeStore, damaged: Iterable[Damaged], rng: random.Random, trained: float = 0.2) -> Counter[str]:
    """Read every one of them, and train on some."""
    counts: Counter[str] = Counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for what, image in damaged:
        try:
            counts[store.outcome(image)] += 1
            if rng.random() < trained:
                counts[f"trained on: {store.train_on(image)}"] += 1
        except BaseException as error:
            error.add_note(what)
            raise
    files = sum(map(len, store.image.files.values()))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10 < 64 * files + (96 << 20)
    return counts


def flips(image: Image, places: Iterable[tuple[str, int]], rng: random.Random) -> Iterable[Damaged]:
    for name, at in places:
        mask = rng.choice((0x01, 0x80, rng.randrange(1, 256)))
        yield f"byte {at} of {name} xor {mask}", flipped(image, name, at, mask)


def every_byte(image: Image) -> list[tuple[str, int]]:
    return [(name, at) for name, content in image.files.items() for at in range(len(content))]


@pytest.mark.slow
def test_some_damage() -> None:
    store, other, rng = WholeStore.make(elements=3000), WholeStore.make(elements=3000, seed=1), random.Random(1)
    places = [place for place in every_byte(store.image) if place[0] != COMMIT_NAME or place[1] % (64 << 10) < 900]
    counts = judge(
        store,
        chain(
            flips(store.image, rng.sample(places, 100), rng),
            rng.sample([*truncations(store.image, rng, 4)], 50),
            rng.sample([*garbage(store.image, rng)], 40),
            exchanges(store.image, other.image),
            pieces(store.image, other.image, rng, 60),
        ),
        rng,
    )
    assert min(counts[name] for name in ("whole", "older", "refused")) > 10


def test_one_damaged_byte_of_a_record_costs_nothing() -> None:
    store = WholeStore.make(elements=300)
    count = records_with_a_flipped_byte(store, range(0, COMMIT_NBYTES, 97))
    assert count == len(range(0, COMMIT_NBYTES, 97))


def records_with_a_flipped_byte(store: WholeStore, places: range) -> int:
    """Decode the commit file with one byte changed, at each place in turn: both records are there twice."""
    identity = decode_identity(store.image.files["store.json"]).id_bytes
    commit = bytearray(store.image.files[COMMIT_NAME])
    wanted = newest_record(commit, identity)
    rng = random.Random(2)
    for at in places:
        mask = rng.choice((0x01, 0x80, rng.randrange(1, 256)))
        commit[at] ^= mask
        assert newest_record(commit, identity) == wanted, at
        commit[at] ^= mask
    return len(places)


@pytest.mark.slow
@pytest.mark.campaign
def test_every_byte_of_a_small_store() -> None:
    start = time.perf_counter()
    store, rng = WholeStore.make(elements=300), random.Random(3)
    records = records_with_a_flipped_byte(store, range(COMMIT_NBYTES))
    places = [place for place in every_byte(store.image) if place[0] != COMMIT_NAME]
    counts = judge(store, flips(store.image, places, rng), rng, trained=0.01)
    seconds = time.perf_counter() - start
    print(f"\n{records} bytes of records and {len(places)} others: {dict(counts)} in {seconds:.0f} s")


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4))
def test_random_damage_of_a_larger_store(seed: int) -> None:
    start, rng = time.perf_counter(), random.Random(seed)
    store, other = (WholeStore.make(elements=100_000, seed=2 * seed + number) for number in range(2))
    names = [name for name in store.image.files if name != COMMIT_NAME]
    where = [(name, rng.randrange(len(store.image.files[name]))) for name in rng.choices(names, k=2500)]
    flipped_bytes = judge(store, flips(store.image, where, rng), rng, trained=0.02)
    others = chain(
        truncations(store.image, rng, 100),
        *(garbage(store.image, rng) for _ in range(5)),
        exchanges(store.image, other.image),
        pieces(store.image, other.image, rng, 1500),
    )
    counts = judge(store, others, rng)
    print(f"\nflips {dict(flipped_bytes)}, other damage {dict(counts)} in {time.perf_counter() - start:.0f} s")


# -- blocks that cannot be read


def blocks(*starts: int, nbytes: int = REGION_NBYTES) -> set[int]:
    return {block for start in starts for block in range(start // PAGE_BYTES, (start + nbytes) // PAGE_BYTES)}


def newest(store: WholeStore) -> int:
    identity = decode_identity(store.image.files[IDENTITY_NAME])
    record = newest_record(store.image.files[COMMIT_NAME], identity.id_bytes)
    assert record is not None
    return record.generation


def steps(image: Image, bad: dict[str, set[int]]) -> list[int]:
    return [info.step for info in list_checkpoints("x", io=BadBlocks(ImageWriter(image), bad))]


@pytest.mark.slow
def test_any_block_of_the_commit_file_may_be_unreadable() -> None:
    store = WholeStore.make(elements=300)
    first = {block for start in region_offsets(0) + region_offsets(1) for block in blocks(start, nbytes=PAGE_BYTES)}
    for block in range(COMMIT_NBYTES // PAGE_BYTES):
        bad = {COMMIT_NAME: {block}}
        assert steps(store.image, bad) == [3, 2]
        if block not in first:
            continue
        assert load_sync("x", io=BadBlocks(ImageWriter(store.image), bad))["step"] == 3
        found = stores.recover("x", io=BadBlocks(ImageWriter(store.image), bad))
        assert (found.record, [info.step for info in found.named], found.needed) == ("valid", [3, 2], False)
        device = BadBlocks(CrashWriter(CrashDisk.from_image(store.image), turns=0), bad)
        with SyncCheckpointEngine("x", storage=StorageOptions(io=device), keep_last=3) as engine:
            engine.checkpoint({"x": torch.ones(3)}, step=9).result()
        assert not device.bad[COMMIT_NAME]  # written over: the device took another block


@pytest.mark.slow
def test_verify_names_the_copies_that_cannot_be_read() -> None:
    store = WholeStore.make(elements=300)
    found = stores.verify("x", io=BadBlocks(ImageWriter(store.image), {COMMIT_NAME: {0, 31}}))
    assert [copy.state for copy in found.records] == ["damaged", "damaged", "valid", "valid"]
    assert not found.whole
    assert not found.checkpoints[0].damage


@pytest.mark.parametrize("before", [0, 1])
def test_a_record_of_which_no_copy_can_be_read_may_be_the_newest(before: int) -> None:
    """A device that fails for a moment must not cost what was acknowledged: the next writer writes over it."""
    store = WholeStore.make(elements=300)
    disk = CrashDisk.from_image(store.image)
    bad = {COMMIT_NAME: blocks(*region_offsets(newest(store) - before))}
    with pytest.raises(ReadError, match="may be the newest; try again"):
        steps(store.image, bad)
    with pytest.raises(ReadError, match="may be the newest"):
        SyncCheckpointEngine(
            "x", storage=StorageOptions(io=BadBlocks(CrashWriter(disk, turns=0), bad)), keep_last=2
        ).open()
    assert disk.contents() == store.image.files
    found = stores.recover("x", io=BadBlocks(CrashWriter(disk, turns=0), bad), write=True)
    assert (found.record, [info.step for info in found.named][:2]) == ("damaged", [3, 2])
    with SyncCheckpointEngine("x", storage=StorageOptions(io=CrashWriter(disk, turns=0)), keep_last=2) as engine:
        assert [info.step for info in engine.checkpoints()][:2] == [3, 2]


def test_memory_that_runs_out_is_no_bad_block() -> None:
    store = WholeStore.make(elements=300)
    io = BadBlocks(ImageWriter(store.image), {COMMIT_NAME: {0}}, error=errno.ENOMEM)
    with pytest.raises(ReadError, match=os.strerror(errno.ENOMEM)):
        list_checkpoints("x", io=io)


def test_no_readable_record_is_the_devices_error() -> None:
    store = WholeStore.make(elements=300)
    bad = {COMMIT_NAME: blocks(0, nbytes=COMMIT_NBYTES)}
    with pytest.raises(ReadError, match="Input/output error"):
        steps(store.image, bad)
    assert [info.step for info in stores.recover("x", io=BadBlocks(ImageWriter(store.image), bad)).named][:2] == [3, 2]


def test_a_block_that_cannot_be_written_either_latches_the_store() -> None:
    store = WholeStore.make(elements=300)
    device = BadBlocks(
        CrashWriter(CrashDisk.from_image(store.image), turns=0), {COMMIT_NAME: {region_offsets(1)[0] // PAGE_BYTES}},
        stubborn=True,
    )  # fmt: skip
    with SyncCheckpointEngine("x", storage=StorageOptions(io=device)) as engine, pytest.raises(StoreFailedError):
        engine.checkpoint({"x": torch.ones(3)}, step=9).result()


def test_an_unreadable_identity_is_rebuilt_from_the_records() -> None:
    store = WholeStore.make(elements=300)
    disk = CrashDisk.from_image(store.image)
    bad = {IDENTITY_NAME: {0}}
    assert steps(store.image, bad) == [3, 2]
    with SyncCheckpointEngine(
        "x", storage=StorageOptions(io=BadBlocks(CrashWriter(disk, turns=0), bad)), keep_last=2
    ) as engine:
        engine.checkpoint({"x": torch.ones(3), "step": 9}, step=9).result()
    assert load_sync("x", io=CrashWriter(disk, turns=0, read_only=True))["step"] == 9  # with the old identity
    dry = stores.recover("x", io=BadBlocks(CrashWriter(disk, turns=0, read_only=True), bad))
    assert (dry.identity, dry.record, [info.step for info in dry.named]) == ("damaged", "valid", [9, 3])
    assert stores.recover("x", write=True, io=BadBlocks(CrashWriter(disk, turns=0), bad)).written == (IDENTITY_NAME,)
    assert not stores.recover("x", io=CrashWriter(disk, turns=0, read_only=True)).needed
    with pytest.raises(ReadError):  # no record tells what it was
        steps(Image({**store.image.files, COMMIT_NAME: bytes(COMMIT_NBYTES)}, b""), bad)


def test_what_is_recovered_has_no_unreadable_block_in_its_manifest() -> None:
    """A long plain value would decode all the same."""
    disk = CrashDisk()
    with SyncCheckpointEngine("x", storage=StorageOptions(io=CrashWriter(disk, turns=0))) as engine:
        engine.checkpoint({"x": torch.ones(3), "blob": bytes(range(256)) * 64}, step=1).result()
    files = {**disk.contents(), COMMIT_NAME: bytes(COMMIT_NBYTES)}
    identity = decode_identity(files[IDENTITY_NAME])
    record = newest_record(disk.contents()[COMMIT_NAME], identity.id_bytes)
    assert record is not None
    (entry,) = record.entries
    bad = {slot_name(entry.slot): {entry.manifest_offset // PAGE_BYTES + 2}}
    assert [info.step for info in stores.recover("x", io=ImageWriter(Image(files, b""))).named] == [1]
    assert stores.recover("x", io=BadBlocks(ImageWriter(Image(files, b"")), bad)).named == ()
