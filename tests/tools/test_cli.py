from __future__ import annotations

import fcntl
import io
import json
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

import pccheck_async
from pccheck_async import StorageOptions, SyncCheckpointEngine, stores
from pccheck_async.cli import app, main
from pccheck_async.cli.demo_losses import Loss, compare_losses, draw, read_losses
from pccheck_async.cli.output import dump, parse_size, progress_bar, size
from pccheck_async.telemetry import fill_standard_files
from tests.support.processes import passes_in_a_forked_child
from tests.support.warm import run_warm, start_warm

runner = CliRunner()


def save(path: Path, steps: range, **metadata: Any) -> None:
    with SyncCheckpointEngine(path, keep_last=3) as engine:
        for step in steps:
            engine.checkpoint({"weights": torch.full((1000,), float(step))}, step=step, metadata=metadata).result(60)


def test_ls_lists_newest_first(tmp_path: Path) -> None:
    save(tmp_path / "store", range(10, 60, 10), loss=0.123456789, note="[red]markup[/] \x1b[31m")
    result = runner.invoke(app, ["ls", str(tmp_path / "store")])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.strip() and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == ["50", "40", "30"]
    assert "loss=0.123457," in result.stdout
    assert "[red]markup[/]" in result.stdout
    assert "\x1b" not in result.stdout


def test_ls_json(tmp_path: Path) -> None:
    save(tmp_path / "store", range(1, 3), loss=math.nan, best=True, tag=None)
    result = runner.invoke(app, ["ls", str(tmp_path / "store"), "--json"])
    assert result.exit_code == 0, result.output
    newest, older = json.loads(result.stdout)
    assert (newest["step"], older["step"]) == (2, 1)
    assert newest["counter"] > older["counter"]
    assert newest["nbytes"] >= 4000
    assert newest["time"] >= older["time"]
    assert newest["created"].endswith("+00:00")
    assert newest["pinned"] is False
    assert newest["metadata"] == {"loss": "nan", "best": True, "tag": None}


@pytest.mark.slow
def test_json_has_no_constants_of_its_own(tmp_path: Path) -> None:
    def strictly(text: str) -> Any:
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    for name, value in (("one", math.inf), ("other", math.nan)):
        with SyncCheckpointEngine(tmp_path / name) as engine:
            state = {"x": torch.tensor([value]), "plain": [value, {math.inf: -math.inf}]}
            engine.checkpoint(state, step=1, metadata={"loss": value}).result(60)
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    for command in (
        *(["ls", one], ["show", one], ["verify", one], ["compare", one, other], ["watch", one, "--once"]),
        *(
            ["copy", one, other],
            ["pin", one, "--step=1"],
            ["remove", other, "--step=1", "-y", "--force"],
            ["recover", one],
        ),
        *(["export", one, f"{one}.pt", "--to=torch"], ["import", f"{one}.pt", other, "--from=torch"]),
    ):
        result = runner.invoke(app, [*command, "--json"])
        assert result.exit_code in (0, 4), result.output
        strictly(result.stdout)


