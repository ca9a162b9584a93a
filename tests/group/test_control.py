"""The control plane: whatever lies in the store of a group, the ranks get an answer, and closing ends."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed import FileStore, HashStore, TCPStore  # type: ignore[attr-defined]

from pccheck_async import CheckpointEngine, CheckpointError, Group, GroupError, SyncCheckpointEngine, list_checkpoints
from pccheck_async.errors import ReadError
from pccheck_async.format.record import GROUP_NAME
from pccheck_async.group import Ranks
from pccheck_async.group.control import Client, Server, reach
from pccheck_async.group.coordinator import Coordinator
from pccheck_async.group.messages import (
    AnyDecision,
    Broken,
    Commit,
    Found,
    Goodbye,
    Joined,
    Matched,
    NotRestored,
    RestoreRequest,
    encode,
)
from pccheck_async.store import Retention
from pccheck_async.testing.probe import probe
from tests.support.children import in_child
from tests.support.limits import limit_threads, limited_descriptors
from tests.support.ranks import run_ranks

SECONDS = 30
"""After which an answer counts as one that never comes."""


class Plane:
    """A server for two ranks, with the client of rank 0, and a client of the store for what no rank posts."""

    def __init__(self) -> None:
        self.server = Server(Coordinator(2, Retention(), 7), 2, SECONDS)
        self.learned: queue.SimpleQueue[AnyDecision] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.client = Client(self.server.address, 0, self.learned.put, self.lost.put)
        self.store: TCPStore = reach(self.server.address)

    def put(self, data: bytes) -> None:
        self.store.set(f"in/{self.store.add('in', 1)}", data)  # type: ignore[arg-type]


@contextmanager
def plane() -> Iterator[Plane]:
    it = Plane()
    try:
        yield it
    finally:
        for rank in range(2):
            it.client.post(Goodbye(rank, -1, None))
        it.client.close()
        started = time.monotonic()
        assert it.server.close(SECONDS) == []
        assert time.monotonic() - started < SECONDS


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        msgspec.msgpack.encode(["Hello", 0]),
        msgspec.msgpack.encode(["Broken", "why", 0]),  # a decision
        encode(Found(0, ())),  # nobody said hello
        encode(Joined(2, b"")),  # there is no such rank
        encode(Matched(-1, 0, 0, "ok", "")),
    ],
    ids=["empty", "junk", "cut", "a decision", "too early", "a rank too many", "a negative rank"],
)
def test_a_message_that_makes_no_sense_breaks_the_group_and_closing_ends(data: bytes) -> None:
    with plane() as it:
        it.put(data)
        broken = it.learned.get(timeout=SECONDS)
        assert isinstance(broken, Broken)
        assert "rank 0 cannot take a message in" in broken.why
        assert isinstance(it.learned.get(timeout=SECONDS), NotRestored)


def test_a_message_that_its_rank_did_not_live_to_write_breaks_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccheck_async.group.control._GAP_SECONDS", 0.05)
    with plane() as it:
        it.store.add("in", 1)
        it.client.post(RestoreRequest(0, 0, None))
        broken, ended = (it.learned.get(timeout=SECONDS) for _ in range(2))
        assert isinstance(broken, Broken)
        assert "message 1 is missing" in broken.why
        assert isinstance(ended, NotRestored)


def test_a_quiet_inbox_is_no_gap(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pccheck_async.group.control._GAP_SECONDS", 0.01)
    with plane() as it:
        with pytest.raises(queue.Empty):
            it.learned.get(timeout=0.2)
        it.put(b"junk")
        assert isinstance(it.learned.get(timeout=SECONDS), Broken)
    assert "timed out" not in capfd.readouterr().err  # in a run that saves every hour, that would be two lines a minute


@pytest.mark.parametrize("data", [b"", b"junk", b"@", encode(Goodbye(0, 0, None))], ids=["empty", "junk", "@", "other"])
def test_a_decision_that_rank_0_did_not_publish_is_told_and_closing_ends(data: bytes) -> None:
    with plane() as it:
        it.store.set("out/0/0", data)  # type: ignore[arg-type]
        assert "a decision cannot be read" in it.lost.get(timeout=SECONDS)


def test_large_decisions_are_deleted_once_all_ranks_have_read_them() -> None:
    """Rank 0 publishes one for each copy in a bucket: its memory would grow for as long as the run goes on."""
    with plane() as it:
        learned: queue.SimpleQueue[AnyDecision] = queue.SimpleQueue()
        other = Client(it.server.address, 1, learned.put, it.lost.put)
        keys = list[int]()
        for number in range(5):
            large = Broken("x" * 5000, number)
            it.server.decide(lambda _, large=large: [large])  # type: ignore[misc]
            assert [each.get(timeout=SECONDS) for each in (it.learned, learned)] == [large, large]
            keys.append(it.store.num_keys())
        other.close()
    assert keys[-1] <= keys[0] + 1, keys


# -- a machine that lacks threads or descriptors


@pytest.mark.parametrize("left", range(3))
def test_a_server_that_gets_too_few_threads_leaves_none(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    limit_threads(monkeypatch, left)
    with pytest.raises(ReadError, match=r"pids\.max"):
        Server(Coordinator(2, Retention(), 7), 2, SECONDS)
    assert threading.active_count() <= before


@pytest.mark.parametrize("left", range(2))
def test_a_client_that_gets_too_few_threads_leaves_none(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with plane() as it:
        before = threading.active_count()
        with monkeypatch.context() as patch:
            limit_threads(patch, left)
            with pytest.raises(ReadError, match=r"pids\.max"):
                Client(it.server.address, 1, it.learned.put, it.lost.put)
        assert threading.active_count() <= before


def opened(folder: Path) -> str:
    """Open a group of one rank; return the error of this package, "" without one. Any other error is raised."""
    try:
        SyncCheckpointEngine(folder, group=Group(0, 1, HashStore(), timeout=SECONDS)).open().close()
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_store_that_rank_0_cannot_open_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "rank-00000").write_text("a file")
    before = threading.active_count()
    assert "rank-00000" in opened(tmp_path)
    assert threading.active_count() <= before


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(2))
def test_a_store_that_a_rank_cannot_open_is_an_error_of_all(tmp_path: Path, rank: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"rank-0000{rank}").write_text("a file")

    def rank_main(group: Group) -> str:
        engine = SyncCheckpointEngine(tmp_path / "run", group=group)
        with pytest.raises(CheckpointError) as raised:
            engine.open()
        ended = FileStore(str(tmp_path / "ended"), 2)
        ended.set(str(group.rank), "")
        ended.wait(["0", "1"])  # decisions are read from rank 0 as long as its engine is there
        return str(raised.value)

    told = run_ranks(2, rank_main)
    assert "it is a file" in told[rank]
    assert f"rank {rank} cannot open its store" in told[1 - rank]


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(2))
def test_a_rank_that_cannot_open_its_store_says_so_beside_its_loop(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"rank-0000{rank}").write_text("a file")
    post, close, on_main = Client.post, Server.close, list[bool]()

    def seen_post(self: Client, message: Any) -> None:
        on_main.append(threading.current_thread() is threading.main_thread())
        post(self, message)

    def seen_close(self: Server, seconds: float) -> list[int]:
        on_main.append(threading.current_thread() is threading.main_thread())
        return close(self, seconds)

    def rank_main(group: Group) -> list[bool]:
        with pytest.raises(CheckpointError):
            asyncio.run(CheckpointEngine(tmp_path / "run", group=group).open())
        ended = FileStore(str(tmp_path / "ended"), 2)
        ended.set(str(group.rank), "")
        ended.wait(["0", "1"])
        return on_main

    monkeypatch.setattr(Client, "post", seen_post)
    monkeypatch.setattr(Server, "close", seen_close)
    found = run_ranks(2, rank_main)
    assert found[rank]
    assert not any(found[0] + found[1])


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(2))
def test_a_folder_that_a_rank_cannot_join_in_is_an_error_of_all(tmp_path: Path, rank: int) -> None:
    """Its store is open by then, and it has not said hello."""
    for each in range(2):
        (tmp_path / str(each) / "run").mkdir(parents=True)
    (tmp_path / str(rank) / "run" / GROUP_NAME).write_text("junk")

    def rank_main(group: Group) -> str:
        engine = SyncCheckpointEngine(tmp_path / str(group.rank) / "run", group=group)
        with pytest.raises(CheckpointError) as raised:
            engine.open()
        ended = FileStore(str(tmp_path / "ended"), 2)
        ended.set(str(group.rank), "")
        ended.wait(["0", "1"])
        return str(raised.value)

    told = run_ranks(2, rank_main)
    assert GROUP_NAME in told[rank]
    assert f"rank {rank} cannot open its store" in told[1 - rank]


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "options"), [("missing", ""), ("garbage", ""), ("identity", " --write")])
def test_a_rank_whose_records_are_damaged_names_the_recovery_of_the_group(
    tmp_path: Path, damage: str, options: str
) -> None:
    folder = tmp_path / "run"
    store = folder / "rank-00001"

    def save(group: Group) -> None:
        with SyncCheckpointEngine(folder, group=group) as engine:
            engine.checkpoint({"w": torch.zeros(8)}, step=1).result()

    def rank_main(group: Group) -> str:
        with pytest.raises(CheckpointError) as raised:
            SyncCheckpointEngine(folder, group=group).open()
        return str(raised.value)

    run_ranks(2, save)
    if damage == "missing":
        (store / "commit").unlink()
    else:
        file = store / ("store.json" if damage == "identity" else "commit")
        file.write_bytes(b"?" * file.stat().st_size)
    told = run_ranks(2, rank_main)
    for one in told:
        assert f"`pccheck recover {folder}{options}`" in one
    assert "rank 1 cannot open its store" in told[0]


def test_an_opening_that_is_cancelled_as_it_connects_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting, go_on = threading.Event(), threading.Event()
    another = Client.another

    def slowly(self: Client) -> TCPStore:
        connecting.set()
        go_on.wait(SECONDS)
        return another(self)

    async def main() -> None:
        opening = asyncio.create_task(CheckpointEngine(tmp_path, group=Group(0, 1, HashStore())).open())
        await asyncio.to_thread(connecting.wait, SECONDS)
        opening.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await opening

    monkeypatch.setattr(Client, "another", slowly)
    asyncio.run(main())
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pccheck-")]


@pytest.mark.slow
@pytest.mark.parametrize("left", [*range(8), 64])
def test_a_group_that_gets_too_few_threads_says_so(tmp_path: Path, left: int) -> None:
    def work() -> tuple[str, int]:
        before = threading.active_count()
        with pytest.MonkeyPatch.context() as patch:
            limit_threads(patch, left)
            told = opened(tmp_path)
        ending = time.monotonic() + 10
        while threading.active_count() > before and time.monotonic() < ending:
            time.sleep(0.01)  # those of torch's store end by themselves
        return told, threading.active_count() - before

    told, more = in_child(work)
    assert more <= 0
    # At least eight are needed: three of the server, the loop's, two helpers, two of the client.
    assert ("pids.max" in told) == (left < 8), told


@pytest.mark.slow
def test_a_group_that_gets_too_few_descriptors_says_so(tmp_path: Path) -> None:
    """A store of torch that lacks one aborts the process, or its clients wait."""

    def work() -> list[str]:
        found = []
        for free in range(72):
            with limited_descriptors(free):
                found.append(opened(tmp_path))
        return found

    found: list[str] = in_child(work)
    told = [text for text in found if text]
    assert found[-1] == ""  # and some are enough
    assert len(told) >= 24
    assert all("ulimit -n" in text for text in told), told


# -- engines


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"w": torch.full((5000,), float(100 * step + rank)), "step": step}


def junk_in_the_inbox(store: TCPStore) -> None:
    store.set(f"in/{store.add('in', 1)}", b"junk")  # type: ignore[arg-type]


def a_gap_in_the_inbox(store: TCPStore) -> None:
    store.add("in", 1)


def a_forged_decision(store: TCPStore, data: bytes = b"junk") -> None:
    """Where rank 1 reads next, whatever it has read: it deletes what it reads."""
    for number in range(20):
        store.set(f"out/1/{number}", data)  # type: ignore[arg-type]


def a_decision_that_makes_no_sense(store: TCPStore) -> None:
    """A commit of a checkpoint that nobody saved, with a keep-list that keeps nothing, from which all is derived."""
    a_forged_decision(store, encode(Commit("no number", (), ())))  # type: ignore[arg-type]


def run_of(folder: Path, spoil: Callable[[TCPStore], None], group: Group) -> list[str]:
    """Save a checkpoint, spoil the store on rank 1, and go on; return what became of all that was asked for."""
    found = []
    engine = SyncCheckpointEngine(folder, group=group).open()
    engine.checkpoint(state_of(group.rank, 0), step=0).result(SECONDS)
    if group.rank == 1:
        core = probe(engine).core
        assert isinstance(core.peers, Ranks)
        spoil(reach(core.peers.address))
    for step in range(1, 4):
        try:
            engine.checkpoint(state_of(group.rank, step), step=step).result(SECONDS)
        except CheckpointError as error:
            found.append(type(error).__name__)
    try:
        engine.restore(state_of(group.rank, -1))
    except CheckpointError as error:
        found.append(type(error).__name__)
    engine.close(SECONDS)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize(
    "spoil", [junk_in_the_inbox, a_gap_in_the_inbox, a_forged_decision, a_decision_that_makes_no_sense]
)
def test_whoever_waits_gets_a_group_error(
    tmp_path: Path, spoil: Callable[[TCPStore], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccheck_async.group.control._GAP_SECONDS", 0.3)
    for found in run_ranks(2, partial(run_of, tmp_path, spoil)):
        assert len(found) >= 2  # that checkpoint, at most one that was decided before, and the restore
        assert set(found) == {GroupError.__name__}
    (newest, *_) = list_checkpoints(tmp_path)
    assert newest.step <= 2
    assert run_ranks(2, partial(restored_step, tmp_path)) == [newest.step] * 2


def restored_step(folder: Path, group: Group) -> int | None:
    with SyncCheckpointEngine(folder, group=group) as engine:
        restored = engine.restore(state_of(group.rank, -1))
        return None if restored is None else restored.step
