"""Compiles and runs the tests in C, under sanitizers, and under emulators of other processors where there are any."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CC = shutil.which(os.environ.get("CC", "cc"))

PROGRAMS = {
    "crc32": ("crc32",),
    "copy": ("copy", "crc32"),
    "dlpack_forms": ("dlpack_forms",),
    "transfer": (),  # includes transfer.c, to replace the system calls in it
    "persist": ("persist",),
    "guard": ("guard",),
    "queue": ("queue", "threads", "guard", "copy", "crc32"),  # brings transfers of its own, which end on command
}
FLAGS = ("-std=gnu11", "-g", "-O1", "-pthread", "-Wall", "-Wextra", "-Wconversion", "-Werror")
THREADED = ("guard", "queue")
"""Programs with more than one thread: in the others there is nothing that could race."""
PAGES = {"aarch64": (4096, 16384, 65536), "s390x": (4096,)}
"""Page sizes that Linux may have been built with; s390x is here for its byte order."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CC is None, reason="no C compiler on PATH"),
    pytest.mark.skipif(not (ROOT / "ext").is_dir(), reason="the sources of the extension are not beside the tests"),
]


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    # gcc 14 stores what it aligned to 64 bytes into frames that its address sanitizer did not align so.
    environment = os.environ | {"ASAN_OPTIONS": "detect_stack_use_after_return=0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


@functools.cache
def _compile(compiler: str, source: Path, scratch: Path, *flags: str) -> Path:
    compiled = Path(tempfile.mkdtemp(dir=scratch)) / f"{source.stem}.o"
    includes = (f"-I{ROOT / 'ext'}", f"-I{ROOT / 'tests' / 'c'}")
    built = _run(compiler, *FLAGS, *flags, *includes, "-c", source, "-o", compiled)
    assert built.returncode == 0, built.stderr
    return compiled


@functools.cache
def _build(compiler: str, program: str, scratch: Path, *flags: str) -> Path:
    binary = Path(tempfile.mkdtemp(dir=scratch)) / program
    sources = [ROOT / "tests" / "c" / f"test_{program}.c", *(ROOT / "ext" / f"{name}.c" for name in PROGRAMS[program])]
    built = _run(
        compiler, *FLAGS, *flags, *(_compile(compiler, each, scratch, *flags) for each in sources), "-o", binary
    )
    assert built.returncode == 0, built.stderr
    return binary


def _passes(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode == 0, ran.stdout + ran.stderr


@functools.cache
def _why_no_sanitizer(sanitizer: str, folder: Path) -> str | None:
    source, binary = folder / "empty.c", folder / "empty"
    source.write_text("int main(void) { return 0; }\n")
    built = _run(str(CC), f"-fsanitize={sanitizer}", source, "-o", binary)
    if built.returncode:
        return f"the compiler has no -fsanitize={sanitizer}: {built.stderr.strip()[:200]}"
    ran = _run(binary)
    return f"-fsanitize={sanitizer} does not run here: {ran.stderr.strip()[:200]}" if ran.returncode else None


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sanitizers")


@pytest.mark.parametrize(
    ("program", "sanitizer"),
    [
        *((program, "address,undefined") for program in PROGRAMS),
        *((program, "thread") for program in THREADED),
        *(pytest.param(each, "thread", marks=pytest.mark.campaign) for each in PROGRAMS if each not in THREADED),
    ],
)
def test_under_sanitizer(program: str, sanitizer: str, scratch: Path) -> None:
    if reason := _why_no_sanitizer(sanitizer, scratch):
        pytest.skip(reason)
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    _passes(_run(_build(str(CC), program, scratch, *flags)))


def _cross_compiler(target: str) -> str:
    compiler = shutil.which(f"{target}-linux-gnu-gcc")
    if compiler is None:
        pytest.skip(f"no cross compiler for {target}")
    return compiler


@functools.cache
def _why_no_pages(compiler: str, emulator: tuple[str, ...], page_bytes: int, folder: Path) -> str | None:
    """Ask a program: newer emulators only warn that they keep the host's page size."""
    source, binary = folder / "page.c", folder / f"page-{Path(compiler).name}"
    source.write_text("#include <unistd.h>\nint main(void) { return (int)(sysconf(_SC_PAGESIZE) >> 10); }\n")
    built = _run(compiler, "-static", source, "-o", binary)
    assert built.returncode == 0, built.stderr
    kib = _run(*emulator, binary).returncode
    return None if kib == page_bytes >> 10 else f"{emulator[0]} emulates pages of {kib} KiB, not {page_bytes >> 10}"


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("target", "page_bytes"), [(target, page) for target in PAGES for page in PAGES[target]])
def test_emulated(program: str, target: str, page_bytes: int, scratch: Path) -> None:
    compiler = _cross_compiler(target)
    found = shutil.which(f"qemu-{target}-static") or shutil.which(f"qemu-{target}")
    if found is None:
        pytest.skip(f"no emulator for {target}")
    emulator = (found, "-p", str(page_bytes))
    if reason := _why_no_pages(compiler, emulator, page_bytes, scratch):
        pytest.skip(reason)
    _passes(_run(*emulator, _build(compiler, program, scratch, "-static")))


@pytest.mark.parametrize("target", [None, *PAGES])
def test_compiles_without_a_warning_as_it_is_built(target: str | None, tmp_path: Path) -> None:
    """With Python's own headers of this machine: they are the same for every 64-bit Linux, but for a few sizes."""
    compiler = str(CC) if target is None else _cross_compiler(target)
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").is_file():
        pytest.skip(f"no Python.h in {include}")
    [extension] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    for source in extension["sources"]:
        flags = (*extension["extra-compile-args"], "-Werror", "-fPIC", "-c", "-isystem", include)
        built = _run(compiler, *flags, f"-I{ROOT / 'ext'}", ROOT / source, "-o", tmp_path / "object")
        assert built.returncode == 0, built.stderr


def test_what_does_not_bind_to_python_is_plain_c() -> None:
    """Python's headers come in through one file; this follows it through those that include it."""
    files = {path.name: path.read_text() for path in (ROOT / "ext").iterdir()}
    assert [name for name, text in files.items() if "Python.h" in text] == ["binding.h"]
    known = {"binding.h"}
    while more := {name for name, text in files.items() if any(f'#include "{one}"' in text for one in known)} - known:
        known |= more
    assert known == {"binding.h", "module.c", "outline.c", "queue_object.c", "request.c", "tensors.c"}
