"""Slots that hold newer checkpoints than the record names: all that look at a store say so, and what it may be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pccheck_async import SyncCheckpointEngine, stores
from pccheck_async.cli import app
from pccheck_async.format.found_manifest import HEAD_NBYTES, SIGNATURES, numbers_at
from pccheck_async.format.manifest import SHARDED_VERSION, VERSION, Manifest, encode
from pccheck_async.group import open_place
from pccheck_async.store import NewerSlot, newer_slots

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "machine_asked_once")


def save(path: Path, *steps: int) -> None:
    with SyncCheckpointEngine(path, keep_last=2, max_in_flight=1) as engine:
        for step in steps:
            engine.checkpoint({"weights": torch.full((3000,), float(step))}, step=step).result(60)


def older_by(path: Path, saves: int) -> None:
    """Save steps 1 and 2, and so many more, of which the record knows nothing: a kill before it leaves one."""
    save(path, 1, 2)
    record = (path / "commit").read_bytes()
    save(path, *range(3, 3 + saves))
    (path / "commit").write_bytes(record)


def found_in(path: Path) -> list[NewerSlot]:
    async def look() -> list[NewerSlot]:
        async with await open_place(path, "auto") as place:
            identity, record = place.stores[0]
            return await newer_slots(place.opened.medium, record, identity.block_bytes)

    return asyncio.run(look())


def test_a_save_without_its_record_is_said_and_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older_by(tmp_path, 1)
    ((slot, step, counter, is_named),) = found_in(tmp_path)
    assert (step, counter, is_named) == (3, 2, False)
    for command, status in (("ls", 0), ("verify", 0), ("recover", 0)):
        result = CliRunner().invoke(app, [command, str(tmp_path)])
        assert result.exit_code == status, result.output
        note = f"NEWER: in slot-{slot:03} (step 3) is a newer checkpoint than commit names: that is normal after a kill"
        assert note in result.stdout
        assert "LOST" not in result.stdout + result.stderr
    caplog.clear()
    caplog.set_level("INFO", "pccheck_async")
    with SyncCheckpointEngine(tmp_path, keep_last=2, max_in_flight=1) as engine:
        restored = engine.restore({"weights": torch.zeros(3000)})
    assert restored is not None
    assert restored.step == 2
    (said,) = (one for one in caplog.records if getattr(one, "event", "") == "unrecorded_slots")
    assert said.getMessage().startswith(f"in slot-{slot:03} (step 3) is a newer checkpoint than commit names: that is")
    assert "--search` says what is whole" in said.getMessage()


def test_a_record_whose_slots_were_written_over_is_older(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No writer touches a slot that the newest record names."""
    older_by(tmp_path, 2)
    assert [(one.step, one.is_named) for one in found_in(tmp_path)] == [(3, False), (4, True)]
    for command in ("ls", "verify"):  # the newest that it names is whole
        result = CliRunner().invoke(app, [command, str(tmp_path)])
        assert result.exit_code == 4, result.output
        assert "are newer checkpoints than commit names, also in the places of those: commit is older" in result.stdout
    (problem,) = stores.recover(tmp_path, search=True).problems
    assert problem.endswith("holds step 4 in the place of step 1, which the newest record names there: commit is older "
                            "than the slots.")  # fmt: skip
    caplog.clear()
    with SyncCheckpointEngine(tmp_path, keep_last=2, max_in_flight=1) as engine:
        assert engine.latest is not None
    assert [one.levelname for one in caplog.records if getattr(one, "event", "") == "older_record"] == ["WARNING"]


def test_the_first_record_is_found_older_too(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.latest is None
    record = (tmp_path / "commit").read_bytes()
    save(tmp_path, 1, 2)
    (tmp_path / "commit").write_bytes(record)
    assert [one.step for one in found_in(tmp_path)] == [1, 2]


def test_what_is_whole_or_was_removed_is_not_found(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    assert not found_in(tmp_path)
    stores.remove(tmp_path, step=3)
    assert not found_in(tmp_path)
    save(tmp_path, 4)
    assert not found_in(tmp_path)


@pytest.mark.parametrize(("counter", "step"), [(0, 0), (7, 70), (200, 70000), (2**62, 2**63 - 1)])
@pytest.mark.parametrize("version", [VERSION, SHARDED_VERSION])
def test_numbers_of_a_manifest(counter: int, step: int, version: int) -> None:
    pieces = () if version == SHARDED_VERSION else None
    data = encode(Manifest(version, counter, step, 0.0, {"loss": 0.5}, None, (), (), (), 0, pieces))
    assert numbers_at(data) == numbers_at(data[:HEAD_NBYTES]) == (counter, step)


@pytest.mark.parametrize("data", [b"", bytes(64), SIGNATURES[0], SIGNATURES[0] + b"\x07", SIGNATURES[0] + b"\xc1" * 60])
def test_bytes_that_are_no_manifest_have_no_numbers(data: bytes) -> None:
    assert numbers_at(data) is None
