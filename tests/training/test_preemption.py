"""Signals that ask the process to go: the last step is saved, and then it goes. Every trainer is a process."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop

from pccheck_async import (
    CheckpointEngine,
    CheckpointError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
)
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.testing import ThrottledWriter
from pccheck_async.testing.probe import probe
from pccheck_async.training import preemption
from pccheck_async.transfer import PAGE_BYTES
from pccheck_async.transfer.operations import Operations
from tests.support.devices import Device
from tests.support.settings import engine_settings
from tests.support.warm import start_warm

NEVER = 1_000_000
"""An interval that no policy's checkpoint comes in."""
SMALL: dict[str, Any] = {"chunk_bytes": 4 * PAGE_BYTES, "host_memory": 8 * PAGE_BYTES}


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """A first step imports half of torch: once here, instead of in every fork."""
    Model().train(0)


class Tell:
    """What a trainer uses to tell its test a line."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self, *words: object) -> None:
        os.write(self._fd, f"{' '.join(map(str, words))}\n".encode())


class Trainer:
    """A forked process: no import of torch to wait for. What its body raises becomes its exit status.

    Args:
        body: Runs there.
        folder: Where its log goes.
    """

    def __init__(self, folder: Path, body: Callable[[Tell], None]) -> None:
        self._log = folder / "log"
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            os._exit(self._run(body, writer))
        os.close(writer)
        self._fd, self._unread = reader, b""
        self.told: list[str] = []

    def _run(self, body: Callable[[Tell], None], writer: int) -> int:
        torch.set_num_threads(1)  # the parent's OpenMP threads are not here
        logging.getLogger("pccheck_async").addHandler(logging.FileHandler(self._log))
        try:
            body(Tell(writer))
        except SystemExit as gone:
            return int(gone.code or 0)
        except KeyboardInterrupt:
            return 130
        except BaseException:  # noqa: BLE001 - a forked child must not return into the test runner
            os.write(2, traceback.format_exc().encode())
            return 1
        return 0

    def hear(self) -> str:
        """The next line that it tells; nothing where it has ended."""
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._fd], [], [], 60)
            assert ready, "the trainer says nothing"
            data = os.read(self._fd, 1 << 16)
            if not data:
                return ""
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        self.told.append(line.decode())
        return self.told[-1]

    def expect(self, line: str) -> None:
        while (heard := self.hear()) != line:
            assert heard, f"the trainer never said {line!r}"

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def rest(self) -> list[str]:
        """All that it still tells."""
        lines = list(iter(self.hear, ""))
        os.close(self._fd)
        return lines

    def wait(self) -> int:
        """Its exit status, negative where a signal ended it, once it told all."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def log(self) -> str:
        return self._log.read_text()


class Model:
    """A module with a parameter that says how many steps were made, and its optimizer."""

    def __init__(self, elements: int = 1000) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(elements))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.state: dict[str, Any] = {"weight": self.weight, "optimizer": self.optimizer, "step": -1}

    def train(self, step: int) -> None:
        self.weight.grad = torch.full_like(self.weight, -1.0)
        self.optimizer.step()
        self.state["step"] = step


def steps_of(folder: Path) -> list[int]:
    return [info.step for info in list_checkpoints(folder)]


def check_saved(folder: Path, step: int) -> None:
    """The newest checkpoint is that of ``step``, and whole."""
    assert steps_of(folder)[:1] == [step]
    state = load_sync(folder)
    assert state["step"] == step
    assert torch.equal(state["weight"], torch.full_like(state["weight"], step + 1.0))


def throttled(path: str, operations: Operations) -> Medium:
    return ThrottledWriter(Files(path, operations), total=4e6)


def when(condition: Callable[[], bool], action: Callable[[], None]) -> None:
    """Do ``action`` once ``condition`` holds, on another thread."""

    def watch() -> None:
        while not condition():
            time.sleep(0.001)
        action()

    threading.Thread(target=watch, daemon=True).start()


def wait_preempted(engine: SyncCheckpointEngine | CheckpointEngine) -> None:
    while not engine.preempted:
        time.sleep(0.001)


