# SPDX-License-Identifier: Apache-2.0
"""The messages of ranks to rank 0, by way of its inbox, and the decisions of rank 0 for all of them, in one order.

Both travel as MessagePack arrays that begin with their type's name. Numbers of decisions are their places in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from pccheck_async.format import Entry, Which
from pccheck_async.group.parts import Key, Run, SeenStore
from pccheck_async.group.view import View

__all__ = [
    "VERSION",
    "Abort",
    "AboutMemory",
    "Acknowledge",
    "Admitted",
    "AnyDecision",
    "AnyMessage",
    "Broken",
    "Candidate",
    "Cause",
    "Change",
    "ChangeRequest",
    "Commit",
    "Compare",
    "Confirm",
    "Copied",
    "Digests",
    "Failed",
    "Found",
    "Goodbye",
    "GroupDecision",
    "Hello",
    "InMemory",
    "Joined",
    "KeptPart",
    "Matched",
    "Message",
    "Metadata",
    "Next",
    "NotRestored",
    "Ok",
    "Opened",
    "Preempted",
    "Propose",
    "Reason",
    "Refusal",
    "Refused",
    "RestoreRequest",
    "Restored",
    "Roster",
    "Round",
    "RoundEnd",
    "Start",
    "Verified",
    "Verify",
    "WantedStep",
    "Withdraw",
    "about_memory",
    "decode_decision",
    "decode_message",
    "encode",
]  # fmt: skip

VERSION = 9
"""Of this protocol. Ranks with different ones refuse to open."""

Metadata = dict[str, str | int | float | bool | None]
NetworkAddress: TypeAlias = tuple[str, int]


class KeptPart(NamedTuple):
    """One line of a keep-list."""

    key: Key
    pinned: bool


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From one rank to rank 0."""

    rank: int


