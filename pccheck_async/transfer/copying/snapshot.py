# SPDX-License-Identifier: Apache-2.0
"""The decision whether a state is first copied within its device (CheckFreq, Algorithm 1), and its inputs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Account", "DeviceMemory", "DeviceMode", "Pace", "SnapshotDecision", "decide", "spare"]

DeviceMode = Literal["auto", "snapshot", "stream"]

_RESERVED_SHARE = 20
"""Fraction of the device's memory, as 1 / n, that a snapshot must leave free."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device in bytes.

    ``reserved`` and ``peak`` (the most memory in use) are those of torch's allocator in this process.
    """

    total: int
    free: int
    reserved: int
    peak: int


class SnapshotDecision(NamedTuple):
    """The decision whether to take a snapshot on the device, and the reason in one sentence."""

    snapshot: bool
    reason: str


class Account:
    """Account of one device's memory: bytes that the backend holds, and the most that training uses. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.RLock()  # garbage collection on this thread may call give_back() meanwhile
        self._training_peak = 0
        self.held = 0
        self.peak = 0

    def take(self, nbytes: int) -> None:
        """Count ``nbytes`` as held by the backend."""
        with self._guard:
            self.held += nbytes
            self.peak = max(self.peak, self.held)

    def give_back(self, nbytes: int) -> None:
        """Count ``nbytes`` as freed by the backend."""
        with self._guard:
            self.held -= nbytes

    def training_peak(self, peak: int) -> int:
        """Return the most bytes that training used, given the ``peak`` of all memory in use.

        The peak includes memory of the backend, at most the backend's own peak, which is subtracted. The result is
        never less than in earlier calls, such as those before the backend held anything.
        """
        with self._guard:
            self._training_peak = max(self._training_peak, peak - self.peak)
            return self._training_peak


class Pace:
    """The last measurement of a copy's seconds per byte."""

    def __init__(self) -> None:
        self._seconds_per_byte: float | None = None

    def note(self, nbytes: int, seconds: float) -> None:
        """Take a measurement; one of zero bytes is ignored."""
        if nbytes > 0:
            self._seconds_per_byte = seconds / nbytes

    def seconds(self, nbytes: int) -> float | None:
        """Return the estimated seconds for ``nbytes``; None if nothing was measured yet."""
        return None if self._seconds_per_byte is None else self._seconds_per_byte * nbytes


def spare(memory: DeviceMemory, *, training_peak: int, held: int) -> int:
    """Return the bytes that are unused when training is at its peak (CheckFreq's Mmax - M)."""
    return memory.free + memory.reserved - training_peak - held


def decide(
    mode: DeviceMode,
    *,
    state_bytes: int,
    spare_bytes: int,
    total_bytes: int,
    device_seconds: float | None,
    host_seconds: float | None,
) -> SnapshotDecision:
    """Decide by CheckFreq's rule: a snapshot if Mmax - M > m and Tog <= Toc.

    Args:
        mode: "auto": by the rule; "snapshot": whenever there is memory; "stream": never.
        state_bytes: Bytes of the state on this device (m).
        spare_bytes: Memory that training does not need (Mmax - M).
        total_bytes: Memory of the device; a part of it stays in reserve.
        device_seconds: Time of the copy on the device (Tg = Tog); None if not measured yet.
        host_seconds: Time of the copy to the host (Tc), all of which is taken as Toc, since training may wait for it.
            None if not measured yet; then no snapshot is taken in mode "auto".
    """
    needed = f"a snapshot takes {_mib(state_bytes)}, and training leaves {_mib(spare_bytes)} of the device's memory"
    if mode == "stream":
        return SnapshotDecision(False, "streamed to the host: asked for")
    if mode == "snapshot":
        if spare_bytes < state_bytes:
            return SnapshotDecision(False, f"streamed to the host: {needed}")
        return SnapshotDecision(True, "snapshot on the device: asked for")
    if host_seconds is None:
        unknown = "the first capture shows how long that takes, and training after it how much memory it needs"
        return SnapshotDecision(False, f"streamed to the host: {unknown}")
    reserve = total_bytes // _RESERVED_SHARE
    if spare_bytes <= state_bytes + reserve:
        return SnapshotDecision(False, f"streamed to the host: {needed}, of which {_mib(reserve)} stay in reserve")
    if device_seconds is None:
        return SnapshotDecision(True, f"snapshot on the device: {needed}")
    times = f"{device_seconds:.4f} s on the device, {host_seconds:.4f} s of waiting for the host"
    if device_seconds > host_seconds:
        return SnapshotDecision(False, f"streamed to the host: a copy takes {times}")
    return SnapshotDecision(True, f"snapshot on the device: a copy takes {times}; {needed}")


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"
