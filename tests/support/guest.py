"""A guest with a real DAX mount: qemu without KVM, Debian's kernel, and persistent memory that outlives a killed guest.

The guest has two memories. One is private and dies with it, the kernel's caches included. The other is a shared mapping
of a file of the host: the kernel takes it as persistent memory (``memmap=``), and ext4 on it, mounted with
``-o dax=always``, accepts MAP_SYNC. This Python and torch come along on a read-only disk.

Emulated, importing torch takes half a minute. So a guest is saved once, when all is imported and nothing of the
persistent memory was seen yet (its driver is not even loaded), and every life resumes from there in about a second.

What this cannot show: an emulated processor has no cache of its own, so what nobody wrote back survives a killed guest,
too. Lost lines are what ``pccheck_async.testing.CrashMapping`` enumerates.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import cache_from_source
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["MARK", "TOOLS", "Guest", "Machine", "missing"]

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "mkfs.ext4": "e2fsprogs",
    "strace": "strace",
    "cc": "gcc",
    "dpkg": "dpkg",
    "apt-get": "apt",
}
"""What is needed, and the package of Debian that has it."""
MARK = "@ "
"""What a line of the guest's program begins with; the kernel prints on the same console."""

_MEMORY_MIB, _PERSISTENT_MIB = 1024, 128
_DISKS = ("virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "virtio_blk")
_EXT4 = ("crc32c_generic", "jbd2", "mbcache", "crc16", "ext4")
_PERSISTENT = ("libnvdimm", "nfit", "nd_btt", "nd_pmem", "nd_e820")
"""Modules of the kernel, each after those that it needs; the last ones make /dev/pmem0 appear."""
_LEFT_OUT = re.compile(r"/(test|tests|include)/|\.(a|lib|pyi)$")
_INIT = """#!/bin/busybox sh
/bin/busybox --install /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in {first}; do insmod /modules/$module.ko; done
mount -o ro /dev/vda /disk
for each in proc sys dev; do mount --move /$each /disk/$each; done
mount -t tmpfs tmp /disk/tmp
mount --bind / /disk/guest
stty -F /disk/dev/ttyS0 raw -echo
chroot /disk /guest/bin/env PATH=/guest/bin:{path} PYTHONPATH={modules} PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 \\
    {python} -u -m tests.support.in_guest {later} </disk/dev/ttyS0 >/disk/dev/ttyS0 2>&1
poweroff -f
"""


def missing() -> dict[str, str]:
    """Return what of :data:`TOOLS` this machine lacks."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    return {tool: package for tool, package in TOOLS.items() if not shutil.which(tool)}


def _call(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))[:200]}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def _download_kernel(folder: Path) -> None:
    """Unpack Debian's kernel and its modules; nothing is installed."""
    found = re.search(r"Depends: (linux-image-\S+)", _call("apt-cache", "depends", "linux-image-amd64"))
    if found is None:
        raise RuntimeError("apt knows no linux-image-amd64: this needs Debian on amd64, and apt-get update")
    download = folder.with_name("download")
    shutil.rmtree(download, ignore_errors=True)
    download.mkdir(parents=True)
    _call("apt-get", "download", "-qq", found[1], cwd=download)
    [package] = download.glob("*.deb")
    _call("dpkg", "-x", package, download / "kernel")
    (download / "kernel").rename(folder)
    shutil.rmtree(download)


def _collect(name: str, found: dict[str, metadata.Distribution]) -> None:
    """Add a distribution, and those that it requires here."""
    if name.lower() not in found:
        found[name.lower()] = distribution = metadata.distribution(name)
        for required in distribution.requires or ():
            if "extra ==" not in required and (word := re.match(r"[\w.-]+", required)):
                try:
                    _collect(word[0], found)
                except metadata.PackageNotFoundError:  # for another system or version
                    continue


def _files_of_python(distributions: Iterable[metadata.Distribution]) -> set[Path]:
    """Return the interpreter, its library, what is installed of ``distributions``, and the libraries that they need."""
    programs = {Path(sys.executable).resolve(), Path(shutil.which("strace") or "strace")}
    files = set(programs)
    for kind in ("stdlib", "platstdlib"):
        for folder, below, names in os.walk(sysconfig.get_path(kind)):
            below[:] = [each for each in below if each not in ("site-packages", "dist-packages", "test")]
            files |= {Path(folder) / name for name in names if not name.endswith(".a")}
    for distribution in distributions:
        for file in distribution.files or ():
            path = Path(os.fspath(file.locate()))
            if not _LEFT_OUT.search(os.fspath(file)) and ".." not in file.parts and path.is_file():
                files.add(path)
                if path.suffix == ".py" and (compiled := Path(cache_from_source(os.fspath(path)))).is_file():
                    files.add(compiled)
    for path in [path for path in files if path in programs or ".so" in path.name]:
        said = subprocess.run(["ldd", path], check=False, capture_output=True, text=True).stdout
        files |= {Path(each) for each in re.findall(r"(/\S+) \(0x", said)}
    return files


def _build_disk(image: Path, files: set[Path]) -> None:
    """Make a disk that has some files at the paths that they have here."""
    stage = image.with_suffix(".stage")
    shutil.rmtree(stage, ignore_errors=True)
    for name in ("proc", "sys", "dev", "tmp", "mnt", "guest"):
        (stage / name).mkdir(parents=True)
    for path in files:
        to = stage / path.relative_to("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)  # with its time, which compiled modules are compared with
    mib = (sum(path.stat().st_size + 4096 for path in files) * 115 // 100 >> 20) + 32
    new = image.with_suffix(".new")
    new.unlink(missing_ok=True)
    _call("mkfs.ext4", "-q", "-d", stage, "-O", "^has_journal", "-m", "0", new, f"{mib}M")
    shutil.rmtree(stage)
    new.rename(image)


@dataclass(frozen=True)
class Machine:
    """The files that guests are made of: a kernel and a disk, which are kept, and what is made anew by :meth:`build`.

    Attributes:
        work: Where they are.
        programs: Executables that the guest has in ``/guest/programs``.
    """

    work: Path
    programs: tuple[Path, ...] = ()

    @property
    def memory(self) -> Path:
        """The contents of the persistent memory, which are those of the filesystem."""
        return self.work / "persistent.img"

    @property
    def saved(self) -> Path:
        """A guest that imported everything."""
        return self.work / "saved"

    def build(self) -> None:
        """Make what is missing; the persistent memory is empty then. Raises RuntimeError, OSError."""
        kernel = self.work / "kernel"
        if not kernel.is_dir():
            _download_kernel(kernel)
        distributions: dict[str, metadata.Distribution] = {}
        for required in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
            _collect(re.split(r"[^\w.-]", required)[0], distributions)
        versions = [sys.executable, sys.version, *sorted(f"{name} {d.version}" for name, d in distributions.items())]
        disk = self.work / f"python-{hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:12]}.img"
        if not disk.is_file():
            _build_disk(disk, _files_of_python(distributions.values()))
        (self.work / "disk.img").unlink(missing_ok=True)
        (self.work / "disk.img").symlink_to(disk.name)
        self._build_initial_disk(kernel, sorted({str(d.locate_file("")) for d in distributions.values()}))
        self.memory.unlink(missing_ok=True)
        with self.memory.open("wb") as file:
            file.truncate(_PERSISTENT_MIB << 20)
        _call("mkfs.ext4", "-q", "-b", "4096", self.memory)
        self.saved.unlink(missing_ok=True)

    def _build_initial_disk(self, kernel: Path, modules: list[str]) -> None:
        root = self.work / "initial"
        shutil.rmtree(root, ignore_errors=True)
        for name in ("bin", "modules", "programs", "proc", "sys", "dev", "disk"):
            (root / name).mkdir(parents=True)
        shutil.copy(shutil.which("busybox") or "busybox", root / "bin" / "busybox")
        for name in (*_DISKS, *_EXT4, *_PERSISTENT):
            shutil.copy(next((kernel / "lib" / "modules").rglob(f"{name}.ko")), root / "modules")
        for program in self.programs:
            shutil.copy(program, root / "programs")
        for package in ("pccheck_async", "tests"):
            shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("fixtures", "__pycache__"))
        script = _INIT.format(
            first=" ".join(_DISKS + _EXT4),
            later=" ".join(f"/guest/modules/{name}.ko" for name in _PERSISTENT),
            modules=":".join(["/guest", *modules]),
            path=Path(shutil.which("strace") or "strace").parent,
            python=Path(sys.executable).resolve(),
        )
        (root / "init").write_text(script)
        (root / "init").chmod(0o755)
        names = "\n".join(os.fspath(path.relative_to(root)) for path in sorted(root.rglob("*")))
        with (self.work / "initial.cpio").open("wb") as archive:
            packed = ["cpio", "-o", "-H", "newc", "--quiet"]
            subprocess.run(packed, input=names.encode(), stdout=archive, cwd=root, check=True)
        shutil.rmtree(root)

    def command(self, *, resumed: bool) -> list[str]:
        """Return how qemu is started, but for its consoles."""
        shared = f"file,share=on,mem-path={self.memory}"
        # The firmware's tables and the initial disk lie at the top of the memory.
        memories = [("ram", _MEMORY_MIB), (shared, _PERSISTENT_MIB), ("ram", 64)]
        command = ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-smp", "1", "-machine", "pc", "-no-reboot"]
        command += ["-display", "none", "-nodefaults", "-m", f"{sum(mib for _, mib in memories)}M"]
        for node, (kind, mib) in enumerate(memories):
            command += ["-object", f"memory-backend-{kind},id=memory{node},size={mib}M"]
            command += ["-numa", f"node,memdev=memory{node}" + ("" if node else ",cpus=0")]
        command += ["-drive", f"if=none,id=disk,format=raw,readonly=on,file={self.work / 'disk.img'}"]
        command += ["-device", "virtio-blk-pci,drive=disk"]
        if resumed:
            return [*command, "-incoming", "defer"]
        [image] = (self.work / "kernel" / "boot").glob("vmlinuz-*")
        arguments = f"console=ttyS0 quiet panic=1 memmap={_PERSISTENT_MIB}M!{_MEMORY_MIB}M"
        return [*command, "-kernel", str(image), "-initrd", str(self.work / "initial.cpio"), "-append", arguments]


class Guest:
    """A running guest; leaving it kills it.

    Args:
        machine: What it is made of.
        resumed: Go on from :attr:`Machine.saved`, with the persistent memory as it is by now; or boot.
    """

    def __init__(self, machine: Machine, *, resumed: bool) -> None:
        self._machine = machine
        ours, theirs = socket.socketpair()
        command = machine.command(resumed=resumed)
        command += ["-chardev", "stdio,id=serial,signal=off", "-serial", "chardev:serial"]
        command += ["-chardev", f"socket,id=control,fd={theirs.fileno()}", "-mon", "chardev=control,mode=control"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], **pipes)  # type: ignore[call-overload]
        self._control = ours.makefile("rw")
        ours.close()
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self._control.readline()  # a greeting
            self._ask("qmp_capabilities")
            # What is shared is the persistent memory: it is neither saved nor restored.
            self._ask("migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": True}])
            if resumed:
                self._ask("migrate-incoming", uri=f"exec:cat '{machine.saved}'")
                while self._ask("query-status")["status"] != "running":  # it hears nothing before
                    time.sleep(0.01)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.kill()

    def _ask(self, command: str, **arguments: Any) -> Any:
        self._control.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self._control.flush()
        while line := self._control.readline():
            said = json.loads(line)
            if "error" in said:
                raise RuntimeError(f"{command}: {said['error']['desc']}")
            if "return" in said:  # else an event
                return said["return"]
        raise RuntimeError(f"qemu is gone: {list(iter(self._lines.get, None))}")

    def _listen(self) -> None:
        for line in self._process.stdout:
            if line.endswith(b"\n"):  # else the guest was killed while it said that
                self._lines.put(line.decode(errors="replace").rstrip())
        self._lines.put(None)

    def tell(self, *words: object) -> None:
        """Send one line to the guest's program."""
        self._process.stdin.write((json.dumps(words) + "\n").encode())
        self._process.stdin.flush()

    def hear(self, timeout: float) -> list[Any] | None:
        """Return what the guest's program says next, None when it is gone and all was heard.

        Raises:
            TimeoutError: It said nothing for ``timeout`` seconds; with what the kernel said meanwhile.
        """
        others: list[str] = []
        while True:
            try:
                line = self._lines.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"the guest said nothing for {timeout} s, but {others}") from None
            if line is None:
                if others:
                    print(*others, sep="\n", file=sys.stderr)
                return None
            if line.startswith(MARK):
                said: list[Any] = json.loads(line[len(MARK) :])
                return said
            others.append(line)

    def save(self) -> None:
        """Save it without its persistent memory, to resume from; it does not run any more then."""
        self._ask("migrate", uri=f"exec:cat > '{self._machine.saved}'")
        while (status := self._ask("query-migrate"))["status"] not in ("completed", "failed"):
            time.sleep(0.1)
        if status["status"] == "failed":
            raise RuntimeError(f"the guest cannot be saved: {status}")

    def kill(self) -> None:
        """End it, now."""
        self._process.kill()
        self._process.wait()
