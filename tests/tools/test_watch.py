"""``pccheck watch``."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from pccheck_async import SyncCheckpointEngine, stores
from pccheck_async.cli import app
from pccheck_async.cli.watch import Watch, WatchView, panel
from pccheck_async.medium.status_file import Published, encode_status
from tests.store.test_status_file import EXAMPLE, published
from tests.support.warm import start_warm

runner = CliRunner()


def look(path: Path, *options: str) -> Any:
    return runner.invoke(app, ["watch", str(path), "--once", *options])


def save(engine: SyncCheckpointEngine, step: int) -> None:
    engine.checkpoint({"weights": torch.full((1000,), float(step))}, step=step).result()


@pytest.mark.slow
def test_once_of_a_running_engine(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        save(engine, 1)
        save(engine, 2)
        published(tmp_path, lambda each: each.status.counts["durable"] == 2)
        shown, said = look(tmp_path), look(tmp_path, "--json")
    assert (shown.exit_code, said.exit_code) == (0, 0), shown.output
    assert f"process {os.getpid()}" in shown.stdout
    assert "2 admitted, 2 durable" in shown.stdout
    assert re.findall(r"step (\d+) +4\.1 kB", shown.stdout) == ["2", "1"]
    document = json.loads(said.stdout)
    assert document["state"] == "running"
    assert [each["step"] for each in document["committed"]] == [2, 1]
    assert document["status"]["counts"]["durable"] == 2


@pytest.mark.slow
def test_the_time_of_a_step_is_that_of_the_loop(tmp_path: Path) -> None:
    state = {"weights": torch.zeros(1000)}
    with SyncCheckpointEngine(tmp_path, interval=1) as engine:
        for step in range(3):
            time.sleep(0.2)  # loads the next batch
            with engine.step(state, step):
                pass
        seen = published(tmp_path, lambda each: each.status.step == 2)
    assert seen.status.step_seconds is not None
    assert seen.status.step_seconds >= 0.2


def test_beside_an_engine_no_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from pccheck_async.cli.watch import Watch; from pathlib import Path; "
        f"assert Watch(Path({str(tmp_path)!r})).look().state == 'running'; assert 'torch' not in sys.modules"
    )
    with SyncCheckpointEngine(tmp_path) as engine:
        save(engine, 1)
        published(tmp_path)
        subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_once_without_an_engine(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert look(path).exit_code == 3
    assert os.listdir(tmp_path) == []
    store = tmp_path / "store"
    with SyncCheckpointEngine(store) as engine:
        save(engine, 7)
    closed = look(store)
    assert closed.exit_code == 4
    assert "no engine runs here" in closed.stdout
    assert "step 7" in closed.stdout
    (store / "status").write_bytes(encode_status(EXAMPLE))
    died = look(store)
    assert died.exit_code == 4
    assert "process 123 on node died" in died.stdout
    assert re.search(r"step 9 +writing +500 ms", died.stdout)
    assert "step 7" in died.stdout  # what is durable is read from the store, not from what a dead process said
    assert "step 8" not in died.stdout
    assert json.loads(look(store, "--json").stdout)["state"] == "died"
    slot = store / stores.describe(store).slot
    slot.rename(tmp_path / "slot")
    lost = look(store)
    assert (lost.exit_code, f"LOST: {slot.name} is gone" in lost.stdout) == (4, True)
    assert json.loads(look(store, "--json").stdout)["committed"][0]["lost"] == f"{slot.name} is gone"
    assert f"nothing durable; LOST: step 7: {slot.name} is gone" in runner.invoke(app, ["watch", str(store)]).stdout
    (tmp_path / "slot").rename(slot)
    (store / "commit").write_bytes(os.urandom((store / "commit").stat().st_size))
    unreadable = look(store)
    assert unreadable.exit_code == 4
    assert unreadable.stderr.startswith("pccheck: CorruptStoreError: ")


def test_a_lost_record_is_noted_as_by_ls(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        save(engine, 1)
        save(engine, 2)
    data = bytearray((tmp_path / "commit").read_bytes())
    for offset in (70, 70 + (1 << 16)):
        data[offset] ^= 1
    (tmp_path / "commit").write_bytes(data)
    lost, newer = re.findall(r"^(?:LOST\?|NEWER): .*$", runner.invoke(app, ["ls", str(tmp_path)]).stdout, re.MULTILINE)
    assert json.loads(look(tmp_path, "--json").stdout)["problems"] == [lost, newer]
    for note in (lost, newer):
        assert "".join(note.split()) in "".join(look(tmp_path).stdout.split())
        assert note in runner.invoke(app, ["watch", str(tmp_path)]).stdout


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_narrow_terminals(tmp_path: Path, columns: int) -> None:
    """Of what is in flight, nothing is cut off; what has no room is left out."""
    screen = Console(width=columns, record=True, file=StringIO())
    screen.print(panel(WatchView(tmp_path, Published(EXAMPLE, alive=True), [], None), columns))
    shown = screen.export_text()
    assert "\u2026" not in shown
    (line,) = (line for line in shown.splitlines() if line.lstrip().startswith("step 9 "))
    assert "writing" in line
    assert ("\u2501" in line) == (columns == 120)
    assert max(map(len, shown.splitlines())) <= columns


def test_wrong_usage_is_2(tmp_path: Path) -> None:
    assert runner.invoke(app, ["watch"]).exit_code == 2
    assert runner.invoke(app, ["watch", str(tmp_path), "--interval", "0"]).exit_code == 2


def test_control_sequences_and_markup_are_shown_not_obeyed(tmp_path: Path) -> None:
    evil = "[red]\x1b[2J\n"
    status = msgspec.structs.replace(EXAMPLE, host=evil, reason=evil, io=evil, failure=evil, counts={evil: 1})
    (tmp_path / "status").write_bytes(encode_status(status))
    shown = look(tmp_path)
    assert "\x1b" not in shown.stdout
    assert shown.stdout.count(r"[red]\x1b[2J\n") == 5
    assert "\x1b" not in Watch(tmp_path).look().line()


def test_lines_say_rates_and_what_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    before = msgspec.structs.replace(EXAMPLE, time=EXAMPLE.time - 4, stall_seconds=1.8, stage_bytes={"write": 1000})
    now = EXAMPLE
    monkeypatch.setattr(time, "time", lambda: now.time)
    line = WatchView(Path("store"), Published(now, alive=True), now.committed, before).line()
    assert line[8:] == (
        " step 12; durable: step 8; in flight: 9 writing 40%; writes 1.0 kB/s; stall 5.0%; "
        "next after step 19, in about 1.8 s"
    )
    stopped = msgspec.structs.replace(now, time=now.time - 60, failure="WriteError: gone")
    line = WatchView(Path("store"), Published(stopped, alive=True), now.committed, None).line()
    assert "takes no more commits (WriteError: gone); silent for 60 s; step 12;" in line
    line = WatchView(Path("store"), Published(now, alive=False), now.committed, None).line()
    assert line[8:] == " the engine of process 123 died; in flight was step 9 writing 40%; durable: step 8"


def test_rates_are_those_of_the_last_seconds_of_one_engine(tmp_path: Path) -> None:
    watch = Watch(tmp_path)

    def at(seconds: float, **changes: Any) -> WatchView:
        status = msgspec.structs.replace(EXAMPLE, time=EXAMPLE.time + seconds, **changes)
        (tmp_path / "status").write_bytes(encode_status(status))
        view = watch.look()
        assert isinstance(view, WatchView)
        return view

    assert at(0).rate("write") is None
    assert at(0).rate("write") is None  # nothing new was published
    assert at(1, stage_bytes={"write": 7000}).rate("write") == 2000
    for seconds in range(2, 30):
        at(seconds, stage_bytes={"write": 7000})
    assert at(30, stage_bytes={"write": 7000}).rate("write") == 0
    assert at(31, pid=124, stage_bytes={"write": 0}).rate("write") is None


TRAINER = """
import sys, torch
from pccheck_async import SyncCheckpointEngine
with SyncCheckpointEngine(sys.argv[1]) as engine:
    for step in (41, 42):
        engine.checkpoint({"weights": torch.zeros(1000)}, step=step).result()
        print("saved", flush=True)
        sys.stdin.readline()
