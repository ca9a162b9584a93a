"""Each rule of the protocol on object storage, broken: histories must find it.

The names are those of the model that the protocol was checked with before it was written. Of its 21 broken rules
"keep-by-number" is tested elsewhere (``test_bucket.py``). "sweep-clock" has nothing to break here: no
line of the protocol asks a clock; what a wrong one would do is "sweep-all". "vote-by-list" is about a group's ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from typing import Any

import pytest

from pccheck_async.bucket import BucketMedium, protocol, upload
from pccheck_async.bucket.names import DATA, commit_key, commit_number, data_key, data_name, found_again
from pccheck_async.bucket.owner import Owner
from pccheck_async.bucket.record import CommitRecord, Kept
from pccheck_async.errors import DamagedError
from tests.support import lying_objects
from tests.support.lying_objects import SCENARIOS, BrokenError, Scenario, World, played

MOST = 1500
"""Histories that are played before a broken rule counts as not found."""
Patch = pytest.MonkeyPatch


def target_of(key: str) -> int:
    name = data_name(key)
    return 0 if name is None else name.target


def local_numbers(patch: Patch) -> None:
    """A run numbers its records as its checkpoints, and takes nothing over; so it cannot skip older ones either."""
    no_fence(patch)
    patch.setattr(lying_objects, "first_counter", lambda owner: 0)
    patch.setattr(protocol, "may_send", lambda counter, counters: True)

    async def own(self: Owner, number: int, record: CommitRecord, spare: Sequence[int] = ()) -> None:
        known = {**self.records, Kept(number, record.put): record}
        self.now = protocol.live(number, record)
        self.records = {kept: known[kept] for kept in self.now if kept in known}
        self.base = record.entry.counter if record.parts else number

    original = Owner.commit

    async def commit(self: Owner, parts: Sequence[Any]) -> bool:
        self.base = parts[0].entry.counter - 1
        return await original(self, parts)

    patch.setattr(Owner, "_own", own)
    patch.setattr(Owner, "commit", commit)


def no_fence(patch: Patch) -> None:
    """A run goes on from the newest record without one of its own."""

    async def take_over(self: Owner, *, empty: bool = False) -> None:
        del empty
        listing = protocol.listing_of([*await self.objects.list("commits/"), *await self.objects.list("data/")])
        newest = await self._newest(listing)
        now = () if newest is None else protocol.live(listing.newest, newest)
        self.base, self.now, self.spare = listing.newest, now, protocol.drafts(listing, newest)
        self.adoptable = protocol.adoptable(listing, self.spare)
        self.records = await self.read(now)

    patch.setattr(Owner, "take_over", take_over)


def renumber(patch: Patch) -> None:
    """A run that lost its number lists again, and takes the next one."""

    async def commit(self: Owner, parts: Sequence[Any]) -> bool:
        while True:
            number = self.base + 1
            made = self._record(protocol.retained(self.now, self._keep_last - 1), parts)
            found = await self.settle(number, made)
            if protocol.outcome(found, made) != "mine":
                listing = protocol.listing_of(await self.objects.list("commits/"))
                newest = await self._newest(listing)
                self.base = listing.newest
                self.now = () if newest is None else protocol.live(listing.newest, newest)
                self.records = await self.read(self.now)
                continue
            self.base, self.now = number, protocol.live(number, made)
            self.records = {Kept(number, made.put): made}
            return True

    patch.setattr(Owner, "commit", commit)


def no_confirm(patch: Patch) -> None:
    async def higher(self: Owner, number: int) -> int:
        return 0

    async def overtaken(self: Owner, number: int, fence: CommitRecord) -> bool:
        return False

    patch.setattr(Owner, "higher", higher)
    patch.setattr(Owner, "_overtaken", overtaken)


Named = Mapping[Kept, tuple[CommitRecord, Collection[str]] | None]


def broken_sweep(patch: Patch, change: Callable[..., list[str]]) -> None:
    original = protocol.deletable

    def deletable(base: int, records: Named, listing: protocol.Listing, spare: Collection[int] = ()) -> list[str]:
        return change(original, base, records, listing, spare)

    patch.setattr(protocol, "deletable", deletable)


def sweep_all(patch: Patch) -> None:
    """Deleted is what no commit names, whoever began it."""
    broken_sweep(patch, lambda original, base, records, listing, spare: original(base, records, listing, ()) + [
        key for key in listing.data if key not in original(base, records, listing, ()) and target_of(key) > base
    ])  # fmt: skip


def no_refs(patch: Patch) -> None:
    """Deleted is all that was begun for an older commit, though a newer one names it again."""
    broken_sweep(patch, lambda original, base, records, listing, spare: original(base, records, listing, spare) + [
        key for key in listing.data if target_of(key) < base
    ])  # fmt: skip


def highest_deleted(patch: Patch) -> None:
    """A record without parts is deleted, the newest one too."""
    original = Owner.take_over

    async def take_over(self: Owner, *, empty: bool = False) -> None:
        await original(self, empty=empty)
        if not self.now:
            await self.objects.delete([commit_key(self.base)])

    patch.setattr(Owner, "take_over", take_over)


def give_at_once(patch: Patch) -> None:
    """What was uploaded for a checkpoint that is given up is deleted at once."""
    drafts: dict[int, upload.Draft] = {}
    of = upload.Draft.of

    def made(owner: Owner, rank: int = 0) -> upload.Draft:
        drafts[id(owner)] = of(owner, rank)
        return drafts[id(owner)]

    async def send_one(world: Any, owner: Owner, *rest: Any) -> None:
        before = world.gives
        await send(world, owner, *rest)
        if world.gives < before and id(owner) in drafts:
            draft = drafts[id(owner)]
            named = {key for _, read in (await owner.named()).items() if read for key in read[1]}
            await owner.objects.delete([key for key in draft._there.values() if key not in named])

    send = lying_objects.send_one
    patch.setattr(upload.Draft, "of", made)
    patch.setattr(lying_objects, "send_one", send_one)


def trust_412(patch: Patch) -> None:
    """A refused creation means that another run has the number."""
    original = Owner.settle

    async def settle(self: Owner, number: int, record: CommitRecord) -> CommitRecord:
        found = await original(self, number, record)
        if found is record:
            return record
        return CommitRecord(bytes(16), bytes(16), found.store, found.line, found.keep, found.spare, found.parts)

    patch.setattr(Owner, "settle", settle)


def exact_put_id(patch: Patch) -> None:
    """A record of an attempt that this run gave up counts as another run's."""
    original = protocol.outcome

    def outcome(found: CommitRecord | None, made: CommitRecord) -> str:
        came = original(found, made)
        return "other" if came == "earlier" else came

    patch.setattr(protocol, "outcome", outcome)


