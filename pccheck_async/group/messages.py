# SPDX-License-Identifier: Apache-2.0
"""The messages of ranks to rank 0, through its inbox, and the decisions of rank 0 for all ranks, in one ordered log.

Both are sent as MessagePack arrays that begin with their type's name. A decision's number is its place in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from pccheck_async.bucket import BucketState, PartName, Upload
from pccheck_async.format import Entry, Which
from pccheck_async.group.parts import Key, Run, SeenStore
from pccheck_async.group.view import FoundBucket, View

__all__ = [
    "VERSION",
    "Abort",
    "AboutMemory",
    "Acknowledge",
    "Admitted",
    "AnyDecision",
    "AnyMessage",
    "AskParts",
    "Broken",
    "BucketChanged",
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
    "InBucket",
    "InMemory",
    "Joined",
    "KeptPart",
    "Matched",
    "Message",
    "Metadata",
    "Next",
    "NoMoreParts",
    "NotRestored",
    "Ok",
    "Opened",
    "PartsSent",
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
    "SendParts",
    "SentParts",
    "Start",
    "UploadFailure",
    "Verified",
    "Verify",
    "WantedStep",
    "Withdraw",
    "about_memory",
    "decode_decision",
    "decode_message",
    "encode",
]  # fmt: skip

VERSION = 11
"""The version of this protocol. Ranks with different versions refuse to open."""

Metadata = dict[str, str | int | float | bool | None]
NetworkAddress: TypeAlias = tuple[str, int]


class KeptPart(NamedTuple):
    """An entry of a keep-list: a checkpoint, and whether it is pinned."""

    key: Key
    pinned: bool


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message of one rank to rank 0."""

    rank: int


