"""Run the clustering examples in forks of this process, kill them, and compare what they end with.

A fork holds numpy, torch and scikit-learn already, so a run takes as long as its iterations.
"""

from __future__ import annotations

import importlib
import io
import os
import random
import re
import select
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async import StorageOptions, SyncCheckpointEngine, list_checkpoints, load_sync
from pccheck_async.medium import File
from pccheck_async.medium.files import Files
from pccheck_async.testing import WrappingWriter
from tests.support.processes import forked
from tests.support.state_strategies import difference

TIMEOUT = 60


@dataclass
class Ended:
    """How a run ended, and what it had said by then."""

    status: int
    said: list[str]

    @property
    def resumed_from(self) -> int:
        return int(self.said[0].removeprefix("resumed from iteration ")) if self.said[0].startswith("resumed") else 0

    @property
    def iterations(self) -> dict[int, str]:
        """What was measured in each iteration, with all its digits."""
        found = (re.fullmatch(r"iteration (\d+): (.*), saving", line) for line in self.said)
        return {int(match[1]): match[2] for match in found if match}


@dataclass
class Program:
    """An example with its flags."""

    name: str
    flags: tuple[str, ...] = ()

    def run(self, store: Path, *more: str, kill: tuple[int, float] | None = None) -> Ended:
        """Run to the end, or until so many seconds after it said that it saves the iteration, whichever is first."""
        pytest.importorskip("sklearn.datasets")  # else each fork imports it
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            self._live(writer, store, more)
        os.close(writer)
        said, over = b"", False
        while not over:
            if not select.select([reader], [], [], TIMEOUT)[0]:
                os.kill(child, signal.SIGKILL)
                said += f"said nothing for {TIMEOUT} seconds".encode()
            data = os.read(reader, 1 << 16)
            said, over = said + data, not data
            if kill and f"\niteration {kill[0]}: ".encode() in said:
                time.sleep(kill[1])
                os.kill(child, signal.SIGKILL)  # not reaped yet, so it is no other process
                kill = None
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(reader)
        return Ended(status, said.decode().splitlines())

    def _live(self, writer: int, store: Path, more: tuple[str, ...]) -> None:
        status = 1
        try:
            sys.stdout = open(writer, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
            sys.argv = [self.name, f"--store={store}", *self.flags, *more]
            try:
                importlib.import_module(f"examples.paper.{self.name}").main()
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
                print(end.code)
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001 - told, and then the child ends
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)


@dataclass
class Comparison:
    """Killed runs of a program, resumed and compared with one that was not killed."""

    program: Program
    folder: Path
    uninterrupted: Ended = field(init=False)
    resumed_from: list[int] = field(default_factory=list)
    inside_save: int = 0
    stores: int = 0

    def __post_init__(self) -> None:
        self.uninterrupted = self.program.run(self.folder / "uninterrupted")
        assert self.uninterrupted.status == 0, self.uninterrupted

    @property
    def iterations(self) -> int:
        return max(self.uninterrupted.iterations)

    def kill(self, *more: str, kill: tuple[int, float] | None = None) -> None:
        """Kill one run, resume it, and check that every iteration and the end have the bits of the uninterrupted.

        A kill from outside may come too late; then nothing happens.
        """
        self.stores += 1
        store = self.folder / str(self.stores)
        killed = self.program.run(store, *more, kill=kill)
        if kill and killed.status == 0:
            return
        assert killed.status == -signal.SIGKILL, killed
        assert killed.iterations.items() <= self.uninterrupted.iterations.items()
        durable = max((info.step or 0 for info in list_checkpoints(store)), default=0)
        resumed = self.program.run(store, "--resume")
        assert resumed.status == 0, resumed
        assert resumed.resumed_from == durable <= max(killed.iterations)
        assert list(resumed.iterations) == list(range(durable + 1, self.iterations + 1))
        assert resumed.iterations.items() <= self.uninterrupted.iterations.items()
        assert resumed.said[-1] == self.uninterrupted.said[-1]  # iterations, and a digest of the parameters
        assert not difference(load_sync(store), load_sync(self.folder / "uninterrupted"))
        self.resumed_from.append(durable)
        self.inside_save += durable < max(killed.iterations)

    def kill_at(self, part: float) -> None:
        """Kill inside the save after this part of the iterations."""
        self.kill(f"--crash-at={max(1, round(part * self.iterations))}")

    def kill_at_random(self, kills: int, seed: int) -> None:
        """Kill in random iterations: by the program itself inside a save, and from outside at any moment, in turn."""
        draw = random.Random(seed)
        while len(self.resumed_from) < kills:
            iteration = draw.randint(1, self.iterations)
            if len(self.resumed_from) % 2:
                self.kill(f"--crash-at={iteration}")
            else:
                self.kill(kill=(iteration, draw.uniform(0, 0.002)))

    def check_fifty_kills(self) -> None:
        """Kill fifty runs, and see that they covered iterations and saves."""
        self.kill_at_random(50, seed=5)
        print(f"\n{self}")
        assert len(set(self.resumed_from)) > self.iterations / 2
        assert self.inside_save > 10

    def __str__(self) -> str:
        return (
            f"{self.program.name}: {len(self.resumed_from)} kills, {self.inside_save} of them inside a save; "
            f"resumed from {len(set(self.resumed_from))} different of {self.iterations} iterations, all bits equal"
        )


