"""What a release does to a checkout: links of the README that work elsewhere, and the project's addresses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pccheck_async import __version__

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci/release.py"
HOME = "https://forge.example/owner/name"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if not SCRIPT.exists():
        pytest.skip("no checkout")
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("examples", "LICENSE", ".github", "pccheck_async"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def _release(checkout: Path, tag: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "GITHUB_SERVER_URL": "https://forge.example",
        "GITHUB_REPOSITORY": "owner/name",
        "GITHUB_REF_NAME": tag,
    }
    command = [sys.executable, os.fspath(SCRIPT), os.fspath(checkout)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_links_of_the_readme_lead_to_the_tag(checkout: Path) -> None:
    before = (checkout / "README.md").read_text()
    ran = _release(checkout, f"v{__version__}")
    assert ran.returncode == 0, ran.stderr
    after = (checkout / "README.md").read_text()
    links = re.findall(r"\]\(([^()\s]+)\)", before)
    assert len(links) > 20
    rewritten = re.findall(r"\]\(([^()\s]+)\)", after)
    assert len(rewritten) == len(links)
    for old, new in zip(links, rewritten, strict=True):
        if re.match("[a-z]+:", old):
            assert new == old
            continue
        kind = "raw" if old.endswith(".png") else "blob"
        assert new == f"{HOME}/{kind}/v{__version__}/{old}"
    assert re.sub(r"\]\(([^()\s]+)\)", "]()", after) == re.sub(r"\]\(([^()\s]+)\)", "]()", before)


def test_the_project_has_its_addresses_and_is_otherwise_the_same(checkout: Path) -> None:
    before = tomllib.loads((checkout / "pyproject.toml").read_text())
    assert _release(checkout, f"v{__version__}").returncode == 0
    after = tomllib.loads((checkout / "pyproject.toml").read_text())
    urls = after["project"].pop("urls")
    assert urls["Source"] == HOME
    assert all(address.startswith(HOME) for address in urls.values())
    assert after == before


@pytest.mark.parametrize("case", ["another tag", "a dead link"])
def test_what_is_wrong_ends_it_and_nothing_is_written(checkout: Path, case: str) -> None:
    if case == "a dead link":
        with (checkout / "README.md").open("a") as file:
            file.write("[gone](examples/gone.md)\n")
    before = [(checkout / name).read_bytes() for name in ("README.md", "pyproject.toml")]
    ran = _release(checkout, "v9.9.9" if case == "another tag" else f"v{__version__}")
    assert ran.returncode == 1
    assert ("the tag is v9.9.9" if case == "another tag" else "examples/gone.md") in ran.stderr
    assert [(checkout / name).read_bytes() for name in ("README.md", "pyproject.toml")] == before


def test_no_host_of_a_forge_is_written_in_the_repository() -> None:
    pages = [ROOT / "README.md", ROOT / "pyproject.toml", *(ROOT / "examples/guide").glob("*.md")]
    for page in pages:
        assert not re.search(r"https?://(github|gitlab|pypi)\.", page.read_text()), page
