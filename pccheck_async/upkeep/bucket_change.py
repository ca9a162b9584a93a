# SPDX-License-Identifier: Apache-2.0
"""Dropping checkpoints from a bucket: its owner alone does that, so whoever removes becomes the owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pccheck_async.bucket import DATA, BucketMedium, Location, Objects, Owner, open_objects
from pccheck_async.errors import StoreError
from pccheck_async.format import CheckpointInfo, Key
from pccheck_async.group import Place, open_place
from pccheck_async.medium.open_medium import IO
from pccheck_async.store import Retention

__all__ = ["remove_from_bucket"]


async def remove_from_bucket(
    url: Location, choose: Callable[[Place], dict[Key, CheckpointInfo]], *, force: bool, take_over: bool, io: IO
) -> tuple[Sequence[CheckpointInfo], int]:
    """Drop the checkpoints that ``choose`` returns from the committed ones; return them, and the bytes that were freed.

    Whether a run still copies to the bucket cannot be seen there, as no clock is trusted. So the run that owns it has
    to have ended (``take_over``): if it has not, its drain stops.

    Raises StoreError: ``take_over`` is not set, or no checkpoint would be left and ``force`` is not set; and the errors
    of :meth:`.Owner.take_over` and :meth:`.Owner.amend`.
    """
    async with await open_place(url, io) as place:
        medium = place.opened.medium
        assert isinstance(medium, BucketMedium)
        _check_left(place, choose(place), force)  # before the run that owns the bucket is fenced off for nothing
        _, found = await medium.look()
        if not take_over:
            raise StoreError(
                f"{place.name} is owned by run {medium.owner.hex()[:8]}, and whether that still copies to it cannot be "
                "seen there: call engine.remove in it; or, if it has ended, give take_over=True (--take-over). If it "
                "has not, it copies nothing more after that; nothing was removed"
            )
        owner = Owner(open_objects(url, writes=True), found[0][1].store, keep_last=len(found))
        await owner.take_over()
        await place.look()  # only now, when nothing can change any more
        doomed = choose(place)
        _check_left(place, doomed, force)
        counters, before = {key.counter for key in doomed}, await _nbytes_in(owner.objects)
        owner.line = owner.line_there
        await owner.amend({kept.number for kept, each in owner.records.items() if each.entry.counter in counters})
        await owner.collect()
        return [*doomed.values()], max(0, before - await _nbytes_in(owner.objects))


async def _nbytes_in(objects: Objects) -> int:
    return sum(nbytes for _, nbytes in await objects.list(DATA))


def _check_left(place: Place, doomed: dict[Key, CheckpointInfo], force: bool) -> None:
    if not force:
        left = [one.entry for one in place.complete if one.key not in doomed]
        Retention.check_left(left, [one.entry for one in place.complete])