def train(folder: Path, tell: Tell, *, attach: bool = True, elements: int = 1000, **settings: Any) -> None:
    model = Model(elements)
    settings = {"interval": NEVER} | settings
    with SyncCheckpointEngine(folder / "store", **engine_settings(**settings)) as engine:
        engine.on_preemption(signal.SIGTERM, signal.SIGINT)
        if attach:
            engine.attach(model.optimizer)
        for step in range(NEVER):
            with engine.step(model.state, step):
                model.train(step)
                tell(step)


async def train_async(folder: Path, tell: Tell) -> None:
    model = Model()
    async with CheckpointEngine(folder / "store", interval=NEVER) as engine:
        engine.on_preemption(signal.SIGTERM, signal.SIGINT)
        engine.attach(model.optimizer)
        for step in range(NEVER):
            async with engine.step(model.state, step):
                model.train(step)
                tell(step)


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_last_step_is_saved(tmp_path: Path, signum: int, status: int, attach: bool) -> None:
    trainer = Trainer(tmp_path, lambda tell: train(tmp_path, tell, attach=attach))
    trainer.expect("3")
    trainer.signal(signum)
    trainer.rest()
    assert trainer.wait() == status
    check_saved(tmp_path / "store", int(trainer.told[-1]))
    log = trainer.log().splitlines()
    assert [word for line in log for word in ("got", "saved", "gave") if word in line.split()] == ["got", "saved"]


def random_moments(folder: Path, count: int, seed: int) -> list[str]:
    """Signals at random moments of a trainer whose slow device has saves in flight nearly always; what went wrong."""
    chance, wrong = random.Random(seed), []
    for number in range(count):
        place = folder / str(number)
        place.mkdir()
        body = functools.partial(
            train, place, elements=50_000, interval=chance.choice([1, 2, 3]), io=throttled, max_in_flight=2, **SMALL
        )
        trainer = Trainer(place, body)
        trainer.expect("1")
        time.sleep(chance.uniform(0, 0.3))
        signum, status = chance.choice([(signal.SIGTERM, 143), (signal.SIGINT, 130)])
        trainer.signal(signum)
        trainer.rest()
        found = trainer.wait()
        try:
            assert found == status, f"status {found}"
            check_saved(place / "store", int(trainer.told[-1]))
            assert "gave up" not in trainer.log()
        except AssertionError as error:
            wrong.append(f"run {number}, signal {signum}: {error}\n{trainer.log()}")
    return wrong


@pytest.mark.slow
def test_signals_at_random_moments(tmp_path: Path) -> None:
    assert not random_moments(tmp_path, 4, seed=1)


@pytest.mark.campaign
def test_twenty_of_twenty(tmp_path: Path) -> None:
    wrong = random_moments(tmp_path, 20, seed=2)
    print(f"\n{20 - len(wrong)} of 20: the newest checkpoint is the last completed step")
    assert not wrong


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_last_step_of_an_async_trainer(
    tmp_path: Path, run: Callable[[Any], None], signum: int, status: int
) -> None:
    trainer = Trainer(tmp_path, lambda tell: run(train_async(tmp_path, tell)))
    trainer.expect("3")
    trainer.signal(signum)
    trainer.rest()
    assert trainer.wait() == status
    check_saved(tmp_path / "store", int(trainer.told[-1]))


