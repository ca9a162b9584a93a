"""Whatever happened to a state between two saves: what remembers the last one saves what a fresh engine would."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pccheck_async.engine.capture import Capture, StateReader
from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format import crc32
from pccheck_async.format.manifest import VERSION, ChunkEntry, Manifest, encode_again
from pccheck_async.state.leaves import RawSource
from pccheck_async.transfer.copying import CopyBackend
from pccheck_async.transfer.operations.python import gather
from pccheck_async.transfer.plan import Plan, Planner, segments
from tests.support.changing_state import ChangingState, loads_as
from tests.support.elsewhere import capture_at_once, without_extension
from tests.support.round_trip import Saved, parts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # experimental dtypes; tensors that are resized

BACKEND = CopyBackend(None)  # type: ignore[arg-type]  # asked about devices only: nothing is copied


@dataclass
class Taken:
    """A state as a save would write it."""

    capture: Capture
    plan: Plan
    saved: Saved

    def lazy(self) -> npt.NDArray[np.bool_]:
        """Which sources are read from the live state after the call returned."""
        sources, lazy = self.capture.layout.sources, self.capture.lazy
        if lazy is None:
            return np.zeros(len(sources), np.bool_)
        owned = np.zeros(len(sources), np.bool_) if sources.owned is None else sources.owned
        return ~owned if lazy.eager is None else ~owned & ~lazy.eager


class Saver:
    """All parts of an engine that remember how a state was made."""

    def __init__(self) -> None:
        self._captures, self._planner = StateReader(), Planner(512, 512)

    def take(self, state: dict[str, Any], optimizers: list[torch.optim.Optimizer] | None) -> Taken | str:
        """Take a state; the error's text where it is refused."""
        try:
            capture = self._captures.start(state, BACKEND, optimizers)
        except UnsupportedStateError as error:
            return str(error)
        plan = self._planner.plan(capture.layout)
        payload = captured(capture, plan)
        chunks = [(chunk.offset, chunk.nbytes) for chunk in plan.chunks]
        manifest = Manifest(
            version=VERSION,
            counter=1,
            step=1,
            time=1.0,
            metadata={},
            skeleton=capture.skeleton,
            tensors=capture.layout.tensors,
            storages=plan.storages,
            chunks=tuple(ChunkEntry(at, nbytes, crc32(payload[at : at + nbytes])) for at, nbytes in chunks),
            payload_nbytes=plan.payload_nbytes,
        )
        return Taken(capture, plan, Saved(encode_again(manifest, capture.layout.known), payload))


def captured(capture: Capture, plan: Plan) -> bytearray:
    """What a capture that runs now would write."""
    payload = bytearray(plan.payload_nbytes)
    for chunk in plan.chunks:
        buffer = memoryview(payload)[chunk.offset : chunk.offset + chunk.nbytes]
        found = segments(chunk, capture.layout.sources)
        gather(found.host, buffer)
        for source, low, high, offset in found.packed:
            source.copy(low, high, buffer[offset : offset + high - low])
    return payload


