"""Samples of replicas: which bytes ranks compare, and that equal tensors are found equal however they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pccheck_async.errors import UnsupportedStateError
from pccheck_async.state.boxes import alike, hash_of
from pccheck_async.state.save import replicas
from pccheck_async.state.save.replicas import Replica, ReplicaSample

EVERYONE = alike([0, 1, 2])


def sampled(number: int, *, trained: tuple[str, ...] = (), **tensors: torch.Tensor) -> dict[str, int]:
    noted = [Replica(path, each, EVERYONE, path in trained) for path, each in tensors.items()]
    folded, named = ReplicaSample(noted, number).digest()
    assert folded.keys() == ({hash_of([0, 1, 2])} if tensors else set())
    return named


def differing(number: int, one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    found, others = sampled(number, **one), sampled(number, **other)
    assert found.keys() == others.keys()
    return {path for path in found if found[path] != others[path]}


def test_each_byte_is_compared_once_in_sixteen_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_MOST_OF_SMALLEST", 8)
    one = {"a": torch.zeros(3, 67), "b": torch.zeros(129, dtype=torch.bfloat16), "c": torch.zeros(1, dtype=torch.int64)}
    for path, tensor in one.items():
        for at in range(tensor.numel()):
            other = tensor.clone()
            other.view(-1)[at] = 1
            found = [number for number in range(16) if differing(number, one, one | {path: other})]
            assert len(found) in ((1, 16) if at < 4 else (1,)), (path, at)


def test_a_part_is_64_mib_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_MOST_BYTES", 100)
    monkeypatch.setattr(replicas, "_MOST_OF_SMALLEST", 4)
    one, other = {"a": torch.zeros(1000)}, {"a": torch.zeros(1000)}
    other["a"][999] = 1.0
    assert [number for number in range(80) if differing(number, one, other)] == [39, 79]
    noted = [Replica("a", one["a"], EVERYONE, False)]
    assert ReplicaSample(noted, 41).digest()[0] == {
        hash_of([0, 1, 2]): (1, ReplicaSample(noted, 1).digest()[0][hash_of([0, 1, 2])][1])
    }


def test_the_smallest_that_is_trained_is_compared_at_every_save() -> None:
    def model(rank: int) -> dict[str, Any]:
        """Frozen parameters, few elements and counts of steps are alike on all ranks, whatever they train on."""
        return {
            "frozen": torch.zeros(100),
            "few": torch.zeros(2),
            "weight": torch.full((200,), float(rank)),
            "large": torch.full((10_000,), float(rank)),
            "moments": torch.full((300,), float(rank)),
            "step": torch.tensor(3.0),
        }

    trained = {"trained": ("few", "weight", "large")}
    for number in range(16):
        found = differing(number, model(0) | trained, model(1) | trained)
        assert "weight" in found
        assert not found & {"frozen", "few", "step"}


def test_how_tensors_lie_makes_no_difference() -> None:
    matrix = torch.arange(12_000.0).reshape(100, 120)
    one = {"a": matrix, "b": matrix.to(torch.complex64).conj(), "c": torch.zeros(0)}
    other = {"c": torch.zeros(0), "b": one["b"].resolve_conj(), "a": matrix.t().contiguous().t()}
    for number in range(16):
        assert not differing(number, one, other)
    assert sampled(3) == {}


def test_memory_that_is_gone_is_named() -> None:
    freed = torch.zeros(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedStateError, match="a: the tensor claims 400 bytes"):
        sampled(0, a=freed)
