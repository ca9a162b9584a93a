"""What finds out that leaves changed while they were captured."""

from __future__ import annotations

import pytest
import torch

from pccheck_async.errors import TornCaptureError
from pccheck_async.state import Versions
from pccheck_async.state.save.torn import TornLeaves


def made(*tensors: torch.Tensor) -> Versions:
    return Versions([f"x{number}" for number in range(len(tensors))], [tensor.detach() for tensor in tensors])


def test_nothing_changed() -> None:
    assert made(torch.ones(3), torch.ones(3)).changed() == []
    assert made().changed() == []


def test_a_change_in_place_is_named() -> None:
    one, other = torch.ones(3), torch.ones(3)
    versions = made(one, other)
    other.add_(1)
    assert versions.changed() == ["x1"]


def test_a_change_of_a_view_counts_for_its_base() -> None:
    base = torch.ones(3, 3)
    versions = made(base)
    base[0].zero_()
    assert versions.changed() == ["x0"]


def test_a_storage_that_shrinks_or_grows_is_named() -> None:
    for nbytes in (0, 1 << 20):
        tensor = torch.ones(3)
        versions = made(torch.ones(1), tensor)
        tensor.untyped_storage().resize_(nbytes)
        assert versions.changed() == ["x1"]


def test_tensors_without_a_counter_are_compared_by_their_memory() -> None:
    with torch.inference_mode():
        frozen = torch.ones(3)
    live = torch.ones(3)
    versions = made(frozen, live)
    assert versions.changed() == []
    live.add_(1)
    assert versions.changed() == ["x1"]


def test_the_tensor_in_the_memory_of_another_is_found() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    versions = made(torch.ones(4), weight)
    assert versions.paths_of([weight]) == ["x1"]
    assert versions.paths_of([weight.view(2, 2)[1]]) == ["x1"]
    assert versions.paths_of([torch.ones(4)]) == []


PATHS, SOURCES = ["a", "b", "c", "d", "e"], [0, 1, 2, 3, -1]


def test_what_is_torn_in_two_captures_in_a_row_is_eager_then(caplog: pytest.LogCaptureFixture) -> None:
    """In either of them: with ``check_captures``, a capture names only the first leaf that it finds changed."""
    torn = TornLeaves()
    torn.note(["a", "b"], [])
    assert torn.sources(PATHS, SOURCES) == [0, 1]  # for one capture
    assert not caplog.records
    torn.note(["b", "c"], [])
    assert torn.sources(PATHS, SOURCES) == [0, 1, 2]
    (line,) = caplog.records
    assert line.getMessage().startswith("code outside the steps of attached optimizers changes a, b, c while checkpoin")
    assert "the next 100 checkpoints begun from now on capture that before engine.step ends" in line.getMessage()


def test_a_dot_inside_a_key_is_none_in_the_error_that_names_it() -> None:
    torn = TornLeaves()
    error = TornCaptureError("torn", paths=[r"model.0\.weight"])
    torn.note(error.paths, [])
    torn.note(error.paths, [])
    assert torn.sources([r"model.0\.weight", r"model.0\.bias"], [0, 1]) == [0]


def test_a_constant_with_a_dot_inside_its_key_is_eager_after_one_capture() -> None:
    torn = TornLeaves()
    torn.note(["model.0.weight"], [r"model.0\.weight"])
    assert torn.sources([r"model.0\.weight"], [0]) == [0]


def test_what_is_torn_twice_among_eight_is_eager_then(caplog: pytest.LogCaptureFixture) -> None:
    torn = TornLeaves()
    torn.note(["a", "b"], [])
    torn.note((), [])
    assert torn.sources(PATHS, SOURCES) == []
    torn.note(["b", "c", "e"], ["e"])
    assert torn.sources(PATHS, SOURCES) == [1, 2]
    torn.note((), [])
    assert torn.sources(PATHS, SOURCES) == [1]
    assert [record.getMessage()[:60] for record in caplog.records] == [
        "code outside the steps of attached optimizers changes b, e w"
    ]


def test_overlap_is_tried_again_after_a_hundred_captures(caplog: pytest.LogCaptureFixture) -> None:
    """And one that is torn then is enough: that code is known."""
    torn = TornLeaves()
    for _ in range(2):
        torn.note(["a"], [])
    for _ in range(99):
        torn.note((), [])
        assert torn.sources(PATHS, SOURCES) == [0]
    torn.note((), [])
    assert torn.sources(PATHS, SOURCES) == []
    torn.note(["a"], [])
    assert torn.sources(PATHS, SOURCES) == [0]
    assert len(caplog.records) == 2


def test_what_is_torn_now_and_then_stays_lazy() -> None:
    torn = TornLeaves()
    for _ in range(3):
        torn.note(["a"], [])
        for _ in range(8):
            torn.note((), [])
    assert torn.sources(["a"], [0]) == []