"""


@contextmanager
def watched(path: Path, *options: str, kind: str = "") -> Iterator[tuple[Any, Any, int]]:
    """A trainer that saved step 41, and waits; the command that watches it, and what that writes to."""
    trainer = start_warm("-c", TRAINER, path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    master, slave = pty.openpty() if kind else os.pipe()
    watcher = None
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "saved\n"
        published(path, lambda each: each.status.counts["durable"] == 1)
        command = ["-m", "pccheck_async", "watch", path, "--interval", "0.1", *options]
        environment = os.environ | {"TERM": kind or "xterm", "COLUMNS": "120", "LINES": "40"}
        watcher = start_warm(*command, stdout=slave, stderr=slave, env=environment)
        os.close(slave)  # then there is an end to what can be read
        yield trainer, watcher, master
    finally:
        for process in (trainer, watcher):
            if process is not None:
                process.kill()
                process.communicate()
        os.close(master)


def read_until(master: int, wanted: bytes, count: int = 1) -> bytes:
    shown = b""
    while shown.count(wanted) < count:
        shown += os.read(master, 1 << 16)
    return shown


def read_rest(master: int) -> bytes:
    shown = b""
    with suppress(OSError):  # which is the end of a terminal
        while data := os.read(master, 1 << 16):
            shown += data
    return shown


@pytest.mark.slow
def test_a_terminal_shows_it_until_interrupted(tmp_path: Path) -> None:
    with watched(tmp_path, kind="xterm") as (trainer, watcher, master):
        shown = read_until(master, b"step 41", 3)
        trainer.communicate("\n\n")
        shown += read_until(master, b"was closed")
        watcher.send_signal(signal.SIGINT)
        shown += read_rest(master)
        assert watcher.wait() == 0
        assert b"Traceback" not in shown
        assert f"process {trainer.pid}".encode() in shown


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "dumb"])
def test_elsewhere_a_line_for_each_change_until_the_engine_ends(tmp_path: Path, kind: str) -> None:
    with watched(tmp_path, kind=kind) as (trainer, watcher, master):
        shown = read_until(master, b"durable: step 41; in flight: nothing")
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        shown += read_until(master, b"durable: step 42; in flight: nothing")
        trainer.communicate("\n")
        shown += read_rest(master)
        assert watcher.wait() == 0
    lines = shown.decode().splitlines()
    assert lines[-1].endswith(f" the engine of process {trainer.pid} was closed; durable: step 42")
    assert len(lines) <= 5, lines  # 41; 42 in flight, in two phases at most; 42; the end


@pytest.mark.slow
def test_elsewhere_objects_until_the_engine_dies(tmp_path: Path) -> None:
    with watched(tmp_path, "--json") as (trainer, watcher, master):
        shown = read_until(master, b"\n")
        trainer.kill()
        shown += read_rest(master)
        assert watcher.wait() == 4
    assert [json.loads(line)["state"] for line in shown.splitlines()] == ["running", "died"]


def test_elsewhere_it_ends_where_no_engine_runs(tmp_path: Path) -> None:
    for path, status in ((tmp_path / "missing", 3), (tmp_path / "store", 4)):
        if status == 4:
            with SyncCheckpointEngine(path) as engine:
                save(engine, 1)
        result = runner.invoke(app, ["watch", str(path)])
        assert result.exit_code == status
        assert len(result.stdout.splitlines()) == 1
        assert ("missing does not exist" in result.stderr) == (status == 3)
