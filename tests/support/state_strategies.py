"""Hypothesis strategies of app states, and a comparison of states to the bit."""

from __future__ import annotations

import math
import struct
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from pccheck_async.format import dtypes
from pccheck_async.state import as_bits

TORCH_DTYPES = sorted(dtypes.STORABLE.values(), key=str)
NUMPY_DTYPES = ["?", "i1", "<i4", ">i4", "u8", "f2", ">f8", "g", "c8", ">c16", "M8[ns]", "m8[D]", "S3", "<U5", "V7"]


class Thing:
    """A Stateful of the plainest kind."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.state = dict(state_dict)


# -- comparison


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal to the bit: values, types, strides of dense arrays, and who shares memory."""
    return not difference(one, other)


def difference(one: Any, other: Any, path: str = "state") -> str:
    """Where two states differ first; empty where they do not."""
    found = values_differ(one, other, path)
    if found:
        return found
    aliases, others = _aliases(one), _aliases(other)
    return "" if np.array_equal(aliases, others) else f"{path}: the arrays share memory in another way"


def values_differ(one: Any, other: Any, path: str = "state") -> str:
    """Where two states differ first, but for who shares memory."""
    if type(one) is not type(other):
        return f"{path}: {type(one).__name__} became {type(other).__name__}"
    match one:
        case torch.Tensor() | np.ndarray():
            return _array_difference(one, other, path)
        case Mapping():
            return _mapping_difference(one, other, path)
        case list() | tuple():
            if len(one) != len(other):
                return f"{path}: {len(one)} items became {len(other)}"
            found = (values_differ(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
            return next(filter(None, found), "")
        case set() | frozenset():
            return "" if sorted(map(_bits, one)) == sorted(map(_bits, other)) else f"{path}: {one} became {other}"
        case _:
            return "" if _bits(one) == _bits(other) else f"{path}: {one!r} became {other!r}"


def _mapping_difference(one: Mapping[Any, Any], other: Mapping[Any, Any], path: str) -> str:
    if [_bits(key) for key in one] != [_bits(key) for key in other]:
        return f"{path}: keys {list(one)} became {list(other)}"
    metadata = values_differ(getattr(one, "_metadata", None), getattr(other, "_metadata", None), f"{path}._metadata")
    if metadata:
        return metadata
    found = (
        values_differ(a, b, f"{path}[{key!r}]") for key, a, b in zip(one, one.values(), other.values(), strict=True)
    )
    return next(filter(None, found), "")


def _array_difference(one: Any, other: Any, path: str) -> str:
    if one.dtype != other.dtype or tuple(one.shape) != tuple(other.shape):
        return f"{path}: {one.dtype} {tuple(one.shape)} became {other.dtype} {tuple(other.shape)}"
    if isinstance(one, torch.Tensor) and one.requires_grad != other.requires_grad:
        return f"{path}: requires_grad became {other.requires_grad}"
    if array_bytes(one) != array_bytes(other):
        return f"{path}: the bytes differ"
    if _dense(one) and _steps(one) != _steps(other):
        return f"{path}: strides {_steps(one)} became {_steps(other)}"
    return ""


def array_bytes(array: Any) -> bytes:
    """The elements in C order."""
    if isinstance(array, torch.Tensor):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # complex32 is experimental
            array = array.detach().resolve_conj().resolve_neg().cpu()
        array = as_bits(array).contiguous().numpy()
    data: bytes = array.tobytes()
    return data


def _steps(array: Any) -> list[int]:
    """Strides in bytes, where they mean something."""
    strides = array.strides if isinstance(array, np.ndarray) else [s * array.element_size() for s in array.stride()]
    return [step if size > 1 else 0 for size, step in zip(array.shape, strides, strict=True)]


def _dense(array: Any) -> bool:
    if 0 in array.shape:
        return isinstance(array, torch.Tensor) and not (array.is_conj() or array.is_neg())
    steps = _steps(array)
    itemsize = array.itemsize if isinstance(array, np.ndarray) else array.element_size()
    span = itemsize + sum((size - 1) * step for size, step in zip(array.shape, steps, strict=True))
    items = math.prod(size for size, step in zip(array.shape, steps, strict=True) if step)
    lazy = isinstance(array, torch.Tensor) and (array.is_conj() or array.is_neg())
    return min(steps, default=0) >= 0 and span <= items * itemsize and not lazy


def _aliases(state: Any) -> np.ndarray[Any, Any]:
    """For every byte of every array, in order, the number of the first byte that is the same memory."""
    addresses = [_addresses(array) for array in arrays_of(state) if array_bytes(array)]
    if not addresses:
        return np.zeros(0, np.int64)
    flat = np.concatenate(addresses)
    _, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
    labels: np.ndarray[Any, Any] = first[inverse.reshape(-1)]
    return labels


def _addresses(array: Any) -> np.ndarray[Any, Any]:
    steps = _steps(array)
    itemsize = array.itemsize if isinstance(array, np.ndarray) else array.element_size()
    found = np.full(1, array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr(), np.int64)
    for size, step in zip([*array.shape, itemsize], [*steps, 1], strict=True):
        found = (found[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
    return found


def arrays_of(value: Any) -> Iterator[Any]:
    """Yield every tensor and array in a state, in order."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from arrays_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from arrays_of(item)


def _bits(value: Any) -> str:
    """A text that two plain values have in common exactly if they have the same type and bits."""
    match value:
        case float() if type(value) is float:
            return f"float {struct.pack('>d', value).hex()}"
        case complex() if type(value) is complex:
            return f"complex {struct.pack('>dd', value.real, value.imag).hex()}"
        case np.generic():
            return f"{type(value).__name__} {value.dtype.str} {value.tobytes().hex()}"
        case tuple() | frozenset():
            inner = [_bits(item) for item in value]
            return f"{type(value).__name__} {inner if isinstance(value, tuple) else sorted(inner)}"
        case int() if type(value) is int:
            return f"int {value:x}"
        case _:
            return f"{type(value).__name__} {value!r}"


# -- strategies


def floats() -> st.SearchStrategy[float]:
    """Every 64-bit pattern, NaN payloads included."""
    patterns = st.integers(0, 2**64 - 1) | st.sampled_from([0x7FF0000000000001, 0xFFF8000000000123, 1 << 63])
    return st.floats() | patterns.map(lambda bits: float(struct.unpack("<d", struct.pack("<Q", bits))[0]))


def strings() -> st.SearchStrategy[str]:
    """Text with dots, escapes and lone surrogates."""
    return st.text(st.characters(codec=None), max_size=6) | st.sampled_from(
        ["a.b", "'0'", "0", "\\", "*", "\ud800", ""]
    )


def numpy_scalars() -> st.SearchStrategy[Any]:
    """A scalar of every kind."""
    return st.sampled_from([dtype for dtype in NUMPY_DTYPES if dtype[0] != ">"]).flatmap(
        lambda dtype: st.binary(min_size=np.dtype(dtype).itemsize, max_size=np.dtype(dtype).itemsize).map(
            lambda data: _numpy(data, dtype).reshape(-1)[0]
        )
    ) | st.sampled_from([np.str_(""), np.bytes_(b""), np.bytes_(b"a\0"), np.str_("x\0"), np.bool_(True)])


def atoms() -> st.SearchStrategy[Any]:
    """Values without children."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(2**200), 2**200),
        floats(),
        st.builds(complex, floats(), floats()),
        strings(),
        st.binary(max_size=5),
        st.binary(max_size=5).map(bytearray),
        st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size),
        st.sampled_from([*dtypes.TORCH_DTYPES.values()]),
        st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
        st.sampled_from([np.dtype(name) for name in NUMPY_DTYPES]),
        numpy_scalars(),
    )


def keys() -> st.SearchStrategy[Any]:
    """What a mapping or a set may hold."""
    plain = atoms().filter(lambda value: not isinstance(value, (bytearray, np.void)) and bool(value == value))  # noqa: PLR0124
    return st.recursive(
        plain, lambda inner: st.lists(inner, max_size=2).map(tuple) | st.frozensets(inner, max_size=2), max_leaves=3
    )


def shapes(most: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Up to three small dimensions, 0-d and empty ones too."""
    return st.lists(st.integers(0, most), max_size=3).map(tuple)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    """A contiguous tensor of these bits, repeated as needed."""
    nbytes = math.prod(shape) * dtype.itemsize
    pattern = (data or b"\x5a") * (nbytes // max(len(data), 1) + 1)
    flat = torch.frombuffer(bytearray(pattern[: max(nbytes, 16)].ljust(16)), dtype=torch.uint8).clone()
    if dtype is torch.bool:
        flat &= 1
    return flat[:nbytes].clone().view(dtypes.carrier(dtype)).reshape(shape).view(dtype)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, dense or permuted, sliced with a step, expanded, conjugated or negated, or a Parameter."""
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    tensor = tensor_of(dtype, draw(shapes()), draw(st.binary(max_size=40)))
    match draw(st.integers(0, 5)):
        case 0 if tensor.ndim:
            tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
        case 1 if tensor.ndim:
            tensor = tensor[..., :: draw(st.integers(1, 3))]
        case 2:
            tensor = tensor.unsqueeze(draw(st.integers(0, tensor.ndim)))
            tensor = tensor.expand([size if size != 1 else 3 for size in tensor.shape])
        case 3 if dtype.is_complex:
            tensor = tensor.conj()
        case 4 if dtype is torch.complex64:
            tensor = tensor.conj().imag
        case 5 if dtype in (torch.float32, torch.bfloat16):
            return torch.nn.Parameter(tensor, draw(st.booleans()))
    return tensor


def _numpy(data: bytes, dtype: str) -> np.ndarray[Any, Any]:
    array = np.frombuffer(data, np.uint8).copy()
    if dtype == "?":
        array &= 1
    if "U" in dtype:
        array = (array.view("<u4") % 0xD800).view(np.uint8)  # numpy refuses what is no code point
    return array.view(dtype)


@st.composite
def ndarrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Any dtype and byte order, dense, Fortran, stepped, reversed or broadcast."""
    dtype = draw(st.sampled_from(NUMPY_DTYPES))
    shape = draw(shapes())
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    data = draw(st.binary(min_size=1, max_size=40)) * (nbytes + 1)
    array = _numpy(data[:nbytes], dtype).reshape(shape)
    match draw(st.integers(0, 4)):
        case 0:
            array = array.T
        case 1 if array.ndim:
            array = array[..., :: draw(st.sampled_from([2, 3, -1, -2]))]
        case 2:
            array = np.broadcast_to(array, (2, *shape)).copy() if draw(st.booleans()) else np.asfortranarray(array)
        case 3 if array.ndim:
            array = array[1:]
    return array


@st.composite
def tied(draw: st.DrawFn) -> list[Any]:
    """Arrays that share memory: a base, views of it, and itself again."""
    dtype = draw(st.sampled_from([dtype for dtype in TORCH_DTYPES if dtype.itemsize <= 8]))
    base = tensor_of(dtype, (draw(st.integers(8, 60)),), draw(st.binary(min_size=3, max_size=40)))
    found: list[Any] = []
    for _ in range(draw(st.integers(1, 5))):
        low = draw(st.integers(0, len(base) - 2))
        high = draw(st.integers(low + 1, len(base)))
        match draw(st.integers(0, 4)):
            case 0:
                found.append(base)
            case 1:
                found.append(base[low:high])
            case 2:
                found.append(base[low : high : draw(st.integers(1, 3))])
            case 3:
                found.append(base[: len(base) // 4 * 4].view(4, -1).t())
            case 4:
                found.append(as_bits(base)[low:high].numpy())
    return found


def _nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(keys(), inner, max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        mappings,
        mappings.map(OrderedDict),
        st.dictionaries(keys(), st.integers(), max_size=3).map(Counter),
        st.sets(keys(), max_size=3),
        st.frozensets(keys(), max_size=3),
    )


def states() -> st.SearchStrategy[dict[str, Any]]:
    """Whole app states: everything above, nested."""
    leaves = atoms() | tensors() | ndarrays() | tied()
    return st.dictionaries(strings(), st.recursive(leaves, _nest, max_leaves=8), max_size=4)
