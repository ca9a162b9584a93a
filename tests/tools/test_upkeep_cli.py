"""The operator's commands: what they print, and how they end."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from pccheck_async import (
    CheckpointError,
    CheckpointInfo,
    NoCheckpointError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    stores,
)
from pccheck_async.cli import app
from pccheck_async.cli.comparing import Side, parse_side
from pccheck_async.cli.output import as_json, captured_at, json_value, printable
from pccheck_async.errors import CorruptStoreError
from tests.support.children import in_child
from tests.support.limits import limited_descriptors

EVIL = "e\x1b[31mv[red]i\nl\u202e\udc80"
runner = CliRunner()


def pccheck(*arguments: object, input: str | None = None) -> Result:  # noqa: A002
    result = runner.invoke(app, [str(argument) for argument in arguments], input=input)
    assert "Traceback" not in result.output, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output
    return result


def parsed(*arguments: object, status: int = 0) -> Any:
    result = pccheck(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def state_of(step: int) -> dict[str, Any]:
    weights = torch.arange(3000.0) + step
    return {"model": {"weights": weights, "tied": weights}, EVIL: EVIL, "step": step, "[bold]": torch.ones(2)}


LOST = ["slot-002", "commit", "store.json"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of steps 1, 2 and 3 that nobody changes."""
    path = tmp_path_factory.mktemp("made") / "store"
    save(path, 1, 2, 3)
    return path


def save(path: Path, *steps: int) -> None:
    with SyncCheckpointEngine(path, keep_last=5, max_in_flight=1, storage=StorageOptions(chunk_bytes=4096)) as engine:
        for step in steps:
            metadata: dict[str, Any] = {"loss": math.nan if step == 3 else 1.0, "note": EVIL[:-1]}
            engine.checkpoint(state_of(step), step=step, metadata=metadata).result(60)


@pytest.mark.parametrize(
    ("lost", "regions"),
    [
        *(("", regions) for regions in [(), (0,), (0, 1), (2, 3), (0, 1, 2, 3)]),
        *((lost, ()) for lost in LOST),
        *(
            pytest.param(*each, marks=pytest.mark.campaign)
            for each in product(LOST, [(0,), (0, 1), (2, 3), (0, 1, 2, 3)])
        ),
    ],
)
def test_commands_in_messages_name_the_folder_as_a_shell_takes_it(store: Path, regions: tuple[int], lost: str) -> None:
    path, said = store.rename(store.parent / "my run's"), ""
    for region in regions:
        flip(path / "commit", (region << 16) + 70)
    if lost:
        (path / lost).write_bytes(b"{")
    elif not regions:
        flip(path / stores.describe(path).slot, 5000)
    for command in (["ls"], ["verify"], ["verify", "--all"], ["recover"], ["recover", "--search"]):
        said += pccheck(*command, path).output
    for step in (3, 1):
        try:
            load_sync(path, step=step)
        except CheckpointError as error:
            said += str(error)
    commands = re.findall(r"`pccheck (.*?)`", " ".join(said.split()))
    assert commands
    for command in commands:
        assert str(path) in shlex.split(command), command


@pytest.mark.parametrize("fault", ["a chunk", "no slot", "one copy", "both copies"])
def test_the_status_is_0_again_after_what_is_advised(store: Path, fault: str) -> None:
    slot = store / stores.describe(store).slot
    if fault == "a chunk":
        flip(slot, 5000)
    elif fault == "no slot":
        slot.unlink()
    for region in {"one copy": (0,), "both copies": (0, 1)}.get(fault, ()):
        flip(store / "commit", (region << 16) + 70)
    for command in (
        (["verify", "--all"], ["recover"]) if fault != "no slot" else (["verify", "--all"], ["recover"], ["ls"])
    ):
        result = pccheck(*command, store)
        assert result.exit_code == 4
        advised = re.findall(r"`pccheck (remove .*?|recover .*?--write|recover .*?--search)`", result.stdout)
        assert advised or fault == "both copies"
    more = ["--yes"] if advised and advised[0].startswith("remove") else ["--write"] * (fault == "both copies")
    command = shlex.split(advised[0]) if advised else ["recover", str(store), "--search"]
    assert pccheck(*command, *more).exit_code == 0
    for command in (["verify", "--all"], ["recover"], ["ls"]):
        assert pccheck(*command, store).exit_code == 0


def test_a_record_or_a_slot_that_is_lost_is_no_number_of_chunks_and_no_valid_record(store: Path) -> None:
    slot = store / stores.describe(store).slot
    flip(slot, stores.describe(store).manifest_offset + 5)
    assert re.search(r" 2 +\d+\.\d kB +\d{4}-.* manifest damaged", pccheck("verify", store).stdout)
    slot.unlink()
    assert re.search(r" 2 +\d+\.\d kB +\d{4}-.* slot missing", pccheck("verify", store).stdout)
    assert "the commit records are valid." in pccheck("recover", store).stdout
    for offset in (70, 70 + (1 << 16)):
        flip(store / "commit", offset)
    assert "the commit records are valid, but for one that is lost." in pccheck("recover", store).stdout
    assert parsed("recover", store, status=4)["record_lost"]