def test_whatever_is_dumped_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A tuning that measured one point only knows no limit of its noise."""
    dump({"noise": math.inf, "more": [math.nan, {"deep": (-math.inf, 1.5)}], "big": 10**5000})
    found = json.loads(capsys.readouterr().out, parse_constant=lambda _: None)
    assert found == {"noise": "inf", "more": ["nan", {"deep": ["-inf", 1.5]}], "big": hex(10**5000)}


def test_ls_beside_a_writer(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "store") as engine:
        engine.checkpoint({"x": torch.zeros(10)}, step=1).result(60)
        result = runner.invoke(app, ["ls", str(tmp_path / "store"), "--json"])
        assert [info["step"] for info in json.loads(result.stdout)] == [1]
        engine.checkpoint({"x": torch.ones(10)}, step=2).result(60)
        result = runner.invoke(app, ["ls", str(tmp_path / "store"), "--json"])
        assert [info["step"] for info in json.loads(result.stdout)] == [2]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ls_of_nothing(tmp_path: Path, options: list[str]) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        result = runner.invoke(app, ["ls", str(path), *options])
        assert result.exit_code == 3
        assert "holds no store" in result.stderr
        assert (json.loads(result.stdout)["error"]["type"] == "NoCheckpointError") if options else not result.stdout
    assert os.listdir(tmp_path) == []


ON_A_STORE = {
    "ls": [], "show": [], "verify": [], "watch": ["--once"], "tune": [], "recover": [], "remove": ["--step=1", "--yes"],
    "pin": ["--step=1"], "unpin": ["--step=1"], "copy": ["other"], "compare": ["--other-step=1"],
    "export": ["other", "--to=torch"],
}  # fmt: skip
"""What takes a store, and what else it takes."""


@pytest.mark.slow
def test_what_else_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command says once what is there in place of a store, and makes nothing; status 4: a damaged store."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "[two]"):
        save(tmp_path / name, range(1, 2))
    (tmp_path / "one" / "store.json").unlink()
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "inside").symlink_to(tmp_path / "[two]")
    (tmp_path / "file").touch()
    for command, more in ON_A_STORE.items():
        for place, says in (
            ("missing", "missing does not exist, so it holds no store"),
            ("file", "file is no folder, so it holds no store"),
            ("three", "three holds no store"),
            ("three", "there are stores in it: inside"),
            ("one", "`pccheck recover one`"),
        ):
            result = runner.invoke(app, [command, place, *more])
            assert result.exit_code == (4 if place == "one" else 3), (command, place, result.output)
            if (command, place) == ("recover", "one"):
                continue
            assert result.stderr.count(says) == 1, (command, place, result.stderr)
    assert sorted(os.listdir(tmp_path)) == ["[two]", "file", "one", "three"]


def test_ls_of_a_damaged_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    save(store, range(1, 2))
    (store / "commit").write_bytes(os.urandom((store / "commit").stat().st_size))
    result = runner.invoke(app, ["ls", str(store)])
    assert result.exit_code == 4
    assert result.stderr.startswith("pccheck: CorruptStoreError: ")
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["ls", "--yaml", "x"],
        ["demo", "--crash-at=10", "--interval=10"],
        ["demo", "--crash-at=90", "--steps=80"],
        ["demo", "--interval=0"],
        ["demo", "--ranks=0"],
        ["demo", "--ranks=2", "--device=cuda"],
        ["tune"],
        ["tune", "x", "--size=big"],
        ["tune", "x", "--size=0"],
        ["tune", "x", "--size=" + "9" * 400],
        ["tune", "x", "--size=8388608TiB"],
        ["watch", "x", "--interval=inf"],
        ["ls", ""],
        ["copy", "x", ""],
        ["reject", "s3://bucket/x", "--step=1"],
        ["watch", "s3://bucket/x"],
        ["import", "x.pt", "", "--from=torch"],
        ["export", "x", "", "--to=torch"],
        ["compare", "x", ""],
        ["tune", "x", "--seconds=0"],
        ["bench"],
        ["bench", "x", "--rounds=0"],
        ["bench", "missing"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0, result.output
    assert result.stdout.split()[-1] == pccheck_async.__version__


@pytest.mark.parametrize("name", ["missing/a.svg", "a.png"])
def test_demo_says_at_once_that_it_cannot_draw(tmp_path: Path, name: str) -> None:
    result = runner.invoke(app, ["demo", f"--plot={tmp_path / name}"])
    assert result.exit_code == 2
    assert "--plot" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("--layers=2", "--width=128", "--threads=1")  # as beside other ranks
    monkeypatch.setattr("subprocess.Popen", lambda command, **popen: start_warm(*command[1:], *small, **popen))
    # At most two saves are in flight: that of step 1 is durable when step 3 is being saved.
    arguments = ["demo", "--steps=3", "--interval=1", "--crash-at=3", f"--store={tmp_path / 'runs'}", "--keep"]
    arguments.append(f"--plot={tmp_path / 'losses.svg'}")
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "died by SIGKILL in the middle of the save of step 3" in result.stdout
    assert re.search(r"newest\s+durable\s+checkpoint was\s+that of step [12] ", result.stdout)
    assert "Losses: 3 of 3 equal in every bit." in result.stdout
    assert "Every bit is equal." in result.stdout
    assert "with engine.step(state, step)" in result.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert result.stdout.splitlines()[-2:] == [f"Kept: {folder}", f"Picture: {tmp_path / 'losses.svg'}"]
    assert sorted(read_losses(folder / "resumed.csv")) == [1, 2, 3]
    assert ElementTree.parse(tmp_path / "losses.svg").getroot().tag.endswith("svg")


@pytest.mark.campaign
def test_demo_of_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1")  # torch looks up the name of every address that it connects to
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # At most two saves are in flight: that of step 1 is durable when step 3 is being saved.
    arguments = ["demo", "--ranks=2", "--steps=4", "--interval=1", "--crash-at=3", f"--store={tmp_path}", "--keep"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "The killed run's rank 1 died by SIGKILL in the middle of the save of step 3, and" in result.stdout
    assert "Losses: 8 of 8 equal in every bit." in result.stdout
    assert "Every bit is equal." in result.stdout
    (folder,) = tmp_path.iterdir()
    (first, second), killed = (
        [read_losses(folder / f"{run}-rank{rank}.csv") for rank in (0, 1)] for run in ("uninterrupted", "killed")
    )
    assert sorted(first) == sorted(second) == [1, 2, 3, 4]
    assert all(first[step].bits != second[step].bits for step in first)  # every rank has its own data
    assert killed == [{step: rows[step] for step in (1, 2, 3)} for rows in (first, second)]


@pytest.mark.parametrize("lacking", ["gloo", "torchrun"])
def test_demo_says_at_once_that_it_cannot_start_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    if lacking == "gloo":
        monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = runner.invoke(app, ["demo", "--ranks=2", f"--store={tmp_path}"])
    assert result.exit_code == 2
    assert lacking in result.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.campaign
def test_demo_reports_a_run_that_fails(tmp_path: Path) -> None:
    result = runner.invoke(app, ["demo", f"--store={tmp_path}", "--device=nonsense"])
    assert result.exit_code == 1
    assert "the uninterrupted run ended with status 1" in result.stderr
    assert "nonsense" in result.stderr
    assert "\\n" not in result.stderr  # its last words are lines
    assert os.listdir(tmp_path) == []  # nothing is left behind


def test_demo_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = runner.invoke(app, ["demo", f"--store={tmp_path / 'file'}"])
    assert result.exit_code == 1
    assert result.stderr.startswith("pccheck: FileExistsError: ")


@pytest.mark.parametrize("mine", ["[]", '{"batch_size": 32}', "notes"])
def test_tune_replaces_no_file_of_another_kind(tmp_path: Path, mine: str) -> None:
    (tmp_path / "tuning.json").write_text(mine)
    result = runner.invoke(app, ["tune", str(tmp_path), "--size=4kB", "--seconds=0.1"])
    assert result.exit_code == 1
    assert "tuning.json is a file that no tuning wrote" in result.stderr
    assert [file.read_text() for file in tmp_path.iterdir()] == [mine]


@pytest.mark.slow
def test_tune_writes_what_the_engine_takes(tmp_path: Path) -> None:
    store = tmp_path / "store"
    result = runner.invoke(app, ["tune", str(store), "--size=1.5MB", "--seconds=0.1", "--step-seconds=0.001"])
    assert result.exit_code == 0, result.output
    assert os.listdir(store) == ["tuning.json"]
    settings = stores.read_tuning(store)
    rows = [line.split() for line in result.stdout.splitlines()]
    chosen = [row for row in rows if row[-1:] == ["chosen"]]
    assert [row[:2] for row in chosen] == [[str(settings["max_in_flight"]), str(settings["storage"].writers)]]
    assert {"max_in_flight", "writers", "chunk_bytes", "host_memory"} <= {row[0] for row in rows if row}
    assert "Checkpoints of 1.5 MB, one durable every" in result.stdout
    assert "(f*)" in result.stdout
    assert f"CheckpointEngine({str(store)!r}, **stores.read_tuning({str(store)!r}))" in result.stdout
    copied = next(line for line in result.stdout.splitlines() if "StorageOptions(" in line)
    assert eval(f"dict({copied})", {"StorageOptions": StorageOptions}) == settings
    with SyncCheckpointEngine(store, **settings) as engine:
        engine.checkpoint({"x": torch.zeros(300_000)}, step=1).result(60)

    before = (store / "commit").read_bytes()
    out = tmp_path / "other.json"
    result = runner.invoke(app, ["tune", str(store), "--seconds=0.1", f"--out={out}", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    tuned = stores.read_tuning(out)
    storage = {name: getattr(tuned["storage"], name) for name in ("writers", "chunk_bytes", "host_memory")}
    assert found["settings"] == {"max_in_flight": tuned["max_in_flight"], **storage}
    assert found["path"] == str(out)
    assert stores.read_tuning(store) == settings
    assert (store / "commit").read_bytes() == before


@pytest.mark.campaign
def test_tune_takes_the_size_of_the_checkpoint_that_is_there(tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "other.json"
    with SyncCheckpointEngine(store) as engine:
        engine.checkpoint({"x": torch.zeros(300_000)}, step=1).result(60)
    result = runner.invoke(app, ["tune", str(store), "--seconds=0.1", f"--out={out}"])
    assert result.exit_code == 0, result.output
    assert "Checkpoints of 1.2 MB" in result.stdout
    assert "(f*)" not in result.stdout
    assert f"stores.read_tuning({str(out)!r})" in result.stdout
    assert stores.read_tuning(out)


def test_tune_says_what_is_missing(tmp_path: Path) -> None:
    result = runner.invoke(app, ["tune", str(tmp_path)])
    assert result.exit_code == 3
    assert "no committed checkpoint" in result.stderr
    result = runner.invoke(app, ["tune", str(tmp_path / "store"), "--size=1000000TB", "--keep-last=2"])
    assert result.exit_code == 1
    assert result.stderr.startswith("pccheck: InfeasibleError: no setting fits: storage: 3 slots")
    assert "lower keep_last" in result.stderr
    result = runner.invoke(app, ["tune", str(tmp_path / "store"), "--size=1MB", "--keep-last=65"])
    assert result.exit_code == 2
    assert "keep_last is at most 64" in result.stderr
    assert result.stdout == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("1048576", 1 << 20), ("3B", 3), ("2k", 2000), ("2KB", 2000), ("1.5 GiB", 3 << 29), ("4MiB", 4 << 20)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.slow
def test_runs_as_a_module(tmp_path: Path) -> None:
    done = run_warm("-m", "pccheck_async", "ls", tmp_path, text=True)
    assert done.returncode == 3, done.stderr


def losses(tmp_path: Path, *bits: str) -> Path:
    path = tmp_path / f"{'-'.join(bits)}.csv"
    rows = "".join(f"{step},1.0,{value}\n" for step, value in enumerate(bits, 1))
    path.write_text("step,loss,bits\n" + rows)
    return path


def test_losses_differ_in_one_bit(tmp_path: Path) -> None:
    whole = read_losses(losses(tmp_path, "3f800000", "3f800001", "3f800002"))
    other = read_losses(losses(tmp_path, "3f800000", "3f800001", "3f800003"))
    cut = {step: row for step, row in whole.items() if step <= 2}
    assert compare_losses(whole, cut, whole, steps=3, crash_at=2, restored=1).all_equal
    assert compare_losses(whole, cut, other, steps=3, crash_at=2, restored=1).equal == 2
    assert not compare_losses(whole, other, whole, steps=3, crash_at=3, restored=1).all_equal
    assert not compare_losses(whole, cut, cut, steps=3, crash_at=2, restored=1).all_equal  # the last row is missing
    assert not compare_losses({}, {}, {}, steps=3, crash_at=2, restored=1).all_equal


def test_a_row_being_written_is_not_read(tmp_path: Path) -> None:
    path = losses(tmp_path, "3f800000")
    with path.open("a") as file:
        file.write("2,1.0,3f80")
    assert list(read_losses(path)) == [1]
    assert read_losses(tmp_path / "missing.csv") == {}


def test_draw(tmp_path: Path) -> None:
    whole = read_losses(losses(tmp_path, "3f800000", "3f800001", "3f800002"))
    killed = {step: whole[step] for step in (1, 2)}
    svg = "{http://www.w3.org/2000/svg}"
    picture = ElementTree.fromstring(draw(whole, killed, whole, crash_at=2, restored=1, equal=True))
    assert [len(curve.get("points", "").split()) for curve in picture.iter(f"{svg}polyline")] == [3, 2, 2]
    said = [text.text for text in picture.iter(f"{svg}text")]
    assert "resumed from step 1" in said
    assert "SIGKILL in the save of step 2" in said
    assert "uninterrupted, killed, resumed: every bit equal" in said
    ElementTree.fromstring(draw({}, {}, {}, crash_at=2, restored=1, equal=False))


@pytest.mark.parametrize(("crash_at", "restored"), [(40, 30), (2, 1), (60, 59), (60, 1)])
def test_a_drawn_axis_has_round_numbers_and_nothing_lies_on_it_or_on_a_label(crash_at: int, restored: int) -> None:
    whole = {step: Loss(2.74 + 2.63 / step, "") for step in range(1, 61)}
    killed = {step: row for step, row in whole.items() if step <= crash_at}
    picture = ElementTree.fromstring(draw(whole, killed, whole, crash_at, restored, equal=False))
    svg = "{http://www.w3.org/2000/svg}"
    texts = {text.text or "": text for text in picture.iter(f"{svg}text")}
    assert [each for each in texts if re.fullmatch("[0-9]+", each)] == ["0", "10", "20", "30", "40", "50", "60"]
    assert [each for each in texts if "." in each] == ["2.5", "3.0", "3.5", "4.0", "4.5", "5.0", "5.5"]
    points = [point.split(",") for curve in picture.iter(f"{svg}polyline") for point in curve.get("points", "").split()]
    heights = [float(y) for _, y in points]
    bottom = float(texts["2.5"].get("y", "")) - 4
    assert max(heights) < bottom - 10
    labels = [texts[f"SIGKILL in the save of step {crash_at}"], texts[f"resumed from step {restored}"]]
    for label in labels:
        assert float(label.get("y", "")) < float(texts["5.5"].get("y", "")) - 4 < min(heights)
        room = float(label.get("x", "")) if label.get("text-anchor") == "end" else 900 - float(label.get("x", ""))
        assert room > 9 * len(label.text or "")
    assert "uninterrupted, killed, resumed: not every bit is equal" in texts


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (38_200_000, "38.2 MB"), (10**15, "1000.0 TB")]
)
def test_size(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (["show"], 0),
        (["show"], 1),
        (["show", "--json"], 1),
        (["ls"], 0),
        (["watch", "--interval=0.1"], 1),
        # The same way out once more.
        pytest.param(["show", "--json"], 0, marks=pytest.mark.campaign),
        pytest.param(["ls"], 1, marks=pytest.mark.campaign),
        pytest.param(["watch", "--interval=0.1"], 0, marks=pytest.mark.campaign),
    ],
)
def test_nobody_reads_to_the_end(tmp_path: Path, arguments: list[str], read: int) -> None:
    """As before ``| head -1``: no traceback, nothing on stderr."""
    with SyncCheckpointEngine(tmp_path / "store") as engine:
        engine.checkpoint({f"x{n}": n for n in range(10_000)}, step=1).result(60)
    command = ["-m", "pccheck_async", arguments[0], tmp_path / "store", *arguments[1:]]
    process = start_warm(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(read):
        assert process.stdout.readline()
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()
    # Little may have been written before the reader went; no engine runs any more.
    assert process.wait(60) in {0, 4 if arguments[0] == "watch" else 0}
    assert complaint == b""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--help"], 0), (["show", "--help"], 0), (["--version"], 0), (["show"], 2), (["no-such-command"], 2)],
)
def test_help_that_nobody_reads_to_the_end(arguments: list[str], status: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start_warm("-m", "pccheck_async", *arguments, stdout=writer, stderr=writer)
    os.close(writer)
    assert process.wait(60) == status


@pytest.mark.slow
def test_an_answer_that_nobody_reads_to_the_end_is_the_same(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "store") as engine:
        engine.checkpoint({f"x{n}": torch.ones(1) for n in range(3000)}, step=1).result(60)
    for slot in (tmp_path / "store").glob("slot-*"):
        with slot.open("r+b") as file:
            file.write(b"damage")
    reader, writer = os.pipe()
    os.close(reader)
    done = run_as_a_process("verify", tmp_path / "store", "--json", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (4, b"")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["typer", "rich.table", "torch", "pccheck_async.upkeep"])
def test_ctrl_c_while_importing(tmp_path: Path, module: str) -> None:
    save(tmp_path / "store", range(1, 2))
    code = """