class GroupDecision(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A decision of rank 0 for all ranks."""


# -- opening


class Hello(Message, frozen=True):
    """A rank has opened its folder."""

    version: int
    world: int
    domain: str
    """The id of the rank's filesystem: ranks with equal ids see each other's folders."""
    host: str
    settings: str
    """The settings that must be equal on all ranks, encoded."""
    address: NetworkAddress | None = None
    """The address at which it takes copies of other ranks' checkpoints in memory; None: it takes none."""


class Roster(GroupDecision, frozen=True):
    """All ranks have said hello; the lowest rank of each domain now reads all rank folders there."""

    homes: tuple[int, ...]
    """The domain of each rank."""
    hosts: tuple[str, ...]
    addresses: tuple[NetworkAddress | None, ...] = ()
    """The ``address`` of each rank's :class:`Hello`, by rank; empty without copies."""
    token: bytes = b""
    """The secret by which ranks that send copies to each other prove that they are of this run."""


class Found(Message, frozen=True):
    """The stores of one domain."""

    stores: tuple[SeenStore, ...]
    bucket: FoundBucket | None = None
    """The bucket of the drain, from rank 0, which has taken it over; None without a drain, and from other ranks."""


class Opened(GroupDecision, frozen=True):
    """The group is open: the view that follows from the findings of all ranks."""

    view: View
    nonce: int = 0
    """The random number of the run that begins. With the number in ``view`` it names the run in its line."""
    bucket: BucketState | None = None
    """The bucket of the drain, with the commits there that are not valid; None without a drain."""


class Refused(GroupDecision, frozen=True):
    """The group cannot be opened."""

    why: str


# -- commits


class Joined(Message, frozen=True):
    """A rank has taken over its store: created it, or made its newest record durable (I12), with the run's line."""

    store_id: bytes
    came_from: Key | None = None
    """The checkpoint that the run goes on from by its line; None: it begins anew, or there is no memory tier."""


class Start(GroupDecision, frozen=True):
    """Decision 0 of a run: no checkpoint is prepared before it."""

    run: Run
    keep: tuple[KeptPart, ...]
    unproven: tuple[Key, ...]


class Admitted(Message, frozen=True):
    """Rank 0 admitted a checkpoint: its step, for retention, and its metadata, which hold for all ranks."""

    counter: int
    step: int
    metadata: Metadata


class Ok(Message, frozen=True):
    """A rank's durable record names its part as prepared."""

    run: Run
    counter: int
    step: int
    entry: Entry | None
    """The entry of the checkpoint, from rank 0; None from other ranks."""
    sums: Mapping[str, int] = {}
    """Numbers by outermost names in the state. Over all ranks those of a name add up to 0 modulo 2**64, unless a tensor
    that several ranks have is saved by none or by several of them, or one of them lacks it."""
    name: str | None = None
    """The checkpoint's name on this rank."""
    replicas: Mapping[int, tuple[int, int]] = {}
    """By hashes of ranks that are believed to have equal tensors: the number of the compared part, and its digest."""
    differing: tuple[int, ...] = ()
    """Hashes of ranks that were known to differ when the state was captured: each of them saved its own."""


class Failed(Message, frozen=True):
    """A rank's part will not become durable."""

    counter: int
    why: str
    latched: bool
    """Whether a flush or a record failed, so that the rank's store takes no more commits."""
    torn: bool = False
    """Whether the rank's capture was torn."""


class Commit(GroupDecision, frozen=True):
    """A checkpoint is committed: the parts of all ranks are durable."""

    counter: int
    keep: tuple[KeptPart, ...]
    superseded: tuple[int, ...]
    """The older checkpoints in flight that retention would not keep beside it."""


class Compare(GroupDecision, frozen=True):
    """Digests of a prepared checkpoint differ: ranks send theirs by path; later each rank saves its own replicas."""

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
    """The rank whose part failed; -1: none did."""
    cause: Cause = "failed"
    """"differs": replicas of it differ, and the next one holds each rank's own; "torn": a rank's capture was torn."""


Refusal: TypeAlias = Literal["missing", "refused", "lost"]
"""Why a change was refused. ``missing``: there is no such checkpoint; ``refused``: the change is not allowed; ``lost``:
the ranks ask for different changes, or the group is broken."""


class WantedStep(NamedTuple):
    """A change of the kept checkpoints."""

    change: Literal["pin", "unpin", "remove", "remove even the last", "reject", "was rejected"]
    """``was rejected`` changes nothing: it is answered once every rank's record has the marks of the last rejection."""
    which: int | str
    until: int = -1
    """The counter of the last checkpoint that a rejection covers; -1 for other changes."""

    def __str__(self) -> str:
        return f"{self.change} {self.which!r}" + (f" up to checkpoint {self.until}" if self.until >= 0 else "")


class ChangeRequest(Message, frozen=True):
    """A request for a change, which all ranks send alike."""

    index: int
    """The number of earlier requests of the rank."""
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
    """The checkpoints that restores pass over from now on, in addition to earlier ones."""
    superseded: tuple[int, ...] = ()
    """The rejected checkpoints that were in flight."""


class Goodbye(Message, frozen=True):
    """A rank takes part in no later checkpoint."""

    counter: int
    """The counter of the last checkpoint that the rank requested."""
    why: str | None
    """The error that the rank leaves with; None: without one."""


class Broken(GroupDecision, frozen=True):
    """Nothing more is decided in this run; no checkpoint is dropped."""

    why: str
    rank: int


# -- schedule


class Next(GroupDecision, frozen=True):
    """The next scheduled step."""

    step: int
    save: bool = True
    """Whether all ranks save after this step; else it only marks how far the schedule is known."""


class Preempted(Message, frozen=True):
    """A rank was preempted."""


class Propose(GroupDecision, frozen=True):
    """A proposal of the last step before all ranks exit."""

    number: int
    step: int


class Acknowledge(Message, frozen=True):
    """An answer to a proposal."""

    number: int
    passed: int | None
    """The step that the rank has come to, if it refuses as that is past the proposed one; None: it does not refuse."""
    ended: bool
    """Whether it refuses because its loop has ended."""


class Confirm(GroupDecision, frozen=True):
    """All ranks accepted the proposed last step."""

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
    """Each rank compares the manifest of its part with its state.

    ``why``: why the candidate before this one was passed over, as damaged; empty for the first.
    """

    index: int
    attempt: int
    key: Key
    why: str = ""
    passed: tuple[int, ...] = ()
    """By rank, how many sources of its part could not be read, so that the next one is read; empty: none for all."""


MatchOutcome: TypeAlias = Literal["ok", "mismatch", "unseen", "elsewhere", "damaged", "unread"]
"""``ok``: the part matches the state; ``mismatch``: it does not; ``unseen``: it does not, maybe because this rank does
not see parts in the memory of other hosts; ``damaged``: the part is; ``unread``: a read failed, and may succeed another
time; ``elsewhere``: this copy cannot be read, but another host has one."""


class Matched(Message, frozen=True):
    """The outcome of a rank's comparison of the candidate with its state."""

    index: int
    attempt: int
    outcome: MatchOutcome
    why: str


class Verify(GroupDecision, frozen=True):
    """All ranks match: each one fills its arrays from its part, and verifies the chunks."""

    index: int
    attempt: int


class Verified(Message, frozen=True):
    """The outcome of a rank's reading of the candidate; ``damage``: why it cannot be read, None: it was."""

    index: int
    attempt: int
    damage: str | None
    differing: tuple[int, ...]
    """Hashes of ranks that this one found to have saved different replicas."""
    unread: bool = False
    """Whether the damage is a read that failed, and may succeed another time."""
    elsewhere: bool = False
    """Whether another host has a copy of the damaged part."""


class Restored(GroupDecision, frozen=True):
    """All parts are whole: each rank now completes the change of its state."""

    index: int
    key: Key
    differing: tuple[int, ...]
    """Hashes of all ranks that were found to differ: in captures from now on each of these ranks saves its own."""


Reason: TypeAlias = Literal["none", "incomplete", "no step", "mismatch", "damaged", "disagreement", "rejected"]
"""Why no state is changed. ``none``: there is no checkpoint, and that is no error."""


class NotRestored(GroupDecision, frozen=True):
    """No state is changed, on any rank."""

    index: int
    reason: Reason
    why: Mapping[int, str]
    """The reason in words, by rank; by -1 if it is the same for all; empty if there is nothing to say."""


# -- copies of checkpoints in memory on other hosts


class Round(GroupDecision, frozen=True):
    """Every rank sends its part of this checkpoint, which is complete in memory, to the ranks that hold copies of it.

    One round at a time: each copied at its own pace would leave no common checkpoint when a host is lost.
    """

    number: int
    key: Key
    step: int


class Copied(Message, frozen=True):
    """All holders of a rank's copies have its part, verified, and named by a record; or, with ``why``, one has not."""

    number: int
    """The number of the round."""
    why: str | None = None
    """Why a holder does not have the part, with that rank's number; None: all have it."""


class RoundEnd(GroupDecision, frozen=True):
    """A round has ended: without ``why``, all copies are there, and the checkpoint replaces the last one copied."""

    number: int
    key: Key
    step: int
    keep: tuple[KeptPart, ...]
    why: str | None = None
    """Why the round failed, so that the last checkpoint that was copied stays; None: it succeeded."""
    rank: int = -1
    """The rank that could not send its part; -1: none, as the checkpoint was removed, or a rank has left."""


# -- copies of checkpoints in a bucket


class AskParts(Message, frozen=True):
    """Rank 0's drain requests the parts of a committed checkpoint."""

    number: int
    """The number of earlier requests."""
    upload: Upload


class SendParts(GroupDecision, frozen=True):
    """Each rank uploads the parts of this checkpoint that lie on its disk. One upload at a time."""

    number: int
    upload: Upload


UploadFailure: TypeAlias = Literal["", "damaged", "dropped", "refused", "failed", "ended"]
"""Why parts were not uploaded. ``damaged``: one is, on disk; ``dropped``: the checkpoint was, meanwhile; ``refused``:
the object store refuses, or the rank has left; ``failed``: another attempt may succeed; ``ended``: none will."""


class SentParts(Message, frozen=True):
    """The places of the parts that a rank has uploaded; or why it has not."""

    number: int
    parts: tuple[PartName, ...]
    failed: UploadFailure = ""
    why: str = ""


class PartsSent(GroupDecision, frozen=True):
    """All ranks have answered: the places of all parts, in the order of ranks; or why some part is not there."""

    number: int
    parts: tuple[PartName, ...]
    failed: UploadFailure = ""
    why: str = ""


class NoMoreParts(Message, frozen=True):
    """The rank uploads nothing more; rank 0 does not end its log before. Sent with a drain only, after the goodbye."""


class BucketChanged(Message, frozen=True):
    """The state of rank 0's drain has changed."""

    state: BucketState


class InBucket(GroupDecision, frozen=True):
    """The state of the drain from now on."""

    state: BucketState


_Message = (
    Hello | Found | Joined | Admitted | Ok | Digests | Failed | ChangeRequest | Goodbye | Preempted | Acknowledge
    | RestoreRequest | Matched | Verified | Copied | AskParts | SentParts | NoMoreParts | BucketChanged
)  # fmt: skip
_Decision = (
    Roster | Opened | Refused | Start | Commit | Compare | Abort | Change | Broken | Next | Propose | Confirm | Withdraw
    | Candidate | Verify | Restored | NotRestored | Round | RoundEnd | SendParts | PartsSent | InBucket
)  # fmt: skip


# -- the tier in memory: the same protocol once more


class AboutMemory(Message, frozen=True):
    """A message about the tier in memory."""

    message: _Message


class InMemory(GroupDecision, frozen=True):
    """A decision about the tier in memory."""

    decision: _Decision


def about_memory(message: AnyMessage) -> AboutMemory:
    """Return a message of the memory tier's member, wrapped as one about that tier."""
    assert not isinstance(message, AboutMemory)
    return AboutMemory(message.rank, message)


AnyMessage = _Message | AboutMemory
AnyDecision = _Decision | InMemory

_message_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_decision_decoder: msgspec.msgpack.Decoder[AnyDecision] = msgspec.msgpack.Decoder(AnyDecision)


def encode(message: Any) -> bytes:
    """Return the bytes of a message or a decision; lone surrogates, as names and errors may have, become escapes."""
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
