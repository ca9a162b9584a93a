"""The package on arm64, emulated: ``python -m tests.campaign.arm64 --work FOLDER [--qemu qemu-aarch64]``.

As root on a Debian machine of another processor. In ``--work`` a root of Debian for arm64 is made (debootstrap, its
packages unpacked without their scripts; 1.5 GB, kept for the next run), with the wheels for arm64 of what the tests
import. Each command runs there under qemu, in namespaces of its own: no mount and no registered format outlives it.

It builds the extension, prints which instructions it uses, kills and resumes a training, whose store is compared with
that of an uninterrupted one, there and here, and runs the tests of the rooms below. Emulation is about seven times
slower, matrix products far more, and does not show: timing, whether lines are written back from the caches
(``dc cvap``), weaker ordering of memory, other page sizes, MAP_SYNC. Direct I/O is not seen, either, without
``--direct-io``: qemu's ``statx`` reports its alignment as 0.

qemu has to be 8 or newer and linked statically (Debian trixie's ``qemu-user``): 7.2 announces ``dc cvap`` and does not
have it. torch for arm64 is 2.10.0 by default: PyPI's wheels of later versions are built for CUDA.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SOURCES = Path(__file__).parents[2]
DEBIAN = "http://deb.debian.org/debian"
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,python3-dev,gcc,libc6-dev,ca-certificates"
PYTHON = "3.11"
WHEELS = (
    "numpy", "aiofiles", "msgspec", "uvloop", "typer", "rich", "filelock", "sympy", "networkx", "jinja2", "fsspec",
    "typing-extensions", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "safetensors", "setuptools",
    "psutil", "prometheus-client", "packaging", "xxhash", "torchdata",
)  # fmt: skip
"""Of the package, of torch (whose own requirements are left out), and of the tests."""
MAGIC = "".join(rf"\x{byte:02x}" for byte in b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xb7\x00")
MASK = "".join(rf"\x{byte:02x}" for byte in b"\xff" * 7 + b"\x00" + b"\xff" * 8 + b"\xfe" + b"\xff" * 3)
ENTER = r"""
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
printf '%s' ":qemu-aarch64:M::$MAGIC:$MASK:$QEMU:F" > /proc/sys/fs/binfmt_misc/register || exit 90
mount --rbind "$ROOT" "$ROOT"
mount --rbind /dev "$ROOT/dev"
mount -t proc proc "$ROOT/proc"
mount --rbind /sys "$ROOT/sys"
chroot "$ROOT" /usr/bin/env -i HOME=/root PATH=/usr/local/bin:/usr/bin:/bin OMP_NUM_THREADS=1 LANG=C.UTF-8 \
    PYTHONPATH=/src $PRELOAD "$@"
exit $?  # a shell stays process 1: a test that aborts does not die as one
"""
CLEARS_ALIGNMENT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/stat.h>
int statx(int folder, const char *path, int flags, unsigned mask, struct statx *into) {
    int (*real)(int, const char *, int, unsigned, struct statx *) = dlsym(RTLD_NEXT, "statx");
    int done = real(folder, path, flags, mask, into);
    into->stx_mask &= ~0x2000u;  /* STATX_DIOALIGN: qemu leaves the bit, and zeros */
    return done;
}
"""
ROOMS = {
    # obstore has no newer wheel for arm64 than 0.3.
    "unit": [
        "tests/unit",
        "--ignore-glob=tests/unit/test_bucket*",
        "--deselect=tests/unit/test_typing.py::test_it_runs",
    ],
    "medium": ["tests/store/test_medium.py", "tests/store/test_pages.py"],
    "store": ["tests/store", "-m", "not slow and not campaign"],
    "shelf": ["tests/shelf", "-m", "not slow and not campaign"],
    "crash": ["tests/crash", "-m", "not campaign"],
    "transfer": ["tests/transfer", "-m", "not campaign"],
}
TRAINS = """
import os, signal, sys, torch
from pccheck_async import RNGState, SyncCheckpointEngine
torch.manual_seed(0)
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "rng": RNGState()}
with SyncCheckpointEngine(sys.argv[1], interval=2) as engine:
    engine.attach(optimizer)
    restored = engine.restore(state)
    print("from step", restored.step + 1 if restored else 0)
    for step in range(restored.step + 1 if restored else 0, 30):
        if step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        with engine.step(state, step):
            optimizer.zero_grad()
            model(torch.randn(8, 300)).square().mean().backward()
            optimizer.step()
"""
DIGEST = """
import hashlib, sys
from pccheck_async import load_sync
state = load_sync(sys.argv[1])
whole = hashlib.sha256()
for tensors in (state["model"], *state["optimizer"]["state"].values()):
    for name in sorted(tensors):
        whole.update(name.encode() + tensors[name].numpy().tobytes())
print(whole.hexdigest())
"""
IMPORTS = """
import platform, torch, pccheck_async
from pccheck_async import _ext, errors, policies, statistics, stores
for module in (pccheck_async, errors, policies, statistics, stores):
    for name in module.__all__:
        getattr(module, name)
print(platform.machine(), platform.python_version(), "torch", torch.__version__)
print("checksums by", _ext.CRC_IMPLEMENTATION)
"""


