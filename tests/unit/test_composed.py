from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec import structs

from pccheck_async import (
    Shelf,
    StateMismatchError,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
    open_checkpoint,
    stores,
)
from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from pccheck_async.format.manifest import LATEST_VERSION, decode, encode, version_of
from pccheck_async.format.skeleton import MAX_DEPTH, ArrayNode, ComposedNode, DictNode, ListNode, Node
from pccheck_async.state import flatten
from pccheck_async.state.foreign import find_class
from tests.support.round_trip import save


class Scaled(torch.Tensor):
    """Small codes times a scale, as the moments of low-bit optimizers are, with a context of its own."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, context: Any = None) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, context: Any = None) -> None:
        self.codes, self.scale, self.context = codes, scale, context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Scaled:
        assert tuple(size) == tuple(parts["codes"].shape)
        return cls(parts["codes"], parts["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        one = args[0]
        match func:
            case torch.ops.aten.copy_.default:
                other = args[1]
                if isinstance(other, Scaled):
                    one.codes.copy_(other.codes)
                    one.scale.copy_(other.scale)
                else:
                    one.scale.copy_(other.abs().max() / 100)
                    one.codes.copy_(torch.round(other / one.scale))
                return one
            case torch.ops.aten._to_copy.default:
                return cls(one.codes.clone(), one.scale.clone(), one.context)
            case torch.ops.aten.detach.default:
                return cls(one.codes.detach(), one.scale.detach(), one.context)
        raise NotImplementedError(func)

    def value(self) -> torch.Tensor:
        return self.codes * self.scale


class OtherScaled(Scaled):
    """Another class with the same parts."""


class Momentum(torch.optim.Optimizer):
    """Has a low-bit moment from its first step on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state["moment"] = scaled(torch.zeros_like(each, dtype=torch.int8))
                moment = state["moment"].value() * 0.9 + each.grad
                state["moment"].copy_(moment)
                each.sub_(group["lr"] * moment)


CONTEXT: Any = {"signed": True, "sizes": [1, (2, 3)], "dtype": torch.bfloat16, "shape": torch.Size([2]), "none": None}


def scaled(codes: torch.Tensor, context: Any = CONTEXT) -> Scaled:
    return Scaled(codes, torch.ones(1), context)


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3)
        self.optimizer = Momentum(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def steps(self, first: int, end: int) -> None:
        for number in range(first, end):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()

    def bits(self) -> list[Any]:
        moments = [each["moment"] for each in self.optimizer.state.values()]
        parts = [(moment.codes.tolist(), moment.scale.tolist(), moment.context) for moment in moments]
        return [*parts, *(each.tolist() for each in self.model.parameters())]


@pytest.mark.parametrize("stepped", [False, True], ids=["lazy", "stepped"])
def test_an_optimizer_with_composed_moments_resumes_with_the_same_bits(tmp_path: Path, stepped: bool) -> None:
    whole = Training()
    whole.steps(0, 6)
    first = Training()
    first.steps(0, 3)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(first.state, step=3).result(60)
    second = Training()
    if stepped:
        second.steps(7, 9)
    moments = [each["moment"] for each in second.optimizer.state.values()]
    addresses = [moment.codes.data_ptr() for moment in moments]
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.restore(second.state)
    assert second.bits() == first.bits()
    now = [each["moment"] for each in second.optimizer.state.values()]
    assert all(type(moment) is Scaled for moment in now)
    if stepped:
        assert [moment.codes.data_ptr() for moment in now] == addresses
    second.steps(3, 6)
    assert second.bits() == whole.bits()


def test_saving_and_loading_by_every_way(tmp_path: Path) -> None:
    codes = torch.arange(6, dtype=torch.int8).reshape(2, 3)
    state = {"x": [scaled(codes)], "plain": codes}  # shares the memory of the codes
    with SyncCheckpointEngine(tmp_path / "run") as engine:
        engine.checkpoint(state, step=1).result(60)
    stores.copy(tmp_path / "run", tmp_path / "copy")
    assert stores.verify(tmp_path / "copy").whole
    assert not stores.compare(tmp_path / "run", tmp_path / "copy").differences
    assert stores.recover(tmp_path / "copy", search=True).found[0].whole
    names = [leaf.path for leaf in stores.describe(tmp_path / "copy").leaves]
    assert names == ["x.0.codes", "x.0.scale", "x.0.._context", "plain"]
    with open_checkpoint(tmp_path / "copy") as opened:
        for loaded in (load_sync(tmp_path / "copy"), opened.load(), {"x": [opened["x.0"]], "plain": opened["plain"]}):
            back = loaded["x"][0]
            assert type(back) is Scaled
            assert torch.equal(back.codes, codes)
            assert back.context == CONTEXT
            assert type(back.context["shape"]) is torch.Size
            assert type(back.context["sizes"][1]) is tuple
    together = load_sync(tmp_path / "copy")
    assert together["x"][0].codes.data_ptr() == together["plain"].data_ptr()


@pytest.mark.slow
def test_no_export_has_them(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "run") as engine:
        engine.checkpoint({"x": [scaled(torch.ones(3, dtype=torch.int8))]}, step=1).result(60)
    kinds: tuple[Literal["torch", "safetensors", "dcp"], ...] = ("torch", "safetensors", "dcp")
    for kind in kinds:
        with pytest.raises(UnsupportedStateError, match=r"x\.0 .*a Scaled, which is composed of other tensors"):
            stores.export(tmp_path / "run", tmp_path / f"out-{kind}", to=kind)


def test_without_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"x": [scaled(torch.ones(3, dtype=torch.int8))], "y": 1}, step=1).result(60)
    monkeypatch.delattr(sys.modules[__name__], "Scaled")
    text = r"x\.0: a tensor of the class Scaled.* no module tests\.unit\.test_composed .*keys=\['x\.0\.\*'\]"
    with pytest.raises(UnsupportedStateError, match=text):
        load_sync(tmp_path)
    with open_checkpoint(tmp_path) as opened:
        with pytest.raises(UnsupportedStateError, match="a tensor of the class Scaled"):
            opened.load()
        assert opened["y"] == 1
    live: dict[str, Any] = {"x": [None], "y": 0}
    with SyncCheckpointEngine(tmp_path) as engine, pytest.raises(UnsupportedStateError, match=r"x\.0: a tensor of"):
        engine.restore(live)
    assert live == {"x": [None], "y": 0}
    parts = load_sync(tmp_path, keys=["x.0.*", "y"])
    assert parts["x"][0]["codes"].tolist() == [1, 1, 1]
    assert parts["x"][0].keys() == {"codes", "scale"}


