"""What the log says now and then, and not at every checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import SyncCheckpointEngine
from pccheck_async.medium import File
from pccheck_async.telemetry import Event, Reporter, Waited
from pccheck_async.telemetry.events import Durable, Failed, Superseded
from pccheck_async.testing import CrashDisk, CrashWriter, WrappingWriter


def tell_durable(reporter: Reporter, step: int) -> None:
    reporter.tell(Durable, step=step, counter=step, nbytes=100, seconds=0.5, capture_seconds=0.1, stall=0.1)


def tell_superseded(reporter: Reporter, step: int) -> None:
    reporter.tell(Superseded, step=step, counter=step, seconds=0.5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("pccheck_async.telemetry.reporter.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level("INFO", "pccheck_async")
    return lambda: [record.__dict__ for record in caplog.records]


def test_a_summary_every_ten_minutes_in_which_something_ended(clock: list[float], said: Any) -> None:
    waited = [0.0]
    reporter = Reporter("store", lambda: waited[0])
    for step in range(10):
        waited[0] += 0.25
        tell_durable(reporter, step)
    assert said() == []
    clock[0] += 601
    tell_superseded(reporter, 10)
    (first,) = said()
    assert {key: first[key] for key in ("event", "levelname", "store", "durable", "superseded", "failed")} == {
        "event": "summary",
        "levelname": "INFO",
        "store": "store",
        "durable": 10,
        "superseded": 1,
        "failed": 0,
    }
    assert (first["nbytes"], first["seconds"], first["stall"]) == (1000, 601, 2.5)
    clock[0] += 599
    tell_durable(reporter, 11)
    assert len(said()) == 1
    clock[0] += 2
    waited[0] += 0.125
    reporter.tell(Failed, step=12, counter=12, error=ValueError("x"))
    summary = said()[-1]
    assert (summary["event"], summary["durable"], summary["failed"], summary["nbytes"]) == ("summary", 1, 1, 100)
    assert summary["stall"] == 0.125
    assert reporter.nbytes == 1100


def test_a_burst_of_superseded_ones_is_said_once(said: Any) -> None:
    reporter = Reporter("store", lambda: 0.0)
    for step in range(16):
        (tell_durable if step % 3 else tell_superseded)(reporter, step)
    assert said() == []  # one in three
    for step in range(40):
        tell_superseded(reporter, step)
    (burst,) = said()
    assert (burst["event"], burst["levelname"], burst["count"], burst["last"]) == ("superseded_burst", "WARNING", 9, 16)
    for step in range(40):
        (tell_durable if step % 2 else tell_superseded)(reporter, step)
    for step in range(2):
        tell_superseded(reporter, step)
    assert len(said()) == 1  # half of them, and then a ninth: that one is not over
    for step in range(40):
        tell_durable(reporter, step)
    for step in range(8):
        tell_superseded(reporter, step)
    assert len(said()) == 1
    tell_superseded(reporter, 9)
    assert len(said()) == 2  # that one was over: another


def test_long_waits_are_said_and_not_each_of_them(clock: list[float], said: Any) -> None:
    reporter = Reporter("store", lambda: 0.0)

    def wait(seconds: float) -> None:
        reporter.tell(Waited, step=3, counter=2, seconds=seconds, where="checkpoint")

    wait(0.9)
    assert said() == []
    wait(1.5)
    wait(2.5)
    (first,) = said()
    assert (first["event"], first["levelno"], first["step"], first["seconds"], first["where"]) == (
        "held_up", logging.WARNING, 3, 1.5, "checkpoint",
    )  # fmt: skip
    clock[0] += 600
    wait(4.0)
    assert [record["seconds"] for record in said()] == [1.5, 4.0]


def test_an_error_without_a_text_and_a_handler_that_raises_disturb_nobody(tmp_path: Path) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("the handler")

    class MuteWriter(WrappingWriter):
        async def write(self, file: File, offset: int, data: memoryview) -> None:
            if file.name.startswith("slot-"):
                raise MuteError
            await super().write(file, offset, data)

    heard: list[Event] = []
    handler = Raises()
    log = logging.getLogger("pccheck_async")
    log.addHandler(handler)
    try:
        with SyncCheckpointEngine(tmp_path, io=MuteWriter(CrashWriter(CrashDisk()))) as engine:
            engine.on_event(heard.append)
            pending = engine.checkpoint({"x": torch.ones(3)}, step=1)
            with pytest.raises(MuteError):
                pending.result(30)
    finally:
        log.removeHandler(handler)
    assert [type(event) for event in heard if isinstance(event, (Durable, Failed))] == [Failed]
