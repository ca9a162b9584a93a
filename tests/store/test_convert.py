"""Export and import: equal in every bit for those who read without this package, and nothing dropped in silence."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import json
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from typer.testing import CliRunner

from pccheck_async import (
    NoCheckpointError,
    RNGState,
    StateMismatchError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    stores,
)
from pccheck_async.api import Connection
from pccheck_async.cli import app
from pccheck_async.convert import dcp_reading, pickled_values, target, torch_file
from pccheck_async.convert.safetensors_file import parts
from pccheck_async.convert.target import new_file, new_folder
from pccheck_async.errors import (
    CorruptStoreError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    UnsupportedStateError,
    WriteError,
)
from pccheck_async.format import dtypes
from pccheck_async.format.manifest import TensorEntry
from pccheck_async.format.record import MOST_ENTRIES
from pccheck_async.testing import CrashDisk, CrashWriter
from tests.support import state_strategies
from tests.support.state_strategies import array_bytes, difference
from tests.support.warm import run_warm

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "machine_asked_once")
CHUNK = 4096
runner = CliRunner()


def save(path: Path, state: Mapping[str, Any], step: int = 7, **options: Any) -> None:
    with SyncCheckpointEngine(path, storage=StorageOptions(chunk_bytes=CHUNK), **options) as engine:
        engine.checkpoint(state, step=step, metadata={"loss": 0.5}).result(60)


def training_state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 30)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": RNGState(), "step": 7}


def odd_state() -> dict[str, Any]:
    """Every kind of tensor that all formats can express."""
    base = torch.arange(5000.0)
    tied = torch.nn.Parameter(torch.randn(20, 30, generator=torch.Generator().manual_seed(0)))
    nan = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000], dtype=torch.int64).to(torch.int32).view(torch.float32)
    return {
        "bf16": torch.randn(33, 7).to(torch.bfloat16),
        "fp8": torch.randn(100).to(torch.float8_e4m3fn),
        "e5m2": torch.randn(5, 5).to(torch.float8_e5m2),
        "bool": torch.rand(77) > 0.5,
        "complex": torch.randn(9, dtype=torch.complex64),
        "u64": torch.tensor([2**63, 1], dtype=torch.uint64),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "nan": nan,
        "tied": {"one": tied, "other": tied},
        "views": [base, base[1000:2000], base[::2]],
        "transposed": torch.arange(7000, dtype=torch.int16).reshape(70, 100).t(),
        "expanded": torch.arange(3).reshape(3, 1).expand(3, 4),
        "frozen": torch.nn.Parameter(torch.ones(4), requires_grad=False),
    }


# -- read without this package

_READ = """
import sys
sys.modules |= dict.fromkeys([name for name in sys.modules if name.startswith("pccheck")])  # cannot be imported
import hashlib, json, torch
def digest(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    data = b"" if not flat.numel() else bytes(flat.view(torch.uint8).numpy())
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]
def walk(value, path=""):
    if isinstance(value, torch.Tensor):
        yield path, digest(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from walk(item, f"{path}.{number}")
def read(path, kind):
    if kind == "safetensors":
        from safetensors import safe_open
        with safe_open(path, framework="pt") as file:
            return {name: digest(file.get_tensor(name)) for name in file.keys()}
    return dict(walk(torch.load(path, weights_only=True, map_location="cpu", mmap=kind == "mapped")))
found = [read(*file) for file in zip(sys.argv[1::2], sys.argv[2::2])]
print(json.dumps(found))
"""


def read_elsewhere(*files: tuple[Path, str]) -> list[dict[str, Any]]:
    """What another process finds in files, each of a kind, without this package."""
    arguments = [os.fspath(each) for file in files for each in file]
    done = run_warm("-c", _READ, *arguments, text=True)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def digests(value: Any, path: str = "") -> dict[str, Any]:
    match value:
        case torch.Tensor():
            return {path: [str(value.dtype), list(value.shape), hashlib.sha256(array_bytes(value)).hexdigest()]}
        case Mapping():
            items = [(str(key), item) for key, item in value.items()]
        case list() | tuple():
            items = [(str(number), item) for number, item in enumerate(value)]
        case _:
            return {}
    found: dict[str, Any] = {}
    for key, item in items:
        found |= digests(item, f"{path}.{key}" if path else key)
    return found


@pytest.mark.slow
def test_read_by_a_process_without_this_package(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    states = {"odd": odd_state(), "trained": {key: training_state()[key] for key in ("model", "optimizer")}}
    expected, files = [], []
    for name, state in states.items():
        folder = tmp_path / name / "s"
        save(folder, state)
        found = digests(load_sync(folder))
        for kind, readers in (("torch", ("plain", "mapped")), ("safetensors", ("safetensors",))):
            out = tmp_path / name / kind
            exported = stores.export(folder, out, to=kind)  # type: ignore[arg-type]
            assert exported.nbytes == out.stat().st_size
            assert (exported.tensors, exported.info.step) == (len(found), 7)
            for how in readers:
                expected.append(found)
                files.append((out, how))
        assert sorted(os.listdir(tmp_path / name)) == ["s", "safetensors", "torch"]
    assert read_elsewhere(*files) == expected


# -- torch


def as_exported(value: Any) -> Any:
    """What becomes of a state in a file of torch.save; KeyError for what has no place there."""
    match value:
        case np.ndarray():
            if value.dtype.str in ("|S3", "<U5", "|V7") or value.dtype.kind in "mMSUV" or value.dtype.byteorder == ">":
                raise KeyError
            if value.dtype.char in "gG" or any(step < 0 for step in value.strides):
                raise KeyError
            if value.size and value.ctypes.data % value.itemsize:
                raise KeyError
            return torch.from_numpy(value)
        case np.generic():
            if value.dtype.kind in "mMV" or value.dtype.char in "gG":
                raise KeyError
            plain: Any = {"U": str.__str__, "S": bytes}.get(value.dtype.kind, type(value).item)
            return as_exported(plain(value))
        case torch.Tensor():
            if (
                value.dtype not in torch.storage._dtype_to_storage_type_map()
                and value.dtype not in torch.storage._new_dtypes()
            ):
                raise KeyError
            return value
        case frozenset() | np.dtype():
            raise KeyError
        case bytes() if not value:
            raise KeyError
        case set():
            return {as_exported(item) for item in value}
        case OrderedDict() | Counter():
            return type(value)({as_exported(key): as_exported(item) for key, item in value.items()})
        case Mapping():
            return {as_exported(key): as_exported(item) for key, item in value.items()}
        case torch.Size():
            return value
        case list() | tuple():
            return type(value)(as_exported(item) for item in value)
        case _:
            return value


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=12, deadline=None)
@given(state_strategies.states())
def test_any_state_as_a_torch_file(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder, "s"), state)
        out = Path(folder, "out.pt")
        loaded = load_sync(Path(folder, "s"))
        try:
            expected = as_exported(loaded)
        except KeyError:
            with pytest.raises(UnsupportedStateError, match="nothing was written"):
                stores.export(Path(folder, "s"), out, to="torch")
            assert os.listdir(folder) == ["s"]
            return
        stores.export(Path(folder, "s"), out, to="torch")
        for mapped in (False, True):
            found = torch.load(out, weights_only=True, mmap=mapped)
            assert not difference(found, expected)
        with zipfile.ZipFile(out) as archive:
            assert archive.testzip() is None


@pytest.mark.slow
def test_torch_file_keeps_ties_and_modules(tmp_path: Path) -> None:
    state = training_state()
    state["odd"] = odd_state()
    save(tmp_path / "s", state)
    exported = stores.export(tmp_path / "s", tmp_path / "a.pt", to="torch", keys=["model", "optimizer", "odd", "step"])
    assert exported.changed == ()
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert not difference(found, load_sync(tmp_path / "s", keys=["model", "optimizer", "odd", "step"]))
    assert found["odd"]["tied"]["one"].data_ptr() == found["odd"]["tied"]["other"].data_ptr()
    assert found["model"]._metadata == state["model"].state_dict()._metadata
    state["model"].load_state_dict(found["model"])
    exported = stores.export(tmp_path / "s", tmp_path / "b.pt", to="torch", keys=["rng"])
    assert [line.split(" (")[0] for line in exported.changed] == ["rng.python.words", "rng.numpy.state.key"]
    words = torch.load(tmp_path / "b.pt", weights_only=True)["rng"]["python"]["words"]
    assert array_bytes(words) == load_sync(tmp_path / "s", keys=["rng"])["rng"]["python"]["words"].tobytes()


def test_records_can_be_mapped(tmp_path: Path) -> None:
    save(tmp_path / "s", {"a": torch.ones(3, dtype=torch.uint8), "b": torch.zeros(1000, dtype=torch.complex128)})
    stores.export(tmp_path / "s", tmp_path / "a.pt", to="torch")
    reader: Any = torch._C.PyTorchFileReader(str(tmp_path / "a.pt"))
    for name in ("data/0", "data/1"):
        assert reader.get_record_offset(name) % 64 == 0


@pytest.mark.slow
def test_equal_states_make_equal_files(tmp_path: Path) -> None:
    for name in ("one", "other"):
        save(tmp_path / name, odd_state() | {"bf16": None, "fp8": None, "e5m2": None, "bool": None, "complex": None})
        stores.export(tmp_path / name, tmp_path / f"{name}.pt", to="torch")
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "other.pt").read_bytes()


def test_what_a_selected_view_does_not_show_is_not_exported(tmp_path: Path) -> None:
    secret = torch.full((30_000,), 7.5)
    secret[:10] = secret[-10:] = 0
    save(tmp_path / "s", {"low": secret[:10], "all": secret, "high": secret[-10:]})
    out = tmp_path / "a.pt"
    stores.export(tmp_path / "s", out, to="torch", keys=["low", "high"])
    assert np.float32(7.5).tobytes() not in out.read_bytes()
    found = torch.load(out, weights_only=True)
    assert not difference(found, load_sync(tmp_path / "s", keys=["low", "high"]))
    stores.export(tmp_path / "s", tmp_path / "b.pt", to="torch", keys=["low"])
    assert (tmp_path / "b.pt").stat().st_size < 4000


# -- safetensors


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(state_strategies.states())
def test_any_state_as_safetensors_and_back(state: dict[str, Any]) -> None:
    pytest.importorskip("safetensors")
    from safetensors import safe_open

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder, "s"), state)
        out = Path(folder, "out")
        loaded = load_sync(Path(folder, "s"))
        try:
            exported = stores.export(Path(folder, "s"), out, to="safetensors")
        except UnsupportedStateError as error:
            assert "dtype" in str(error) or "surrogate" in str(error)  # noqa: PT017
            assert os.listdir(folder) == ["s"]
            return
        with safe_open(out, framework="pt") as file:
            assert len(file.keys()) == exported.tensors == len(list(state_strategies.arrays_of(loaded)))
            assert file.metadata()["format"] == "pt"
        info = stores.import_(out, Path(folder, "t"), source="safetensors")
        assert (info.step, dict(info.metadata)) == (7, {"loss": 0.5})
        _assert_same_apart_from_strides(load_sync(Path(folder, "t")), loaded)


def _assert_same_apart_from_strides(one: Any, other: Any) -> None:
    plain, others = _contiguous(one), _contiguous(other)
    assert not state_strategies.difference(plain, others)


def _contiguous(value: Any) -> Any:
    match value:
        case torch.nn.Parameter():
            return torch.nn.Parameter(_contiguous(value.detach()), value.requires_grad)
        case torch.Tensor():
            return (
                value.detach()
                .resolve_conj()
                .resolve_neg()
                .clone(memory_format=torch.contiguous_format)
                .requires_grad_(value.requires_grad)
            )
        case np.ndarray():
            return value.copy(order="C")
        case OrderedDict() | Counter() | dict():
            return type(value)({key: _contiguous(item) for key, item in value.items()})
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(_contiguous(item) for item in value)
        case _:
            return value


@pytest.mark.slow
def test_tensors_in_files_of_safetensors_are_aligned_whatever_the_length_of_their_names(tmp_path: Path) -> None:
    """Those who map the file view them as they lie there."""
    names = ["n", "nn", "nnn"]
    with SyncCheckpointEngine(tmp_path / "store") as engine:
        engine.checkpoint({name: torch.ones(3, dtype=torch.float64) for name in names}).result(60)
    for name in names:
        stores.export(tmp_path / "store", tmp_path / name, to="safetensors", keys=[name])
        assert int.from_bytes((tmp_path / name).read_bytes()[:8], "little") % 8 == 0


@pytest.mark.parametrize("text", ["a\0", "\0\0", "a\0b"])
def test_a_numpy_string_keeps_its_nuls(tmp_path: Path, text: str) -> None:
    save(tmp_path / "s", {"text": np.str_(text), "bytes": np.bytes_(text.encode())})
    stores.export(tmp_path / "s", tmp_path / "t.pt", to="torch")
    assert torch.load(tmp_path / "t.pt") == {"text": text, "bytes": text.encode()}


def test_safetensors_says_what_it_changed(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    state = training_state() | {"odd": odd_state()}
    save(tmp_path / "s", state)
    out = tmp_path / "all.safetensors"
    changed = "\n".join(stores.export(tmp_path / "s", out, to="safetensors").changed)
    assert "odd.tied.one, odd.tied.other (tied: a copy under each name)" in changed
    assert "odd.views.0, odd.views.1, odd.views.2 (views of one storage, each in full)" in changed
    assert "odd.transposed (strides (1, 100), in C order)" in changed
    with safetensors.safe_open(out, framework="pt") as file:
        values = json.loads(file.metadata()["pccheck_async.values"])
        assert (values["step"], values["optimizer.param_groups.0.lr"]) == (7, 0.001)
        assert torch.equal(file.get_tensor("model.0.weight"), state["model"][0].weight)
    stores.import_(out, tmp_path / "t", source="safetensors")
    found = load_sync(tmp_path / "t")
    assert found["odd"]["tied"]["one"].data_ptr() == found["odd"]["tied"]["other"].data_ptr()
    assert isinstance(found["odd"]["frozen"], torch.nn.Parameter)
    with SyncCheckpointEngine(tmp_path / "t") as engine:
        live = training_state() | {"odd": found["odd"]}
        restored = engine.restore(live)
        assert restored is not None
        assert restored.step == 7


@pytest.mark.slow
def test_a_model_alone(tmp_path: Path) -> None:
    """What other libraries expect of a file of weights: the names that the model itself has."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    state = training_state()
    save(tmp_path / "s", state)
    stores.export(tmp_path / "s", tmp_path / "m.safetensors", to="safetensors", root="model")
    state["model"].load_state_dict(load_file(tmp_path / "m.safetensors"))
    stores.export(tmp_path / "s", tmp_path / "m.pt", to="torch", root="model", keys=["model.0*"])
    assert list(torch.load(tmp_path / "m.pt", weights_only=True)) == ["0.weight", "0.bias"]
    stores.import_(tmp_path / "m.safetensors", tmp_path / "t", source="safetensors", root="model", step=3)
    with SyncCheckpointEngine(tmp_path / "t") as engine:
        restored = engine.restore({"model": training_state()["model"]})
        assert restored is not None
        assert restored.step == 3
    for root in ("modle", "model.0", "step", "model.0.weight"):
        with pytest.raises(StateMismatchError):
            stores.export(tmp_path / "s", tmp_path / "x", to="torch", root=root)


def as_transformers_reads(folder: Path) -> dict[str, torch.Tensor]:
    """Follow the index as ``from_pretrained`` does: all files that it names, and every tensor in them."""
    from safetensors import safe_open

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for title in sorted(set(index["weight_map"].values())):
        with safe_open(folder / title, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}  # else it refuses the file
            for name in file.keys():  # noqa: SIM118 - no mapping
                assert index["weight_map"][name] == title
                assert name not in found
                found[name] = file.get_tensor(name)
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


@pytest.mark.slow
def test_safetensors_in_several_files(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    state = training_state() | {"odd": odd_state()}
    save(tmp_path / "s", state)
    stores.export(tmp_path / "s", tmp_path / "one", to="safetensors")
    exported = stores.export(tmp_path / "s", tmp_path / "f", to="safetensors", max_file_size=10_000)
    titles = sorted(path.name for path in (tmp_path / "f").glob("*.safetensors"))
    assert titles == [f"model-{number:05d}-of-{len(titles):05d}.safetensors" for number in range(1, len(titles) + 1)]
    assert exported.nbytes == sum(path.stat().st_size for path in (tmp_path / "f").iterdir())
    found = as_transformers_reads(tmp_path / "f")
    assert digests({name: {"": tensor} for name, tensor in found.items()}) == digests(
        {name: {"": tensor} for name, tensor in load_safetensors(tmp_path / "one").items()}
    )
    for title in titles:
        sizes = [tensor.nbytes for tensor in load_safetensors(tmp_path / "f" / title).values()]
        assert sum(sizes) <= 10_000 or len(sizes) == 1
    for number, place in enumerate((tmp_path / "f", tmp_path / "f" / "model.safetensors.index.json")):
        info = stores.import_(place, tmp_path / f"t{number}", source="safetensors")
        assert (info.step, dict(info.metadata)) == (7, {"loss": 0.5})
        back = load_sync(tmp_path / f"t{number}")
        _assert_same_apart_from_strides(back, load_sync(tmp_path / "s"))
        assert back["odd"]["tied"]["one"].data_ptr() == back["odd"]["tied"]["other"].data_ptr()


def test_the_metadata_of_safetensors_come_back(tmp_path: Path) -> None:
    """Those of others, and those that were given to an export beside what the checkpoint had itself."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {"x": torch.ones(3), "y": torch.zeros(2)}
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt", "model": "m", "note": "n" * 1000, "z": "last"})
    info = stores.import_(tmp_path / "a.safetensors", tmp_path / "s", step=4)
    assert info.metadata == {"model": "m", "z": "last"}
    (lost,) = info.missing
    assert re.fullmatch(r"the metadata note \(metadata takes 10\d\d bytes, at most 512 fit into the .* record\)", lost)
    assert stores.import_(tmp_path / "a.safetensors", tmp_path / "s", metadata={"mine": 1}).metadata == {"mine": 1}

    save(tmp_path / "t", {"x": torch.ones(3), "y": torch.zeros(2)})
    for name, most in (("b.safetensors", None), ("b", 12)):
        out = tmp_path / name
        stores.export(
            tmp_path / "t", out, to="safetensors", max_file_size=most, metadata={"license": "MIT", "loss": "none"}
        )
        info = stores.import_(out, tmp_path / f"from {name}")
        assert (info.step, info.metadata, info.missing) == (7, {"loss": 0.5, "license": "MIT"}, ())


def load_safetensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(file)
    return found


@pytest.mark.slow
def test_what_fits_into_one_file_has_no_index(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    save(tmp_path / "s", {"x": torch.ones(3), "n": 1})
    stores.export(tmp_path / "s", tmp_path / "f", to="safetensors", max_file_size=12)
    assert os.listdir(tmp_path / "f") == ["model.safetensors"]
    stores.import_(tmp_path / "f", tmp_path / "t", source="safetensors")
    assert not difference(load_sync(tmp_path / "t"), load_sync(tmp_path / "s"))
    for most, to in ((0, "safetensors"), (10, "torch")):
        with pytest.raises(ValueError, match="max_file_size"):
            stores.export(tmp_path / "s", tmp_path / "g", to=to, max_file_size=most)  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of two files and an index, as Hugging Face's libraries write it."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    (tmp_path / "f").mkdir()
    for title, name in (("a", "x"), ("b", "y")):
        save_file({name: torch.full((3,), float(ord(name)))}, tmp_path / "f" / f"{title}.safetensors", {"format": "pt"})
    weight_map = {"y": "b.safetensors", "x": "a.safetensors"}
    index = {"metadata": {"total_parameters": 6, "total_size": 24}, "weight_map": weight_map}
    (tmp_path / "f" / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path / "f"


def test_import_of_several_files_of_others(files: Path, tmp_path: Path) -> None:
    stores.import_(files, tmp_path / "t", source="safetensors", root="model", step=3)
    found = load_sync(tmp_path / "t")["model"]
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"y": [121.0] * 3, "x": [120.0] * 3}
    assert list(found) == ["y", "x"]
    (files / "model.safetensors.index.json").rename(files / "other.safetensors.index.json")
    stores.import_(files, tmp_path / "u", source="safetensors")
    assert set(load_sync(tmp_path / "u")) == {"x", "y"}


def test_what_is_wrong_with_an_index_is_said(files: Path, tmp_path: Path) -> None:
    index = files / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    for weight_map, error, says in (
        ({"x": "a.safetensors", "z": "a.safetensors"}, CorruptStoreError, r"lack z \(in a\.safetensors\)"),
        ({"x": "b.safetensors"}, CorruptStoreError, r"lack x \(in b\.safetensors\)"),
        ({"x": "c.safetensors"}, FileNotFoundError, r"files that are not there: c\.safetensors"),
        ({"x": "../f/a.safetensors"}, CorruptStoreError, "cannot be files beside it"),
        ({"x": ".."}, FileNotFoundError, "not there"),
        ({"x": 1}, CorruptStoreError, r"model\.safetensors\.index\.json is no index"),
    ):
        index.write_text(json.dumps(whole | {"weight_map": weight_map}))
        with pytest.raises(error, match=says):
            stores.import_(files, tmp_path / "t", source="safetensors")
    index.write_text(json.dumps(whole | {"metadata": {"pccheck_async.state": 1}}))
    with pytest.raises(CorruptStoreError, match=r"metadata pccheck_async\.state cannot be read: it is no text"):
        stores.import_(files, tmp_path / "t", source="safetensors")
    index.write_text(json.dumps(whole))
    with pytest.raises(UnsupportedStateError, match="--from safetensors"):
        stores.import_(index, tmp_path / "t", source="torch")
    data = (files / "b.safetensors").read_bytes()
    (files / "b.safetensors").write_bytes(data[:-1])
    with pytest.raises(CorruptStoreError, match=r"b\.safetensors is no whole file of safetensors"):
        stores.import_(files, tmp_path / "t", source="safetensors")
    (files / "other.safetensors.index.json").write_bytes(b"")
    with pytest.raises(UnsupportedStateError, match=r"several models or variants of one, model\.safet"):
        stores.import_(files, tmp_path / "t", source="safetensors")
    assert not (tmp_path / "t").exists()


def test_damage_leaves_no_folder_of_files(tmp_path: Path) -> None:
    save(tmp_path / "s", {"a": torch.ones(5000), "b": torch.ones(5000)})
    slot = next(path for path in (tmp_path / "s").glob("slot-*") if any(path.read_bytes()[:CHUNK]))
    data = bytearray(slot.read_bytes())
    data[5 * CHUNK] ^= 1
    slot.write_bytes(data)
    with pytest.raises(CorruptStoreError, match="chunk 5 "):
        stores.export(tmp_path / "s", tmp_path / "out", to="safetensors", max_file_size=20_000)
    assert os.listdir(tmp_path) == ["s"]


def test_names_that_are_alike_keep_their_escapes(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    save(
        tmp_path / "s",
        {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "c.d": torch.ones(1), "__metadata__": torch.ones(1)},
    )
    stores.export(tmp_path / "s", tmp_path / "o", to="safetensors", keys=["a*", "c*"])
    with safetensors.safe_open(tmp_path / "o", framework="pt") as file:
        assert sorted(file.keys()) == ["a.b", "a\\.b", "c.d"]
    with pytest.raises(UnsupportedStateError, match="__metadata__"):
        stores.export(tmp_path / "s", tmp_path / "p", to="safetensors")


@pytest.mark.slow
def test_the_root_is_what_is_written_like_it(tmp_path: Path) -> None:
    save(
        tmp_path / "s", {"a": {"b": {"x": torch.zeros(1)}}, "a.b": {"y": torch.zeros(1)}, "c.d": {"z": torch.zeros(1)}}
    )
    for number, (root, name) in enumerate((("a.b", "x"), (r"a\.b", "y"), ("c.d", "z"))):
        stores.export(tmp_path / "s", tmp_path / str(number), to="torch", root=root)
        assert list(torch.load(tmp_path / str(number), weights_only=True)) == [name]


def test_parts_of_large_arrays() -> None:
    entry = TensorEntry(0, "float32", (10, 6), (1, 10), 40, "parameter", True)
    found = list(parts(entry, 100))
    assert [part.shape for part in found] == [(4, 6), (4, 6), (2, 6)]
    assert [part.offset for part in found] == [40, 56, 72]
    assert {part.kind for part in found} == {"tensor"}
    assert [part.shape for part in parts(entry, 1)] == [(1, 6)] * 10
    assert [part.shape for part in parts(entry, 240)] == [(10, 6)]


# -- torch.distributed.checkpoint


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_dcp_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccheck_async.convert.dcp_folder.PART_BYTES", 10_000)
    state = training_state()
    plain = {
        "model": state["model"].state_dict(),
        "optimizer": state["optimizer"].state_dict(),
        "odd": odd_state(),
        "tuple": (torch.arange(3), np.arange(4)),
        "array": np.arange(6).reshape(2, 3),
        "large": torch.randn(100, 100, 2),
        "step": 7,
        "nothing": {},
    }
    save(tmp_path / "s", plain)
    exported = stores.export(tmp_path / "s", tmp_path / "d", to="dcp")
    assert exported.changed == ("nothing (an empty dict, left out)",)
    loaded = load_sync(tmp_path / "s")
    del loaded["nothing"]
    metadata = FileSystemReader(tmp_path / "d").read_metadata().state_dict_metadata
    assert len(metadata["large"].chunks) > 1  # type: ignore[union-attr]
    target = load_sync(tmp_path / "s")
    del target["nothing"]
    _blank(target)
    load_dcp(target, checkpoint_id=tmp_path / "d")
    assert digests(target) == digests(loaded)
    assert (target["step"], target["optimizer"]["param_groups"]) == (7, loaded["optimizer"]["param_groups"])
    assert np.array_equal(target["array"], loaded["array"])
    assert torch.equal(target["tuple"][0], torch.arange(3))
    assert np.array_equal(target["tuple"][1], np.arange(4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_an_optimizer_by_way_of_dcp(tmp_path: Path) -> None:
    """Which makes strings of the numbers of its parameters."""
    state = {name: part for name, part in training_state().items() if name in ("model", "optimizer")}
    save(tmp_path / "s", state)
    stores.export(tmp_path / "s", tmp_path / "d", to="dcp")
    dcp_to_torch_save(tmp_path / "d", tmp_path / "file")
    stores.import_(tmp_path / "file", tmp_path / "again", source="torch")
    assert "0" in load_sync(tmp_path / "again")["optimizer"]["state"]
    state["optimizer"].step()
    with SyncCheckpointEngine(tmp_path / "again") as engine:
        engine.restore(state)
    assert not difference(load_sync(tmp_path / "s")["optimizer"], state["optimizer"].state_dict())


def test_an_optimizer_in_a_file_need_not_have_stepped(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters(), lr=0.25)
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "file")
    stores.import_(tmp_path / "file", tmp_path / "s", source="torch")
    assert load_sync(tmp_path / "s")["optimizer"] == optimizer.state_dict()


def _blank(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, torch.Tensor):
                value[key] = torch.zeros(item.shape, dtype=item.dtype)
            else:
                _blank(item)
    elif isinstance(value, list):
        value[:] = [torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, torch.Tensor) else v for v in value]
        for item in value:
            _blank(item)


_EXPORT = """
import sys, torch, torch.distributed.checkpoint
from pccheck_async import stores
path, out = sys.argv[1:]
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
stores.export(path, out + "-first", to="dcp", keys=["small"])  # what is imported and started once
open("/proc/self/clear_refs", "w").write("5")
before = peak()
stores.export(path, out, to="dcp")
print(peak() - before)
"""
_PLAIN_DCP = """
import hashlib, json, sys, torch
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
reader = FileSystemReader(sys.argv[1])
about = reader.read_metadata().state_dict_metadata
found = {}
for name, entry in about.items():
    part = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    load(part, storage_reader=FileSystemReader(sys.argv[1]))
    bits = part[name].contiguous().reshape(-1).view(torch.uint8).numpy()
    found[name] = [list(part[name].shape), str(part[name].dtype), hashlib.sha256(bits).hexdigest()]
assert "pccheck_async" not in sys.modules
print(json.dumps(found))
"""


def export_to_dcp(tmp_path: Path, state: dict[str, torch.Tensor]) -> int:
    """Export in one process, compare bit for bit what plain torch reads in another, return the bytes that it took."""
    store, out = tmp_path / "s", tmp_path / "d"
    with SyncCheckpointEngine(store, storage=StorageOptions(host_memory=64 << 20), max_in_flight=1) as engine:
        engine.checkpoint(state, step=1).result(300)
    command = [sys.executable, "-c", _EXPORT, str(store), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    command = [sys.executable, "-W", "ignore", "-c", _PLAIN_DCP, str(out)]
    read = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=tmp_path)
    assert json.loads(read.stdout) == {
        name: [
            list(tensor.shape),
            str(tensor.dtype),
            hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest(),
        ]
        for name, tensor in state.items()
    }
    return int(done.stdout)


@pytest.mark.campaign
def test_dcp_takes_a_file_of_memory(tmp_path: Path) -> None:
    """Tensors that are too small to be divided: the folder's writer would keep all of them."""
    state = {f"w{number}": torch.rand(1 << 20) for number in range(80)} | {"small": torch.ones(3)}
    assert export_to_dcp(tmp_path, state) < (64 + 128 + 32) << 20
    assert len([*(tmp_path / "d").glob("*.distcp")]) == 6


@pytest.mark.campaign
def test_dcp_of_2_gib(tmp_path: Path) -> None:
    """Tensors of one part, some of many, some of several dtypes, and some that do not lie contiguous."""
    seed = torch.Generator().manual_seed(1)
    state = {f"w{number}": torch.randn(6 << 20, generator=seed) for number in range(64)}
    state["large"] = torch.randint(-(2**15), 2**15, (352, 1 << 19), generator=seed, dtype=torch.int16)
    state["half"] = torch.randn(64, 1 << 20, generator=seed).bfloat16()
    state["turned"] = torch.randn(1 << 10, 1 << 13, generator=seed).t()
    state["small"] = torch.tensor([float("nan"), 0.0])
    assert sum(tensor.nbytes for tensor in state.values()) > 2 << 30
    taken = export_to_dcp(tmp_path, state)
    print(f"\n{taken >> 20} MiB")
    assert taken < (64 + 128 + 32) << 20


def test_dcp_refuses_two_leaves_of_one_name(tmp_path: Path) -> None:
    save(tmp_path / "s", {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)})
    with pytest.raises(UnsupportedStateError, match="refuses this state"):
        stores.export(tmp_path / "s", tmp_path / "d", to="dcp")
    assert os.listdir(tmp_path) == ["s"]


def test_dcp_needs_a_dict(tmp_path: Path) -> None:
    save(tmp_path / "s", {"list": [torch.zeros(1)]})
    with pytest.raises(UnsupportedStateError, match="dict"):
        stores.export(tmp_path / "s", tmp_path / "d", to="dcp", root="list")
    assert os.listdir(tmp_path) == ["s"]


# -- and back


def as_dcp_has_it(value: Any) -> Any:
    """Return a state as that package names it: numbers as keys are strings, and no dict of the state is empty."""
    if isinstance(value, Mapping):
        return {str(key): as_dcp_has_it(item) for key, item in value.items() if not isinstance(item, dict) or item}
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)
    return [as_dcp_has_it(item) for item in value] if type(value) is list else value


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccheck_async.convert.dcp_folder.PART_BYTES", 10_000)
    monkeypatch.setattr("pccheck_async.convert.dcp_folder._FILE", 50_000)
    save(
        tmp_path / "s",
        training_state()
        | {
            "odd": odd_state(),
            "tuple": (torch.arange(3), np.arange(4), [{"deep": np.float64(0.5)}]),
            "arrays": [np.arange(6, dtype=">i4").reshape(2, 3).T, np.array(["a", "bc"]), np.array(5, "M8[3s]")],
            "scalars": {"np": np.float32(2), "time": np.datetime64(1, "us"), "dtype": np.dtype("<U3"), "bytes": b""},
            "sets": [{1, 2}, frozenset({"x"}), Counter("aab"), 2**80, 1j],
            "large": torch.randn(100, 100, 2),
            "parts of bytes": torch.randn(300, 100).to(torch.float8_e5m2),
            "nothing": {},
            "lists": [[torch.zeros(1), {"x": [torch.ones(2)]}], []],
        },
    )
    exported = stores.export(tmp_path / "s", tmp_path / "d", to="dcp")
    assert [line for line in exported.changed if "left out" not in line] == []
    assert len([*(tmp_path / "d").glob("*.distcp")]) > 3
    info = stores.import_(tmp_path / "d", tmp_path / "t", source="dcp", step=3, metadata={"from": "dcp"})
    assert (info.step, dict(info.metadata)) == (3, {"from": "dcp"})
    assert not difference(load_sync(tmp_path / "t"), as_dcp_has_it(load_sync(tmp_path / "s")))
    with SyncCheckpointEngine(tmp_path / "t") as engine:
        live = {key: part for key, part in training_state().items() if key in ("model", "optimizer", "rng")}
        engine.restore(live, strict=False)
        assert not difference(
            live["optimizer"].state_dict(), load_sync(tmp_path / "s", keys=["optimizer"])["optimizer"]
        )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_lists_with_gaps_and_values_that_need_code(tmp_path: Path) -> None:
    state: dict[str, Any] = {"list": [{}, torch.ones(2), {"x": 1}], "evil": {"a": Evil(), "b": [np.array([None])]}}
    save_dcp(state, checkpoint_id=tmp_path / "d", no_dist=True)
    with pytest.raises(UnsupportedStateError) as caught:
        stores.import_(tmp_path / "d", tmp_path / "s", source="dcp")
    assert "without running code: evil.a (" in str(caught.value)
    assert "mkdir); evil.b (unknown array dtype '|O8')" in str(caught.value)
    assert not (tmp_path / "s").exists()
    info = stores.import_(tmp_path / "d", tmp_path / "s", skip_unreadable=True)
    assert [line.partition(" (")[0] for line in info.missing] == ["evil.a", "evil.b", "the step"]
    assert not difference(load_sync(tmp_path / "s"), {"list": [None, torch.ones(2), {"x": 1}]})
    del state["evil"]
    save_dcp(state, checkpoint_id=tmp_path / "e", no_dist=True)
    stores.import_(tmp_path / "e", tmp_path / "s", source="dcp")
    assert not difference(load_sync(tmp_path / "s"), {"list": [None, torch.ones(2), {"x": 1}]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of that package, with a tensor in three parts."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("pccheck_async.convert.dcp_folder.PART_BYTES", 40)
        save(tmp_path / "store", {"x": torch.arange(30.0), "n": {"y": [1, (2,)]}})
        stores.export(tmp_path / "store", tmp_path / "d", to="dcp")
    return tmp_path / "d"


@pytest.mark.slow
def test_no_code_in_the_metadata_runs(folder: Path, tmp_path: Path) -> None:
    whole = pickle.loads((folder / ".metadata").read_bytes())
    kind = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    for code, says in (
        (pickle.dumps(Evil()), "a posix.mkdir is no metadata.Metadata"),
        (pickle.dumps({"x": Evil()}), "a dict is no metadata"),
        (pickle.dumps(os.mkdir), "a _Name is no metadata"),
        (b"\x80\x02" + kind + b"N}X\x04\0\0\0evilK\x01s\x86b.", "is damaged"),  # sets attributes of the class
        (b"\x80\x02N\x86)R.", "is damaged"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "a NoneType is no metadata"),  # to pickle, a table of 2 ** 31 places
        (b"\x80\x02\x82\x01.", "the opcode EXT1"),
        (b"", "is damaged"),
    ):
        (folder / ".metadata").write_bytes(code)
        with pytest.raises(CorruptStoreError, match=says):
            stores.import_(folder, tmp_path / "s", source="dcp")
        assert not hasattr(type(whole), "evil")
    whole.planner_data["ignored"] = whole.storage_meta.modules = Evil()
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    stores.import_(folder, tmp_path / "s", source="dcp")
    assert not difference(load_sync(tmp_path / "s"), load_sync(tmp_path / "store"))


@pytest.mark.slow
def test_what_is_wrong_with_a_folder_of_dcp_is_said(folder: Path, tmp_path: Path) -> None:
    text = (folder / ".metadata").read_bytes()

    def refused(change: Callable[[Any], None], says: str, error: type[Exception] = CorruptStoreError) -> None:
        metadata = pickle.loads(text)
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(error, match=says):
            stores.import_(folder, tmp_path / "s", source="dcp")

    def every(**facts: Any) -> Callable[[Any], None]:
        def change(metadata: Any) -> None:
            for info in metadata.storage_data.values():
                vars(info).update(facts)

        return change

    def chunk(number: int, **facts: Any) -> Callable[[Any], None]:
        return lambda metadata: vars(metadata.state_dict_metadata["x"].chunks[number]).update(facts)

    refused(lambda m: m.storage_data.clear(), "does not say where x is stored")
    refused(lambda m: setattr(m, "storage_data", None), "where anything is stored")
    refused(lambda m: m.state_dict_metadata["x"].chunks.pop(), "is not all there, or some of it twice")
    refused(chunk(0, sizes=torch.Size([31])), "reaches outside")
    refused(chunk(0, sizes=torch.Size([9])), "is not all there, or")
    refused(chunk(1, offsets=torch.Size([9])), "is not all there, and some of it twice")
    refused(chunk(1, offsets=torch.Size([10, 0])), "other dimensions")
    refused(chunk(1, offsets=(10,)), "are no sizes")
    refused(every(relative_path="../d/__0_0.distcp"), "is no name of a file in the folder")
    refused(every(relative_path="lost"), "lacks the files lost,")
    refused(every(offset=10**9), "is too short: it lacks some of")
    refused(every(length=3), "is too short: it lacks some of x")
    refused(every(offset=-1), "stored at no place")
    refused(every(offset=1), "damaged: it does not begin as torch.save begins")
    refused(every(transform_descriptors=["zstd"]), "an extension, .'zstd'.", UnsupportedStateError)
    refused(lambda m: m.planner_data.update(x=("n", 0)), "lies in what is no container")
    refused(lambda m: m.planner_data.update(x=("n", "y")), "two values have the path of")
    refused(lambda m: m.planner_data.update(x=("l", 1 << 40)), "is no path")
    refused(lambda m: m.planner_data.update(x=()), "is no path")
    refused(lambda m: vars(m.state_dict_metadata["x"].properties).update(dtype=torch.int32), "it is torch.float32, ")
    (folder / ".metadata").write_bytes(text)
    random = Random(7)
    for _ in range(200):
        data = bytearray(text[: random.randrange(len(text))] if random.random() < 0.1 else text)
        for at in random.choices(range(len(data)), k=random.choice((1, 3))) if data else ():
            data[at] = random.randrange(256)
        (folder / ".metadata").write_bytes(data)
        with suppress(CorruptStoreError, UnsupportedStateError, MemoryError):
            dcp_reading.read(folder, tmp_path, pickled_values.Reading())
    assert not (tmp_path / "s").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_byte_of_a_dcp_folder_is_compared_with_its_checksum(tmp_path: Path) -> None:
    save_dcp({"x": torch.arange(3000.0)}, checkpoint_id=tmp_path / "d", no_dist=True)
    assert stores.import_(tmp_path / "d", tmp_path / "s", step=1).missing == ()
    (file,) = (tmp_path / "d").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(torch.arange(3000.0).numpy().tobytes()[4000:8000])] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptStoreError, match="x is damaged: BadZipFile: Bad CRC-32"):
        stores.import_(tmp_path / "d", tmp_path / "s")


