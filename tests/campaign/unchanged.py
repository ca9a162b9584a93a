"""Checkpoints of which most bytes stay the same, and of which none do, beside an engine that writes all of them.

Run: ``python -m tests.campaign.unchanged [--folder DIR] [--mib 537] [--frozen 0.94] [--pairs 10]``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from examples.paper.lab.medians import summary
from pccheck_async import StorageOptions, SyncCheckpointEngine, load_sync

PARTS = 64
WARM_UP = 6


State = dict[str, torch.Tensor]


def one_block(nbytes: int, frozen: float) -> tuple[State, State]:
    """Return a state, and those tensors of it that are trained: the last ones."""
    state = {f"t{number:02}": torch.rand(round(nbytes * frozen / PARTS / 4)) for number in range(PARTS)}
    trained = {f"u{number}": torch.rand(round(nbytes * (1 - frozen) / 8 / 4)) for number in range(8)}
    return state | trained, trained


def in_each_layer(nbytes: int, frozen: float) -> tuple[State, State]:
    """Return a state, and those tensors of it that are trained: one behind each frozen one, as adapters are."""
    elements = nbytes // PARTS // 4
    state, trained = {}, {}
    for number in range(PARTS):
        adapter = round(elements * (1 - frozen))
        state[f"t{number:02}"] = torch.rand(elements - adapter)
        state[f"t{number:02}.adapter"] = trained[f"t{number:02}.adapter"] = torch.rand(adapter)
    return state, trained


def measure(folder: Path, name: str, state: State, trained: State, pairs: int) -> None:
    """Save with one engine and the other in turns, and print what both took."""
    nbytes = sum(tensor.nbytes for tensor in state.values())
    seconds: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    written: dict[bool, list[float]] = {True: [], False: []}
    engines = {
        skips: SyncCheckpointEngine(folder / f"{name} {skips}", storage=StorageOptions(skip_unchanged=skips)).open()
        for skips in (True, False)
    }
    for turn in range(WARM_UP + pairs):
        for tensor in trained.values():
            tensor.add_(1)
        for skips in (True, False) if turn % 2 else (False, True):
            engine = engines[skips]
            before, start, spent = engine.statistics().stages["write"].nbytes, time.perf_counter(), time.process_time()
            engine.checkpoint(state, step=turn).result()
            if turn >= WARM_UP:
                seconds[skips].append(time.perf_counter() - start)
                cpu[skips].append(time.process_time() - spent)
                written[skips].append((engine.statistics().stages["write"].nbytes - before) / nbytes)
    for skips, engine in engines.items():
        engine.close()
        loaded = load_sync(engine.path)
        assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())
        word = "unchanged bytes skipped" if skips else "all bytes written"
        print(
            summary(f"{name}, {word}: share of bytes written", written[skips]),
            f"mean {statistics.mean(written[skips]):.4f}",
        )
        print(summary(f"{name}, {word}: seconds until durable", seconds[skips]))
        print(summary(f"{name}, {word}: processor seconds", cpu[skips]))
    print(summary(f"{name}: ratio of seconds", [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]))
    print(summary(f"{name}: ratio of processor seconds", [a / b for a, b in zip(cpu[True], cpu[False], strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--mib", type=int, default=537)
    parser.add_argument("--frozen", type=float, default=0.94)
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        nbytes = args.mib << 20
        share = f"{args.frozen:.0%} frozen"
        measure(Path(folder), f"{share}, in one block", *one_block(nbytes, args.frozen), args.pairs)
        measure(Path(folder), f"{share}, in each layer", *in_each_layer(nbytes, args.frozen), args.pairs)
        measure(Path(folder), "nothing frozen", *in_each_layer(nbytes, 0.0), args.pairs)


if __name__ == "__main__":
    main()
