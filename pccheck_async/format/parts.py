# SPDX-License-Identifier: Apache-2.0
"""The fields of a rank's commit record for its group (format version 2): each part's run, and the decisions applied.

A group's folder has a store for each rank, ``rank-00003``; its record names that rank's *parts* of checkpoints. A
checkpoint of the group is complete when the records of all its ranks name their parts of it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

__all__ = ["Applied", "Key", "Membership", "Parts", "Run"]


class Run(NamedTuple):
    """One opening of a group.

    Numbers grow with every run that saw the one before; runs that could not see each other, on other nodes, may have
    the same number, and differ by ``nonce``.
    """

    number: int
    nonce: int
    """Random number of 64 bits."""
    members: int
    """Digest of the stores that its ranks write to, 64 bits."""

    @classmethod
    def of_id(cls, run: bytes, members: int) -> Run:
        """Return the run that a line names by its 16-byte id."""
        return cls(int.from_bytes(run[:8], "big"), int.from_bytes(run[8:], "big"), members)


class Key(NamedTuple):
    """The identity of a group's checkpoint, common to its parts; keys sort in the order of checkpoints.

    The step is no part of it: a step may be saved twice, and parts of different saves do not belong together.
    """

    counter: int
    run: Run


class Applied(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The run, and the number of its decisions, that the entries of a record reflect."""

    run: Run
    decisions: int
    pinned: tuple[Key, ...] = ()
    """All checkpoints pinned after these decisions, also without a part on this rank; the newest record's are valid."""


class Membership(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The run, rank and world size of the part that an entry is."""

    run: Run
    rank: int
    world: int
    committed: bool
    """Whether the record reflects the decision to commit it; else it is only prepared. For information only:
    a checkpoint is complete when all ranks' records name it."""


class Parts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The fields of a record of version 2 besides its entries."""

    applied: Applied | None = None
    """Decisions that the entries reflect; None before the first decision."""
    memberships: tuple[Membership, ...] = ()
    """Membership of each entry, in their order."""
