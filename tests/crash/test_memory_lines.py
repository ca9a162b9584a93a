"""Histories of restarts on two hosts: memory brings nothing back that its user has left, and loses nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pccheck_async.format import Line
from tests.support.memory_lines import History


def explore(tmp_path: Path, memory: Path, seeds: range, openings: int) -> tuple[list[str], int, int]:
    """Return what went wrong, the openings, and how many of them restored from memory."""
    wrong: list[str] = []
    opened = restored = 0
    for seed in seeds:
        disk, in_memory = tmp_path / str(seed), memory / str(seed)
        disk.mkdir()
        in_memory.mkdir()
        history = History(disk, in_memory, seed)
        history.run(openings)
        for folder in (disk, in_memory):
            shutil.rmtree(folder)
        wrong += [f"seed {seed}: {each}" for each in history.wrong]
        opened += history.openings
        restored += history.from_memory
    return wrong, opened, restored


@pytest.mark.slow
def test_some_histories(tmp_path: Path, shared_memory: Path) -> None:
    wrong, opened, restored = explore(tmp_path, shared_memory, range(3), 10)
    assert wrong == []
    assert opened == 30
    assert restored >= 2


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_ten_thousand_histories(tmp_path: Path, shared_memory: Path, first: int) -> None:
    wrong, opened, restored = explore(tmp_path, shared_memory, range(100 + first, 1100 + first), 4)
    print(f"\n{opened} openings, {restored} restored from memory")
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["any run", pytest.param("own run alone", marks=pytest.mark.campaign)])
def test_a_wrong_rule_is_found(tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    def accepts(self: Line, run: bytes, counter: int) -> bool:
        return rule == "any run" or run == self.run

    monkeypatch.setattr(Line, "accepts", accepts)
    for seed in range(30):
        found, *_ = explore(tmp_path, shared_memory, range(seed, seed + 1), 10)
        if found:
            print(found[0])
            return
    pytest.fail("nothing was found")
