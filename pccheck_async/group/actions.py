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
    """Put a message into rank 0's inbox, after those posted before."""

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

    With a ``line``, a record that has it is durable in this rank's store before that.

    Durability: before ``took_over`` a power failure may bring back the records before these.
    """

    orphans: tuple[SeenStore, ...]
    line: Line | None = None


class Admit(Action, frozen=True):
    """There is a slot for this checkpoint: write it, and call ``written`` when it is durable, or ``failed``."""

    counter: int


class Cancel(Action, frozen=True):
    """Name this checkpoint in no record; give its slot back when nothing writes to it, and call ``released``.

    One that failed is written no further. One that is superseded is written to its end, as in a store of one rank.
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
    """Remove these folders, under their locks, by a rename first: nothing needs them any more."""

    stores: tuple[SeenStore, ...]


class Resolve(Action, frozen=True):
    """A checkpoint has ended, for its waiting callers."""

    counter: int
    outcome: Literal["durable", "superseded", "failed", "differs", "torn"]
    why: str = ""
    rank: int = -1
    """The one that failed."""


class ResolveChange(Action, frozen=True):
    """A call that changes the kept checkpoints has ended; with an error if ``why`` has one.

    Without one, the change is durable on this rank.
    """

    index: int
    why: str | None
    refused: Refusal = "lost"


class SendCopies(Action, frozen=True):
    """Send this rank's part of a checkpoint to the ranks that hold copies of it, and call ``copied``."""

    round: Round


class EndRound(Action, frozen=True):
    """A round has ended: copies that are not on the keep-list go, and callers that wait for it go on."""

    end: RoundEnd


class MatchManifest(Action, frozen=True):
    """Compare this rank's part of a checkpoint with the live state, changing nothing, and call ``matched``.

    ``why``: the one before was damaged; empty for the first.
    """

    key: Key
    why: str = ""
    passed: tuple[int, ...] = ()
    """As of :class:`Candidate`."""


class FillArrays(Action, frozen=True):
    """Fill the live arrays, verifying the chunks that hold them, and call ``verified``."""

    key: Key


class ChangeState(Action, frozen=True):
    """All that was read is whole and fits: give objects their state, and change plain values."""

    key: Key


class EndRestore(Action, frozen=True):
    """The restore ends without :class:`ChangeState`.

    Reason ``none``: ``restore`` returns None. Any other reason: it raises. All ranks get the same reason, except
    ``lost``: this rank lost rank 0.
    """

    reason: Reason | Literal["lost"]
    why: str
