"""The tools on a group's folder: what is complete on all ranks, one rank's part of it, and what is wrong."""

from __future__ import annotations

import asyncio
import fcntl
import json
import re
import shutil
import time
import warnings
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace as replace_fields
from itertools import count, product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from typer.testing import CliRunner

from pccheck_async import (
    CheckpointError,
    NoCheckpointError,
    SyncCheckpointEngine,
    list_checkpoints,
    load,
    load_sync,
    open_checkpoint,
    stores,
)
from pccheck_async.cli import app
from pccheck_async.cli.checkpoints import BACKUP
from pccheck_async.cli.listing import ls
from pccheck_async.cli.watch import GroupView, WatchView
from pccheck_async.errors import (
    CorruptStoreError,
    DamagedError,
    IncompleteCheckpointError,
    StoreError,
    StoreLockedError,
)
from pccheck_async.format import Identity, Key, Record
from pccheck_async.format.record import decode_identity, newest_record, region_offsets
from pccheck_async.group import Applied, Group, Part, Place, place, read_place
from pccheck_async.group.folder import drop_checkpoints, parts_of, record_of, seen_stores, write_parts
from pccheck_async.medium import File
from pccheck_async.medium.files import Files
from pccheck_async.medium.open_medium import OpenMedium
from pccheck_async.medium.status_file import STATUS_NAME, Published, encode_status
from pccheck_async.store import Store, StoreReader, at_once, rank_name
from pccheck_async.upkeep import recover
from pccheck_async.upkeep.rank_records import lock_ranks
from tests.store.test_status_file import EXAMPLE, published
from tests.support.group_folders import end_ranks, save_in_group, spoil, start_ranks, state_of_rank
from tests.support.limits import limited_descriptors


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two ranks with the steps 1, 2 and 3, step 1 pinned, which nobody changes."""
    folder = tmp_path_factory.mktemp("made") / "group"
    save_in_group(folder, 2, 1, 2, 3, pinned=(1,))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """One that may be changed."""
    copy = tmp_path / "group"
    shutil.copytree(made, copy)
    return copy


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_no_store_is_made_in_a_groups_folder(folder: Path, lost: bool) -> None:
    if lost:
        (folder / "group.json").unlink()
    before = names_in(folder)
    with pytest.raises(StoreError, match="holds a group's checkpoints: open it with group="):
        SyncCheckpointEngine(folder).open()
    with SyncCheckpointEngine(folder.parent / "single") as engine:
        engine.checkpoint({"x": 1}, step=1).result(60)
    with pytest.raises(StoreError, match="group's checkpoints"):
        stores.copy(folder.parent / "single", folder)
    assert names_in(folder) == before
    assert [info.step for info in list_checkpoints(folder)] == [3, 2, 1]


def test_a_store_of_one_process_may_be_called_as_that_of_a_rank(tmp_path: Path) -> None:
    for path in (tmp_path / "rank-00000", tmp_path):
        for step in (1, 2):
            with SyncCheckpointEngine(path) as engine:
                engine.restore({"step": 0})
                engine.checkpoint({"step": step}, step=step).result(60)
        assert load_sync(path) == {"step": 2}


# -- reading


def test_list_names_complete_checkpoints_with_the_bytes_of_all_ranks(made: Path) -> None:
    infos = list_checkpoints(made)
    assert [(info.step, info.pinned) for info in infos] == [(3, False), (2, False), (1, True)]
    assert infos[0].metadata == {"loss": 1 / 3}
    alone = [list_checkpoints(made / name)[0].nbytes for name in ("rank-00000", "rank-00001")]
    assert infos[0].nbytes == sum(alone) > 2 * alone[0]


def assert_part(state: dict[str, Any], rank: int, step: int) -> None:
    wanted = state_of_rank(rank, step)
    assert (state["rank"], state["step"]) == (rank, step)
    assert torch.equal(state["weights"], wanted["weights"])


@pytest.mark.parametrize("rank", [0, 1])
def test_load_reads_the_part_of_one_rank(made: Path, rank: int) -> None:
    assert_part(load_sync(made, rank=rank), rank, 3)
    assert_part(load_sync(made, rank=rank, step=2), rank, 2)
    assert_part(asyncio.run(load(made, rank=rank)), rank, 3)
    with open_checkpoint(made, rank=rank, step=1) as opened:
        assert opened.info.pinned
        assert_part(opened.load(), rank, 1)
    assert_part(load_sync(made / f"rank-0000{rank}"), rank, 3)


def test_the_part_of_rank_0_is_the_default(made: Path) -> None:
    assert_part(load_sync(made), 0, 3)
    with open_checkpoint(made) as opened:
        assert opened["rank"] == 0


def test_a_rank_that_is_not_there_is_an_error(made: Path, tmp_path: Path) -> None:
    for rank in (2, -1):
        with pytest.raises(NoCheckpointError, match=f"has the ranks 0 to 1, and no rank {rank}"):
            load_sync(made, rank=rank)
    with pytest.raises(NoCheckpointError, match="holds no checkpoint of step 4"):
        load_sync(made, step=4)
    with SyncCheckpointEngine(tmp_path / "single") as engine:
        engine.checkpoint({"x": 1}, step=1).result(60)
    for path in (tmp_path / "single", made / "rank-00001"):
        with pytest.raises(ValueError, match="is no folder of a group's checkpoints: rank=1 means nothing there"):
            load_sync(path, rank=1)


def flip(path: Path, *offsets: int) -> None:
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 1
    path.write_bytes(data)


def slot_of(folder: Path, rank: int, step: int) -> Path:
    return folder / rank_name(rank) / stores.describe(folder, rank=rank, step=step).slot


@pytest.mark.slow
def test_a_damaged_slot_takes_its_rank_to_the_next_older_complete_checkpoint(folder: Path) -> None:
    flip(slot_of(folder, 1, 3), 100)
    with pytest.warns(RuntimeWarning, match="step 3 cannot be read .* falling back to step 2"):
        assert_part(load_sync(folder, rank=1), 1, 2)
    assert_part(load_sync(folder, rank=0), 0, 3)  # for reading, ranks stand for themselves
    with pytest.raises(DamagedError, match="checksum"):
        load_sync(folder, rank=1, step=3)
    slot_of(folder, 1, 2).unlink()
    with pytest.warns(RuntimeWarning) as told:
        assert_part(load_sync(folder, rank=1), 1, 1)
    fell = [f"falling back to step {step} of {folder}" for step in (2, 1)]
    assert [str(one.message).rpartition("; ")[2] for one in told] == fell


@pytest.mark.slow
def test_what_one_rank_lacks_is_not_complete(folder: Path) -> None:
    commit = folder / "rank-00001" / "commit"
    before = commit.read_bytes()
    save_in_group(folder, 2, 4, keep_last=4)
    found = at_once(folder / "rank-00001", StoreReader.newest)
    assert found is not None
    flip(commit, *(offset + 70 for offset in region_offsets(found[1].generation)))
    assert list_checkpoints(folder)[0].step == 4  # prepared by all: nobody need have been told
    commit.write_bytes(before)
    assert [info.step for info in list_checkpoints(folder)] == [3, 2, 1]
    assert_part(load_sync(folder, rank=0), 0, 3)
    with pytest.raises(
        IncompleteCheckpointError,
        match=r"no complete checkpoint of step 4: step 4 lacks .* rank 1; if the records .* --search",
    ):
        load_sync(folder, step=4)


def test_a_rank_that_is_gone_leaves_nothing_complete(folder: Path) -> None:
    shutil.rmtree(folder / "rank-00001")
    assert list_checkpoints(folder) == []
    with pytest.raises(IncompleteCheckpointError, match="step 3 lacks the parts of rank 1; step 2 lacks"):
        load_sync(folder)
    assert_part(load_sync(folder / "rank-00000"), 0, 3)  # what is left can be read for itself


def test_a_rank_without_a_valid_record_is_named(folder: Path) -> None:
    flip(folder / "rank-00001" / "commit", *(70 + (n << 16) for n in range(4)))
    for read in (list_checkpoints, load_sync, stores.verify):
        with pytest.raises(CorruptStoreError, match="rank-00001: no copy of a commit record"):
            read(folder)


@pytest.mark.slow
def test_worlds_of_two_sizes_in_one_folder(folder: Path) -> None:
    save_in_group(folder, 1, 5, keep_last=4)
    save_in_group(folder, 2, 6, keep_last=5)
    save_in_group(folder, 1, 7, keep_last=6)
    assert [info.step for info in list_checkpoints(folder)] == [7, 6, 5, 3, 2, 1]
    assert_part(load_sync(folder), 0, 7)
    assert_part(load_sync(folder, rank=1, step=6), 1, 6)
    with pytest.raises(NoCheckpointError, match=r"newest complete checkpoint .* has rank 0 alone, and no rank 1"):
        load_sync(folder, rank=1)  # never an older one without saying so
    with pytest.raises(NoCheckpointError, match=r"of step 5 .* has rank 0 alone"):
        load_sync(folder, rank=1, step=5)


def test_records_that_change_while_they_are_read(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's was read before step 3 was prepared there, that of rank 1 afterwards and then when step 2 went."""
    one, other = seen_stores(made)
    stores = read_place(made).stores
    prepared, dropped = replace(other.parts[0], committed=False), replace(other.parts[0], committed=True)
    torn: list[tuple[tuple[Part, ...], ...]] = []  # of rank 0 and 1, look by look

    async def read(opened: OpenMedium, folder: Path) -> dict[int, tuple[Identity, Record]]:
        now = torn.pop(0) if torn else (one.parts, other.parts)
        found: dict[int, tuple[Identity, Record]] = {}
        for (rank, (identity, record)), parts in zip(stores.items(), now, strict=True):
            assert record.parts is not None
            assert record.parts.applied is not None
            found[rank] = identity, record_of(parts, record.parts.applied, record)
        return found

    monkeypatch.setattr(place, "read_stores", read)
    for late in ([(prepared, *other.parts[1:])], [(prepared, *other.parts[1:]), (dropped, other.parts[2])]):
        torn += [(one.parts[1:], parts) for parts in late]
        assert [info.step for info in list_checkpoints(made)] == [3, 2, 1]
        assert torn == []
    torn += [(one.parts[1:], (prepared, *other.parts[1:])), ((one.parts[0], one.parts[2]), other.parts)]
    listing = read_place(made)  # step 2 was dropped between the last two reads, and lacks nothing
    assert [one.entry.step for one in listing.complete] == [3, 1]
    assert listing.incomplete == ()


