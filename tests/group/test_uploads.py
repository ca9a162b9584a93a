"""Uploads of a group, and which checkpoints in a bucket are valid beside its disks: without any I/O."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pccheck_async.bucket import BucketState, Copied, PartName, Upload
from pccheck_async.bucket.names import data_key
from pccheck_async.format import Entry, Line, Link
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.messages import (
    VERSION,
    AskParts,
    BucketChanged,
    Found,
    Goodbye,
    Hello,
    InBucket,
    NoMoreParts,
    NotRestored,
    Opened,
    PartsSent,
    Refused,
    RestoreRequest,
    SendParts,
    SentParts,
    UploadFailure,
)
from pccheck_async.group.parts import Applied, Key, Part, Run, SeenStore, run_id
from pccheck_async.group.uploads import LeadUploads
from pccheck_async.group.view import FoundBucket, view_beside_bucket
from pccheck_async.store import Retention

RUN = Run(3, 77, 12345)
LINE = Line(run_id(3, 77), 4, (Link(run_id(2, 66), 4),))
UPLOAD = Upload(5, 50, 2)


def entry(counter: int, step: int | None = None) -> Entry:
    return Entry(counter, 10 * counter if step is None else step, 1.0, 512, 0, 512, 8, 0, False, {})


def part(rank: int) -> PartName:
    return PartName(data_key(2, rank, 0, "ab" * 16), 100, entry(5))


def sent(rank: int, number: int = 0, failed: UploadFailure = "", why: str = "") -> SentParts:
    return SentParts(rank, number, () if failed else (part(rank),), failed, why)


# -- uploads


def test_an_upload_ends_when_every_rank_has_answered() -> None:
    lead = LeadUploads(3)
    assert lead.begin(AskParts(0, 0, UPLOAD)) == [SendParts(0, UPLOAD)]
    assert lead.receive(sent(2)) == []
    assert lead.receive(sent(2)) == [], "once more"
    assert lead.receive(sent(0)) == []
    assert lead.receive(sent(1)) == [PartsSent(0, (part(0), part(1), part(2)))], "in the order of ranks"
    assert lead.receive(sent(1)) == [], "it is over"


def test_answers_to_an_earlier_request_count_for_nothing() -> None:
    lead = LeadUploads(2)
    lead.begin(AskParts(0, 0, UPLOAD))
    lead.begin(AskParts(0, 1, UPLOAD))
    assert lead.receive(sent(0, 0)) == lead.receive(sent(1, 0)) == []
    assert lead.receive(sent(0, 1)) == []
    assert lead.receive(sent(1, 1)) == [PartsSent(1, (part(0), part(1)))]


def test_damage_comes_before_other_trouble_and_all_are_waited_for() -> None:
    lead = LeadUploads(3)
    lead.begin(AskParts(0, 0, UPLOAD))
    assert lead.receive(sent(0, 0, "failed", "no answer")) == [], "the others may be sending yet"
    assert lead.receive(sent(2, 0, "damaged", "chunk 3")) == []
    assert lead.receive(sent(1)) == [PartsSent(0, (), "damaged", "rank 2: chunk 3")]


def test_a_rank_that_left_is_not_waited_for() -> None:
    coordinator = Coordinator(2, Retention(), 1)
    coordinator.receive(AskParts(0, 0, UPLOAD))
    assert coordinator.receive(sent(0)) == []
    assert coordinator.receive(Goodbye(1, -1, None)) == [], "it says so to the checkpoints first"
    left = coordinator.receive(NoMoreParts(1))
    assert left == [PartsSent(0, (), "refused", "rank 1: it has left")]
    later = coordinator.receive(AskParts(0, 1, UPLOAD))
    assert list(later) == [SendParts(1, UPLOAD)]
    assert coordinator.receive(sent(0, 1)) == [PartsSent(1, (), "refused", "rank 1: it has left")]


def test_rank_0_waits_for_the_uploads_of_ranks_that_have_said_goodbye() -> None:
    coordinator = Coordinator(2, Retention(), 1)
    coordinator.receive(Goodbye(1, -1, None))
    assert coordinator.remaining == [0], "there is no drain"
    coordinator.receive(BucketChanged(0, BucketState()))
    assert coordinator.remaining == [0, 1]
    coordinator.receive(NoMoreParts(0))
    coordinator.receive(NoMoreParts(1))
    assert coordinator.remaining == [0]
    coordinator.receive(Goodbye(0, -1, None))
    assert coordinator.remaining == []


def test_slow_ranks_are_named() -> None:
    coordinator = Coordinator(2, Retention(), 1)
    coordinator.receive(AskParts(0, 0, UPLOAD))
    assert coordinator.awaited() == {}
    coordinator.receive(sent(0))
    assert coordinator.awaited() == {"the copy of step 50 to the bucket": [1]}


# -- a bucket beside the disks


def copied(counter: int, *, line: Line | None = LINE, number: int = 7, **more: Any) -> Copied:
    return replace(Copied(replace(entry(counter), slot=number), 2, line, b"s" * 16, RUN.members), **more)


def store(rank: int, *counters: int, run: Run = RUN, line: Line | None = LINE) -> SeenStore:
    parts = tuple(Part(run, rank, 2, True, entry(counter)) for counter in counters)
    applied = Applied(run, 1) if counters else None
    return SeenStore(0, rank, bytes([rank]) * 16, applied, parts, line if counters else None)


def beside(*stores: SeenStore, state: BucketState, overwrite: bool = False) -> Any:
    found = FoundBucket(state, "/run", "s3://bucket/run", overwrite)
    return view_beside_bucket(stores, [0, 0], ["a", "b"], found)


STATE = BucketState((copied(6, number=7), copied(5, number=6)), LINE)


def test_the_bucket_counts_beside_empty_disks() -> None:
    view, state = beside(store(0), store(1), state=STATE)
    assert view.error is None
    assert [one.key for one in view.remote] == [Key(6, RUN), Key(5, RUN)]
    assert [one.ways for one in view.remote] == [((1, 1),)] * 2, "its domain comes after those of the disks"
    assert view.complete == ()
    assert (view.base, view.number, state.foreign) == (6, 4, ())


def test_each_part_is_read_from_the_disk_that_has_it() -> None:
    view, _ = beside(store(0, 6), store(1), state=STATE)
    assert [one.ways for one in view.remote] == [((0, 1), (1, 1)), ((1, 1),)]
    assert [one.key for one in view.incomplete] == [Key(6, RUN)], "on the disks alone"


def test_what_the_disks_line_does_not_accept_is_no_checkpoint() -> None:
    other = Line(run_id(3, 99), 4)
    state = BucketState((copied(6, line=other), copied(5, number=6)), other)
    view, _ = beside(store(0, 5), store(1, 5), state=state)
    assert view.error is not None
    assert "/run and s3://bucket/run hold checkpoints of different runs" in view.error
    assert "step 50 (counter 5) on disk, step 60 (counter 6, of store 73737373)" in view.error
    view, found = beside(store(0, 5), store(1, 5), state=state, overwrite=True)
    assert view.error is None
    assert (view.remote, found.foreign, found.valid) == ((), (7, 6), [])
    assert view.base == 6, "counters of this run are larger than all there"


def test_an_older_one_off_the_line_is_left_out_alone() -> None:
    state = BucketState((copied(6), copied(5, number=6, line=Line(run_id(3, 99), 4))), LINE)
    view, found = beside(store(0, 6), store(1, 6), state=state)
    assert [one.key for one in view.remote] == [Key(6, RUN)]
    assert found.foreign == (6,)


def test_a_bucket_that_goes_on_from_the_disk_counts() -> None:
    newer = Line(run_id(4, 88), 6, (Link(run_id(3, 77), 6), Link(run_id(2, 66), 4)))
    state = BucketState((copied(9, line=newer), copied(5, number=6)), newer)
    view, _ = beside(store(0, 6), store(1, 6), state=state)
    assert [one.entry.counter for one in view.remote] == [9, 5]
    assert view.number == 5


def test_the_checkpoints_of_one_process_are_refused() -> None:
    state = BucketState((copied(6, members=None),), LINE)
    for stores in ((store(0), store(1)), (store(0, 5), store(1, 5))):
        view, _ = beside(*stores, state=state)
        assert view.error is not None
        assert "holds checkpoints of one process (step 60)" in view.error
        view, found = beside(*stores, state=state, overwrite=True)
        assert (view.error, view.remote, found.foreign) == (None, (), (7,))


@pytest.mark.parametrize("refused", [False, True])
def test_the_group_opens_with_the_bucket_or_all_ranks_are_refused(refused: bool) -> None:
    coordinator = Coordinator(2, Retention(), 1)
    for rank in range(2):
        coordinator.receive(Hello(rank, VERSION, 2, "d", "h", ""))
    state = replace(STATE, copies=(copied(6, members=None),)) if refused else STATE
    found = FoundBucket(state, "/run", "s3://bucket/run", False)
    (opened,) = coordinator.receive(Found(0, (store(0), store(1)), found))
    assert isinstance(opened, Refused if refused else Opened)
    if isinstance(opened, Opened):
        assert opened.bucket == STATE
        told = replace(STATE, copies=(copied(5, number=6),), trouble="x")
        assert coordinator.receive(BucketChanged(0, told)) == [InBucket(told)]
        assert coordinator.bucket == told


def test_a_rejection_on_one_disk_that_is_left_holds_for_the_bucket() -> None:
    """The other rank's folder is gone, so the checkpoint is complete in the bucket alone."""
    coordinator = Coordinator(2, Retention(), 1)
    for rank in range(2):
        coordinator.receive(Hello(rank, VERSION, 2, "d", "h", ""))
    left = store(0, 6)
    left = replace(left, parts=tuple(replace(one, entry=one.entry.as_rejected()) for one in left.parts))
    state = replace(STATE, copies=STATE.copies[:1])
    coordinator.receive(Found(0, (left, store(1)), FoundBucket(state, "/run", "s3://bucket/run", False)))
    assert not coordinator.receive(RestoreRequest(0, 0, None))
    (answer,) = coordinator.receive(RestoreRequest(1, 0, None))
    assert isinstance(answer, NotRestored)