def changes_before_the_step(state: dict[str, Any], optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Parameters that the forward pass changes."""
    table = state["model"].table
    return [] if table.max_norm is None else [table.weight]


def addresses(tensors: list[torch.Tensor]) -> set[int]:
    """Every byte of every element."""
    found: set[int] = set()
    for tensor in tensors:
        starts = np.zeros(1, np.int64) + (tensor.data_ptr() if tensor.numel() else 0)
        for size, step in zip(tensor.shape, tensor.stride(), strict=True):
            starts = (starts[:, None] + np.arange(size) * step * tensor.element_size()).reshape(-1)
        for start in starts.tolist():
            found.update(range(start, start + tensor.element_size()))
    return found


def left_to_the_step(state: dict[str, Any], optimizers: list[torch.optim.Optimizer]) -> set[int]:
    """The memory that nothing changes before the step of an attached optimizer: as the design has it, not the code."""
    only_there = [parameter for parameter in state["model"].parameters() if not parameter.requires_grad]
    for optimizer in optimizers:
        only_there += [parameter for group in optimizer.param_groups for parameter in group["params"]]
        only_there += [
            value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, torch.Tensor)
        ]
    return addresses(only_there) - addresses(changes_before_the_step(state, optimizers))


def check_left(taken: Taken, state: dict[str, Any], optimizers: list[torch.optim.Optimizer]) -> None:
    """Nothing that may change before the capture ended is left to it; what was copied is a copy."""
    sources = taken.capture.layout.sources
    allowed = left_to_the_step(state, optimizers)
    lazy = taken.lazy()
    for number in np.flatnonzero(lazy & (sources.lengths > 0)).tolist():
        source = sources[number]
        assert isinstance(source, RawSource), "what is packed is never left"
        assert allowed.issuperset(range(source.address, source.address + source.nbytes)), number
    fresh = Saver().take(state, None)
    assert isinstance(fresh, Taken)
    free = memory_of(fresh) - allowed
    flip(free)
    after = captured(taken.capture, taken.plan)
    flip(free)
    out_of_reach = lazy if sources.owned is None else lazy | sources.owned
    for chunk in taken.plan.chunks:
        for part in parts(chunk):
            if out_of_reach[part.source]:
                place = slice(chunk.offset + part.buffer_offset, chunk.offset + part.buffer_offset + part.length)
                assert taken.saved.payload[place] == after[place]


def memory_of(taken: Taken) -> set[int]:
    """Every byte that is copied by address, holes between elements included."""
    sources = (source for source in taken.capture.layout.sources if isinstance(source, RawSource))
    return {address for source in sources for address in range(source.address, source.address + source.nbytes)}


def flip(where: set[int]) -> None:
    for address in where:
        byte = ctypes.c_uint8.from_address(address)
        byte.value ^= 0xFF


class Walk:
    """Saves of one changing state, each compared with a fresh one's.

    Attributes:
        counts: Saves, refusals, overlapped ones, sources left to the step.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self._changing = ChangingState(seed)
        self._saver = Saver()

    def run(self, saves: int) -> None:
        rng = self._changing.rng
        for _ in range(saves):
            self._changing.log.append("--")
            for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
                self._changing.change()
            overlap = rng.random() < 0.4
            try:
                self.save(self._changing.attached if overlap else None, decode=rng.random() < 0.2)
            except BaseException as error:
                error.add_note(f"seed {self.seed}: {self._changing.log[-40:]}")
                raise

    def save(self, optimizers: list[torch.optim.Optimizer] | None, *, decode: bool) -> None:
        state = self._changing.state
        found, expected = self._saver.take(state, optimizers), Saver().take(state, optimizers)
        self.counts["saves"] += 1
        if isinstance(expected, str) or isinstance(found, str):
            assert found == expected
            self.counts["refused"] += 1
            return
        assert found.saved == expected.saved
        if optimizers is not None:
            self.counts["overlapped"] += 1
            self.counts["left to the step"] += int(found.lazy().sum())
            check_left(found, state, optimizers)
        if decode:
            self.counts["loaded"] += 1
            assert not loads_as(state, found.saved.load())


def walks(seeds: range, saves: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        walk = Walk(seed)
        walk.run(saves)
        counts += walk.counts
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("largest_copy", [1 << 20, pytest.param(40, marks=pytest.mark.campaign)])
def test_saved_as_a_fresh_engine_would(largest_copy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_at_once(monkeypatch, largest_copy)
    counts = walks(range(6), 40)
    assert counts["saves"] == 240
    assert min(counts[name] for name in ("overlapped", "loaded", "left to the step")) > 20
    assert counts["refused"] < 80


@pytest.mark.campaign
@pytest.mark.parametrize("block", range(120))
def test_many_saved_as_a_fresh_engine_would(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    for seed in range(1000 + 10 * block, 1010 + 10 * block):
        capture_at_once(monkeypatch, [1 << 20, 40, 0][seed % 3])
        if seed % 5 == 0:
            without_extension(monkeypatch)
        counts += walks(range(seed, seed + 1), 200)
        monkeypatch.undo()
    print(f"\nsaved like a fresh engine: {dict(counts)}")