import runpy, sys
name = sys.argv.pop()
class Interrupted:
    def find_spec(self, fullname, *_):
        if fullname == name:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
runpy.run_module("pccheck_async", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(tmp_path / "store"), module], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"")


def run_as_a_process(
    *arguments: str | Path, closed: Sequence[int] = (), environment: Mapping[str, str] | None = None, **popen: Any
) -> subprocess.CompletedProcess[bytes]:
    env = os.environ | (environment or {})
    return run_warm("-m", "pccheck_async", *arguments, env=env, closed=closed, **popen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed",
    # One of them is filled like another, and all of them together are the worst.
    [(0,), (1,), (2,), (0, 1, 2)],
)
def test_without_standard_files(tmp_path: Path, closed: Sequence[int]) -> None:
    save(tmp_path / "store", range(1, 2))
    before = {path: path.read_bytes() for path in (tmp_path / "store").iterdir()}
    assert run_as_a_process("verify", tmp_path / "store", closed=closed).returncode == 0
    assert run_as_a_process("verify", tmp_path / "none", closed=closed).returncode == 3
    assert before == {path: path.read_bytes() for path in (tmp_path / "store").iterdir()}


@pytest.mark.slow
def test_children_of_a_process_without_standard_files_have_them() -> None:
    """They would write into their own files else, as ranks of a launcher that was started so."""
    look = "import os; [os.fstat(fd) for fd in range(3)]"

    def check() -> None:
        for fd in range(3):
            os.close(fd)
        fill_standard_files()
        assert subprocess.run([sys.executable, "-S", "-c", look], check=False).returncode == 0

    assert passes_in_a_forked_child(check)