SCRIPT = """
import asyncio, signal, sys, torch
from pccheck_async import CheckpointEngine

async def main():
    state = {"tensor": torch.zeros(1000)}
    try:
        async with CheckpointEngine(sys.argv[1], interval=1000) as engine:
            engine.on_preemption(signal.SIGTERM, signal.SIGINT)
            for step in range(10**9):
                async with engine.step(state, step):
                    state["tensor"] += 1
                    print(step, flush=True)
    finally:
        print("finally", flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_whole_program(tmp_path: Path, signum: int, status: int) -> None:
    """Interpreter start to exit; of a KeyboardInterrupt Python dies by SIGINT, which shells show as 130."""
    program = start_warm("-c", SCRIPT, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stderr is not None
    with program:
        first = program.stdout.readline()
        program.send_signal(signum)
        output, errors = program.stdout.read(), program.stderr.read()  # communicate() passes over what is buffered
    *_, last, end = (first + output).split()
    assert (program.returncode, end) == (status, "finally"), errors
    assert steps_of(tmp_path) == [int(last)]
    assert "got SIG" in errors
    assert f"saved step {last}" in errors


@pytest.mark.slow
def test_a_handler_from_before_is_called_and_decides(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        called: list[int] = []
        signal.signal(signal.SIGTERM, lambda signum, _: called.append(signum))
        model = Model()
        stuck = Device()
        with SyncCheckpointEngine(tmp_path / "store", interval=NEVER, storage=StorageOptions(io=stuck)) as engine:
            before = signal.getsignal(signal.SIGTERM)
            engine.on_preemption(deadline=60)
            with engine.step(model.state, 0):
                model.train(0)
                os.kill(os.getpid(), signal.SIGTERM)
                assert engine.preempted
                assert not called
            assert called == [signal.SIGTERM]
            assert engine.latest
            assert engine.latest.step == 0
            assert signal.getsignal(signal.SIGTERM) == before
            probe(engine).training.preemption.end_last_drains_at(time.monotonic())  # the deadline has passed
            with engine.step(model.state, 1):  # it goes on, and so may drains
                model.train(1)
            stuck.medium.hold("flush")
            engine.checkpoint(model.state, step=1)
            stuck.medium.wait_stuck()
            threading.Timer(0.5, stuck.medium.release).start()
        assert called == [signal.SIGTERM]

    trainer = Trainer(tmp_path, body)
    assert not trainer.rest()
    assert trainer.wait() == 0
    check_saved(tmp_path / "store", 1)


def test_after_a_handler_that_stayed_signals_may_be_watched_again(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        called: list[int] = []
        signal.signal(signal.SIGTERM, lambda signum, _: called.append(signum))
        model = Model()
        with SyncCheckpointEngine(tmp_path / "store", interval=NEVER) as engine:
            for step in range(3):
                engine.on_preemption(deadline=60)
                assert not engine.preempted
                with engine.step(model.state, step):
                    model.train(step)
                    os.kill(os.getpid(), signal.SIGTERM)
                    assert engine.preempted
                assert len(called) == step + 1
                assert engine.latest
                assert engine.latest.step == step

    trainer = Trainer(tmp_path, body)
    assert not trainer.rest()
    assert trainer.wait() == 0
    check_saved(tmp_path / "store", 2)


@pytest.mark.slow
def test_closing_ends_at_its_own_time_where_that_comes_first(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        model, stuck = Model(), Device()
        engine = SyncCheckpointEngine(tmp_path / "store", interval=NEVER, storage=StorageOptions(io=stuck)).open()
        engine.on_preemption(deadline=120)
        stuck.medium.hold("write")
        engine.checkpoint(model.state, step=0)
        stuck.medium.wait_stuck()
        os.kill(os.getpid(), signal.SIGTERM)
        while not probe(engine).training.preemption.limited:
            time.sleep(0.001)
        with pytest.raises(CheckpointError, match="still being written"):
            engine.close(deadline=0.1)
        tell("closed")

    trainer = Trainer(tmp_path, body)
    assert trainer.rest() == ["closed"]
    assert trainer.wait() == 0


def hang(folder: Path, tell: Tell, deadline: float) -> None:
    """A step that ends only if something is raised in it."""
    model = Model()
    try:
        with SyncCheckpointEngine(folder / "store", interval=1) as engine:
            engine.on_preemption(deadline=deadline)
            with engine.step(model.state, 0):
                model.train(0)
            engine.drain()
            with engine.step(model.state, 1):
                tell("hangs")
                wait_preempted(engine)
                tell("noted")
                while (
                    True
                ):  # a handler of Python cannot run in a wait without end that begins right after the signal came
                    time.sleep(0.05)
    finally:
        tell("finally", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)


@pytest.mark.slow
def test_a_step_that_hangs_ends_at_the_deadline(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, lambda tell: hang(tmp_path, tell, 1.5))
    trainer.expect("hangs")
    trainer.signal(signal.SIGTERM)
    assert trainer.rest() == ["noted", "finally True"]
    assert trainer.wait() == 143
    check_saved(tmp_path / "store", 0)
    assert "1.5 s after SIGTERM: the process goes now; nothing newer than the checkpoint of step 0" in trainer.log()


@pytest.fixture
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change how long something may take."""
    for name, seconds in request.param.items():
        monkeypatch.setattr(preemption, name, seconds)


