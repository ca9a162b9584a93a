"""What the log says now and then, and not at every checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import StorageOptions, SyncCheckpointEngine
from pccheck_async.medium import File
from pccheck_async.telemetry import Event, Span, Stream
from pccheck_async.telemetry.events import Abandoned, Admitted, Durable, Failed, Skipped, Superseded, Waited
from pccheck_async.testing import CrashDisk, CrashWriter, WrappingWriter


def durable(step: int) -> Durable:
    return Durable(step=step, counter=step, nbytes=100, seconds=0.5, capture_seconds=0.1, stall=0.1)


def superseded(step: int) -> Superseded:
    return Superseded(step=step, counter=step, seconds=0.5)


def waited(seconds: float) -> Waited:
    return Waited(step=3, counter=2, seconds=seconds, where="checkpoint")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("pccheck_async.telemetry.stream.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level("INFO", "pccheck_async")
    return lambda: [record.__dict__ for record in caplog.records]


def test_a_summary_every_ten_minutes_in_which_something_ended(clock: list[float], said: Any) -> None:
    stream = Stream("store")
    for step in range(10):
        stream.emit(waited(0.25))
        stream.emit(durable(step))
    assert said() == []
    clock[0] += 601
    stream.emit(superseded(10))
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
    stream.emit(durable(11))
    assert len(said()) == 1
    clock[0] += 2
    stream.emit(waited(0.125))
    stream.emit(Failed(step=12, counter=12, error=ValueError("x")))
    summary = said()[-1]
    assert (summary["event"], summary["durable"], summary["failed"], summary["nbytes"]) == ("summary", 1, 1, 100)
    assert summary["stall"] == 0.125
    assert stream.totals.durable_bytes == 1100


def test_a_burst_of_superseded_ones_is_said_once(said: Any) -> None:
    stream = Stream("store")
    for step in range(16):
        stream.emit((durable if step % 3 else superseded)(step))
    assert said() == []  # one in three
    for step in range(40):
        stream.emit(superseded(step))
    (burst,) = said()
    assert (burst["event"], burst["levelname"], burst["count"], burst["last"]) == ("superseded_burst", "WARNING", 9, 16)
    for step in range(40):
        stream.emit((durable if step % 2 else superseded)(step))
    for step in range(2):
        stream.emit(superseded(step))
    assert len(said()) == 1  # half of them, and then a ninth: that one is not over
    for step in range(40):
        stream.emit(durable(step))
    for step in range(8):
        stream.emit(superseded(step))
    assert len(said()) == 1
    stream.emit(superseded(9))
    assert len(said()) == 2  # that one was over: another


def test_long_waits_are_said_and_not_each_of_them(clock: list[float], said: Any) -> None:
    stream = Stream("store")
    stream.emit(waited(0.9))
    assert said() == []
    stream.emit(waited(1.5))
    stream.emit(waited(2.5))
    (first,) = said()
    assert (first["event"], first["levelno"], first["step"], first["seconds"], first["where"]) == (
        "held_up", logging.WARNING, 3, 1.5, "checkpoint",
    )  # fmt: skip
    clock[0] += 600
    stream.emit(waited(4.0))
    assert [record["seconds"] for record in said()] == [1.5, 4.0]


def test_statistics_are_a_fold_over_the_events() -> None:
    stream = Stream("store")
    for step in range(4):
        stream.emit(Admitted(step=step, counter=step, state_seconds=0.25))
    for event in (
        waited(0.5), Waited(step=1, counter=1, seconds=2.0, where="optimizer"), durable(0), superseded(1),
        Abandoned(step=2, counter=2, seconds=1.0), Failed(step=2, counter=2, error=ValueError("x")),
        Skipped(step=4, counter=3, in_flight=1),
    ):  # fmt: skip
        stream.emit(event)
    found = stream.totals.statistics()
    counts = {name: found[name] for name in ("admitted", "durable", "superseded", "failed", "skipped", "abandoned")}
    assert counts == {"admitted": 4, "durable": 1, "superseded": 1, "failed": 1, "skipped": 1, "abandoned": 1}
    assert (found["stall_seconds"], found["guard_seconds"], found["last_stall_seconds"]) == (2.5, 2.0, 0.5)
    assert (found["state_seconds"], found["durable_bytes"]) == (1.0, 100)
    assert {where: (each.count, each.seconds) for where, each in found["stalls"].items()} == {
        "checkpoint": (1, 0.5),
        "optimizer": (1, 2.0),
    }
    assert (found["save_seconds"].seconds, found["capture_seconds"].seconds) == (0.5, 0.1)


def test_a_recorder_gets_the_stalls_that_are_waited() -> None:
    stream, spans = Stream("store"), list[Span]()
    stream.emit(waited(0.5))
    stream.trace = spans.append
    stream.emit(waited(0.25))
    stream.emit(durable(3))
    (span,) = spans
    assert (span.name, span.step, span.counter) == ("stall", 3, 2)
    assert span.end - span.start == pytest.approx(0.25)


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
        with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=MuteWriter(CrashWriter(CrashDisk())))) as engine:
            engine.on_event(heard.append)
            pending = engine.checkpoint({"x": torch.ones(3)}, step=1)
            with pytest.raises(MuteError):
                pending.result(30)
    finally:
        log.removeHandler(handler)
    assert [type(event) for event in heard if isinstance(event, (Durable, Failed))] == [Failed]