@pytest.mark.slow
def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    save(tmp_path / "store", range(1, 2))
    for arguments in (["ls"], ["verify", "--json"]):
        with open("/dev/full", "wb") as full:
            done = run_as_a_process(arguments[0], tmp_path / "store", *arguments[1:], stdout=full)
        assert done.returncode == 1
        assert done.stderr == b"pccheck: OSError: [Errno 28] No space left on device\n"


@pytest.mark.slow
def test_names_that_the_encoding_lacks(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "store") as engine:
        engine.checkpoint({"gewöhnlich": {"名": torch.ones(1)}}, step=1).result(60)
    shown = run_as_a_process("show", tmp_path / "store", environment={"PYTHONIOENCODING": "ascii"})
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"`-- gew\\xf6hnlich" in shown.stdout
    out = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.pt")  # no UTF-8
    strict = {"PYTHONIOENCODING": "utf-8:strict"}
    exported = run_as_a_process("export", tmp_path / "store", out, "--to", "torch", environment=strict)
    assert (exported.returncode, exported.stderr) == (0, b"")
    assert os.path.exists(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",  # the first two have one handler
    [pytest.param(signal.SIGHUP, marks=pytest.mark.campaign), signal.SIGTERM, signal.SIGINT],
)
def test_an_export_that_is_ended_leaves_nothing(tmp_path: Path, number: int) -> None:
    save(tmp_path / "store", range(1, 2))
    code = """
import os, signal, sys
from pccheck_async.cli import main
from pccheck_async.convert import target
number = int(sys.argv.pop())
# Whoever runs the tests may ignore it.
signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
def publish(*_):
    os.kill(os.getpid(), number)
    signal.pause()
target.publish = publish
main()
"""
    arguments = ["export", str(tmp_path / "store"), str(tmp_path / "out"), "--to", "dcp", str(int(number))]
    done = run_warm("-c", code, *arguments)
    assert done.returncode == 128 + number
    assert b"Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, *(pytest.param(n, marks=pytest.mark.campaign) for n in (60, 80))])
