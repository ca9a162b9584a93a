"""What is said about blocking code is said in its own docstrings, and stays what asynchronous code is told."""

from __future__ import annotations

import inspect
import re

import pytest

from pccheck_async import CheckpointEngine, SyncCheckpointEngine, load, load_sync

METHODS = [name for name, each in vars(SyncCheckpointEngine).items() if not name.startswith("_") and callable(each)]
SECTION = re.compile(r"^(Args|Returns|Raises):\n((?:    .*\n|\n)*)", re.MULTILINE)


def sections(thing: object) -> dict[str, list[str]]:
    """The names of arguments and errors in a docstring, and whether it has something to return."""
    text = (inspect.getdoc(thing) or "") + "\n"
    return {name: re.findall(r"^    (\w+): ", body, re.MULTILINE) for name, body in SECTION.findall(text)}


def test_there_are_methods() -> None:
    assert {"open", "close", "step", "checkpoint", "restore", "pin", "remove", "drain", "tune"} <= {*METHODS}


@pytest.mark.parametrize("name", [*METHODS, "load_sync"])
def test_it_speaks_of_blocking_code_by_itself(name: str) -> None:
    thing = load_sync if name == "load_sync" else getattr(SyncCheckpointEngine, name)
    text = inspect.getdoc(thing) or ""
    assert not re.search(
        r"\bawait|\basync\b|coroutine|Cancellation|CheckpointEngine\.|func:`(pccheck_async\.)?load`", text
    )
    assert sections(thing).keys() >= {"Raises"}
    if arguments := [each for each in inspect.signature(thing).parameters if each != "self"]:
        assert sections(thing)["Args"] == arguments


@pytest.mark.parametrize("name", [*METHODS, "load_sync"])
def test_it_names_the_arguments_and_errors_of_the_other_one(name: str) -> None:
    pair = (
        (load_sync, load)
        if name == "load_sync"
        else (getattr(SyncCheckpointEngine, name), getattr(CheckpointEngine, name))
    )
    one, other = map(sections, pair)
    assert one == other
