"""Which memory is left to captures beside training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import StorageOptions, SyncCheckpointEngine, load_sync
from pccheck_async.state import LayoutCache, PackedSource, Sources, Versions, cached_layout, flatten
from pccheck_async.state.leaves import RawSource
from pccheck_async.state.save.split import changed_by_forward, covered, lazy_sources, optimized, sharing_nothing
from pccheck_async.transfer import PAGE_BYTES
from tests.support.elsewhere import without_extension


def sources_of(*tensors: torch.Tensor) -> Sources:
    return Sources(RawSource(tensor.data_ptr(), tensor.nbytes, tensor) for tensor in tensors)


def those_covered(lazy: Sequence[torch.Tensor], *tensors: torch.Tensor) -> list[bool]:
    return list(map(bool, covered(sources_of(*tensors), lazy)))


def test_what_is_inside_is_covered_and_nothing_else() -> None:
    base = torch.zeros(100)
    lazy = [base[10:40], base[40:50]]
    inside, over, before = base[10:50], base[49:51], base[:10]
    assert those_covered(lazy, inside, over, before, base, base[12:20], torch.zeros(3)) == [
        True,
        False,
        False,
        False,
        True,
        False,
    ]


def test_overlapping_and_nested_ranges() -> None:
    base = torch.zeros(100)
    lazy = [base[0:60], base[10:20], base[50:70], base[80:90]]
    assert those_covered(lazy, base[0:70], base[15:70], base[60:80], base[80:90], base[69:81]) == [
        True,
        True,
        False,
        True,
        False,
    ]


def test_nothing_covers_nothing() -> None:
    assert those_covered([], torch.zeros(3)) == [False]
    assert those_covered([torch.zeros(0)], torch.zeros(3)) == [False]


def test_elements_in_any_order_are_one_run_but_holes_are_not_covered() -> None:
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    flipped = torch.zeros(4, 6).t()
    column = torch.zeros(6, 6)[:, 0]
    lazy = [image, flipped, column]
    assert those_covered(lazy, image, flipped, column) == [True, True, False]


def test_tensors_without_plain_memory_are_left_out() -> None:
    plain = torch.zeros(5)
    sparse: Any = torch.zeros(5).to_sparse()
    lazy = [torch.zeros(5, device="meta"), sparse, plain]
    assert those_covered(lazy, plain) == [True]


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as DTensor and quantized weights are."""

    whole: torch.Tensor

    @staticmethod
    def __new__(cls, whole: torch.Tensor) -> Wrapped:
        wrapped: Wrapped = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        wrapped.whole = whole
        return wrapped

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = [each.whole if isinstance(each, Wrapped) else each for each in args]
        return cls(function(*plain, **(kwargs or {})))


@pytest.mark.parametrize("odd", [lambda: Wrapped(torch.ones(3)), lambda: torch.eye(3).to_sparse()])
def test_parameters_without_memory_trouble_nobody(tmp_path: Path, odd: Callable[[], torch.Tensor]) -> None:
    """Of an attached optimizer, and of another one whose step begins in the middle of a capture."""
    model, parameter = torch.nn.Linear(300, 300), torch.nn.Parameter(odd())
    assert those_covered([parameter, model.weight], model.weight) == [True]
    assert Versions(["x"], [model.weight]).paths_of([parameter]) == []
    with SyncCheckpointEngine(
        tmp_path, storage=StorageOptions(chunk_bytes=PAGE_BYTES, host_memory=2 * PAGE_BYTES)
    ) as engine:
        for parameters in (model.parameters(), [parameter]):
            engine.attach(torch.optim.SGD(parameters, lr=0.1))
        engine.checkpoint({"model": model}, step=1, overlap=True).result()
    assert torch.equal(load_sync(tmp_path)["model"]["weight"], model.weight)


def test_packed_sources_are_not_covered() -> None:
    sources = Sources([PackedSource(torch.zeros(5))])
    assert not covered(sources, [torch.zeros(5)]).any()


def test_what_optimizers_keep() -> None:
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(layer.parameters())
    assert {id(each) for each in optimized([optimizer])} == {id(each) for each in layer.parameters()}
    layer.bias.requires_grad_(False)  # the optimizer skips it, and who follows by hand changes it
    assert {id(each) for each in optimized([optimizer])} == {id(layer.weight)}
    layer.bias.requires_grad_(True)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert len(optimized([optimizer])) == 2 + len(kept) == 8


