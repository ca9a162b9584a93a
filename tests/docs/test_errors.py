"""The page of errors: it has every public class, and every message on it is one of the package."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import pccheck_async
from pccheck_async import errors
from tests.support.readme_blocks import ROOT

PAGE = (ROOT / "examples" / "guide" / "errors.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", PAGE, re.MULTILINE))
MESSAGES = [
    (section, message)
    for section, text in SECTIONS.items()
    for message in re.findall(r"^- `([^`]+)`$", text, re.MULTILINE)
]


@cache
def _texts() -> str:
    """Every string of the package, with a mark in place of what is put in."""
    texts = []
    for file in Path(pccheck_async.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Constant(value=str(text)):
                    texts.append(text)
                case ast.JoinedStr(values=parts):
                    texts.append("\0".join(str(part.value) if isinstance(part, ast.Constant) else "" for part in parts))
    return "\0".join(texts)


def test_every_error_has_a_section() -> None:
    assert set(SECTIONS) - {"ValueError and warnings"} == set(errors.__all__)


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 40


@pytest.mark.parametrize(("section", "message"), MESSAGES, ids=lambda value: value[:40])
def test_every_message_is_one_of_the_package(section: str, message: str) -> None:
    for part in filter(None, re.split(r"\.\.\.", message)):
        assert part.strip() in _texts(), f"{section}: {part!r}"
