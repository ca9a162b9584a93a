"""The cells of the notebook page, run again and interrupted, in ``python -m asyncio`` and in a kernel of Jupyter."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from pccheck_async import list_checkpoints
from tests.support.readme_blocks import ROOT
from tests.support.recipes import program

PAGE = "notebooks.md"
pytestmark = pytest.mark.slow


class Repl:
    """A ``python -m asyncio`` whose lines come from a test."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "asyncio"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reader.start()
        self._ends = 0

    def _read(self, output: IO[str]) -> None:
        for line in output:
            print(line, end="")  # for the report of a test that fails
            self._lines.put(line)

    def until(self, wanted: str) -> str:
        """Return what was printed up to a line that has this text."""
        said = ""
        while wanted not in (line := self._lines.get(timeout=60)):
            said += line
        return said + line

    def begin(self, cell: str) -> None:
        """Send the lines of a cell."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{cell}\n")  # an empty line ends an indented block
        self._process.stdin.flush()

    def run(self, cell: str) -> str:
        """Run a cell; return what it printed."""
        self._ends += 1
        self.begin(cell)
        self.begin(f"print('cell', 'ended', {self._ends})")
        return self.until(f"cell ended {self._ends}")

    def value(self, expression: str) -> str:
        """Return what an expression is worth, as printed without spaces."""
        return self.run(f"print('value', {expression})").split("value ")[1].split()[0]

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Send the end of the input; return the exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(60)

    def kill(self) -> None:
        with self._process:
            self._process.kill()
            self._reader.join()


@pytest.fixture
def repl(tmp_path: Path) -> Iterator[Repl]:
    started = Repl(tmp_path)
    yield started
    started.kill()


def steps(folder: Path) -> list[int]:
    return [info.step for info in list_checkpoints(folder / "run")]


def test_cells_are_run_again(repl: Repl, tmp_path: Path) -> None:
    repl.run(program(PAGE, "objects.py"))
    assert "Error" not in repl.run(program(PAGE, "training.py"))
    assert steps(tmp_path) == [99]
    once = repl.value("sum(losses.values())")
    repl.run("import shutil; shutil.rmtree('run')")
    repl.run(program(PAGE, "objects.py"))
    repl.run(program(PAGE, "training.py").replace("100):", "50):"))
    repl.run("held = losses")
    repl.run(program(PAGE, "objects.py"))  # new objects
    assert "Error" not in repl.run(program(PAGE, "training.py"))
    assert repl.value("min(losses)") == "50"
    assert repl.value("sum({**held, **losses}.values())") == once
    assert repl.end() == 0


@pytest.mark.parametrize("saves", [False, True], ids=["given up", "saved"])
def test_ctrl_c_in_a_cell(repl: Repl, tmp_path: Path, saves: bool) -> None:
    repl.run(program(PAGE, "objects.py"))
    training = program(PAGE, "training.py")
    repl.run(training)
    once = repl.value("sum(losses.values())")
    repl.run("import shutil; shutil.rmtree('run')")
    repl.run(program(PAGE, "objects.py"))
    slow = training + "            if step >= 34: print('at', step); await asyncio.sleep(0.05)\n"
    if saves:
        first, rest = slow.split("\n", 1)
        slow = f"{first}\n    engine.on_preemption(signal.SIGINT)\n{rest}"
        repl.run("import signal")
    repl.begin(slow)
    repl.until("at 36")
    repl.interrupt()
    assert "KeyboardInterrupt" in repl.run("")
    last = int(repl.value("max(losses)"))
    assert last >= 36
    assert steps(tmp_path) == [last if saves else last // 10 * 10 - 1]
    assert "Error" not in repl.run(training)  # into the same objects
    assert steps(tmp_path) == [99]
    assert repl.value("sum(losses.values())") == once
    assert repl.end() == 0


def test_a_store_is_opened_again(repl: Repl, tmp_path: Path) -> None:
    repl.run(program(PAGE, "objects.py"))
    repl.run("import logging; logging.basicConfig(format='%(event)s')")
    opening = program(PAGE, "open.py") + "0\n"  # for "_", which holds what "await engine.open()" returned
    assert "lost_engine" not in repl.run(opening)
    repl.run("pending = await engine.checkpoint(state, step=1)")
    said = repl.run(opening)
    assert "lost_engine" in said
    assert "Error" not in said
    assert repl.value("pending.done()") == "True"
    assert repl.value("restored.step") == "1"
    repl.run("kept = engine")
    said = repl.run(opening)
    assert f"an engine of this process has {tmp_path}/run open, made at <console>:1: close it first" in said
    repl.run("await kept.close()")
    assert "Error" not in repl.run(opening)
    assert "made at <console>:1" in repl.run("engine = await CheckpointEngine('run').open()")
    repl.run("await (await engine.checkpoint(state, step=2)).durable()")
    repl.run("await engine.close()")
    assert steps(tmp_path) == [2]
    assert repl.end() == 0


def test_a_kernel_of_jupyter(tmp_path: Path) -> None:
    """The same cells there, where Ctrl-C is the button "Interrupt"."""
    pytest.importorskip("ipykernel")
    manager = pytest.importorskip("jupyter_client.manager")
    kernel = manager.KernelManager(kernel_name="python3")
    kernel.start_kernel(cwd=str(tmp_path), env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
    client = kernel.blocking_client()
    client.start_channels()

    def run(cell: str, *, interrupted_at: str | None = None) -> str:
        said: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            said.append(content.get("text") or "\n".join(content.get("traceback", ())))
            if interrupted_at is not None and interrupted_at in said[-1]:
                kernel.interrupt_kernel()

        client.execute_interactive(cell, timeout=60, output_hook=hook, allow_stdin=False)
        return "".join(said)

    sums: list[str] = []
    try:
        client.wait_for_ready(timeout=60)
        run("import asyncio, logging, signal; logging.basicConfig(format='%(event)s')")
        training = program(PAGE, "training.py")
        slow = training + "            if step >= 34: print('at', step); await asyncio.sleep(0.05)\n"
        first, rest = slow.split("\n", 1)
        saving = f"{first}\n    engine.on_preemption(signal.SIGINT)\n{rest}"
        for cell in (slow, saving):
            run("import shutil; shutil.rmtree('run', ignore_errors=True)")
            run(program(PAGE, "objects.py"))
            said = run(cell, interrupted_at="at 36\n")
            assert "CancelledError" in said or "KeyboardInterrupt" in said
            [step] = steps(tmp_path)
            assert step >= 36 if cell is saving else step % 10 == 9
            assert "Error" not in run(training)
            assert steps(tmp_path) == [99]
            sums.append(run("print(sum(losses.values()))"))
        assert len(set(sums)) == 1
        opening = program(PAGE, "open.py")
        assert "lost_engine" not in run(opening)
        assert "lost_engine" in run(opening)
        assert re.search(r"made at Cell In\[\d+\], line 1: close it first", run("kept = engine\n" + opening))
        run("await kept.close()")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