def key_without_digest(patch: Patch) -> None:
    """An object's name says for which commit it is, and not what is in it."""
    original = data_key

    def without(target: int, rank: int, number: int, digits: str) -> str:
        return original(target, rank, number, "0" * 32)

    patch.setattr(upload, "data_key", without)


def send_older(patch: Patch) -> None:
    patch.setattr(protocol, "may_send", lambda counter, counters: counter not in list(counters))


def adopt_any(patch: Patch) -> None:
    """Bytes that lie anywhere are named again."""

    def adoptable(listing: protocol.Listing, spare: Collection[int]) -> dict[str, int]:
        return dict(listing.data)

    original = Owner._own

    async def own(self: Owner, number: int, record: CommitRecord, spare: Sequence[int] = ()) -> None:
        kept = self.adoptable
        await original(self, number, record, spare)
        self.adoptable = kept

    patch.setattr(protocol, "adoptable", adoptable)
    patch.setattr(Owner, "_own", own)


def reuse_any(patch: Patch) -> None:
    """Bytes that did not change are named again wherever they lie, and not only where a live commit needs them."""

    async def name_again(self: upload.Draft, live: Any) -> None:
        for key, nbytes in await self._bucket.list(DATA):
            if target_of(key) < self._target:
                self._there |= found_again({key: nbytes}, self.rank)

    patch.setattr(upload.Draft, "name_again", name_again)


