"""Stores written by an older version: loaded, listed, verified, continued and exported like one's own.

The reverse cannot be tested without that version. In its place: what is written today for the same states has the same
bytes, and those of the recorded stores are the only ones that their contents have.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec import structs

from pccheck_async import SyncCheckpointEngine, list_checkpoints, load_sync, stores
from pccheck_async.format import Identity, Record
from pccheck_async.format.manifest import Manifest, decode, encode
from pccheck_async.format.record import (
    REGION_NBYTES,
    decode_identity,
    decode_record,
    encode_identity,
    encode_record,
    slot_name,
)
from pccheck_async.state.stateful import is_stateful
from tests.support import recorded_stores
from tests.support.recorded_stores import STORES, counted
from tests.support.settings import engine_settings
from tests.support.state_strategies import difference

FIXTURES = Path(__file__).parent / "fixtures"
LISTED = {"kept": [22, 21, 20, 10, 5], "damaged": [2, 1], "superseded": [2]}
"""Steps that a store names, newest first, where those are not all that were written."""
FALLEN_BACK = pytest.mark.filterwarnings("ignore:checkpoint of step 2 cannot be read.*falling back:RuntimeWarning")

Unpack = Callable[[str], Path]


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    def unpacked(name: str) -> Path:
        with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
            archive.extractall(tmp_path)
        return tmp_path / name

    return unpacked


def as_loaded(state: dict[str, Any]) -> dict[str, Any]:
    """What ``load`` gives for a live state, without what depends on the versions of torch and the machine."""
    loaded = {name: value.state_dict() if is_stateful(value) else value for name, value in state.items()}
    for part, entry in (("optimizer", "param_groups"), ("rng", "cuda")):
        if part in loaded:
            del loaded[part][entry]
    loaded.pop("scheduler", None)
    return loaded


def without_versions(loaded: dict[str, Any]) -> dict[str, Any]:
    return as_loaded({name: value for name, value in loaded.items() if name != "scheduler"})


@pytest.mark.parametrize("name", STORES)
def test_lists(unpack: Unpack, name: str) -> None:
    recorded = STORES[name]
    steps = LISTED.get(name, [*recorded.steps])
    found = list_checkpoints(unpack(name))
    assert [info.step for info in found] == steps
    assert [info.metadata for info in found] == [{"loss": step / 4} for step in steps]
    assert [info.step for info in found if info.pinned] == [recorded.pinned] * (recorded.pinned is not None)
    counters = [info.counter for info in found]
    assert counters == sorted(counters, reverse=True)


@pytest.mark.parametrize("name", STORES)
def test_verifies(unpack: Unpack, name: str) -> None:
    verified = stores.verify(unpack(name), every=True)
    damaged = [checked.info.step for checked in verified.checkpoints if checked.damage]
    assert damaged == [2] * STORES[name].damaged
    assert {copy.state for copy in verified.records} <= {"valid", "empty"}


@pytest.mark.parametrize("name", [name for name, recorded in STORES.items() if not recorded.damaged])
def test_loads(unpack: Unpack, name: str) -> None:
    path = unpack(name)
    for step, make in STORES[name].steps.items():
        loaded = without_versions(load_sync(path, step=step))
        assert not difference(as_loaded(make()), loaded)


@FALLEN_BACK
@pytest.mark.parametrize("name", ["damaged", "superseded"])
def test_falls_back(unpack: Unpack, name: str) -> None:
    assert not difference(counted(1), load_sync(unpack(name)))


def test_restores_a_training(unpack: Unpack) -> None:
    path, expected = unpack("training"), recorded_stores.training()
    numbers = torch.rand(3)
    state = recorded_stores.training()
    with torch.no_grad():
        for tensor in state["model"].state_dict().values():
            tensor.zero_()
    state["optimizer"].state.clear()
    state["epoch"] = 0
    with SyncCheckpointEngine(path) as engine:
        restored = engine.restore(state)
    assert restored is not None
    assert restored.step == 41
    assert torch.equal(torch.rand(3), numbers)
    state["rng"].load_state_dict(expected["rng"].state_dict())
    assert not difference(as_loaded(expected), as_loaded(state))


@FALLEN_BACK
@pytest.mark.parametrize("name", STORES)
def test_continues(unpack: Unpack, name: str) -> None:
    """A new checkpoint on top, of which both record copies and what was kept before are whole."""
    path, recorded = unpack(name), STORES[name]
    newest = max(recorded.steps)
    with SyncCheckpointEngine(path, **engine_settings(**recorded.options)) as engine:
        latest = engine.latest
        assert latest is not None
        if recorded.damaged:
            state = counted(0)
            restored = engine.restore(state)
            assert restored is not None
            assert not difference(counted(1), state)
        info = engine.checkpoint(counted(newest + 1), step=newest + 1).result()
        assert info.counter > latest.counter
    assert not difference(counted(newest + 1), load_sync(path))
    verified = stores.verify(path, every=True)
    assert verified.whole
    keeps = {"kept": [23, 22, 20, 10, 5], "damaged": [3, 1]}
    assert [info.step for info in list_checkpoints(path)] == keeps.get(name, [newest + 1])


EXPORTED = {
    "values": ["none", "bools", "ints", "floats", "strings", "bytes", "ordered", "counter", "size", "dtype"],
    "training": ["model", "optimizer", "scheduler", "epoch"],
    "arrays": ["scalar", "empty", "transposed", "strided", "expanded", "gradient", "parameter", "dtypes.int*"],
}


@pytest.mark.parametrize("name", [name for name in STORES if name != "superseded"])
def test_exports(unpack: Unpack, name: str, tmp_path: Path) -> None:
    path, keys, step = unpack(name), EXPORTED.get(name), min(STORES[name].steps)
    loaded = load_sync(path, step=step, keys=keys)
    formats: tuple[tuple[Literal["torch", "safetensors"], tuple[str, ...]], ...] = (
        ("torch", ()),
        ("safetensors", ("transposed", "strided", "expanded")),  # it has C order only
    )
    for to, packed in formats:
        stores.export(path, tmp_path / to, to=to, step=step, keys=keys)
        stores.import_(tmp_path / to, tmp_path / f"again.{to}", source=to)
        imported = load_sync(tmp_path / f"again.{to}")
        assert imported.keys() == loaded.keys()
        for key, value in loaded.items():
            assert torch.equal(value, imported[key]) if key in packed else not difference(value, imported[key])


def records(path: Path) -> tuple[Identity, list[tuple[Record, bytes]]]:
    """The identity and the valid record copies of a store, each with the bytes of its region."""
    identity = decode_identity((path / "store.json").read_bytes())
    commit = (path / "commit").read_bytes()
    regions = [commit[start : start + REGION_NBYTES] for start in range(0, len(commit), REGION_NBYTES)]
    decoded = [(decode_record(region, identity.id_bytes), region) for region in regions]
    return identity, [(record, region) for record, region in decoded if record is not None]


def manifests(path: Path) -> dict[int, tuple[Manifest, bytes]]:
    """The manifests that the newest record names, decoded and as bytes, by their steps."""
    newest = max((record for record, _ in records(path)[1]), key=lambda record: record.generation)
    found = {}
    for entry in newest.entries:
        slot = (path / slot_name(entry.slot)).read_bytes()
        data = slot[entry.manifest_offset : entry.manifest_offset + entry.manifest_nbytes]
        found[entry.step] = decode(data), data
    return found


@pytest.mark.parametrize("name", STORES)
def test_the_same_values_have_the_same_bytes(unpack: Unpack, name: str) -> None:
    path = unpack(name)
    identity, copies = records(path)
    assert encode_identity(identity) == (path / "store.json").read_bytes()
    assert len(copies) == 4
    for record, region in copies:
        assert encode_record(record, identity.id_bytes, identity.block_bytes).ljust(REGION_NBYTES, b"\0") == region
    for manifest, data in manifests(path).values():
        assert encode(manifest) == data


@pytest.mark.parametrize("name", ["values", "arrays", "kept"])
def test_the_same_states_are_written_with_the_same_bytes(unpack: Unpack, name: str, tmp_path: Path) -> None:
    """Payload (by its checksums), manifest and record entries: all but times and the numbers of slots."""
    old, new = unpack(name), tmp_path / "new"
    recorded_stores.write(STORES[name], new)
    if records(new)[0].block_bytes != records(old)[0].block_bytes:
        pytest.skip("this filesystem asks for blocks of another size, to which everything is aligned")
    written, expected = manifests(new), manifests(old)
    for step, (manifest, data) in expected.items():
        assert encode(structs.replace(written[step][0], time=manifest.time)) == data
    entries = [max(records(path)[1], key=lambda copy: copy[0].generation)[0].entries for path in (old, new)]
    varying = {"time": 0.0, "slot": 0, "manifest_checksum": 0}
    for one, other in zip(*entries, strict=True):
        assert structs.replace(one, **varying) == structs.replace(other, **varying)