class DyingFile(io.FileIO):
    """A file whose process is killed when it has written so many bytes."""

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__(path, "wb")
        self.left = nbytes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < self.left:
            self.left -= len(view)
            return super().write(view)
        super().write(view[: self.left])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")


class DyingWriter(WrappingWriter):
    """The real writer, in a process that is killed when it has written so many bytes."""

    def __init__(self, path: Any, operations: Any, nbytes: int) -> None:
        super().__init__(Files(path, operations))
        self.left = nbytes

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        nbytes = len(data)
        if nbytes < self.left:
            self.left -= nbytes
            await self.inner.write(file, offset, data)
            return
        whole = self.left // 4096 * 4096  # a direct write is of whole blocks
        if whole:
            await self.inner.write(file, offset, data[:whole])
        os.kill(os.getpid(), signal.SIGKILL)


def flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """What ``numpy.savez`` takes of a clustering's state: its arrays, and one text for all the rest."""
    arrays = {name: np.asarray(value) for name, value in state.items() if isinstance(value, np.ndarray | torch.Tensor)}
    return {**arrays, "rest": repr({name: value for name, value in state.items() if name not in arrays})}


def savez_in_place(path: Path, state: Mapping[str, Any], dying_after: int | None = None) -> None:
    """Save over the last file, as is often done."""
    if dying_after is None:
        np.savez(path, **flat(state))
    else:
        with DyingFile(path, dying_after) as file:
            np.savez(file, **flat(state))


def save_by_engine(store: Path, state: Mapping[str, Any], step: int, dying_after: int | None = None) -> None:
    """Save, in a process that may die in the middle of it."""
    if dying_after is None:
        with SyncCheckpointEngine(store) as engine:
            engine.checkpoint({"clusters": state}, step=step).result()
    else:
        with SyncCheckpointEngine(
            store, storage=StorageOptions(io=lambda path, operations: DyingWriter(path, operations, dying_after))
        ) as engine:
            engine.checkpoint({"clusters": state}, step=step).result()


def cuts(total: int) -> list[int]:
    """Numbers of bytes after which to die: none, one, and across the whole."""
    return [1, *(total * part // 8 for part in range(1, 8)), total - 1]


def two_states(model: Any) -> list[dict[str, Any]]:
    """The state after the first iteration, and after the second."""
    states = []
    for _ in range(2):
        model.iterate()
        states.append(model.state_dict())
    return states


def check_savez_in_place(folder: Path, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Wherever a process dies that saves over the last file, nothing is left."""
    savez_in_place(folder / "whole.npz", second)
    for after in cuts((folder / "whole.npz").stat().st_size):
        path = folder / f"{after}.npz"
        savez_in_place(path, first)
        assert forked(lambda: savez_in_place(path, second, after)) == -signal.SIGKILL  # noqa: B023 - called here
        assert path.stat().st_size <= after  # less where zipfile went back to complete a header
        with path.open("rb") as file, pytest.raises((zipfile.BadZipFile, EOFError, ValueError)):
            np.load(file)


def check_engine(folder: Path, nbytes: int, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Wherever a process dies among the bytes that the engine writes, one of the two states is there, whole."""
    recovered = []
    for after in cuts(nbytes):
        store = folder / str(after)
        save_by_engine(store, first, 1)
        status = forked(lambda: save_by_engine(store, second, 2, after))  # noqa: B023 - called here
        found = load_sync(store)["clusters"]
        recovered.append(found["iteration"])
        assert status in (0, -signal.SIGKILL)
        assert not difference(found, first if found["iteration"] == 1 else second)
        if status == 0:
            assert found["iteration"] == 2
    assert recovered == sorted(recovered)
    assert set(recovered) == {1, 2}