@pytest.mark.parametrize("fault", ["cut short", "directory"])
def test_a_slot_that_cannot_hold_its_checkpoint_is_listed_as_lost(store: Path, fault: str) -> None:
    slot = store / stores.describe(store).slot
    if fault == "directory":
        slot.unlink()
        slot.mkdir()
    else:
        os.truncate(slot, 4096)
    result = pccheck("ls", store)
    assert result.exit_code == 4
    said = f"{slot.name} {'is a directory' if fault == 'directory' else 'has 4096 of at least'}"
    assert f"LOST: step 3: {said}" in result.stdout
    assert "A restart tries step 2: no tensor was read here" in result.stdout
    result = pccheck("recover", store)
    assert result.exit_code == 4
    assert f"LOST: {slot.name}" in result.stdout
    assert "Nothing is missing" not in result.stdout
    assert ("is a folder" if fault == "directory" else "DAMAGED") in pccheck("verify", store).stdout


def test_recover_does_not_call_a_store_fine_whose_newest_record_is_lost(store: Path) -> None:
    data = bytearray((store / "commit").read_bytes())
    assert "every checksum of the checkpoints holds" in pccheck("recover", store).stdout
    newest = max(stores.verify(store).records, key=lambda copy: copy.generation or 0).offset & 1 << 17
    data[newest : newest + (1 << 17)] = bytes(1 << 17)
    (store / "commit").write_bytes(data)
    assert list_checkpoints(store)[0].step == 2
    result = pccheck("recover", store)
    assert result.exit_code == 4
    assert "It may have been the newest" in result.stdout
    assert "Nothing is missing" not in result.stdout
    assert "--write` the store names steps 3, 2" in pccheck("recover", store, "--search").stdout


@pytest.mark.slow
def test_too_few_descriptors_are_a_failure_and_no_damage(made: Path) -> None:
    def work() -> list[int]:
        codes = []
        for free in range(4, 20):  # none at all are too few to say so
            with limited_descriptors(free):
                codes.append(pccheck("verify", made).exit_code)
        return codes

    codes = in_child(work)
    assert {*codes} == {0, 1}
    assert codes[-1] == 0


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """One that may be changed."""
    save(tmp_path / "store", 1, 2, 3)
    return tmp_path / "store"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_show(made: Path) -> None:
    result = pccheck("show", made)
    assert result.exit_code == 0
    assert "weights  float32 [3000]  12.0 kB" in result.stdout
    assert r"tied  float32 [3000]  12.0 kB  = model.weights, stored once" in result.stdout
    assert r"e\x1b[31mv[red]i\nl\u202e\udc80 = 'e\x1b[31mv[red]i\nl\u202e\udc80'" in result.stdout
    assert "[bold]  float32 [2]  8 B" in result.stdout
    assert "step = 3" in result.stdout
    assert "3 tensors and arrays of 24.0 kB, 1 of them aliases; 2 plain values." in result.stdout
    assert "the manifest at byte 12288," in result.stdout
    assert "By dtype: float32 24.0 kB in 3." in result.stdout
    shown = [line.split("  ") for line in pccheck("show", made, "--depth=1").stdout.splitlines()]
    assert [line[1:] for line in shown if line[0].endswith("model")] == [["2 leaves, 24.0 kB"]]


def test_show_json(made: Path) -> None:
    found = parsed("show", made, "--step=2")
    assert (found["step"], found["store_id"], found["manifest"]["offset"]) == (
        2,
        stores.describe(made).store_id,
        12288,
    )
    leaves = {leaf["path"]: leaf for leaf in found["leaves"]}
    assert leaves["model.tied"]["alias_of"] == "model.weights"
    assert leaves["model.weights"]["shape"] == [3000]
    assert leaves["model.weights"]["payload"] == [0, 12000]
    assert leaves["step"] == {"path": "step", "kind": "int", "value": 2}
    assert leaves[EVIL]["value"] == EVIL
    assert [chunk["offset"] for chunk in found["chunks"]] == [0, 4096, 8192]
    assert found["dtypes"] == {"float32": {"count": 3, "nbytes": 24008}}
    assert parsed("show", made)["metadata"] == {"loss": "nan", "note": EVIL[:-1]}


def test_verify(made: Path) -> None:
    result = pccheck("verify", made, "--all")
    assert result.exit_code == 0
    assert result.stdout.count("whole") == 3
    assert "Every checksum holds." in result.stdout
    found = parsed("verify", made)
    assert found["whole"]
    assert [each["step"] for each in found["checkpoints"]] == [3]
    assert [copy["state"] for copy in found["records"]] == ["valid"] * 4


@pytest.mark.slow
def test_verify_names_the_damage(store: Path) -> None:
    described = stores.describe(store)
    flip(store / described.slot, 5000)
    flip(store / "commit", 70)
    result = pccheck("verify", store, "--all")
    assert result.exit_code == 4
    assert f"{described.slot}: chunk 1 (bytes 4096 to 8192): checksum mismatch; it holds model.weights, model.tied" in (
        result.stdout
    )
    assert "commit: copy A0 of a record, at byte 0, is damaged" in result.stdout
    assert "DAMAGED." in result.stdout
    found = parsed("verify", store, status=4)
    assert not found["whole"]
    (damage,) = found["checkpoints"][0]["damage"]
    assert damage["leaves"] == ["model.weights", "model.tied"]
    assert parsed("verify", store, "--step=2", status=4)["checkpoints"][0]["whole"]  # the record's copy is damaged


