from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.state import Layout, PackedSource, arrange, flatten
from pccheck_async.state.leaves import ArrayLeaf, RawSource
from tests.support import state_strategies
from tests.support.round_trip import save
from tests.support.state_strategies import TORCH_DTYPES, array_bytes, difference, same, tensor_of


def laid_out(*values: Any) -> Layout:
    return arrange(flatten({"x": list(values)}).leaves)


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_a_plain_tensor_is_copied_by_address() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    layout = laid_out(tensor)
    source = layout.sources[0]
    assert isinstance(source, RawSource)
    assert (source.address, source.nbytes) == (tensor.data_ptr(), 24)
    assert layout.storage_nbytes == (24,)
    assert layout.extents.tolist() == [[0, 0, 24]]
    assert layout.source_of == (0,)


def test_aliases_are_stored_once_and_come_back_aliased() -> None:
    tensor = torch.arange(10.0)
    state = {"a": tensor, "b": tensor, "c": tensor[2:5], "d": tensor.view(2, 5), "e": tensor.view(torch.int32)}
    assert arrange(flatten(state).leaves).storage_nbytes == (40,)
    found = save(state).load()
    assert same(state, found)
    found["c"].fill_(-1)
    assert found["a"][2] == found["b"][3] == found["d"][0, 4] == -1


def test_a_small_view_does_not_drag_its_base_along() -> None:
    base = torch.zeros(100_000)
    layout = laid_out(base[5:10], base[90_000:90_007])
    assert layout.extents.tolist() == [[0, 4, 20], [0, 64, 28]]
    found = save({"a": base[5:10], "b": base[90_000:90_007]}).load()
    assert same_memory(found["a"], found["b"])


def test_ranges_that_touch_are_one() -> None:
    base = torch.zeros(30)
    assert laid_out(base[:10], base[10:30]).extents.tolist() == [[0, 0, 120]]
    assert len(laid_out(torch.zeros(4), torch.zeros(4)).storage_nbytes) == 2


def test_views_with_holes_are_packed() -> None:
    base = torch.arange(1000.0).reshape(10, 100)
    for view in (base[:, 0], base[::2, ::3], base.t()[3:5], base[:, :1].expand(10, 7)):
        layout = laid_out(view)
        assert isinstance(layout.sources[0], PackedSource)
        assert layout.storage_nbytes[0] <= view.numel() * 4
        assert same({"v": view}, save({"v": view}).load())
    layout = laid_out(base[:, 0], base[:, 0])
    assert layout.storage_nbytes == (40,)
    found = save({"a": base[:, 0], "b": base[:, 0]}).load()
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_a_view_with_holes_keeps_them_where_others_share_its_range() -> None:
    base = torch.arange(20.0)
    state = {"a": base[::2], "b": base[4:9]}
    found = save(state).load()
    assert same(state, found)
    found["b"][0] = 99
    assert found["a"][2] == 99


def test_expanded_stays_expanded() -> None:
    state = {"a": torch.arange(3.0).expand(1000, 3), "b": torch.tensor(2.0).expand(5, 6), "c": torch.zeros(2, 1)}
    assert arrange(flatten(state).leaves).storage_nbytes == (12, 4, 8)
    found = save(state).load()
    assert same(state, found)
    assert found["a"].stride() == (0, 1)
    assert found["b"].stride() == (0, 0)


def test_permuted_strides() -> None:
    images = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    state = {"t": torch.rand(3, 4).t(), "images": images}
    found = save(state).load()
    assert same(state, found)
    assert found["images"].is_contiguous(memory_format=torch.channels_last)


def test_scalars_and_empty_ones() -> None:
    state = {
        "zero": torch.tensor(3.5),
        "none": torch.empty(0),
        "shaped": torch.empty(0, 3).t(),
        "parameter": torch.nn.Parameter(torch.empty(2, 0)),
        "np": np.empty((3, 0), ">f4"),
        "np0": np.array(7),
        "text": np.array(["", ""], "<U0"),
    }
    layout = arrange(flatten(state).leaves)
    assert layout.source_of == (0, -1, -1, -1, -1, 1, layout.source_of[-1])
    assert same(state, save(state).load())


def test_conjugated_and_negated() -> None:
    value = torch.randn(3, 4, dtype=torch.complex64)
    state = {"conj": value.conj(), "neg": value.conj().imag, "one": torch.tensor(1j).conj(), "value": value}
    assert isinstance(laid_out(value.conj()).sources[0], PackedSource)
    found = save(state).load()
    for key, tensor in state.items():
        assert array_bytes(found[key]) == array_bytes(tensor)
        assert not found[key].is_conj()
        assert not found[key].is_neg()


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    tensor = tensor_of(dtype, (4, 6), bytes(range(1, 200)))
    state = {"plain": tensor, "packed": tensor_of(dtype, (6, 6), b"\xff\x7f\x01")[:, 1:4], "t": tensor.t()}
    assert not difference(state, save(state, 512).load())


