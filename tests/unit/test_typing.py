"""A user's program is type-checked strictly, without a word to mypy in it, and does what its types say."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.support import user_program
from tests.unit.test_public_names import NAMES

PROGRAM = Path(user_program.__file__)
ROOT = PROGRAM.parents[2]


def test_it_uses_every_public_name() -> None:
    text = PROGRAM.read_text()
    for module in NAMES:
        prefix = "p" if module == "pccheck_async" else module.rpartition(".")[2]
        for name in importlib.import_module(module).__all__:
            assert re.search(rf"\b{prefix}\.{name}\b", text), f"{prefix}.{name}"
    assert "type: ignore" not in text
    assert text.count("assert_type(") > 30


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    user_program.main(tmp_path)


MISTAKES = {
    "engine.pin(step=10)": 'engine.pin(step="10")',
    "engine.remove(step=0)": "engine.remove(0)",
    "return report.step % 10 == 0": "return report.steps % 10 == 0",
    "assert_type(await pending, p.CheckpointInfo)": "assert_type(await pending, p.Restored)",
    "stores.unpin(path, name=": "stores.unpin(path, names=",
}


@pytest.mark.slow
def test_mypy_accepts_it_strictly_and_finds_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mypy = pytest.importorskip("mypy.api")
    monkeypatch.chdir(ROOT)
    text = PROGRAM.read_text()
    for right, wrong in MISTAKES.items():
        assert right in text
        text = text.replace(right, wrong, 1)
    spoiled = tmp_path / "spoiled.py"
    spoiled.write_text(text)
    # One run for both: most of its time goes to torch.
    options = [
        "--strict",
        "--config-file",
        "pyproject.toml",
        "--no-error-summary",
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    if (ROOT / ".mypy_cache").is_dir():  # of a run before this one; it is minutes of work
        options[-1] = str(ROOT / ".mypy_cache")
    said, trouble, _ = mypy.run([*options, str(PROGRAM), str(spoiled)])
    lines = [line for line in said.splitlines() if "error:" in line]
    assert not [line for line in lines if "spoiled.py" not in line], said + trouble
    numbers = {int(line.split(":")[1]) for line in lines}
    assert len(numbers) == len(MISTAKES), said + trouble
