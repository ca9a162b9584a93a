"""The mapped medium on a real DAX mount, in guests that are killed: ``python -m tests.campaign.dax [--kills 100]``.

In a guest (see :mod:`tests.support.guest`; the kernel and a disk with this Python are kept in ``--work``): the tests in
C and the conformance checks of media, on the mount; system calls from ``checkpoint()`` to durable; then lives of an
engine and a shelf, each of which ends with SIGKILL of qemu at a random moment. The next one has to find what was
acknowledged, all or nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.guest import ROOT, Guest, Machine, missing
from tests.support.in_guest import TRACED
from tests.transfer.test_c_tests import FLAGS, PROGRAMS

PATIENCE = 600.0
"""Seconds without a word from a guest, after which it hangs: emulated on a busy machine it takes minutes to import."""
MOST_ACKNOWLEDGED = 60
"""Checkpoints of one life that may be acknowledged before the guest is killed."""


def compile_programs(folder: Path) -> tuple[Path, ...]:
    """Build the tests in C of the mapped layer, without libraries to look for."""
    folder.mkdir(exist_ok=True)
    built = []
    for name in ("guard", "persist"):
        sources = [ROOT / "tests" / "c" / f"test_{name}.c", *(ROOT / "ext" / f"{each}.c" for each in PROGRAMS[name])]
        includes = (f"-I{ROOT / 'ext'}", f"-I{ROOT / 'tests' / 'c'}")
        subprocess.run(["cc", *FLAGS, "-static", *includes, *sources, "-o", folder / name], check=True)
        built.append(folder / name)
    return tuple(built)


def resume(machine: Machine, what: str) -> Guest:
    """Start a guest that mounts the persistent memory and does ``what``."""
    guest = Guest(machine, resumed=True)
    guest.tell(time.time(), os.urandom(32).hex(), what)
    return guest


def hear(guest: Guest) -> list[Any] | None:
    """Return what a guest says; a failure in it is one here."""
    said = guest.hear(PATIENCE)
    if said is not None and said[0] == "failed":
        raise RuntimeError(f"in the guest: {said[1]}")
    return said


def test(machine: Machine) -> int:
    """Run the tests in a guest, print what came of them, and return how many failed."""
    failed = 0
    checks: Counter[bool] = Counter()
    with resume(machine, "test") as guest:
        while (said := hear(guest)) is not None and said[0] != "tested":
            match said:
                case ["kind", kind]:
                    print(f"MAP_SYNC: files of the mount are {kind!r}", flush=True)
                    failed += kind != "persistent"
                case ["program", name, status, lines]:
                    print(
                        f"tests/c/test_{name}.c: {'passed' if not status else f'FAILED ({status})'}", *lines, sep="\n  "
                    )
                    failed += status != 0
                case ["check", name, error]:
                    checks[not error] += 1
                    if error:
                        print(f"{name} FAILED\n{error}")
                case ["milliseconds", whose, values]:
                    print(f"64 KiB durable, {whose}: median {statistics.median(values):.2f} ms, emulated")
                case ["calls", whose, calls]:
                    print(f"system calls of {TRACED} times 64 KiB until durable, {whose}: {sum(calls.values())}")
                    for name, count in sorted(calls.items()):
                        print(f"  {name}: {count} ({count / TRACED:g} each)")
    print(f"conformance: {checks[True]} checks passed, {checks[False]} failed", flush=True)
    return failed + checks[False] + (said is None)


@dataclass
class Lives:
    """Guests that die, on one persistent memory."""

    machine: Machine
    random: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    acknowledged: int = -1
    acknowledgements: int = 0
    kept: int = -1
    transactions: int = 0
    restarts: int = 0
    lost: int = 0
    seconds: float = 1.0  # from resuming until all is examined

    def live(self, *, early: bool) -> None:
        """Resume, kill at a random moment, and take in what was said until then.

        Args:
            early: Kill in the mount, in the journal's recovery, or while the store is examined; else while it saves.
        """
        with resume(self.machine, "live") as guest:
            start = time.monotonic()
            phase = "mount"
            if early:
                time.sleep(self.random.uniform(0, self.seconds))
            else:
                while phase != "saving":
                    phase = self._take(hear(guest), phase)
                self.seconds = time.monotonic() - start
                until = self.acknowledgements + self.random.randrange(MOST_ACKNOWLEDGED)
                while self.acknowledgements < until:
                    self._take(hear(guest), phase)
                time.sleep(self.random.uniform(0, 0.05))
            guest.kill()
            while (said := hear(guest)) is not None:
                phase = self._take(said, phase)
        self.kills[phase] += 1

    def look(self) -> None:
        """Examine what the last one left, and unmount."""
        with resume(self.machine, "look") as guest:
            self._take(hear(guest), "mount")
            self._take(hear(guest), "mount")
            assert hear(guest) == ["unmounted"]

    def _take(self, said: list[Any] | None, phase: str) -> str:
        match said:
            case ["mounted"]:
                return "examining"
            case ["restored", step, number]:
                self.restarts += 1
                if step < self.acknowledged or number < self.kept:
                    self.lost += 1
                    print(f"LOST: step {self.acknowledged} was acknowledged, {step} is there", flush=True)
                    print(f"      transaction {self.kept} was acknowledged, {number} is there", flush=True)
                self.acknowledged, self.kept = step, number  # durable now, and what comes next has to be newer
                return "saving"
            case ["durable", step]:
                assert step > self.acknowledged, f"step {step} acknowledged after {self.acknowledged}"
                self.acknowledged = step
                self.acknowledgements += 1
                return phase
            case ["kept", number]:
                assert number == self.kept + 1, f"transaction {number} acknowledged after {self.kept}"
                self.kept = number
                self.transactions += 1
                return phase
        raise RuntimeError(f"the guest ended by itself, or said {said}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "pccheck-dax")
    args = parser.parse_args()
    if lacking := missing():
        tools = ", ".join(f"{tool} (Debian's package {package})" for tool, package in lacking.items())
        print(f"missing here: {tools}; apt-get install {' '.join(sorted(set(lacking.values())))}", file=sys.stderr)
        return 2
    args.work.mkdir(parents=True, exist_ok=True)
    lock = os.open(args.work, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another campaign runs in {args.work}: choose another --work", file=sys.stderr)
        return 2
    machine = Machine(args.work, compile_programs(args.work / "programs"))
    machine.build()
    with Guest(machine, resumed=False) as guest:
        ready = hear(guest)
        if ready is None:
            return 1
        print(f"a guest is up: PyTorch {ready[1]}, Python {ready[2]}, Linux {ready[3]}", flush=True)
        guest.save()
    failed = test(machine)
    print(f"kills with seed {args.seed}", flush=True)
    lives = Lives(machine, random.Random(args.seed))
    for number in range(args.kills):
        lives.live(early=number % 5 == 4)
    lives.look()
    checked = subprocess.run(["e2fsck", "-fn", machine.memory], check=False, capture_output=True, text=True)
    clean = checked.stdout if checked.returncode else "clean"
    print(f"{lives.kills.total()} guests killed: {dict(lives.kills)}")
    print(f"{lives.restarts} restarts, all that was committed whole in each; {lives.lost} missed an acknowledged step")
    print(f"{lives.acknowledgements} checkpoints acknowledged, step {lives.acknowledged} the newest; e2fsck: {clean}")
    print(f"{lives.transactions} transactions of the shelf acknowledged, {lives.kept} the newest")
    return failed + lives.lost + checked.returncode


if __name__ == "__main__":
    sys.exit(main() and 1)