@pytest.mark.parametrize(
    ("make", "text"),
    [(lambda parts, *_: parts["missing"], "KeyError"), (lambda parts, *_: parts["codes"], "it makes another tensor")],
)
def test_a_class_that_makes_no_such_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, text: str
) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"x": scaled(torch.ones(3, dtype=torch.int8))}, step=1).result(60)
    monkeypatch.setattr(Scaled, "__tensor_unflatten__", staticmethod(make))
    with pytest.raises(UnsupportedStateError, match=rf"test_composed\.Scaled does not make .*{text}.*another version"):
        load_sync(tmp_path)


def test_a_class_is_only_looked_up() -> None:
    assert find_class(__name__, "Scaled") is Scaled
    for module, name in (
        (__name__, "Momentum"),
        (__name__, "torch.Tensor"),
        (__name__, "Nothing"),
        ("torch", "Tensor"),
        ("torch.distributed.tensor", "DTensor"),
        ("this_is_not_imported", "Scaled"),
        ("os", "system"),
        ("", ""),
    ):
        assert find_class(module, name) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda: OtherScaled(torch.zeros(3, dtype=torch.int8), torch.ones(1), CONTEXT), "a OtherScaled here, a Scaled"),
        (lambda: scaled(torch.zeros(3, dtype=torch.int8), {"signed": False}), "another shape or context of a Scaled"),
        (lambda: scaled(torch.zeros(4, dtype=torch.int8)), "another shape or context of a Scaled"),
        (lambda: scaled(torch.zeros(3, dtype=torch.int16)), "codes: int16 .* here, int8"),
        (lambda: torch.zeros(3), "a Tensor here, a Scaled in the checkpoint"),
    ],
)  # fmt: skip
def test_what_differs_is_a_mismatch(tmp_path: Path, change: Callable[[], Any], text: str) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"x": scaled(torch.ones(3, dtype=torch.int8))}, step=1).result(60)
        with pytest.raises(StateMismatchError, match=f"x .{text}"):
            engine.restore({"x": change()})
        engine.checkpoint({"x": torch.ones(3)}, step=2).result(60)
        with pytest.raises(StateMismatchError, match="a Scaled here, a plain tensor in the checkpoint"):
            engine.restore({"x": scaled(torch.zeros(3, dtype=torch.int8))})


