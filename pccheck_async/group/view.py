# SPDX-License-Identifier: Apache-2.0
"""The findings of a group's ranks at opening, taken together: which checkpoints are complete, and which may be.

Pure functions over the records of every rank folder in every member's domain, running there now or not: ranks may have
swapped nodes. A checkpoint is

- *complete* when durable entries of one run and counter, with equal step and world, are there for all its ranks;
- *provably incomplete* when all the stores of its run are in sight, one lacks its part, and no record calls it
  committed: no caller can ever have received it as durable;
- *unproven* else: a store that is out of sight may have the missing part. It stays until a newer one commits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice, pairwise, product
from math import prod

import msgspec
from msgspec.structs import replace

from pccheck_async.format import Entry, Line
from pccheck_async.group.parts import MOST_HASH, Applied, Key, Part, Run, SeenStore, member_hash, on_the_line, run_id
from pccheck_async.store import Retention, rank_name, ranks_in_words

__all__ = ["Complete", "Incomplete", "View", "kept_at_start", "line_in", "view_of", "view_of_both"]

_MOST_COMBINATIONS = 4096
"""Of stores that may have been the members of a run, before it is left unproven: if ranks swapped nodes often, each
domain has folders of many ranks."""
_MOST_NAMED = 1000
"""Ranks that lack their part of one checkpoint."""


class Complete(msgspec.Struct, frozen=True, array_like=True):
    """A complete checkpoint."""

    run: Run
    world: int
    entry: Entry
    """Rank 0's: step, metadata, pin and rejection are equal for all, places and sizes are not."""
    ways: tuple[tuple[int, ...], ...]
    """Each with a domain that has the part of each rank, in a folder of that rank. A part that more domains have is in
    another one each time; of one that fewer have the last one comes again."""

    @property
    def key(self) -> Key:
        """Its identity."""
        return Key(self.entry.counter, self.run)

    @property
    def places(self) -> tuple[int, ...]:
        """The first domain that has the part of each rank."""
        return self.ways[0]

    @property
    def spare(self) -> tuple[int, ...]:
        """The last domain that has the part of each rank."""
        return self.ways[-1]

    def copies(self, domains: int) -> int:
        """Return in how many of the first ``domains`` domains each part is at least."""
        return min(len({place for place in places if place < domains}) for places in zip(*self.ways, strict=True))


