"""Folders of groups in which something is planted, forged or lost: an error of this package, soon and in little memory.

What is there bounds what is done, not the size that a file claims, nor the world that a record claims.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from pccheck_async import CheckpointError, SyncCheckpointEngine, list_checkpoints, load_sync, open_checkpoint, stores
from pccheck_async.cli import app
from pccheck_async.errors import CorruptStoreError, IncompleteCheckpointError, NewerFormatError
from pccheck_async.format import crc32
from pccheck_async.format.record import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    GROUP_NAME,
    GROUP_VERSION,
    HEADER,
    MAGIC,
    REGION_NBYTES,
    decode_identity,
)
from pccheck_async.group import Group, read_place
from pccheck_async.group.folder import domain_of
from pccheck_async.store import StoreReader, at_once, rank_name
from tests.hostile.test_hostile import in_a_cage
from tests.support.group_folders import end_ranks, save_in_group, start_ranks, state_of_rank
from tests.support.hostile import Forger
from tests.support.planted import PLANTED, ended, planted

pytestmark = pytest.mark.slow
runner = CliRunner()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two ranks with the steps 1 and 2, which nobody changes."""
    folder = tmp_path_factory.mktemp("made") / "group"
    save_in_group(folder, 2, 1, 2)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """One that may be changed."""
    copy = tmp_path / "group"
    shutil.copytree(made, copy)
    return copy


def assert_read(folder: Path, *, opens: bool = False) -> None:
    """Everything is there for those who read: they need the records alone. ``opens``: so it is for engines."""
    assert [info.step for info in list_checkpoints(folder)] == [2, 1]
    assert load_sync(folder, rank=1)["step"] == 2
    with open_checkpoint(folder) as opened:
        assert opened["step"] == 2
    assert not any(one.damage for one in stores.verify(folder).checkpoints)
    for command, status in (("show", 0), ("ls", 0 if opens else 4), ("verify", 0 if opens else 4)):
        result = runner.invoke(app, [command, str(folder)])
        assert result.exit_code == status, (command, result.output)
        assert command == "show" or opens or "recover" in result.output


def assert_goes_on(folder: Path) -> None:
    def restore(group: Group) -> None:
        with SyncCheckpointEngine(folder, group=group, max_in_flight=1) as engine:
            state = state_of_rank(group.rank, 0)
            restored = engine.restore(state)
            assert restored is not None
            assert restored.step == 2

    assert end_ranks(start_ranks(2, restore)) == [0, 0]


# -- group.json


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_no_group_json_stops_no_reader_and_is_refused_by_who_opens(folder: Path, kind: str) -> None:
    path = folder / GROUP_NAME
    victim = folder.parent / "victim"
    path.rename(victim)
    with planted(path, kind, victim):
        assert_read(folder)
        error = ended(lambda: domain_of(folder), path)
        assert isinstance(error, CorruptStoreError)
        assert "--write` writes it anew" in str(error)
        found = stores.recover(folder)
        assert (found.identity_name, found.identity, found.needed) == (GROUP_NAME, "damaged", True)
        written = stores.recover(folder, write=True)
        assert (written.written, written.kept) == ((GROUP_NAME,), (f"{GROUP_NAME}.damaged-0",))
        assert domain_of(folder) in path.read_text()
        assert domain_of(folder) not in victim.read_text()
        path.unlink()
        (folder / written.kept[0]).rename(path)  # what was planted is still there


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b'{"format":2}', b'{"format":2,"domain":7}', b'{"format":2,"domain":"x"}', b"\xff",
        b'{"format":1,"domain":"0123456789abcdef0123456789abcdef"}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_group_json_is_made_anew_by_recover(folder: Path, data: bytes) -> None:
    (folder / GROUP_NAME).write_bytes(data)
    assert_read(folder)
    with pytest.raises(CorruptStoreError, match="--write` writes it anew"):
        domain_of(folder)
    status = runner.invoke(app, ["recover", str(folder)])
    assert status.exit_code == 4
    assert "group.json is damaged, the commit records are valid" in status.output
    assert runner.invoke(app, ["recover", "--write", str(folder)]).exit_code == 0
    assert (folder / f"{GROUP_NAME}.damaged-0").read_bytes() == data
    assert not stores.recover(folder, write=True).written
    if not data:
        assert_goes_on(folder)


def test_a_sparse_group_json_is_not_read_whole(folder: Path) -> None:
    os.truncate(folder / GROUP_NAME, 200 << 30)
    assert_read(folder)
    with pytest.raises(CorruptStoreError, match="too large"):
        domain_of(folder)


def test_a_group_json_of_a_newer_version_is_left_alone(folder: Path) -> None:
    data = b'{"format":3,"domain":"0123456789abcdef0123456789abcdef"}'
    (folder / GROUP_NAME).write_bytes(data)
    with pytest.raises(NewerFormatError):
        domain_of(folder)
    with pytest.raises(NewerFormatError, match="nothing was written"):
        stores.recover(folder, write=True)
    assert (folder / GROUP_NAME).read_bytes() == data


