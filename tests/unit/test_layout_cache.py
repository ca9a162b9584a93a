from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import setitem
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.format import dtypes
from pccheck_async.state import Layout, LayoutCache, cached_layout, flatten_unchecked
from pccheck_async.state.cache import layout_cache
from pccheck_async.state.leaves import Leaves, RawSource
from pccheck_async.state.storages import lay_out
from tests.support import state_strategies
from tests.support.state_strategies import tensor_of

by_print = pytest.mark.skipif(
    layout_cache.look is None or layout_cache.DLPACK_API is None, reason="not with this torch, or without the extension"
)
COMPARISONS = [pytest.param(True, marks=by_print), False]
"""What tensors are as DLPack tells it, and property by property."""


@contextmanager
def comparing(by_dlpack: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not by_dlpack:
            patch.setattr(layout_cache, "look", None)
        yield


def leaves_of(*values: Any) -> Leaves:
    return flatten_unchecked({"x": list(values)}).leaves


def remembered(*values: Any) -> LayoutCache:
    _, layout_cache = cached_layout(leaves_of(*values))
    assert layout_cache is not None
    return layout_cache


def contents(layout: Layout) -> list[Any]:
    """What a capture would copy; host memory only where its owner is held."""
    found = []
    for source in layout.sources:
        if isinstance(source, RawSource):
            owners = source.owner if type(source.owner) is tuple else (source.owner,)
            for owner in owners:
                assert isinstance(owner, (torch.UntypedStorage, np.ndarray))
            if isinstance(owners[0], torch.UntypedStorage) and len(owners) == 1:
                low = owners[0].data_ptr()
                assert low <= source.address <= source.address + source.nbytes <= low + owners[0].nbytes()
            found.append(ctypes.string_at(source.address, source.nbytes))
        else:
            into = bytearray(source.nbytes)
            source.copy(0, source.nbytes, memoryview(into))
            found.append(bytes(into))
    return found


def difference(one: Layout, other: Layout) -> str:
    """What two layouts differ in; empty where they would be captured and come back alike."""
    for name in ("tensors", "storage_nbytes", "source_of"):
        if getattr(one, name) != getattr(other, name):
            return f"{name}: {getattr(one, name)} became {getattr(other, name)}"
    if one.extents.tolist() != other.extents.tolist():
        return f"extents: {one.extents} became {other.extents}"
    if one.sources.devices != other.sources.devices:
        return "devices"
    if one.sources.addresses.tolist() != other.sources.addresses.tolist():
        return "addresses"
    if [source.nbytes for source in one.sources] != [source.nbytes for source in other.sources]:
        return "lengths of the sources"
    return "" if contents(one) == contents(other) else "contents"


def attempt(leaves: Leaves, last: LayoutCache | None) -> tuple[Layout | None, LayoutCache | None, str]:
    try:
        layout, layout_cache = cached_layout(leaves, last)
    except UnsupportedStateError as error:
        return None, last, str(error)
    return layout, layout_cache, ""


# -- whatever happens between two saves, the next one is laid out as if it were the first


@st.composite
def live(draw: st.DrawFn) -> list[Any]:
    """Tensors that can be mutated, views of them, and some of everything else."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex64, torch.int64]))
    found: list[Any] = []
    for _ in range(draw(st.integers(1, 4))):
        tensor = tensor_of(dtype, (draw(st.integers(1, 3)), draw(st.integers(0, 4))), draw(st.binary(max_size=20)))
        found.append(torch.nn.Parameter(tensor, dtype.is_floating_point) if draw(st.booleans()) else tensor)
        if draw(st.booleans()):
            found.append(tensor.view(-1)[draw(st.integers(0, 2)) :: draw(st.integers(1, 2))])
    others = state_strategies.tensors() | state_strategies.ndarrays()
    return found + draw(st.lists(others, max_size=3)) + draw(st.just([]) | state_strategies.tied())


def assign(tensor: torch.Tensor, other: torch.Tensor) -> None:
    tensor.data = other


def borrowed(value: Any) -> bool:
    """Whether a value is an array in the memory of a tensor."""
    root = value
    while isinstance(root, np.ndarray):
        root = root.base
    return isinstance(value, np.ndarray) and root is not None


def resize(values: list[Any], n: int, change: Callable[[int], int]) -> None:
    if not any(map(borrowed, values)):  # they would dangle
        storage = values[n].untyped_storage()
        storage.resize_(change(storage.nbytes()))


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Minus a tensor, by a bit on a view of it."""
    if tensor.dtype is not torch.float32:
        raise TypeError("torch cannot negate every dtype")
    return torch._neg_view(tensor)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.numel() + 8, dtype=tensor.dtype)[5 : 5 + tensor.numel()].view(tensor.shape)


