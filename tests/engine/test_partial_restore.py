"""restore(strict=False): what both have is restored, the rest stays as it is and is named."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pccheck_async import (
    CheckpointEngine,
    CheckpointInfo,
    Restored,
    StateMismatchError,
    StorageOptions,
    SyncCheckpointEngine,
    open_checkpoint,
)
from tests.support.state_strategies import Thing, array_bytes

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Old(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.old_head = nn.Linear(4, 2)


class New(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5)


class Whole(nn.Module):
    """Loads strictly, whatever it is asked, and says what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2))
        self.b = nn.Parameter(torch.ones(2))
        self.given: list[str] = []

    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        self.given = list(state_dict)
        return super().load_state_dict(state_dict)


def save(path: Path, state: dict[str, Any]) -> CheckpointInfo:
    with SyncCheckpointEngine(path) as engine:
        return engine.checkpoint(state, step=4, metadata={"loss": 0.5}).result(60)


def restore(path: Path, state: dict[str, Any]) -> Restored:
    with SyncCheckpointEngine(path) as engine:
        restored = engine.restore(state, strict=False)
        assert restored is not None
        return restored


def test_a_new_head_on_an_old_body(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = Old(1), New(2)
    old.body[1].running_mean.fill_(3.0)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(old.parameters())
    info = save(tmp_path, {"model": old, "optimizer": optimizer, "step": 4})
    head = [array_bytes(parameter) for parameter in new.head.parameters()]
    places = [parameter.data_ptr() for parameter in new.parameters()]
    live = {"model": new, "step": 0, "best": 0.25, "extra": torch.ones(3)}
    with caplog.at_level(logging.WARNING, "pccheck_async"):
        restored = restore(tmp_path, live)
    assert set(restored.missing) == {"model.head.weight", "model.head.bias", "best", "extra"}
    assert set(restored.unexpected) == {"model.old_head.weight", "model.old_head.bias", "optimizer"}
    assert "in part: the checkpoint lacks best, extra, model.head.weight, model.head.bias; the state" in caplog.text
    for one, other in zip(new.body.state_dict().values(), old.body.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert [array_bytes(parameter) for parameter in new.head.parameters()] == head
    assert [parameter.data_ptr() for parameter in new.parameters()] == places
    assert (live["step"], live["best"]) == (4, 0.25)
    assert torch.equal(live["extra"], torch.ones(3))  # type: ignore[arg-type]
    assert restored == info
    assert info == restored
    assert (restored.step, restored.metadata) == (4, {"loss": 0.5})


def test_all_of_it_fits(tmp_path: Path) -> None:
    info = save(tmp_path, {"model": Old(1), "step": 4})
    new = Old(2)
    restored = restore(tmp_path, {"model": new, "step": 0})
    assert (restored.missing, restored.unexpected) == ((), ())
    assert restored == info
    assert restored != Restored.of(CheckpointInfo(5, 0, 0, 0.0), (), ())
    assert restored != "something else"
    for one, other in zip(new.state_dict().values(), Old(1).state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_nothing_in_common_raises_all_the_same(tmp_path: Path) -> None:
    """It would be taken for a restored state."""
    save(tmp_path, {"model": Old(1)})
    with pytest.raises(StateMismatchError, match="'other' is missing and 'model' is unexpected, with equal leaves"):
        restore(tmp_path, {"other": Old(2)})
    wrapped = nn.Module()
    wrapped._orig_mod = nn.Linear(2, 2)
    save(tmp_path / "wrapped", {"model": wrapped, "step": 1})
    with pytest.raises(StateMismatchError, match=r"model in the checkpoint is wrapped by torch\.compile: save and"):
        restore(tmp_path / "wrapped", {"model": nn.Linear(2, 2), "step": 0})
    assert restore(tmp_path, {}).unexpected == ("model",)


class Renamed(nn.Module):
    def __init__(self, old: Old) -> None:
        super().__init__()
        self.trunk, self.head = old.body, old.old_head


@pytest.mark.parametrize(
    ("saved", "live", "path"),
    [
        ({"model": Old(1), "step": 4}, {"model": Renamed(Old(2)), "step": 0}, "model"),
        ({"models": [Old(1), nn.Linear(1, 1)]}, {"models": [Renamed(Old(2)), nn.Linear(1, 1)]}, r"models\.0"),
        ({"model": nn.Identity(), "step": 4}, {"model": Old(1), "step": 0}, "model"),
        ({"ema": {"x": {"a": torch.ones(2)}}, "step": 4}, {"ema": {"x": {"b": torch.ones(2)}}, "step": 0}, "ema"),
    ],
)
def test_nothing_in_common_below_a_name_raises(
    tmp_path: Path, saved: dict[str, Any], live: dict[str, Any], path: str
) -> None:
    save(tmp_path, saved)
    with SyncCheckpointEngine(tmp_path) as engine:
        for strict in (True, False):
            with pytest.raises(
                StateMismatchError, match=rf"\. nothing in common below {path}; leave that out of"
            ) as raised:
                engine.restore(live, strict=strict)
            assert raised.value.missing
            assert "strict=False" not in str(raised.value)
    assert live.get("step") in (0, None)


def test_little_in_common_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    save(tmp_path, {"model": old, "step": 4, "list": [1, 2, None], "gone": {"x": 1, "y": [2, 3]}})
    new = nn.ModuleDict({"0": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    restored = restore(tmp_path, {"model": new, "step": 0, "list": []})
    assert restored.filled == 2 + 1 + 3
    assert "restored were 2 of 40 leaves of model, 1 of 1 leaves of step, 3 of 3 leaves of list" in caplog.text
    assert restore(tmp_path, {"model": nn.Identity(), "step": 0}).filled == 1  # there is nothing to fill
    with SyncCheckpointEngine(tmp_path) as engine:
        everything = engine.restore({"model": old, "step": 0, "list": [], "gone": {}})
        assert everything is not None
        assert everything.filled == len(paths_of(tmp_path)) == 47


def paths_of(path: Path) -> list[str]:
    with open_checkpoint(path) as checkpoint:
        return list(checkpoint)


def test_a_view_with_holes_is_something_in_common(tmp_path: Path) -> None:
    save(tmp_path, {"x": torch.ones(3)})
    columns = torch.zeros(3, 2)
    assert restore(tmp_path, {"x": columns[:, 0], "y": 1}).missing == ("y",)
    assert columns.tolist() == [[1, 0]] * 3


def test_many_names_are_not_all_in_the_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, {"x": 1})
    restore(tmp_path, {"x": 0} | {f"n{number}": number for number in range(7)})
    assert "the checkpoint lacks n0, n1, n2, n3, n4, ... (7 paths); the state lacks nothing" in caplog.text


def test_strict_is_the_default(tmp_path: Path) -> None:
    save(tmp_path, {"model": Old(1)})
    new = New(2)
    before = [array_bytes(value) for value in new.state_dict().values()]
    with SyncCheckpointEngine(tmp_path) as engine, pytest.raises(StateMismatchError) as raised:
        engine.restore({"model": new})
    assert raised.value.missing == ("model.head.weight", "model.head.bias")
    assert [array_bytes(value) for value in new.state_dict().values()] == before


@pytest.mark.parametrize(
    "live",
    [
        {"x": torch.zeros(4), "y": 0},
        {"x": torch.zeros(3, dtype=torch.float64), "y": 0},
        {"x": {"inner": torch.zeros(3)}, "y": 0},
        {"x": torch.zeros(3), "y": torch.zeros(3), "z": 1},
    ],
)
def test_another_shape_or_type_raises_all_the_same(tmp_path: Path, live: dict[str, Any]) -> None:
    save(tmp_path, {"x": torch.ones(3), "y": 5})
    with SyncCheckpointEngine(tmp_path) as engine, pytest.raises(StateMismatchError) as raised:
        engine.restore(live, strict=False)
    assert len(raised.value.mismatched) == 1
    assert not isinstance(live["x"], torch.Tensor) or not live["x"].any()


def test_optimizers_of_other_parameters_raise(tmp_path: Path) -> None:
    save(tmp_path, {"optimizer": torch.optim.SGD(Old(1).parameters())})
    other = torch.optim.SGD(New(1).body.parameters())
    with SyncCheckpointEngine(tmp_path) as engine, pytest.raises(StateMismatchError, match="parameters here"):
        engine.restore({"optimizer": other}, strict=False)


def test_a_module_gets_a_whole_state(tmp_path: Path) -> None:
    save(tmp_path, {"module": {"b": torch.full((2,), 7.0), "c": torch.zeros(1)}})
    module = Whole()
    restored = restore(tmp_path, {"module": module})
    assert module.given == ["a", "b"]
    assert (module.a.tolist(), module.b.tolist()) == ([0.0, 0.0], [7.0, 7.0])
    assert (restored.missing, restored.unexpected) == (("module.a",), ("module.c",))


def test_versions_of_modules(tmp_path: Path) -> None:
    """What was saved is loaded as the version it has; what was not, as the live one's."""
    batch_norm = nn.BatchNorm1d(2)
    state = batch_norm.state_dict()
    state._metadata[""]["version"] = 1  # type: ignore[attr-defined]
    save(tmp_path, {"module": state})
    seen: list[Any] = []
    module = nn.BatchNorm1d(2)
    module._register_load_state_dict_pre_hook(lambda *arguments: seen.append(arguments[2]))  # type: ignore[no-untyped-call]
    assert restore(tmp_path, {"module": module}).missing == ()
    assert [metadata["version"] for metadata in seen] == [1]


def test_objects_decide_for_themselves(tmp_path: Path) -> None:
    save(tmp_path, {"thing": Thing(a=1, b=torch.ones(2)), "gone": Thing(c=1)})
    thing, new = Thing(a=0, c=3), Thing(d=4)
    restored = restore(tmp_path, {"thing": thing, "new": new})
    assert thing.state["a"] == 1
    assert list(thing.state) == ["a", "b"]
    assert new.state == {"d": 4}
    assert (restored.missing, restored.unexpected) == (("new",), ("gone",))


def test_what_is_not_restored_is_not_read(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, storage=StorageOptions(chunk_bytes=64 * 1024)) as engine:
        engine.checkpoint({"big": torch.zeros(1 << 20), "small": torch.ones(16)}).result(60)
        before = engine.statistics().stages["read"].nbytes
        small = torch.zeros(16)
        restored = engine.restore({"small": small}, strict=False)
        assert restored is not None
        assert restored.unexpected == ("big",)
        assert small.all()
        assert engine.statistics().stages["read"].nbytes - before <= 2 * 64 * 1024


def test_tied_weights_half_of_which_are_there(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    save(tmp_path, {"model": {"embed": weight}})
    tied = nn.Parameter(torch.zeros(2, 3))
    live = {"model": {"embed": tied, "head": tied}}
    assert restore(tmp_path, live).missing == ("model.head",)
    assert torch.equal(live["model"]["head"], weight)


def test_the_async_engine_does_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        async with CheckpointEngine(tmp_path) as engine:
            assert await engine.restore({"x": 1}, strict=False) is None
            await engine.checkpoint({"x": 2, "y": 3})
            await engine.drain()
            live = {"x": 0, "z": 9}
            restored = await engine.restore(live, strict=False)
            assert restored is not None
            assert (restored.missing, restored.unexpected) == (("z",), ("y",))
            assert live == {"x": 2, "z": 9}

    asyncio.run(main())
