"""What the copies between a GPU and staging memory reach, against plain copies of one pinned buffer in the same run.

Run: ``python -m tests.campaign.cuda_speed [--folder DIR] [--gib 10] [--rounds 9] [--chunk-mib 32]``. Each round
measures everything once, in turn; medians and ranges are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.paper.lab.medians import summary
from pccheck_async import StorageOptions, SyncCheckpointEngine
from pccheck_async.engine.capture import StateReader
from pccheck_async.format import crc32
from pccheck_async.state import Target, Targets
from pccheck_async.transfer import BufferPool, available_cores
from pccheck_async.transfer.copying import CopyBackend, make_backend
from pccheck_async.transfer.copying.cuda import CudaCopy
from pccheck_async.transfer.operations import NativeOperations, Operations
from pccheck_async.transfer.operations.python import PythonOperations
from pccheck_async.transfer.plan import Plan, Planner, scatter_runs

GIB, MIB = 1 << 30, 1 << 20
Figures = dict[str, list[float]]


def build(nbytes: int, tensors: int) -> dict[str, Any]:
    each = nbytes // tensors // 4
    return {"t": [torch.rand(each, device="cuda") for _ in range(tensors)]}


def plain_copies(figures: Figures, device: torch.Tensor, pinned: torch.Tensor) -> None:
    """The limit: one large buffer, there and back."""
    for name, into, source in (("D2H limit", pinned, device), ("H2D limit", device, pinned)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        into.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        figures[f"{name}, GB/s"].append(pinned.nbytes / (time.perf_counter() - start) / 1e9)


class Copies:
    """Capture and restore without a store: the copies and checksums alone."""

    def __init__(self, chunk_bytes: int) -> None:
        kind = NativeOperations if NativeOperations.available() else PythonOperations
        self.operations: Operations = kind(io_threads=1, copy_threads=min(4, max(1, available_cores() - 1)))
        self.backend: CopyBackend = make_backend(self.operations, "stream")
        assert isinstance(self.backend, CudaCopy), "this torch has no CUDA"
        self.pool = BufferPool(16 * chunk_bytes, chunk_bytes, self.backend.pinning)
        self.planner = Planner(chunk_bytes, 4096)

    async def to_host(self, state: dict[str, Any]) -> tuple[float, Plan]:
        capture = StateReader().start(state, self.backend)
        start = time.perf_counter()
        plan = await capture.begin(self.planner)

        async def one(index: int) -> None:
            lease = await self.pool.lease()
            try:
                await capture.copy(index, lease.view[: plan.chunks[index].nbytes])
            finally:
                lease.release()

        async with asyncio.TaskGroup() as group:
            for index in range(len(plan.chunks)):
                group.create_task(one(index))
        return time.perf_counter() - start, plan

    async def to_device(self, state: dict[str, Any], plan: Plan) -> float:
        """Scatter buffers of zeros to where each tensor lies; what a restore does once a chunk was read."""
        targets = Targets(
            Target(entry.offset, entry.nbytes, tensor.data_ptr(), tensor.untyped_storage(), tensor.get_device())
            for entry, tensor in zip(plan.storages, state["t"], strict=True)
        )
        leases = [await self.pool.lease() for _ in range(16)]
        for lease in leases:
            lease.view[:] = bytes(len(lease.view))
        checksums = {chunk.nbytes: crc32(leases[0].view[: chunk.nbytes]) for chunk in plan.chunks}
        free = asyncio.Queue[memoryview]()
        for lease in leases:
            free.put_nowait(lease.view)
        start = time.perf_counter()
        await self.backend.order_after(self.backend.mark_queued_work(targets.devices))

        async def one(offset: int, nbytes: int) -> None:
            view = await free.get()
            ((_, _, found),) = scatter_runs(np.array([offset, offset + nbytes]), nbytes, targets)
            await self.backend.scatter(view[:nbytes], checksums[nbytes], found, targets)
            free.put_nowait(view)

        async with asyncio.TaskGroup() as group:
            for chunk in plan.chunks:
                group.create_task(one(chunk.offset, chunk.nbytes))
        seconds = time.perf_counter() - start
        for lease in leases:
            lease.release()
        return seconds

    async def close(self) -> None:
        await self.operations.close()
        self.backend.close()
        self.pool.close()


async def measure_copies(figures: Figures, states: dict[int, dict[str, Any]], rounds: int, chunk_bytes: int) -> None:
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    copies = Copies(chunk_bytes)
    try:
        for round_number in range(-1, rounds):  # the first registers the buffers and compiles the kernel
            measured: Figures = defaultdict(list)
            plain_copies(measured, device, pinned)
            for tensors, state in states.items():
                seconds, plan = await copies.to_host(state)
                measured[f"D2H of {tensors} tensors, GB/s"].append(plan.payload_nbytes / seconds / 1e9)
                seconds = await copies.to_device(state, plan)
                measured[f"H2D of {tensors} tensors, GB/s"].append(plan.payload_nbytes / seconds / 1e9)
            plain_copies(measured, device, pinned)
            for name, (value, *more) in measured.items() if round_number >= 0 else ():
                figures[name].append(max([value, *more]))
    finally:
        await copies.close()


def measure_engine(
    figures: Figures, states: dict[int, dict[str, Any]], rounds: int, folder: Path, **knobs: Any
) -> None:
    nbytes = max(sum(tensor.nbytes for tensor in state["t"]) for state in states.values())
    for mode in ("stream", "snapshot"):
        storage = StorageOptions(gpu_capture=mode, host_memory=nbytes + GIB, skip_unchanged=False, **knobs)
        with SyncCheckpointEngine(folder / mode, max_in_flight=1, storage=storage) as engine:
            for round_number in range(-2, rounds):
                for tensors, state in states.items():
                    for tensor in state["t"]:
                        tensor.add_(1)
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    pending = engine.checkpoint(state)
                    stall = time.perf_counter() - start
                    pending.result()
                    durable = time.perf_counter() - start
                    start = time.perf_counter()
                    engine.restore(state)
                    restored = time.perf_counter() - start
                    if round_number >= 0:
                        figures[f"call to return, {mode}, {tensors} tensors, s"].append(stall)
                        figures[f"call to durable, {mode}, {tensors} tensors, s"].append(durable)
                        figures[f"restore, {mode}, {tensors} tensors, s"].append(restored)
            found = engine.statistics()
        figures[f"GPU memory, {mode}, share of the state"].append(found.device_peak_bytes / nbytes)
        print(f"{mode}: {found.snapshots} snapshots; {found.decisions.reasons['gpu_capture']}; {found.io}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--gib", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunk-mib", type=int, default=32)
    parser.add_argument("--no-engine", action="store_true", help="the copies alone: nothing is written to storage")
    args = parser.parse_args()
    nbytes, chunk_bytes = int(args.gib * GIB), args.chunk_mib * MIB
    states = {tensors: build(nbytes, tensors) for tensors in (50, 10_000)}
    figures: Figures = defaultdict(list)
    asyncio.run(measure_copies(figures, states, args.rounds, chunk_bytes))
    if not args.no_engine:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measure_engine(figures, states, args.rounds, Path(folder), chunk_bytes=chunk_bytes)
    print(torch.cuda.get_device_name(), torch.__version__, f"{args.gib} GiB, chunks of {args.chunk_mib} MiB")
    for name, values in figures.items():
        print(summary(name, values))


if __name__ == "__main__":
    main()
