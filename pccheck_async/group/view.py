# SPDX-License-Identifier: Apache-2.0
"""The findings of a group's ranks at opening, taken together: which checkpoints are complete, and which may be.

Pure functions over the records of every rank folder in every member's domain, whether that rank runs there now or not:
ranks may have swapped nodes. A checkpoint is

- *complete* when durable entries of one run and counter, with equal step and world, are there for all its ranks;
- *provably incomplete* when all the stores of its run are in sight, one lacks its part, and no record calls it
  committed: no caller can ever have received it as durable;
- *unproven* otherwise: a store that is out of sight may have the missing part. An unproven checkpoint is kept until a
  newer one commits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice, pairwise, product
from math import prod

import msgspec
from msgspec.structs import replace

from pccheck_async.bucket import BucketState
from pccheck_async.format import Entry, Line
from pccheck_async.group.parts import (
    MOST_HASH,
    Applied,
    Key,
    Part,
    Run,
    SeenStore,
    link_to,
    member_hash,
    on_the_line,
    run_id,
)
from pccheck_async.store import Retention, rank_name, ranks_in_words

__all__ = [
    "Complete", "FoundBucket", "Incomplete", "View", "kept_at_start", "line_in", "line_of_run", "view_beside_bucket",
    "view_of", "view_of_both",
]  # fmt: skip

_MOST_COMBINATIONS = 4096
"""Most combinations of stores that are tried as the members of a run, before it is left unproven: if ranks swapped
nodes often, each domain has folders of many ranks."""
_MOST_NAMED = 1000
"""Most ranks that are listed as lacking their part of one checkpoint."""


class Complete(msgspec.Struct, frozen=True, array_like=True):
    """A complete checkpoint."""

    run: Run
    world: int
    entry: Entry
    """Rank 0's entry: step, metadata, pin and rejection are equal for all ranks, places and sizes are not."""
    ways: tuple[tuple[int, ...], ...]
    """Ways to read the checkpoint: each has, for each rank, a domain with its part, in a folder of that rank. The ways
    go through the domains of a part in order; the last one is repeated if other parts are in more domains."""

    @property
    def key(self) -> Key:
        """The identity of the checkpoint: run and counter."""
        return Key(self.entry.counter, self.run)

    @property
    def places(self) -> tuple[int, ...]:
        """The first domain that has the part of each rank."""
        return self.ways[0]

    def ways_through(self, domains: Collection[int]) -> tuple[tuple[int, ...], ...]:
        """Return the ways that are left through some of the domains; none if a part is in none of them."""
        parts = zip(*self.ways, strict=True)
        return _combined([[domain for domain in dict.fromkeys(part) if domain in domains] for part in parts])

    def copies(self, domains: int) -> int:
        """Return how many of the first ``domains`` domains have the part that the fewest of them have."""
        return min(len({place for place in places if place < domains}) for places in zip(*self.ways, strict=True))


