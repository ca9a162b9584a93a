"""A part that another host sends: what goes wrong on either side ends both, and says what it says of the part."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import CheckpointError, Group, StateMismatchError, SyncCheckpointEngine
from pccheck_async.errors import CorruptStoreError, DamagedError, ReadError, StoreFullError, is_exhausted
from pccheck_async.format import Key, Run
from pccheck_async.format.record import COMMIT_NAME, slot_name
from pccheck_async.group.control import Client, Meeting
from pccheck_async.group.elsewhere import ReceivedPart, send_part
from pccheck_async.group.place import open_folder
from pccheck_async.medium import File
from pccheck_async.medium.files import Files
from pccheck_async.store import FolderPart, rank_name
from tests.support.limits import limited_descriptors
from tests.support.ranks import run_ranks

NBYTES = 24 << 20
"""More pieces than may wait for their receiver."""


class limited_files(AbstractContextManager[None]):  # noqa: N801
    """No file grows beyond so many bytes, as under ``ulimit -f``."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._nbytes, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


def received(
    folder: Path, sender: AbstractContextManager[None], receiver: AbstractContextManager[None]
) -> CheckpointError | int:
    """Send the part of rank 0 to rank 1; return the received bytes, or the receiver's error. Both sides end."""
    meeting = Meeting()
    client = Client(meeting.address, 0, lambda _: None, lambda _: None)

    async def main() -> CheckpointError | int:
        async with await open_folder(folder, "auto") as opened:
            await opened.medium.prepare(create=False)
            source = FolderPart(opened, rank_name(0), Key(0, Run(0, 0, 0)))
            part = ReceivedPart(client, "part", opened, folder, rank_name(1))
            with sender:
                sending = asyncio.create_task(send_part(client, "part", source))
                await asyncio.sleep(0)
                if not isinstance(sender, nullcontext):
                    await asyncio.wait((sending,))
            if not isinstance(receiver, nullcontext):  # the sender has all that it needs
                await asyncio.to_thread(client.another().wait, ["part/0"])
            try:
                with receiver:
                    return (await part.acquire()).nbytes
            except CheckpointError as error:
                return error
            finally:
                await part.close()
                await sending

    try:
        return asyncio.run(main())
    finally:
        client.close()
        assert not [*folder.glob("*/.fetched-*")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with SyncCheckpointEngine(tmp_path / rank_name(0)) as engine:
        engine.checkpoint({"x": bytearray(NBYTES)}, step=1).result(60)
    (tmp_path / rank_name(1)).mkdir()
    return tmp_path


def test_a_part_arrives(folder: Path) -> None:
    got = received(folder, nullcontext(), nullcontext())
    assert isinstance(got, int)
    assert got > NBYTES


def test_a_part_whose_slot_ends_inside_a_block_is_read_in_whole_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, read = [], Files.read

    async def noted(self: Files, file: File, offset: int, into: memoryview) -> int:
        lengths.append(len(into))
        return await read(self, file, offset, into)

    for slot in (folder / rank_name(0)).glob("slot-*"):
        os.truncate(slot, slot.stat().st_size + 1536)  # a crash may leave a slot so
    monkeypatch.setattr(Files, "read", noted)
    assert received(folder, nullcontext(), nullcontext()) == slot.stat().st_size
    assert lengths
    assert not [nbytes for nbytes in lengths if nbytes % 4096]


def test_a_sender_out_of_descriptors_says_nothing_of_the_part(folder: Path) -> None:
    error = received(folder, limited_descriptors(0), nullcontext())
    assert isinstance(error, ReadError)
    assert error.errno == errno.EMFILE
    assert is_exhausted(error)


def test_a_receiver_out_of_descriptors_says_nothing_of_the_part(folder: Path) -> None:
    error = received(folder, nullcontext(), limited_descriptors(0))
    assert isinstance(error, ReadError)
    assert is_exhausted(error)


def test_a_receiver_out_of_space_says_nothing_of_the_part(folder: Path) -> None:
    error = received(folder, nullcontext(), limited_files(6 << 20))
    assert not isinstance(error, DamagedError | ReadError), error  # each costs the checkpoint
    assert isinstance(error, OSError)
    assert error.errno == errno.EFBIG


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda folder: (folder / COMMIT_NAME).unlink(), CorruptStoreError),
        (lambda folder: [path.unlink() for path in folder.glob(slot_name(0)[:4] + "*")], DamagedError),
    ],
)
def test_an_error_of_the_sender_is_the_receivers(
    folder: Path, spoil: Callable[[Path], object], kind: type[Exception]
) -> None:
    spoil(folder / rank_name(0))
    error = received(folder, nullcontext(), nullcontext())
    assert type(error) is kind


