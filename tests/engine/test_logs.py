from __future__ import annotations

import ast
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import pccheck_async
from pccheck_async import Keep, StorageOptions, SyncCheckpointEngine, load_sync
from pccheck_async.errors import StoreFailedError, WriteError
from pccheck_async.telemetry import Work, events, logs, work
from pccheck_async.testing import CrashDisk, CrashWriter, FailingWriter
from tests.engine.test_failures import flip, slot_of, state_of

ROOT = Path(pccheck_async.__file__).parent


class JSONLines(logging.Handler):
    """What a user's formatter makes of the records: every attribute that is not logging's own."""

    STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        extra = {key: value for key, value in vars(record).items() if key not in self.STANDARD}
        line = {"level": record.levelname, "message": record.getMessage(), **extra}
        self.lines.append(json.loads(json.dumps(line)))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]


@pytest.fixture
def lines() -> Any:
    handler = JSONLines()
    logger = logging.getLogger("pccheck_async")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    yield handler
    logger.setLevel(before)
    logger.removeHandler(handler)


def test_the_library_installs_no_handler() -> None:
    assert logging.getLogger("pccheck_async").handlers == []


def test_a_line_says_whose_it_is_where_python_prints_the_message_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logs.log, "handle", lambda record: said.append(record.getMessage()))
    for has_handlers in (False, True):
        monkeypatch.setattr(logs.log, "hasHandlers", lambda has=has_handlers: has)
        logs.write("status", "%s cannot be written", "status")
    assert said == ["pccheck_async: status cannot be written", "status cannot be written"]


def test_a_run_as_json(tmp_path: Path, lines: JSONLines) -> None:
    state = {"weights": torch.arange(10_000.0)}
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(3):
            info = engine.checkpoint(state, step=step).result()
        engine.restore(state)
    store = str(tmp_path)
    (opened,) = lines.of("opened")
    assert (opened["level"], opened["store"], opened["step"], opened["checkpoints"]) == ("INFO", store, None, 0)
    durable = lines.of("durable")
    assert [(line["level"], line["step"], line["counter"]) for line in durable] == [
        ("DEBUG", step, step) for step in range(3)
    ]
    assert all(line["nbytes"] == info.nbytes and line["seconds"] >= line["capture_seconds"] >= 0 for line in durable)
    (restored,) = lines.of("restored")
    assert (restored["level"], restored["step"], restored["counter"]) == ("INFO", 2, 2)
    (closed,) = lines.of("closed")
    assert (closed["level"], closed["durable"], closed["nbytes"]) == ("INFO", 3, 3 * info.nbytes)
    assert all(set(logs.FIELDS) <= set(line) for line in lines.lines)
    assert {line["store"] for line in lines.lines} == {store}
    # At INFO a run says nothing about each checkpoint; the others tell of a slow machine, or one without direct I/O.
    told = {line["event"] for line in lines.lines if line["level"] != "DEBUG"}
    assert told - {"held_up", "buffered"} == {"opened", "restored", "closed"}


def test_nothing_is_formatted_that_nobody_wants(tmp_path: Path, lines: JSONLines) -> None:
    logging.getLogger("pccheck_async").setLevel("ERROR")
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"weights": torch.zeros(10)}, step=1).result()
    assert lines.lines == []


def test_failures_are_warnings_and_say_why(lines: JSONLines) -> None:
    disk = CrashDisk()
    with SyncCheckpointEngine("store", storage=StorageOptions(io=CrashWriter(disk))) as engine:
        engine.checkpoint({"weights": torch.zeros(10)}, step=1).result()
    failing = FailingWriter(CrashWriter(disk), fail_at=2, kinds=("write",))  # the first is the record's, again
    with SyncCheckpointEngine("store", storage=StorageOptions(io=failing)) as engine, pytest.raises(WriteError):
        engine.checkpoint({"weights": torch.zeros(10)}, step=7).result()
    (failed,) = lines.of("failed")
    assert (failed["level"], failed["step"], failed["counter"], failed["store"]) == ("WARNING", 7, 1, "store")
    assert failed["error"].startswith("WriteError: ")


def test_a_metric_that_some_checkpoints_have_is_not_told_of(tmp_path: Path, lines: JSONLines) -> None:
    keep = Keep(best=("loss", 2, "min"))
    for first in (0, 40):  # the other run began after a checkpoint that has it
        with SyncCheckpointEngine(tmp_path, keep=keep) as engine:
            engine.restore({"x": 0})
            for step in range(first, first + 40):
                metadata = {"loss": 0.5} if step == 3 else {"epoch": 1}
                engine.checkpoint({"x": 1}, step=step, metadata=metadata).result()
    assert lines.of("no_metric") == []


def test_a_metric_that_no_checkpoint_has_is_told_of_after_a_while(tmp_path: Path, lines: JSONLines) -> None:
    with SyncCheckpointEngine(tmp_path, keep=Keep(best=("loss", 2, "min"))) as engine:
        for step in range(20):
            engine.checkpoint({"x": 1}, step=step, name=f"step {step}").result()
            assert len(lines.of("no_metric")) == (step >= 15)
    (line,) = lines.of("no_metric")
    assert line["store"] == str(tmp_path)
    assert line["message"].endswith(
        "which none of the 16 checkpoints so far has in its metadata; no metadata was given"
    )