@pytest.mark.parametrize("dtype", state_strategies.NUMPY_DTYPES)
def test_numpy(dtype: str) -> None:
    array: np.ndarray[Any, Any] = np.zeros(24, dtype)
    array.view(np.uint8)[:] = np.arange(array.nbytes) % 2 if dtype[-1] in "?1" else 0
    array = array.reshape(4, 6)
    state = {
        "plain": array,
        "reversed": np.array(array)[::-1, ::-2],
        "fortran": np.asfortranarray(array),
        "step": np.array(array)[:, ::2],
        "view": array[1:, 2],
        "broadcast": np.broadcast_to(np.array(array[0]), (3, 6)),
    }
    assert not difference(state, save(state).load())


def test_numpy_aliases_reversed_and_with_torch() -> None:
    array = np.arange(12, dtype=np.float32)
    state = {"a": array, "reversed": array[::-1], "torch": torch.from_numpy(array), "part": torch.from_numpy(array[3:])}
    assert arrange(flatten(state).leaves).storage_nbytes == (48,)
    found = save(state).load()
    assert same(state, found)
    found["torch"][0] = 100.0
    assert found["a"][0] == found["reversed"][-1] == 100.0


def test_numpy_steps_that_are_no_whole_items() -> None:
    record = np.zeros(5, [("a", "i1"), ("b", "<i4")])
    record["b"] = range(5)
    found = save({"b": record["b"], "a": record["a"]}).load()
    assert found["b"].tolist() == [0, 1, 2, 3, 4]
    assert found["b"].strides == (4,)


def test_unaligned_views_that_torch_cannot_make_again() -> None:
    array = np.zeros(17, np.uint8)
    words = torch.frombuffer(array.data, dtype=torch.int32, offset=1, count=4)
    assert same({"w": words}, save({"w": words}).load())
    with pytest.raises(UnsupportedStateError, match="item size"):
        save({"bytes": torch.from_numpy(array), "w": words})


def test_a_storage_that_was_freed() -> None:
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedStateError, match=r"^x\.0: .*gather"):
        laid_out(tensor)
    tensor.untyped_storage().resize_(20)
    with pytest.raises(UnsupportedStateError, match=r"40 bytes.*20"):
        laid_out(tensor)


@pytest.mark.slow
def test_sources_hold_the_storage_and_not_the_tensor() -> None:
    parameter = torch.nn.Parameter(torch.full((4,), 7.0))
    layout = laid_out(parameter)
    source = layout.sources[0]
    assert isinstance(source, RawSource)
    parameter.data = torch.zeros(4)
    assert source.owner.data_ptr() == source.address
    array = np.ones(3)
    weak = weakref.ref(array)
    layout = laid_out(array[1:])
    del array
    gc.collect()
    assert weak() is not None
    del layout
    gc.collect()
    assert weak() is None


def test_storages_lie_in_the_order_of_the_leaves() -> None:
    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    layout = laid_out(two, one, two[1:], three)
    assert layout.storage_nbytes == (8, 4, 12)


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device: its memory must not be read by address."""

    is_cpu = False


def test_other_devices_are_packed_with_their_aliases() -> None:
    tensor = torch.arange(10.0)
    views = (tensor, tensor[2:4], tensor.view(2, 5)[:, 1])
    layout = arrange([ArrayLeaf(str(n), view.as_subclass(Elsewhere), "tensor") for n, view in enumerate(views)])
    assert layout.storage_nbytes == (40,)
    source = layout.sources[0]
    assert isinstance(source, PackedSource)
    into = bytearray(40)
    source.copy(0, 40, memoryview(into))
    assert into == array_bytes(tensor)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(state_strategies.states())
def test_any_state_comes_back_to_the_bit(state: dict[str, Any]) -> None:
    found = difference(state, save(state).load())
    assert not found


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(state_strategies.tied())
def test_whatever_shares_memory_shares_it_again(views: list[Any]) -> None:
    assert not difference({"v": views}, save({"v": views}).load())


@settings(max_examples=40, deadline=None)
@given(state_strategies.tensors() | state_strategies.ndarrays(), st.data())
def test_packed_pieces(array: Any, data: st.DataObject) -> None:
    source = PackedSource(array)
    whole = array_bytes(array)
    assert source.nbytes == len(whole)
    low = data.draw(st.integers(0, len(whole)))
    high = data.draw(st.integers(low, len(whole)))
    shift = data.draw(st.integers(0, 9))
    into = bytearray(b"\xaa" * (shift + high - low + 3))
    source.copy(low, high, memoryview(into)[shift : shift + high - low])
    assert into == b"\xaa" * shift + whole[low:high] + b"\xaa" * 3


def test_packed_pieces_outside() -> None:
    source = PackedSource(torch.zeros(4))
    for low, high, room in ((0, 17, 17), (-1, 4, 5), (8, 4, 0), (0, 8, 9)):
        with pytest.raises(ValueError, match="fit"):
            source.copy(low, high, memoryview(bytearray(room)))


@pytest.mark.parametrize("shift", [0, 1])
def test_one_item_of_an_expanded_tensor(shift: int) -> None:
    """Its stride is 0, which is as good as any of one item, but not for a view of it as bytes."""
    source = PackedSource(torch.tensor([7], dtype=torch.int16).expand(3))
    into = bytearray(shift + 2)
    source.copy(2, 4, memoryview(into)[shift:])
    assert into[shift:] == b"\x07\0"
