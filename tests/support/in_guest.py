"""The program of a guest with a DAX mount: says "ready", waits for one line that says what to do, and does it.

What it says and hears are lines of JSON on its console. Arguments: the modules of the kernel to load before the mount.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pccheck_async import (
    NoCheckpointError,
    Shelf,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    stores,
)
from pccheck_async.errors import StoreFullError
from pccheck_async.medium import Medium
from pccheck_async.medium.mapped import MappedFiles, kind_of_folder
from pccheck_async.testing import MEDIUM_CHECKS
from pccheck_async.transfer import PAGE_BYTES, aligned_buffer
from pccheck_async.transfer.operations import NativeOperations, Operations
from tests.support.guest import MARK
from tests.support.kill_harness import is_whole, state_of
from tests.support.settings import engine_settings

MOUNT = Path("/mnt")
STORE = MOUNT / "store"
SHELF = MOUNT / "variables.shelf"
TRACED = 20
"""Checkpoints whose system calls are counted."""
_RESEED = 0x5207
"""``RNDRESEEDCRNG``"""


def say(*words: object) -> None:
    print(MARK + json.dumps(words), flush=True)


def wake(seconds: float, random_bytes: str) -> None:
    """Set the clock, and bring the kernel's random numbers apart from those of all others that resumed here."""
    time.clock_settime(time.CLOCK_REALTIME, seconds)
    with open("/dev/urandom", "wb", buffering=0) as file:
        file.write(bytes.fromhex(random_bytes))
        fcntl.ioctl(file, _RESEED)


def mount(modules: list[str]) -> None:
    for module in modules:
        subprocess.run(["insmod", module], check=True)
    deadline = time.monotonic() + 30
    while not Path("/dev/pmem0").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("no /dev/pmem0")
        time.sleep(0.01)
    subprocess.run(["mount", "-t", "ext4", "-o", "dax=always", "/dev/pmem0", MOUNT], check=True)


