from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from pccheck_async import list_checkpoints, load_sync
from tests.support.readme_blocks import INSTALLING, RUN, SHOWN, blocks_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def fenced(after: str) -> list[str]:
    """The lines of the first fenced block after ``after``."""
    lines = iter(README[README.index(after) :].splitlines())
    next(line for line in lines if line.startswith("```"))
    return list(iter(lambda: next(lines), "```"))


def test_the_quickstart_commands() -> None:
    assert fenced("<!-- quickstart: run -->") == ["pip install . && pccheck demo"]
    assert fenced("<!-- quickstart: test -->") == ['pip install -e ".[test]" && pytest -q -n 2']
    assert len(re.findall("<!-- quickstart: ", README)) == 2


def test_ci_runs_the_test_command_of_the_readme() -> None:
    program = re.search(r"awk '\n(.*?)' README\.md", (ROOT / ".ci" / "run").read_text(), re.DOTALL)
    assert program
    extracted = subprocess.run(
        ["awk", program[1], str(ROOT / "README.md")], capture_output=True, text=True, timeout=600, check=True
    )
    assert extracted.stdout.splitlines() == fenced("<!-- quickstart: test -->")


def test_the_example_comes_first_and_is_short() -> None:
    example = fenced("```python")
    assert len(example) <= 15
    assert README.index("```python") < README.index("<!-- quickstart: run -->") < README.index("\n## ")


@pytest.mark.slow
def test_the_example_runs_and_resumes(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text("\n".join(fenced("```python")))
    steps = []
    for _ in range(2):  # the second run resumes where the first saved last
        done = subprocess.run(
            [sys.executable, "-W", "error", script.name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        steps += [info.step for info in list_checkpoints(tmp_path / "checkpoints")]
    assert len(steps) == 2
    assert 0 < steps[0] <= steps[1] <= 99


@pytest.mark.slow
def test_the_loader_example_runs_and_resumes(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(
        "\n".join(fenced("### Data that resumes")).replace("range(first, 100)", "range(first, first + 50)")
    )
    for last in (49, 99):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", script.name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert [info.step for info in list_checkpoints(tmp_path / "checkpoints-data")] == [last]
    position = load_sync(tmp_path / "checkpoints-data", keys=["loader.*"])["loader"]
    assert (position["epoch"], position["position"]) == (3, 4 * 32)  # 100 batches, of which 32 make an epoch


def test_every_block_says_whether_it_runs() -> None:
    blocks = blocks_of(README)
    assert {block.language for block in blocks} == RUN | SHOWN
    assert {block.mark for block in blocks if "quickstart" in block.mark} == INSTALLING
    assert len(blocks) == README.count("```") // 2 > 15


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_block_runs(tmp_path: Path) -> None:
    """In their order, in one folder: what one block leaves, the next one finds."""
    pytest.importorskip("safetensors")
    pytest.importorskip("sklearn")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, what in (("python", ""), ("pccheck", " -m pccheck_async")):
        (bin_folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{what} "$@"\n')
        (bin_folder / name).chmod(0o755)
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning"]
    done = subprocess.run(
        [*command, "-m", "tests.support.readme_blocks", str(ROOT / "README.md")],
        cwd=work,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    ran = re.findall(r"^-- (\w+), line (\d+)$", done.stdout, re.MULTILINE)
    wanted = [(b.language, str(b.line)) for b in blocks_of(README) if b.language in RUN and b.mark not in INSTALLING]
    assert ran == wanted
    [shown] = [block.text.rstrip() for block in blocks_of(README) if "(in flight)" in block.text]
    assert shown.removesuffix("...") in done.stdout


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_the_quickstart_runs(tmp_path: Path) -> None:
    """In an environment of its own that sees what this one has installed; the tests are CI's to run so."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("pccheck_async", "ext", "examples"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    (Path(packages) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    [block] = [block for block in blocks_of(README) if block.mark == "<!-- quickstart: run -->"]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        | {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "PIP_NO_DEPS": "1"}
        | {"PIP_NO_BUILD_ISOLATION": "0"},  # which means no isolation: setuptools is here, and nothing is fetched
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Every bit is equal." in done.stdout
    assert list(Path(packages).glob("pccheck_async/_ext.*")) or shutil.which("cc") is None


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
