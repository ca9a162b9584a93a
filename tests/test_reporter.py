"""What the log says now and then, and not at every checkpoint."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pccheck_async.events import Durable, Failed, Superseded, Waited
from pccheck_async.reporter import Reporter


def durable(step: int, nbytes: int = 100) -> Durable:
    return Durable(step=step, counter=step, nbytes=nbytes, seconds=0.5, capture_seconds=0.1, stall=0.1)


def superseded(step: int) -> Superseded:
    return Superseded(step=step, counter=step, seconds=0.5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("pccheck_async.reporter.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level("INFO", "pccheck_async")
    return lambda: [record.__dict__ for record in caplog.records]


def test_a_summary_every_ten_minutes_in_which_something_ended(clock: list[float], said: Any) -> None:
    reporter = Reporter("store")
    for step in range(10):
        reporter.tell(Waited(step=step, counter=step, seconds=0.25, where="optimizer"))
        reporter.tell(durable(step))
    assert said() == []
    clock[0] += 601
    reporter.tell(superseded(10))
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
    reporter.tell(durable(11))
    assert len(said()) == 1
    clock[0] += 2
    reporter.tell(Failed(step=12, counter=12, error=ValueError("x")))
    summary = said()[-1]
    assert (summary["event"], summary["durable"], summary["failed"], summary["nbytes"]) == ("summary", 1, 1, 100)
    assert reporter.nbytes == 1100


def test_a_burst_of_superseded_ones_is_said_once(said: Any) -> None:
    reporter = Reporter("store")
    for step in range(16):
        reporter.tell(durable(step) if step % 3 else superseded(step))
    assert said() == []  # one in three
    for step in range(40):
        reporter.tell(superseded(step))
    (burst,) = said()
    assert (burst["event"], burst["levelname"], burst["count"], burst["last"]) == ("superseded_burst", "WARNING", 9, 16)
    for step in range(40):
        reporter.tell(durable(step))
    for step in range(8):
        reporter.tell(superseded(step))
    assert len(said()) == 1
    reporter.tell(superseded(9))
    assert len(said()) == 2  # that one was over: another


def test_long_waits_are_said_and_not_each_of_them(clock: list[float], said: Any) -> None:
    reporter = Reporter("store")

    def wait(seconds: float) -> None:
        reporter.tell(Waited(step=3, counter=2, seconds=seconds, where="checkpoint"))

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