def elements_of(step: int) -> int:
    """States of 32 to 256 KiB in turn: slots grow and are used again."""
    return 4096 << (max(step, 0) // 8 % 4)


def engine_on(store: Path, **settings: Any) -> SyncCheckpointEngine:
    return SyncCheckpointEngine(store, **engine_settings(medium="auto", **settings))


def examine() -> int:
    """Return the newest step, -1 for none. Raises where anything that is committed is not whole."""
    try:
        found = load_sync(STORE)
    except NoCheckpointError:
        return -1
    step = int(found["step"])
    assert is_whole(found, elements_of(step)), f"the state of step {step} is not whole"
    checked = stores.verify(STORE, every=True).checkpoints
    assert not any(each.damage for each in checked), checked
    assert list_checkpoints(STORE)[0].step == step
    return step


def examine_shelf() -> int:
    """Return the number of the newest transaction, -1 for none. Raises where it is there in part."""
    if not SHELF.exists():
        return -1
    with Shelf(SHELF) as shelf:
        assert shelf.kind == "persistent", shelf.kind
        if "number" not in shelf:
            return -1
        number: int = shelf.number
        assert all((array == number).all() for array in shelf.arrays), f"transaction {number} is there in part"
        assert not shelf.verify(), shelf.verify()
        return number


def transact(shelf: Shelf, number: int) -> None:
    """Change arrays of 4 to 256 KiB in place and a number, in one transaction."""
    if "arrays" not in shelf:
        shelf["arrays"] = [torch.full((1024 << each,), float(number)) for each in range(0, 8, 2)]
    with shelf.transaction("arrays"):
        for array in shelf.arrays:
            array.fill_(number)
        shelf["number"] = number


def live() -> None:
    """Say what is there, save and change a shelf until the guest is killed."""
    step, number = examine(), examine_shelf()
    say("restored", step, number)
    with Shelf(SHELF, 4 << 20) as shelf, engine_on(STORE, max_in_flight=2, keep_last=2, chunk_bytes=64 << 10) as engine:
        chosen = engine.statistics().io
        assert "MAP_SYNC" in chosen, chosen
        waiting: list[Any] = []
        while True:
            step += 1
            waiting.append(engine.checkpoint(state_of(step, elements_of(step)), step=step))
            if len(waiting) == 2:
                say("durable", waiting.pop(0).result().step)
            number += 1
            transact(shelf, number)
            say("kept", number)


def look() -> None:
    """Say what is there, and leave the filesystem clean."""
    say("restored", examine(), examine_shelf())
    subprocess.run(["umount", MOUNT], check=True)
    say("unmounted")


def test() -> None:
    """Run the tests in C and the conformance checks, and count system calls."""
    say("kind", kind_of_folder(MOUNT))
    for program in sorted(Path("/guest/programs").iterdir()):
        done = subprocess.run([program, MOUNT], check=False, capture_output=True, text=True)
        say("program", program.name, done.returncode, (done.stdout + done.stderr).splitlines())
    for check in MEDIUM_CHECKS:
        folder = MOUNT / "conformance"
        made: list[Operations] = []

        async def make(folder: Path = folder, made: list[Operations] = made) -> Medium:
            made.append(NativeOperations(io_threads=1, copy_threads=1))
            return MappedFiles(folder, made[-1])

        async def main(check: Any = check, make: Any = make, made: list[Operations] = made) -> None:
            try:
                await check(make)
            finally:
                for operations in made:
                    await operations.close()

        try:
            asyncio.run(main())
        except Exception:  # noqa: BLE001 - the next check runs all the same
            say("check", check.__name__, traceback.format_exc())
        else:
            say("check", check.__name__, "")
        shutil.rmtree(folder, ignore_errors=True)
    say("check", "a_reservation_beyond_the_filesystem_leaves_nothing", asyncio.run(reserve_too_much()))
    calls, seconds = trace_engine()
    say("calls", "engine", calls)
    say("milliseconds", "engine", seconds)
    say("calls", "medium", asyncio.run(trace_medium()))
    say("tested")


async def reserve_too_much() -> str:
    """Return what is wrong with a reservation of more than there is, "" for nothing."""
    operations = NativeOperations(io_threads=1, copy_threads=1)
    medium = MappedFiles(MOUNT / "full", operations)
    await medium.prepare(create=True)
    try:
        await medium.reserve("slot-000", 1 << 30)
    except StoreFullError:
        names = await medium.names()
        return f"{names} are left" if names else ""
    finally:
        await medium.close()
        await operations.close()
    return "1 GiB was reserved"


class Trace:
    """System calls of this process between marks, by thread and name."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    @contextmanager
    def attached(self) -> Iterator[None]:
        file = Path("/tmp/trace")
        command = ["strace", "-f", "-o", str(file), "-p", str(os.getpid())]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            said = tracer.stderr.readline()
            assert "attached" in said, said
            time.sleep(1)  # until it has all threads
            yield
            tracer.terminate()
            tracer.stderr.read()
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        between = False
        for line in file.read_text().splitlines():
            if found := re.match(r"(\d+) +(\w+)\((.*)", line):
                if '"/begin"' in found[3]:
                    between = True
                elif '"/end"' in found[3]:
                    between = False
                elif between:
                    self.calls[f"{names.get(int(found[1]), 'I/O thread')}: {found[2]}"] += 1

    @contextmanager
    def marked(self) -> Iterator[None]:
        os.access("/begin", 0)
        yield
        os.access("/end", 0)


def trace_engine() -> tuple[dict[str, int], list[float]]:
    """Count from ``checkpoint()`` to the return of ``result()``, for a state of 64 KiB; time it before that."""
    state = {f"t{n}": torch.rand(4096) for n in range(4)}
    trace = Trace()
    milliseconds = []
    with engine_on(MOUNT / "traced", max_in_flight=1) as engine:
        step = 0

        def save() -> None:
            nonlocal step
            for tensor in state.values():
                tensor.add_(1)
            step += 1
            with trace.marked():
                start = time.perf_counter()
                engine.checkpoint(state, step=step).result()
                milliseconds.append((time.perf_counter() - start) * 1e3)

        for _ in range(5 + TRACED):
            save()
        untraced = milliseconds[5:]
        with trace.attached():
            for _ in range(TRACED):
                save()
    return trace.calls, untraced


async def trace_medium() -> dict[str, int]:
    """Count the same for the medium alone: a payload of 64 KiB and then a record, durable one after the other."""
    operations = NativeOperations(io_threads=1, copy_threads=1)
    medium = MappedFiles(MOUNT / "alone", operations)
    trace = Trace()
    await medium.prepare(create=True)
    slot, commit = [await medium.reserve(name, 32 * PAGE_BYTES) for name in ("slot-000", "commit")]
    parts = [(slot, [(0, aligned_buffer(16 * PAGE_BYTES))]), (commit, [(0, aligned_buffer(PAGE_BYTES))])]
    for part in parts:
        await medium.make_durable([part])
    with trace.attached():
        for _ in range(TRACED):
            with trace.marked():
                for part in parts:
                    await medium.make_durable([part])
    await medium.close()
    await operations.close()
    return trace.calls


def main() -> None:
    torch.set_num_threads(1)
    say("ready", torch.__version__, platform.python_version(), platform.release())
    seconds, random_bytes, what = json.loads(sys.stdin.readline())
    try:
        wake(seconds, random_bytes)
        mount(sys.argv[1:])
        say("mounted")
        {"test": test, "live": live, "look": look}[what]()
    except BaseException:  # noqa: BLE001 - the host has to hear of it
        say("failed", traceback.format_exc())


if __name__ == "__main__":
    main()
