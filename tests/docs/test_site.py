"""The site: every public name has an entry in the reference, and it is built without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pccheck_async

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / ".github/docs"
pytestmark = pytest.mark.skipif(not CONFIGURATION.exists(), reason="no checkout")


def test_every_public_name_has_an_entry() -> None:
    pages = [page.read_text() for page in (CONFIGURATION / "reference").glob("*.md")]
    entries = [name for page in pages for name in re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.MULTILINE)]
    assert sorted(entries) == sorted(pccheck_async.__all__)


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