def test_columns_count_where_the_output_is_piped(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert "step 3, counter 2" in pccheck("ls", made).stdout
    monkeypatch.delenv("COLUMNS")
    assert "captured (UTC)" in pccheck("ls", made).stdout.splitlines()[1]


@pytest.mark.slow
def test_what_a_restart_restores_is_said(store: Path) -> None:
    slots = {step: stores.describe(store, step=step).slot for step in (1, 2, 3)}
    assert "A restart tries step 3: no tensor was read here" in pccheck("ls", store).stdout
    assert f"A restart restores step 3, from {slots[3]}." in pccheck("verify", store).stdout
    assert pccheck("reject", store, "--step=3").exit_code == 0
    assert "A restart tries step 2: no tensor was read here" in pccheck("ls", store).stdout
    flip(store / slots[2], 5000)
    assert "A restart tries step 1, which was not checked" in pccheck("verify", store, "--step=2").stdout
    assert f"A restart restores step 1, from {slots[1]}." in pccheck("verify", store, "--all").stdout
    flip(store / slots[1], 5000)
    assert "No checkpoint can be restored" in pccheck("verify", store, "--all").stdout


def test_a_restart_is_said_to_restore_the_superseded_one(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=1, max_in_flight=1) as engine:
        for step in (1, 2, 3):
            engine.checkpoint(state_of(step), step=step).result(60)
            if step == 1:
                engine.pin(step=1)
    flip(tmp_path / stores.describe(tmp_path).slot, 5000)
    with pytest.warns(RuntimeWarning, match="falling back to step 2"):
        assert load_sync(tmp_path)["step"] == 2
    result = pccheck("verify", tmp_path)
    assert result.exit_code == 4
    said = re.search(r"A restart restores step 2, from (slot-\d+), which a newer one superseded", result.stdout)
    assert said
    newest = tmp_path / stores.describe(tmp_path).slot
    flip(tmp_path / said[1], 5000)
    assert "A restart tries step 1, which was not checked" in pccheck("verify", tmp_path).stdout
    assert "A restart restores step 1, from" in pccheck("verify", tmp_path, "--all").stdout
    newest.unlink()
    result = pccheck("ls", tmp_path)
    assert "A restart tries step 2, which a newer one superseded and a save may have" in result.stdout
    (first, *rest), lost = json.loads(pccheck("ls", tmp_path, "--json").stdout), f"{newest.name} is gone"
    assert (first["step"], first["lost"]) == (3, lost)
    assert not any("lost" in each for each in rest)
    (tmp_path / said[1]).write_bytes(os.urandom(1 << 20))
    assert "A restart tries step 1:" in pccheck("ls", tmp_path).stdout  # not what was written over


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tensors", "all bytes"])
def test_a_store_of_which_all_is_damaged_has_one_voice(store: Path, how: str) -> None:
    for slot in store.glob("slot-*"):
        slot.write_bytes(os.urandom(slot.stat().st_size)) if how == "all bytes" else flip(slot, 5000)
    for command in (["verify", "--all"], ["recover"], ["recover", "--search"]):
        result = pccheck(command[0], store, *command[1:])
        assert result.exit_code == 4
        assert "an be restored" in result.stdout
        assert f"`pccheck recover {store} --search`" in " ".join(result.stdout.split()) or "--search" in command
        assert "A restart" not in result.stdout
    result = pccheck("recover", store, "--write")
    assert (result.exit_code, "cannot be made again" in result.stderr) == (4, True)
    result = pccheck("ls", store)
    assert result.exit_code == (4 if how == "all bytes" else 0)
    assert "A restart restores" not in result.stdout


@pytest.mark.slow
def test_one_damaged_copy_of_a_record_is_no_loss(store: Path) -> None:
    before = [info.step for info in list_checkpoints(store)]
    flip(store / "commit", 70)
    for command in ("verify", "recover"):
        result = pccheck(command, store)
        assert result.exit_code == 4
        assert "the other copy is valid, so that nothing is lost. The next two saves write it anew, or" in result.stdout
        assert "DAMAGED" not in result.stdout
    result = pccheck("recover", store, "--write")
    assert (result.exit_code, "commit.damaged-0" in result.stdout) == (0, True)
    for command in ("verify", "recover"):
        assert pccheck(command, store).exit_code == 0
    assert [info.step for info in list_checkpoints(store)] == before


def test_a_slot_that_is_gone_is_listed_as_lost(store: Path) -> None:
    slot = stores.describe(store).slot
    (store / slot).unlink()
    result = pccheck("ls", store)
    assert result.exit_code == 4
    assert f"LOST: step 3: {slot} is gone." in result.stdout
    assert "A restart tries step 2: no tensor was read here" in result.stdout


@pytest.mark.slow
def test_compare(made: Path) -> None:
    result = pccheck("compare", made, "--step", 1, "--other-step", 3)
    assert result.exit_code == 4
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["3000"]]
    assert [row[:3] + row[-1:] for row in rows] == [
        ["3000", "3000", "2", name] for name in ("model.weights", "model.tied")
    ]
    assert "step: value: int 1 -> int 3" in result.stdout
    assert "2 of 5 leaves are equal in every bit." in result.stdout
    found = parsed("compare", made, made, "--step", 1, status=4)
    assert (found["one"]["step"], found["other"]["step"], found["leaves"]) == (1, 3, 5)
    by_path = {each["path"]: each for each in found["differences"]}
    assert by_path["model.weights"]["max_absolute"] == 2.0
    assert by_path["step"] == {"path": "step", "change": "value", "one": "int 1", "other": "int 3"}
    result = pccheck("compare", made, "--other-step", 3)
    assert result.exit_code == 0
    assert "All 5 leaves are equal in every bit." in result.stdout
    assert parsed("compare", made, made)["equal"]