_IMPORT = """
import sys, threading
from pccheck_async import stores
path, small, out = sys.argv[1:]
ended, seen = threading.Event(), [0]
def anonymous():  # pages of mapped files may go at any time
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024
def watch():
    while not ended.wait(0.001):
        seen[0] = max(seen[0], anonymous())
stores.import_(small, out + "-first", host_memory=16 << 20)  # what is imported and started once
before, thread = anonymous(), threading.Thread(target=watch)
thread.start()
stores.import_(path, out, host_memory=16 << 20)
ended.set()
thread.join()
print(seen[0] - before)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", [pytest.param("torch", marks=pytest.mark.campaign), "dcp"])
def test_an_import_takes_little_memory(tmp_path: Path, to: Any) -> None:
    """DCP stores the large tensor in parts, as ranks do."""
    stored = {"large": {"large": torch.rand(24 << 20), "other": torch.rand(1 << 20)}, "small": {"x": torch.ones(3)}}
    for name, state in stored.items():
        with SyncCheckpointEngine(
            tmp_path / f"{name}-s", storage=StorageOptions(host_memory=64 << 20), max_in_flight=1
        ) as engine:
            engine.checkpoint(state, step=1).result(300)
        stores.export(tmp_path / f"{name}-s", tmp_path / name, to=to)
    done = run_warm("-c", _IMPORT, *(tmp_path / name for name in ("large", "small", "t")), text=True)
    assert 0 < int(done.stdout) < 85 << 20  # of 100
    assert torch.equal(load_sync(tmp_path / "t")["large"], stored["large"]["large"])


# -- what may go wrong


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_damage_leaves_nothing_behind(tmp_path: Path, to: Any) -> None:
    save(tmp_path / "s", {"a": torch.ones(5000), "b": torch.ones(5000)})
    slot = next(path for path in (tmp_path / "s").glob("slot-*") if any(path.read_bytes()[:CHUNK]))
    data = bytearray(slot.read_bytes())
    data[5 * CHUNK] ^= 1
    slot.write_bytes(data)
    with pytest.raises(CorruptStoreError, match="chunk 5 "):
        stores.export(tmp_path / "s", tmp_path / "out", to=to)
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_errors_of_export(tmp_path: Path, to: Any) -> None:
    with pytest.raises(NoCheckpointError):
        stores.export(tmp_path / "none", tmp_path / "out", to=to)
    save(tmp_path / "s", {"a": torch.ones(5)})
    (tmp_path / "there").write_text("mine")
    with pytest.raises(FileExistsError, match=r"exists already; .*--overwrite, overwrite=True"):
        stores.export(tmp_path / "s", tmp_path / "there", to=to)
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(WriteError):
        stores.export(tmp_path / "s", tmp_path / "no" / "folder", to=to)
    with pytest.raises(NoCheckpointError, match="of step 9"):
        stores.export(tmp_path / "s", tmp_path / "out", to=to, step=9)
    with pytest.raises(StateMismatchError, match="no leaf matches"):
        stores.export(tmp_path / "s", tmp_path / "out", to=to, keys=["x"])
    with pytest.raises(ValueError, match="to is"):
        stores.export(tmp_path / "s", tmp_path / "out", to="onnx")  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == ["s", "there"]


def test_refused_leaves_are_all_named(tmp_path: Path) -> None:
    save(tmp_path / "s", {"f": {"x": frozenset({1})}, "d": np.dtype("i4"), "s": np.array(["a"]), "b": b"", "ok": 1})
    with pytest.raises(UnsupportedStateError) as raised:
        stores.export(tmp_path / "s", tmp_path / "out", to="torch")
    for path in ("f.x (a frozenset)", "d (a dtype of numpy)", "s (a numpy array of dtype <U1)", "b (bytes", "4 of 5"):
        assert path in str(raised.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_names_all_pickled_values_that_it_refuses_wherever_they_are(tmp_path: Path) -> None:
    ordered: Any = OrderedDict(x=1)
    ordered._metadata = {"hidden": Path("c")}
    save(tmp_path / "s", {"a": Path("a"), "t": (1, [Path("b")]), "o": (ordered,), "ok": 1}, allow_pickle=True)
    with pytest.raises(UnsupportedStateError, match="cannot hold 3 of 5 leaves, and nothing was written") as raised:
        stores.export(tmp_path / "s", tmp_path / "d", to="dcp")
    for path in ("a", r"t\.1\.0", "o"):
        assert re.search(rf"\b{path} \(a pickled \S+Path\)", str(raised.value)), path
    assert "allow_pickle" not in str(raised.value)


SUB_BYTE = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
BITS = {name for name in dtypes.STORABLE if name.startswith("bits")}
NOT_IN = {
    "torch": SUB_BYTE,
    "safetensors": SUB_BYTE | BITS | {"complex32", "complex128", "float4_e2m1fn_x2"},
    "dcp": SUB_BYTE | BITS,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_every_dtype_is_exported_or_refused_with_what_to_do(tmp_path: Path, to: Any) -> None:
    if to == "safetensors":
        pytest.importorskip("safetensors")
    state = {name: torch.ones(16, dtype=torch.uint8).view(dtype) for name, dtype in dtypes.STORABLE.items()}
    save(tmp_path / "s", {"m": state})
    out, refused = tmp_path / "out", NOT_IN[to] & set(state)
    with pytest.raises(UnsupportedStateError, match="nothing was written") as raised:
        stores.export(tmp_path / "s", out, to=to)
    assert os.listdir(tmp_path) == ["s"]
    for name in state:
        others = [other for other in ("torch", "safetensors", "dcp") if name not in NOT_IN[other]]
        can = f"which {' and '.join(others)} can hold" if others else "which no format can hold; `pccheck copy` can"
        said = re.search(rf"m\.{name} \([^()]*\b{name}\b[^()]*\), {can}", str(raised.value))
        assert (said is not None) == (name in refused), name
    left = sorted(set(state) - refused)
    stores.export(tmp_path / "s", out, to=to, keys=[f"m.{name}" for name in left])
    if to == "dcp":
        back: Any = {"m": {name: torch.zeros(16, dtype=torch.uint8).view(dtypes.STORABLE[name]) for name in left}}
        load_dcp(back, storage_reader=FileSystemReader(out), no_dist=True)
    else:
        stores.import_(out, tmp_path / "t", source=to)
        back = load_sync(tmp_path / "t")
    assert {name: array_bytes(tensor) for name, tensor in back["m"].items()} == {n: array_bytes(state[n]) for n in left}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_dcp_pickles_may_have_any_dtype_that_torch_pickles(tmp_path: Path) -> None:
    bits, wide = (torch.arange(4, dtype=torch.uint8).view(dtype) for dtype in (torch.bits8, torch.bits16))
    save(tmp_path / "s", {"t": (bits, [wide])})
    stores.export(tmp_path / "s", tmp_path / "d", to="dcp")
    back: Any = {"t": None}
    load_dcp(back, storage_reader=FileSystemReader(tmp_path / "d"), no_dist=True)
    assert not difference(back["t"], (bits, [wide]))
    save(tmp_path / "u", {"t": ([bits.view(dtypes.STORABLE["uint3"])],)})
    with pytest.raises(UnsupportedStateError, match=r"t\.0\.0 \(a tensor of dtype uint3, which torch does not save"):
        stores.export(tmp_path / "u", tmp_path / "e", to="dcp")
    ordered: Any = OrderedDict(x=1)
    ordered._metadata = {"hidden": bits}
    for number, state in enumerate(({"o": ordered}, {"o": (ordered,)})):
        save(tmp_path / f"o{number}", state)
        with pytest.raises(UnsupportedStateError, match="an array in the _metadata of an OrderedDict"):
            stores.export(tmp_path / f"o{number}", tmp_path / "e", to="dcp")


# -- import


def test_import_of_a_torch_file(tmp_path: Path) -> None:
    state = odd_state() | {"list": [1, (2, None)], "name": "x"}
    for name, new in (("new.pt", True), ("old.pt", False)):
        if not new:
            for key in ("u64", "fp8", "e5m2", "views"):
                state.pop(key)
        torch.save(state, tmp_path / name, _use_new_zipfile_serialization=new)
        info = stores.import_(tmp_path / name, tmp_path / "s", source="torch", step=5, metadata={"from": name})
        assert (info.step, dict(info.metadata)) == (5, {"from": name})
        assert not difference(load_sync(tmp_path / "s"), torch.load(tmp_path / name, weights_only=True))


@pytest.mark.slow
@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_an_export_brings_back_what_the_checkpoint_was(tmp_path: Path, to: Any) -> None:
    if to == "safetensors":
        pytest.importorskip("safetensors")
    with SyncCheckpointEngine(tmp_path / "s") as engine:
        facts: dict[str, Any] = {"loss": math.inf, "note": None}
        engine.checkpoint({"x": torch.ones(3)}, step=30, name="best", metadata=facts).result(60)
    stores.export(tmp_path / "s", tmp_path / "out", to=to)
    found = stores.import_(tmp_path / "out", tmp_path / "new")
    assert (found.step, found.name, found.metadata, found.missing) == (30, "best", facts, ())
    again = stores.import_(tmp_path / "out", tmp_path / "new", metadata={})
    assert (again.step, again.name, again.metadata) == (30, None, {})
    assert again.missing == ("the name 'best' (the store has a checkpoint of that name)",)


@pytest.mark.parametrize("data", [b"", b"\x80", bytes(1 << 21), b"\x81\xa4step\xa1x"])
def test_damaged_facts_beside_a_state_are_named(tmp_path: Path, data: bytes) -> None:
    save(tmp_path / "s", {"x": torch.ones(3)})
    for to in ("torch", "dcp"):
        stores.export(tmp_path / "s", tmp_path / to, to=to)
    (tmp_path / "dcp" / "pccheck_async.msgpack").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "torch") as whole, zipfile.ZipFile(tmp_path / "other", "w") as forged:
        for member in whole.namelist():
            forged.writestr(member, data if member.endswith(".msgpack") else whole.read(member), zipfile.ZIP_DEFLATED)
    for file in ("other", "dcp"):
        with pytest.raises(CorruptStoreError, match=rf"pccheck_async\.msgpack in .*{file} cannot be read"):
            stores.import_(tmp_path / file, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_import_keeps_what_is_there(tmp_path: Path) -> None:
    save(tmp_path / "s", {"x": torch.zeros(3)}, step=100)
    torch.save(torch.ones(3), tmp_path / "t.pt")
    with pytest.raises(UnsupportedStateError, match="root"):
        stores.import_(tmp_path / "t.pt", tmp_path / "s", source="torch")
    for _ in range(3):
        stores.import_(tmp_path / "t.pt", tmp_path / "s", source="torch", root="x")
    infos = list_checkpoints(tmp_path / "s")
    assert [info.counter for info in infos] == [3, 2, 1, 0]
    assert torch.equal(load_sync(tmp_path / "s")["x"], torch.ones(3))
    assert torch.equal(load_sync(tmp_path / "s", step=100)["x"], torch.zeros(3))


def test_an_import_takes_the_space_of_one_checkpoint(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(CHUNK)}, tmp_path / "t.pt")
    for slots in (1, 2):
        stores.import_(tmp_path / "t.pt", tmp_path / "s", source="torch")
        assert len([*(tmp_path / "s").glob("slot-*")]) == slots


@pytest.mark.slow
def test_import_beside_many_pinned_ones(tmp_path: Path) -> None:
    torch.save({"x": 1}, tmp_path / "t.pt")
    with SyncCheckpointEngine(tmp_path / "s") as engine:
        for step in range(34):
            engine.checkpoint({"x": 0}, step=step).result(60)
            if step > 0:
                engine.pin(step=step)
    assert stores.import_(tmp_path / "t.pt", tmp_path / "s", source="torch", step=34).step == 34
    assert [info.step for info in list_checkpoints(tmp_path / "s")] == [*range(34, 0, -1)]


def test_arguments_that_no_checkpoint_has(tmp_path: Path) -> None:
    save(tmp_path / "s", {"x": 1})
    done = runner.invoke(app, ["export", str(tmp_path / "s"), str(tmp_path / "o"), "--to=torch", f"--step={1 << 64}"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("pccheck: ValueError: step must fit into a signed 64-bit integer")


def test_a_torch_file_that_cannot_be_written_ends_what_is_read_ahead(tmp_path: Path) -> None:
    save(tmp_path / "s", {"x": torch.zeros(4 * CHUNK)})

    class Full(target.Sink):
        async def write(self, data: Any, /) -> None:
            if memoryview(data).nbytes == CHUNK:
                raise OSError(28, "full")

    async def work(connection: Connection) -> set[Any]:
        before = asyncio.all_tasks()
        archive = torch_file.Archive(Full(None))
        pieces = connection.checkpoint.pieces([(0, 4 * CHUNK)])
        with suppress(OSError):
            await archive.stream("data/0", 4 * CHUNK, pieces)
        return asyncio.all_tasks() - before

    connection = Connection(tmp_path / "s", None, torch.device("cpu"), 1 << 20, "auto")
    try:
        assert connection.call(work(connection)) == set()
    finally:
        connection.close()


def test_exports_to_one_name_leave_each_other_alone(tmp_path: Path) -> None:
    with new_folder(tmp_path / "d") as first:
        (first / "part").write_bytes(b"1")
        with suppress(ValueError), new_folder(tmp_path / "d") as second:
            assert second != first
            raise ValueError
    assert (tmp_path / "d" / "part").read_bytes() == b"1"


def test_a_full_record_takes_no_import(tmp_path: Path) -> None:
    torch.save({"x": 1}, tmp_path / "t.pt")
    disk = CrashDisk()
    with SyncCheckpointEngine("x", storage=StorageOptions(io=CrashWriter(disk)), keep_last="all") as engine:
        for step in range(MOST_ENTRIES):
            engine.checkpoint({"x": 0}, step=step).result(60)
    with pytest.raises(StoreFullError, match="remove some first"):
        stores.import_(tmp_path / "t.pt", "x", source="torch", io=CrashWriter(disk))
    assert len(list_checkpoints("x", io=CrashWriter(disk))) == MOST_ENTRIES


def test_an_import_that_is_refused_makes_no_store(tmp_path: Path) -> None:
    refused: list[Any] = [torch.eye(3).to_sparse(), torch.empty(3, device="meta")]
    for value in refused:
        torch.save({"x": value}, tmp_path / "t.pt")
        with pytest.raises(UnsupportedStateError, match="x"):
            stores.import_(tmp_path / "t.pt", tmp_path / "s", source="torch")
    torch.save({"x": 1}, tmp_path / "t.pt")
    with pytest.raises(UnsupportedStateError, match="metadata"):
        stores.import_(tmp_path / "t.pt", tmp_path / "s", source="torch", metadata={"text": "x" * 10_000})
    assert not (tmp_path / "s").exists()


def test_import_of_a_file_that_was_compressed(tmp_path: Path) -> None:
    """torch maps the members of an archive where they lie, whether or not they are compressed."""
    state = {"x": torch.arange(3000.0), "y": [1, "a"]}
    torch.save(state, tmp_path / "t.pt")
    with zipfile.ZipFile(tmp_path / "t.pt") as whole, zipfile.ZipFile(tmp_path / "z.pt", "w") as archive:
        for member in whole.infolist():
            archive.writestr(member.filename, whole.read(member), zipfile.ZIP_DEFLATED)
    assert (tmp_path / "z.pt").stat().st_size < (tmp_path / "t.pt").stat().st_size
    assert stores.import_(tmp_path / "z.pt", tmp_path / "s", step=1).missing == ()
    assert not difference(load_sync(tmp_path / "s"), state)


@pytest.mark.parametrize("sums", [True, False])
def test_every_byte_of_a_torch_file_is_compared_with_its_checksum(tmp_path: Path, sums: bool) -> None:
    torch.serialization.set_crc32_options(sums)
    try:
        torch.save({"x": torch.arange(3000.0), "y": "a text that is no tensor"}, tmp_path / "t.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    whole = (tmp_path / "t.pt").read_bytes()
    info = stores.import_(tmp_path / "t.pt", tmp_path / "s")
    assert [line.partition(" (")[0] for line in info.missing] == [*["checksums"] * (not sums), "the step"]
    for within in (torch.arange(3000.0).numpy().tobytes()[4000:8000], b"a text that"):
        damaged = bytearray(whole)
        damaged[whole.index(within)] ^= 1
        (tmp_path / "t.pt").write_bytes(damaged)
        if sums:
            with pytest.raises(CorruptStoreError, match=r"t\.pt is no whole file .*: Bad CRC-32 for file"):
                stores.import_(tmp_path / "t.pt", tmp_path / "s")
        else:
            said = stores.import_(tmp_path / "t.pt", tmp_path / "s").missing[0]
            assert "set_crc32_options(False)" in said
            assert "whether it is damaged was not checked" in said


def test_a_file_of_an_old_torch_has_no_checksums(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "from before torch 1.6" in stores.import_(tmp_path / "old.pt", tmp_path / "s").missing[0]


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"", CorruptStoreError, "is empty, and no checkpoint"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 4\n", UnsupportedStateError, "git lfs pull"),
        (b"\n<!DOCTYPE html>\n<html><body>404</body></html>", UnsupportedStateError, "a page of HTML"),
        (b"GGUF\3\0\0\0\0\0\0\0", UnsupportedStateError, "of no format that can be told"),
    ],
)
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "f/model.safetensors", "f/pytorch_model.bin.index.json"])
def test_what_is_no_checkpoint_is_named_for_what_it_is(
    tmp_path: Path, name: str, content: bytes, error: type[Exception], says: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    for place in {file, tmp_path / name.split("/", maxsplit=1)[0]}:
        if not content.startswith(b"GGUF"):
            with pytest.raises(error, match=says):
                stores.import_(place, tmp_path / "s")
        else:
            with pytest.raises((CorruptStoreError, UnsupportedStateError)):
                stores.import_(place, tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_archives_that_torch_save_did_not_write(tmp_path: Path) -> None:
    module = torch.jit.trace_module(torch.nn.Linear(2, 2), {"forward": torch.ones(1, 2)})  # type: ignore[no-untyped-call]
    torch.jit.save(module, tmp_path / "script.pt")
    with pytest.raises(UnsupportedStateError, match="is a program of TorchScript, and no checkpoint"):
        stores.import_(tmp_path / "script.pt", tmp_path / "s")
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    with pytest.raises(UnsupportedStateError, match=r"a zip archive without a data\.pkl"):
        stores.import_(tmp_path / "a.npz", tmp_path / "s")


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_protocol_of_pickle_that_torch_does_not_read_is_named(tmp_path: Path, protocol: int, new: bool) -> None:
    torch.save({"x": 1}, tmp_path / "t.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=new)
    with pytest.raises(UnsupportedStateError, match=f"was saved with pickle_protocol={protocol}, and torch reads"):
        stores.import_(tmp_path / "t.pt", tmp_path / "s")


def test_an_old_file_that_ends_as_an_archive_ends(tmp_path: Path) -> None:
    state = {"x": torch.frombuffer(bytearray(b"PK\5\6" + bytes(18)), dtype=torch.uint8)}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert zipfile.is_zipfile(tmp_path / "old.pt")
    stores.import_(tmp_path / "old.pt", tmp_path / "s")
    assert not difference(load_sync(tmp_path / "s"), state)


def test_a_file_of_torch_that_has_the_name_of_another_format(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    state = {"x": torch.ones(3)}
    torch.save(state, tmp_path / "model.safetensors")
    assert stores.import_(tmp_path / "model.safetensors", tmp_path / "s").source == "torch"
    assert not difference(load_sync(tmp_path / "s"), state)
    (tmp_path / "f").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "f" / "model.safetensors")
    with pytest.raises(UnsupportedStateError, match=r"model\.safetensors is a file of torch\.save, whatever"):
        stores.import_(tmp_path / "f", tmp_path / "s")


def test_a_file_of_safetensors_that_begins_like_a_pickle(tmp_path: Path) -> None:
    """It begins with the length of its header, of which the lowest byte may be any multiple of eight."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    (tmp_path / "f").mkdir()
    file, seen = tmp_path / "f" / "model.safetensors", set()
    for length in range(32):
        save_file({"x": torch.ones(3)}, file, {"note": "n" * 8 * length})
        seen.add(file.read_bytes()[0])
        if file.read_bytes()[0] == 0x80:
            for place in (file, tmp_path / "f"):
                assert stores.import_(place, tmp_path / "s").source == "safetensors"
    assert len(seen) == 32


