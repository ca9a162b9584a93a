"""``pccheck shelf``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pccheck_async import Shelf, SyncCheckpointEngine
from pccheck_async.cli import app
from pccheck_async.errors import CorruptStoreError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Shelf(tmp_path / "shelf", 1 << 20) as shelf:
        shelf["centres"] = np.ones((4, 8))
        shelf["evil \x1b[31m"] = {"w": torch.ones(3), "n": 5}
        shelf["step"] = 7
    return tmp_path / "shelf"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["shelf", *arguments])
    return result.exit_code, result.stdout


def test_the_store_of_checkpoints_is_no_shelf(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "run") as engine:
        engine.checkpoint({"x": 1}, step=1).result(60)
    (tmp_path / "folder").mkdir()
    for place, says in ((tmp_path / "run", f"`pccheck ls {tmp_path / 'run'}`"), (tmp_path / "folder", "is a folder")):
        for command in ("ls", "show", "verify"):
            result = CliRunner().invoke(app, ["shelf", command, str(place)])
            assert result.exit_code == 4
            assert says in result.stderr.replace("\n", " ")
            assert "remove" not in result.stderr  # what was not understood may be somebody's only copy
    with pytest.raises(CorruptStoreError, match="a store of checkpoints, and no shelf"):
        Shelf(tmp_path / "run")


def test_ls(path: Path) -> None:
    status, printed = run("ls", str(path))
    assert status == 0
    for text in ("centres", "<f8 [4, 8] ndarray", "2 values", "step", "7", "3 variables"):
        assert text in printed
    assert "\x1b" not in printed
    document = json.loads(run("ls", str(path), "--json")[1])
    assert [each["name"] for each in document["variables"]] == ["centres", "evil \x1b[31m", "step"]


def test_show(path: Path) -> None:
    status, printed = run("show", str(path))
    assert status == 0
    assert "step = 7" in printed
    assert "centres = <f8 [4, 8] ndarray" in printed
    assert "\x1b" not in printed
    assert json.loads(run("show", str(path), "--json")[1])[2]["leaves"] == [{"path": "step", "value": "7"}]


def test_verify(path: Path) -> None:
    assert run("verify", str(path)) == (0, "Every checksum of 3 variables holds.\n")
    with Shelf(path) as shelf:
        shelf.centres[0] = 2
    status, printed = run("verify", str(path))
    assert status == 4
    assert "centres: changed outside a transaction" in printed
    assert json.loads(run("verify", str(path), "--json")[1]) == {"whole": False, "changed": ["centres"]}


@pytest.mark.slow
def test_what_is_no_shelf(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"nothing")
    with Shelf(path):
        for argument, status in ((path, 1), (tmp_path / "other", 4), (tmp_path / "missing", 3)):  # the first is locked
            for command in ("ls", "show", "verify"):
                assert run(command, str(argument))[0] == status