@pytest.mark.slow
def test_a_part_that_is_replaced_before_it_is_locked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All records are read again once it is locked; the newer checkpoint is read then, without a warning of damage."""
    newer = tmp_path / "newer"
    shutil.copytree(folder, newer)
    save_in_group(newer, 2, 4, 5, 6, 7, keep_last=1)
    lock = Files.lock
    locked: list[str] = []

    async def lock_late(self: Files, file: File, **options: bool) -> bool:
        if not locked:
            shutil.copytree(newer, folder, dirs_exist_ok=True)
        locked.append(file.name)
        return await lock(self, file, **options)

    monkeypatch.setattr(Files, "lock", lock_late)
    assert_part(load_sync(folder, rank=1), 1, 7)
    again = ["rank-00001/slot-003", "rank-00000/slot-003"]  # of this rank, then of the other one
    assert locked == ["rank-00001/slot-002", *again]


@pytest.mark.slow
def test_reading_beside_a_group_that_saves(tmp_path: Path) -> None:
    """What is read is one checkpoint, complete, and never older than what was read before."""
    folder = tmp_path / "group"
    save_in_group(folder, 2, 1)
    children = start_ranks(2, lambda group: save_until_told(folder, group))
    try:
        newest, turn, deadline = 1, 0, time.monotonic() + 60
        while newest <= 10 or turn <= 10:
            assert time.monotonic() < deadline, (newest, turn)
            rank, turn = turn % 2, turn + 1
            with open_checkpoint(folder, rank=rank) as opened:
                state = opened.load()
                assert opened.info.step >= newest
                newest = opened.info.step
                assert_part(state, rank, newest)
            assert list_checkpoints(folder)[0].step >= newest
    finally:
        (folder / "end").touch()
        assert end_ranks(children) == [0, 0]


def save_until_told(folder: Path, group: Group) -> None:
    torch.set_num_threads(1)
    with SyncCheckpointEngine(folder, group=group, keep_last=2) as engine:
        for step in range(2, 100_000):
            engine.checkpoint(state_of_rank(group.rank, step), step=step).result(60)
            last = folder / "last"
            if group.rank == 0 and not last.exists() and (folder / "end").exists():
                last.with_suffix(".new").write_text(str(step + 2))  # seen by all once the next one is durable
                last.with_suffix(".new").rename(last)
            if last.exists() and step == int(last.read_text()):
                break


# -- looking after


@pytest.mark.slow
def test_verify_checks_all_parts_of_all_ranks(folder: Path) -> None:
    checked = stores.verify(folder, every=True)
    assert checked.whole
    assert [(one.rank, one.info.step) for one in checked.checkpoints] == [(r, s) for r in (0, 1) for s in (3, 2, 1)]
    assert {(copy.rank, copy.state) for copy in checked.records} == {(0, "valid"), (1, "valid")}
    damaged = slot_of(folder, 1, 3)
    flip(damaged, 100)
    checked = stores.verify(folder)
    assert not checked.whole
    assert [(one.rank, one.info.step, bool(one.damage)) for one in checked.checkpoints] == [(0, 3, False), (1, 3, True)]
    assert checked.checkpoints[1].damage[0].leaves == ("weights",)
    assert stores.verify(folder, step=2).whole
    flip(folder / "rank-00001" / "commit", 70)
    states = {(copy.rank, copy.state) for copy in stores.verify(folder, step=2).records}
    assert states == {(0, "valid"), (1, "valid"), (1, "damaged")}


@pytest.mark.slow
def test_a_part_is_described_compared_copied_and_exported(made: Path, tmp_path: Path) -> None:
    paths = [leaf.path for leaf in stores.describe(made, rank=1).leaves]
    assert paths == ["weights", "rank", "step"]
    assert {one.path for one in stores.compare(made, step=2, other_step=3).differences} == {"weights", "step"}
    across = stores.compare(made, step=3, other_step=3, rank=0, other_rank=1)
    assert {(one.path, one.change) for one in across.differences} == {("weights", "shape"), ("rank", "value")}
    info = stores.copy(made, tmp_path / "copy", step=1, rank=1)
    assert (info.step, info.pinned) == (1, True)
    assert_part(load_sync(tmp_path / "copy"), 1, 1)
    assert not stores.compare(made, tmp_path / "copy", step=1, rank=1).differences
    stores.export(made, tmp_path / "out.pt", to="torch", rank=1)
    assert_part(torch.load(tmp_path / "out.pt", weights_only=True), 1, 3)


@pytest.mark.slow
def test_a_copy_of_a_group_has_the_parts_of_all_ranks(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "copy"
    for step in (1, 3):
        info = stores.copy(made, target, step=step)
        assert info == list_checkpoints(target)[0]
        assert (info.step, info.pinned) == (step, step == 1)
    assert [(one.step, one.pinned) for one in list_checkpoints(target)] == [(3, False), (1, True)]
    for step, rank in product((1, 3), (0, 1)):
        assert_part(load_sync(target, step=step, rank=rank), rank, step)
    assert stores.verify(target, every=True).whole
    assert stores.copy(made, target, step=2, pinned=True).counter == list_checkpoints(target)[1].counter + 1
    assert [(one.step, one.pinned) for one in list_checkpoints(target)] == [(2, True), (3, False), (1, True)]
    for rank in (0, 1):  # no slot was reserved beyond the three parts
        assert len([*(target / rank_name(rank)).glob("slot-*")]) == 3

    def go_on(group: Group) -> None:
        torch.set_num_threads(1)
        with SyncCheckpointEngine(target, group=group, keep_last=2) as engine:
            state = state_of_rank(group.rank, 99)
            restored = engine.restore(state)
            assert restored is not None
            assert restored.step == 2
            assert_part(state, group.rank, 2)
            engine.checkpoint(state_of_rank(group.rank, 4), step=4).result(60)

    assert end_ranks(start_ranks(2, go_on)) == [0, 0]
    assert [(one.step, one.pinned) for one in list_checkpoints(target)] == [(4, False), (2, True), (1, True)]


@pytest.mark.slow
def test_the_parts_of_a_copy_are_locked_by_one_look_at_the_records(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks that grow with the ranks take longer than ranks that save need to replace it."""
    looks, look = [], Place.look

    async def looked(self: Place) -> None:
        looks.append(self.path)
        await look(self)

    save_in_group(tmp_path / "four", 4, 1)
    monkeypatch.setattr(Place, "look", looked)
    counts = []
    for source in (made, tmp_path / "four"):
        looks.clear()
        stores.copy(source, tmp_path / f"copy of {source.name}")
        counts.append(len(looks))
    assert counts[0] == counts[1] <= 1


