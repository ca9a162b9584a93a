"""The site: every public name has an entry in the reference, and it is built without a warning."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / ".github/docs"
pytestmark = pytest.mark.skipif(not CONFIGURATION.exists(), reason="no checkout")


def test_every_public_name_has_an_entry() -> None:
    entries: dict[str, set[str]] = {}
    for page in (CONFIGURATION / "reference").glob("*.md"):
        text = page.read_text()
        module = re.findall(r"^\.\. currentmodule:: ([\w.]+)$", text, re.MULTILINE)[0]
        entries.setdefault(module, set()).update(re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE))
    elsewhere = set().union(*(names for module, names in entries.items() if module != "pccheck_async"))
    for module, names in entries.items():
        others = elsewhere if module == "pccheck_async" else set()
        assert names - {*importlib.import_module(module).__all__} == set(), module
        assert {*importlib.import_module(module).__all__} - names - others == set(), module


@pytest.mark.slow
def test_it_is_built_without_a_warning(tmp_path: Path) -> None:
    for needed in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "-c", os.fspath(CONFIGURATION)]
    ran = subprocess.run([*command, os.fspath(ROOT), os.fspath(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "README.html").exists()
    assert (tmp_path / "searchindex.js").exists()
