"""Ctrl-C, anywhere in the calls of an engine: nothing acknowledged is lost, nothing torn is kept, nothing leaks."""

from __future__ import annotations

import dis
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import pccheck_async.engine
from pccheck_async import CheckpointError, StorageOptions, SyncCheckpointEngine, load_sync
from pccheck_async.testing.probe import probe
from tests.support.interrupts import interrupter

ENGINE = os.path.dirname(pccheck_async.engine.__file__)
LOOKS = ("RESUME", "JUMP_BACKWARD", "CALL")  # instructions after which Python looks for signals


def state_of(step: int) -> dict[str, Any]:
    return {"a": torch.full((3000,), float(step)), "b": torch.full((3000,), float(step)), "step": step}


def storm(path: Path, seed: int, rounds: int) -> dict[str, int]:
    """Interrupt the saving of so many steps, and look at what is there after each."""
    seen = {"saved": 0, "not saved": 0, "reopened": 0}
    engine, acknowledged = SyncCheckpointEngine(path, keep_last=2, overwrite=True).open(), 0
    engine.checkpoint(state_of(0), step=0).result(60)
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with interrupter(seed) as source, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, rounds + 1):
            try:
                source.ask(0.004)
                engine.checkpoint(state_of(step), step=step).result(60)
                acknowledged = step
                source.wait()
            except KeyboardInterrupt:
                pass
            with suppress(CheckpointError):  # of the one that was interrupted
                engine.drain()
            infos = engine.checkpoints()
            assert infos[0].step in (acknowledged, step), (infos[0], acknowledged, step)
            seen["saved" if infos[0].step == step else "not saved"] += 1
            acknowledged = infos[0].step
            found = load_sync(path)
            assert found["step"] == acknowledged
            assert (found["a"] == acknowledged).all()
            assert (found["b"] == acknowledged).all()
            statistics = engine.statistics()
            assert statistics.in_flight == 0
            assert statistics.pool_in_use_bytes == 0
            if step % 50 == 0:
                engine.close()
                engine = SyncCheckpointEngine(
                    path, keep_last=2, overwrite=True, storage=StorageOptions(lock_timeout=0)
                ).open()
                seen["reopened"] += 1
                engine.checkpoint(state_of(step), step=step).result(60)
                acknowledged = step
    assert threading.active_count() <= before[0]
    assert len(os.listdir("/proc/self/fd")) <= before[1] + 2
    engine.close()
    seen["swallowed"] = source.swallowed
    return seen


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left_behind")
def test_a_storm_of_interrupts(tmp_path: Path) -> None:
    seen = storm(tmp_path, 1, 40)
    assert seen["saved"] + seen["not saved"] == 40


class Place:
    """Raises KeyboardInterrupt at one place: where Python looks for signals, in the code of the engine on this thread.

    Attributes:
        seen: The places that were passed; without a number, none raises.
    """

    def __init__(self, number: int | None = None) -> None:
        self.seen = 0
        self._number = number
        self._instructions: dict[CodeType, dict[int, str]] = {}
        self._before: dict[FrameType, str] = {}

    def __enter__(self) -> Place:
        self._former = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._former)

    def _call(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_back in self._before:
            self._before[frame.f_back] = ""  # after a call of Python code it looks where that begins, not at its return
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._before[frame] = "RESUME"
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event == "opcode":
            code = frame.f_code
            if code not in self._instructions:
                self._instructions[code] = {each.offset: each.opname for each in dis.get_instructions(code)}
            looked = self._before[frame].startswith(LOOKS)
            self._before[frame] = self._instructions[code].get(frame.f_lasti, "")
            if looked:
                self.seen += 1
                if self.seen - 1 == self._number:
                    sys.settrace(self._former)
                    raise KeyboardInterrupt
        return self._opcode


def saved_under(engine: SyncCheckpointEngine, step: int, number: int | None) -> int:
    """Save, interrupted at a place of that number; return how many places were passed."""
    place = Place(number)
    with suppress(KeyboardInterrupt), place:
        engine.checkpoint(state_of(step), step=step).result(60)
    return place.seen


def is_free(lock: Any) -> bool:
    """Whether another thread gets it."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=20))
        if got[0]:
            lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return got[0]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left_behind")
def test_an_interrupt_at_any_place_of_the_engines_code(tmp_path: Path) -> None:
    """None leaves a lock held, a place taken, or a checkpoint that is not as it was saved."""
    with warnings.catch_warnings(), SyncCheckpointEngine(tmp_path, keep_last=2, overwrite=True) as engine:
        warnings.simplefilter("ignore")
        engine.checkpoint(state_of(0), step=0).result(60)
        places = saved_under(engine, 1, None)
        assert places > 60
        lock = probe(engine).core.in_flight.lock
        for number in range(places):
            step = number + 2
            saved_under(engine, step, number)
            if not is_free(lock):
                lock.release()
                pytest.fail(f"the interrupt at place {number} of {places} left the lock held")
            with suppress(CheckpointError):
                engine.drain()
            newest = engine.checkpoints()[0].step
            assert newest <= step
            assert load_sync(tmp_path)["step"] == newest
            assert engine.statistics().in_flight == 0
            assert engine.statistics().pool_in_use_bytes == 0


@pytest.mark.campaign
@pytest.mark.usefixtures("nothing_left_behind")
def test_a_storm_of_2000_interrupts(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    seen = storm(tmp_path, 2, 2000)
    record_property("seen", seen)
    assert min(seen["saved"], seen["not saved"]) > 20


class Endless:
    """Its finalizer ends by an interrupt."""

    def __del__(self) -> None:
        while True:
            pass


def swallow() -> None:
    with suppress(KeyboardInterrupt):
        while True:
            pass


@pytest.mark.parametrize(
    ("work", "found"), [(swallow, ["1 interrupts were swallowed, 0 in finalizers"]), (Endless, [])]
)
def test_an_interrupt_that_is_swallowed_other_than_by_a_finalizer_fails(
    work: Callable[[], object], found: list[str]
) -> None:
    told = []
    try:
        with interrupter(1) as source:
            source.patience = 0.05
            source.ask(1)
            with suppress(KeyboardInterrupt):
                work()
                source.wait()
            assert source.swallowed == 1
    except AssertionError as error:
        told.append(str(error).partition("\n")[0])
    assert told == found
