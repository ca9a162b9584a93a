"""The interface to object storage, the same over a lying store that does not lie, obstore's, and a real S3 server."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("obstore")

from obstore.store import MemoryStore

from pccheck_async.bucket import BucketMedium, Draft, Objects, Owner, RefusedError, is_location, open_objects, shown
from pccheck_async.bucket.names import digest
from pccheck_async.bucket.objects import MissingObjectError
from pccheck_async.bucket.owner import read_index
from pccheck_async.errors import NoCheckpointError, StoreLockedError
from tests.support.lying_objects import LyingObjects, entry_of
from tests.support.object_server import BUCKET, OPTIONS_OF_READER, find_server, options_for, served

T = TypeVar("T")
Make = Callable[..., Objects]


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 300))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The options of a real server."""
    if find_server() is None:
        pytest.skip("SeaweedFS is not installed")
    with served(tmp_path_factory.mktemp("server")) as port:
        yield options_for(port)


@pytest.fixture(params=["played", "memory", "file", pytest.param("s3", marks=pytest.mark.slow)])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "played":
        return LyingObjects()
    if request.param == "memory":
        return open_objects(MemoryStore())
    if request.param == "file":
        return open_objects(f"file://{tmp_path}/a%20bucket", writes=True)
    options = request.getfixturevalue("server")
    return open_objects(f"s3://{BUCKET}/{secrets.token_hex(4)}", options, deadline=20)


def test_what_is_put_is_read(objects: Objects) -> None:
    data = secrets.token_bytes(100_000)

    async def work() -> None:
        await objects.put("data/x", memoryview(bytearray(data)))
        assert await objects.get("data/x", 1 << 20) == data
        assert await objects.get("data/y", 1 << 20) is None
        with pytest.raises(MissingObjectError):
            await objects.get("data/x", 1000)
        for low, high in [(0, 100_000), (5, 6), (99_999, 100_000)]:
            assert bytes(await objects.read("data/x", low, high - low)) == data[low:high]
        with pytest.raises(MissingObjectError):
            await objects.read("data/y", 0, 1)
        with pytest.raises(MissingObjectError):
            await objects.read("data/x", 200_000, 1)
        await objects.put("data/x", b"other")
        assert await objects.get("data/x", 1 << 20) == b"other"

    run(work())


def test_of_many_that_create_one_wins(objects: Objects) -> None:
    async def work() -> None:
        for number in range(5):
            key = f"commits/{number:09d}"
            won = await asyncio.gather(*(objects.create(key, b"%d" % each) for each in range(8)))
            assert sum(won) == 1
            assert await objects.get(key, 10) == b"%d" % won.index(True)
            assert not await objects.create(key, b"again")

    run(work())


def test_lists_are_up_to_date(objects: Objects) -> None:
    async def work() -> None:
        assert [*await objects.list("commits/")] == []
        for number in range(1, 12):
            await objects.create(f"commits/{number:09d}", b"x" * number)
            assert max(await objects.list("commits/"))[0] == f"commits/{number:09d}"
        await objects.put("data/x", b"")
        assert sorted(await objects.list("commits/", after="commits/000000009")) == [
            ("commits/000000010", 10), ("commits/000000011", 11),
        ]  # fmt: skip
        assert [*await objects.list("commits/", after="commits/000000011")] == []
        await objects.delete(["commits/000000011", "commits/000000003", "never/was"])
        await objects.delete([])
        assert len(await objects.list("commits/")) == 9
        assert len(await objects.list("data/")) == 1

    run(work())


@pytest.mark.slow
def test_wrong_settings_of_a_server_say_what_to_do(server: dict[str, Any]) -> None:
    url = f"s3://{BUCKET}/run"

    def refused(url: str, options: dict[str, Any]) -> str:
        with pytest.raises(RefusedError) as caught:
            run(open_objects(url, options, deadline=5).list("commits/"))
        text = f"{caught.value!r} {caught.value} {caught.value.__cause__}"
        assert "secret" not in text.replace("the secret key is not", "")
        return text

    assert "no such bucket" in refused("s3://no-such-bucket/run", server)
    assert "the secret key is not that" in refused(url, server | {"secret_access_key": "wrong-secret"})
    assert "does not know the access key" in refused(url, server | {"access_key_id": "nobody"})
    assert "s3:ListBucket" in refused(url, server | OPTIONS_OF_READER)
    assert "allow_http" in refused(url, server | {"allow_http": False})
    assert "'bogus' is not valid" in refused(url, server | {"bogus": "a-secret"})


def test_places_are_told_from_folders(tmp_path: Path) -> None:
    assert is_location("s3://bucket/run")
    assert is_location(MemoryStore())
    assert not is_location(tmp_path)
    assert not is_location("runs/s3:")
    assert not is_location(None)
    assert shown("s3://user:password@bucket/run/?token=secret") == "s3://bucket/run"


def test_wrong_places_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefusedError, match="known are s3://"):
        open_objects("ftp://host/run")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(RefusedError, match=r"az://container/run cannot be opened: Azure needs the account"):
        open_objects("az://container/run")
    assert open_objects("az://container/run", {"account_name": "account"}).url == "az://container/run"
    with pytest.raises(RefusedError, match="options are for a URL"):
        open_objects(MemoryStore(), {"region": "x"})
    with pytest.raises(NoCheckpointError, match="does not exist"):
        open_objects(f"file://{tmp_path}/nothing")
    assert not (tmp_path / "nothing").exists()


def test_without_the_libraries_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(RefusedError, match=r"pccheck-async\[bucket\]"):
        open_objects("s3://bucket/run")


@pytest.mark.parametrize("rounds", [5, pytest.param(100, marks=pytest.mark.campaign)])
def test_of_two_runs_that_begin_together_one_goes_on(objects: Objects, rounds: int) -> None:
    async def life(counter: int, owner: Owner) -> int:
        """Take over and copy three checkpoints; return the counter of the last one that is there."""
        done = -1
        try:
            await owner.take_over()
            for number in range(3):
                draft, data = Draft.of(owner), b"%d" % (counter + number)
                await draft.send(0, data, digest(data))
                await asyncio.sleep(0)
                part = await draft.finish(entry_of(counter + number, len(data)), 512, b"manifest")
                if await owner.commit([part]):
                    done = counter + number
                await owner.collect()
        except StoreLockedError:  # the other one took over
            pass
        return done

    async def work() -> None:
        reported = -1
        for each in range(rounds):
            lives = [life(10 * (each + 1), Owner(objects, bytes([side]) * 16, keep_last=2)) for side in (1, 2)]
            reported = max(reported, *await asyncio.gather(*lives))
            _, found = await BucketMedium(objects).look()
            counters = [record.entry.counter for _, record in found if record.parts]
            assert counters == sorted(counters, reverse=True)
            assert reported == -1 or counters[0] >= reported
            for _, record in found:
                for part in record.parts:
                    index = await read_index(objects, part)
                    assert [await objects.get(key, 100) for key, _ in index.objects] == [b"%d" % part.entry.counter]
        assert reported > 0

    run(work())


def test_a_fork_of_a_process_that_used_obstore_says_so() -> None:
    run(open_objects(MemoryStore()).list("commits/"))
    if (child := os.fork()) == 0:
        try:
            open_objects(MemoryStore())
        except RefusedError as error:
            os._exit(7 if "spawn" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
