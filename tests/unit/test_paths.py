from __future__ import annotations

import copy
import pickle
from collections.abc import Hashable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pccheck_async import StateMismatchError, SyncCheckpointEngine, TornCaptureError, open_checkpoint
from pccheck_async.errors import UnsupportedStateError
from pccheck_async.state import paths
from tests.support import state_strategies


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("plain", "plain"),
        ("a.b", r"a\.b"),
        ("\\", r"\\"),
        ("'0'", r"\'0'"),
        ("", "''"),
        ("''", r"\''"),
        ("*", "*"),
        ("it's", "it's"),
    ],
)
def test_string_keys(key: str, written: str) -> None:
    assert paths.escape(key) == written
    assert paths.components([key, 1]) == [written, "1"]


@pytest.mark.parametrize(
    ("keys", "written"),
    [
        ([0, 1], ["0", "1"]),
        ([0, "0"], ["0", "'0'"]),
        (["0", "1"], ["0", "1"]),
        ([None, "None", True, "x"], ["None", "'None'", "True", "x"]),
        ([1.5, "1.5"], [r"1\.5", r"'1\.5'"]),
        ([(1, "a"), b"x", frozenset([2, 1])], ["(1, 'a')", "b'x'", "{1, 2}"]),
        ([1 << 40000], [hex(1 << 40000)]),
        ([torch.float32, np.int64(3), -1], [r"torch\.float32", r"np\.int64(3)", "-1"]),
        (["'0'", 0, "0"], [r"\'0'", "0", "'0'"]),
    ],
)
def test_components(keys: list[Hashable], written: list[str]) -> None:
    assert paths.components(keys) == written


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(state_strategies.keys(), unique=True, max_size=6))
def test_no_two_keys_of_a_mapping_are_written_alike(keys: list[Hashable]) -> None:
    assert len(set(paths.components(keys))) == len(keys)


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("model.weight", "model.weight", True),
        ("model", "model.weight", False),
        ("model.*", "model.a.b", True),
        ("*.weight", "model.a.weight", True),
        ("model.layers.0.weight", r"model.layers\.0\.weight", False),  # that would be model -> layers -> 0 -> weight
        ("model.layers.*", r"model.layers\.0\.weight", False),
        (r"model.layers\.0\.weight", r"model.layers\.0\.weight", True),
        ("*.exp_avg", "optimizer.state.0.exp_avg_sq", False),
        ("*.exp_avg?sq", "optimizer.state.0.exp_avg_sq", True),
        ("a[0]", "a[0]", True),
        ("a[01]", "a1", True),
    ],
)
def test_matcher(pattern: str, path: str, found: bool) -> None:
    assert paths.matcher(pattern)(path) is found


def test_child_and_plain() -> None:
    assert paths.child("", "a") == "a"
    assert paths.child("a", "b") == "a.b"
    assert paths.plain(r"a\.b\\c.d") == r"a.b\c.d"


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedStateError(r"model.0\.weight: a tensor"),
        StateMismatchError(missing=[r"a\.b", r"c\.d"]),
        StateMismatchError(str(StateMismatchError(missing=[r"a.b\.c"])) + "; more"),
        TornCaptureError(r"model.0\.weight changed"),
    ],
)
def test_errors_say_once_what_an_escape_is(error: Exception) -> None:
    for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(each).count(r"in a path, \. is a dot inside a key") == 1
        assert str(each) == str(error)


def test_errors_without_escapes_explain_none() -> None:
    assert str(UnsupportedStateError("a.b: a tensor")) == "a.b: a tensor"
    assert "dot inside" not in str(StateMismatchError(missing=["a.b"]))


def test_what_is_not_there_is_explained_too(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"a.b": 1})
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(KeyError, match="is a dot inside a key"):
        checkpoint["a.c"]