def no_refs_reused(patch: Patch) -> None:
    """Deleted is what was begun for a commit that does not count any more, though a newer one names it again."""
    broken_sweep(patch, lambda original, base, records, listing, spare: original(base, records, listing, spare) + [
        key for key in listing.data if target_of(key) not in {kept.number for kept in records} | {*spare, base + 1}
    ])  # fmt: skip


def no_fence_renumber(patch: Patch) -> None:
    no_fence(patch)
    renumber(patch)


def listed_is_live(patch: Patch) -> None:
    """Every record counts that is listed."""

    def live(self: World) -> tuple[Kept, ...]:
        numbers = sorted((n for key in self.objects if (n := commit_number(key))), reverse=True)
        records = [(number, self.record(number)) for number in numbers]
        return tuple(Kept(number, record.put) for number, record in records if record is not None and record.parts)

    patch.setattr(World, "live", property(live))


def data_first(patch: Patch) -> None:
    """Every record counts that is listed, and data are deleted before the records that need them."""
    listed_is_live(patch)
    original = Owner.delete

    async def delete(self: Owner, keys: Sequence[str]) -> None:
        await original(self, keys[::-1])

    patch.setattr(Owner, "delete", delete)


def key_without_target(patch: Patch) -> None:
    """An object's name does not say for which commit it was begun: late deletions hit what was sent again."""
    original = data_key
    patch.setattr(upload, "data_key", lambda target, rank, number, digits: original(1, rank, number, digits))


def number_above_data(patch: Patch) -> None:
    """A run that takes over gets a number above all data in sight, and may pass over a commit that comes meanwhile."""

    def next_number(listing: protocol.Listing) -> int:
        return 1 + max([listing.newest, *map(target_of, listing.data)])

    patch.setattr(protocol, "next_number", next_number)


def no_reread(patch: Patch) -> None:
    """A reader that misses an object says damage, without listing again."""

    async def lost(self: BucketMedium, kept: Kept, why: str) -> DamagedError:
        return DamagedError(why)

    patch.setattr(BucketMedium, "_lost", lost)


BROKEN: dict[str, tuple[Callable[[Patch], None], tuple[int, ...]]] = {
    "local-numbers": (local_numbers, (4, 1)),
    "no-fence": (no_fence, (1, 4)),
    "renumber": (renumber, (1, 4)),
    "no-confirm": (no_confirm, (2, 9)),
    "sweep-all": (sweep_all, (1, 6)),
    "give-at-once": (give_at_once, (8, 7)),
    "trust-412": (trust_412, (2, 0)),
    "exact-put-id": (exact_put_id, (14,)),
    "no-refs": (no_refs, (13, 5)),
    "key-no-digest": (key_without_digest, (6, 4)),
    "send-older": (send_older, (3, 9)),
    "adopt-any": (adopt_any, (3, 13)),
    "highest-deleted": (highest_deleted, (2, 10)),
    "number-above-data": (number_above_data, (1, 4)),
    "no-reread": (no_reread, (15, 16)),
    "listed-is-live": (listed_is_live, (2, 14)),
    "data-first": (data_first, (1, 3)),
    "no-fence-renumber": (no_fence_renumber, (1, 4)),
    "key-store-counter": (key_without_target, (3, 13)),
    "reuse-any": (reuse_any, (17, 18)),
    "no-refs-reused": (no_refs_reused, (17, 18)),
}


def found_by(scenarios: Sequence[Scenario]) -> str | None:
    for seed in count():
        if seed * len(scenarios) > MOST:
            return None
        for scenario in scenarios:
            try:
                played(scenario, seed)
            except (BrokenError, ValueError) as error:
                return f"{type(error).__name__} {error}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("rule", BROKEN)
def test_histories_find_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, numbers = BROKEN[rule]
    break_it(monkeypatch)
    found = found_by([SCENARIOS[number] for number in numbers])
    assert found is not None, f"{MOST} histories did not find it"