@pytest.mark.parametrize("begun", [False, True])
def test_a_receiver_that_is_cancelled_writes_nothing_any_more(folder: Path, begun: bool) -> None:
    """Before the first piece came, or once there is a file; the sender ends, too."""
    meeting = Meeting()
    client = Client(meeting.address, 0, lambda _: None, lambda _: None)

    def wait_for_file() -> None:
        end = time.monotonic() + 20
        while not [*folder.glob("*/.fetched-*")]:
            assert time.monotonic() < end
            time.sleep(0.001)

    async def main() -> None:
        async with await open_folder(folder, "auto") as opened:
            await opened.medium.prepare(create=False)
            source = FolderPart(opened, rank_name(0), Key(0, Run(0, 0, 0)))
            part = ReceivedPart(client, "part", opened, folder, rank_name(1))
            receiving = asyncio.create_task(part.acquire())
            await asyncio.sleep(0)
            sending = asyncio.create_task(send_part(client, "part", source)) if begun else None
            if begun:
                await asyncio.to_thread(wait_for_file)
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
            await part.close()
            await (sending or send_part(client, "part", source))

    try:
        asyncio.run(main())
    finally:
        client.close()
    assert not [*folder.glob("*/.fetched-*")]


def test_a_sender_whose_receiver_is_gone_ends_when_it_is_cancelled(folder: Path) -> None:
    """No thread waits on for what nobody acknowledges: the loop could not be closed."""
    meeting = Meeting()
    client = Client(meeting.address, 0, lambda _: None, lambda _: None)

    async def main() -> None:
        async with await open_folder(folder, "auto") as opened:
            await opened.medium.prepare(create=False)
            source = FolderPart(opened, rank_name(0), Key(0, Run(0, 0, 0)))
            sending = asyncio.create_task(send_part(client, "part", source))
            await asyncio.to_thread(client.another().wait, ["part/3"])
            await asyncio.sleep(0.05)  # it waits for the first acknowledgement, or is about to
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(sending, 20)
            await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 20)

    try:
        asyncio.run(main())
    finally:
        client.close()


def of_rank(rank: int) -> dict[str, Any]:
    return {"x": torch.full((NBYTES,), rank, dtype=torch.uint8)}


def saved(folder: Path, group: Group) -> None:
    with SyncCheckpointEngine(folder / str(group.rank) / "run", group=group, keep_last=2) as engine:
        for step in (1, 2):
            engine.checkpoint(of_rank(group.rank), step=step).result(60)


def restored_without_space(folder: Path, group: Group) -> tuple[int, list[int]]:
    """Restore where the other rank saved; at first rank 1 lacks space for what it is sent. Return what is left."""
    with SyncCheckpointEngine(folder / str(1 - group.rank) / "run", group=group, keep_last=2) as engine:
        live = {"x": torch.zeros(NBYTES, dtype=torch.uint8)}
        kind = StoreFullError if group.rank else StateMismatchError
        with limited_files(6 << 20) if group.rank else nullcontext(), pytest.raises(kind, match="File too large"):
            engine.restore(live)
        restored = engine.restore(live)
        assert restored is not None
        assert torch.equal(live["x"], of_rank(group.rank)["x"])
        engine.checkpoint(live, step=3).result(60)
        return restored.step, [info.step for info in engine.checkpoints()]


@pytest.mark.slow
def test_want_of_space_for_a_received_part_costs_no_checkpoint(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    run_ranks(2, partial(saved, tmp_path))
    assert run_ranks(2, partial(restored_without_space, tmp_path)) == [(2, [3, 2])] * 2