@pytest.mark.slow
def test_a_copy_that_needs_too_many_descriptors_is_refused_before_it_begins(made: Path, tmp_path: Path) -> None:
    """Where it begins it ends, however few there are; slots that the target has are open, too."""
    target = tmp_path / "copy"
    for step in (1, 2, 3):
        before, said = sorted(target.rglob("*")), ""
        for free in count(12):  # enough for the loop that it runs on
            with limited_descriptors(free):
                try:
                    stores.copy(made, target, step=step)
                    break
                except (CheckpointError, OSError) as error:
                    said = str(error)
            assert sorted(target.rglob("*")) == before, said
        assert re.search(r"copying a checkpoint .* may open \d+ more; raise the limit \(ulimit -n\)", said)
    assert [info.step for info in list_checkpoints(target)] == [3, 2, 1]


@pytest.mark.slow
def test_a_copy_of_a_group_may_have_the_name_of_a_rejected_one(tmp_path: Path) -> None:
    def save(group: Group) -> None:
        torch.set_num_threads(1)
        for folder in ("run", "copy"):
            with SyncCheckpointEngine(tmp_path / folder, group=group, keep_last=2) as engine:
                for step in (1, 2):
                    engine.checkpoint(state_of_rank(group.rank, step), step=step, name=f"epoch={step}").result(60)

    assert end_ranks(start_ranks(2, save)) == [0, 0]
    with pytest.raises(ValueError, match="named 'epoch=2' already"):
        stores.copy(tmp_path / "run", tmp_path / "copy")
    stores.reject(tmp_path / "copy", step=2)
    assert stores.copy(tmp_path / "run", tmp_path / "copy").name == "epoch=2"
    for rank in (0, 1):
        assert_part(load_sync(tmp_path / "copy", name="epoch=2", rank=rank), rank, 2)
    assert list_checkpoints(tmp_path / "copy")[0].rejected is False
    with pytest.raises(ValueError, match="named 'epoch=2' already"):
        stores.copy(tmp_path / "run", tmp_path / "copy")


