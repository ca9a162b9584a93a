"""The four copies of commit records, each on its own: pure decisions about bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pccheck_async.format.record import COMMIT_NBYTES, REGION_NBYTES, Record, decode_record

__all__ = ["RecordCopy", "examine"]


@dataclass(frozen=True, slots=True)
class RecordCopy:
    """One copy of one commit record.

    Attributes:
        name: ``A0``, ``A1`` (even generations), ``B0`` or ``B1`` (odd ones).
        offset: Where it lies in the commit file, in bytes.
        generation: Of the record; None where it is not valid.
        state: ``valid``; ``blank`` where none was written yet; ``older`` than its twin, as a kill between two writes
            leaves it; ``damaged``.
    """

    name: str
    offset: int
    generation: int | None
    state: Literal["valid", "blank", "older", "damaged"]


def examine(commit: memoryview, store_id: bytes) -> tuple[RecordCopy, ...]:
    """Look at each copy of both records in the bytes of a commit file."""
    starts = range(0, COMMIT_NBYTES, REGION_NBYTES)
    regions = [commit[start : start + REGION_NBYTES] for start in starts]
    records = [decode_record(region, store_id) for region in regions]
    newest = max((record.generation for record in records if record), default=None)
    found = []
    for number, (start, region, record) in enumerate(zip(starts, regions, records, strict=True)):
        pair = records[number // 2 * 2 : number // 2 * 2 + 2]
        state = _state(region, record, pair, first=newest == 0 and number >= 2)
        name = f"{'AB'[number // 2]}{number % 2}"
        found.append(RecordCopy(name, start, record.generation if record else None, state))
    return tuple(found)


def _state(
    region: memoryview, record: Record | None, pair: Sequence[Record | None], *, first: bool
) -> Literal["valid", "blank", "older", "damaged"]:
    if record is None:
        # The records of odd generations begin with the first commit; from then on both are there.
        return "blank" if first and len(region) == REGION_NBYTES and not any(region) else "damaged"
    return "older" if any(other and other.generation > record.generation for other in pair) else "valid"
