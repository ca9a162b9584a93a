# SPDX-License-Identifier: Apache-2.0
"""The decisions of the commit protocol on object storage, purely: what counts, what comes next, what may be deleted.

:class:`.owner.Owner` asks them between its requests. The rules, as comments name them:

- B1: a record is created if absent, and never changed; its number is that of the newest record in sight and one, so
  that of two runs that saw the same one only one gets it.
- B2: the newest record decides what counts: itself, if it has parts, and its keep-list, by number and put-id.
- B3: a run takes a prefix over by a fence before it chooses what to restore, and commits only below no other record.
- B4: only after LIST shows nothing above a record of one's own is it reported, and anything deleted.
- B5: deleted is only what was begun at or below that record, and what neither it, its keep-list nor its spare targets
  name; and nothing, if a kept record cannot be read or is another one. The highest record stays.
- B6: a request that was not answered may still be applied, at any time. So an object's name has its digest, and what
  was uploaded for a checkpoint that was given up goes only after a later record.
- B7: nothing older than the newest one that counts is sent.
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
    """The objects under a prefix, as one LIST saw them, with their bytes."""

    commits: dict[int, int]
    """Records by number."""
    data: dict[str, int]
    """Data objects by name; names that this package does not make are left out."""

    @property
    def newest(self) -> int:
        """The highest number of a record; 0 for none."""
        return max(self.commits, default=0)


def listing_of(objects: Iterable[tuple[str, int]]) -> Listing:
    """Return a listing of objects, names and bytes."""
    listing = Listing({}, {})
    for key, nbytes in objects:
        if (number := commit_number(key)) is not None:
            listing.commits[number] = nbytes
        elif key.startswith(DATA) and data_name(key) is not None:
            listing.data[key] = nbytes
    return listing


def live(number: int, record: CommitRecord) -> tuple[Kept, ...]:
    """Return the commits that count if ``record`` is the newest, newest first (B2)."""
    return ((Kept(number, record.put),) if record.parts else ()) + record.keep


def next_number(listing: Listing) -> int:
    """Return the number of the next record of a run that takes the prefix over (B1).

    Numbers of data do not count: a commit that another run creates after this listing must not get a lower one.
    """
    return listing.newest + 1


def drafts(listing: Listing, newest: CommitRecord | None) -> tuple[int, ...]:
    """Return the targets whose data a run that takes over may go on with: what was begun above the newest record.

    Nobody has deleted any of it, or will: that is done at or below one's own record (B5).
    """
    there = {name.target for key in listing.data if (name := data_name(key)) is not None}
    begun = {listing.newest + 1, *(() if newest is None else newest.spare)}
    return tuple(sorted(begun & there))


def adoptable(listing: Listing, spare: Collection[int]) -> dict[str, int]:
    """Return the data objects that a draft may name instead of sending their bytes again."""
    return {key: nbytes for key, nbytes in listing.data.items() if (n := data_name(key)) and n.target in spare}


def outcome(found: CommitRecord | None, made: CommitRecord) -> Outcome:
    """Return what the record that lies at a number says about one's own attempt to create it there (B6).

    "earlier": an attempt of this run that was given up, and has arrived since.
    """
    if found is None:
        return "absent"
    if found.put == made.put:
        return "mine"
    return "earlier" if found.owner == made.owner else "other"


def may_send(counter: int, counters: Iterable[int]) -> bool:
    """Return whether a checkpoint is newer than all that count (B7)."""
    return all(counter > other for other in counters)


def retained(now: tuple[Kept, ...], most: int, without: Collection[int] = ()) -> tuple[Kept, ...]:
    """Return the commits that the next record keeps: the newest ``most``, of those not dropped on purpose."""
    return tuple([kept for kept in now if kept.number not in without][:most])


def deletable(
    base: int,
    records: Mapping[Kept, tuple[CommitRecord, Collection[str]] | None],
    listing: Listing,
    spare: Collection[int] = (),
) -> list[str]:
    """Return what the owner of record ``base`` may delete once that is confirmed, records first (B5).

    Args:
        base: The number.
        records: What counts, ``base`` included: each record and the names of the data objects that it needs; None: it
            cannot be read.
        listing: All objects, listed after the confirmation.
        spare: Targets whose data are still needed.
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
