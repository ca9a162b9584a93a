"""Exports that take the place of earlier ones, beside the writer, and as Hugging Face reads them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from pccheck_async import SyncCheckpointEngine, load_sync, stores
from pccheck_async.convert import target
from pccheck_async.errors import WriteError
from pccheck_async.medium import renaming

FORMATS: list[dict[str, Any]] = [{"to": "torch"}, {"to": "safetensors"}, {"to": "safetensors", "max_file_size": 40}]
FORMATS += [{"to": "dcp"}]


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((8,), float(step)), "v": torch.ones(8)}


def read(out: Path, how: dict[str, Any], tmp_path: Path) -> float:
    store = tmp_path / f"imported {len(os.listdir(tmp_path))}"
    stores.import_(out, store, source=how["to"])
    return float(load_sync(store)["w"][0])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with SyncCheckpointEngine(tmp_path / "run", keep_last=2) as engine:
        for step in (1, 2):
            engine.checkpoint(state_of(step), step=step).result()
    return tmp_path / "run"


def test_what_cannot_take_the_place_of_a_file_is_a_write_error(tmp_path: Path) -> None:
    with pytest.raises(WriteError), target.replacing(tmp_path / "out", ()):
        pass  # nothing is there to take it
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", FORMATS, ids=str)
@pytest.mark.parametrize("exchanges", [True, False])
def test_an_export_takes_the_place_of_another(
    run: Path, tmp_path: Path, how: dict[str, Any], exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(renaming, "_rename", lambda *_: errno.EINVAL)
    out = tmp_path / "out"
    before = set(os.listdir(tmp_path))
    for step in (1, 2):
        exported = stores.export(run, out, step=step, overwrite=True, **how)
        assert exported.path == out
        assert exported.nbytes > 64
        assert read(out, how, tmp_path) == step
    with pytest.raises(FileExistsError):
        stores.export(run, out, **how)
    left = set(os.listdir(tmp_path)) - before
    assert not [name for name in left if name.startswith(".")]


@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_what_fails_leaves_the_earlier_export(
    run: Path, tmp_path: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    stores.export(run, out, step=1, **how)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(target, "sync" if out.is_dir() else "publish", fail)
    with pytest.raises(OSError, match="planted"):
        stores.export(run, out, step=2, overwrite=True, **how)
    monkeypatch.undo()
    assert read(out, how, tmp_path) == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_what_is_no_export_is_not_replaced(run: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    stores.export(run, model, to="safetensors", max_file_size=40)
    (model / "config.json").write_text("{}")
    for out, how, why in (
        (run, FORMATS[3], "holds what is no such export.*commit"),
        (model, FORMATS[2], "config.json"),
        (model, FORMATS[0], "is a folder"),
        (model / "config.json", FORMATS[3], "is no folder"),
    ):
        with pytest.raises(FileExistsError, match=why):
            stores.export(run, out, overwrite=True, **how)
    assert load_sync(run)["w"][0] == 2
    link = tmp_path / "link"
    link.symlink_to(model / "config.json")
    stores.export(run, link, to="torch", overwrite=True)
    assert not link.is_symlink()
    assert (model / "config.json").read_text() == "{}"


def test_export_beside_the_engine_that_wrote_it(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "run", keep_last="all") as engine:
        for step in range(4):
            pending = engine.checkpoint(state_of(step), step=step, name=f"epoch={step}")
            engine.checkpoint(state_of(9), step=9)  # in flight meanwhile
            pending.result()
            out = tmp_path / "out.pt"
            stores.export(engine.path, out, to="torch", name=pending.name, overwrite=True)
            assert torch.load(out, weights_only=True)["w"][0] == step


def test_metadata_of_safetensors(run: Path, tmp_path: Path) -> None:
    stores.export(run, tmp_path / "one", to="safetensors", metadata={"author": "me"})
    with safe_open(tmp_path / "one", "pt") as file:
        assert {"author": "me", "format": "pt"}.items() <= file.metadata().items()
    stores.export(run, tmp_path / "some", to="safetensors", metadata={"author": "me"}, max_file_size=40)
    assert json.loads((tmp_path / "some/model.safetensors.index.json").read_text())["metadata"]["author"] == "me"
    wrong: Any
    for wrong, kind in (({"format": "x"}, ValueError), ({"n": 1}, TypeError), ({"total_size": "1"}, ValueError)):
        with pytest.raises(kind):
            stores.export(run, tmp_path / "two", to="safetensors", metadata=wrong)
    with pytest.raises(ValueError, match="metadata"):
        stores.export(run, tmp_path / "two", to="torch", metadata={"author": "me"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_transformers_loads_the_files_and_their_index(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    with SyncCheckpointEngine(tmp_path / "run") as engine:
        engine.checkpoint({"model": model}).result()
    for most in (8_000, 1 << 30):
        folder = tmp_path / f"of {most}"
        stores.export(tmp_path / "run", folder, to="safetensors", root="model", max_file_size=most)
        assert ("model.safetensors.index.json" in os.listdir(folder)) == (most == 8_000)
        config.save_pretrained(folder)
        loaded, info = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
        model.save_pretrained(tmp_path / "theirs", max_shard_size=most)
        assert len(list(folder.glob("model-*"))) >= len(list((tmp_path / "theirs").glob("model-*")))
