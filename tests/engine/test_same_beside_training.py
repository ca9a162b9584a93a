"""One engine and a state that changes in every way, also while it is captured: what loads is what a fresh one saved."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from pccheck_async import CheckpointError, StorageOptions, SyncCheckpointEngine, TornCaptureError, load_sync
from pccheck_async.errors import UnsupportedStateError
from pccheck_async.testing.probe import probe
from pccheck_async.transfer import PAGE_BYTES
from tests.engine.test_same_as_fresh import Saver, flip, left_to_the_step, memory_of
from tests.support.changing_state import ChangingState
from tests.support.elsewhere import capture_at_once
from tests.support.state_strategies import difference

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    try:
        optimizer.step()
    except (KeyError, RuntimeError) as error:  # a change may have taken some of its state away, or its dtype
        if isinstance(error, CheckpointError):
            raise


def walk(folder: Path, seed: int, saves: int) -> Counter[str]:
    """Save a changing state again and again; while it is captured, change all that may change meanwhile."""
    counts: Counter[str] = Counter()
    changing = ChangingState(seed)
    rng = changing.rng
    check = bool(seed % 2)
    storage = StorageOptions(chunk_bytes=PAGE_BYTES, host_memory=2 * PAGE_BYTES, check_captures=check)
    torn: set[str] = set()
    with SyncCheckpointEngine(folder, max_in_flight=2, storage=storage) as engine:
        for number in range(saves):
            for _ in range(rng.choice([0, 1, 1, 3])):
                changing.change()
            for optimizer in changing.attached:
                engine.attach(optimizer)
            optimizers = probe(engine).core.guard.optimizers
            overlap = rng.random() < 0.6
            want = Saver().take(changing.state, None)
            if isinstance(want, str):
                with pytest.raises(UnsupportedStateError):
                    engine.checkpoint(changing.state, step=number)
                counts["refused"] += 1
                continue
            free = memory_of(want) - left_to_the_step(changing.state, optimizers)
            pending = engine.checkpoint(changing.state, step=number, overlap=overlap)
            changing.state["step"] += 1
            flip(free)  # what the forward pass may change
            for optimizer in optimizers:
                step(optimizer)
            try:
                info = pending.result(60)
            except TornCaptureError as error:  # of what had not changed so far, and no optimizer owns
                counts["torn"] += 1
                counts["again"] += not torn.isdisjoint(error.paths)
                torn.update(error.paths)
                continue
            finally:
                flip(free)
            found = load_sync(folder, io="python")
            assert info.step == number
            wrong = difference(want.saved.load(), found)
            assert not wrong, (seed, number, wrong, changing.log[-20:])
            counts["overlapped" if overlap else "plain"] += 1
    return counts


@pytest.mark.parametrize("largest_copy", [1 << 20, pytest.param(0, marks=pytest.mark.campaign)])
def test_what_loads_is_what_a_fresh_engine_saves(
    tmp_path: Path, largest_copy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_at_once(monkeypatch, largest_copy)
    counts: Counter[str] = Counter()
    for seed in range(2):
        counts += walk(tmp_path / str(seed), seed, 25)
    assert counts["overlapped"] > 15
    assert (counts["torn"] > 0) == (largest_copy == 0)
    assert not counts["again"]
    assert counts["plain"] > 10


@pytest.mark.campaign
@pytest.mark.parametrize("block", range(80))
def test_many_load_as_a_fresh_engine_saves(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    for seed in range(5 * block, 5 * block + 5):
        capture_at_once(monkeypatch, [1 << 20, 40, 0][seed % 3])
        counts += walk(tmp_path / str(seed), seed, 100)
    print(f"\nloaded like a fresh engine's: {dict(counts)}")
