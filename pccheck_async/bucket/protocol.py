# SPDX-License-Identifier: Apache-2.0
"""The decisions of the commit protocol on object storage, without I/O: live commits, the next record, deletions.

:class:`.owner.Owner` calls these functions between its requests. The rules, as comments name them:

- B1: a record is created if absent, and never changed; its number is one more than that of the newest record that its
  run has seen. So only one of two runs that saw the same newest record gets the number.
- B2: the newest record decides which commits are *live*: itself, if it has parts, and its keep-list, by number and
  put-id.
- B3: a run takes a prefix over by a fence before it chooses what to restore, and commits only if no record is higher.
- B4: a run reports its record, and deletes anything, only after LIST shows no higher record.
- B5: an object is deleted only if it was begun at or below that record, and neither the record, its keep-list nor its
  spare targets name it; none is if a kept record cannot be read or was replaced. The highest record stays.
- B6: a request that was not answered may still be applied, at any time. So an object's name has its digest, and data
  of a checkpoint that was given up are deleted only after a later record.
- B7: no checkpoint is committed that is older than the newest live one.
- B8: no clock decides anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from pccheck_async.bucket.names import DATA, commit_key, commit_number, data_name
from pccheck_async.bucket.record import CommitRecord, Kept

__all__ = [
    "Listing", "Outcome", "adoptable", "deletable", "drafts", "listing_of", "live", "may_send", "next_number",
    "outcome", "retained",
]  # fmt: skip

Outcome = Literal["absent", "mine", "earlier", "other"]


class Listing(NamedTuple):
    """The objects under a prefix, as listed, with their sizes in bytes."""

    commits: dict[int, int]
    """Sizes of records, by number."""
    data: dict[str, int]
    """Sizes of data objects, by name; names that this package does not make are left out."""

    @property
    def newest(self) -> int:
        """The highest number of a record; 0 for none."""
        return max(self.commits, default=0)


def listing_of(objects: Iterable[tuple[str, int]]) -> Listing:
    """Return a listing of objects, given as names with sizes in bytes."""
    listing = Listing({}, {})
    for key, nbytes in objects:
        if (number := commit_number(key)) is not None:
            listing.commits[number] = nbytes
        elif key.startswith(DATA) and data_name(key) is not None:
            listing.data[key] = nbytes
    return listing


def live(number: int, record: CommitRecord) -> tuple[Kept, ...]:
    """Return the commits that are live if ``record`` is the newest one, newest first (B2)."""
    return ((Kept(number, record.put),) if record.parts else ()) + record.keep


def next_number(listing: Listing) -> int:
    """Return the number of the next record of a run that takes the prefix over (B1).

    Numbers of data objects are ignored: a commit that another run creates after this listing must not get a lower one.
    """
    return listing.newest + 1


def drafts(listing: Listing, newest: CommitRecord | None) -> tuple[int, ...]:
    """Return the commit numbers whose uploaded data a run that takes over may use: the next one, and spared ones.

    No run has deleted these data, or will: a run deletes only data at or below its own record (B5).
    """
    there = {name.target for key in listing.data if (name := data_name(key)) is not None}
    begun = {listing.newest + 1, *(() if newest is None else newest.spare)}
    return tuple(sorted(begun & there))


def adoptable(listing: Listing, spare: Collection[int]) -> dict[str, int]:
    """Return the data objects uploaded for ``spare``, which a draft may name instead of uploading their bytes again."""
    return {key: nbytes for key, nbytes in listing.data.items() if (n := data_name(key)) and n.target in spare}


def outcome(found: CommitRecord | None, made: CommitRecord) -> Outcome:
    """Compare the record ``found`` at a number with ``made``, which this run tried to create there (B6).

    "mine": it is that record; "earlier": it is from an earlier attempt of this run, applied since; "other": it is
    another run's; "absent": there is none.
    """
    if found is None:
        return "absent"
    if found.put == made.put:
        return "mine"
    return "earlier" if found.owner == made.owner else "other"


def may_send(counter: int, counters: Iterable[int]) -> bool:
    """Return whether a checkpoint is newer than all committed ones, given by their counters (B7)."""
    return all(counter > other for other in counters)


def retained(now: tuple[Kept, ...], most: int, without: Collection[int] = ()) -> tuple[Kept, ...]:
    """Return the commits that the next record keeps: the newest ``most`` of ``now``, except the numbers ``without``."""
    return tuple([kept for kept in now if kept.number not in without][:most])


def deletable(
    base: int,
    records: Mapping[Kept, tuple[CommitRecord, Collection[str]] | None],
    listing: Listing,
    spare: Collection[int] = (),
) -> list[str]:
    """Return the names that the owner of record ``base`` may delete once that is confirmed, records first (B5).

    Args:
        base: The number of the record.
        records: The live commits: each record and the names of the data objects that it needs; None: it cannot be
            read, and nothing may be deleted.
        listing: All objects, listed after the confirmation.
        spare: Numbers of commits whose uploaded data are still needed.
    """
    named: set[str] = set()
    for kept, read in records.items():
        if read is None or read[0].put != kept.put:
            return []
        named.update(read[1], (part.key for part in read[0].parts))
    numbers = {kept.number for kept in records}
    old = [number for number in sorted(listing.commits) if number < base and number not in numbers]
    unnamed = [
        key
        for key in sorted(listing.data)
        if key not in named and (name := data_name(key)) and name.target <= base and name.target not in spare
    ]
    return [*map(commit_key, old), *unnamed]
