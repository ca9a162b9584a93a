"""What is given away: the sdist, the wheel that is built from it, and the wheel where nothing compiles."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = (
    *("pccheck_async/**/*.py", "pccheck_async/py.typed", "pccheck_async/_ext.pyi"),
    *("pccheck_async/**/*.html", "pccheck_async/**/*.css"),
)
LEAST_SETUPTOOLS = 77
COMPILER = shutil.which((os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0])


def _why_not() -> str | None:
    if not (ROOT / "ext").is_dir():
        return "the sources are not beside the tests"
    try:
        version = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        return "setuptools is not installed"
    old = int(version.split(".")[0]) < LEAST_SETUPTOOLS
    return f"setuptools {version} is older than {LEAST_SETUPTOOLS}" if old else None


REASON = _why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def _build(what: str, source: Path, into: Path, **environment: str) -> Path:
    """Call the build backend itself: a frontend would first make an environment, from the network."""
    script = "import sys; from setuptools import build_meta as b; getattr(b, 'build_' + sys.argv[1])(sys.argv[2])"
    into.mkdir()
    built = subprocess.run(
        [sys.executable, "-c", script, what, into],
        cwd=source,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    [archive] = into.iterdir()
    return archive


def _unpacked_wheel(sdist: Path, folder: Path, **environment: str) -> Path:
    source = shutil.copytree(sdist, folder / "source")  # no objects of another build
    with zipfile.ZipFile(_build("wheel", source, folder / "built", **environment)) as wheel:
        wheel.extractall(folder / "installed")
    return folder / "installed"


def _python(installed: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code that finds the standard library and the wheel, and nothing else: no torch, no checkout."""
    command = [sys.executable, "-S", "-c", code]
    environment = {"PYTHONPATH": os.fspath(installed)}
    return subprocess.run(
        command, cwd=installed.parent, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def _files(folder: Path, *patterns: str) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for pattern in patterns
        for path in folder.glob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist of a clean checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("pccheck_async", "ext", "examples", "tests"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with tarfile.open(_build("sdist", checkout, folder / "built")) as archive:
        archive.extractall(folder, filter="data")
    [unpacked] = folder.glob("pccheck_async-*")
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel that is built from the sdist."""
    if COMPILER is None:
        pytest.skip("no C compiler on PATH")
    return _unpacked_wheel(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_without_compiler(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    empty = folder / "empty"
    empty.mkdir()
    return _unpacked_wheel(sdist, folder, PATH=os.fspath(empty), CC="no-compiler")


@pytest.fixture(scope="module")
def wheel_test() -> str:
    """What proves, where wheels are built, that one has its extension."""
    command = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["test-command"]
    python, option, code = shlex.split(command)
    assert (python, option) == ("python", "-c")
    return code


def test_the_sdist_has_all_that_the_build_needs(sdist: Path) -> None:
    wanted = _files(ROOT, "pyproject.toml", "README.md", "LICENSE", "ext/*.[ch]")
    wanted |= _files(ROOT, *PACKAGE)
    assert len(wanted) > 50
    assert wanted - _files(sdist, "**/*") == set()
    assert _files(sdist, "**/*.so", "**/*.o", "**/*.pyc") == set()


def test_every_source_names_its_licence() -> None:
    for name in sorted(_files(ROOT, "pccheck_async/**/*.py", "pccheck_async/*.pyi", "ext/*.[ch]")):
        first = (ROOT / name).read_text().partition("\n")[0]
        assert first.strip("#/* ") == "SPDX-License-Identifier: Apache-2.0", name


def test_the_wheel_has_the_package_and_the_extension(wheel: Path) -> None:
    [facts] = wheel.glob("pccheck_async-*.dist-info")
    assert {path.name for path in wheel.iterdir()} == {"pccheck_async", facts.name}
    wanted = _files(ROOT, *PACKAGE)
    stable = not sysconfig.get_config_var("Py_GIL_DISABLED")
    wanted.add(f"pccheck_async/_ext{'.abi3.so' if stable else sysconfig.get_config_var('EXT_SUFFIX')}")
    assert _files(wheel, "pccheck_async/**/*") == wanted
    assert "pccheck = pccheck_async.__main__:main" in (facts / "entry_points.txt").read_text()
    assert (facts / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_extension_works_without_any_dependency(wheel: Path, wheel_test: str) -> None:
    ran = _python(wheel, f"{wheel_test}; import sys; assert 'torch' not in sys.modules; print(e.__file__)")
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()).parent == wheel / "pccheck_async"
    assert _python(wheel, "import torch").returncode == 1


def test_without_a_compiler_the_wheel_is_pure_and_its_test_says_so(
    wheel_without_compiler: Path, wheel_test: str
) -> None:
    assert _files(wheel_without_compiler, "**/*.so") == set()
    checksum = wheel_without_compiler / "pccheck_async" / "format" / "checksum.py"  # its room imports dependencies
    ran = _python(wheel_without_compiler, f"import runpy; print(runpy.run_path({str(checksum)!r})['IMPLEMENTATION'])")
    assert ran.stdout.strip() == "zlib", ran.stderr
    ran = _python(wheel_without_compiler, wheel_test)
    assert ran.returncode == 1
    assert "No module named 'pccheck_async._ext'" in ran.stderr