def test_a_missing_group_json_is_not_an_empty_list(folder: Path) -> None:
    (folder / GROUP_NAME).unlink()
    assert_read(folder, opens=True)
    assert runner.invoke(app, ["watch", "--once", str(folder)]).exit_code == 4  # nobody runs there, and it is something
    assert stores.recover(folder).identity == "missing"
    assert stores.recover(folder, write=True).kept == ()
    assert_goes_on(folder)


def test_ranks_that_find_no_group_json_make_one(folder: Path) -> None:
    (folder / GROUP_NAME).unlink()
    assert_goes_on(folder)
    assert (folder / GROUP_NAME).is_file()


def test_stores_of_single_processes_that_are_called_like_ranks_are_no_group(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / rank_name(0)) as engine:
        engine.checkpoint({"x": 1}, step=1).result(60)
    assert list_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="there are stores in it: rank-00000"):
        load_sync(tmp_path)


# -- records


def body_of(folder: Path, rank: int) -> Any:
    """Return the body of a rank's newest record, as lists."""
    found = at_once(folder / rank_name(rank), StoreReader.newest)
    assert found is not None
    _, record = found
    return msgspec.msgpack.decode(msgspec.msgpack.encode((record.entries, record.parts)))


def put_body(folder: Path, rank: int, body: bytes, generation: int = 2**40) -> None:
    """Replace a rank's commit file by one record with a valid checksum."""
    store = folder / rank_name(rank)
    identity = decode_identity((store / "store.json").read_bytes()).id_bytes
    checked = HEADER.pack(MAGIC, GROUP_VERSION, len(body), identity, generation, 0)[: HEADER.size - 24]
    header = HEADER.pack(MAGIC, GROUP_VERSION, len(body), identity, generation, crc32(body, crc32(checked)))
    fd = os.open(store / COMMIT_NAME, os.O_WRONLY)
    os.pwrite(fd, (header + body)[:REGION_NBYTES].ljust(COMMIT_NBYTES, b"\0"), 0)
    os.close(fd)


def set_worlds(folder: Path, world: int) -> None:
    for rank in (0, 1):
        body = body_of(folder, rank)
        for membership in body[1][1]:
            membership[2] = world
        put_body(folder, rank, msgspec.msgpack.encode(body))


@pytest.mark.parametrize("world", [2**40, 0, -1, 1, 2**64 - 1])
def test_a_record_of_an_impossible_world_is_none(folder: Path, world: int) -> None:
    set_worlds(folder, world)
    for look in (list_checkpoints, load_sync, stores.verify, read_place):
        with pytest.raises(CorruptStoreError, match="rank-0000"):
            look(folder)
    for command in ("ls", "show", "verify", "recover"):
        result = runner.invoke(app, [command, str(folder)])
        assert isinstance(result.exception, SystemExit), command


@pytest.mark.parametrize("world", [10**8, 10**9])
def test_a_record_of_a_huge_world_costs_what_is_there(folder: Path, world: int, tmp_path: Path) -> None:
    set_worlds(folder, world)

    def look(_: random.Random, __: int, log: Callable[[str], None]) -> Counter[str]:
        log("a huge world")
        assert list_checkpoints(folder) == []
        listing = read_place(folder)
        assert [(one.step, one.missing) for one in listing.incomplete] == [(2, world - 2), (1, world - 2)]
        with pytest.raises(IncompleteCheckpointError, match=rf"ranks 2, 3, 4, 5, 6, 7, 8, 9 and {world - 10} more"):
            load_sync(folder)
        return Counter()

    in_a_cage(tmp_path, 1, look, 1)


def test_a_huge_world_is_an_error_of_who_opens(folder: Path) -> None:
    set_worlds(folder, 10**8)

    def restore(group: Group) -> None:
        with SyncCheckpointEngine(folder, group=group) as engine, pytest.raises(IncompleteCheckpointError):
            engine.restore(state_of_rank(group.rank, 0))

    assert end_ranks(start_ranks(2, restore)) == [0, 0]


def forged_records(rng: random.Random, count: int, log: Callable[[str], None], folder: Path) -> Counter[str]:
    forger, original = Forger(rng), body_of(folder, 1)
    counts: Counter[str] = Counter()
    for number in range(count):
        body = forger.forged(original)
        log(f"record {number} {body[:4000].hex()}")
        put_body(folder, 1, body)
        try:
            outcome = f"{len(list_checkpoints(folder))} listed"
            load_sync(folder, rank=1, io="python")
        except CheckpointError as error:
            outcome = type(error).__name__
        counts[outcome] += 1
    return counts


def test_forged_records_of_a_rank(folder: Path, tmp_path: Path) -> None:
    counts = in_a_cage(tmp_path, 3, partial(forged_records, folder=folder), 150)
    assert len(counts) >= 2, counts
