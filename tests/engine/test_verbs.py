"""The verbs on kept checkpoints, beside commits and by name: pin, unpin, remove and reject."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import (
    CheckpointEngine,
    CheckpointInfo,
    NoCheckpointError,
    SyncCheckpointEngine,
    list_checkpoints,
    stores,
)
from tests.engine.test_failures import state_of
from tests.engine.test_inline_capture_engine import stuck_engine

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LARGE = {"weights": torch.zeros(1 << 20)}  # too large to be written in one chain with its record


def save(engine: SyncCheckpointEngine, *steps: int, **more: Any) -> None:
    for step in steps:
        engine.checkpoint(state_of(step), step=step, **more).result()


def kept(infos: list[CheckpointInfo]) -> list[int]:
    return [info.step for info in infos]


def test_by_name(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=4) as engine:
        for step in (1, 2, 3, 4):
            save(engine, step, name=f"epoch={step}")
        assert engine.pin(name="epoch=2").step == 2
        assert [info.pinned for info in engine.checkpoints()] == [False, False, True, False]
        assert engine.unpin(name="epoch=2").pinned is False
        assert kept(engine.reject(name="epoch=3")) == [4, 3]
        assert kept(engine.remove(name="epoch=1")) == [1]
        for verb in (engine.pin, engine.unpin, engine.remove, engine.reject):
            with pytest.raises(NoCheckpointError, match="no checkpoint named 'other'"):
                verb(name="other")
    with pytest.raises(NoCheckpointError, match="no checkpoint named 'epoch=4'"):
        stores.reject(tmp_path, name="epoch=4")
    assert stores.pin(tmp_path, name="epoch=2").pinned
    assert not stores.unpin(tmp_path, name="epoch=2").pinned
    assert kept([*stores.remove(tmp_path, name="epoch=3").removed]) == [3]


def test_rejecting_a_name_begins_with_the_one_that_has_it(tmp_path: Path) -> None:
    """The newest of its step may be another one."""
    with SyncCheckpointEngine(tmp_path, keep_last=5) as engine:
        save(engine, 1)
        save(engine, 3, name="bad")
        save(engine, 2, 3)  # after a rollback
        assert kept(engine.reject(name="bad")) == [3, 2, 3]
        assert [info.step for info in engine.checkpoints() if not info.rejected] == [1]


@pytest.mark.parametrize("verb", ["pin", "unpin", "remove", "reject"])
def test_which_one_is_asked_for(tmp_path: Path, verb: str) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=3) as engine:
        save(engine, 1, 2)
        on_engine: Callable[..., object] = getattr(engine, verb)
        with pytest.raises(TypeError, match="give step= or name="):
            on_engine()
        with pytest.raises(ValueError, match="not both"):
            on_engine(step=1, name="one")
    on_store: Callable[..., object] = getattr(stores, verb)
    with pytest.raises(TypeError, match="give step= or name="):
        on_store(tmp_path)


@pytest.mark.parametrize("verb", ["pin", "unpin", "reject"])
def test_a_step_by_place_works_once_more(tmp_path: Path, verb: str) -> None:
    async def old() -> None:
        async with CheckpointEngine(tmp_path / "async", keep_last=3) as engine:
            for step in (1, 2):
                await (await engine.checkpoint(state_of(step), step=step))
            with pytest.warns(DeprecationWarning, match=rf"write {verb}\(step=\.\.\.\)") as caught:
                await getattr(engine, verb)(2)
            assert [one.filename for one in caught] == [__file__]

    asyncio.run(old())
    with SyncCheckpointEngine(tmp_path / "run", keep_last=3) as engine:
        save(engine, 1, 2)
        with pytest.warns(DeprecationWarning, match=rf"write {verb}\(step=\.\.\.\)") as caught:
            getattr(engine, verb)(2)
        with pytest.raises(TypeError, match="positional"):
            getattr(engine, verb)(1, 2)
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.slow
def test_functions_take_what_they_took(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=5) as engine:
        save(engine, 1, 2, 3, 4)
    old: Any = stores
    calls: list[tuple[Callable[[], Any], str, list[bool]]] = [
        (lambda: old.pin(tmp_path, 4, pinned=True), r"write pin\(\) and unpin\(\)", [True]),
        (lambda: old.pin(tmp_path, 4, pinned=False), r"write pin\(\) and unpin\(\)", [False]),
        (lambda: old.remove(tmp_path, [1, 2]), r"write remove\(step=\.\.\.\)", [False]),
        (lambda: old.remove(tmp_path, steps=[3]), r"write remove\(step=\.\.\.\)", [False]),
    ]
    for call, text, pinned in calls:
        with pytest.warns(DeprecationWarning, match=text) as caught:
            call()
        assert [one.filename for one in caught] == [__file__]
        assert [info.pinned for info in list_checkpoints(tmp_path)][:1] == pinned
    assert kept(list_checkpoints(tmp_path)) == [4]


def test_one_in_flight_is_pinned_once_it_is_durable() -> None:
    engine, stuck, _ = stuck_engine(max_in_flight=2)
    try:
        engine.checkpoint(LARGE, step=1).result()
        stuck.hold("flush")
        pending = engine.checkpoint(LARGE, step=2, name="two")
        release = threading.Timer(0.1, stuck.release)
        release.start()
        assert engine.pin(name="two").pinned
        release.join()
        assert pending.done()
        engine.checkpoint(LARGE, step=3).result()
        assert kept(engine.checkpoints()) == [3, 2]
    finally:
        engine.close()


def test_one_that_fails_in_flight_is_not_there_to_be_pinned() -> None:
    engine, stuck, _ = stuck_engine(max_in_flight=2)
    try:
        engine.checkpoint(LARGE, step=1).result()
        stuck.hold("write", "flush")
        engine.checkpoint(LARGE, step=2)
        engine.reject(step=2)
        release = threading.Timer(0.1, stuck.release)
        release.start()
        with pytest.raises(NoCheckpointError, match="step 2"):
            engine.pin(step=2)
        release.join()
    finally:
        engine.close()


@pytest.mark.slow
def test_beside_commits_no_pin_is_lost_and_none_is_kept_that_was_ended(tmp_path: Path) -> None:
    """One thread saves as fast as it can; two others pin and unpin the newest. Each call's answer holds."""
    pinned, ended, done = set[int](), set[int](), threading.Event()
    with SyncCheckpointEngine(tmp_path, keep_last=2, max_in_flight=2) as engine:

        def pins(offset: int) -> None:
            while not done.is_set():
                step = engine.latest.step if engine.latest else 0
                if step % 4 != offset or step in pinned:
                    continue
                try:
                    assert engine.pin(step=step).pinned
                    pinned.add(step)
                    if step % 8 == offset:
                        assert not engine.unpin(step=step).pinned
                        ended.add(step)
                except NoCheckpointError:  # a commit dropped it before the pin
                    assert step not in pinned
                if len(pinned) > 30:
                    return

        threads = [threading.Thread(target=pins, args=(offset,)) for offset in (0, 2)]
        for thread in threads:
            thread.start()
        for step in range(150):
            engine.checkpoint(state_of(step), step=step)
        engine.drain()
        done.set()
        for thread in threads:
            thread.join()
        save(engine, 200, 201)
        found = kept(engine.checkpoints())
    stay = sorted(pinned - ended, reverse=True)
    assert len(stay) > 1
    assert ended
    assert found == [201, 200, *stay] == kept(list_checkpoints(tmp_path))
