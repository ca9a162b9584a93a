# SPDX-License-Identifier: Apache-2.0
"""The actions that a member returns.

The driver carries them out in order and reports results by calling the methods of the member named here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pccheck_async.format import Line
from pccheck_async.group.messages import AnyMessage, Reason, Refusal, Round, RoundEnd
from pccheck_async.group.parts import Applied, Key, Part, SeenStore

__all__ = [
    "Action",
    "Admit",
    "Cancel",
    "ChangeState",
    "EndRestore",
    "EndRound",
    "FillArrays",
    "Free",
    "MatchManifest",
    "Post",
    "Ready",
    "RemoveOrphans",
    "Resolve",
    "ResolveChange",
    "Scan",
    "SendCopies",
    "TakeOver",
    "Unopened",
    "WriteRecord",
]  # fmt: skip


class Action(msgspec.Struct, frozen=True):
    """Base of all actions: an immutable value."""


class Post(Action, frozen=True):
    """Put a message into rank 0's inbox, after the messages posted before."""

    message: AnyMessage


class Scan(Action, frozen=True):
    """Read the newest record of every rank folder in this domain, and call ``found``."""


class Ready(Action, frozen=True):
    """The group is open: ``member.view`` has its checkpoints."""


class Unopened(Action, frozen=True):
    """The group cannot be opened."""

    why: str


class TakeOver(Action, frozen=True):
    """Create this rank's store, or make its newest record durable (I12), and that of each orphan; call ``took_over``.

    With a ``line``, first make a record with that line durable in this rank's store.

    Durability: until ``took_over`` is called, a power failure may bring back older records.
    """

    orphans: tuple[SeenStore, ...]
    line: Line | None = None


class Admit(Action, frozen=True):
    """There is a slot for this checkpoint: write it, and call ``written`` when it is durable, or ``failed``."""

    counter: int


class Cancel(Action, frozen=True):
    """Name this checkpoint in no record; give back its slot when nothing writes to it, and call ``released``.

    A checkpoint that failed is written no further. One that is superseded is written to its end, as by one process.
    """

    counter: int


class WriteRecord(Action, frozen=True):
    """Write the record that names these parts and flush; call ``record_durable`` or ``record_failed``.

    One at a time.
    """

    parts: tuple[Part, ...]
    """Newest first."""
    applied: Applied


class Free(Action, frozen=True):
    """No durable record names these parts of this rank any more: their slots are free (I3).

    The engine's driver has nothing to do for it (publishing the record freed them); the explorer checks I3 with it.
    """

    parts: tuple[Part, ...]


class RemoveOrphans(Action, frozen=True):
    """Remove these folders, which nothing needs any more, by a rename first."""

    stores: tuple[SeenStore, ...]


class Resolve(Action, frozen=True):
    """Report the end of a checkpoint to the callers that wait for it."""

    counter: int
    outcome: Literal["durable", "superseded", "failed", "differs", "torn"]
    why: str = ""
    rank: int = -1
    """The rank that failed; -1: none did."""


class ResolveChange(Action, frozen=True):
    """Report the end of a change of the kept checkpoints to its caller: an error if ``why`` is given.

    Without an error, the change is durable on this rank.
    """

    index: int
    why: str | None
    refused: Refusal = "lost"


class SendCopies(Action, frozen=True):
    """Send this rank's part of a checkpoint to the ranks that hold copies of it, and call ``copied``."""

    round: Round


class EndRound(Action, frozen=True):
    """Drop the copies that are not on the keep-list, as a round has ended, and wake the callers that wait for it."""

    end: RoundEnd


class MatchManifest(Action, frozen=True):
    """Compare this rank's part of a checkpoint with the live state, changing nothing, and call ``matched``.

    ``why`` and ``passed`` are those of :class:`Candidate`.
    """

    key: Key
    why: str = ""
    passed: tuple[int, ...] = ()


class FillArrays(Action, frozen=True):
    """Fill the live arrays, verifying the chunks that hold them, and call ``verified``."""

    key: Key


class ChangeState(Action, frozen=True):
    """Give objects their state, and change plain values: on all ranks all that was read is whole."""

    key: Key


class EndRestore(Action, frozen=True):
    """End the restore without :class:`ChangeState`.

    Reason ``none``: ``restore`` returns None. Any other reason: it raises. All ranks get the same reason, except
    ``lost``: this rank lost rank 0.
    """

    reason: Reason | Literal["lost"]
    why: str
