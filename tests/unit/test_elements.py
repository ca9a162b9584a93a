from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pccheck_async.format import dtypes
from pccheck_async.format.manifest import TensorEntry
from pccheck_async.state import as_bits
from pccheck_async.upkeep.compare import Difference, compare_elements
from tests.support.state_strategies import NUMPY_DTYPES, TORCH_DTYPES


def entry_of(array: Any) -> TensorEntry:
    if isinstance(array, torch.Tensor):
        return TensorEntry(0, dtypes.TORCH_NAMES[array.dtype], tuple(array.shape), (1,), 0, "tensor", False)
    return TensorEntry(0, dtypes.numpy_name(array.dtype) or "", array.shape, (1,), 0, "ndarray", False)


def raw(array: Any) -> memoryview:
    if isinstance(array, torch.Tensor):
        return memoryview(as_bits(array).numpy().tobytes())
    return memoryview(array.tobytes())


def compare(one: Any, other: Any) -> Difference:
    found = Difference()
    compare_elements(entry_of(one), raw(one), raw(other), found)
    return found


def test_by_how_much() -> None:
    found = compare(torch.tensor([1.0, 2.0, -4.0]), torch.tensor([1.0, 2.5, -5.0]))
    assert found == Difference(3, 2, 2, 0, 1.0, 0.2)


def test_nan_equals_nan_and_zeros_have_signs() -> None:
    quiet = torch.tensor([0x7FC00000, 0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, 0x7FC00001, -(2**31)], dtype=torch.int32).view(torch.float32)
    assert compare(quiet, other) == Difference(3, 2, 0, 0, None, None)


def test_nan_on_one_side_and_infinities() -> None:
    found = compare(torch.tensor([math.nan, 1.0, math.inf, 3.0]), torch.tensor([1.0, math.nan, 2.0, 3.5]))
    assert (found.bits, found.values, found.nans, found.most_absolute) == (4, 4, 2, math.inf)
    assert found.most_relative == pytest.approx(0.5 / 3.5)


@pytest.mark.parametrize(
    ("one", "other", "most"),
    [
        (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), 2**64 - 1),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), 1),
        (torch.tensor([3], dtype=torch.uint8), torch.tensor([250], dtype=torch.uint8), 247),
        (torch.tensor([True]), torch.tensor([False]), 1),
        (torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16), 0.5),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), 5.0),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([3.0]).to(torch.float8_e4m3fn), 2.0),
        (np.array([1], ">i4"), np.array([258], ">i4"), 257),
        (np.array([1.0], ">f8"), np.array([1.25], ">f8"), 0.25),
        (np.array([1.0], "g"), np.array([3.0], "g"), 2.0),
    ],
)
def test_exact_differences(one: Any, other: Any, most: float) -> None:
    found = compare(one, other)
    assert (found.bits, found.values, found.most_absolute) == (1, 1, most)


def test_complex_numbers_with_the_same_infinite_part() -> None:
    """Their difference is no number, and hides no other one."""
    one = torch.tensor([complex(math.inf, 0), 1 + 1j])
    found = compare(one, torch.tensor([complex(math.inf, 1), 1 + 1.5j]))
    assert (found.values, found.most_absolute) == (2, 0.5)
    assert compare(one[:1], torch.tensor([complex(math.inf, 1)])).most_absolute is None


def test_half_complex() -> None:
    entry = TensorEntry(0, "complex32", (2,), (1,), 0, "tensor", False)
    one, other = np.array([1, 1, 3, 4], np.float16), np.array([1, 1, 0, 0], np.float16)
    found = Difference()
    compare_elements(entry, raw(one), raw(other), found)
    assert found == Difference(2, 1, 1, 0, 5.0, 1.0)


def test_elements_that_are_no_numbers() -> None:
    assert compare(np.array(["ab", "c"]), np.array(["ab", "d"])) == Difference(2, 1, None, 0, None, None)
    assert compare(np.array([1], "M8[s]"), np.array([2], "M8[s]")).values is None


def test_pieces_add_up() -> None:
    found = Difference()
    one, other = torch.arange(6.0), torch.tensor([0.0, 2.0, 2.0, 3.0, 4.0, 9.0])
    for low in (0, 3):
        compare_elements(entry_of(one), raw(one[low : low + 3]), raw(other[low : low + 3]), found)
    assert found == compare(one, other) == Difference(6, 2, 2, 0, 4.0, 0.5)


@given(st.data())
def test_every_dtype(data: st.DataObject) -> None:
    """Bits are counted whatever the dtype is, and numbers never more often than bits."""
    kinds: list[Any] = [*TORCH_DTYPES, *NUMPY_DTYPES]
    kind = data.draw(st.sampled_from(kinds))
    if isinstance(kind, str):
        size = np.dtype(kind).itemsize
        entry = TensorEntry(0, np.dtype(kind).str, (4,), (1,), 0, "ndarray", False)
    else:
        size = kind.itemsize
        entry = TensorEntry(0, dtypes.TORCH_NAMES[kind], (4,), (1,), 0, "tensor", False)
    one, other = (data.draw(st.binary(min_size=4 * size, max_size=4 * size)) for _ in range(2))
    found = Difference()
    compare_elements(entry, memoryview(one), memoryview(other), found)
    differ = [one[n : n + size] != other[n : n + size] for n in range(0, 4 * size, size)]
    assert (found.total, found.bits) == (4, sum(differ))
    assert found.values is None or found.values <= found.bits
    same = Difference()
    compare_elements(entry, memoryview(one), memoryview(one), same)
    assert same == Difference(4)