@pytest.mark.parametrize("command", ["ls", "show", "verify", "watch", "recover", "compare"])
def test_narrow_terminals(tmp_path: Path, command: str, columns: int) -> None:
    """Nothing that one looks for is cut off."""
    metadata: dict[str, Any] = {"loss": 0.123456789, "note": "a word or two"}
    with SyncCheckpointEngine(tmp_path / "store", keep_last=2) as engine:
        for step in (123_450, 123_460):
            state = {"model": {"weight": torch.full((10,), float(step))}}
            engine.checkpoint(state, step=step, metadata=metadata).result(60)
        engine.pin(step=123_450)
    options = {
        "watch": ["--once"],
        "verify": ["--all"],
        "recover": ["--search"],
        "compare": ["--other-step=123450"],
    }.get(command, [])
    code, shown = on_a_terminal(columns, command, str(tmp_path / "store"), *options)
    assert code == (4 if command in ("watch", "compare") else 0)
    assert "123460" in shown
    if command == "compare" and columns == 80:
        assert re.search(r"^ +10 +10 +10 +8.1e-05 +model\.weight", shown, re.MULTILINE), shown
    wanted = {"ls": ["123450", "loss=0.123457", "pinned"], "show": ["weight"], "verify": ["123450", "whole"]}
    for word in wanted.get(command, []):
        assert word in shown, shown
    assert "\u2026" not in shown


