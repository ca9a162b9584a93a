"""Docstrings say what a function does or when it is called, subject first, in words that are read once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pccheck_async

PACKAGE = Path(pccheck_async.__file__).parent
EXCEPTIONS: dict[str, str] = {}
"""Docstrings that may begin so, as ``file.py::name``, each with the reason."""
HABITS = {
    "hearsay: write what the function does, or when it is called": re.compile(
        r"(Hear|Tell|Note|Say|Let|Learn|Know|Ask)s?\b|(Heard|Told|Noted|Said|Asked|Known)\b(?! [a-z]+s\b)"
    ),
    "a reference in place of a description: say it, or inherit the docstring": re.compile(
        r"Do(es)? (the same|what|as|so|it|this|that)\b|The same (as|for|of)\b|Same as\b|As [`:\w.~]+ does\b"
        r"|(See|Look) (whether|if|what)\b"
    ),
    "a pronoun or a genitive in place of a noun: name the thing": re.compile(
        r"(Of|That|Those|It|Its|They|Their|Them|These|As(?! many| much))\b"
    ),
    "a clause in place of a noun: name the thing": re.compile(r"(What|Whatever|Who|Whoever|Whom|Whomever)\b"),
}


def _docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield names and docstrings of a module, its classes and functions, and those below assignments."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "name", "the module"), text
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for target, below in zip(node.body, node.body[1:], strict=False):
                match target, below:
                    case (
                        ast.Assign(targets=[name]) | ast.AnnAssign(target=name),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        yield ast.unparse(name), text


def _faults(source: str, file: str) -> list[str]:
    return [
        f"{file}::{name}: {text.splitlines()[0]!r} ({habit})"
        for name, text in _docstrings(ast.parse(source))
        for habit, pattern in HABITS.items()
        if pattern.match(text) and f"{file}::{name}" not in EXCEPTIONS
    ]


def _files(room: Path) -> list[Path]:
    return sorted(room.rglob("*.py")) if room.is_dir() else [room]


ROOMS = sorted(
    each for each in PACKAGE.iterdir() if each.suffix == ".py" or (each.is_dir() and (each / "__init__.py").is_file())
)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_no_docstring_begins_with_hearsay_a_reference_or_a_clause(room: Path) -> None:
    faults = [
        fault
        for file in _files(room)
        for fault in _faults(file.read_text("utf-8"), file.relative_to(PACKAGE).as_posix())
    ]
    assert not faults, f"{len(faults)} docstrings:\n" + "\n".join(faults)


def test_every_exception_is_needed() -> None:
    for place in EXCEPTIONS:
        file, name = place.split("::")
        texts = [text for each, text in _docstrings(ast.parse((PACKAGE / file).read_text("utf-8"))) if each == name]
        assert any(pattern.match(text) for text in texts for pattern in HABITS.values()), place


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("Hear that a checkpoint ended.", True),
        ("Told of an error.", True),
        ("Lets the file grow.", True),
        ("Do the same for a folder.", True),
        ("As `save` does.", True),
        ("See whether it is there.", True),
        ("What came of it.", True),
        ("Whoever has it last.", True),
        ("Of a checksum in a table.", True),
        ("Those of all ranks.", True),
        ("Its identity.", True),
        ("Called for each durable checkpoint.", False),
        ("Letters of a name.", False),
        ("Known names: all others are refused.", False),
        ("As many bytes as one slot.", False),
        ("Whole pages.", False),
    ],
)
def test_habits_are_known_by_the_first_words(text: str, refused: bool) -> None:
    sources = [f'def f():\n    """{text}"""', f'class C:\n    x: int\n    """{text}"""', f'X = 1\n"""{text}"""']
    assert [bool(_faults(source, "a.py")) for source in sources] == [refused] * 3
