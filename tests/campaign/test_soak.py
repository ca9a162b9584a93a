"""Tens of thousands of checkpoints of a small state, and a reader beside a writer that commits as fast as it can."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import StorageOptions, SyncCheckpointEngine, load_sync


def resident() -> int:
    fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(field[1]) for field in fields if field[0] == "VmRSS:") << 10


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_tens_of_thousands_of_checkpoints(tmp_path: Path, io: str) -> None:
    state: dict[str, Any] = {"tensor": torch.zeros(10_000), "step": 0}
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io=io), max_in_flight=3, keep_last=2) as engine:  # type: ignore[arg-type]

        def run(count: int) -> tuple[int, int, int, int]:
            for step in range(count):
                state["tensor"].add_(1)
                state["step"] = step
                engine.checkpoint(state, step=step)
            engine.drain()
            files = sorted(path.name for path in tmp_path.iterdir())
            return len(os.listdir("/proc/self/fd")), threading.active_count(), resident(), len(files)

        start = time.perf_counter()
        fds, threads, memory, files = run(1000)
        later = run(23_000)
        seconds = time.perf_counter() - start
        found = engine.statistics()
    print(
        f"\n{io}: {found.durable} durable, {found.superseded} superseded in {seconds:.1f} s; "
        f"fds {fds} -> {later[0]}, threads {threads} -> {later[1]}, "
        f"RSS {memory >> 10} -> {later[2] >> 10} KiB, files {files} -> {later[3]}, slots {found.slots}"
    )
    assert (fds, threads, files) == (later[0], later[1], later[3])
    assert found.slots <= 5
    assert later[2] - memory < 8 << 20


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_a_reader_beside_a_fast_writer(tmp_path: Path, io: str) -> None:
    """Every load is whole and of one step; the writer is never held for longer than one more slot allows."""
    program = textwrap.dedent(
        """
        import sys, time, torch
        from pccheck_async import StorageOptions, SyncCheckpointEngine
        from pccheck_async.testing.probe import probe
        state = {"tensor": torch.zeros(200_000), "step": 0}
        end, worst = time.monotonic() + float(sys.argv[2]), 0.0
        with SyncCheckpointEngine(sys.argv[1], storage=StorageOptions(io=sys.argv[3])) as engine:
            step = 1
            while time.monotonic() < end:
                state["tensor"].fill_(step)
                state["step"] = step
                start = time.monotonic()
                engine.checkpoint(state, step=step)
                worst = max(worst, time.monotonic() - start)
                step += 1
            engine.drain()
            found = engine.statistics()
            waits = probe(engine).store.statistics().reader_waits
        print(found.durable, found.slots, waits, f"{worst:.3f}")
        """
    )
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"tensor": torch.zeros(200_000), "step": 0}, step=0)
    writer = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), "60", io], stdout=subprocess.PIPE, text=True
    )
    loads, last = 0, -1
    while writer.poll() is None:
        state = load_sync(tmp_path, io=io)  # type: ignore[arg-type]
        assert torch.equal(state["tensor"], torch.full((200_000,), float(state["step"])))
        assert state["step"] >= last or last < 0 or loads == 1
        last = state["step"]
        loads += 1
    output, _ = writer.communicate()
    durable, slots, waits, worst = output.split()
    print(f"\n{io}: {loads} loads beside {durable} commits; {slots} slots, {waits} waits, longest call {worst} s")
    assert writer.returncode == 0
    assert loads > 100
    assert int(slots) <= 4
