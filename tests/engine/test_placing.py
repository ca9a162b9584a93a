"""Where loaded tensors go, as ``torch.load`` understands it, and casting on restore, where it is asked for."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import StateMismatchError, SyncCheckpointEngine, load_sync


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, io.BytesIO]:
    w = torch.arange(6.0)
    state = {"w": w, "row": w[2:4], "none": torch.empty(0, 3), "p": torch.nn.Parameter(torch.ones(2))}
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state).result()
    file = io.BytesIO()
    torch.save(state, file)
    return tmp_path, file


def moved(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    assert location == "cpu"
    copied: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    return copied


PLACES: list[Any] = [
    "cpu", torch.device("cpu"), "meta", {"cpu": "meta"}, {"cuda:0": "cuda:1"}, {"cuda:0": "meta"}, {},
    moved, lambda storage, _: storage, lambda storage, _: None,
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(PLACES)))
def test_tensors_go_where_torch_load_puts_them(saved: tuple[Path, io.BytesIO], place: int) -> None:
    path, file = saved
    file.seek(0)
    theirs = torch.load(file, map_location=PLACES[place], weights_only=True)
    ours = load_sync(path, device=PLACES[place])
    for name, tensor in theirs.items():
        assert (ours[name].device, type(ours[name]), ours[name].shape) == (tensor.device, type(tensor), tensor.shape)
        if not tensor.is_meta:
            assert torch.equal(ours[name], tensor)
    if not ours["w"].is_meta:
        ours["w"][2] = -1.0
        assert ours["row"][0] == -1.0  # it is a view, still


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (lambda storage, _: 3, TypeError), (lambda storage, _: torch.empty(0).untyped_storage(), ValueError),
        ({"cpu": "nowhere"}, RuntimeError), ("nowhere", RuntimeError), (None, TypeError),
        (lambda storage, _: 1 // 0, ZeroDivisionError),
    ],
)  # fmt: skip
def test_what_is_no_place(saved: tuple[Path, io.BytesIO], place: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        load_sync(saved[0], device=place)


def make(dtype: torch.dtype, seed: int, *, stepped: bool = True) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    if stepped:
        model(torch.randn(8, 4, dtype=dtype)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "ema": torch.randn(3, dtype=dtype), "count": torch.tensor(seed)}


@pytest.mark.parametrize(
    ("stored", "live"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("stepped", [True, False])
def test_restore_casts_only_where_it_is_asked_to(
    tmp_path: Path, stored: torch.dtype, live: torch.dtype, stepped: bool
) -> None:
    saved, state = make(stored, 1), make(live, 2, stepped=stepped)
    before = state["model"].state_dict()["0.weight"].clone()
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(saved).result()
        with pytest.raises(StateMismatchError, match=r"model\.0\.weight .*in the checkpoint"):
            engine.restore(state)
        with pytest.raises(StateMismatchError):
            engine.restore(state, dtype=torch.float64)  # no tensor here is of that dtype
        assert torch.equal(state["model"].state_dict()["0.weight"], before)
        assert engine.restore(state, dtype=live) is not None
    assert torch.equal(state["ema"], saved["ema"].to(live))
    assert state["count"] == 1
    for name, value in saved["model"].state_dict().items():
        found = state["model"].state_dict()[name]
        assert found.dtype == (live if value.is_floating_point() else value.dtype)
        assert torch.equal(found, value.to(found.dtype)), name
    moments = zip(state["optimizer"].state.values(), saved["optimizer"].state.values(), strict=True)
    for found, value in moments:
        assert found["exp_avg"].dtype == live
        assert torch.equal(found["exp_avg"], value["exp_avg"].to(live))
        assert torch.equal(found["step"], value["step"])
    state["model"](torch.randn(8, 4, dtype=live)).sum().backward()
    state["optimizer"].step()


def test_the_same_dtype_is_restored_to_the_bit(tmp_path: Path) -> None:
    """Moments of another dtype than their parameters stay as they are, unless they are cast to the one asked for."""
    saved, state = make(torch.bfloat16, 1), make(torch.bfloat16, 2)
    for moments in saved["optimizer"].state.values():
        moments["exp_avg"] = moments["exp_avg"].float() + 1e-7
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(saved).result()
        engine.restore(state, dtype=torch.float32)
    for found, value in zip(state["optimizer"].state.values(), saved["optimizer"].state.values(), strict=True):
        assert found["exp_avg"].dtype == torch.float32
        assert torch.equal(found["exp_avg"], value["exp_avg"])


@pytest.mark.parametrize("dtype", ["float32", torch.int64, torch.complex64])
def test_what_is_no_dtype_to_cast_to(tmp_path: Path, dtype: Any) -> None:
    with SyncCheckpointEngine(tmp_path) as engine, pytest.raises(TypeError, match="floating-point"):
        engine.restore({"w": torch.ones(2)}, dtype=dtype)
