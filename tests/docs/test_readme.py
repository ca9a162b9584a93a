"""The README and the guide: every block runs, every link, module, test and command that they name exists."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from pccheck_async.cli import app
from tests.support.readme_blocks import INSTALLING, PAGES, ROOT, RUN, SHOWN, blocks_of, is_run
from tests.support.warm import run_warm

README = (ROOT / "README.md").read_text()
OTHERS = [ROOT / ".github" / "CONTRIBUTING.md", ROOT / "examples" / "paper" / "README.md"]
ALL = {page.relative_to(ROOT).as_posix(): page.read_text() for page in [*PAGES, *OTHERS]}
MOST_LINES = 170


def fenced(after: str) -> list[str]:
    """The lines of the first fenced block after ``after``."""
    lines = iter(README[README.index(after) :].splitlines())
    next(line for line in lines if line.startswith("```"))
    return list(iter(lambda: next(lines), "```"))


def test_the_quickstart_commands() -> None:
    assert fenced("<!-- quickstart: run -->") == ["pip install . && pccheck demo"]
    assert fenced("<!-- quickstart: test -->") == ['pip install -e ".[test]" && pytest -q -n 3']
    assert len(re.findall("<!-- quickstart: ", README)) == 2


def test_ci_runs_the_test_command_of_the_readme() -> None:
    program = re.search(r"awk '\n(.*?)' README\.md", (ROOT / ".ci" / "run").read_text(), re.DOTALL)
    assert program
    extracted = subprocess.run(
        ["awk", program[1], str(ROOT / "README.md")], capture_output=True, text=True, timeout=600, check=True
    )
    assert extracted.stdout.splitlines() == fenced("<!-- quickstart: test -->")


@pytest.mark.slow
def test_the_settings_of_the_tests_allow_a_report_for_machines(tmp_path: Path) -> None:
    """Campaigns record figures, and a warning is an error: one about the kind of report would fail them."""
    (tmp_path / "test_it.py").write_text("def test_it(record_property): record_property('seen', 12)\n")
    settings = ["-c", f"{ROOT}/pyproject.toml", f"--rootdir={tmp_path}"]
    report = tmp_path / "report.xml"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, f"--junitxml={report}", f"{tmp_path}"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert '<property name="seen" value="12"' in report.read_text()


def test_the_readme_is_short_and_begins_with_a_short_change_and_the_commands() -> None:
    assert len(README.splitlines()) <= MOST_LINES
    assert sum(line.startswith("+") for line in fenced("<!-- diff -->")) <= 15
    places = [
        README.index(what) for what in ("<!-- quickstart: run -->", "```diff", "<!-- quickstart: test -->", "\n## ")
    ]
    assert places == sorted(places)


def test_every_block_says_whether_it_runs() -> None:
    for page, text in ALL.items():
        blocks = blocks_of(text)
        assert {block.language for block in blocks} <= RUN | SHOWN, page
        assert len(blocks) == text.count("```") // 2, page
    assert {block.mark for block in blocks_of(README) if "quickstart" in block.mark} == INSTALLING


def test_no_line_of_code_is_cut_on_a_page() -> None:
    long = [
        f"{page}: {line}"
        for page, text in ALL.items()
        if page == "README.md" or page.startswith("examples/guide")
        for block in blocks_of(text)
        for line in block.text.splitlines()
        if len(line) > 88
    ]
    assert long == []


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path) -> None:
    """In their order, each page in a folder of its own: what one block leaves, the next one finds."""
    pytest.importorskip("safetensors")
    done = run_warm(
        *("-m", "tests.support.readme_blocks", *PAGES),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        bucket=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    wanted = [
        f"-- {page.name}, {block.language}, line {block.line}"
        for page in PAGES
        for block in blocks_of(page.read_text())
        if is_run(block)
    ]
    assert [line for line in done.stdout.splitlines() if line.startswith("-- ")] == wanted
    outputs = [block for text in ALL.values() for block in blocks_of(text) if block.mark == "<!-- output -->"]
    assert len(outputs) == 1
    assert outputs[0].text.rstrip().removesuffix("...") in done.stdout


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
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(fenced("<!-- quickstart: run -->"))],
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


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    shown = {page: re.sub("<!-- .*? -->", "", text) for page, text in ALL.items()}
    links = [(page, link) for page, text in shown.items() for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert len(links) > 40
    for page, link in links:
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page}: {link}"


def test_the_index_has_every_page() -> None:
    pages = {page.name for page in PAGES} - {"README.md", "index.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", ALL["examples/guide/index.md"])) == pages
    assert set(re.findall(r"\]\(examples/guide/(\w+\.md)", README)) <= pages | {"index.md"}


def exists(dotted: str) -> bool:
    """Whether there is such a module, or an attribute of one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            value: object = importlib.import_module(name) if find_spec(name) is not None else None
        except ModuleNotFoundError as error:
            if error.name is not None and not error.name.startswith("pccheck_async"):
                return True  # a framework that is not installed
            continue
        except ImportError as error:  # of an adapter, whose framework need not be here
            return "is not installed" in str(error)
        if value is not None:
            for part in parts[length:]:
                value = getattr(value, part, None)
            return value is not None
    return False


def test_what_the_pages_name_exists() -> None:
    names, files, tests = 0, 0, 0
    for page, text in ALL.items():
        if page.endswith("changes.md"):  # its tables have the names from before
            text = re.sub(r"^\| [^|]*\|", "", text, flags=re.MULTILINE)  # noqa: PLW2901
        for name in re.findall(r"\bpccheck_async(?:\.[A-Za-z_]+)+", text):
            names += 1
            assert exists(name), f"{page}: {name}"
        for file in re.findall(r"(?<![\w/])tests/[a-z_/]+(?:\.py)?", text):
            files += 1
            assert (ROOT / file).exists(), f"{page}: {file}"
        for module in re.findall(r"python -m (tests[\w.]+)", text):
            assert find_spec(module), f"{page}: {module}"
    source = (ROOT / "tests" / "crash" / "test_crash_regressions.py").read_text()
    for test in re.findall(r"`(test_\w+)`", ALL[".github/CONTRIBUTING.md"]):
        tests += 1
        assert f"def {test}(" in source, test
    assert min(names, files, tests) > 10


def test_the_pages_name_every_command() -> None:
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    table = ALL["examples/guide/operating.md"]
    named = set(re.findall(r"pccheck (\w+)", "".join(ALL.values())))
    assert commands <= named | set(re.findall(r"`(pin|unpin)`", table))
    assert named <= commands
