# SPDX-License-Identifier: Apache-2.0
"""The names of objects in a bucket. They are relative to the prefix, which may be copied as a whole.

::

    commits/000000007                          the record of commit 7 (:mod:`pccheck_async.bucket.record`)
    data/000000007/00000/00002-<32 digits>     bytes uploaded for commit 7, or a later one, by rank 0: its third object

The digits of a data object are the 128-bit digest of its bytes: one name never has two contents, so an upload may be
repeated, or arrive late, and does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from pccheck_async.errors import StoreError
from pccheck_async.format.record import MOST_SLOT

__all__ = [
    "COMMITS", "DATA", "MOST_NUMBER", "DataName", "commit_key", "commit_number", "data_key", "data_name", "data_prefix",
    "digest", "found_again",
]  # fmt: skip

COMMITS = "commits/"
DATA = "data/"
MOST_NUMBER = MOST_SLOT
"""The largest number of a commit: nine digits."""
_COMMIT = re.compile(r"commits/([0-9]{9})")
_DATA = re.compile(r"data/([0-9]{9})/([0-9]{5})/([0-9]{5,9})-([0-9a-f]{32})")


class DataName(NamedTuple):
    """The parts of a data object's name."""

    target: int
    """The number of the commit that the object was first uploaded for."""
    rank: int
    number: int
    digest: str


def commit_key(number: int) -> str:
    """Return the name of the record of a commit. Raises StoreError if no number is left."""
    if number > MOST_NUMBER:
        raise StoreError(f"the bucket has used its last number of a commit, {MOST_NUMBER}: begin another prefix")
    return f"{COMMITS}{number:09d}"


def commit_number(key: str) -> int | None:
    """Return the number in the name of a record; None for any other name."""
    match = _COMMIT.fullmatch(key)
    return None if match is None else int(match[1])


def data_prefix(target: int) -> str:
    """Return the prefix of the names of data objects that are uploaded for the commit with the number ``target``."""
    return f"{DATA}{target:09d}/"


def data_key(target: int, rank: int, number: int, digits: str) -> str:
    """Return the name of a data object."""
    return f"{data_prefix(target)}{rank:05d}/{number:05d}-{digits}"


def data_name(key: str) -> DataName | None:
    """Return the parts of a data object's name; None for any other name."""
    match = _DATA.fullmatch(key)
    return None if match is None else DataName(int(match[1]), int(match[2]), int(match[3]), match[4])


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return the 128-bit digest of an object's bytes (XXH3), 32 hexadecimal digits. Raises ImportError: no xxhash."""
    import xxhash

    digits: str = xxhash.xxh3_128_hexdigest(data)
    return digits


def found_again(objects: Mapping[str, int], rank: int) -> dict[tuple[str, int], str]:
    """Return the names of a rank's data objects among ``objects``, by digest and size in bytes."""
    names = ((data_name(key), nbytes, key) for key, nbytes in objects.items())
    return {(name.digest, nbytes): key for name, nbytes, key in names if name is not None and name.rank == rank}