class Incomplete(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that lacks parts, for IncompleteCheckpointError."""

    key: Key
    step: int
    committed: bool
    """Some record calls it committed: it was complete once. Else it may have been."""
    proven: bool
    """It can never have been complete."""
    ranks: tuple[int, ...]
    """Those whose parts are not in sight; of very many the lowest."""
    hosts: tuple[str, ...]
    """The hosts on which these ranks run now, and lack them."""
    missing: int = 0
    """How many parts are not in sight."""

    @property
    def lacking(self) -> str:
        """Those ranks in words."""
        return ranks_in_words(self.ranks, self.missing)


class View(msgspec.Struct, frozen=True, array_like=True):
    """The agreement of all ranks at opening. All lists are newest first."""

    complete: tuple[Complete, ...]
    incomplete: tuple[Incomplete, ...]
    unproven: tuple[Key, ...]
    """Those newer than every complete one; they stay until a newer one commits."""
    base: int
    """The highest counter found, dead entries' included: this run counts on from there. -1 for none."""
    number: int
    """The number of this run."""
    error: str | None = None
    """Why nothing may be built on this."""
    line: Line | None = None
    """It says which checkpoints in memory count; None: none does."""


def view_of(stores: Sequence[SeenStore], homes: Sequence[int], hosts: Sequence[str]) -> View:
    """Return the agreement from the findings of all ranks.

    Args:
        stores: All rank folders of all members' domains.
        homes: The domain that each rank runs in.
        hosts: The host that each rank runs on.
    """
    seen = reachable(stores, homes)
    by_key = parts_by_key(seen)
    pinned = pinned_keys(seen)
    complete: list[Complete] = []
    incomplete: list[Incomplete] = []
    proofs = _Proofs(seen)
    for key in sorted(by_key, reverse=True):
        found = by_key[key]
        there, world = ranks_there([part for _, part in found])
        first = min(found, key=lambda one: one[1].rank)[1]
        if len(there) == world:
            entry = replace(first.entry, pinned=key in pinned)
            if any(part.entry.rejected for _, part in found):  # the call that rejected it may have ended on that rank
                entry = entry.as_rejected()
            complete.append(Complete(first.run, first.world, entry, _ways(found, first.world)))
        else:
            committed = any(part.committed for _, part in found)
            lacking = tuple(sorted({hosts[rank] for rank in range(min(world, len(hosts))) if rank not in there}))
            proven = is_provably_incomplete(proofs, [part for _, part in found])
            # A record's world may be any number: no list of that length is made.
            named = tuple(islice((rank for rank in range(world) if rank not in there), _MOST_NAMED))
            missing = world - len(there)
            incomplete.append(Incomplete(key, first.entry.step, committed, proven, named, lacking, missing))
    newest = complete[0].key.counter if complete else -1
    unproven = tuple(one.key for one in incomplete if not one.proven and one.key.counter > newest)
    return View(
        tuple(complete), tuple(incomplete), unproven, base_counter(seen, complete), run_number(seen),
        error_in(seen, complete), line_in(seen),
    )  # fmt: skip


def _ways(found: Iterable[tuple[SeenStore, Part]], world: int) -> tuple[tuple[int, ...], ...]:
    domains: list[dict[int, None]] = [{} for _ in range(world)]
    for store, part in found:
        domains[part.rank].setdefault(store.domain)
    lists = [sorted(each) for each in domains]  # memory first
    most = max(map(len, lists))
    return tuple(tuple(each[min(number, len(each) - 1)] for each in lists) for number in range(most))


def view_of_both(
    on_disk: Sequence[SeenStore],
    homes: Sequence[int],
    in_memory: Sequence[SeenStore],
    homes_in_memory: Sequence[int],
    hosts: Sequence[str],
) -> View:
    """Return the agreement over both tiers: a checkpoint is complete if each part is in one of them.

    A part in memory counts if the disks' line accepts it. Domains in memory come first, those of disks after them;
    ``places`` prefers memory, and ``spare`` the disk. Nothing is unproven: what is incomplete is newer than what this
    run goes on from, so that its line will not accept it.
    """
    shift = len({*homes_in_memory})
    disks = reachable(on_disk, homes)
    shifted = [replace(store, domain=store.domain + shift) for store in disks]
    stores = [*shifted, *on_the_line(in_memory, line_in(disks))]
    view = view_of(stores, [*homes_in_memory, *(home + shift for home in homes)], hosts)
    return replace(view, unproven=(), base=max(view.base, base_counter(in_memory, ())))


def reachable(stores: Sequence[SeenStore], homes: Sequence[int]) -> list[SeenStore]:
    """Return the stores in the domains that the members run in (``homes``), whichever ranks they are of."""
    return [store for store in stores if store.domain in set(homes)]


def parts_by_key(stores: Iterable[SeenStore]) -> dict[Key, list[tuple[SeenStore, Part]]]:
    """Return the parts of each checkpoint, with the stores that hold them."""
    by_key: defaultdict[Key, list[tuple[SeenStore, Part]]] = defaultdict(list)
    for store in stores:
        for part in store.parts:
            by_key[part.key].append((store, part))
    return by_key


def ranks_there(parts: Sequence[Part]) -> tuple[set[int], int]:
    """Return the ranks whose part is among those of one checkpoint, none if steps or worlds differ; and the world."""
    worlds = {part.world for part in parts}
    agree = len({part.entry.step for part in parts}) == len(worlds) == 1
    world = max(worlds)
    return {part.rank for part in parts if 0 <= part.rank < world} if agree else set(), world


def is_provably_incomplete(proofs: _Proofs, parts: Sequence[Part]) -> bool:
    """Whether a checkpoint that lacks parts can never have been complete."""
    return not any(part.committed for part in parts) and proofs.sees_all_of(parts[0].run, parts[0].world)


class _Proofs:
    """Decides whether all the stores of a run are in sight."""

    def __init__(self, stores: Iterable[SeenStore]) -> None:
        self._hashes: defaultdict[int, dict[bytes, int]] = defaultdict(dict)
        self._members: defaultdict[Run, dict[int, int]] = defaultdict(dict)
        self._known: dict[Run, bool] = {}
        for store in stores:
            value = self._hashes[store.rank].setdefault(store.store_id, member_hash(store.rank, store.store_id))
            for part in store.parts:
                self._members[part.run][store.rank] = value

    def sees_all_of(self, run: Run, world: int) -> bool:
        """Whether stores in sight have the digest that the run's members have; False if too many would be tried."""
        if run not in self._known:
            members = self._members[run]
            if world > len(members.keys() | self._hashes.keys()):
                self._known[run] = False  # and the world may be any number
                return False
            # A store that has a part of the run was its member; of the others, any folder of the rank may have been.
            choices = [[members[r]] if r in members else list(self._hashes.get(r, {}).values()) for r in range(world)]
            self._known[run] = 0 < prod(map(len, choices)) <= _MOST_COMBINATIONS and any(
                sum(chosen) % MOST_HASH == run.members for chosen in product(*choices)
            )
        return self._known[run]


def pinned_keys(stores: Iterable[SeenStore]) -> frozenset[Key]:
    """Return the pinned checkpoints: those of the record with the highest applied decision.

    Not one certain rank's record: pin() returns on a rank whose own record has it, and that one may have been first.
    """
    applied = [store.applied for store in stores if store.applied is not None]
    newest = max(map(_age, applied), default=None)
    # Runs that could not see each other may have had one number: all that either has pinned stays.
    return frozenset(key for one in applied if _age(one) == newest for key in one.pinned)


def _age(applied: Applied) -> tuple[int, int]:
    return applied.run.number, applied.decisions


def base_counter(stores: Iterable[SeenStore], complete: Sequence[Complete]) -> int:
    """Return the highest counter in use, by dead entries too: they may turn out complete when a node comes back."""
    return max((part.entry.counter for store in stores for part in store.parts), default=-1)


def run_number(stores: Sequence[SeenStore]) -> int:
    """Return the number of a run that has seen all these."""
    numbers = [part.run.number for store in stores for part in store.parts]
    numbers += [store.applied.run.number for store in stores if store.applied is not None]
    numbers += [number_of(store.line) for store in stores if store.line is not None]
    return 1 + max(numbers, default=0)


def number_of(line: Line) -> int:
    """Return the number of the run of a group that wrote this line."""
    return int.from_bytes(line.run[:8], "big")


def line_in(stores: Sequence[SeenStore]) -> Line | None:
    """Return the line that says which checkpoints in memory count: that of the newest run that wrote to a disk here.

    None if that run left a record without a line, as one without a tier in memory does, and a tool that rejects a
    checkpoint; or if two runs have its number.
    """
    newest = run_number(stores) - 1
    lines = {store.line for store in stores if store.line is not None and number_of(store.line) == newest}
    for store in stores:
        if any(run.number == newest for run in store.runs) and store.line not in lines:
            return None
    line = lines.pop() if len(lines) == 1 else None
    runs = {run_id(run.number, run.nonce) for store in stores for run in store.runs if run.number == newest}
    return line if line is not None and runs <= {line.run} else None


def error_in(stores: Sequence[SeenStore], complete: Sequence[Complete]) -> str | None:
    """Return a contradiction between the records, in words; None if there is none."""
    by_id: dict[bytes, SeenStore] = {}
    for store in stores:
        other = by_id.setdefault(store.store_id, store)
        if (other.domain, other.rank) != (store.domain, store.rank):
            places = " and ".join(f"rank {one.rank} in domain {one.domain}" for one in (other, store))
            return f"the stores of {places} are copies of one store: remove the one that is not in use"
        if any(part.rank != store.rank for part in store.parts):
            other_rank = next(part.rank for part in store.parts if part.rank != store.rank)
            return (
                f"{rank_name(store.rank)} (domain {store.domain}) holds rank {other_rank}'s parts: it was renamed; "
                f"rename it back to {rank_name(other_rank)}"
            )
    for one, before in pairwise(complete):
        if one.key.counter == before.key.counter:
            return (
                f"two complete checkpoints have the counter {one.key.counter}, of steps {one.entry.step} and "
                f"{before.entry.step}: runs {one.run.number} and {before.run.number} did not see each other; remove one"
            )
    return None


def kept_at_start(
    found: Sequence[Complete], now: Sequence[Complete], retention: Retention, damaged: Collection[int]
) -> list[Complete]:
    """Return those of the complete checkpoints that decision 0 keeps.

    Nothing newer replaces one that is known to be damaged: it stays until the next commit, and so do those that the
    rules keep without it, those unpinned since the opening, and rejected ones. Of these no more than there is room for:
    records also name checkpoints in flight, and earlier runs may have had fewer in flight, and left more.

    Args:
        found: All as they were at the opening, newest first.
        now: Those of them that were not removed since, with their pins.
        retention: The rules.
        damaged: Counters of those that are known to be damaged.
    """

    def by_rules(complete: Sequence[Complete], without: Collection[int]) -> list[int]:
        entries = [one.entry for one in complete if one.entry.counter not in without]
        return [entry.counter for entry in retention.retain(entries[1:], entries[0]).entries] if entries else []

    needed = by_rules(now, damaged)
    rejected = [one.entry.counter for one in now if one.entry.rejected]
    there = {one.entry.counter for one in now}
    more = [*by_rules(now, ()), *by_rules(found, damaged), *by_rules(found, ()), *rejected]
    optional = dict.fromkeys(counter for counter in more if counter in there and counter not in needed)
    kept = {*needed, *islice(optional, max(0, retention.most - len(needed)))}
    return [one for one in now if one.entry.counter in kept]
