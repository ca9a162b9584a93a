"""Values that only pickle can hold: saved and read where that is allowed, and never unpickled elsewhere."""

from __future__ import annotations

import argparse
import enum
import logging
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pccheck_async import SyncCheckpointEngine, list_checkpoints, load_sync, open_checkpoint, stores
from pccheck_async.cli import app
from pccheck_async.errors import UnsupportedStateError

unpickled: list[int] = []


class Stage(enum.Enum):
    ONE = 1


class Attributes(dict[str, Any]):
    """Like Lightning's ``AttributeDict``."""


class Scaler:
    """Like DeepSpeed's ``LossScaler``: no ``state_dict``, and it tells where it is unpickled."""

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(scale)

    def __setstate__(self, state: dict[str, Any]) -> None:
        unpickled.append(1)
        self.__dict__.update(state)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("not me")


class Gone:
    """Cannot be unpickled."""

    def __setstate__(self, state: object) -> None:
        raise ImportError("moved away")

    def __getstate__(self) -> object:
        return 1


class Scheduler:
    """Has objects in its state."""

    def __init__(self, stage: Stage | None) -> None:
        self.stage = stage

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "scaler": Scaler(8.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stage = state["stage"]


def state_of(scale: float) -> dict[str, Any]:
    return {
        "w": torch.full((4,), scale),
        "scaler": Scaler(scale),
        "parameters": Attributes(lr=scale, deep=[argparse.Namespace(x=1)]),
        "call": torch.nn.functional.relu,
        "scheduler": Scheduler(Stage.ONE if scale else None),
        "plain": scale,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    unpickled.clear()
    with SyncCheckpointEngine(tmp_path / "run", keep_last=2, allow_pickle=True) as engine:
        for step in (1, 2):
            engine.checkpoint(state_of(float(step)), step=step).result()
    return tmp_path / "run"


def test_they_come_back_where_both_sides_ask_for_them(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    loaded = load_sync(run, allow_pickle=True)
    with open_checkpoint(run, allow_pickle=True) as opened:
        one = opened["scaler"]
    state = state_of(0.0)
    with SyncCheckpointEngine(run, allow_pickle=True, keep_last=2) as engine:
        engine.restore(state)
        engine.checkpoint(state)
        engine.checkpoint(state)
    for found in (loaded, state):
        assert found["scaler"].scale == one.scale == 2.0
        assert type(found["parameters"]) is Attributes
        assert found["parameters"]["deep"][0] == argparse.Namespace(x=1)
        assert found["call"] is torch.nn.functional.relu
    assert loaded["scheduler"]["stage"] is state["scheduler"].stage is Stage.ONE
    said = [record.getMessage() for record in caplog.records if record.name.startswith("pccheck_async")]
    assert len([line for line in said if "are pickled" in line]) == 1  # by this engine, at its first save
    assert len([line for line in said if "are unpickled" in line]) == 2  # by load, and by restore
    assert all("scaler" in line for line in said)


def test_without_being_asked_nothing_is_pickled_or_unpickled(run: Path, tmp_path: Path) -> None:
    told = pytest.raises(UnsupportedStateError, match=r"^scaler: a .*Scaler cannot be saved.*allow_pickle=True")
    with SyncCheckpointEngine(tmp_path / "plain") as engine, told:
        engine.checkpoint(state_of(1.0))
    state: dict[str, Any] = dict.fromkeys(("scaler", "parameters", "call", "scheduler", "plain"))
    state["w"] = torch.zeros(4)
    with SyncCheckpointEngine(run, keep_last=2) as engine:
        with pytest.raises(UnsupportedStateError, match=r"^scaler: a pickled .*Scaler.*allow_pickle=True.*trust"):
            engine.restore(state)
        assert torch.equal(state.pop("w"), torch.zeros(4))
        assert not any(state.values())
        partly = {"w": torch.zeros(4), "plain": None}
        engine.restore(partly, strict=False)  # what is pickled is not restored
        assert partly["plain"] == 2.0
    with pytest.raises(UnsupportedStateError, match="scaler: a pickled"):
        load_sync(run)
    assert load_sync(run, keys=["w", "plain"])["plain"] == 2.0
    with open_checkpoint(run) as opened:
        assert opened["plain"] == 2.0
        read: Callable[[], Any]
        for read in (lambda: opened["scaler"], opened.load):
            with pytest.raises(UnsupportedStateError, match="a pickled"):
                read()
    assert not unpickled


@pytest.mark.slow
def test_what_looks_after_stores_unpickles_nothing(run: Path, tmp_path: Path) -> None:
    leaves = {leaf.path: leaf for leaf in stores.describe(run).leaves}
    assert leaves["scaler"].kind == "pickled"
    assert leaves["scaler"].text().startswith("<pickled tests.engine.test_pickles.Scaler, ")
    assert stores.verify(run, every=True).whole
    assert [one.path for one in stores.compare(run, step=1, other_step=2).differences] == [
        "w", "scaler", "parameters", "plain"
    ]  # fmt: skip
    assert list_checkpoints(run)
    stores.copy(run, tmp_path / "copy")
    stores.recover(run, search=True)
    for command in (["ls"], ["show"], ["show", "--json"], ["verify"]):
        assert CliRunner().invoke(app, [command[0], str(run), *command[1:]]).exit_code == 0
    to: Any
    for to in ("torch", "dcp"):
        with pytest.raises(UnsupportedStateError, match=r"a pickled tests\.engine.test_pickles.Scaler"):
            stores.export(run, tmp_path / to, to=to)
    stores.export(run, tmp_path / "safetensors", to="safetensors")
    with pytest.raises(UnsupportedStateError, match="a pickled"):
        stores.import_(tmp_path / "safetensors", tmp_path / "imported", source="safetensors")
    assert not unpickled
    assert load_sync(tmp_path / "copy", allow_pickle=True)["scaler"].scale == 2.0


def test_what_pickle_cannot_do_is_told_before_anything_changes(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, allow_pickle=True) as engine:
        for value in (Unpicklable(), [lambda: 1][0]):
            with pytest.raises(UnsupportedStateError, match=r"^deep\.0: .*cannot be pickled either"):
                engine.checkpoint({"deep": [value]})
        engine.checkpoint({"w": torch.ones(4), "gone": Gone()}).result()
        state: dict[str, Any] = {"w": torch.zeros(4), "gone": None}
        with pytest.raises(UnsupportedStateError, match=r"gone: a pickled .*Gone cannot be .* here: ImportError"):
            engine.restore(state)
        assert torch.equal(state["w"], torch.zeros(4))
    with pytest.raises(ValueError, match="allow_pickle"):
        SyncCheckpointEngine(tmp_path, allow_pickle="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("live", [torch.ones(2), Scheduler(None)], ids=["tensor", "object"])
def test_a_pickled_value_takes_no_tensors_place(tmp_path: Path, live: Any) -> None:
    with SyncCheckpointEngine(tmp_path, allow_pickle=True) as engine:
        engine.checkpoint({"x": types.SimpleNamespace(a=1)}).result()
        with pytest.raises((ValueError, TypeError)):
            engine.restore({"x": live})


def test_tensors_in_them_go_where_the_others_go(run: Path) -> None:
    place: Callable[..., Any] | str
    for place in ("meta", lambda storage, _: storage):
        assert load_sync(run, allow_pickle=True, device=place)["scaler"].scale.is_meta == (place == "meta")


def test_a_value_among_the_attributes_of_an_ordered_dict_is_named_like_the_others(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        ordered = OrderedDict(w=torch.ones(2))
        ordered._metadata = {"scaler": Scaler(3.0)}  # type: ignore[attr-defined]
        return {"o": ordered}

    with SyncCheckpointEngine(tmp_path, allow_pickle=True) as engine:
        engine.checkpoint(state()).result()
    unpickled.clear()
    with pytest.raises(UnsupportedStateError, match=r"^o\.<_metadata>\.scaler: a pickled"):
        load_sync(tmp_path)
    assert not unpickled
    found = load_sync(tmp_path, allow_pickle=True)["o"]
    assert found._metadata["scaler"].scale == 3.0
    assert torch.equal(found["w"], torch.ones(2))