def test_a_copy_keeps_the_pins_of_what_is_not_all_there(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    stores.copy(folder, target, step=1)
    (target / "rank-00001").rename(tmp_path / "aside")  # a disk that is not mounted now
    assert [one.proven for one in read_place(target).incomplete] == [False]
    stores.copy(folder, target, step=2)
    assert [(one.step, one.pinned) for one in list_checkpoints(target)] == [(2, False)]
    shutil.rmtree(target / "rank-00001")
    (tmp_path / "aside").rename(target / "rank-00001")
    assert [(one.step, one.pinned) for one in list_checkpoints(target)] == [(1, True)]


@pytest.mark.slow
def test_a_group_keeps_an_outermost_ordered_dict(tmp_path: Path) -> None:
    def save(group: Group) -> None:
        torch.set_num_threads(1)
        with SyncCheckpointEngine(tmp_path / "run", group=group) as engine:
            state: Any = OrderedDict(state_of_rank(group.rank, 1))
            state._metadata = {"": {"version": 2}}
            engine.checkpoint(state, step=1).result(60)

    def go_on(group: Group) -> None:
        torch.set_num_threads(1)
        with SyncCheckpointEngine(tmp_path / "run", group=group) as engine:
            state = OrderedDict(state_of_rank(group.rank, 99))
            assert engine.restore(state) is not None
            assert_part(state, group.rank, 1)

    assert end_ranks(start_ranks(2, save)) == [0, 0]
    assert end_ranks(start_ranks(2, go_on)) == [0, 0]
    stores.copy(tmp_path / "run", tmp_path / "copy")
    for rank in (0, 1):
        loaded = load_sync(tmp_path / "copy", rank=rank)
        assert type(loaded) is OrderedDict
        assert vars(loaded) == {"_metadata": {"": {"version": 2}}}
        assert_part(loaded, rank, 1)


@pytest.mark.slow
def test_a_group_is_copied_while_its_ranks_save(tmp_path: Path) -> None:
    source, target = tmp_path / "run", tmp_path / "copy"
    save_in_group(source, 2, 1)

    def train(group: Group) -> None:
        torch.set_num_threads(1)
        with SyncCheckpointEngine(source, group=group, keep_last=1) as engine:
            engine.restore(state_of_rank(group.rank, 0))
            for step in count(2):
                engine.checkpoint(state_of_rank(group.rank, step), step=step).result(60)
                if group.rank == 0 and (tmp_path / "enough").exists() and not (tmp_path / "last").exists():
                    (tmp_path / "new").write_text(str(step + 2))  # the other rank is one step behind, or ahead
                    (tmp_path / "new").rename(tmp_path / "last")
                if (tmp_path / "last").exists() and step == int((tmp_path / "last").read_text()):
                    return

    children = start_ranks(2, train)
    try:
        copied = [stores.copy(source, target).step for _ in range(5)]
    finally:
        (tmp_path / "enough").touch()
        assert end_ranks(children) == [0, 0]
    assert copied == sorted(copied)
    assert copied[-1] > 1
    assert [info.step for info in list_checkpoints(target)] == copied[::-1]
    assert stores.verify(target, every=True).whole
    for rank in (0, 1):
        assert_part(load_sync(target, rank=rank), rank, copied[-1])


def test_a_group_that_cannot_be_copied(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    stores.copy(folder, target, step=1)
    spoil(folder, 1)
    with pytest.raises(DamagedError, match=r"rank-00001/.* of the checkpoint of step 3 is damaged"):
        stores.copy(folder, target)
    for other in (folder, tmp_path / "." / folder.name):
        with pytest.raises(ValueError, match="are one folder"):
            stores.copy(folder, other)
    with SyncCheckpointEngine(tmp_path / "single") as engine:
        engine.checkpoint({"x": 1}, step=1).result(60)
    with pytest.raises(StoreError, match=r"one process.*rank="):
        stores.copy(folder, tmp_path / "single", step=2)
    with (target / "rank-00001" / "commit").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a trainer does
        with pytest.raises(StoreLockedError, match="rank-00001"):
            stores.copy(folder, target, step=2)
    assert [info.step for info in list_checkpoints(target)] == [1]
    assert stores.verify(target, every=True).whole
    stores.copy(folder, target, step=2)
    assert [info.step for info in list_checkpoints(target)] == [2, 1]


def test_a_copy_that_was_cut_short_is_no_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when some ranks' records name their parts; the next copy takes the place of these."""
    target = tmp_path / "copy"
    stores.copy(folder, target, step=1)

    async def cut_short(store: Store, parts: tuple[Part, ...], applied: Applied) -> None:
        if parts[0].rank == 1:
            raise RuntimeError("ends here")
        await write_parts(store, parts, applied)

    with monkeypatch.context() as patched:
        patched.setattr("pccheck_async.upkeep.copying.write_parts", cut_short)
        with pytest.raises(RuntimeError, match="ends here"):
            stores.copy(folder, target, step=2)
    listing = read_place(target)
    assert [one.entry.step for one in listing.complete] == [1]
    assert [(one.step, one.ranks, one.committed, one.proven) for one in listing.incomplete] == [(2, (1,), False, True)]
    stores.copy(folder, target, step=3)
    listing = read_place(target)
    assert ([one.entry.step for one in listing.complete], listing.incomplete) == ([3, 1], ())
    assert stores.verify(target, every=True).whole
    stores.copy(folder, target, step=2)
    assert len([*(target / "rank-00000").glob("slot-*")]) == 3  # the slot of what was cut short is used again


def test_a_copy_is_complete_once_all_records_name_its_parts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second round of records only calls them committed."""
    target = tmp_path / "copy"

    async def cut_short(store: Store, parts: tuple[Part, ...], applied: Applied) -> None:
        if (parts[0].rank, parts[0].committed) == (1, True):
            raise RuntimeError("ends here")
        await write_parts(store, parts, applied)

    with monkeypatch.context() as patched:
        patched.setattr("pccheck_async.upkeep.copying.write_parts", cut_short)
        with pytest.raises(RuntimeError, match="ends here"):
            stores.copy(folder, target, step=2)
    listing = read_place(target)
    assert ([one.entry.step for one in listing.complete], listing.incomplete) == ([2], ())
    assert stores.verify(target, every=True).whole
    stores.copy(folder, target, step=3)
    assert [info.step for info in list_checkpoints(target)] == [3, 2]


def test_only_the_ranks_pin_a_groups_checkpoints(folder: Path) -> None:
    for change in (
        lambda: stores.pin(folder, step=2),
        lambda: stores.remove(folder / "rank-00000", step=[1]),
        lambda: stores.pin(folder / "rank-00000", step=2),
    ):
        with pytest.raises(StoreError, match="a group's checkpoints"):
            change()
    assert [info.step for info in list_checkpoints(folder)] == [3, 2, 1]


def test_a_groups_checkpoints_are_removed_on_all_ranks(folder: Path) -> None:
    """Pinned or not; beside ranks that run nothing is, and the last one is removed by force alone."""
    with (folder / "rank-00001" / "commit").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreLockedError, match="rank-00001 open for writing"):
            stores.remove(folder, step=1)
    removal = stores.remove(folder, step=[1, 3])
    assert [info.step for info in removal.removed] == [3, 1]
    assert [info.step for info in list_checkpoints(folder)] == [2]
    assert stores.verify(folder, every=True).whole
    with pytest.raises(StoreError, match="no checkpoint would be left"):
        stores.remove(folder, step=2)
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 3"):
        stores.remove(folder, step=3)
    assert [info.step for info in stores.remove(folder, step=2, force=True).removed] == [2]
    assert not list_checkpoints(folder)


def remove_in_part(folder: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a checkpoint on rank 0, and die."""

    async def cut_short(store: Store, keys: Collection[Key]) -> None:
        if parts_of(store.committed.record)[0].rank == 1:
            raise RuntimeError("ends here")
        await drop_checkpoints(store, keys)

    with monkeypatch.context() as patched:
        patched.setattr("pccheck_async.upkeep.change.drop_checkpoints", cut_short)
        with pytest.raises(RuntimeError, match="ends here"):
            stores.remove(folder, step=step)


def test_a_removal_that_was_cut_short_is_ended_by_the_same_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_in_part(folder, 3, monkeypatch)
    assert [info.step for info in list_checkpoints(folder)] == [2, 1]
    assert "step 3 (counter 2) lacks the parts of rank 0" in " ".join(pccheck("ls", folder, status=4).split())
    assert "Removed step 3; " in pccheck("remove", folder, "--step=3", "--yes")
    assert not read_place(folder).incomplete
    assert "Nothing is missing" in pccheck("recover", folder)


def test_an_old_checkpoint_that_one_rank_has_dropped_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the records of two ranks leaves that."""
    remove_in_part(folder, 1, monkeypatch)
    assert [info.step for info in list_checkpoints(folder)] == [3, 2]
    said = " ".join(pccheck("ls", folder).split())
    assert "Incomplete: step 1 (counter 0) lacks the parts of rank 0; it was complete once, and a newer one is" in said
    assert "To do" not in said
    assert "Nothing is missing" in pccheck("recover", folder)
    (folder / "group.json").write_bytes(b"x")
    assert "Written: group.json" in pccheck("recover", folder, "--write")
    assert "Nothing is missing" in pccheck("recover", folder)


@pytest.mark.slow
def test_recover_of_a_ranks_store(folder: Path) -> None:
    """Its records alone said of which checkpoints of the group its slots hold parts."""
    store = folder / "rank-00001"
    (store / "store.json").unlink()
    assert stores.recover(store, write=True).written == ("store.json",)
    save_in_group(folder, 2, 4, keep_last=4)  # it is that of a rank again
    assert [info.step for info in list_checkpoints(folder)] == [4, 3, 2, 1]
    for search in (True, False):
        if not search:
            flip(store / "commit", *(70 + (n << 16) for n in range(4)))
        before = (store / "commit").read_bytes()
        with pytest.raises(StoreError, match="only records that ranks wrote name them"):
            stores.recover(store, write=True, search=search)
        assert (store / "commit").read_bytes() == before
        assert [info.step for info in stores.recover(store, search=search).named] == [4, 3, 2, 1]
    elsewhere = folder.parent / "elsewhere"
    shutil.copytree(store, elsewhere, ignore=shutil.ignore_patterns("store.json", "commit"))
    assert stores.recover(elsewhere, write=True).written == ("commit", "store.json")
    assert_part(load_sync(elsewhere), 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_records_of_a_rank_are_made_again(folder: Path, rank: int) -> None:
    before, commit = list_checkpoints(folder), folder / rank_name(rank) / "commit"
    if rank:
        commit.write_bytes(bytes(1 << 18))
    else:
        commit.unlink()
    assert f"see what is left with `pccheck recover {folder}`" in pccheck("ls", folder, status=4) or rank
    said = pccheck("recover", commit.parent, status=4)
    assert f"--write refuses: {commit.parent} holds" in said
    assert f"`pccheck recover {folder} --search --write` makes these again" in said
    assert "--write` the store names" not in said
    assert "--write` the store names steps 3, 2, 1" in pccheck("recover", folder, status=4)
    assert f"Written: {rank_name(rank)}/commit" in pccheck("recover", folder, "--write")
    assert list_checkpoints(folder) == before  # step 1 is pinned
    assert stores.verify(folder, every=True).whole
    for step, each in product((1, 2, 3), (0, 1)):
        assert_part(load_sync(folder, step=step, rank=each), each, step)
    save_in_group(folder, 2, 4, 5, keep_last=2)
    assert [info.step for info in list_checkpoints(folder)] == [5, 4, 1]
    assert "Nothing is missing" in pccheck("recover", folder)


@pytest.mark.slow
@pytest.mark.parametrize("identity", ["gone", "damaged"])
@pytest.mark.parametrize("records", ["gone", "damaged", "whole"])
def test_a_rank_that_lost_its_identity_too_is_made_again(folder: Path, records: str, identity: str) -> None:
    before, store = list_checkpoints(folder), folder / "rank-00001"
    if records == "gone":
        (store / "commit").unlink()
    elif records == "damaged":
        (store / "commit").write_bytes(bytes(1 << 18))
    (store / "store.json").unlink()
    if identity == "gone":
        assert "store.json of rank-00001 is missing" in pccheck("ls", folder, status=4)
    else:
        (store / "store.json").write_bytes(b"?" * 20)
    if records == "gone":
        with pytest.raises(StoreError, match=f"`pccheck recover {folder} --search --write` makes these again"):
            stores.recover(store, write=True)  # it would become a store of one process
    said = pccheck("recover", folder, status=4)
    assert "store.json of rank-00001 is missing, damaged" in said
    assert "--write` the store names steps 3, 2, 1" in said
    said = pccheck("recover", folder, "--write")
    assert f"rank-00001/{'store.json' if records == 'whole' else 'commit, rank-00001/store.json'}" in said
    assert list_checkpoints(folder) == before
    assert stores.verify(folder, every=True).whole
    save_in_group(folder, 2, 4, 5, keep_last=2)
    assert [info.step for info in list_checkpoints(folder)] == [5, 4, 1]
    assert "Nothing is missing" in pccheck("recover", folder)


@pytest.mark.slow
def test_a_rank_that_was_made_a_store_of_one_process_is_named_and_made_again(folder: Path) -> None:
    store, elsewhere = folder / "rank-00001", folder.parent / "elsewhere"
    before = list_checkpoints(folder)
    shutil.copytree(store, elsewhere, ignore=shutil.ignore_patterns("store.json", "commit"))
    stores.recover(elsewhere, write=True)
    for name in ("store.json", "commit"):
        shutil.copyfile(elsewhere / name, store / name)
    for command in ("ls", "verify"):
        assert "rank-00001 holds a store of one process" in pccheck(command, folder, status=4).replace("\n", " ")
    assert "--write` the store names steps 3, 2, 1" in pccheck("recover", folder, status=4)
    pccheck("recover", folder, "--write")
    assert list_checkpoints(folder) == before
    save_in_group(folder, 2, 4, keep_last=4)


@pytest.mark.slow
def test_a_ranks_newest_record_may_be_lost(folder: Path) -> None:
    commit = folder / "rank-00001" / "commit"
    identity = decode_identity((commit.parent / "store.json").read_bytes())
    newest = newest_record(commit.read_bytes(), identity.id_bytes)
    assert newest is not None
    flip(commit, *(offset + 80 for offset in region_offsets(newest.generation)))
    said = pccheck("recover", folder, status=4)
    assert "Both copies of a record in rank-00001 are damaged" in said
    assert "the commit records are valid, but for one that is lost." in said
    assert parsed("recover", folder, status=4)["record_lost"]
    assert "LOST?: rank-00001: both copies" in pccheck("ls", folder, status=4)
    assert f"`pccheck recover {folder} --search`" in " ".join(pccheck("ls", folder, status=4).split())
    said = pccheck("recover", folder, "--search", status=4)
    assert "--search --write` the store names steps 3, 2, 1" in said
    assert "the commit records of rank-00001 are damaged." in said
    assert "Written: rank-00001/commit" in pccheck("recover", folder, "--search", "--write")
    assert [(info.step, info.pinned) for info in list_checkpoints(folder)] == [(3, False), (2, False), (1, True)]
    assert stores.verify(folder, every=True).whole
    assert "Nothing is missing" in pccheck("recover", folder)
    assert "Nothing is missing" in pccheck("recover", folder, "--search")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_records_are_older_than_its_slots_is_made_again(folder: Path, rank: int) -> None:
    """Its commit file was put back from an older copy: no checkpoint is complete, and the newest ones are whole."""
    commit = folder / rank_name(rank) / "commit"
    older = commit.read_bytes()
    save_in_group(folder, 2, 4, 5, 6, keep_last=2)
    commit.write_bytes(older)
    said = " ".join(pccheck("ls", folder, status=4).split())
    assert f"`pccheck recover {folder} --search` finds the newest parts there" in said
    before = commit.read_bytes()
    said = pccheck("recover", folder, "--search", status=4)
    assert "--search --write` the store names steps 6, 5" in said
    assert f"commit records of {rank_name(rank)} are whole, and older than those of other ranks." in said
    assert "damaged" not in said
    found = parsed("recover", folder, "--search", status=4)
    assert (found["record"], found["older"]) == ("older", [rank_name(rank)])
    assert commit.read_bytes() == before
    pccheck("recover", folder, "--search", "--write")
    assert [info.step for info in list_checkpoints(folder)][:2] == [6, 5]
    assert stores.verify(folder, every=True).whole
    for each in (0, 1):
        assert_part(load_sync(folder, rank=each), each, 6)
    save_in_group(folder, 2, 7, keep_last=2)
    assert [info.step for info in list_checkpoints(folder)][:2] == [7, 6]


@pytest.mark.slow
def test_what_is_lost_cannot_be_written(folder: Path) -> None:
    (folder / "rank-00001" / stores.describe(folder, rank=1).slot).unlink()
    said = pccheck("recover", folder, "--write", status=4)
    assert "nothing can be written: the records of" in said
    assert "LOST: step 3" in said


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_said_to_drop_a_damaged_one_drops_it(rank: int, folder: Path) -> None:
    (folder / rank_name(rank) / stores.describe(folder, rank=rank).slot).unlink()
    for command in ("ls", "verify"):
        said = pccheck(command, folder, status=4)
        assert "What is damaged is dropped by training that goes on from there." in said

    def go_on(group: Group) -> None:
        with SyncCheckpointEngine(folder, group=group, keep_last=2) as engine:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rank 0 warns that all fall back
                engine.restore(state_of_rank(group.rank, 1))
            engine.checkpoint(state_of_rank(group.rank, 5), step=5).result(60)

    assert end_ranks(start_ranks(2, go_on)) == [0, 0]
    assert "3" not in re.findall(r"^ +(\d) +\d", pccheck("ls", folder), re.MULTILINE)
    assert stores.verify(folder, every=True).whole


@pytest.mark.slow
def test_verify_of_a_damaged_group_ends_with_what_to_do(folder: Path, tmp_path: Path) -> None:
    flip(slot_of(folder, 1, 2), 100)
    advice = f"`pccheck remove {folder} --step 2` drops what is damaged."
    assert pccheck("verify", folder, "--all", status=4).endswith(f"{advice}\n")
    said = pccheck("verify", folder / "rank-00001", "--all", status=4)
    assert f"`pccheck verify {folder} --all` says what a restart restores, and what to do." in said.splitlines()[-1]
    shutil.copytree(folder, tmp_path / "other")
    stores.copy(tmp_path / "other", folder, step=3)
    flip(slot_of(folder, 1, 3), 100)
    for step in (3, 1):
        flip(slot_of(tmp_path / "other", 1, step), 100)
    said = pccheck("verify", folder, "--all", status=4)
    assert f"`pccheck remove {folder} --step 2 --counter 3` drops what is damaged." in said.splitlines()[-1]
    assert "Removed steps 3, 2; " in pccheck("remove", folder, "--step=2", "--counter=3", "--yes")
    assert stores.verify(folder, every=True).whole
    assert [info.step for info in list_checkpoints(folder)] == [3, 1]
    save_in_group(folder, 2, 4, keep_last=4)
    assert [info.step for info in list_checkpoints(folder)] == [4, 3, 1]
    said = pccheck("verify", tmp_path / "other", "--all", status=4)
    assert said.endswith(f"No checkpoint can be restored: all are rejected, lost or damaged. {BACKUP}\n")


@pytest.mark.slow
def test_no_part_of_another_run_is_taken_for_that_of_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = folder / "rank-00001" / "commit"
    spoil(folder, 1)
    commit.write_bytes(bytes(1 << 18))
    assert [info.step for info in stores.recover(folder).named] == [2, 1]  # the newest part is damaged
    monkeypatch.setattr("pccheck_async.upkeep.rank_records.MOST_APART", 0.0)
    said = pccheck("recover", folder, status=4)
    assert "hold no part of a checkpoint that all other ranks have" in said
    whole = re.findall(r"^ *rank-00001/slot-\d+ .* (yes|no) +the records of the other ranks do not name", said, re.M)
    assert whole == ["yes", "yes"]
    assert "No whole slot is one to name (see its note). Nothing was written." in said
    assert "no whole slot is one to name" in pccheck("recover", folder, "--write", status=3)
    assert not any(commit.read_bytes())


@pytest.mark.slow
def test_a_record_that_came_back_before_the_ranks_were_locked_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = folder / "rank-00001" / "commit"
    data = commit.read_bytes()
    commit.unlink()

    async def lock_late(*arguments: Any) -> None:
        commit.write_bytes(data)
        await lock_ranks(*arguments)

    monkeypatch.setattr(recover, "lock_ranks", lock_late)
    assert stores.recover(folder, write=True).written == ()
    assert commit.read_bytes() == data


@pytest.mark.slow
def test_records_are_not_made_beside_a_rank_that_runs(folder: Path) -> None:
    (folder / "rank-00001" / "commit").unlink()
    with (folder / "rank-00000" / "commit").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreLockedError, match="rank-00000 open for writing"):
            stores.recover(folder, write=True)
    assert not (folder / "rank-00001" / "commit").exists()


# -- the command

runner = CliRunner()


def pccheck(*arguments: object, status: int = 0) -> str:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


def parsed(*arguments: object, status: int = 0) -> Any:
    result = runner.invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


@pytest.mark.slow
def test_ls_names_complete_checkpoints_and_who_lacks_the_others(folder: Path) -> None:
    before = (folder / "rank-00001" / "commit").read_bytes()
    save_in_group(folder, 2, 4, keep_last=4)
    assert "Incomplete" not in pccheck("ls", folder)
    (folder / "rank-00001" / "commit").write_bytes(before)
    assert "Incomplete: step 4 (counter 3) lacks the parts of rank 1" in pccheck("verify", folder, status=4)
    said = pccheck("ls", folder, status=4)
    assert re.findall(r"^ +(\d) +\d", said, re.MULTILINE) == ["3", "2", "1"]
    assert "Incomplete: step 4 (counter 3) lacks the parts of rank 1; it was complete once." in said
    found = json.loads(pccheck("ls", folder, "--json", status=4))
    assert [(one["step"], one["world_size"], one["pinned"]) for one in found["checkpoints"]] == [
        (3, 2, False),
        (2, 2, False),
        (1, 2, True),
    ]
    lacking = {"step": 4, "counter": 3, "missing_ranks": [1], "missing_count": 1, "was_complete": True}
    assert found["incomplete"] == [lacking]
    shutil.rmtree(folder / "rank-00000")
    gone = "To do: rank-00000 is not there: put it back, from a backup or that rank's host."
    assert gone in pccheck("ls", folder, status=4)
    said = pccheck("recover", folder, status=4)
    assert "holds no complete checkpoint: step 3 lacks the parts of rank 0" in said
    for write in ((), ("--write",)):
        said = pccheck("recover", folder, *write, status=4)
        assert "rank-00000 is not there: put it back, from a backup or that rank's host" in said
        assert "--search" not in said
    assert "Nothing is missing" not in said
    said = pccheck("ls", folder, status=4)
    assert "holds no complete checkpoint: step 3 lacks the parts of rank 0" in said
    assert "Incomplete: step 2 (counter 1) lacks the parts of rank 0" in said


def test_ls_names_a_part_whose_slot_is_gone(folder: Path) -> None:
    slot = Path("rank-00001") / stores.verify(folder).checkpoints[1].slot
    (folder / slot).unlink()
    said = pccheck("ls", folder, status=4)
    assert f"LOST: step 3: {slot} is gone." in said
    assert "A restart tries step 2" in said


def test_one_damaged_copy_of_a_ranks_record_is_mended(folder: Path) -> None:
    commit = folder / "rank-00001" / "commit"
    data = bytearray(commit.read_bytes())
    data[70] ^= 1
    commit.write_bytes(data)
    for command in ("verify", "recover"):
        assert "rank 1: commit: copy A0 of a record" in pccheck(command, folder, status=4)
    assert "Written: rank-00001/commit" in pccheck("recover", folder, "--write")
    for command in ("verify", "recover"):
        assert "rank 1: commit" not in pccheck(command, folder)


def test_a_group_that_no_rank_opens_is_not_called_fine(folder: Path) -> None:
    (folder / "group.json").write_bytes(b"{")
    for command in ("ls", "verify"):
        said = pccheck(command, folder, status=4)
        assert "No trainer can open this group" in said
        assert f"`pccheck recover {folder} --write` writes it anew." in said
        assert "A restart restores" not in said
    assert "No trainer" in parsed("ls", folder, status=4)["problem"]
    assert not parsed("verify", folder, status=4)["whole"]
    pccheck("recover", folder, "--write")
    assert "A restart tries step 3" in pccheck("ls", folder)


@pytest.mark.slow
def test_help_and_guide_name_all_that_ls_prints_as_json(folder: Path) -> None:
    before = (folder / "rank-00001" / "commit").read_bytes()
    save_in_group(folder, 2, 4, keep_last=4)
    (folder / "rank-00001" / "commit").write_bytes(before)
    (folder / "group.json").write_bytes(b"{")
    slot_of(folder, 1, 2).unlink()
    printed, store = parsed("ls", folder, status=4), parsed("ls", folder / "rank-00000")
    (lost,) = (one for one in printed["checkpoints"] if "lost" in one)
    assert lost.keys() - {"lost", "world_size"} == store[0].keys()
    names = {*printed, *lost, *printed["incomplete"][0], *printed["on_disk"]}
    guide = (Path(__file__).parents[2] / "examples" / "guide" / "operating.md").read_text()
    table = guide.partition("`pccheck ls --json` prints")[2].partition("| exit status")[0]
    assert {*re.findall(r"`([a-z_]+)`", table)} - {"null"} == names
    assert names <= {*re.findall(r"[a-z_]+", (ls.__doc__ or "").partition("--json prints")[2])}


@pytest.mark.parametrize("fault", ["group.json", "a rank of another group", "a rank is gone", "store.json"])
def test_watch_notes_what_ls_notes_on_a_group(folder: Path, tmp_path: Path, fault: str) -> None:
    if fault == "group.json":
        (folder / "group.json").write_bytes(b"{")
    elif fault == "store.json":
        (folder / "rank-00001" / "store.json").unlink()
    else:
        shutil.rmtree(folder / "rank-00001")
    if fault == "a rank of another group":
        save_in_group(tmp_path / "other", 2, 1)
        shutil.copytree(tmp_path / "other" / "rank-00001", folder / "rank-00001")
    said = pccheck("ls", folder, status=4).splitlines()
    noted = [line for line in said if re.match("(Incom|No trainer|store|To do)", line)]
    assert noted
    assert parsed("watch", folder, "--once", status=4)["problems"] == noted
    assert [line for line in pccheck("watch", folder, status=4).splitlines() if line in noted] == noted


def test_ls_says_how_much_all_ranks_have_on_disk(made: Path) -> None:
    found = parsed("ls", made)["on_disk"]
    assert found["nbytes"] == sum(slot.stat().st_size for slot in made.glob("rank-*/slot-*"))
    assert (found["slots"], found["slots_in_use"]) == (len([*made.glob("rank-*/slot-*")]), 6)


def test_ls_of_one_ranks_folder_says_what_it_is(made: Path) -> None:
    said = pccheck("ls", made / "rank-00001")
    assert f"One rank's parts of a group's checkpoints, prepared ones too: `pccheck ls {made}` says" in said
    assert [one["step"] for one in parsed("ls", made / "rank-00001")] == [3, 2, 1]


@pytest.mark.slow
def test_show_and_verify_name_the_rank(folder: Path) -> None:
    assert "step 3, part of rank 1" in pccheck("show", folder, "--rank=1")
    assert (parsed("show", folder)["rank"], parsed("show", folder / "rank-00001")["rank"]) == (0, None)
    assert "no rank 2" in pccheck("show", folder, "--rank=2", status=3)
    damaged = slot_of(folder, 1, 3)
    flip(damaged, 100)
    flip(folder / "rank-00000" / "commit", 70)
    said = pccheck("verify", folder, "--all", status=4)
    assert f"rank 1: {damaged.name}: chunk 0 (bytes 0 to 8192): checksum mismatch; it holds weights" in said
    assert "rank 0: commit: copy A0 of a record, at byte 0, is damaged" in said
    assert {one["rank"] for one in parsed("verify", folder, status=4)["checkpoints"]} == {0, 1}


@pytest.mark.slow
def test_diff_copy_and_export_take_a_rank(made: Path, tmp_path: Path) -> None:
    assert "step = " not in pccheck("copy", made, tmp_path / "copy", "--rank=1", "--step=2")
    said = pccheck("compare", made, tmp_path / "copy", "--step=2", "--rank=1")
    assert "All 3 leaves are equal" in said
    assert "Each rank has values of its own; those of rank 1 were compared: --rank and --other-rank choose." in said
    said = pccheck("compare", made, "--step=2", "--other-step=2", "--rank=0", "--other-rank=1", status=4)
    assert "int 0 -> int 1" in said
    assert "those of rank 0 were compared with those of rank 1" in said
    both = parsed("compare", made, "--step=2", "--other-step=2")
    assert (both["equal"], both["rank"], both["other_rank"]) == (True, 0, 0)
    alone = pccheck("compare", tmp_path / "copy", tmp_path / "copy")
    assert "each rank" not in alone
    said = pccheck("copy", made, tmp_path / "all")
    assert "Step 3" in said
    assert "the parts of 2 ranks" in said
    assert "step 3" in pccheck("show", tmp_path / "all", "--rank=1")
    assert "those of rank 1 were compared" in pccheck("compare", made, tmp_path / "all", "--rank=1")
    pccheck("export", made, tmp_path / "out.pt", "--to=torch", "--rank=1")
    assert_part(torch.load(tmp_path / "out.pt", weights_only=True), 1, 3)


def test_what_changes_a_store_is_refused(folder: Path) -> None:
    for command in (("pin", folder, "--step=2"), ("unpin", folder, "--step=1")):
        assert "which only its ranks can pin together" in pccheck(*command, status=1)
    assert "Nothing is missing" in pccheck("recover", folder)
    assert "Nothing is missing" in pccheck("recover", folder / "rank-00001")


@pytest.mark.slow
def test_the_map_of_ranks_and_checkpoints(folder: Path, tmp_path: Path) -> None:
    before = (folder / "rank-00001" / "commit").read_bytes()
    save_in_group(folder, 2, 4, keep_last=4)
    (folder / "rank-00001" / "commit").write_bytes(before)
    said = pccheck("show", folder, "--ranks", status=4)
    assert "2 ranks, none running; 4 checkpoints, 3 complete; newest: step 3, 12.3 kB." in said
    assert re.search(r"^ rank +newest part +1  2  3  4 *$", said, re.MULTILINE), said
    assert re.search(r"^ +0 +4\.1 kB +██████░{6} +■  ■  ■  ■ *$", said, re.MULTILINE), said
    assert re.search(r"^ +1 +8\.2 kB +█{12} +■  ■  ■  x *$", said, re.MULTILINE), said
    assert "■ has its part, x lacks it." in said
    assert "Largest: the part of rank 1 with 8.2 kB (median of all ranks 6.1 kB)." in said
    assert "Incomplete: step 4 (counter 3) lacks the parts of rank 1; it was complete once." in said
    found = parsed("show", folder, "--ranks", status=4)
    assert [sorted(one["nbytes"]) for one in found["checkpoints"]] == [["0", "1"]] * 3 + [["0"]]
    assert found["slowest"] is None
    with SyncCheckpointEngine(tmp_path / "single") as engine:
        engine.checkpoint({"x": 1}, step=1).result(60)
    assert "is no folder of a group's checkpoints" in pccheck("show", tmp_path / "single", "--ranks", status=2)
    pccheck("show", folder, "--ranks", "--rank=1", status=2)


def test_the_map_of_ranks_has_what_ls_says_is_lost(folder: Path) -> None:
    slot_of(folder, 1, 2).unlink()
    said, listed = pccheck("show", folder, "--ranks", status=4), pccheck("ls", folder, status=4)
    assert re.search(r"^ +1 +8\.2 kB +█{12} +■  !  ■ *$", said, re.MULTILINE), said
    assert "■ has its part, ! its slot is lost." in said
    assert "3 checkpoints, 1 with lost slots; newest: step 3" in said
    noted = [line for line in listed.splitlines() if line.startswith(("LOST", "A restart"))]
    assert len(noted) == 2
    assert [line for line in said.splitlines() if line in noted] == noted


def test_the_map_of_ranks_shows_the_checkpoints_that_have_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "46")
    said = pccheck("show", folder, "--ranks")
    assert re.search(r"^ rank +newest part +2  3 *$", said, re.MULTILINE), said
    assert "■ has its part. 1 older one left out: --json has all." in said


def test_a_rank_without_a_folder_has_a_row_in_the_map(folder: Path) -> None:
    shutil.rmtree(folder / "rank-00001")
    said = pccheck("show", folder, "--ranks", status=4)
    assert re.search(r"^ +1 +no folder +░{12} +x  x  x *$", said, re.MULTILINE), said
    assert "2 ranks, none running; 3 checkpoints, none complete." in said


@pytest.mark.slow
def test_watch_has_a_line_for_each_rank_and_names_the_slowest(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    children = start_ranks(2, lambda group: save_slowly(folder, group))
    try:
        for rank in range(2):
            published(folder / rank_name(rank), lambda each: each.status.counts["durable"] == 1)
        said, found, drawn = (
            pccheck("watch", folder, "--once"),
            parsed("watch", folder, "--once"),
            pccheck("show", folder, "--ranks"),
        )
    finally:
        (folder / "end").touch()
        assert end_ranks(children) == [0, 0]
    for rank in range(2):
        assert re.search(rf"^rank {rank}: \d\d:\d\d:\d\d durable: step 1; in flight: nothing", said, re.MULTILINE), said
    for text in (said, drawn):
        assert re.search(r"Slowest: rank 1 with .* of capture, write, flush per checkpoint \(median of all ranks", text)
        assert re.search(r"most of the difference in (capture|write|flush)", text)
    assert (found["state"], found["slowest"], sorted(found["ranks"])) == ("running", 1, ["0", "1"])
    assert [one["step"] for one in found["committed"]] == [1]
    closed = pccheck("watch", folder, "--once", status=4)
    assert re.findall(r"rank (\d): \S+ no engine runs here, or it began .* ago; durable: step 1", closed) == [
        "0",
        "1",
    ]


def test_show_ranks_of_a_group_without_checkpoints_has_status_3(tmp_path: Path) -> None:
    save_in_group(tmp_path / "group", 1)
    said = CliRunner().invoke(app, ["show", str(tmp_path / "group"), "--ranks"])
    assert (said.exit_code, said.stdout) == (3, "")
    assert "holds no checkpoint" in said.stderr
    assert parsed("show", tmp_path / "group", "--ranks", status=3)["checkpoints"] == []


def test_show_ranks_says_that_stage_times_are_lacking_only_where_they_are(folder: Path) -> None:
    lacking = "Stage times are shown only while the engines of the ranks run."
    assert lacking in pccheck("show", folder, "--ranks")
    with (folder / "rank-00001" / STATUS_NAME).open("w+b", buffering=0) as file:
        file.write(encode_status(EXAMPLE))
        fcntl.flock(file, fcntl.LOCK_EX)  # as the engine of one rank that runs
        said = pccheck("show", folder, "--ranks")
    assert re.search(r"^ +1 +50 ms +250 ms .*▒+█+░* *$", said, re.MULTILINE), said
    assert "Slowest" not in said
    assert lacking not in said


def test_the_state_of_a_group_is_the_worst_of_its_ranks(tmp_path: Path) -> None:
    none = WatchView(tmp_path, None, [], None)
    closed, died = replace_fields(none, before=EXAMPLE), replace_fields(none, published=Published(EXAMPLE, alive=False))
    now = msgspec.structs.replace(EXAMPLE, time=time.time())
    running, silent = (replace_fields(none, published=Published(status, alive=True)) for status in (now, EXAMPLE))
    for views, state in (
        ([running, none], "running"),  # the first checkpoint of rank 1 is yet to come
        ([running, closed], "running"),
        ([silent, running, none], "silent"),
        ([running, silent, died], "died"),
        ([closed, none], "closed"),
        ([none, none], "none"),
    ):
        assert GroupView(tmp_path, dict(enumerate(views)), []).state == state


def test_watch_names_the_ranks_that_the_others_wait_for(tmp_path: Path) -> None:
    now, (part,) = msgspec.structs.replace(EXAMPLE, time=time.time()), EXAMPLE.in_flight

    def view(phase: str, *, alive: bool = True, committed: int = 3) -> WatchView:
        parts = [msgspec.structs.replace(part, phase=phase)] if phase else []
        done = [msgspec.structs.replace(EXAMPLE.committed[0], counter=committed)]
        status = msgspec.structs.replace(now, in_flight=parts, committed=done)
        return WatchView(tmp_path, Published(status, alive=alive), [], None)

    none = WatchView(tmp_path, None, [], None)
    views = [view("committing"), view("writing"), view(""), view("", committed=4), view("capturing", alive=False), none]
    group = GroupView(tmp_path, dict(enumerate(views)), [])
    said = "Step 9 waits for rank 1 (writing 40%), rank 2 (not begun), rank 4 (died), rank 5 (not begun)."
    assert said in group.line()
    assert group.document()["waited_for"] == {"1": "writing 40%", "2": "not begun", "4": "died", "5": "not begun"}
    assert "waits for" not in GroupView(tmp_path, {0: views[1], 1: views[2]}, []).line()
    assert "waits for" not in GroupView(tmp_path, {0: views[0], 1: views[0]}, []).line()


def save_slowly(folder: Path, group: Group) -> None:
    """Save a checkpoint, of which rank 1 has far more, and wait until told to end."""
    torch.set_num_threads(1)
    with SyncCheckpointEngine(folder, group=group) as engine:
        state = {"weights": torch.ones(1000 if group.rank == 0 else 40_000_000)}
        engine.checkpoint(state, step=1).result(60)
        while not (folder / "end").exists():
            time.sleep(0.01)