@pytest.mark.slow
def test_compare_of_hostile_names_and_forms(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=2) as engine:
        engine.checkpoint({EVIL: EVIL, "x": torch.ones(2), "y" + EVIL: torch.ones(2)}, step=1).result(60)
        engine.checkpoint({EVIL: EVIL * 2, "x": torch.ones(3), "[/]": torch.tensor(math.inf)}, step=2).result(60)
    result = pccheck("compare", tmp_path, "--step", 1, "--other-step", 2)
    assert result.exit_code == 4
    assert "x: shape: tensor float32 [2] -> tensor float32 [3]" in result.stdout
    assert "[/]: added: tensor float32 []" in result.stdout
    assert {
        each["change"] for each in parsed("compare", tmp_path, "--step", 1, "--other-step", 2, status=4)["differences"]
    } == {
        "value",
        "shape",
        "removed",
        "added",
    }


def test_places(tmp_path: Path) -> None:
    (tmp_path / "run@7").mkdir()
    assert parse_side(f"{tmp_path}/run@7") == Side(tmp_path / "run@7", None)
    assert parse_side(f"{tmp_path}/run@7@8") == Side(tmp_path / "run@7", 8)
    assert parse_side("a@b@-3") == Side(Path("a@b"), -3)
    assert parse_side("@12") == Side(None, 12)
    assert parse_side("a@b") == Side(Path("a@b"), None)


@pytest.mark.slow
def test_copy(made: Path, tmp_path: Path) -> None:
    result = pccheck("copy", made, tmp_path / "new", "--step=3")
    assert result.exit_code == 0
    assert "Step 3 (12.3 kB) copied and verified" in result.stdout
    result = pccheck("copy", made, tmp_path / "new", "--step=1", "--pin")
    assert "Older there now: step 3. A trainer tries step 1 first." in result.stdout
    found = parsed("copy", made, tmp_path / "new", "--step=2")
    assert found == as_json(list_checkpoints(tmp_path / "new")[0])
    assert [(info.step, info.pinned) for info in list_checkpoints(tmp_path / "new")] == [
        (2, False),
        (1, True),
        (3, False),
    ]
    assert pccheck("compare", made, tmp_path / "new", "--step", 2).exit_code == 0
    assert pccheck("verify", tmp_path / "new", "--all").exit_code == 0
    assert pccheck("copy", made, made).exit_code == 2


@pytest.mark.slow
def test_remove_asks(store: Path) -> None:
    result = pccheck("remove", store, "--step", 1, "--step", 2, input="n\n")
    assert result.exit_code == 1
    assert "Remove steps 2, 1 (24.6 kB) from" in result.stderr
    assert "error" in json.loads(pccheck("remove", store, "--step", 1, "--json", input="").stdout)
    result = pccheck("remove", store, "--step", 1, input="")
    assert result.exit_code == 1
    assert "nothing was removed: there is no terminal to ask; give --yes" in result.stderr
    assert len(list_checkpoints(store)) == 3
    assert pccheck("remove", store, "--step", 1, input="y\n").exit_code == 0
    assert [info.step for info in list_checkpoints(store)] == [3, 2]


@pytest.mark.slow
def test_of_two_checkpoints_of_one_step_the_counter_tells_which(store: Path, tmp_path: Path) -> None:
    """An import makes a second one of a step; without counters both would have to go."""
    torch.save({"w": torch.zeros(4)}, tmp_path / "w.pt")
    assert pccheck("import", tmp_path / "w.pt", store, "--step", 3).exit_code == 0
    first, second = (info.counter for info in list_checkpoints(store)[:2])
    result = pccheck("remove", store, "--step", 3, "--step", 2, input="n\n")
    assert f"Remove steps 3 (counter {first}), 3 (counter {second}), 2 (" in result.stderr
    result = pccheck("remove", store, "--counter", 99, "--yes")
    assert (result.exit_code, "no checkpoint of counter 99; there are steps 3, 2, 1" in result.stderr) == (3, True)
    assert pccheck("remove", store, "--counter", first, "--yes").exit_code == 0
    assert [info.counter for info in list_checkpoints(store)][:1] == [second]
    assert [info.step for info in stores.remove(store, counter=second).removed] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("also", [(), (1,)])
def test_the_damaged_one_of_two_checkpoints_of_a_step_is_dropped_by_its_counter(
    store: Path, tmp_path: Path, also: tuple[int]
) -> None:
    torch.save({"w": torch.zeros(4000)}, tmp_path / "w.pt")
    assert pccheck("import", tmp_path / "w.pt", store, "--step", 3).exit_code == 0
    damaged, whole = (info.counter for info in list_checkpoints(store)[:2])
    for step in (3, *also):
        flip(store / stores.describe(store, step=step).slot, 5000)
    options = "".join(f" --step {step}" for step in also) + f" --counter {damaged}"
    advised = f"pccheck remove {store}{options}"
    for command in (["verify", "--all"], ["recover"]):
        result = pccheck(*command, store)
        assert (result.exit_code, f"`{advised}` drops what is damaged.\n" in result.stdout) == (4, True)
    assert f"`pccheck remove {store} --counter {damaged}` drops what is damaged." in pccheck("verify", store).stdout
    assert pccheck(*shlex.split(advised)[1:], "--yes").exit_code == 0
    assert [info.counter for info in list_checkpoints(store)][:1] == [whole]
    assert pccheck("verify", "--all", store).exit_code == 0


