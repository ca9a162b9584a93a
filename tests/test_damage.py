"""Whatever becomes of a store's bytes: what was saved comes back, or an older checkpoint, or an error."""

from __future__ import annotations

import random
import resource
import time
from collections import Counter
from collections.abc import Iterable
from itertools import chain

import pytest

from pccheck_async.layout import COMMIT_NAME, COMMIT_NBYTES, decode_identity, newest_record
from pccheck_async.testing import Image
from tests.damage import Damaged, WholeStore, exchanges, flipped, garbage, pieces, truncations

pytestmark = pytest.mark.slow


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


def test_some_damage() -> None:
    store, other, rng = WholeStore.make(elements=3000), WholeStore.make(elements=3000, seed=1), random.Random(1)
    places = [place for place in every_byte(store.image) if place[0] != COMMIT_NAME or place[1] % (64 << 10) < 900]
    counts = judge(
        store,
        chain(
            flips(store.image, rng.sample(places, 150), rng),
            rng.sample([*truncations(store.image, rng, 4)], 60),
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


@pytest.mark.campaign
def test_every_byte_of_a_small_store() -> None:
    start = time.perf_counter()
    store, rng = WholeStore.make(elements=300), random.Random(3)
    records = records_with_a_flipped_byte(store, range(COMMIT_NBYTES))
    places = [place for place in every_byte(store.image) if place[0] != COMMIT_NAME]
    counts = judge(store, flips(store.image, places, rng), rng, trained=0.01)
    seconds = time.perf_counter() - start
    print(f"\n{records} bytes of records and {len(places)} others: {dict(counts)} in {seconds:.0f} s")


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
