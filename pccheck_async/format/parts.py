# SPDX-License-Identifier: Apache-2.0
"""The group's fields of a rank's commit record (format version 2): the run of each part, and the decisions applied.

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
    """Random, 64 bits."""
    members: int
    """Digest of the stores that its ranks write to, 64 bits."""


class Key(NamedTuple):
    """The identity of a group's checkpoint, common to its parts; keys sort in the order of checkpoints.

    Not the step: a step may be saved twice, and a rank's part of the one does not belong to the other.
    """

    counter: int
    run: Run


class Applied(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How many of which run's decisions the entries of a record reflect."""

    run: Run
    decisions: int
    pinned: tuple[Key, ...] = ()
    """All that are pinned by then, also those that this rank has no part of: of the newest record they are the pins."""


class Membership(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which part of which checkpoint an entry is."""

    run: Run
    rank: int
    world: int
    committed: bool
    """The record applied the decision that committed it; else it is only prepared. That decides nothing:
    a checkpoint is complete when all ranks' records name it."""


class Parts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The fields of a record of version 2 besides its entries."""

    applied: Applied | None = None
    """None before the first decision."""
    memberships: tuple[Membership, ...] = ()
    """Of the entries, in their order."""
