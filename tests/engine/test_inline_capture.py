"""Inline captures: all of a small state, as it goes to storage."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async.engine import InlineCaptures
from pccheck_async.state import Layout, PackedSource, arrange, flatten
from pccheck_async.transfer.operations import Operations
from pccheck_async.transfer.plan import Planner
from tests.fixtures import BACKENDS
from tests.support.round_trip import parts

MOST = 32 << 10


def laid_out(state: dict[str, Any]) -> Layout:
    return arrange(flatten(state).leaves)


def state_of(seed: int) -> dict[str, Any]:
    """Kinds that are read in different ways, with gaps between them."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(1001, generator=generator)
    return {
        "weights": weights,
        "view": weights[10:20],
        "turned": torch.randn(3, 5, generator=generator).T,
        "conjugate": torch.randn(3, dtype=torch.complex64, generator=generator).conj(),
        "backwards": np.arange(7 + seed, 0, -1, dtype=np.int16)[::-1],
        "byte": torch.tensor([seed], dtype=torch.uint8),
        "empty": torch.empty(0),
    }


@pytest.fixture
def operations(io: str) -> Iterator[Callable[[int], InlineCaptures]]:
    with asyncio.Runner() as runner:

        async def create() -> Operations:
            return BACKENDS[io](io_threads=1, copy_threads=1)

        found = runner.run(create())
        yield lambda chunk: InlineCaptures(found, Planner(chunk, 4096), MOST)
        runner.run(found.close())


def expected(layout: Layout, nbytes: int) -> bytes:
    """Every source where the plan says, and zeros."""
    found = bytearray(nbytes)
    plan = Planner(1 << 20, 4096).plan(layout)
    for part in parts(plan.chunks[0]):
        source = layout.sources[part.source]
        low, high = part.source_offset, part.source_offset + part.length
        into = memoryview(found)[part.buffer_offset : part.buffer_offset + part.length]
        if isinstance(source, PackedSource):
            source.copy(low, high, into)
        else:
            into[:] = ctypes.string_at(source.address, source.nbytes)[low:high]
    return bytes(found)


def test_a_capture_is_what_the_plan_says(operations: Callable[[int], InlineCaptures]) -> None:
    captures = operations(1 << 20)
    for seed in range(3):
        state = state_of(seed)
        layout = laid_out(state)
        capture = captures.capture(layout)
        assert capture is not None
        data = bytes(capture.buffer[: capture.entry.nbytes])
        assert data == expected(layout, len(data))
        assert (capture.entry.offset, capture.entry.nbytes) == (0, capture.plan.payload_nbytes)
        assert capture.entry.checksum == zlib.crc32(data)
        assert len(capture.buffer) >= len(data) + 4096, "else there is no room for a manifest"
        capture.buffer[:] = b"?" * len(capture.buffer)  # what the next one must not keep
        capture.free.append(capture.buffer)


def test_what_is_not_captured_inline(operations: Callable[[int], InlineCaptures]) -> None:
    captures = operations(1 << 20)
    assert captures.capture(laid_out({"a": torch.zeros(MOST, dtype=torch.uint8)})) is not None
    assert captures.capture(laid_out({"a": torch.zeros(MOST + 1, dtype=torch.uint8)})) is None
    assert captures.capture(laid_out({"a": [torch.zeros(1) for _ in range(65)]})) is None
    assert captures.capture(laid_out({"a": torch.empty(0), "b": 1})) is None
    assert operations(4096).capture(laid_out({"a": torch.zeros(5000, dtype=torch.uint8)})) is None, "two chunks"


def test_a_buffer_is_used_again_when_it_was_given_back_and_not_before(
    operations: Callable[[int], InlineCaptures],
) -> None:
    captures = operations(1 << 20)
    layouts = [laid_out({"a": torch.full((1000,), seed, dtype=torch.uint8)}) for seed in range(3)]
    one, other = captures.capture(layouts[0]), captures.capture(layouts[1])
    assert one is not None
    assert other is not None
    assert bytes(one.buffer[:1000]) == bytes(1000)
    assert bytes(other.buffer[:1000]) == b"\1" * 1000
    one.free.append(one.buffer)
    third = captures.capture(layouts[2])
    assert third is not None
    assert third.buffer is one.buffer
    assert bytes(other.buffer[:1000]) == b"\1" * 1000


def test_there_are_as_many_buffers_as_are_wanted(operations: Callable[[int], InlineCaptures]) -> None:
    captures = operations(1 << 20)
    layout = laid_out({"a": torch.zeros(1000, dtype=torch.uint8)})
    for _ in range(2):
        made = [captures.capture(layout) for _ in range(11)]
        for number, capture in enumerate(made):
            assert capture is not None
            capture.buffer[:] = bytes([number]) * len(capture.buffer)
        for number, capture in enumerate(made):
            assert capture is not None
            assert {*capture.buffer} == {number}
            capture.free.append(capture.buffer)


def test_several_threads_capture_states_that_differ(operations: Callable[[int], InlineCaptures]) -> None:
    captures = operations(1 << 20)
    wrong: list[str] = []

    def make(seed: int) -> None:
        layout = laid_out(state_of(seed))
        want = expected(layout, Planner(1 << 20, 4096).plan(layout).payload_nbytes)
        for _ in range(200):
            capture = captures.capture(layout)
            if capture is None or bytes(capture.buffer[: capture.entry.nbytes]) != want:
                wrong.append(f"of {seed}")
            if capture is not None:
                capture.free.append(capture.buffer)

    threads = [threading.Thread(target=make, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