SAME, LATE = "_SAME_SECONDS", "_LATE_SECONDS"
"""How long a signal counts as the same one; how much later than the deadline a step may end."""


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("pace", [{SAME: 0.0}], indirect=True, ids=["another"])
def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, lambda tell: hang(tmp_path, tell, 1000.0))
    trainer.expect("hangs")
    trainer.signal(signal.SIGTERM)
    trainer.expect("noted")
    trainer.signal(signal.SIGTERM)
    assert trainer.rest() == ["finally True"]
    assert trainer.wait() == 143
    assert "SIGTERM came again" in trainer.log()


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("pace", [{SAME: 1000.0}], indirect=True, ids=["the same"])
def test_a_launcher_that_passes_the_signal_on_does_no_harm(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        model = Model()
        with SyncCheckpointEngine(tmp_path / "store", interval=NEVER) as engine:
            engine.on_preemption()
            with engine.step(model.state, 0):
                model.train(0)
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
        tell("went on")

    trainer = Trainer(tmp_path, body)
    assert not trainer.rest()
    assert trainer.wait() == 143
    check_saved(tmp_path / "store", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("pace", [{LATE: 60.0}], indirect=True, ids=["the drain ends in time"])
@pytest.mark.parametrize("kind", ["write", "flush"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_device_that_hangs_does_not_keep_the_process(tmp_path: Path, kind: str, asynchronous: bool) -> None:
    def body(tell: Tell) -> None:
        model, stuck = Model(), Device()
        with SyncCheckpointEngine(tmp_path / "store", interval=NEVER, storage=StorageOptions(io=stuck)) as engine:
            engine.on_preemption(deadline=0.2)
            model.train(0)
            engine.checkpoint(model.state, step=0).result()
            stuck.medium.hold(kind)
            with engine.step(model.state, 1):
                model.train(1)
                os.kill(os.getpid(), signal.SIGTERM)
        tell("went on")

    async def body_async(tell: Tell) -> None:
        model, stuck = Model(), Device()
        async with CheckpointEngine(tmp_path / "store", interval=NEVER, storage=StorageOptions(io=stuck)) as engine:
            engine.on_preemption(deadline=0.2)
            model.train(0)
            await (await engine.checkpoint(model.state, step=0))
            stuck.medium.hold(kind)
            async with engine.step(model.state, 1):
                model.train(1)
                os.kill(os.getpid(), signal.SIGTERM)
        tell("went on")

    trainer = Trainer(tmp_path, (lambda tell: asyncio.run(body_async(tell))) if asynchronous else body)
    assert not trainer.rest()
    assert trainer.wait() == 143
    check_saved(tmp_path / "store", 0)
    assert "gave up: step 1 was still being written; nothing newer than the checkpoint of step 0" in trainer.log()


def test_neither_a_full_pipeline_nor_an_earlier_failure_prevents_it(tmp_path: Path) -> None:
    def body(_: Tell) -> None:
        SyncCheckpointEngine(tmp_path / "store").open().close()
        model, stuck = Model(), Device()
        with SyncCheckpointEngine(
            tmp_path / "store", interval=NEVER, storage=StorageOptions(io=stuck), max_in_flight=1, on_busy="skip"
        ) as engine:
            engine.on_preemption()
            stuck.breaking.broken = ("write",)
            model.train(0)
            engine.checkpoint(model.state, step=0)
            while not engine.statistics().failed:
                time.sleep(0.001)
            stuck.breaking.broken = ()
            stuck.medium.hold("write")
            os.kill(os.getpid(), signal.SIGTERM)
            model.train(1)
            engine.checkpoint(model.state, step=1)
            stuck.medium.wait_stuck()
            when(lambda: engine.statistics().admitted == 3, stuck.medium.release)
            with engine.step(model.state, 2):
                model.train(2)

    trainer = Trainer(tmp_path, body)
    assert trainer.wait() == 143
    check_saved(tmp_path / "store", 2)


def test_a_checkpoint_of_the_policy_is_not_taken_twice(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        model, stuck = Model(), Device()
        with SyncCheckpointEngine(tmp_path / "store", interval=1, storage=StorageOptions(io=stuck)) as engine:
            engine.on_preemption()
            stuck.medium.hold("flush")  # so that it is in flight when the signal comes

            def asked() -> bool:
                return bool(stuck.medium.stuck)

            real = engine.checkpoint

            def checkpoint(*args: Any, **kwargs: Any) -> Any:
                pending = real(*args, **kwargs)
                stuck.medium.wait_stuck()
                os.kill(os.getpid(), signal.SIGTERM)
                when(asked, stuck.medium.release)
                return pending

            engine.checkpoint = checkpoint  # type: ignore[method-assign]
            try:
                with engine.step(model.state, 0):
                    model.train(0)
            finally:
                tell(engine.statistics().admitted)

    trainer = Trainer(tmp_path, body)
    assert trainer.rest() == ["1"]
    assert trainer.wait() == 143
    check_saved(tmp_path / "store", 0)


def test_a_signal_while_a_step_waits_for_a_capture(tmp_path: Path) -> None:
    """The guard's wait is not disturbed by the signal, and the step that it held up is the last one."""

    def body(_: Tell) -> None:
        model, stuck = Model(200_000), Device()
        with SyncCheckpointEngine(tmp_path / "store", interval=1, storage=StorageOptions(io=stuck, **SMALL)) as engine:
            engine.on_preemption()
            engine.attach(model.optimizer)
            stuck.medium.hold("write")
            with engine.step(model.state, 0):
                model.train(0)
            stuck.medium.wait_stuck()

            def interrupt() -> None:
                os.kill(os.getpid(), signal.SIGTERM)
                wait_preempted(engine)  # the handler ran, in the middle of the wait
                stuck.medium.release()

            when(lambda: threading.main_thread().ident in waiting_in("wait_out_of_reach") and asleep(), interrupt)
            with engine.step(model.state, 1):
                model.train(1)

    trainer = Trainer(tmp_path, body)
    assert trainer.wait() == 143
    check_saved(tmp_path / "store", 1)


def asleep() -> bool:
    """Whether the main thread sleeps: a signal just before it does would not wake it, and its handler not run."""
    return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[0] == "S"


def waiting_in(function: str) -> list[int]:
    """The threads in whose stacks a function of that name is."""
    found = []
    for ident, frame in sys._current_frames().items():
        if any(f.f_code.co_name == function for f, _ in traceback.walk_stack(frame)):
            found.append(ident)
    return found


def test_a_window_of_gradient_accumulation_ends_first(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        model = Model()
        with SyncCheckpointEngine(tmp_path / "store", interval=NEVER) as engine:
            engine.on_preemption()
            engine.attach(model.optimizer)
            for step in range(4):
                with engine.step(model.state, step):
                    if step == 0:
                        os.kill(os.getpid(), signal.SIGTERM)
                    if step == 2:
                        model.train(step)
                    tell(step)

    trainer = Trainer(tmp_path, body)
    assert trainer.rest() == ["0", "1", "2"]
    assert trainer.wait() == 143
    assert steps_of(tmp_path / "store") == [2]


def test_a_signal_while_the_engine_closes(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        model, stuck = Model(), Device()
        with SyncCheckpointEngine(tmp_path / "store", storage=StorageOptions(io=stuck)) as engine:
            engine.on_preemption()
            stuck.medium.hold("flush")
            model.train(0)
            engine.checkpoint(model.state, step=0)

            def interrupt() -> None:
                os.kill(os.getpid(), signal.SIGTERM)
                wait_preempted(engine)
                stuck.medium.release()

            when(
                lambda: (
                    probe(engine).core.state == "closing"
                    and threading.main_thread().ident in waiting_in("result")
                    and asleep()
                ),
                interrupt,
            )
        tell("went on")

    trainer = Trainer(tmp_path, body)
    assert not trainer.rest()
    assert trainer.wait() == 143
    check_saved(tmp_path / "store", 0)


def test_a_loop_without_contexts(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        model = Model()
        with SyncCheckpointEngine(tmp_path / "store") as engine:
            engine.on_preemption()
            for step in range(NEVER):
                model.train(step)
                tell(step)
                if engine.preempted:
                    engine.checkpoint(model.state, step=step)
                    break
        tell("went on")

    trainer = Trainer(tmp_path, body)
    trainer.expect("3")
    trainer.signal(signal.SIGTERM)
    trainer.rest()
    assert trainer.wait() == 143
    check_saved(tmp_path / "store", int(trainer.told[-1]))


def test_an_error_of_the_trainer_stays_what_it_is(tmp_path: Path) -> None:
    def body(_: Tell) -> None:
        with SyncCheckpointEngine(tmp_path / "store") as engine:
            engine.on_preemption()
            with engine.step({}, 0):
                os.kill(os.getpid(), signal.SIGTERM)
                raise SystemExit(7)

    trainer = Trainer(tmp_path, body)
    assert trainer.wait() == 7
    assert steps_of(tmp_path / "store") == []


def test_two_engines_both_save_and_the_process_goes_once(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        gone: list[int] = []
        signal.signal(signal.SIGTERM, lambda signum, _: gone.append(signum))
        one, two = Model(), Model()
        with (
            SyncCheckpointEngine(tmp_path / "one", interval=NEVER) as first,
            SyncCheckpointEngine(tmp_path / "two", interval=NEVER) as second,
            SyncCheckpointEngine(tmp_path / "idle") as idle,
        ):
            for engine in (first, second, idle):
                engine.on_preemption()
            for step in range(2):
                with first.step(one.state, step):
                    one.train(step)
                    if step == 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                assert not gone
                with second.step(two.state, step):
                    two.train(step)
            assert gone == [signal.SIGTERM]
            tell("both")

    trainer = Trainer(tmp_path, body)
    assert trainer.rest() == ["both"]
    assert trainer.wait() == 0
    check_saved(tmp_path / "one", 1)
    check_saved(tmp_path / "two", 1)


def test_training_on_another_thread(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        model = Model()
        with SyncCheckpointEngine(tmp_path / "store", interval=NEVER) as engine:
            engine.on_preemption()

            def run() -> None:
                for step in range(NEVER):
                    with engine.step(model.state, step):
                        model.train(step)
                        tell(step)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            tell("joined")

    trainer = Trainer(tmp_path, body)
    trainer.expect("3")
    trainer.signal(signal.SIGTERM)
    trainer.rest()
    assert trainer.wait() == 143
    check_saved(tmp_path / "store", int(next(word for word in reversed(trainer.told) if word.isdigit())))


def test_forked_children_are_ended_as_before(tmp_path: Path) -> None:
    def body(tell: Tell) -> None:
        model = Model()
        with SyncCheckpointEngine(tmp_path / "store", interval=NEVER) as engine:
            engine.on_preemption(signal.SIGTERM, signal.SIGUSR1)
            reader, writer = os.pipe()
            worker = os.fork()
            if worker == 0:
                os.kill(os.getpid(), signal.SIGUSR1)  # for the trainer; the whole group got it
                os.write(writer, b"lives" if not engine.preempted else b"acts ")
                signal.pause()
            os.close(writer)
            assert os.read(reader, 5) == b"lives"
            os.kill(worker, signal.SIGTERM)
            tell(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
            with engine.step(model.state, 0):
                model.train(0)
                os.kill(os.getpid(), signal.SIGUSR1)

    trainer = Trainer(tmp_path, body)
    assert trainer.rest() == [str(-signal.SIGTERM)]
    assert trainer.wait() == 128 + signal.SIGUSR1
    check_saved(tmp_path / "store", 0)


def test_closing_puts_handlers_back_that_are_still_ours(tmp_path: Path) -> None:
    def body(_: Tell) -> None:
        def mine(*_: Any) -> None: ...

        def later(*_: Any) -> None: ...

        signal.signal(signal.SIGUSR1, mine)
        with SyncCheckpointEngine(tmp_path / "store") as one, SyncCheckpointEngine(tmp_path / "other") as two:
            one.on_preemption(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
            two.on_preemption(signal.SIGTERM)
            signal.signal(signal.SIGUSR2, later)
            one.close()
            assert signal.getsignal(signal.SIGUSR1) is mine
            assert signal.getsignal(signal.SIGUSR2) is later
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    assert Trainer(tmp_path, body).wait() == 0


def test_closed_on_another_thread_the_next_signal_passes_through(tmp_path: Path) -> None:
    def body(_: Tell) -> None:
        engine = SyncCheckpointEngine(tmp_path / "store").open()
        engine.on_preemption()
        thread = threading.Thread(target=engine.close)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()

    assert Trainer(tmp_path, body).wait() == -signal.SIGTERM


def test_what_is_refused(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        refused: list[Exception] = []

        def install() -> None:
            try:
                engine.on_preemption()
            except RuntimeError as error:
                refused.append(error)

        thread = threading.Thread(target=install)
        thread.start()
        thread.join()
        assert "main thread" in str(refused[0])
        with pytest.raises(ValueError, match="SIGKILL"):
            engine.on_preemption(signal.SIGKILL)
        with pytest.raises(ValueError, match="signal 1000"):
            engine.on_preemption(1000)
        with pytest.raises(ValueError, match="deadline"):
            engine.on_preemption(deadline=0)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_of_several_deadlines_the_first_counts(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "one") as one, SyncCheckpointEngine(tmp_path / "two") as two:
        before = signal.signal(signal.SIGUSR1, lambda *_: None)
        try:
            one.on_preemption(signal.SIGUSR1, deadline=30.0)
            two.on_preemption(signal.SIGUSR1, deadline=20.0)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert one.preempted
            first, second = probe(one).training.preemption, probe(two).training.preemption
            assert first.request is second.request
            request = first.request
            assert request is not None
            assert request.seconds == 20.0
        finally:
            for each in (one, two):
                with probe(each).training.ending(go=False):
                    pass
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("how", ["data", "versions"])
@pytest.mark.parametrize("back", [True, False])
def test_weights_of_an_evaluation_that_a_preemption_ends_are_not_saved(tmp_path: Path, how: str, back: bool) -> None:
    """It comes when other weights are in the parameters, or when these are back but nobody can tell that they are."""

    def body(_: Tell) -> None:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with SyncCheckpointEngine(tmp_path / "store", interval=NEVER) as engine:
            engine.on_preemption(deadline=60.0)
            if how == "data":
                engine.attach(optimizer)  # else nothing of it is seen
            with engine.step({"model": model, "optimizer": optimizer}, 0):
                model(torch.ones(4)).sum().backward()
                optimizer.step()
            for weights in [[torch.zeros(4, 4), torch.zeros(4)], kept][: 1 + back]:
                for parameter, other in zip(model.parameters(), weights, strict=True):
                    with torch.no_grad():
                        (parameter.data if how == "data" else parameter).copy_(other)
            os.kill(os.getpid(), signal.SIGTERM)
            assert engine.preempted
            raise RuntimeError("DataLoader worker exited unexpectedly")

    assert Trainer(tmp_path, body).wait() == 1
    assert steps_of(tmp_path / "store") == []


@pytest.mark.parametrize("why", ["break", "exit", "worker", "in a step"])
def test_a_preempted_run_that_ends_between_two_steps_has_saved_the_last(tmp_path: Path, why: str) -> None:
    def body(_: Tell) -> None:
        model = Model()
        with SyncCheckpointEngine(tmp_path / "store", interval=NEVER) as engine:
            engine.on_preemption(deadline=60.0)
            for step in range(3):
                with engine.step(model.state, step):
                    model.train(step)
            os.kill(os.getpid(), signal.SIGTERM)
            assert engine.preempted
            if why == "exit":
                sys.exit(143)
            if why == "worker":
                raise RuntimeError("DataLoader worker exited unexpectedly")
            if why == "in a step":
                with engine.step(model.state, 3):
                    model.train(3)
                    raise RuntimeError("in the middle of it")

    trainer = Trainer(tmp_path, body)
    assert trainer.wait() == (1 if why in ("worker", "in a step") else 143)
    if why == "in a step":
        assert steps_of(tmp_path / "store") == []
    else:
        check_saved(tmp_path / "store", 2)