@pytest.mark.parametrize("variant", ["", ".fp16"])
@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_folders_of_models_in_one_file_or_several(tmp_path: Path, suffix: str, variant: str) -> None:
    """As transformers names them: the variant is in the middle of the name of a file, and at the end of an index's."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    write = torch.save if suffix == "bin" else save_file
    stem = "pytorch_model" if suffix == "bin" else "model"
    source = "torch" if suffix == "bin" else "safetensors"
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    state = {"x": torch.ones(3), "y": torch.zeros(2)}
    write(state, one / f"{stem}{variant}.{suffix}")
    weight_map = {}
    for number, (name, tensor) in enumerate(state.items(), 1):
        weight_map[name] = f"{stem}{variant}-0000{number}-of-00002.{suffix}"
        write({name: tensor}, several / weight_map[name])
    index = several / f"{stem}.{suffix}.index{variant}.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for place in (one, several, index):
        assert stores.import_(place, tmp_path / "s").source == source
        assert not difference(dict(sorted(load_sync(tmp_path / "s").items())), state)
    if variant:
        write(state, one / f"{stem}.int8.{suffix}")
        with pytest.raises(UnsupportedStateError, match=rf"variants of one, {stem}\.fp16\.{suffix}, {stem}\.int8\."):
            stores.import_(one, tmp_path / "s")
        write({"z": torch.ones(1)}, one / f"{stem}.{suffix}")
        stores.import_(one, tmp_path / "s")
        assert [*load_sync(tmp_path / "s")] == ["z"]
    weight_map["lost"] = f"{stem}-3.{suffix}"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FileNotFoundError, match=f"not there: {stem}-3"):
        stores.import_(several, tmp_path / "s")


def test_what_else_is_in_a_folder_of_a_model_is_named(tmp_path: Path) -> None:
    """As Accelerate saves: the state of an optimizer is not left out in silence."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"x": torch.ones(3)}, tmp_path / "model.safetensors")
    for title in ("optimizer.bin", "random_states_0.pkl", "pytorch_model.bin"):
        torch.save({"y": 1}, tmp_path / title)
    (tmp_path / "config.json").write_text("{}")
    info = stores.import_(tmp_path, tmp_path / "s", step=1)
    assert info.missing == tuple(
        f"{title} (left out: it is no part of model.safetensors)"
        for title in ("optimizer.bin", "pytorch_model.bin", "random_states_0.pkl")
    )
    assert stores.import_(tmp_path / "model.safetensors", tmp_path / "s", step=1).missing == ()