@pytest.mark.slow
def test_remove_pin_unpin(store: Path) -> None:
    assert pccheck("pin", store, "--step", 1).exit_code == 0
    result = pccheck("remove", store, "--step", 9, "--yes")
    assert result.exit_code == 3
    assert "no checkpoint of step 9" in result.stderr
    result = pccheck("remove", store, "--step", 1, "--step", 2, "--step", 3, "-y")
    assert result.exit_code == 1
    assert "no checkpoint would be left" in result.stderr
    assert [info.pinned for info in list_checkpoints(store)] == [False, False, True]
    assert pccheck("unpin", store, "--step", 1).exit_code == 0
    assert not any(info.pinned for info in list_checkpoints(store))
    slots = len(list(store.glob("slot-*")))
    result = pccheck("remove", store, "--step", 1, "--step", 2, "--step", 3, "-y", "--force")
    assert result.exit_code == 0
    assert "Removed steps 3, 2, 1;" in result.stdout
    assert list_checkpoints(store) == []
    assert len(list(store.glob("slot-*"))) == slots - 3
    assert pccheck("pin", store, "--step", 1).exit_code == 3


def test_reject(store: Path) -> None:
    assert pccheck("pin", store, "--step", 3).exit_code == 0
    result = pccheck("reject", store, "--step", 2)
    assert result.exit_code == 0
    assert "Rejected steps 3, 2. A trainer tries step 1 first." in result.stdout
    listed = pccheck("ls", store).stdout
    assert (listed.count("pinned, rejected"), listed.count("rejected")) == (1, 2)
    assert [each["rejected"] for each in parsed("ls", store)] == [True, True, False]
    assert ", pinned, rejected." in pccheck("show", store, "--step", 3).stdout
    assert pccheck("reject", store, "--step", 2).exit_code == 3
    result = pccheck("reject", store, "--step", 1)
    assert result.exit_code == 1
    assert "would be left to restore" in result.stderr
    assert load_sync(store)["step"] == 1


