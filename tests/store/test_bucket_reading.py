"""Reading checkpoints in a bucket by URL, by the same functions as those in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("obstore")

import torch
from typer.testing import CliRunner

from pccheck_async import (
    Drain,
    FlatShard,
    Group,
    NoCheckpointError,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    open_checkpoint,
    stores,
)
from pccheck_async.bucket import Compressing, Compression, Draft, Owner, open_objects, send_part
from pccheck_async.cli import app
from pccheck_async.engine import call_once
from pccheck_async.errors import DamagedError, StoreError
from pccheck_async.group import open_place
from pccheck_async.store import Staging
from tests.support.thread_ranks import on_ranks


async def copied(folder: Path, url: str, keep_last: int, how: Compression = None) -> None:
    """Copy all checkpoints of a store to a bucket, oldest first."""
    objects = open_objects(url, writes=True)
    async with await open_place(folder, "auto") as place:
        owner = Owner(objects, place.identity.id_bytes, keep_last)
        await owner.take_over()
        for one in reversed(place.complete):
            part = place.part(one.key, 0, Staging(), one.entry)
            await part.hold()
            try:
                await owner.commit([await send_part(Draft.of(owner), part, compressing=Compressing(how))])
            finally:
                await part.close()
            await owner.collect()


@pytest.fixture(params=[None, "zstd"])
def places(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """A store of three checkpoints, and a bucket with the newest two of them."""
    with SyncCheckpointEngine(tmp_path / "run", keep_last=3) as engine:
        for step in (1, 2, 3):
            state = {"weights": torch.arange(1 << 20) + step, "half": torch.ones(7, dtype=torch.bfloat16), "step": step}
            engine.checkpoint(state, step=step, metadata={"loss": step / 4}, name=f"n{step}").result()
    url = f"file://{tmp_path}/bucket"
    call_once(copied(tmp_path / "run", url, 2, request.param))
    return tmp_path / "run", url


def test_a_bucket_is_read_as_a_folder_is(places: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = places
    found = list_checkpoints(url)
    assert found == list_checkpoints(folder)[:2]
    assert [(info.step, info.name, info.metadata, info.tiers) for info in found] == [
        (3, "n3", {"loss": 0.75}, ("remote",)), (2, "n2", {"loss": 0.5}, ("remote",)),
    ]  # fmt: skip
    whole = load_sync(url)
    assert torch.equal(whole["weights"], torch.arange(1 << 20) + 3)
    assert whole["step"] == 3
    assert load_sync(url, step=2)["step"] == load_sync(url, name="n2")["step"] == 2
    assert list(load_sync(url, keys=["half"])) == ["half"]
    assert stores.verify(url, every=True).whole
    assert stores.describe(url).info == found[0]
    assert not stores.compare(url, folder, step=2, other_step=2).differences
    assert stores.copy(url, tmp_path / "back").step == 3
    assert not stores.compare(url, tmp_path / "back").differences
    stores.export(url, tmp_path / "model.pt", to="torch")
    assert torch.equal(torch.load(tmp_path / "model.pt")["weights"], whole["weights"])


def test_one_tensor_is_read_alone(places: tuple[Path, str]) -> None:
    _, url = places
    with open_checkpoint(url) as checkpoint:
        assert checkpoint["step"] == 3
        assert torch.equal(checkpoint["half"], torch.ones(7, dtype=torch.bfloat16))
        assert checkpoint.tensor("weights")[1000].item() == 1003


def test_what_is_not_there_is_named(places: tuple[Path, str]) -> None:
    _, url = places
    with pytest.raises(NoCheckpointError, match="bucket holds no checkpoint of step 1; there are steps 3, 2"):
        load_sync(url, step=1)
    with pytest.raises(NoCheckpointError, match=r"file://.*/nothing does not exist"):
        load_sync(url.replace("bucket", "nothing"))


def test_damage_is_passed_over(places: tuple[Path, str], tmp_path: Path) -> None:
    _, url = places
    newest = next((tmp_path / "bucket" / "data" / "000000004").rglob("00000-*"))
    data = bytearray(newest.read_bytes())
    data[5000] ^= 1
    newest.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="falling back to step 2"):
        assert load_sync(url)["step"] == 2
    with pytest.raises(DamagedError):
        load_sync(url, step=3)
    assert not stores.verify(url).whole
    newest.unlink()
    with pytest.warns(RuntimeWarning, match="falling back to step 2"):
        assert load_sync(url)["step"] == 2


def test_a_commit_is_read_while_newer_ones_come(places: tuple[Path, str]) -> None:
    folder, url = places
    with SyncCheckpointEngine(folder, keep_last=3) as engine:
        engine.checkpoint({"step": 4}, step=4, metadata={}).result()
    with open_checkpoint(url) as checkpoint:
        call_once(copied(folder, url, keep_last=1))
        assert checkpoint["step"] == 3, "the index was read before"
    assert load_sync(url)["step"] == 4
    assert [info.step for info in list_checkpoints(url)] == [4]


def test_a_copy_goes_into_an_empty_prefix(places: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = places
    copy = f"file://{tmp_path}/copy"
    assert stores.copy(folder, copy, step=2).tiers == ("remote",)
    assert [info.step for info in list_checkpoints(copy)] == [2]
    assert not stores.compare(folder, copy, step=2).differences
    assert stores.copy(url, f"file://{tmp_path}/third").step == 3
    with pytest.raises(StoreError, match="empty prefix"):
        stores.copy(folder, copy)


def test_commands_take_urls(places: tuple[Path, str], tmp_path: Path) -> None:
    _, url = places
    for command in (["ls", url], ["show", url], ["verify", url, "--all"], ["copy", url, str(tmp_path / "back")]):
        ran = CliRunner().invoke(app, command)
        assert ran.exit_code == 0, ran.output
        assert "3" in ran.output
    ran = CliRunner().invoke(app, ["ls", url, "--json"])
    assert [each["step"] for each in json.loads(ran.output)] == [3, 2]
    ran = CliRunner().invoke(app, ["ls", f"file://{tmp_path}/nothing"])
    assert ran.exit_code == 3
    ran = CliRunner().invoke(app, ["reject", url, "--step", "3"])
    assert ran.exit_code == 2


# -- the checkpoints of a group


def shards(group: Group, step: int) -> dict[str, object]:
    local = torch.arange(group.rank * 500, group.rank * 500 + 500) + step
    return {"whole": FlatShard(local, (1000,), group.rank * 500), "own": torch.full((9,), group.rank), "step": step}


@pytest.fixture
def of_group(tmp_path: Path) -> tuple[Path, str]:
    """The folder of a group of two ranks, with three checkpoints, and a bucket with the newest two of them."""
    url = f"file://{tmp_path}/bucket"

    def work(group: Group) -> None:
        drain = Drain(url, keep_last=2)
        with SyncCheckpointEngine(tmp_path / "run", group=group, keep_last=3, drain=drain, save_last=False) as engine:
            for step in (1, 2, 3):
                pending = engine.checkpoint(shards(group, step), step=step, name=f"n{step}")
                pending.wait_reached("remote", 30)

    on_ranks(2, work)
    return tmp_path / "run", url


@pytest.mark.slow
def test_a_groups_bucket_is_read_as_its_folder_is(of_group: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = of_group
    found = list_checkpoints(url)
    assert found == list_checkpoints(folder)[:2]
    assert [(info.step, info.name, info.tiers) for info in found] == [(3, "n3", ("remote",)), (2, "n2", ("remote",))]
    assert torch.equal(load_sync(url)["whole"], torch.arange(1000) + 3)
    assert load_sync(url, rank=1)["own"][0] == 1
    assert load_sync(url, step=2)["step"] == load_sync(url, name="n2")["step"] == 2
    with open_checkpoint(url) as checkpoint:
        assert checkpoint["step"] == 3
        assert checkpoint.tensor("whole")[700].item() == 703
    assert stores.verify(url, every=True).whole
    assert not stores.compare(url, folder, step=2, other_step=2).differences
    assert stores.copy(url, tmp_path / "back").step == 3
    assert not stores.compare(url, tmp_path / "back").differences
    assert sorted(path.name for path in (tmp_path / "back").glob("rank-*")) == ["rank-00000", "rank-00001"]
    stores.export(url, tmp_path / "model.pt", to="torch", rank=0)
    assert torch.equal(torch.load(tmp_path / "model.pt")["whole"], torch.arange(1000) + 3)
    for command in (["ls", url], ["show", url], ["show", url, "--ranks"], ["verify", url, "--all"]):
        ran = CliRunner().invoke(app, command)
        assert ran.exit_code == 0, ran.output
        assert "3" in ran.output


@pytest.mark.slow
def test_damage_of_one_rank_is_passed_over(of_group: tuple[Path, str], tmp_path: Path) -> None:
    _, url = of_group
    newest = max((tmp_path / "bucket" / "data").glob("*/00001"))
    damaged = next(newest.glob("00000-*"))
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    assert not stores.verify(url).whole
    with pytest.warns(RuntimeWarning, match="falling back to step 2"):
        assert load_sync(url)["step"] == 2


@pytest.mark.slow
def test_a_groups_checkpoint_is_copied_into_a_bucket(of_group: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = of_group
    for source, copy in ((folder, f"file://{tmp_path}/copy"), (url, f"file://{tmp_path}/third")):
        info = stores.copy(source, copy)
        assert (info.step, info.nbytes, info.tiers) == (3, list_checkpoints(folder)[0].nbytes, ("remote",))
        assert not stores.compare(folder, copy).differences

    def work(group: Group) -> tuple[int, str]:
        with SyncCheckpointEngine(
            tmp_path / "new", group=group, drain=Drain(f"file://{tmp_path}/copy"), save_last=False
        ) as engine:
            restored = engine.restore(state := shards(group, 0))
            assert restored is not None
            assert torch.equal(state["own"], torch.full((9,), group.rank))  # type: ignore[arg-type]
            return restored.step, restored.source

    assert on_ranks(2, work) == [(3, "remote")] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_a_bucket(places: tuple[Path, str]) -> None:
    from torch.distributed.checkpoint import state_dict_loader as dcp

    from pccheck_async.integrations.dcp import StorageReader

    _, url = places
    state = {"weights": torch.zeros(1 << 20, dtype=torch.int64)}
    dcp.load(state, storage_reader=StorageReader(url))
    assert torch.equal(state["weights"], torch.arange(1 << 20) + 3)
    dcp.load(state, storage_reader=StorageReader(url + "/"), checkpoint_id=f"{url}/step-2")
    assert torch.equal(state["weights"], torch.arange(1 << 20) + 2)
