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
        ("model.layers.0.weight", r"model.layers\.0\.weight", True),
        ("model.layers.*", r"model.layers\.0\.weight", True),
        ("model.layers.0", r"model.layers\.0\.weight", False),
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
    ("escaped", "shown"),
    [
        ([r"model.0\.weight", r"model.0\.bias"], ["model.0.weight", "model.0.bias"]),
        (["a.b", r"a\.b", r"c\.d"], ["a.b", r"a\.b", "c.d"]),
        ([r"a\.b.c", r"a.b\.c"], [r"a\.b.c", r"a.b\.c"]),
        ([r"a\\.b", r"a\.b"], [r"a\\.b", "a.b"]),  # without its escapes the first one would be the second one's path
        ([r"a\\b", r"\'0'", "0"], [r"a\b", "'0'", "0"]),
        ([r"a\.b", r"a\.b"], ["a.b", "a.b"]),
        ([], []),
    ],
)
def test_what_users_see(escaped: list[str], shown: list[str]) -> None:
    assert paths.readable(escaped) == shown


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab.\\'", min_size=1), unique=True, max_size=6))
def test_no_two_paths_are_shown_alike_and_none_like_another_path(escaped: list[str]) -> None:
    shown = paths.readable(escaped)
    assert len({*shown}) == len(escaped)
    for path, name in zip(escaped, shown, strict=True):
        assert name == path or name not in escaped


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UnsupportedStateError(r"model.0\.weight: a tensor"), "model.0.weight: a tensor"),
        (StateMismatchError(missing=[r"a\.b", r"c\.d"]), "(2): a.b, c.d"),
        (StateMismatchError(mismatched=[r"a\.b (dtype)"]), "(1): a.b (dtype)"),
        (StateMismatchError(str(StateMismatchError(missing=[r"a.b\.c"])) + "; more"), "(1): a.b.c; more"),
        (TornCaptureError(r"model.0\.weight changed", paths=[r"model.0\.weight"]), "model.0.weight changed"),
    ],
)
def test_errors_name_leaves_without_escapes(error: Exception, text: str) -> None:
    for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert text in str(each)
        assert str(each) == str(error)
        assert "\\" not in str(each)


def test_errors_say_what_an_escape_is_where_two_names_are_alike() -> None:
    error = StateMismatchError(missing=["a.b"], unexpected=[r"a\.b"], mismatched=[r"a\.c (dtype)"])
    assert (error.missing, error.unexpected, error.mismatched) == (("a.b",), (r"a\.b",), ("a.c (dtype)",))
    for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert r"(1): a.b; unexpected in the checkpoint (1): a\.b; different in the checkpoint (1): a.c" in str(each)
        assert str(each).endswith(r" (in a path, \. is a dot inside a key)")


def test_what_is_not_there_is_named_so_too(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint({"a.b": 1})
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(KeyError, match=r"'a\.c' is not in .* there are: a\.b"):
        checkpoint["a.c"]