@pytest.mark.slow
def test_commands_beside_a_trainer(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with SyncCheckpointEngine(path, keep_last=2) as engine:
        for step in (1, 2):
            engine.checkpoint(state_of(step), step=step).result(60)
        for arguments in (
            ["show", path],
            ["verify", path, "--all"],
            ["copy", path, tmp_path / "new"],
            ["recover", path],
        ):
            assert pccheck(*arguments).exit_code == 0
        assert pccheck("compare", path, "--step", 1, "--other-step", 2).exit_code == 4
        for arguments in (
            ["pin", path, "--step", 1],
            ["unpin", path, "--step", 1],
            ["remove", path, "--step", 1, "-y"],
        ):
            result = pccheck(*arguments)
            assert result.exit_code == 1
            assert result.stderr.startswith("pccheck: StoreLockedError: ")
            assert "engine.pin(step=...)" in result.stderr
        engine.checkpoint(state_of(3), step=3).result(60)
    assert [info.step for info in list_checkpoints(path)] == [3, 2]


@pytest.mark.slow
def test_changes_as_json(store: Path) -> None:
    assert parsed("pin", store, "--step", 1) == as_json(list_checkpoints(store)[-1])
    assert parsed("unpin", store, "--step", 1)["pinned"] is False
    found = parsed("remove", store, "--step", 1, "--step", 2, "--yes")
    assert [info["step"] for info in found["removed"]] == [2, 1]
    assert found["freed_nbytes"] > 24_000


@pytest.mark.slow
def test_recover_says_what_is_lost_with_the_records(store: Path) -> None:
    stores.reject(store, step=3)
    assert parsed("recover", store)["lost"] == []
    (store / "commit").unlink()
    text = "rejections are lost with the records: a run that was rejected may be restored again"
    assert parsed("recover", store, status=4)["lost"] == ["pins", "rejections"]
    for options in ([], ["--write"]):
        assert text in pccheck("recover", store, *options).stdout
    assert not list_checkpoints(store)[0].rejected


def test_recover_by_search_keeps_what_the_records_say(store: Path) -> None:
    before = list_checkpoints(store)
    assert pccheck("recover", store, "--search", "--write").exit_code == 0
    assert [info.metadata["note"] for info in list_checkpoints(store)] == [info.metadata["note"] for info in before]


def test_ls_says_how_much_is_on_disk(made: Path) -> None:
    slots = [*made.glob("slot-*")]
    taken = printable(f"{sum(slot.stat().st_size for slot in slots) / 1000:.1f} kB")
    assert f"On disk {taken}: {len(slots)} slots (3 in use)." in pccheck("ls", made).stdout


def test_errors_are_json_too(made: Path, tmp_path: Path) -> None:
    for command in (["ls", made / "commit" / "x"], ["verify", tmp_path], ["show", made, "--step=9"]):
        result = pccheck(*command, "--json")
        assert result.exit_code in (1, 3)
        found = json.loads(result.stdout)
        assert found == [] or found["error"]["message"] in result.stderr


def test_a_format_that_is_nearly_right(made: Path, tmp_path: Path) -> None:
    for command in (
        ["export", made, tmp_path / "out", "--to"],
        ["import", tmp_path / "in", tmp_path / "out", "--from"],
    ):
        result = pccheck(*command, "safetensor")
        assert result.exit_code == 2
        said = " ".join(result.stderr.replace("│", "").split())
        assert "did you mean 'safetensors'?" in said
        assert "Value error" not in said


def test_an_export_for_from_pretrained_says_what_it_lacks(made: Path, tmp_path: Path) -> None:
    weights = ["--to", "safetensors", "--keys", "model.weights"]
    for out, options in (
        ("whole", ["--max-file-size", "1GB"]),
        ("several", ["--keys", "model.tied", "--max-file-size", "12kB"]),
        ("model.safetensors", []),
    ):
        folder = tmp_path if out == "model.safetensors" else tmp_path / out
        result = pccheck("export", made, tmp_path / out, *weights, *options)
        call = f"model.config.save_pretrained({str(folder)!r})"
        assert (result.exit_code, result.stderr.count(call)) == (0, 1)
    assert "from_pretrained" not in pccheck("export", made, tmp_path / "others.safetensors", *weights).stderr
    (tmp_path / "config.json").touch()
    result = pccheck("export", made, tmp_path / "model.safetensors", *weights, "--overwrite")
    assert (result.exit_code, "from_pretrained" in result.stderr) == (0, False)


def test_a_folder_of_files_of_another_format(tmp_path: Path) -> None:
    torch.save({"x": 1}, tmp_path / "ckpt_100.pt")
    for command in ("ls", "verify"):
        result = pccheck(command, tmp_path)
        assert result.exit_code == 3
        assert "there is ckpt_100.pt in it: `pccheck import`" in result.stderr


def test_a_store_that_another_process_writes_to(store: Path) -> None:
    with SyncCheckpointEngine(store, keep_last=5) as engine:
        engine.checkpoint(state_of(4), step=4).result(60)
        result = pccheck("pin", store, "--step=1")
    assert result.exit_code == 1
    assert f"an engine of this process has {store} open" in result.stderr
    with (store / "commit").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = pccheck("pin", store, "--step=1")
    assert f"waited 1.0 s: another process has {store} open for writing" in result.stderr


def test_recover_a_store_that_names_no_checkpoint(tmp_path: Path) -> None:
    SyncCheckpointEngine(tmp_path / "store").open().close()
    (tmp_path / "store" / "store.json").unlink()
    result = pccheck("recover", tmp_path / "store")
    assert result.exit_code == 4
    assert "--write` the store is there again; it names no checkpoint." in result.stdout
    assert pccheck("recover", tmp_path / "store", "--write").exit_code == 0
    assert pccheck("recover", tmp_path / "store").exit_code == 0


def test_recover_of_a_read_only_mount_calls_no_slot_damaged(store: Path, tmp_path: Path) -> None:
    (store / "commit").unlink()
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    mount = f"mount --bind {store} {mounted} && mount -o remount,bind,ro {mounted}"
    if subprocess.run(["unshare", "-m", "bash", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this process may mount nothing")
    command = f"{mount} && exec {sys.executable} -m pccheck_async recover {mounted} --write"
    done = subprocess.run(["unshare", "-m", "bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, "Read-only file system" in done.stderr) == (1, True), done.stderr


def test_a_search_that_finds_what_was_dropped_leaves_a_store_in_order(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, keep_last=1) as engine:
        for step in range(1, 6):
            engine.checkpoint({"w": torch.full((9,), step)}, step=step).result(60)
    found = pccheck("recover", tmp_path, "--search")
    assert (found.exit_code, "names steps 5, 4" in found.stdout) == (0, True)
    slot = re.search(r"(slot-\d+) +4 ", found.stdout)
    assert slot is not None
    for text in (slot[1], slot[1].removeprefix("slot-")):  # as the table names it, or its number
        found = pccheck("recover", tmp_path, "--search", "--slot", text)
        assert (found.exit_code, "names step 4, newest first" in found.stdout) == (4, True)
    assert pccheck("recover", tmp_path, "--search", "--slot", "last").exit_code == 2


def test_a_search_that_would_name_others_has_something_to_write(store: Path) -> None:
    older = (store / "commit").read_bytes()
    with SyncCheckpointEngine(store, keep_last=3) as engine:
        engine.restore(state_of(0))
        engine.checkpoint(state_of(4), step=4).result()
    (store / "commit").write_bytes(older)
    found = pccheck("recover", store, "--search")
    assert (found.exit_code, "--write` the store names steps 4" in found.stdout) == (4, True)
    (store / "commit").write_bytes(os.urandom(1 << 18))
    found = pccheck("recover", store, "--search")
    assert (found.exit_code, "--write` the store names steps 4" in found.stdout) == (4, True)
    assert pccheck("recover", store, "--search", "--write").exit_code == 0
    assert pccheck("recover", store, "--search").exit_code == 0


def test_an_older_record_beside_newer_slots_is_no_reason_to_remove_what_they_hold(store: Path) -> None:
    older = (store / "commit").read_bytes()
    with SyncCheckpointEngine(store, keep_last=3) as engine:
        engine.restore(state_of(0))
        for step in range(4, 8):
            engine.checkpoint(state_of(step), step=step).result()
    (store / "commit").write_bytes(older)
    for command in (["ls"], ["verify", "--all"], ["recover"]):
        said = pccheck(*command, store)
        assert said.exit_code == 4
        assert "pccheck remove" not in said.stdout
        assert f"`pccheck recover {store} --search` says what is there" in said.stdout
    lost = max(path.name for path in store.glob("slot-*") if "step 7" in _held(store, path.name))
    named = next(each.info.step for each in stores.verify(store, every=True).checkpoints if each.slot == lost)
    refused = pccheck("remove", store, "--step", str(named), "--yes")
    assert refused.exit_code == 1
    assert f"{lost} holds a newer checkpoint, of step 7" in refused.stderr
    assert pccheck("recover", store, "--search", "--write").exit_code == 0
    assert list_checkpoints(store)[0].step == 7


def _held(store: Path, slot: str) -> str:
    found = stores.recover(store, search=True).found
    return next(f"step {one.info.step}" for one in found if one.file == slot and one.info is not None)


@pytest.mark.parametrize("records", ["valid", "gone"])
def test_the_slot_of_another_run_is_not_taken_for_the_newest(store: Path, tmp_path: Path, records: str) -> None:
    other = tmp_path / "other"
    save(other, *range(10, 18))
    with SyncCheckpointEngine(store, keep_last=3) as engine:  # captured later, with smaller counters
        engine.restore(state_of(0))
        engine.checkpoint(state_of(4), step=4).result()
    before, strange = list_checkpoints(store), stores.describe(other).slot
    shutil.copy(other / strange, store / "slot-009")
    if records == "gone":
        (store / "commit").unlink()
    refused = pccheck("recover", store, "--search", "--write")
    assert refused.exit_code == 1
    assert "slot-009 (step 17, counter 7) may be of another run" in refused.stderr
    (advised,) = re.findall(r"`pccheck (recover .*?--write)`", refused.stderr)
    assert pccheck(*shlex.split(advised)).exit_code == 0
    named = [info.step for info in list_checkpoints(store)]
    assert named[: len(before)] == [info.step for info in before]  # and a dropped one that was still whole
    assert pccheck(*shlex.split(advised), "--slot", "9").exit_code == 0
    assert list_checkpoints(store)[0].step == 17


@pytest.mark.parametrize("records", ["valid", "gone"])
def test_of_two_slots_with_one_counter_a_record_or_the_user_chooses(store: Path, tmp_path: Path, records: str) -> None:
    other = tmp_path / "other"
    save(other, 7, 8, 9)
    before, own, slot = list_checkpoints(store), store / stores.describe(store).slot, stores.describe(other).slot
    shutil.copy(other / slot, store / "slot-009")
    if records == "valid":
        assert pccheck("recover", store, "--search", "--write").exit_code == 0
        assert [info.step for info in list_checkpoints(store)] == [info.step for info in before]
        return
    (store / "commit").unlink()
    refused = pccheck("recover", store, "--write")
    assert refused.exit_code == 1
    (advised,) = re.findall(r"`pccheck (recover .*?--write)`", refused.stderr)
    assert pccheck(*shlex.split(advised), "--slot", own.name).exit_code == 0
    assert [info.step for info in list_checkpoints(store)] == [info.step for info in before]


def test_what_was_removed_does_not_come_back_where_newer_ones_are_damaged(store: Path) -> None:
    assert pccheck("remove", store, "--step", "2", "--yes").exit_code == 0
    flip(store / stores.describe(store, step=3).slot, 5000)
    assert "A restart restores step 1" in pccheck("verify", store, "--all").stdout
    with pytest.warns(RuntimeWarning, match="falling back to step 1"):
        load_sync(store)


def test_recover(store: Path) -> None:
    result = pccheck("recover", store)
    assert result.exit_code == 0
    assert "Nothing is missing" in result.stdout
    assert pccheck("recover", store, "--write").exit_code == 0
    described = stores.describe(store)
    flip(store / described.slot, 100)
    (store / "commit").write_bytes(os.urandom(1 << 18))
    result = pccheck("recover", store)
    assert result.exit_code == 4
    rows = [line.split() for line in result.stdout.splitlines() if line.lstrip().startswith("slot-")]
    assert len(rows) == 6
    assert {row[1]: row[7] for row in rows if len(row) > 7} == {"1": "yes", "2": "yes", "3": "no"}
    assert "1 of 3 chunks damaged or overwritten" in result.stdout
    assert "--write` the store names steps 2, 1, newest first." in result.stdout
    found = parsed("recover", store, status=4)
    assert [info["step"] for info in found["names"]] == [2, 1]
    assert found["written"] == []
    result = pccheck("recover", store, "--write")
    assert result.exit_code == 0
    assert "Written: commit; what was there is commit.damaged-0 now." in result.stdout
    assert [info.step for info in list_checkpoints(store)] == [2, 1]
    assert pccheck("verify", store, "--all").exit_code == 0


@pytest.mark.parametrize("step", [2, 3])
def test_what_a_search_does_not_find_is_named_no_more(store: Path, step: int) -> None:
    """A trainer falls back only if it is the newest; the store is in order once a record without it is written."""
    stores.pin(store, step=step)
    (store / stores.describe(store, step=step).slot).unlink()
    result = pccheck("recover", store)
    assert result.exit_code == 4
    assert f"A restart restores step {3 if step == 2 else 2}, from slot-" in result.stdout
    assert f"It no longer names step {step} (pinned): no slot" in pccheck("recover", store, "--search").stdout
    result = pccheck("recover", store, "--search", "--write")
    assert result.exit_code == 0
    assert f"The old record named, too: step {step} (pinned). No slot" in result.stdout
    assert "A restart" not in result.stdout
    assert pccheck("recover", store).exit_code == 0


def test_files_that_a_trainer_may_not_write_are_no_damage(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = stores.describe(store).slot
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != slot)
    result = pccheck("recover", store)
    assert result.exit_code == 1
    assert f"This user may not read and write {slot}, so that no trainer of this user can open the" in result.stdout
    assert "and a trainer can open this store" not in result.stdout


def test_nothing_whole_is_3(tmp_path: Path) -> None:
    (tmp_path / "slot-000").write_bytes(bytes(5000))
    result = pccheck("recover", tmp_path)
    assert result.exit_code == 3
    assert "No slot holds a whole checkpoint" in result.stdout
    assert pccheck("recover", tmp_path, "--write").exit_code == 3


@pytest.mark.parametrize(
    "arguments",
    [["show"], ["verify"], ["verify", "--all"], ["compare"], ["copy"], ["remove"], ["pin"], ["unpin"], ["recover"]],
)
def test_nothing_there_is_3(tmp_path: Path, arguments: list[str]) -> None:
    command, *options = arguments
    more: dict[str, list[object]] = {
        "compare": [tmp_path],
        "copy": [tmp_path.with_name("new")],
        "remove": ["--step=1", "-y"],
        "pin": ["--step=1"],
        "unpin": ["--step=1"],
    }
    for path in (tmp_path, tmp_path / "missing"):
        result = pccheck(command, path, *more.get(command, []), *options)
        assert result.exit_code == 3, result.output
        assert result.stderr.startswith("pccheck: NoCheckpointError: ")
        assert result.stdout == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["show"],
        ["verify"],
        ["compare", "--other-step=1"],
        ["copy", "new"],
        ["remove", "--step=1", "-y"],
        ["pin", "--step=1"],
    ],
)
def test_a_store_that_cannot_be_read_is_4(store: Path, tmp_path: Path, arguments: list[str]) -> None:
    (store / "commit").write_bytes(os.urandom(1 << 18))
    command, *rest = (str(tmp_path / "new") if word == "new" else word for word in arguments)
    result = pccheck(command, store, *rest)
    assert result.exit_code == 4
    assert result.stderr.startswith("pccheck: CorruptStoreError: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["show"],
        ["verify", "x", "--all", "--step=1"],
        ["verify", "x", "--step=one"],
        ["compare", "x"],
        ["compare", "@1", "x"],
        ["compare", "x", "y", "--other-step=1", "--other-name=one"],
        ["compare", "x@1", "y", "--step=2"],
        ["copy", "x"],
        ["copy", "x", "y", "--pin", "--no-pin"],
        ["copy", "x", "y", "--rank=-1"],
        ["remove", "x"],
        ["rm", "x", "one"],
        ["pin", "x"],
        ["pin", "x", "--step=1", "--name=one"],
        ["pin", "x", "1", "--step=1"],
        ["unpin", "x"],
        ["reject", "x"],
        ["recover"],
        ["recover", "x", "--slot=one"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert pccheck(*arguments).exit_code == 2


@pytest.mark.slow
def test_every_command_says_how_it_ends() -> None:
    for command in ("show", "verify", "compare", "copy", "remove", "pin", "unpin", "recover"):
        assert "Exit status: 0 " in " ".join(runner.invoke(app, [command, "--help"]).output.replace("│", "").split())


def test_what_reaches_the_terminal() -> None:
    assert printable("plain ü") == "plain ü"
    assert printable("\x1b[2J\u202e\udc80\x07") == r"\x1b[2J\u202e\udc80\x07"
    assert json_value(math.inf) == "inf"
    assert json_value(10**5000) == hex(10**5000)
    info = CheckpointInfo(step=1, counter=1, nbytes=1, time=1e300)
    assert captured_at(info) == "?"
    json.dumps(as_json(info), allow_nan=False)


@pytest.mark.slow
def test_a_store_that_lost_its_identity_is_damaged_for_every_command(store: Path, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    shutil.copytree(store, lost)
    (lost / "store.json").unlink()
    slots = [*lost.glob("slot-*")]
    for command in (
        *(["ls"], ["ls", "--json"], ["show"], ["verify"], ["verify", "--all"], ["compare", "--other-step=2"]),
        *(
            ["remove", "--yes", "--step=1"],
            ["pin", "--step=1"],
            ["unpin", "--step=1"],
            ["reject", "--step=2"],
            ["watch", "--once"],
            ["tune"],
        ),
        *(["recover"], ["copy", tmp_path / "copy"], ["export", tmp_path / "out.pt", "--to", "torch"]),
    ):
        name, *arguments = command
        place = [lost]
        result = pccheck(name, *place, *arguments)
        assert result.exit_code == 4, (command, result.output)
        assert name == "recover" or "parts of one without store.json: `pccheck recover" in result.stderr, command
    with pytest.raises(CorruptStoreError, match=r"without store\.json"):
        load_sync(lost)
    for slot in slots:  # a store is made so: the slots come last
        slot.unlink()
    for name in ("ls", "show"):
        assert pccheck(name, lost).exit_code == 3
    with pytest.raises(NoCheckpointError):
        load_sync(lost)
