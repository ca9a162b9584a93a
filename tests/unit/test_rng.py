from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async import RNGState, StateMismatchError
from tests.support.round_trip import save


def draws() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        int(np.random.randint(1 << 30)),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    ]


def test_every_generator_goes_on_where_it_was() -> None:
    draws()  # leaves a second normal number waiting in Python's and numpy's
    saved = save({"rng": RNGState()})
    expected = draws()
    draws()
    saved.restore({"rng": RNGState()})
    assert draws() == expected


def test_the_state_is_compact() -> None:
    saved = save({"rng": RNGState()})
    assert len(saved.payload) <= 11_264
    assert len(saved.manifest) < 1500


def test_cuda_generators_need_as_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    before = RNGState().state_dict()
    saved = save({"rng": before | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 3}})
    expected = draws()
    RNGState().load_state_dict(before)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StateMismatchError, match=r"rng \(generators of 3 CUDA devices were saved.*sees 0"):
        saved.restore({"rng": RNGState()})
    with pytest.raises(StateMismatchError, match="3 CUDA devices"):
        RNGState().load_state_dict(saved.load()["rng"])
    assert draws() == expected


@pytest.mark.parametrize("other", [{"x": 1}, [1], 1])
def test_another_state_is_none_of_generators(other: Any) -> None:
    saved = save({"rng": other})
    with pytest.raises(StateMismatchError, match=r"rng \(this is not the state of an RNGState\)"):
        saved.restore({"rng": RNGState()})
    with pytest.raises(StateMismatchError, match="not the state of an RNGState"):
        RNGState().load_state_dict(other)


def test_cuda_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.full((16,), number, dtype=torch.uint8) for number in range(2)]
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", taken.extend)
    saved = save({"rng": RNGState()})
    saved.restore({"rng": RNGState()})
    assert [state.tolist() for state in taken] == [state.tolist() for state in states]