def test_a_restore_in_place_counts_as_a_change(tmp_path: Path) -> None:
    live = scaled(torch.ones(3, dtype=torch.int8))
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"x": live}, step=1).result(60)
        with torch.no_grad():
            live.copy_(torch.tensor([5.0, 6.0, 7.0]))
        then, parts, before = live._version, live.codes, live.codes._version
        engine.restore({"x": live})
    assert live.codes is parts
    assert live.codes.tolist() == [1, 1, 1]
    assert live._version > then
    assert live.codes._version > before


def test_changes_are_counted_by_the_composed_tensor() -> None:
    value = scaled(torch.ones(3, dtype=torch.int8))
    flat = flatten({"a": 1, "x": value, "y": torch.zeros(1)})
    assert flat.leaves.paths == ["x.codes", "x.scale", "y"]
    assert {number: id(each) for number, each in flat.leaves.wrappers.items()} == {0: id(value), 1: id(value)}
    before = value.codes._version
    with torch.no_grad():
        value.copy_(torch.zeros(3) + 2)
    assert value.codes._version == before  # torch does not count what __torch_dispatch__ does: nothing else would tell
    assert value._version


def test_captures_beside_training_have_the_moments_of_their_step(tmp_path: Path) -> None:
    run, wanted = Training(), {}
    with SyncCheckpointEngine(tmp_path, interval=1, keep_last=5) as engine:
        engine.attach(run.optimizer)
        for number in range(1, 5):
            with engine.step(run.state, number):
                run.steps(number, number + 1)
            wanted[number] = run.bits()
    assert {info.step for info in list_checkpoints(tmp_path)} == {*wanted}
    with SyncCheckpointEngine(tmp_path, keep_last=5) as engine:
        for number, want in wanted.items():
            other = Training()
            engine.restore(other.state, step=number)
            assert other.bits() == want


class Unusual(Scaled):
    """Returns what the tests want for a context."""


def unusual(context: Any) -> Unusual:
    return Unusual(torch.zeros(2, dtype=torch.int8), torch.ones(1), context)


def local() -> Scaled:
    class Local(Scaled):
        pass

    return Local(torch.zeros(2, dtype=torch.int8), torch.ones(1))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: unusual(object()), "the context .* more in it than plain values"),
        (lambda: unusual([torch.zeros(1)]), "the context .* tensors or objects in it"),
        (lambda: unusual(torch.nn.Linear(1, 1)), "the context .* tensors or objects in it"),
        (local, "define it at the top level of a module"),
        (lambda: Unusual(scaled(torch.zeros(2)), torch.ones(1)), "not all tensors that it is composed of are plain"),
        (lambda: torch.nn.Parameter(unusual(None), requires_grad=False), r"without autograd; .* x\.detach"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path, make: Callable[[], Any], text: str) -> None:
    with pytest.raises(UnsupportedStateError, match=rf"a\.b: a tests\.unit\.test_composed\..*{text}"):
        flatten({"a": {"b": make()}})


def test_no_shelf_keeps_them(tmp_path: Path) -> None:
    with Shelf(tmp_path / "shelf") as shelf, pytest.raises(UnsupportedStateError, match="x: no tensors that are"):
        shelf["x"] = scaled(torch.zeros(2, dtype=torch.int8))


def test_only_manifests_with_them_are_of_the_latest_version() -> None:
    manifest = save({"x": scaled(torch.zeros(2, dtype=torch.int8))}).decoded
    assert manifest.version == LATEST_VERSION
    assert version_of(save({"x": torch.zeros(2)}).decoded.skeleton, with_pieces=False) < LATEST_VERSION
    assert isinstance(manifest.skeleton, DictNode)
    node = manifest.skeleton.values[0]
    assert isinstance(node, ComposedNode)
    deep: Node = None
    for _ in range(MAX_DEPTH + 2):
        deep = ListNode([deep])
    for changes in (
        {"version": 1},
        {"skeleton": DictNode(["x"], [structs.replace(node, names=["codes", "codes"])])},
        {"skeleton": DictNode(["x"], [structs.replace(node, names=["codes"])])},
        {"skeleton": DictNode(["x"], [structs.replace(node, items=[ArrayNode(0), DictNode([], [])])])},
        {"skeleton": DictNode(["x"], [structs.replace(node, context=ListNode([ArrayNode(0)]))])},
        {"skeleton": DictNode(["x"], [structs.replace(node, context=deep)])},
    ):
        with pytest.raises(CorruptStoreError):
            decode(encode(structs.replace(manifest, **changes)))
