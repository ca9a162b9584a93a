from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pccheck_async import list_checkpoints, load_sync

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def fenced(after: str) -> list[str]:
    """The lines of the first fenced block after ``after``."""
    lines = iter(README[README.index(after) :].splitlines())
    next(line for line in lines if line.startswith("```"))
    return list(iter(lambda: next(lines), "```"))


def test_the_quickstart_commands() -> None:
    assert fenced("<!-- quickstart: run -->\n```") == ["pip install . && pccheck demo"]
    assert fenced("<!-- quickstart: test -->\n```") == ['pip install -e ".[test]" && pytest -q']
    assert len(re.findall("<!-- quickstart: ", README)) == 2


def test_ci_runs_the_test_command_of_the_readme() -> None:
    program = re.search(r"awk '\n(.*?)' README\.md", (ROOT / ".ci" / "run").read_text(), re.DOTALL)
    assert program
    extracted = subprocess.run(
        ["awk", program[1], str(ROOT / "README.md")], capture_output=True, text=True, timeout=10, check=True
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
            timeout=120,
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
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert [info.step for info in list_checkpoints(tmp_path / "checkpoints-data")] == [last]
    position = load_sync(tmp_path / "checkpoints-data", keys=["loader.*"])["loader"]
    assert (position["epoch"], position["position"]) == (3, 4 * 32)  # 100 batches, of which 32 make an epoch


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