class Run:
    """Saves of a list of tensors, and optimizers that change some of them."""

    def __init__(self, *values: torch.Tensor) -> None:
        self.values = [*values]
        self._last: LayoutCache | None = None

    def lazy(self, *optimizers: torch.optim.Optimizer) -> list[bool]:
        """Return which tensors are lazy in the next save."""
        layout, self._last = cached_layout(flatten({"x": self.values}).leaves, self._last)
        found = lazy_sources(layout, optimizers, self.values)
        assert found.tolist() == covered(layout.sources, optimized(optimizers)).tolist()
        return [bool(found[layout.source_of[number]]) for number in range(len(self.values))]


def with_momentum(*parameters: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("known", [True, False])
def test_lazy_sources_are_remembered_until_the_tensors_are_others(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        without_extension(monkeypatch)
    weight, buffer, other = torch.nn.Parameter(torch.zeros(8)), torch.zeros(8), torch.nn.Parameter(torch.zeros(8))
    optimizer = with_momentum(weight)
    run = Run(weight, optimizer.state[weight]["momentum_buffer"], buffer, other)
    for _ in range(3):
        assert run.lazy(optimizer) == [True, True, False, False]
    second = with_momentum(other)
    for _ in range(3):
        assert run.lazy(optimizer, second) == [True, True, False, True]
        assert run.lazy(second) == [False, False, False, True]
        assert run.lazy(optimizer) == [True, True, False, False]
    for flag in (False, True):
        weight.requires_grad_(flag)
        for _ in range(3):
            assert run.lazy(optimizer) == [flag, True, False, False]
    optimizer.state[weight]["momentum_buffer"] = buffer
    for _ in range(3):
        assert run.lazy(optimizer) == [True, False, True, False]
    optimizer.param_groups[0]["params"] = [other]
    for _ in range(3):
        assert run.lazy(optimizer) == [False, False, True, True]
    with torch.no_grad():
        other.data = torch.zeros(8)
    for _ in range(3):
        assert run.lazy(optimizer) == [False, False, True, True]


def test_optimized_tensors_that_are_no_leaves_are_looked_at_each_time() -> None:
    weight = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    run = Run(weight.detach())
    for _ in range(3):
        assert run.lazy(optimizer) == [True]
    with torch.no_grad():
        weight.data = torch.zeros(8)  # the leaf stays where it is, and nobody guards it any more
    assert run.lazy(optimizer) == [False]
    memory = torch.zeros(16)
    run = Run(memory[:8].detach())
    for parameter, dense in ((memory[:8], True), (memory[::2], False), (memory[:8], True)):
        assert run.lazy(torch.optim.SGD([parameter.requires_grad_()], lr=0.1)) == [dense]
        memory = memory.detach()


def test_an_optimizer_of_fewer_tensors_is_not_taken_for_one_whose_others_are_no_leaves() -> None:
    weight, other = torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.zeros(8))
    run = Run(weight, other.detach())
    for _ in range(3):
        assert run.lazy(torch.optim.SGD([weight, other], lr=0.1)) == [True, True]
        assert run.lazy(torch.optim.SGD([weight], lr=0.1)) == [True, False]


def test_modules_in_modules_are_looked_at() -> None:
    plain, table = torch.nn.Embedding(2, 2), torch.nn.EmbeddingBag(2, 2, max_norm=1.0)
    module = torch.nn.ModuleDict({"plain": plain, "inside": torch.nn.Sequential(torch.nn.ReLU(), table)})
    module.register_module("none", None)
    assert [*map(id, changed_by_forward([plain, module, torch.optim.SGD(table.parameters())]))] == [id(table.weight)]


@pytest.mark.parametrize("share", [lambda weight: weight, torch.Tensor.detach, lambda weight: weight.detach()[:2]])
def test_what_shares_the_memory_of_a_renormalised_embedding_is_not_left(share: Callable[..., torch.Tensor]) -> None:
    table, other = torch.nn.Embedding(3, 2, max_norm=1.0), torch.nn.Parameter(torch.zeros(3, 2))
    shared = torch.nn.Parameter(share(table.weight.data), requires_grad=False)
    sparse = torch.eye(2).to_sparse()
    left = sharing_nothing([table.weight, shared, other, sparse], [table.weight, torch.eye(3).to_sparse()])
    assert [*map(id, left)] == [id(other), id(sparse)]


def test_an_embedding_may_begin_to_renormalise() -> None:
    embedding = torch.nn.Embedding(3, 2)
    assert not changed_by_forward([embedding])
    embedding.max_norm = 1.0
    assert [*map(id, changed_by_forward([embedding]))] == [id(embedding.weight)]