class Incomplete(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that lacks parts, for IncompleteCheckpointError."""

    key: Key
    step: int
    committed: bool
    """Whether some record calls it committed: then it was complete once. Else it may have been."""
    proven: bool
    """Whether it can never have been complete."""
    ranks: tuple[int, ...]
    """The ranks whose parts are not in sight; the lowest ones if they are very many."""
    hosts: tuple[str, ...]
    """The hosts on which these ranks run now."""
    missing: int = 0
    """Number of parts that are not in sight."""

    @property
    def lacking(self) -> str:
        """The ranks whose parts are not in sight, in words."""
        return ranks_in_words(self.ranks, self.missing)


class View(msgspec.Struct, frozen=True, array_like=True):
    """The agreement of all ranks at opening. All lists are newest first."""

    complete: tuple[Complete, ...]
    incomplete: tuple[Incomplete, ...]
    unproven: tuple[Key, ...]
    """The unproven checkpoints that are newer than every complete one; they are kept until a newer one commits."""
    base: int
    """The largest counter found, also in entries that are not kept: counters of this run are larger. -1 for none."""
    number: int
    """The number of this run."""
    error: str | None = None
    """A contradiction between the records, with which the group cannot be opened; None: there is none."""
    line: Line | None = None
    """The line that decides which checkpoints in memory, or in a bucket, are valid; None: none is."""
    remote: tuple[Complete, ...] = ()
    """The checkpoints in the bucket that are valid beside the disks, with ways through all tiers; the domains of the
    other tiers come first, then the bucket, which all ranks see. All other lists are about the other tiers alone."""

    @property
    def restorable(self) -> list[Complete]:
        """The checkpoints that were complete at the opening, in any tier, newest first."""
        there = {one.key: one for one in (*self.complete, *self.remote)}
        return [there[key] for key in sorted(there, reverse=True)]


class FoundBucket(msgspec.Struct, frozen=True, array_like=True):
    """The bucket that rank 0 has taken over."""

    state: BucketState
    path: str
    """The group's folder, for messages."""
    url: str
    overwrite: bool
    """Whether checkpoints of other branches are to be replaced."""


def view_of(stores: Sequence[SeenStore], homes: Sequence[int], hosts: Sequence[str]) -> View:
    """Return the agreement from the findings of all ranks.

    Args:
        stores: The stores in all rank folders of all members' domains.
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
    return _combined([sorted(each) for each in domains])  # memory first


def _combined(lists: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the ways to read parts from domains, given for each part; none if a part is in no domain."""
    most = max(map(len, lists)) if all(lists) else 0
    return tuple(tuple(each[min(number, len(each) - 1)] for each in lists) for number in range(most))


def view_of_both(
    on_disk: Sequence[SeenStore],
    homes: Sequence[int],
    in_memory: Sequence[SeenStore],
    homes_in_memory: Sequence[int],
    hosts: Sequence[str],
    bucket: BucketState | None = None,
) -> View:
    """Return the agreement over both tiers: a checkpoint is complete if each part is in one of them.

    A part in memory is valid if the disks' line accepts it; and if another run has gone on from what is on the disks,
    and copied to the ``bucket``, only if the line of its copy does, too. Domains are numbered first in memory, then on
    disks, so that ``places`` prefers memory. Nothing is unproven: incomplete checkpoints are
    newer than the one that this run goes on from, so that the run's line will not accept them.
    """
    shift = len({*homes_in_memory})
    disks = reachable(on_disk, homes)
    shifted = [replace(store, domain=store.domain + shift) for store in disks]
    line = line_in(disks)
    there = on_the_line(in_memory, line)
    if bucket is not None and (beyond := bucket.beyond(line)) is not None:
        there = on_the_line(there, beyond)
    stores, places = [*shifted, *there], [*homes_in_memory, *(home + shift for home in homes)]
    view = view_of(stores, places, hosts)
    view = replace(view, unproven=(), base=max(view.base, base_counter(in_memory, ())))
    return view if bucket is None else _with_bucket(view, bucket, stores, places, hosts)


def view_beside_bucket(
    stores: Sequence[SeenStore], homes: Sequence[int], hosts: Sequence[str], found: FoundBucket
) -> tuple[View, BucketState]:
    """Return the agreement over the disks and a bucket, and the bucket's state with the commits that are not valid.

    A checkpoint in the bucket is valid if the disks' line accepts it, as one in memory is; beside empty disks the
    newest one is. The view has an error if the newest one is of another branch, or if one process saved one.
    """
    disks, alone = reachable(stores, homes), view_of(stores, homes, hosts)
    there = {one.key for one in alone.complete} | {one.key for one in alone.incomplete if not one.proven}
    entries = [part.entry for store in disks for part in store.parts if part.key in there]
    newest = max(entries, key=lambda entry: entry.counter, default=None)
    trouble = found.state.trouble_beside(alone.line, newest, found.path, found.url, of_group=True)
    if trouble and not found.overwrite:
        return replace(alone, error=alone.error or trouble), found.state
    state = found.state.beside(alone.line, None if newest is None else newest.counter, of_group=True)
    numbers = [copy.key.run.number for copy in found.state.copies if copy.key is not None]
    if numbers and found.state.line is not None:
        numbers.append(number_of(found.state.line))
    number = max(alone.number, *(number + 1 for number in numbers)) if numbers else alone.number
    return _with_bucket(replace(alone, number=number), state, disks, homes, hosts), state


def _with_bucket(
    view: View, state: BucketState, stores: Sequence[SeenStore], homes: Sequence[int], hosts: Sequence[str]
) -> View:
    """Return the view over ``stores`` with the valid checkpoints in a bucket: each part may be here or there."""
    domain, worlds = len({*homes}), [copy.world for copy in state.valid]
    parts = [(copy.key, copy) for copy in state.valid if copy.key is not None]
    in_bucket = [
        SeenStore(
            domain,
            rank,
            b"bucket" + rank.to_bytes(10, "big"),
            None,
            tuple(Part(key.run, rank, copy.world, True, copy.entry) for key, copy in parts if rank < copy.world),
        )
        for rank in range(max(worlds, default=0))
    ]
    both, keys = view_of([*stores, *in_bucket], [*homes, domain], hosts), {key for key, _ in parts}
    return replace(
        view,
        remote=tuple(one for one in both.complete if one.key in keys),
        base=max(view.base, state.newest),
        error=view.error or both.error,
    )


def line_of_run(view: View, bucket: BucketState | None, run: bytes, base: int, came_from: Key | None) -> Line:
    """Return the line that all ranks of a run write to their disks.

    Args:
        view: The agreement over the disks.
        bucket: The bucket as it was found at the opening: its lines go on where the disks' line ends. None: none.
        run: The id of the run.
        base: The largest counter in any tier.
        came_from: The checkpoint that the run goes on from; None: none.
    """
    before, link = view.line, None if came_from is None else link_to(came_from)
    if link is not None and bucket is not None and not (before is not None and before.accepts(*link)):
        lines = {copy.key: copy.line for copy in bucket.valid}
        before = lines.get(came_from) or before
    return Line.begin(before, run, base, link)


def reachable(stores: Sequence[SeenStore], homes: Sequence[int]) -> list[SeenStore]:
    """Return the stores in the domains that the members run in (``homes``), of any rank."""
    return [store for store in stores if store.domain in set(homes)]


def parts_by_key(stores: Iterable[SeenStore]) -> dict[Key, list[tuple[SeenStore, Part]]]:
    """Return the parts of each checkpoint, with the stores that hold them."""
    by_key: defaultdict[Key, list[tuple[SeenStore, Part]]] = defaultdict(list)
    for store in stores:
        for part in store.parts:
            by_key[part.key].append((store, part))
    return by_key


def ranks_there(parts: Sequence[Part]) -> tuple[set[int], int]:
    """Return the ranks whose parts are among ``parts``, which are of one checkpoint, and the number of ranks.

    No rank is returned if steps or numbers of ranks differ.
    """
    worlds = {part.world for part in parts}
    agree = len({part.entry.step for part in parts}) == len(worlds) == 1
    world = max(worlds)
    return {part.rank for part in parts if 0 <= part.rank < world} if agree else set(), world


def is_provably_incomplete(proofs: _Proofs, parts: Sequence[Part]) -> bool:
    """Return whether a checkpoint that lacks parts, and has ``parts``, can never have been complete."""
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
        """Return whether stores in sight give the digest of the run's members; False if too many are to be tried."""
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
    """Return the pinned checkpoints, by the record that has applied the latest decision.

    That may be any rank's record: pin() returns on a rank once its own record has the pin, which may be the first.
    """
    applied = [store.applied for store in stores if store.applied is not None]
    newest = max(map(_age, applied), default=None)
    # Runs that could not see each other may have had one number: all that either has pinned stays.
    return frozenset(key for one in applied if _age(one) == newest for key in one.pinned)


def _age(applied: Applied) -> tuple[int, int]:
    return applied.run.number, applied.decisions


def base_counter(stores: Iterable[SeenStore], complete: Sequence[Complete]) -> int:
    """Return the largest counter in use, also by incomplete entries: a node that comes back may complete them."""
    return max((part.entry.counter for store in stores for part in store.parts), default=-1)


def run_number(stores: Sequence[SeenStore]) -> int:
    """Return the number of a run that begins with these stores: larger than all run numbers in them."""
    numbers = [part.run.number for store in stores for part in store.parts]
    numbers += [store.applied.run.number for store in stores if store.applied is not None]
    numbers += [number_of(store.line) for store in stores if store.line is not None]
    return 1 + max(numbers, default=0)


def number_of(line: Line) -> int:
    """Return the number of the run of a group that wrote this line."""
    return int.from_bytes(line.run[:8], "big")


def line_in(stores: Sequence[SeenStore]) -> Line | None:
    """Return the line that decides which checkpoints in memory are valid: of the newest run that wrote to these disks.

    None if that run left a record without a line, as a run without a memory tier does, and a tool that rejects a
    checkpoint; or if two runs have the run's number.
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
    """Return the complete checkpoints that decision 0 keeps.

    First, those that the rules keep without the damaged ones. Then, as far as a record has room, checkpoints that the
    next commit may drop: damaged ones, as nothing newer replaces them yet, those unpinned since the opening, and
    rejected ones. Room may be lacking as records also name checkpoints in flight, of which earlier runs may have had
    fewer, and so have kept more.

    Args:
        found: All complete checkpoints as they were at the opening, newest first.
        now: The ones among them that were not removed since, with their present pins.
        retention: The rules of retention.
        damaged: Counters of the checkpoints that are known to be damaged.
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