class GroupDecision(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From rank 0 to all."""


# -- opening


class Hello(Message, frozen=True):
    """A rank has opened its folder."""

    version: int
    world: int
    domain: str
    """The id of its filesystem: those with equal ids see each other's folders."""
    host: str
    settings: str
    """The settings that must be equal on all ranks, encoded."""
    address: NetworkAddress | None = None
    """At which it takes copies of other ranks' checkpoints in memory; None: it takes none."""


class Roster(GroupDecision, frozen=True):
    """All are here; the lowest rank of each domain reads all rank folders there."""

    homes: tuple[int, ...]
    """The domain of each rank."""
    hosts: tuple[str, ...]
    addresses: tuple[NetworkAddress | None, ...] = ()
    """By rank."""
    token: bytes = b""
    """By which ranks that send copies to each other prove that they are of this run."""


class Found(Message, frozen=True):
    """The stores of one domain."""

    stores: tuple[SeenStore, ...]


class Opened(GroupDecision, frozen=True):
    """The findings of all ranks together."""

    view: View
    nonce: int = 0
    """Of the run that begins: with the number in ``view`` its line names it, before its first decision."""


class Refused(GroupDecision, frozen=True):
    """The group cannot be opened."""

    why: str


# -- commits


class Joined(Message, frozen=True):
    """A rank's store is its own: created, or its newest record made durable (I12), with the run's line."""

    store_id: bytes
    came_from: Key | None = None
    """The checkpoint that the line says the run goes on from."""


class Start(GroupDecision, frozen=True):
    """Decision 0 of a run: nothing is prepared before it."""

    run: Run
    keep: tuple[KeptPart, ...]
    unproven: tuple[Key, ...]


class Admitted(Message, frozen=True):
    """Rank 0 admitted a checkpoint: its step, for retention, and its metadata, which count for all."""

    counter: int
    step: int
    metadata: Metadata


class Ok(Message, frozen=True):
    """A rank's durable record names its part as prepared."""

    run: Run
    counter: int
    step: int
    entry: Entry | None
    """Rank 0's."""
    sums: Mapping[str, int] = {}
    """By outermost names in the state, numbers that make 0 over all ranks, modulo 2**64, unless a tensor that
    several ranks have is saved by none or by several of them, or one of them lacks it."""
    name: str | None = None
    """Its name on this rank."""
    replicas: Mapping[int, tuple[int, int]] = {}
    """By hashes of ranks that are believed to have tensors alike: which part of these is compared, and its digest."""
    differing: tuple[int, ...] = ()
    """Hashes of ranks that were known to differ when the state was captured: each of them saved its own."""


class Failed(Message, frozen=True):
    """A rank's part will not become durable."""

    counter: int
    why: str
    latched: bool
    """A flush or a record failed: the rank's store takes no more."""
    torn: bool = False
    """Its capture was torn."""


class Commit(GroupDecision, frozen=True):
    """A checkpoint is complete."""

    counter: int
    keep: tuple[KeptPart, ...]
    superseded: tuple[int, ...]
    """Older ones in flight that retention would not keep beside it."""


class Compare(GroupDecision, frozen=True):
    """Digests of a prepared checkpoint differ: ranks send theirs by path, and from the next one on save their own."""

    counter: int
    differing: tuple[int, ...]
    """Hashes of the ranks that differ."""


class Digests(Message, frozen=True):
    """An answer to :class:`Compare`: digests of this rank's replicas, by path."""

    counter: int
    by_path: Mapping[str, int]


Cause: TypeAlias = Literal["failed", "differs", "torn"]


class Abort(GroupDecision, frozen=True):
    """A checkpoint is not committed."""

    counter: int
    why: str
    rank: int
    """The one whose part failed; -1: none did."""
    cause: Cause = "failed"
    """"differs": replicas of it differ, and the next one holds each rank's own; "torn": a rank's capture was torn."""


Refusal: TypeAlias = Literal["missing", "refused", "lost"]
"""Why a change was refused: there is no such checkpoint, it may not be, or the ranks do not agree."""


class WantedStep(NamedTuple):
    """A change of the kept checkpoints."""

    change: Literal["pin", "unpin", "remove", "remove even the last", "reject", "was rejected"]
    """``was rejected`` changes nothing; it is answered once every rank's record has the marks of the one before."""
    which: int | str
    until: int = -1
    """The counter of the last checkpoint that a rejection covers; -1 for other changes."""

    def __str__(self) -> str:
        return f"{self.change} {self.which!r}" + (f" up to checkpoint {self.until}" if self.until >= 0 else "")


class ChangeRequest(Message, frozen=True):
    """A request for a change, which all ranks send alike."""

    index: int
    """The number of earlier requests."""
    wanted: WantedStep


class Change(GroupDecision, frozen=True):
    """An answer to the requests of one index."""

    index: int
    keep: tuple[KeptPart, ...]
    unproven: tuple[Key, ...]
    why: str | None
    """Why it was refused; then nothing is changed."""
    refused: Refusal = "lost"
    rejected: tuple[Key, ...] = ()
    """Those that restores pass over from now on, besides earlier ones."""
    superseded: tuple[int, ...] = ()
    """Those in flight that were rejected."""


class Goodbye(Message, frozen=True):
    """A rank takes part in no later checkpoint."""

    counter: int
    """The last one."""
    why: str | None
    """The error that it leaves with."""


class Broken(GroupDecision, frozen=True):
    """Nothing more is decided in this run; nothing is dropped."""

    why: str
    rank: int


# -- schedule


class Next(GroupDecision, frozen=True):
    """The next step at which all ranks act alike."""

    step: int
    save: bool = True
    """They save; else it only marks how far the schedule is known."""


class Preempted(Message, frozen=True):
    """A rank was preempted."""


class Propose(GroupDecision, frozen=True):
    """A last step before all ranks exit."""

    number: int
    step: int


class Acknowledge(Message, frozen=True):
    """An answer to a proposal."""

    number: int
    passed: int | None
    """Refused: the rank has come to this step already."""
    ended: bool
    """Refused: its loop has ended."""


class Confirm(GroupDecision, frozen=True):
    """All acknowledged the proposal."""

    step: int


class Withdraw(GroupDecision, frozen=True):
    """No last step is needed: the loops are ending by themselves."""


# -- restore


class RestoreRequest(Message, frozen=True):
    """A request for a restore, which all ranks send alike."""

    index: int
    which: Which
    dry_run: bool = False


class Candidate(GroupDecision, frozen=True):
    """Match the manifest of your part with your state. ``why``: the one before was damaged; empty for the first."""

    index: int
    attempt: int
    key: Key
    why: str = ""
    passed: tuple[int, ...] = ()
    """By rank, how many sources of its part cannot be read, so that the next one is; empty: none."""


MatchOutcome: TypeAlias = Literal["ok", "mismatch", "unseen", "elsewhere", "damaged", "unread"]
"""``unread``: a read failed, and may succeed another time; ``elsewhere``: this copy cannot be read, another host has
one; ``unseen``: a mismatch, maybe for want of parts that only the memory of other hosts has."""


class Matched(Message, frozen=True):
    """The outcome of a rank's match of the candidate."""

    index: int
    attempt: int
    outcome: MatchOutcome
    why: str


class Verify(GroupDecision, frozen=True):
    """All match: verify all chunks of your part."""

    index: int
    attempt: int


class Verified(Message, frozen=True):
    """The outcome of a rank's reading of the candidate."""

    index: int
    attempt: int
    damage: str | None
    differing: tuple[int, ...]
    """Hashes of ranks that this one found to have saved different replicas."""
    unread: bool = False
    """The damage is a read that failed, and may succeed another time."""
    elsewhere: bool = False
    """Another host has a copy."""


class Restored(GroupDecision, frozen=True):
    """All parts are whole: change the state now."""

    index: int
    key: Key
    differing: tuple[int, ...]
    """All hashes that ranks found: in captures from now on each of these ranks saves its own."""


Reason: TypeAlias = Literal["none", "incomplete", "no step", "mismatch", "damaged", "disagreement", "rejected"]
"""Why no state is changed. ``none``: there is no checkpoint, and that is no error."""


class NotRestored(GroupDecision, frozen=True):
    """No state is changed, on any rank."""

    index: int
    reason: Reason
    why: Mapping[int, str]
    """By rank; empty if the reason is the same for all."""


# -- copies of checkpoints in memory on other hosts


class Round(GroupDecision, frozen=True):
    """Every rank sends its part of this checkpoint, which is complete in memory, to the ranks that hold copies of it.

    One round at a time: each copied at its own pace would leave no common checkpoint when a host is lost.
    """

    number: int
    key: Key
    step: int


class Copied(Message, frozen=True):
    """All holders of this rank's copies have its part, verified, and named by a record; or one has not."""

    number: int
    """Of the round."""
    why: str | None = None
    """Why not: it begins with the holder's name."""


class RoundEnd(GroupDecision, frozen=True):
    """The copies of all ranks are there: the checkpoint survives the loss of hosts, and replaces the one before it."""

    number: int
    key: Key
    step: int
    keep: tuple[KeptPart, ...]
    why: str | None = None
    """Why the round failed; the one before stays then."""
    rank: int = -1
    """The one that could not send its part; -1: none, as the checkpoint was removed, or a rank has left."""


_Message = (
    Hello | Found | Joined | Admitted | Ok | Digests | Failed | ChangeRequest | Goodbye | Preempted | Acknowledge
    | RestoreRequest | Matched | Verified | Copied
)  # fmt: skip
_Decision = (
    Roster | Opened | Refused | Start | Commit | Compare | Abort | Change | Broken | Next | Propose | Confirm | Withdraw
    | Candidate | Verify | Restored | NotRestored | Round | RoundEnd
)  # fmt: skip


# -- the tier in memory: the same protocol once more


class AboutMemory(Message, frozen=True):
    """A message about the tier in memory."""

    message: _Message


class InMemory(GroupDecision, frozen=True):
    """A decision about the tier in memory."""

    decision: _Decision


def about_memory(message: AnyMessage) -> AboutMemory:
    """Return a member's message as one about the tier in memory."""
    assert not isinstance(message, AboutMemory)
    return AboutMemory(message.rank, message)


AnyMessage = _Message | AboutMemory
AnyDecision = _Decision | InMemory

_message_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_decision_decoder: msgspec.msgpack.Decoder[AnyDecision] = msgspec.msgpack.Decoder(AnyDecision)


def encode(message: Any) -> bytes:
    """Return the bytes of a message or a decision; lone surrogates, as names and errors may have, go as escapes."""
    try:
        return msgspec.msgpack.encode(message)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(_escaped(msgspec.to_builtins(message, builtin_types=(bytes,))))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return [*map(_escaped, value)] if isinstance(value, (list, tuple)) else value


def decode_message(data: bytes) -> AnyMessage:
    """Decode a message of the inbox. Raises msgspec.DecodeError."""
    return _message_decoder.decode(data)


def decode_decision(data: bytes) -> AnyDecision:
    """Decode a decision that rank 0 published. Raises msgspec.DecodeError."""
    return _decision_decoder.decode(data)