class Arm64:
    """A root for arm64, and commands in it."""

    def __init__(self, work: Path, qemu: str, torch: str) -> None:
        self.root = work / "root"
        self.qemu = qemu
        self._work = work
        self._torch = torch
        self.preload = ""

    def make(self) -> None:
        """Make the root, if it is not there, and put the sources into it."""
        done = self._work / "made"
        if not done.exists():
            shutil.rmtree(self.root, ignore_errors=True)
            options = ["--arch=arm64", "--foreign", "--variant=minbase", f"--include={PACKAGES}"]
            _run("debootstrap", *options, SUITE, str(self.root), DEBIAN)
            for package in sorted((self.root / "var/cache/apt/archives").glob("*.deb")):
                with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as unpacking:
                    tar = ["tar", "-x", "--keep-directory-symlink", "-C", str(self.root)]
                    subprocess.run(tar, stdin=unpacking.stdout, check=True)
            for folder in ("proc", "sys", "dev", "tmp", "src"):  # one is a link or a device so far
                path = self.root / folder
                if path.is_symlink():
                    path.unlink()
                path.mkdir(exist_ok=True)
            for name in ("passwd", "group"):
                shutil.copy(self.root / f"usr/share/base-passwd/{name}.master", self.root / "etc" / name)
            (self.root / "etc/hosts").write_text("127.0.0.1 localhost\n")
            self._install()
            done.touch()
        shutil.rmtree(self.root / "src")
        (self.root / "src").mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=SOURCES, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", self.root / "src"], input=archive, check=True)

    def _install(self) -> None:
        into = self.root / f"usr/local/lib/python{PYTHON}/dist-packages"
        platforms = [f"--platform={each}_aarch64" for each in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(into), "--upgrade"]
        pip += [f"--python-version={PYTHON}", "--only-binary=:all:", *platforms]
        _run(*pip, "--no-deps", f"torch=={self._torch}")
        _run(*pip, *WHEELS[:-1])
        _run(*pip, "--no-deps", WHEELS[-1])

    def run(self, *command: str, timeout: float = 7200) -> subprocess.CompletedProcess[str]:
        """Run a command there, in ``/src``."""
        variables = {
            "ROOT": str(self.root), "QEMU": self.qemu, "MAGIC": MAGIC, "MASK": MASK, "PRELOAD": self.preload,
            "PATH": "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin",
        }  # fmt: skip
        unshare = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
        inside = ["sh", "-c", 'cd /src && exec "$@"', "sh", *command]
        arguments = [*unshare, "bash", "-c", ENTER, "bash", *inside]
        return subprocess.run(
            arguments, env=variables, text=True, check=False, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def clear_alignment(self) -> None:
        """Make direct I/O visible: qemu's ``statx`` claims to know the alignment, and gives 0."""
        (self.root / "src/statx.c").write_text(CLEARS_ALIGNMENT)
        made = self.run("gcc", "-shared", "-fPIC", "-o", "/src/statx.so", "/src/statx.c")
        if made.returncode:
            raise SystemExit(made.stdout)
        self.preload = "LD_PRELOAD=/src/statx.so"


def _run(*command: str) -> None:
    """Run a command that prints much; its last lines are shown if it fails."""
    print(f"{Path(command[0]).name} {' '.join(command[1:4])} ...", flush=True)
    ended = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        raise SystemExit("\n".join(ended.stdout.splitlines()[-20:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the root, which is kept")
    parser.add_argument("--qemu", default=shutil.which("qemu-aarch64"), help="a static qemu-aarch64, 8 or newer")
    parser.add_argument("--torch", default="2.10.0", help="version of its wheel for arm64")
    parser.add_argument("--rooms", nargs="*", choices=ROOMS, default=[*ROOMS], help="whose tests to run")
    parser.add_argument("--direct-io", action="store_true", help="show direct I/O, which qemu hides")
    arguments = parser.parse_args()
    if arguments.qemu is None:
        parser.error("there is no qemu-aarch64: install qemu-user of Debian trixie or newer, or give --qemu")
    version = subprocess.run([arguments.qemu, "--version"], check=True, capture_output=True, text=True).stdout
    if (found := re.search(r"version (\d+)", version)) is None or int(found[1]) < 8:
        parser.error(f"qemu has to be 8 or newer: {version.splitlines()[0]}")
    machine = Arm64(arguments.work.absolute(), str(Path(arguments.qemu).absolute()), arguments.torch)
    machine.make()
    failed = []

    def report(name: str, *command: str, lines: int = 1, status: int = 0) -> str:
        start = time.monotonic()
        ended = machine.run(*command)
        wrong = ended.returncode != status
        if wrong:
            failed.append(name)
        shown = "\n  ".join(ended.stdout.strip().splitlines()[-(40 if wrong else lines) :])
        outcome = f"FAILED ({ended.returncode})" if wrong else "passed"
        print(f"{name}: {outcome} in {time.monotonic() - start:.0f} s\n  {shown}", flush=True)
        return ended.stdout

    report("extension", "python3", "-c", "import setuptools; setuptools.setup()", "-q", "build_ext", "--inplace")
    if arguments.direct_io:
        machine.clear_alignment()
    report("import", "python3", "-c", IMPORTS, lines=3)
    report("uninterrupted", "python3", "-c", TRAINS, "/src/whole", "-1")
    report("killed", "python3", "-c", TRAINS, "/src/store", "17", status=128 + signal.SIGKILL)
    report("resumed", "python3", "-c", TRAINS, "/src/store", "-1")
    digests = [report("digest", "python3", "-c", DIGEST, f"/src/{name}").split()[-1:] for name in ("whole", "store")]
    for name in ("whole", "store"):
        digest = [sys.executable, "-c", DIGEST, str(machine.root / "src" / name)]
        digests.append(subprocess.run(digest, check=True, capture_output=True, text=True).stdout.split())
    same = all(each == digests[0] for each in digests)
    print(f"uninterrupted and resumed, read there and on this machine: {'equal in every bit' if same else 'DIFFER'}")
    for room in arguments.rooms:
        pytest = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--timeout=1200"]
        report(room, *pytest, *ROOMS[room], lines=3)
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed or not same else 0


if __name__ == "__main__":
    sys.exit(main())
