from __future__ import annotations

import copy
import ctypes
import random
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import StorageOptions, SyncCheckpointEngine, load_sync
from pccheck_async.engine.capture import StateReader
from pccheck_async.errors import UnsupportedStateError
from pccheck_async.state import arrange, flatten
from pccheck_async.state.cache import layout_cache
from pccheck_async.state.cache.layout_cache import DLPACK_API
from pccheck_async.state.leaves import RawSource
from pccheck_async.transfer.copying import CopyBackend
from tests.support.state_strategies import difference
from tests.unit.test_tree_cache import step as train
from tests.unit.test_tree_cache import trained

try:
    from pccheck_async import _ext
except ImportError:
    _ext = None  # type: ignore[assignment]

BACKEND = CopyBackend(None)  # type: ignore[arg-type]  # asked about devices only: nothing is copied

needs_extension = pytest.mark.skipif(_ext is None, reason="the C extension was not built here")
needs_dlpack = pytest.mark.skipif(_ext is None or DLPACK_API is None, reason="no extension, or torch before 2.10")


def frozen(state: dict[str, Any]) -> dict[str, Any]:
    """What loading the state is to give."""
    plain: dict[str, Any] = {}
    for key, value in state.items():
        plain[key] = copy.deepcopy(value.state_dict() if hasattr(value, "state_dict") else value)
    return plain


def test_every_save_of_a_changing_state_comes_back(tmp_path: Path) -> None:
    state = trained()
    model, optimizer = state["model"], state["optimizer"]
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(io="python")) as engine:
        for step in range(6):
            match step:
                case 1 | 2:  # as it was, with other values
                    train(model, optimizer)
                case 3:  # other memory
                    for parameter in model.parameters():
                        parameter.data = parameter.data.clone() + 1
                case 4:  # tied, and not what it was
                    model[2].weight.requires_grad_(False)
                    model[0].bias = model[1].bias
                case 5:
                    state["more"] = [torch.rand(2, 2).t(), 2.5]
            expected = frozen(state)
            engine.checkpoint(state, step=step).result()
            assert not difference(expected, load_sync(tmp_path, step=step))


def test_a_refused_state_spoils_nothing() -> None:
    captures = StateReader()
    state = trained()
    first = captures.start(state, BACKEND)
    with pytest.raises(UnsupportedStateError, match="object"):
        captures.start({**state, "bad": object()}, BACKEND)
    with pytest.raises(UnsupportedStateError, match="to_dense"):
        captures.start({**state, "rng": torch.zeros(2).to_sparse()}, BACKEND)
    assert captures.start(state, BACKEND).layout.tensors == first.layout.tensors
    assert captures.start(state, BACKEND).layout.tensors is captures.start(state, BACKEND).layout.tensors


@pytest.mark.slow
def test_snapshots_of_several_threads() -> None:
    captures = StateReader()
    states = [{"t": [torch.full((n + 1,), float(n)) for _ in range(40)], "n": n} for n in range(3)]
    wrong: list[str] = []

    def take(state: dict[str, Any]) -> None:
        for _ in range(60):
            capture = captures.start(state, BACKEND)
            for source, tensor in zip(capture.layout.sources, state["t"], strict=True):
                assert isinstance(source, RawSource)
                if (source.address, source.nbytes) != (tensor.data_ptr(), tensor.nbytes):
                    wrong.append(f"{source} of {tensor}")
            if capture.skeleton != flatten(state).skeleton:
                wrong.append(f"{capture.skeleton}")
            if capture.layout.tensors != arrange(flatten(state).leaves).tensors:
                wrong.append(f"{capture.layout.tensors}")

    threads = [threading.Thread(target=take, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- what DLPack tells


def forms_of(tensors: Any, api: object = DLPACK_API) -> bytes:
    forms, *_ = _ext.look(api, tensors, layout_cache.CALLS)
    return forms


@needs_dlpack
def test_forms_are_told_one_behind_the_other() -> None:
    rows = [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.tensor(1.0), torch.zeros(1, 3).as_strided((1, 3), (7, 1))]
    forms = [forms_of([row]) for row in rows]
    assert len(set(forms)) == 4
    assert [len(form) for form in forms] == [48, 48, 16, 48]
    assert forms_of(rows) == b"".join(forms)
    assert forms_of([]) == b""
    numbers = memoryview(forms[3][16:]).cast("q").tolist()
    assert numbers == [1, 3, 7, 1]


@needs_dlpack
def test_many_tensors_are_seen_as_each_by_itself() -> None:
    """A look goes over its tensors in blocks."""
    complex_ones = torch.randn(3, dtype=torch.complex64)
    kinds = [
        *(torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(4)[1:], torch.tensor(1.0), torch.zeros(0)),
        *(torch.zeros(2, requires_grad=True), torch._neg_view(torch.zeros(2)), complex_ones, complex_ones.conj()),
        *(torch.zeros(3, dtype=dtype) for dtype in (torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn)),
    ]
    tensors = random.Random(0).choices(kinds, k=1000)
    *tables, storages = _ext.look(DLPACK_API, tensors, layout_cache.CALLS)
    each = [_ext.look(DLPACK_API, [tensor], layout_cache.CALLS) for tensor in tensors]
    for table, rows in zip(tables, zip(*each, strict=True), strict=False):
        assert table == b"".join(rows)
    assert [one.data_ptr() for one in storages] == [tensor.untyped_storage().data_ptr() for tensor in tensors]


@needs_dlpack
def test_the_list_may_be_emptied_by_code_of_the_user() -> None:
    tensors = [torch.zeros(2) for _ in range(1000)]

    def untyped_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
        tensors.clear()
        return tensor.untyped_storage()

    _, _, memory, storages = _ext.look(DLPACK_API, tensors, (untyped_storage, *layout_cache.CALLS[1:]))
    assert len(storages) == 1000
    assert memoryview(memory).cast("q").tolist()[::2] == [one.data_ptr() for one in storages]


@needs_dlpack
def test_what_dlpack_cannot_tell_is_an_error() -> None:
    for tensor in (
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(1, dtype=torch.int8).view(torch.qint8),
    ):
        with pytest.raises(RuntimeError):
            forms_of([torch.zeros(1), tensor])
    wrong: list[tuple[Any, Any]] = [(None, []), (DLPACK_API, ()), (DLPACK_API, None)]
    for api, tensors in wrong:
        with pytest.raises((TypeError, ValueError)):
            forms_of(tensors, api)


class _Exchange(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("functions", ctypes.c_void_p * 5),
    ]


@needs_extension
@pytest.mark.parametrize("majors", [(2,), (0,), (3, 2), (3, 0)])
def test_other_versions_are_refused(majors: tuple[int, ...]) -> None:
    """Also through the chain of older versions, and where the function is missing."""
    made = [_Exchange(major, 0, None) for major in majors]
    for newer, older in pairwise(made):
        newer.older = ctypes.addressof(older)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = b"dlpack_exchange_api"
    capsule = new(ctypes.addressof(made[0]), name, None)
    with pytest.raises(NotImplementedError):
        forms_of([], capsule)
    made[0].major = 1  # but tells nothing
    with pytest.raises(NotImplementedError):
        forms_of([], capsule)
