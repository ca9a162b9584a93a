"""Looking after stores: describe, verify, compare, copy, drop and pin."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pccheck_async import NoCheckpointError, StorageOptions, SyncCheckpointEngine, list_checkpoints, load_sync, stores
from pccheck_async.cli import app
from pccheck_async.errors import CorruptStoreError, StoreError, StoreFullError, StoreLockedError
from pccheck_async.format.manifest import ChunkEntry
from pccheck_async.format.record import COMMIT_NBYTES, MOST_ENTRIES, REGION_NBYTES
from pccheck_async.medium import File, Medium
from pccheck_async.medium.files import Files
from pccheck_async.store.chunks import runs
from pccheck_async.stores import Verification
from pccheck_async.testing import CrashDisk, CrashWriter, ImageWriter, power_loss_images
from pccheck_async.transfer.operations import Operations
from pccheck_async.upkeep.verify import examine_records
from tests.engine.test_inline_capture_engine import FOLDER, small
from tests.support.damage import BadBlocks
from tests.support.saving import saving
from tests.support.state_strategies import difference, states

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "machine_asked_once")
CHUNK = 4096


def state_of(step: int) -> dict[str, Any]:
    return {
        "a": torch.arange(3000, dtype=torch.float32) + step,
        "b": torch.full((5000,), float(step)),
        "step": step,
    }


def save(path: Path, *steps: int, keep_last: int = 8, chunk_bytes: int = CHUNK, **metadata: Any) -> None:
    with SyncCheckpointEngine(
        path, keep_last=keep_last, max_in_flight=1, storage=StorageOptions(chunk_bytes=chunk_bytes)
    ) as engine:
        for step in steps:
            engine.checkpoint(state_of(step), step=step, metadata=metadata).result(60)


def image(path: Path) -> dict[str, tuple[bytes, int]]:
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


# -- describe


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 4))
    state = {
        "model": {"weight": weight, "tied": weight, "transposed": weight.detach().t(), "row": weight.detach()[3]},
        "module": torch.nn.Linear(2, 2),
        "empty": torch.zeros(0, 3),
        "numbers": np.arange(4, dtype=np.int16),
        "a.b": [1, (2, None)],
        "list": [torch.ones(2), {"x": 1.5}],
        "nothing": {},
    }
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state, step=3, metadata={"loss": 0.5}).result(60)
        found = stores.describe(tmp_path)  # beside the writer
    leaves = {leaf.path: leaf for leaf in found.leaves}
    assert list(leaves)[:4] == ["model.weight", "model.tied", "model.transposed", "model.row"]
    assert leaves["model.weight"].kind == "parameter"
    assert leaves["model.weight"].alias_of is None
    assert {leaves[f"model.{name}"].alias_of for name in ("tied", "transposed", "row")} == {"model.weight"}
    assert leaves["module.weight"].nbytes == 16
    assert (leaves["empty"].nbytes, leaves["empty"].extent) == (0, None)
    assert leaves["numbers"].kind == "ndarray"
    assert (leaves["a.b"].value(), leaves["a.b"].kind) == ([1, (2, None)], "list")
    assert leaves["list.1.x"].text() == "1.5"
    assert leaves["nothing"].value() == {}
    assert found.branches["module"] == "object of OrderedDict"
    assert found.aliases == 3
    assert found.array_nbytes == 128 * 3 + 16 + 16 + 8 + 8 + 8
    assert found.info.step == 3
    assert sum(chunk.nbytes for chunk in found.chunks) == found.info.nbytes == found.manifest_offset
    assert found.slot_nbytes == (tmp_path / found.slot).stat().st_size
    with pytest.raises(NoCheckpointError, match="of step 4"):
        stores.describe(tmp_path, step=4)
    with pytest.raises(NoCheckpointError, match="holds no store"):
        stores.describe(tmp_path / "missing")


def test_values_too_long_to_show(tmp_path: Path) -> None:
    state = {
        "text": "x" * 10**6,
        "bytes": b"y" * 10**6,
        "int": 10**5000,
        "ints": [10**5000],
        "\x1b[2J": "\x1b[2J\u202e",
    }
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state, step=1).result(60)
    texts = {leaf.path: leaf.text() for leaf in stores.describe(tmp_path).leaves}
    assert max(map(len, texts.values())) <= 80
    assert all(text.isprintable() for text in texts.values())


# -- reading writes nothing


@pytest.mark.slow
def test_reading_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    before = image(tmp_path)
    stores.describe(tmp_path)
    stores.verify(tmp_path, every=True)
    stores.compare(tmp_path, step=1)
    stores.copy(tmp_path, tmp_path.with_name("target"))
    stores.recover(tmp_path)
    stores.recover(tmp_path, search=True)
    assert image(tmp_path) == before


@pytest.mark.parametrize("read", [stores.describe, stores.verify, stores.compare, stores.recover])
def test_reading_opens_nothing_for_writing(tmp_path: Path, read: Callable[..., object]) -> None:
    disk = CrashDisk()
    with SyncCheckpointEngine("anywhere", storage=StorageOptions(io=CrashWriter(disk))) as engine:
        engine.checkpoint(state_of(1), step=1).result(60)
    read("anywhere", io=CrashWriter(disk, read_only=True, turns=0))


def test_reading_makes_no_folder(tmp_path: Path) -> None:
    reading: list[Callable[..., object]] = [stores.describe, stores.verify, stores.compare, stores.recover]
    for function in reading:
        with pytest.raises(NoCheckpointError):
            function(tmp_path / "missing")
    with pytest.raises(NoCheckpointError):
        stores.copy(tmp_path / "missing", tmp_path / "target")
    with pytest.raises(NoCheckpointError):
        stores.remove(tmp_path / "missing", step=[1])
    with pytest.raises(NoCheckpointError):
        stores.pin(tmp_path / "missing", step=1)
    assert os.listdir(tmp_path) == []


# -- verify


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(1, 40))
def test_runs_cover_every_chunk_once(sizes: list[int], most: int) -> None:
    chunks, offset = [], 0
    for size in sizes:
        chunks.append(ChunkEntry(offset, size, 0))
        offset += size
    found = list(runs(chunks, most))
    assert [chunk for run in found for chunk in run.chunks] == chunks
    assert [run.first for run in found] == [chunks.index(run.chunks[0]) for run in found]
    assert all(run.nbytes <= most or len(run.chunks) == 1 for run in found)


def test_a_whole_store(tmp_path: Path, io: str) -> None:
    save(tmp_path, 1, 2, 3)
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))

    found = stores.verify(tmp_path, every=True, progress=progress, io=io)  # type: ignore[arg-type]
    assert found.whole
    assert [checked.info.step for checked in found.checkpoints] == [3, 2, 1]
    assert [copy.state for copy in found.records] == ["valid"] * 4
    assert seen[-1] == (found.nbytes, found.nbytes)
    assert found.nbytes == sum(checked.nbytes for checked in found.checkpoints)
    assert [c.info.step for c in stores.verify(tmp_path).checkpoints] == [3]
    assert [c.info.step for c in stores.verify(tmp_path, step=2).checkpoints] == [2]
    with pytest.raises(NoCheckpointError):
        stores.verify(tmp_path, step=9)


def test_what_a_trainer_drops_meanwhile_is_left_out(tmp_path: Path) -> None:
    """Also where its slot holds another checkpoint by then."""
    with SyncCheckpointEngine(tmp_path, keep_last=3, max_in_flight=1) as engine:
        for step in (1, 2, 3):
            engine.checkpoint(state_of(step), step=step).result(60)

        def progress(done: int, total: int) -> None:
            if engine.latest.step == 3:  # type: ignore[union-attr]
                for step in (4, 5):
                    engine.checkpoint(state_of(step), step=step).result(60)

        found = stores.verify(tmp_path, every=True, progress=progress)
    assert found.whole
    assert [checked.info.step for checked in found.checkpoints] == [3]


@pytest.mark.parametrize("chunk_bytes", [CHUNK, 1 << 20])
def test_a_flipped_bit_in_every_chunk_is_named(tmp_path: Path, chunk_bytes: int) -> None:
    save(tmp_path, 1, chunk_bytes=chunk_bytes)
    described = stores.describe(tmp_path)
    slot = tmp_path / described.slot
    for number, chunk in enumerate(described.chunks):
        for offset in (chunk.offset, chunk.offset + chunk.nbytes - 1):  # the last one may be padding
            flip(slot, offset)
            (checked,) = stores.verify(tmp_path).checkpoints
            flip(slot, offset)
            (damage,) = checked.damage
            assert (damage.what, damage.offset, damage.nbytes) == (f"chunk {number}", chunk.offset, chunk.nbytes)
            leaves = [
                leaf.path
                for leaf in described.leaves
                if leaf.extent and leaf.extent[0] < chunk.offset + chunk.nbytes and chunk.offset < leaf.extent[1]
            ]
            assert list(damage.leaves) == leaves
            assert leaves
    assert stores.verify(tmp_path).whole


def test_a_damaged_manifest_and_a_short_and_a_missing_slot(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    described = stores.describe(tmp_path)
    slot = tmp_path / described.slot
    flip(slot, described.manifest_offset + described.manifest_nbytes - 1)
    newest, older = stores.verify(tmp_path, every=True).checkpoints
    assert [damage.what for damage in newest.damage] == ["manifest"]
    assert not older.damage
    slot.unlink()
    found = stores.verify(tmp_path)
    assert [damage.what for damage in found.checkpoints[0].damage] == ["slot"]
    assert not found.whole
    slot.write_bytes(b"")
    assert not stores.verify(tmp_path).whole


def test_a_sector_that_cannot_be_read(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def bad(path: str, operations: Operations) -> Medium:
        return BadBlocks(Files(path, operations), {"slot-000": {2}})

    (checked,) = stores.verify(tmp_path, io=bad).checkpoints
    (damage,) = checked.damage
    assert (damage.what, damage.offset, damage.leaves) == ("chunk 2", 8192, ("a", "b"))
    assert "cannot be read" in damage.reason


@pytest.mark.slow
@pytest.mark.parametrize("region", range(4))
def test_each_copy_of_each_record(tmp_path: Path, region: int) -> None:
    save(tmp_path, 1, 2)
    flip(tmp_path / "commit", region * REGION_NBYTES + 70)
    found = stores.verify(tmp_path)
    assert not found.whole
    assert [copy.state == "damaged" for copy in found.records] == [number == region for number in range(4)]
    assert not found.checkpoints[0].damage


@pytest.mark.slow
def test_the_copies_of_a_young_store(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path):
        pass
    store_id = describe_id(tmp_path)
    young = bytearray((tmp_path / "commit").read_bytes())
    assert [copy.state for copy in examine_records(memoryview(young), store_id)] == ["valid", "valid", "blank", "blank"]
    assert [copy.state for copy in examine_records(memoryview(young[:-1]), store_id)][3] == "damaged"
    save(tmp_path, 1)
    commit = bytearray((tmp_path / "commit").read_bytes())
    commit[2 * REGION_NBYTES : 3 * REGION_NBYTES] = bytes(REGION_NBYTES)  # one that was there
    states = [copy.state for copy in examine_records(memoryview(commit), store_id)]
    assert states == ["valid", "valid", "damaged", "valid"]
    save(tmp_path, 2)
    newer = bytearray((tmp_path / "commit").read_bytes())
    newer[REGION_NBYTES : 2 * REGION_NBYTES] = young[REGION_NBYTES : 2 * REGION_NBYTES]  # a kill between two writes
    assert [copy.state for copy in examine_records(memoryview(newer), store_id)] == ["valid", "older", "valid", "valid"]
    assert len(newer) == COMMIT_NBYTES


def describe_id(path: Path) -> bytes:
    from pccheck_async.format.record import decode_identity

    return decode_identity((path / "store.json").read_bytes()).id_bytes


@pytest.mark.slow
def test_no_valid_record_points_to_recover(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "commit").write_bytes(bytes(COMMIT_NBYTES))
    with pytest.raises(CorruptStoreError, match="pccheck recover"):
        stores.verify(tmp_path)


@pytest.mark.slow
def test_verify_and_compare_beside_a_busy_writer(tmp_path: Path) -> None:
    with (
        SyncCheckpointEngine(tmp_path, keep_last=2, storage=StorageOptions(chunk_bytes=CHUNK)) as engine,
        saving(engine, state_of),
    ):
        for _ in range(20):
            found: Verification = stores.verify(tmp_path, every=True)
            assert found.whole, found
            compared = stores.compare(tmp_path)
            wanted = {"a", "b", "step"} if compared.one.step != compared.other.step else set()
            assert {each.path for each in compared.differences} == wanted
            stores.describe(tmp_path)


# -- compare


def saved(path: Path, *all_of: dict[str, Any]) -> Path:
    with SyncCheckpointEngine(path, keep_last=8, storage=StorageOptions(chunk_bytes=CHUNK)) as engine:
        for step, state in enumerate(all_of):
            engine.checkpoint(state, step=step).result(60)
    return path


def test_what_differs(tmp_path: Path) -> None:
    base = torch.arange(6000, dtype=torch.float64)
    one = {
        "same": torch.ones(10),
        "elements": base,
        "nan": torch.tensor([math.nan, 1.0]),
        "gone": torch.ones(3),
        "dtype": torch.ones(3),
        "shape": torch.ones(4),
        "kind": torch.ones(2),
        "grad": torch.ones(2),
        "value": 1,
        "type": 1,
        "leaf": torch.ones(2),
        "box": {"x": torch.ones(2)},
        "text": "a",
    }
    two = {
        **one,
        "elements": base.clone().index_add_(0, torch.tensor([5, 5999]), torch.tensor([0.5, -1.0], dtype=torch.float64)),
        "dtype": torch.ones(3, dtype=torch.float16),
        "shape": torch.ones(2, 2),
        "kind": torch.nn.Parameter(torch.ones(2)),
        "grad": torch.ones(2, requires_grad=True),
        "value": 2,
        "type": 1.0,
        "leaf": None,
        "box": OrderedDict(x=torch.ones(2)),
        "new": torch.ones(5),
    }
    del two["gone"]
    saved(tmp_path, one, two)
    found = stores.compare(tmp_path, step=0, other_step=1)
    changes = {each.path: each for each in found.differences}
    assert {path: each.change for path, each in changes.items()} == {
        "box": "container",
        "elements": "elements",
        "gone": "removed",
        "dtype": "dtype",
        "shape": "shape",
        "kind": "kind",
        "grad": "kind",
        "value": "value",
        "type": "value",
        "leaf": "kind",
        "new": "added",
    }
    elements = changes["elements"].difference
    assert elements is not None
    assert (elements.total, elements.bits, elements.values) == (6000, 2, 2)
    assert elements.most_absolute == 1.0
    assert elements.most_relative == pytest.approx(0.5 / 5.5)
    assert (changes["value"].one, changes["value"].other) == ("int 1", "int 2")
    assert changes["type"].other == "float 1.0"
    assert found.leaves == 14
    assert not stores.compare(tmp_path, step=1).differences


@pytest.mark.slow
def test_elements_are_compared_wherever_they_lie(tmp_path: Path) -> None:
    """Transposed, with gaps, expanded, as views of one storage, in another order in memory."""
    plain = torch.arange(12.0).reshape(3, 4)
    wide = torch.arange(48.0).reshape(6, 8)
    one = {"t": plain.clone(), "gaps": wide[::2, ::2].clone(), "expanded": torch.ones(3, 4), "rev": np.arange(5)}
    two = {
        "t": plain.t().contiguous().t(),
        "gaps": wide[::2, ::2],
        "expanded": torch.ones(1).expand(3, 4),
        "rev": np.arange(5)[::-1].copy()[::-1],
    }
    saved(tmp_path, one, two)
    assert not stores.compare(tmp_path, step=0, other_step=1).differences
    wide[2, 4] = -1
    saved(tmp_path / "other", two)
    found = stores.compare(tmp_path, tmp_path / "other", step=0)
    (each,) = found.differences
    assert each.path == "gaps"
    assert each.difference is not None
    assert (each.difference.total, each.difference.bits) == (12, 1)


def test_aliases_differ_each_by_its_own_name(tmp_path: Path) -> None:
    one = torch.rand(40000)
    other = one + 1
    saved(tmp_path, {f"n{n}": one for n in range(20)}, {f"n{n}": other for n in range(20)})
    found = stores.compare(tmp_path, step=0, other_step=1)
    assert [each.path for each in found.differences] == [f"n{n}" for n in range(20)]
    assert len({id(each.difference) for each in found.differences}) == 1  # compared once
    assert found.nbytes == 20 * 160000


@pytest.mark.slow
def test_leaves_that_go_to_and_fro_in_the_payload(tmp_path: Path) -> None:
    def state(end: float) -> dict[str, Any]:
        one, two = torch.zeros(20000), torch.zeros(20000)
        one[-1] = two[-1] = end
        found = {}
        for n in range(0, 20000, 2500):
            found[f"one{n}"], found[f"two{n}"] = one[n : n + 2500], two[n : n + 2500]
        return found | {f"again{n}": one[n : n + 7] for n in range(19992, 0, -3333)}

    saved(tmp_path, state(0.0), state(1.0))
    found = stores.compare(tmp_path, step=0, other_step=1)
    assert [each.path for each in found.differences] == ["one17500", "two17500"]


def test_damage_is_not_compared(tmp_path: Path) -> None:
    saved(tmp_path, state_of(0), state_of(1))
    flip(tmp_path / stores.describe(tmp_path).slot, 5000)
    with pytest.raises(CorruptStoreError, match=r"chunk 1 .* is damaged: .*; it holds a of step 1;"):
        stores.compare(tmp_path, step=0)


@pytest.mark.slow
@given(states())
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_state_equals_itself_and_its_copy(state: dict[str, Any]) -> None:
    disk, other = CrashDisk(), CrashDisk()
    with SyncCheckpointEngine(
        "source", storage=StorageOptions(io=CrashWriter(disk), chunk_bytes=CHUNK), keep_last=2
    ) as engine:
        for step in range(2):
            engine.checkpoint(state, step=step).result(60)

    def io(path: str, _: Operations) -> Medium:
        return CrashWriter(disk if path == "source" else other, turns=0)

    assert not stores.compare("source", step=0, io=io).differences
    stores.copy("source", "target", io=io)
    assert not stores.compare("source", "target", io=io).differences
    assert not difference(load_sync("source", io=io), load_sync("target", io=io))
    assert stores.describe("target", io=io).info.step == 1


# -- copy


@pytest.mark.slow
def test_a_copy_is_the_same_checkpoint(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save(source, 1, 2, 3, loss=0.25)
    infos = {info.step: info for info in list_checkpoints(source)}
    with SyncCheckpointEngine(source) as engine:  # a trainer has it open
        assert engine.latest
        assert stores.copy(source, target, step=2) == infos[2]
    assert list_checkpoints(target) == [infos[2]]
    assert not difference(load_sync(source, step=2), load_sync(target))
    assert stores.verify(target, every=True).whole
    assert len(list(target.glob("slot-*"))) == 1  # an archive takes no more space than it holds

    assert stores.copy(source, target) == infos[3]
    older = stores.copy(source, target, step=1, pinned=True)  # counters grow
    assert (older.counter, older.step, older.pinned, older.metadata) == (3, 1, True, {"loss": 0.25})
    assert [info.step for info in list_checkpoints(target)] == [1, 3, 2]
    assert stores.verify(target, every=True).whole
    with SyncCheckpointEngine(target, keep_last=3) as engine:
        live = state_of(9)
        restored = engine.restore(live)
        assert restored is not None
        assert live["step"] == restored.step == 1
        assert engine.checkpoint(state_of(4), step=4).result(60).counter == 4
    assert stores.copy(target, source, step=1).pinned  # as it is there


@pytest.mark.slow
def test_what_cannot_be_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save(source, 1, 2)
    save(target, 7)
    with pytest.raises(ValueError, match="are one folder"):
        stores.copy(source, tmp_path / "." / "source")
    with SyncCheckpointEngine(target), pytest.raises(StoreLockedError):
        stores.copy(source, target)
    described = stores.describe(source)
    flip(source / described.slot, described.chunks[3].offset)
    with pytest.raises(CorruptStoreError, match=r"chunk 3 .* of the checkpoint of step 2 is damaged"):
        stores.copy(source, target)
    assert [info.step for info in list_checkpoints(target)] == [7]
    assert stores.verify(target, every=True).whole
    stores.copy(source, target, step=1)
    assert [info.step for info in list_checkpoints(target)] == [1, 7]


def test_a_full_record_takes_no_copy() -> None:
    disk, other = CrashDisk(), CrashDisk()
    for where, count in ((disk, 1), (other, MOST_ENTRIES)):
        with SyncCheckpointEngine("x", storage=StorageOptions(io=CrashWriter(where)), keep_last=MOST_ENTRIES) as engine:
            for step in range(count):
                engine.checkpoint({"x": torch.ones(3)}, step=step).result(60)

    def io(path: str, _: Operations) -> Medium:
        return CrashWriter(disk if path == "source" else other)

    with pytest.raises(StoreFullError, match="remove some first"):
        stores.copy("source", "target", io=io)
    assert len(list_checkpoints("target", io=io)) == MOST_ENTRIES


@pytest.mark.slow
def test_a_copy_that_loses_power_leaves_the_old_or_the_new_store() -> None:
    source, target = CrashDisk(), CrashDisk()
    for disk, step in ((source, 5), (target, 1)):
        with SyncCheckpointEngine(
            "x", storage=StorageOptions(io=CrashWriter(disk), chunk_bytes=CHUNK), max_in_flight=1
        ) as engine:
            engine.checkpoint(state_of(step), step=step).result(60)
    history: list[Any] = []
    target.observer = history.append

    def io(path: str, _: Operations) -> Medium:
        return CrashWriter(source if path == "source" else target)

    stores.copy("source", "target", io=io)
    seen = set()
    for snapshot in history:
        for found in power_loss_images(snapshot, sector=4096, limit=3):
            steps = [info.step for info in list_checkpoints("target", io=ImageWriter(found))]
            assert steps in ([1], [5, 1])
            seen.add(len(steps))
            for step in steps:
                assert not difference(load_sync("target", step=step, io=ImageWriter(found)), state_of(step))
    assert seen == {1, 2}


# -- remove and pin


def test_removing_frees_space(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep_last=4)
    before = {file.name: file.stat().st_size for file in tmp_path.glob("slot-*")}
    removal = stores.remove(tmp_path, step=[2, 4])
    after = {file.name: file.stat().st_size for file in tmp_path.glob("slot-*")}
    assert [info.step for info in removal.removed] == [4, 2]
    assert removal.freed_nbytes == sum(before.values()) - sum(after.values()) > 2 * removal.removed[0].nbytes
    assert len(after) == len(before) - 2
    assert [info.step for info in list_checkpoints(tmp_path)] == [3, 1]
    assert stores.verify(tmp_path, every=True).whole
    with SyncCheckpointEngine(tmp_path, keep_last=4) as engine:
        assert engine.restore(state_of(0)) is not None
        assert engine.checkpoint(state_of(5), step=5).result(60).counter == 3  # of what is known


def test_all_or_nothing_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    before = image(tmp_path)
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 7; there are steps 2, 1; nothing was removed"):
        stores.remove(tmp_path, step=[1, 7])
    with pytest.raises(StoreError, match="no checkpoint would be left"):
        stores.remove(tmp_path, step=[1, 2])
    with pytest.raises(TypeError, match="step must be an integer, not None"):  # nor is it "all without a name"
        stores.remove(tmp_path, step=[None], force=True)  # type: ignore[list-item]
    assert image(tmp_path) == before
    assert len(stores.remove(tmp_path, step=[1, 2], force=True).removed) == 2
    assert list_checkpoints(tmp_path) == []


def test_every_checkpoint_of_a_step_goes(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 1)
    assert [info.counter for info in stores.remove(tmp_path, step=[1]).removed] == [2, 0]
    assert [info.step for info in list_checkpoints(tmp_path)] == [2]


def test_a_trainer_that_runs_is_told_of(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        for step in (1, 2):
            engine.checkpoint(state_of(step), step=step).result(60)
        change: Any
        for change in (
            lambda: stores.remove(tmp_path, step=[1]),
            lambda: stores.pin(tmp_path, step=1),
            lambda: stores.reject(tmp_path, step=2),
        ):
            with pytest.raises(StoreLockedError, match=r"engine\.unpin, engine\.remove and engine\.reject"):
                change()
        assert [info.step for info in engine.checkpoints()] == [2, 1]


def test_rejected_ones_are_copied_and_shown_as_such_and_the_newest_that_is_not_is_read(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, 3)
    assert [info.step for info in stores.reject(tmp_path / "run", step=2)] == [3, 2]
    run = tmp_path / "run"
    assert stores.describe(run).info.step == load_sync(run)["step"] == 1
    assert [each.info.step for each in stores.verify(run).checkpoints] == [1]
    assert [each.info.step for each in stores.verify(run, every=True).checkpoints] == [3, 2, 1]
    assert stores.describe(run, step=3).info.rejected
    assert stores.copy(run, tmp_path / "copy").step == 1
    assert stores.copy(run, tmp_path / "copy", step=3).rejected  # it stays what it is
    assert load_sync(tmp_path / "copy")["step"] == 1
    commit = (run / "commit").read_bytes()
    for step, error in ((2, NoCheckpointError), (1, StoreError), (9, NoCheckpointError)):
        with pytest.raises(error):
            stores.reject(run, step=step)
    assert (run / "commit").read_bytes() == commit
    with pytest.raises(StoreError, match="none but rejected"):
        stores.remove(run, step=[1])
    save(run, 4, keep_last=1)
    assert [info.step for info in list_checkpoints(run)] == [4]


def test_a_copy_may_have_the_name_of_a_rejected_one_as_a_new_checkpoint_may(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    with SyncCheckpointEngine(run, keep_last=3) as engine:
        for step in (1, 2):
            engine.checkpoint({"step": step}, step=step, name=f"epoch={step}").result()
    with SyncCheckpointEngine(other) as engine:
        engine.checkpoint({"step": 20}, step=20, name="epoch=2").result()
    with pytest.raises(ValueError, match="named 'epoch=2' already"):
        stores.copy(other, run)
    stores.reject(run, step=2)
    assert stores.copy(run, tmp_path / "copy", name="epoch=2").rejected
    assert stores.copy(other, run).name == "epoch=2"
    assert [(info.step, info.rejected) for info in list_checkpoints(run)] == [(20, False), (1, False)]
    assert load_sync(run, name="epoch=2") == {"step": 20}
    with pytest.raises(ValueError, match="named 'epoch=2' already"):
        stores.copy(tmp_path / "copy", run, name="epoch=2")


@pytest.mark.slow
def test_pins_hold_against_the_rules_of_a_trainer(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    assert stores.pin(tmp_path, step=1).pinned
    commit = (tmp_path / "commit").read_bytes()
    assert stores.pin(tmp_path, step=1).pinned
    assert (tmp_path / "commit").read_bytes() == commit  # it was so already
    save(tmp_path, 3, keep_last=1)
    assert [(info.step, info.pinned) for info in list_checkpoints(tmp_path)] == [(3, False), (1, True)]
    assert not stores.unpin(tmp_path, step=1).pinned
    save(tmp_path, 4, keep_last=1)
    assert [info.step for info in list_checkpoints(tmp_path)] == [4]
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 1"):
        stores.pin(tmp_path, step=1)


@pytest.mark.slow
def test_what_is_unpinned_is_left_to_the_rules(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    assert stores.pin(tmp_path, step=1).pinned
    assert not stores.unpin(tmp_path, step=1).pinned
    save(tmp_path, 3, keep_last=1)
    assert [(info.step, info.pinned) for info in list_checkpoints(tmp_path)] == [(3, False)]


@pytest.mark.slow
def test_a_removal_that_loses_power_is_done_or_not() -> None:
    disk = CrashDisk()
    with SyncCheckpointEngine(
        "x", storage=StorageOptions(io=CrashWriter(disk), chunk_bytes=CHUNK), keep_last=3
    ) as engine:
        for step in (1, 2, 3):
            engine.checkpoint(state_of(step), step=step).result(60)
    history: list[Any] = []
    disk.observer = history.append
    stores.remove("x", step=[1, 3], io=CrashWriter(disk))
    seen = set()
    for snapshot in history:
        for found in power_loss_images(snapshot, sector=4096, limit=6):
            steps = [info.step for info in list_checkpoints("x", io=ImageWriter(found))]
            assert steps in ([3, 2, 1], [2])
            seen.add(len(steps))
            for step in steps:
                assert not difference(load_sync("x", step=step, io=ImageWriter(found)), state_of(step))
    assert seen == {1, 3}


def test_containers_that_differ_come_in_the_order_of_the_state(tmp_path: Path) -> None:
    names = [f"part{number}" for number in range(8, 0, -1)]
    saved(tmp_path, {name: {"x": 1} for name in names}, {name: OrderedDict(x=1) for name in names})
    assert [each.path for each in stores.compare(tmp_path, step=0, other_step=1).differences] == names


def test_verifying_holds_one_slot_at_a_time() -> None:
    """A trainer passes over those that are held."""

    held: set[int] = set()

    class Counting(CrashWriter):
        async def read(self, file: File, offset: int, into: memoryview) -> int:
            held.add(sum(each.name.startswith("slot-") for each in self._inodes))
            return await super().read(file, offset, into)

    disk = CrashDisk()
    with SyncCheckpointEngine(FOLDER, storage=StorageOptions(io=CrashWriter(disk)), keep_last=3) as engine:
        for step in range(3):
            engine.checkpoint(small(), step=step).result(30)
    assert len(stores.verify(FOLDER, every=True, io=Counting(disk, read_only=True)).checkpoints) == 3
    assert held == {0, 1}


def test_a_slot_that_is_gone_is_named_as_lost(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    assert stores.recover(tmp_path).missing == ()
    newest = stores.describe(tmp_path).slot
    (tmp_path / newest).unlink()
    recovery = stores.recover(tmp_path)
    assert (recovery.needed, recovery.missing) == (False, (newest,))
    result = CliRunner().invoke(app, ["recover", str(tmp_path)])
    assert result.exit_code == 4
    assert f"LOST: {newest}" in result.stdout
    assert "Nothing is missing" not in result.stdout


def test_a_search_keeps_what_was_rejected(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    stores.reject(tmp_path, step=2)
    stores.recover(tmp_path, search=True, write=True)
    assert [(info.step, info.rejected) for info in list_checkpoints(tmp_path)] == [(2, True), (1, False)]