def on_a_terminal(columns: int, *arguments: str) -> tuple[int, str]:
    """Run ``pccheck`` on a terminal of so many columns; return its status and what stands there, without colours.

    It is a fork, which has imported torch already.
    """
    child, master = pty.fork()
    if child == 0:
        status = 1
        try:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
            os.environ["TERM"] = "xterm"
            os.environ.pop("COLUMNS", None)
            sys.stdout, sys.stderr = open(1, "w"), open(os.devnull, "w")  # noqa: SIM115 - os._exit closes them
            sys.argv = ["pccheck", *arguments]
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(status)
    shown = b""
    with suppress(OSError):  # what a terminal says when its last writer has gone
        while piece := os.read(master, 1 << 16):
            shown += piece
    os.close(master)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("notebook", [False, True])
def test_a_cell_of_a_notebook_shows_no_bar(notebook: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    if notebook:
        monkeypatch.setenv("JPY_PARENT_PID", "1")
    with progress_bar("verifying") as progress:
        progress(1, 2)
    assert ("verifying" in screen.getvalue()) is not notebook


COMMANDS = [
    "demo",
    "ls",
    "tune",
    "watch",
    "show",
    "verify",
    "compare",
    "copy",
    "remove",
    "pin",
    "unpin",
    "reject",
    "recover",
]
COMMANDS += ["export", "import", "bench"]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fills_the_width(command: str, width: int) -> None:
    output = runner.invoke(app, [*command.split(), "--help"], env={"COLUMNS": str(width), "TERM": "dumb"}).output
    lines = [line.strip() for line in output.partition("╭")[0].splitlines()]
    assert any(line.startswith("Exit status: 0 ") for line in lines)
    for line, following in pairwise(lines):
        if line and following:
            assert len(f" {line} {following.split()[0]}") > width - 1, f"{line!r} ends too early"


@pytest.mark.parametrize("width", [80, 120])
def test_the_commands_fit_one_screen_in_groups(width: int) -> None:
    output = runner.invoke(app, ["--help"], env={"COLUMNS": str(width), "TERM": "dumb"}).output
    assert len(output.rstrip().splitlines()) <= 36
    listed = re.findall(r"^│ ([a-z]+) ", output, re.MULTILINE)
    assert sorted(listed) == sorted([*COMMANDS, "memory", "shelf"])
    assert output.count("╭") == 5  # options, and four groups
    assert not {"rm", "diff"} & {*listed}


@pytest.mark.parametrize(
    "command", [*COMMANDS, "", "shelf", "shelf ls", "shelf show", "shelf verify", "memory ls", "memory clear"]
)
def test_help_shows_no_types_and_explains_every_option(command: str) -> None:
    """One line of help where the terminal is wide, a metavar for a value, and nothing beside a flag."""
    output = runner.invoke(app, [*command.split(), "--help"], env={"COLUMNS": "120", "TERM": "dumb"}).output
    assert not re.search(r"<\w|BOOLEAN|INTEGER|TEXT|--no-\w+ +--|x>=", output), output
    options = output.partition("─ Options ")[2].partition("╰")[0].splitlines()[1:]
    assert len(options) >= 1
    for line in options:
        assert re.match(r"│[ *]+--[a-z-]+(?: +-y)?(?: +[A-Z,.]+)? {2,}[A-Za-z].*[.] +(\[required\] +)?│$", line), line


@pytest.mark.slow
def test_the_spellings_of_before_work_once_more(tmp_path: Path) -> None:
    save(tmp_path / "run", range(1, 4))
    run = str(tmp_path / "run")
    for arguments, status, note in (
        (["pin", run, "1"], 0, "write --step 1; "),
        (["unpin", run, "1"], 0, "write --step 1; "),
        (["diff", f"{run}@1", "@2"], 4, "write --other-step 2; "),
        (["diff", run, run], 0, ""),
        (["rm", run, "1", "2", "-y"], 0, "write --step 1 --step 2; "),
        (["reject", run, "4"], 3, "write --step 4; "),
    ):
        result = runner.invoke(app, arguments)
        assert result.exit_code == status, result.output
        assert note in result.stderr
        assert bool(note) == bool(result.stderr)
    assert [info.step for info in pccheck_async.list_checkpoints(run)] == [3]


@pytest.mark.slow
def test_compare_by_name(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for step in (1, 2):
            engine.checkpoint({"w": torch.full((3,), float(step))}, step=step, name=f"epoch={step}").result(60)
    result = runner.invoke(app, ["compare", str(tmp_path), "--name=epoch=1", "--other-name=epoch=2", "--json"])
    assert result.exit_code == 4
    found = json.loads(result.stdout)
    assert (found["one"]["step"], found["other"]["step"]) == (1, 2)


@pytest.mark.parametrize("asked", [[], ["--step=3"]])
def test_a_damaged_checkpoint_that_is_to_be_copied_names_the_others(asked: list[str], tmp_path: Path) -> None:
    save(tmp_path / "run", range(1, 4))
    slot = pccheck_async.stores.describe(tmp_path / "run").slot
    with open(tmp_path / "run" / slot, "r+b") as file:
        file.write(b"?" * 50)
    commands = {"copy": ["other"], "show": []}
    if asked:  # else an older one is taken
        commands = {"export": [str(tmp_path / "out.pt"), "--to=torch"], **commands}
    compared = runner.invoke(app, ["compare", str(tmp_path / "run"), "--other-step=2", *asked])
    assert compared.exit_code == 4
    assert "damaged: checksum mismatch" in compared.stderr
    assert compared.stderr.endswith(f"pccheck verify {tmp_path / 'run'} --all` names all damage\n")
    for command, more in commands.items():
        places = [str(tmp_path / each) if each == "other" else each for each in more]
        if command == "show":  # which reads no tensor
            os.unlink(tmp_path / "run" / slot)
        said = runner.invoke(app, [command, str(tmp_path / "run"), *places, *asked])
        assert said.exit_code == 4
        assert "; --step takes another one of 2, 1" in said.stderr
        assert said.stderr.count("pccheck verify ") == 1


def test_an_export_of_an_older_one_says_so(tmp_path: Path) -> None:
    save(tmp_path / "run", range(1, 4))
    os.unlink(tmp_path / "run" / pccheck_async.stores.describe(tmp_path / "run").slot)
    said = run_as_a_process("export", tmp_path / "run", tmp_path / "out.pt", "--to", "torch", "--json")
    assert said.returncode == 4
    assert json.loads(said.stdout)["fell_back"]
    assert json.loads(said.stdout)["checkpoint"]["step"] == 2
    assert said.stderr.startswith(b"pccheck: warning: checkpoint of step 3 cannot be read")
    assert len(said.stderr.splitlines()) == 1


def test_copies_that_lie_inside(tmp_path: Path) -> None:
    save(tmp_path / "run", range(1, 4))
    inside = runner.invoke(app, ["copy", str(tmp_path / "run"), str(tmp_path / "run" / "copy")])
    assert inside.exit_code == 2
    assert "lies inside" in inside.stderr
