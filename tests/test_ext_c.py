"""Compiles and runs the tests in C, under sanitizers, and under emulators of other processors where there are any."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CC = shutil.which(os.environ.get("CC", "cc"))

QUEUE = ("queue", "threads", "uring", "ring", "lane", "copy", "crc32")

PROGRAMS = {
    "crc32": ("crc32",),
    "copy": ("copy", "crc32"),
    "transfer": (),  # includes transfer.c, to replace the system calls in it
    "queue": (*QUEUE, "transfer"),
    "threads": QUEUE,  # brings transfers of its own, which end on command
    "uring": (*(name for name in QUEUE if name != "uring"), "transfer"),  # includes uring.c, to look into it
}
FLAGS = ("-std=gnu11", "-g", "-O1", "-pthread", "-Wall", "-Wextra", "-Wconversion", "-Werror")
SANITIZERS = ("address,undefined", "thread")
SKIPPED = 77

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CC is None, reason="no C compiler on PATH"),
    pytest.mark.skipif(not (ROOT / "ext").is_dir(), reason="the sources of the extension are not beside the tests"),
]


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def _build(compiler: str, program: str, into: Path, *flags: str) -> Path:
    binary = into / program
    sources = [ROOT / "tests" / "c" / f"test_{program}.c", *(ROOT / "ext" / f"{name}.c" for name in PROGRAMS[program])]
    includes = (f"-I{ROOT / 'ext'}", f"-I{ROOT / 'tests' / 'c'}")
    built = _run(compiler, *FLAGS, *flags, *includes, *sources, "-o", binary)
    assert built.returncode == 0, built.stderr
    return binary


def _passes(ran: subprocess.CompletedProcess[str]) -> None:
    if ran.returncode == SKIPPED:
        pytest.skip(ran.stdout.strip())
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


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_under_sanitizer(program: str, sanitizer: str, tmp_path: Path, scratch: Path) -> None:
    if reason := _why_no_sanitizer(sanitizer, scratch):
        pytest.skip(reason)
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    _passes(_run(_build(str(CC), program, tmp_path, *flags)))


@pytest.mark.parametrize("program", ["crc32", "copy", "uring"])
@pytest.mark.parametrize("target", ["aarch64", "s390x"])  # other instructions, the other byte order
def test_emulated(program: str, target: str, tmp_path: Path) -> None:
    compiler, emulator = shutil.which(f"{target}-linux-gnu-gcc"), shutil.which(f"qemu-{target}-static")
    if compiler is None or emulator is None:
        pytest.skip(f"no cross compiler or no emulator for {target}")
    _passes(_run(emulator, _build(compiler, program, tmp_path, "-static")))


def test_every_file_but_one_is_plain_c() -> None:
    with_python = [path.name for path in sorted((ROOT / "ext").iterdir()) if "Python.h" in path.read_text()]
    assert with_python == ["module.c"]