Change = Callable[[list[Any], int, torch.Tensor], object]
"""Of the tensor with this index; the other one is any tensor of the state."""

MOVES: dict[str, Change] = {
    "nothing": lambda values, n, other: None,
    "its memory": lambda values, n, other: assign(values[n], values[n].data.clone()),
    "the object": lambda values, n, other: setitem(values, n, values[n].detach()),
    "the object and its memory": lambda values, n, other: setitem(values, n, values[n].detach().clone()),
    "more memory": lambda values, n, other: resize(values, n, lambda nbytes: nbytes + 4096),
}
"""What a layout does not depend on."""

CHANGES: dict[str, Change] = {
    "memory of another": lambda values, n, other: assign(values[n], other.detach()),
    "part of another": lambda values, n, other: setitem(values, n, other.detach().reshape(-1)[1:]),
    "another": setitem,
    "part of itself": lambda values, n, other: setitem(values, n, values[n].detach().reshape(-1)[1:]),
    "dtype": lambda values, n, other: setitem(values, n, values[n].detach().view(torch.int32)),
    "wider": lambda values, n, other: assign(values[n], values[n].detach().to(torch.complex128)),
    "transposed": lambda values, n, other: values[n].t_(),
    "one dimension more": lambda values, n, other: values[n].unsqueeze_(0),
    "strides alone": lambda values, n, other: setitem(values, n, values[n].detach().t().contiguous().t()),
    "fewer rows": lambda values, n, other: setitem(values, n, values[n].detach()[:1]),
    "stride of one item": lambda values, n, other: setitem(values, n, values[n].detach()[None].as_strided(
        (1, *values[n].shape), (99, *values[n].stride()))),
    "start in its storage": lambda values, n, other: setitem(values, n, shifted(values[n])),
    "autograd": lambda values, n, other: values[n].requires_grad_(not values[n].requires_grad),
    "conjugated": lambda values, n, other: setitem(values, n, values[n].detach().conj()),
    "negated": lambda values, n, other: setitem(values, n, negated(values[n].detach())),
    "freed": lambda values, n, other: resize(values, n, lambda nbytes: 0),
    "shrunk": lambda values, n, other: resize(values, n, lambda nbytes: max(nbytes - 1, 0)),
    "sparse": lambda values, n, other: setitem(values, n, values[n].detach().to_sparse()),
    "meta": lambda values, n, other: setitem(values, n, torch.empty_like(values[n], device="meta")),
    "parameter": lambda values, n, other: setitem(values, n, torch.nn.Parameter(values[n].detach(), False)),
    "numpy": lambda values, n, other: setitem(values, n, values[n].detach().numpy()),
    "gone": lambda values, n, other: values.pop(n),
    "one more": lambda values, n, other: values.insert(n, torch.zeros(3)),
    "empty": lambda values, n, other: setitem(values, n, torch.empty(0)),
    "order": lambda values, n, other: values.reverse(),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("by_dlpack", COMPARISONS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_laid_out_as_if_it_were_the_first_time(by_dlpack: bool, data: st.DataObject) -> None:
    values = data.draw(live())
    last: LayoutCache | None = None
    with comparing(by_dlpack):
        for _ in range(data.draw(st.integers(2, 4))):
            found, last, error = attempt(leaves_of(*values), last)
            expected, _, expected_error = attempt(leaves_of(*values), None)
            assert error == expected_error
            if found is None or expected is None:
                return  # some memory is gone
            assert not difference(expected, found)
            for change in data.draw(st.lists(st.sampled_from([*MOVES.values(), *CHANGES.values()]), max_size=2)):
                tensors = [number for number, value in enumerate(values) if isinstance(value, torch.Tensor)]
                if tensors:
                    n, other = (data.draw(st.sampled_from(tensors)) for _ in range(2))
                    with torch.no_grad(), suppress(RuntimeError, TypeError, IndexError, AssertionError):  # not of it
                        change(values, n, values[other])
                    if change in (CHANGES["freed"], CHANGES["shrunk"]):
                        break  # to read such a tensor, as other changes do, is not defined


def some() -> list[Any]:
    base = torch.arange(40.0)
    return [
        torch.arange(6.0).reshape(2, 3),
        torch.nn.Parameter(torch.rand(2, 3)),
        base[3:9],
        base[20:].view(4, 5).t()[1:3],
        torch.rand(4, 4)[:, 0],
        torch.rand(3, 1).expand(3, 5),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64),
        np.arange(5),
        np.arange(12)[::-2],
        np.empty((0, 2)),
    ]


@pytest.mark.parametrize("by_dlpack", COMPARISONS)
@pytest.mark.parametrize("change", MOVES)
def test_what_only_moved_is_not_laid_out_again(by_dlpack: bool, change: str) -> None:
    with comparing(by_dlpack):
        values = some()
        last = remembered(*values)
        MOVES[change](values, 0, values[1])
        found = last.reuse(leaves_of(*values))
        assert found is not None
        assert not difference(lay_out(leaves_of(*values))[0], found)


@pytest.mark.parametrize("by_dlpack", COMPARISONS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_laid_out_anew(by_dlpack: bool, change: str) -> None:
    with comparing(by_dlpack), torch.no_grad():
        values = some()
        index = 9 if change == "conjugated" else 0
        last = remembered(*values)
        CHANGES[change](values, index, values[1])
        assert last.reuse(leaves_of(*values)) is None


def test_aliases_that_come_and_go() -> None:
    one, other = torch.rand(8), torch.rand(8)
    apart = remembered(one, other)
    tied = remembered(one, one[2:])
    assert apart.reuse(leaves_of(one, one)) is None
    assert tied.reuse(leaves_of(one, other[2:])) is None
    assert tied.reuse(leaves_of(other, other[2:])) is not None
    assert tied.reuse(leaves_of(one[:], other[2:])) is None
    halves = remembered(one[:4], other[4:])
    assert halves.reuse(leaves_of(one[:4], one[4:])) is None


def test_storages_that_overlap_are_never_taken_for_what_they_were() -> None:
    array = np.zeros(16, np.uint8)
    parts = [torch.from_numpy(array[:12]), torch.from_numpy(array[8:])]
    apart = remembered(torch.zeros(12, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8))
    assert apart.reuse(leaves_of(*parts)) is None
    layout, last = cached_layout(leaves_of(*parts))
    assert last is None
    assert layout.storage_nbytes == (16,)


@pytest.mark.parametrize("by_dlpack", COMPARISONS)
def test_the_same_elements_of_another_storage(by_dlpack: bool) -> None:
    with comparing(by_dlpack):
        memory = bytearray(range(64))
        inside = torch.frombuffer(memory, dtype=torch.int32)[2:6]
        alone = torch.frombuffer(memory, dtype=torch.int32, offset=8)[:4]
        assert inside.data_ptr() == alone.data_ptr()
        assert inside.untyped_storage().data_ptr() != alone.untyped_storage().data_ptr()
        last = remembered(inside)
        assert last.reuse(leaves_of(inside)) is not None
        layout, _ = cached_layout(leaves_of(alone), last)
        assert contents(layout) == [bytes(memory[8:24])]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("by_dlpack", COMPARISONS)
def test_dtypes_are_distinguished(by_dlpack: bool) -> None:
    with comparing(by_dlpack):
        memory = torch.zeros(32, dtype=torch.uint8)
        storage = memory.untyped_storage()
        tensors = [torch.empty(0, dtype=dtype).set_(storage, 0, (2,), (1,)) for dtype in dtypes.STORABLE.values()]
        looks = [layout_cache.look_at([tensor]) for tensor in tensors]
        prints = [(each.forms, each.traits) for each in looks if each is not None]
        assert len(prints) == len(tensors)
        if by_dlpack:
            assert len({str(forms) for forms, _ in prints}) < len(prints)  # DLPack has one word for some
        for number, one in enumerate(prints):
            assert [one == other for other in prints] == [n == number for n in range(len(prints))]


def test_numpy_arrays_that_differ() -> None:
    last = remembered(np.arange(6, dtype="<i4"))
    assert last.reuse(leaves_of(np.arange(9, dtype="<i4")[3:])) is None  # in the middle of its memory
    assert last.reuse(leaves_of(np.ones(6, dtype="<i4"))) is not None
    for array in (
        np.arange(6, dtype=">i4"),
        np.arange(6, dtype="<f4"),
        np.arange(6, dtype="<i4").reshape(2, 3),
        np.arange(12, dtype="<i4")[::2],
        np.arange(6, dtype="<i4")[::-1],
        np.empty(0, "<i4"),
    ):
        assert last.reuse(leaves_of(array)) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_cannot_be_saved_is_refused_as_ever() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    values = [torch.zeros(3), torch.zeros(2, 2)]
    last = remembered(*values)
    values[0].untyped_storage().resize_(4)
    with pytest.raises(UnsupportedStateError, match=r"^x\.0: .*12 bytes.*4"):
        cached_layout(leaves_of(*values), last)
    with pytest.raises(UnsupportedStateError, match=r"^x\.1: .*to_dense"):
        cached_layout(leaves_of(torch.zeros(3), torch.zeros(2, 2).to_sparse()), last)
    with pytest.raises(UnsupportedStateError, match=r"^x\.1: .*nested"):
        cached_layout(leaves_of(torch.zeros(3), nested), last)
    with pytest.raises(UnsupportedStateError, match=r"^x\.0: .*tolist"):
        cached_layout(leaves_of(np.array([None])), remembered(np.array([1])))


def test_no_memory_is_held() -> None:
    arrays = [np.ones(4) for _ in range(4)]
    kept = [weakref.ref(array) for array in arrays]
    tensors = [torch.from_numpy(array) for array in arrays[1:]]
    values = [arrays[0][1:], tensors[0], tensors[1][::2], tensors[2][None].expand(3, 4)]
    last = remembered(*values)
    assert last.reuse(leaves_of(*values)) is not None
    del arrays, tensors, values
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_sources_hold_the_memory_that_was_there() -> None:
    values = [torch.nn.Parameter(torch.full((4,), 7.0)), torch.rand(4, 4)[:, 1], torch.ones(3)]
    last = remembered(*values)
    layout = last.reuse(leaves_of(*values))
    assert layout is not None
    before = contents(layout)
    for value in values:
        value.data = torch.zeros_like(value)
    gc.collect()
    assert contents(layout) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("by_dlpack", COMPARISONS)
def test_cuda(by_dlpack: bool) -> None:
    with comparing(by_dlpack):
        base = torch.rand(40, device="cuda")
        values = [base, base[5:9], torch.rand(4, 4, device="cuda")[:, 0], torch.rand(3), torch.rand(5, device="cuda")]
        last = remembered(*values)
        values[4] = torch.rand(5, device="cuda")
        found = last.reuse(leaves_of(*values))
        assert found is not None
        assert not difference(lay_out(leaves_of(*values))[0], found)
        assert found.sources.devices == {base.get_device()}
        assert last.reuse(leaves_of(*values[:4], values[4].cpu())) is None