class Config(dict[str, Any]):
    """Like those of omegaconf: made by a class of its own, of an enumeration and of other such things."""

    def __reduce__(self) -> Any:
        return Config, (), {"content": dict(self), "kind": Any, "parent": Colour.RED, "none": lambda_free}


class Colour(Enum):
    RED = 1


def lambda_free() -> None:
    raise AssertionError("it was called")


@pytest.mark.parametrize("new", [True, False])
def test_what_cannot_be_read_is_left_out_where_that_is_asked_for(tmp_path: Path, new: bool) -> None:
    state = {
        "state_dict": OrderedDict(w=torch.ones(3)),
        "hyper_parameters": {"config": Config(a=1), "lr": 0.1, "list": [1, Config()], Colour.RED: 2},
        "config": Config(a=Config()),
        "array": np.arange(3),
    }
    torch.save(state, tmp_path / "t.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(UnsupportedStateError, match=r"Config.*skip_unreadable=True" if new else "without running code"):
        stores.import_(tmp_path / "t.pt", tmp_path / "s")
    assert not (tmp_path / "s").exists()
    done = runner.invoke(app, ["import", str(tmp_path / "t.pt"), str(tmp_path / "s"), "--skip-unreadable"])
    if not new:  # torch lists the names of archives only
        assert done.exit_code == 1
        return
    assert done.exit_code == 0
    loaded = load_sync(tmp_path / "s")
    kept = {"state_dict": state["state_dict"], "hyper_parameters": {"lr": 0.1}, "array": np.arange(3)}
    assert not difference(loaded, kept)
    assert type(loaded["state_dict"]) is OrderedDict
    for name in ("hyper_parameters.config", "hyper_parameters.list", "config"):
        assert f"missing: {name} (cannot be read without running code in the file)" in done.stderr
    torch.save([1, Config()], tmp_path / "t.pt")
    with pytest.raises(UnsupportedStateError, match="holds no value that can be read"):
        stores.import_(tmp_path / "t.pt", tmp_path / "s", root="x", skip_unreadable=True)
    torch.save({"w": torch.ones(3), "evil": Evil()}, tmp_path / "t.pt")  # no honest file names what is in this module
    with pytest.raises(UnsupportedStateError, match="mkdir"):
        stores.import_(tmp_path / "t.pt", tmp_path / "s", skip_unreadable=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["new.pt", "old.pt"])
def test_import_of_damaged_bytes(tmp_path: Path, name: str) -> None:
    torch.save({"x": torch.arange(9.0)}, tmp_path / name, _use_new_zipfile_serialization=name == "new.pt")
    whole, random = (tmp_path / name).read_bytes(), Random(5)
    for _ in range(300):
        data = bytearray(whole[: random.randrange(len(whole))] if random.random() < 0.2 else whole)
        for at in random.choices(range(len(data)), k=random.choice((1, 3))) if data else ():
            data[at] = random.randrange(256)
        (tmp_path / "t.pt").write_bytes(data)
        with suppress(CorruptStoreError, UnsupportedStateError):
            pickled_values.read_file(tmp_path / "t.pt", pickled_values.Reading())


def test_import_beside_a_trainer(tmp_path: Path) -> None:
    torch.save({"x": 1}, tmp_path / "t.pt")
    with SyncCheckpointEngine(tmp_path / "s") as engine:
        engine.checkpoint({"x": 0}).result(60)
        with pytest.raises(StoreLockedError):
            stores.import_(tmp_path / "t.pt", tmp_path / "s", source="torch")


class Forged:
    """Pickled as what NumPy pickles, with something else in place of its bytes."""

    def __init__(self, make: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (make, arguments) if state is None else (make, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("data", [8, None, "text"])
def test_numpys_values_of_a_file_are_made_of_bytes_only(tmp_path: Path, data: Any) -> None:
    array: Any = np.arange(1).__reduce__()
    make_array, arguments, state = array
    scalar: Any = np.int64(1).__reduce__()
    make_scalar, (dtype, _) = scalar
    for value in (Forged(make_array, *arguments, state=(*state[:-1], data)), Forged(make_scalar, dtype, data)):
        torch.save({"x": value}, tmp_path / "t.pt")
        with pytest.raises(CorruptStoreError, match="TypeError"):
            pickled_values.read_file(tmp_path / "t.pt", pickled_values.Reading())


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/nonexistent/evil",)


def test_errors_of_import(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    with pytest.raises(FileNotFoundError, match="no file"):
        stores.import_(tmp_path / "none", tmp_path / "s", source="torch")
    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UnsupportedStateError, match="without running code"):
        stores.import_(tmp_path / "evil.pt", tmp_path / "s", source="torch")
    torch.save({"x": torch.ones(5000)}, tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "cut").write_bytes(data[:3000])
    for source in ("torch", "safetensors"):
        with pytest.raises((CorruptStoreError, UnsupportedStateError)):
            stores.import_(tmp_path / "cut", tmp_path / "s", source=source)
    with pytest.raises(ValueError, match="source is"):
        stores.import_(tmp_path / "cut", tmp_path / "s", source="onnx")  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_import_of_something_else_says_what_it_is(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    save(tmp_path / "store", {"x": torch.ones(3), "step": 7})
    (tmp_path / "folder").mkdir()
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "__0.metadata").touch()
    (tmp_path / "text").write_text("text")
    for to in ("torch", "safetensors", "dcp"):
        stores.export(tmp_path / "store", tmp_path / to, to=to)
    for name, source, error, says in (
        ("dcp", "torch", UnsupportedStateError, r"torch\.distributed\.checkpoint.*--from dcp"),
        ("dcp", "safetensors", UnsupportedStateError, r"torch\.distributed\.checkpoint.*--from dcp"),
        ("torch", "dcp", UnsupportedStateError, "begins like a file of torch.*--from torch"),
        ("text", "dcp", FileNotFoundError, "text is a file; give the folder"),
        ("folder", "dcp", FileNotFoundError, r"folder is a folder without \.metadata"),
        ("alone", "dcp", UnsupportedStateError, "use_collectives=False"),
        ("store", "torch", UnsupportedStateError, "is a store of this package.*pccheck copy"),
        ("folder", "torch", FileNotFoundError, "folder is a folder"),
        ("none", "torch", FileNotFoundError, "there is no file"),
        ("torch", "safetensors", UnsupportedStateError, "torch begins like a file of torch.*--from torch"),
        ("safetensors", "torch", UnsupportedStateError, "begins like a file of safetensors.*--from safetensors"),
    ):
        with pytest.raises(error, match=says):
            stores.import_(tmp_path / name, tmp_path / "s", source=source)  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()
    stores.import_(tmp_path / "dcp", tmp_path / "s", source="dcp")
    assert not difference(load_sync(tmp_path / "s"), load_sync(tmp_path / "store"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_import_into_the_folder_that_it_lies_in(tmp_path: Path) -> None:
    save(tmp_path / "store", {"x": torch.ones(3), "step": 7})
    stores.export(tmp_path / "store", tmp_path / "run", to="dcp")
    with SyncCheckpointEngine(tmp_path / "run"):  # it warns, and saves nothing
        pass
    with pytest.raises(UnsupportedStateError, match=r"is a store of this package: .*--from dcp"):
        stores.import_(tmp_path / "run", tmp_path / "run")
    stores.import_(tmp_path / "run", tmp_path / "run", source="dcp")
    assert not difference(load_sync(tmp_path / "run"), load_sync(tmp_path / "store"))


@pytest.mark.parametrize("text", ["", "!", "AAAA", "gaNhYmPA"])
def test_metadata_that_is_damaged(tmp_path: Path, text: str) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"x": torch.ones(3)}, tmp_path / "f", metadata={"pccheck_async.state": text})
    with pytest.raises(CorruptStoreError, match=r"metadata pccheck_async\.state"):
        stores.import_(tmp_path / "f", tmp_path / "s", source="safetensors")


# -- the command


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_commands(tmp_path: Path) -> None:
    save(tmp_path / "s", {"model": {"a.b": torch.ones(3), "c": np.arange(3)}, "step": 7})
    result = runner.invoke(
        app, ["export", str(tmp_path / "s"), "--to", "torch", str(tmp_path / "o.pt"), "--keys", "model.*"]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("step 7: 2 tensors and 0 plain values, ")
    assert "changed: model.c (a numpy array, as a tensor)" in result.stderr
    result = runner.invoke(app, ["import", str(tmp_path / "o.pt"), str(tmp_path / "t"), "--from", "torch", "--step=9"])
    assert result.exit_code == 0, result.output
    assert "step 9" in result.stdout
    result = runner.invoke(app, ["import", str(tmp_path / "o.pt"), str(tmp_path / "t"), "--step=10"])
    assert f"{tmp_path / 'o.pt'} (torch): step 10" in result.stdout.replace("\n", "")
    assert torch.equal(load_sync(tmp_path / "t", step=9)["model"]["a.b"], torch.ones(3))
    result = runner.invoke(app, ["export", str(tmp_path / "s"), "--to=torch", str(tmp_path / "j.pt"), "--json"])
    found = json.loads(result.stdout)
    assert (found["checkpoint"]["step"], found["tensors"], found["values"]) == (7, 2, 1)
    assert found["changed"] == ["model.c (a numpy array, as a tensor)"]
    assert found["nbytes"] == (tmp_path / "j.pt").stat().st_size
    command = ["import", str(tmp_path / "j.pt"), str(tmp_path / "t"), "--from=torch", "--step=11", "--json"]
    assert json.loads(runner.invoke(app, command).stdout)["step"] == 11
    files = ["export", str(tmp_path / "s"), str(tmp_path / "f"), "--max-file-size=0.02kB"]
    assert runner.invoke(app, [*files, "--to=torch"]).exit_code == 2
    assert runner.invoke(app, [*files, "--to=safetensors"]).exit_code == 0
    assert len(as_transformers_reads(tmp_path / "f")) == 2
    result = runner.invoke(app, ["import", str(tmp_path / "f"), str(tmp_path / "u"), "--from=safetensors"])
    assert "step 7" in result.stdout
    assert runner.invoke(app, ["export", str(tmp_path / "s"), str(tmp_path / "d"), "--to=dcp"]).exit_code == 0
    result = runner.invoke(app, ["import", str(tmp_path / "d"), str(tmp_path / "v"), "--from=dcp", "--step=12"])
    assert "step 12" in result.stdout
    assert not difference(load_sync(tmp_path / "v"), load_sync(tmp_path / "s"))
    result = runner.invoke(app, ["export", str(tmp_path / "s"), str(tmp_path / "o.pt"), "--to=torch"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "FileExistsError" in result.stderr
    result = runner.invoke(app, ["export", str(tmp_path / "x"), str(tmp_path / "p"), "--to=dcp"])
    assert result.exit_code == 3
    result = runner.invoke(app, ["import", str(tmp_path / "x"), str(tmp_path / "t"), "--from=safetensors"])
    assert result.exit_code == 3
    for wrong in (["export", "x", "y"], ["export", "x", "y", "--to=onnx"], ["import", "x"], ["export", "x"]):
        assert runner.invoke(app, wrong).exit_code == 2


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """What is synced: its inode, its size by then, and its name by then."""
    seen: list[tuple[int, int, str]] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        found = os.fstat(fd)
        seen.append((found.st_ino, found.st_size, os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    return seen


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_an_export_is_durable_before_it_has_its_name(
    tmp_path: Path, to: Any, synced: list[tuple[int, int, str]]
) -> None:
    save(tmp_path / "store", {"tensor": torch.arange(3000)})
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "file"
    synced.clear()
    stores.export(tmp_path / "store", out, to=to)
    *before, last = synced
    assert last[0] == out.parent.stat().st_ino, "the name comes last"
    parts = [out, *out.rglob("*")]
    for part in parts:
        found = part.stat()
        sizes = [size for inode, size, name in before if inode == found.st_ino and not name.startswith(str(out))]
        assert sizes[-1:] == [found.st_size], part


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_an_export_that_replaces_another_has_its_name_durably(
    tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "store", {"tensor": torch.arange(3000)})
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "file"
    stores.export(tmp_path / "store", out, to=to)
    fsync, seen = os.fsync, list[tuple[int, int]]()

    def noted(fd: int) -> None:
        seen.append((os.fstat(fd).st_ino, out.stat().st_ino))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    stores.export(tmp_path / "store", out, to=to, overwrite=True)
    assert seen[-1] == (out.parent.stat().st_ino, out.stat().st_ino)
    assert seen[0][1] != seen[-1][1]


@pytest.fixture(params=[True, False], ids=["renameat2", "without"])
def _renameat2(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the filesystem renames to a new name only, as NFS does not."""
    if not request.param:
        monkeypatch.setattr(target, "rename_new", lambda *_: errno.EINVAL)


@pytest.mark.usefixtures("_renameat2")
@pytest.mark.parametrize("there", ["file", "empty folder", "folder", "link"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_appears_under_the_name_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, there: str
) -> None:
    """However late: also after the last look at the name, which finds nothing."""
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    name = tmp_path / "name"

    def appear() -> None:
        if there == "file":
            name.write_bytes(b"another's")
        elif there == "link":
            name.symlink_to("nowhere")
        else:
            name.mkdir()
            (name / "part").write_bytes(b"another's") if there == "folder" else None

    async def main() -> None:
        if kind == "folder":
            with new_folder(name) as folder:
                (folder / "part").write_bytes(b"mine")
                appear()
        else:
            async with new_file(name) as file:
                await file.write(b"mine")
                appear()

    with pytest.raises(FileExistsError, match="name was made by somebody else meanwhile"):
        asyncio.run(main())
    assert os.listdir(tmp_path) == ["name"]
    if there == "link":
        assert os.readlink(name) == "nowhere"
    elif there == "file":
        assert name.read_bytes() == b"another's"
    else:
        assert [path.read_bytes() for path in name.iterdir()] == [b"another's"] * (there == "folder")


@pytest.mark.usefixtures("_renameat2")
def test_a_name_is_taken_once(tmp_path: Path) -> None:
    """Of several exports to one name that end at once."""
    for make in (Path.mkdir, Path.touch):
        name = tmp_path / make.__name__
        candidates = [tmp_path / f"{name.name}-{number}" for number in range(8)]
        for candidate in candidates:
            make(candidate)

        def publish(candidate: Path, name: Path = name) -> bool:
            try:
                target.publish(candidate, name)
            except FileExistsError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(publish, candidates)) == 1
        assert sum(candidate.exists() for candidate in candidates) == 7


def test_an_older_step_becomes_the_newest_one_only_if_it_is_given(tmp_path: Path) -> None:
    """A run would go on from it, and drop the later one."""
    for folder, step in (("old", 39), ("run", 79)):
        with SyncCheckpointEngine(tmp_path / folder) as engine:
            engine.checkpoint({"x": torch.full((3,), float(step))}, step=step).result()
    file = tmp_path / "old.pt"
    stores.export(tmp_path / "old", file, to="torch")
    with pytest.raises(StoreError, match=r"run holds step 79, and .*old\.pt is of step 39: .* \(--step 39, step=39\)"):
        stores.import_(file, tmp_path / "run")
    assert [info.step for info in list_checkpoints(tmp_path / "run")] == [79]
    stores.import_(file, tmp_path / "run", step=39)
    assert [info.step for info in list_checkpoints(tmp_path / "run")] == [39, 79]
    stores.import_(file, tmp_path / "run")  # of the same step


@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_a_cancelled_export_ends_its_threads_and_leaves_nothing(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(30)

    class Raw(io.FileIO):
        def write(self, data: Any, /) -> int:
            if call == "write":
                wait()
            return super().write(data)

    def opens(path: Path, mode: str, *_: Any, **__: Any) -> io.BufferedWriter:
        if call == "open":
            wait()
        return io.BufferedWriter(Raw(path, mode))

    def syncs(fd: int, really: Callable[[int], None] = os.fsync) -> None:
        if call == "fsync":
            wait()
        really(fd)

    async def export() -> None:
        async with new_file(tmp_path / "out") as file:
            await file.write(bytes(1 << 20))

    async def main() -> None:
        monkeypatch.setattr("aiofiles.threadpool.sync_open", opens)
        monkeypatch.setattr(os, "fsync", syncs)
        exporting = asyncio.create_task(export())
        await asyncio.to_thread(begun.wait, 30)
        exporting.cancel()
        await asyncio.wait([exporting], timeout=0.05)
        assert not exporting.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await exporting

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_above_checkpoints_is_answered_with_those_below(tmp_path: Path) -> None:
    output = tmp_path / "output"
    for step in (1000, 500):
        (output / f"checkpoint-{step}").mkdir(parents=True)
        (output / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (output / "runs" / "events").mkdir(parents=True)
    logs = tmp_path / "lightning_logs"
    (logs / "version_0" / "checkpoints").mkdir(parents=True)
    torch.save({"state_dict": {}}, logs / "version_0" / "checkpoints" / "last.ckpt")
    (logs / "version_0" / "hparams.yaml").write_text("{}")
    cases: list[tuple[Path, Any, str]] = [
        (output, None, "checkpoint-500, checkpoint-1000"),
        (output, "transformers", "checkpoint-500, checkpoint-1000"),
        (logs, None, "version_0/checkpoints/last.ckpt"),
        (logs / "version_0" / "checkpoints", "lightning", "last.ckpt"),
        (logs, "dcp", "version_0/checkpoints/last.ckpt"),
    ]
    for folder, source, below in cases:
        with pytest.raises((FileNotFoundError, UnsupportedStateError)) as caught:
            stores.import_(folder, tmp_path / "s", source=source)
        assert str(caught.value).endswith(f"; it is one level too high or more: give {below}"), source
    with pytest.raises(UnsupportedStateError, match="is not recognised"):
        stores.import_(output / "runs", tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_an_export_into_a_missing_folder_names_it(to: Any, overwrite: bool, tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "s") as engine:
        engine.checkpoint({"x": torch.ones(3)}).result()
    with pytest.raises(WriteError, match=r"no such folder to write into: make it first: '.*missing'$"):
        stores.export(tmp_path / "s", tmp_path / "missing" / "out", to=to, overwrite=overwrite)


def test_an_imported_file_of_no_step_comes_after_the_newest(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "old.pt")
    with SyncCheckpointEngine(tmp_path / "store") as engine:
        engine.checkpoint({"x": torch.zeros(2)}, step=500).result()
    assert stores.import_(tmp_path / "old.pt", tmp_path / "store").step == 501
    assert stores.import_(tmp_path / "old.pt", tmp_path / "other").step == 0


def test_an_import_that_lacks_what_the_newest_one_has_says_so(tmp_path: Path) -> None:
    save(tmp_path / "s", {"model": torch.ones(3), "optimizer": torch.ones(3), "rng": 1})
    torch.save({"model": torch.ones(3)}, tmp_path / "weights.pt")
    info = stores.import_(tmp_path / "weights.pt", tmp_path / "s", step=9)
    (lacks,) = info.missing
    assert lacks.startswith("optimizer, rng (which step 7 of ")
    assert stores.import_(tmp_path / "weights.pt", tmp_path / "s", step=10).missing == ()