def test_a_metric_of_another_name_is_told_of_at_the_end(tmp_path: Path, lines: JSONLines) -> None:
    with SyncCheckpointEngine(tmp_path, interval=2, keep=Keep(best=("val_loss", 2, "min"))) as engine:
        for step in range(8):
            with engine.step({"x": 1}, step) as this:
                if step == 2:  # which is not saved
                    this.metadata |= {"eval_loss": 0.5, "epoch": 1.0}
        assert lines.of("no_metric") == []
    (line,) = lines.of("no_metric")
    assert line["message"].endswith("has in its metadata; metadata has had 'eval_loss'")
    with SyncCheckpointEngine(tmp_path / "too early", keep=Keep(best=("val_loss", 2, "min"))) as engine:
        engine.checkpoint({"x": 1}, step=0).result()
    assert len(lines.of("no_metric")) == 1


@pytest.mark.parametrize("by", ["step", "checkpoint"])
def test_a_loop_that_begins_anew_after_a_restore_is_warned_of_once(tmp_path: Path, lines: JSONLines, by: str) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"x": 1}, step=9).result()
    back = "step 1 comes after step"
    again = [(9, "step 9 was restored")] if by == "step" else []  # a checkpoint may get a name
    for first, told in (
        (9, [*again, (1, f"{back} 10")]),
        (10, [(1, f"{back} 11")]),
        (3, [(3, "step 9 was restored"), (1, f"{back} 4")]),
    ):
        before = len(lines.of("step_went_back"))
        state = {"x": 1}
        with SyncCheckpointEngine(tmp_path, keep_last=9, interval=100, save_last=False) as engine:
            engine.restore(state, step=9)
            for step in (first, first + 1, 1):
                if by == "step":
                    with engine.step(state, step):
                        pass
                else:
                    engine.checkpoint(state, step=step).result()
        said = lines.of("step_went_back")[before:]
        assert [(one["step"], one["message"].partition(",")[0]) for one in said] == told
        if first == 9 and by == "step":
            assert said[0]["message"].endswith("range(restored.step + 1, ...), unless it is to train that step twice")


def test_a_fall_back_is_shown_once(tmp_path: Path, lines: JSONLines) -> None:
    """A log that nobody has set up shows records from WARNING on; Python shows its warning, in any case."""
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for step in (1, 2):
            engine.checkpoint(state_of(step), step=step).result()
    flip(slot_of(tmp_path, 2), 100)
    with pytest.warns(RuntimeWarning, match="falling back to step 1") as warned:
        load_sync(tmp_path)
    assert len(warned) == 1
    (line,) = lines.of("fell_back")
    assert (line["level"], line["step"]) == ("WARNING", 2)
    text = f"from pccheck_async import load_sync; load_sync({str(tmp_path)!r})"
    said = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stderr
    assert said.count("falling back to step 1") == 1
    with SyncCheckpointEngine(tmp_path, keep_last=2, save_last=False) as engine:
        for _ in range(2):  # the second one begins with the older one
            with warnings.catch_warnings(action="ignore"):
                engine.restore(state_of(0))
        assert engine.statistics().fell_back == 1
        assert "pccheck_restores_fell_back_total{" in engine.metrics()


def test_records_of_modules_below_know_what_they_are_about(tmp_path: Path, lines: JSONLines) -> None:
    token = work.set(Work(str(tmp_path), 3, 4))
    try:
        logs.write("readers", "a checkpoint waits for %d reader(s)", 1)
    finally:
        work.reset(token)
    (line,) = lines.lines
    assert (line["event"], line["store"], line["step"], line["counter"]) == ("readers", str(tmp_path), 3, 4)


@pytest.mark.slow
def test_the_table_holds_every_event_that_is_written_and_no_other() -> None:
    written = {kind.name for name in events.__all__ if (kind := getattr(events, name)).text}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:  # the name in a call of write(), and in lines that a stream gives it
                case ast.Call(
                    func=ast.Name(id="write" | "write_and_warn"), args=[ast.Constant(value=str(name)), _, *_]
                ):
                    written.add(name)
                case ast.Tuple(elts=[ast.Constant(value=str(name)), ast.Name(id=text), _]) if path.name == "stream.py":
                    assert text.isupper()
                    written.add(name)
    assert written >= {"preemption", "fell_back", "summary", "superseded_burst", "held_up"}
    assert written == set(logs.LEVELS)


@pytest.mark.slow
def test_no_line_goes_past_the_table() -> None:
    """Only ``logs`` has the logger, and only with the name of an event does anything get to it."""
    past = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logging" | "_log"), attr=name)) if name in (
                    *("debug", "info", "warning", "error", "exception", "critical", "log", "getLogger"),
                ):
                    past.append((path.name, ast.unparse(node)))
    assert [name for name, _ in past] == ["logs.py"] * 2, past
    assert all("getLogger" in call or "extra={'event': " in call for _, call in past)


def test_a_line_of_every_module_has_a_name(tmp_path: Path, lines: JSONLines) -> None:
    """Buffered I/O, a store that fails, rules that drop checkpoints, a reader that is waited for."""
    disk = CrashDisk()
    with SyncCheckpointEngine("store", storage=StorageOptions(io=CrashWriter(disk)), keep_last=3) as engine:
        for step in range(3):
            engine.checkpoint({"weights": torch.zeros(10)}, step=step).result()
    failing = FailingWriter(CrashWriter(disk), fail_at=2, kinds=("flush",))
    with SyncCheckpointEngine("store", storage=StorageOptions(io=failing)) as engine, pytest.raises(StoreFailedError):
        engine.checkpoint({"weights": torch.zeros(10)}, step=7).result()
    (failed,) = lines.of("store_failed")
    assert (failed["level"], failed["store"], failed["step"]) == ("ERROR", "store", 7)
    assert [line["level"] for line in lines.of("dropping")] == ["WARNING"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, SyncCheckpointEngine(memory):
        pass
    assert [line["level"] for line in lines.of("buffered")] == ["INFO"]
    assert all(line["event"] in logs.LEVELS for line in lines.lines)
