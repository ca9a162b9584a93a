# SPDX-License-Identifier: Apache-2.0
"""Settings of an engine, and the values of "auto" on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from numbers import Real
from typing import Any, Literal

from pccheck_async.bucket import Compression, Location, check_compression, is_location, shown
from pccheck_async.engine.policy import Policy
from pccheck_async.format import align, check_count, explained
from pccheck_async.format.record import MOST_ENTRIES
from pccheck_async.medium.open_medium import IO, MediumName, check_io
from pccheck_async.store import Keep, KeepAll, Retention, can_hash
from pccheck_async.transfer.copying import DeviceMode

__all__ = ["Auto", "Decisions", "Drain", "EngineConfig", "MemoryTier", "StorageOptions", "check_flag", "decide"]

Auto = Literal["auto"]

_CHUNK_BYTES = {
    False: (16 << 20, "16 MiB: measured to saturate a local disk with four writers, with half the wake-ups of 8 MiB"),
    True: (32 << 20, "32 MiB, as there is a GPU: PCIe 5 moves 16 MiB in a third of a millisecond; half as many copies"),
}
"""Bytes of a chunk if memory is not scarce, and why, by whether there is a GPU."""
_WRITERS = 4
_COPIERS = 4
"""Most threads that copy. Measured on two cores, a second one shortens the capture by a fifth to a quarter; the
checkpoint becomes durable a few percent later."""
_BUFFERS = 8
"""Chunks that scarce staging memory is divided into: with fewer, copies and writes would wait for each other."""


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How an engine moves bytes to its storage, and with which resources; no option changes a checkpoint's contents.

    Args:
        medium: How the slots are accessed. "files": by reads and writes; "mapped": files mapped into memory, of
            persistent memory if the filesystem has it (DAX), emulated on tmpfs, else of the page cache; "auto": mapped
            on persistent memory, else files. Each reads and continues the stores of the others.
        io: I/O backend: "threads" (of the C extension), "python", or "auto"; or a medium, such as those of
            :mod:`pccheck_async.testing`.
        writers: Writes running at a time (PCcheck's p).
        chunk_bytes: Unit of copying and writing, in bytes.
        host_memory: Most staging memory, in bytes. A state that fits is captured at memory speed; a larger one is
            captured at the speed of the storage.
        gpu_capture: How tensors on CUDA devices are captured. "auto": first copied on their device if it has memory to
            spare and that is faster than waiting for the host (CheckFreq's rule). "snapshot": whenever the device has
            the memory. "stream": never.
        check_captures: Compare each capture that runs beside training with a copy made before it. For debugging: it
            costs the time and the memory of that copy.
        skip_unchanged: Whether bytes that a slot still holds from an older checkpoint, as those of frozen layers, are
            not written again. "auto": if xxhash is installed, and until 3 checkpoints in a row had none. True: always.
            No effect on states of one chunk, with a mapped medium, and on checkpoints written from the memory tier.
        lock_timeout: Seconds to wait for another writer of the same store that is dying.
        exit_timeout: Seconds that an engine left open may take to finish when the interpreter exits.

    Raises:
        ValueError: an option is out of range.
        ImportError: ``skip_unchanged=True``, and xxhash is not installed.
    """

    medium: MediumName = "auto"
    io: IO = "auto"
    writers: int | Auto = "auto"
    chunk_bytes: int | Auto = "auto"
    host_memory: int | Auto = "auto"
    gpu_capture: DeviceMode = "auto"
    check_captures: bool = False
    skip_unchanged: bool | Auto = "auto"
    lock_timeout: float = 5.0
    exit_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.medium not in ("auto", "files", "mapped"):
            raise ValueError(f"medium is 'auto', 'files' or 'mapped', not {self.medium!r}")
        check_io(self.io)
        for name in ("writers", "chunk_bytes", "host_memory"):
            if getattr(self, name) != "auto":
                check_count(name, getattr(self, name))
        if self.gpu_capture not in ("auto", "snapshot", "stream"):
            raise ValueError(f"gpu_capture is 'auto', 'snapshot' or 'stream', not {self.gpu_capture!r}")
        check_flag("check_captures", self.check_captures)
        if self.skip_unchanged != "auto":
            check_flag("skip_unchanged", self.skip_unchanged)
        if self.skip_unchanged is True and not can_hash():
            raise ImportError('skip_unchanged=True needs xxhash: pip install "pccheck-async[unchanged]"', name="xxhash")
        _check_seconds("lock_timeout", self.lock_timeout)
        _check_seconds("exit_timeout", self.exit_timeout)


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTier:
    """Keep the newest checkpoints in memory, too (tmpfs): they survive the process, not the machine.

    A checkpoint is captured right into memory, and the disk is written from there. So ``engine.step`` can save far more
    often than the disk could keep up with. A restart on this machine goes on from the newest checkpoint in memory, if
    the store on disk descends from its run. A checkpoint in memory costs one copy of the state, made by cores that
    training may need. Memory is taken for ``keep_last + max_in_flight + 1`` states, on each rank of a group for one
    more. Leaving the engine's context makes the newest checkpoint durable on disk.

    Args:
        interval: When ``engine.step`` saves in memory; takes the values of the engine's ``interval``. None: as often as
            3 % of the training time allow, in addition to the time for saves on disk.
        keep_last: Number of checkpoints that are kept in memory.
        path: A tmpfs. "auto": ``/dev/shm``.
        keep_after_close: Whether the checkpoints stay in memory when the engine is closed, for processes that read
            them there.
        replicas: For groups: number of other hosts that have a copy of each rank's newest checkpoint in memory. So many
            hosts can be lost. The copies take memory for two more states on each rank, and for two states of each rank
            whose copies it holds. If there are fewer hosts, each of them has a copy, and the log says so.
        interface: The network interface for these copies, by its name ("eth0") or address. None: that of the route to
            rank 0.
        rate_limit: Most bytes per second that a rank sends, to all holders of its copies together.

    Raises:
        ValueError: an option is out of range.
    """

    interval: int | timedelta | Policy | None = None
    keep_last: int = 1
    path: str = "auto"
    keep_after_close: bool = False
    replicas: int = 0
    interface: str | None = None
    rate_limit: int | None = None

    def __post_init__(self) -> None:
        check_count("keep_last", self.keep_last)
        if self.replicas != 0:
            check_count("replicas", self.replicas)
        if self.rate_limit is not None:
            check_count("rate_limit", self.rate_limit)
        if self.interface is not None and (not isinstance(self.interface, str) or not self.interface):
            raise ValueError(f"interface is the name or the address of a network interface, not {self.interface!r}")
        if not isinstance(self.path, str) or not self.path:
            raise ValueError(f'path is "auto" or the folder of a tmpfs, not {self.path!r}')
        check_flag("keep_after_close", self.keep_after_close)


@explained
@dataclass(frozen=True, slots=True, repr=False)
class Drain:
    """Copy committed checkpoints to object storage, in the background (the extra ``bucket``).

    No checkpoint and no training step waits for a copy. The newest checkpoint is copied, then the one that is the
    newest by then, and so on; those in between are not copied. After a crash an interrupted upload is continued. The
    engine owns all objects under the URL: opening another engine with the same URL ends the drain of the earlier one.
    An engine on an empty folder restores from the bucket. In a group each rank uploads its parts, and rank 0 commits
    them; every rank gives the same settings. Leaving the engine's context copies the newest checkpoint.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///folder``, or a store of obstore's. Credentials are
            the environment's, the machine's, or in ``options``.
        every: The least time from the beginning of one copy to that of the next. None: they follow each other at once.
        keep_last: Number of the newest copied checkpoints that are kept in the bucket.
        options: Options of obstore for the provider and the HTTP client, by name: ``{"region": "eu-west-1"}``.
        rate_limit: Most bytes per second that are sent, by each rank of a group.
        deadline: Most seconds for each request, retries included; after that the copy is continued later. Four objects
            of 16 MiB have to be sent in that time, so a network of less than 1 MiB per second needs more.
        compression: "zstd": objects are compressed, block by block; floating-point weights to 0.67 (bf16) or 0.84
            (fp32) of their bytes. "auto": only while a checkpoint is in the bucket sooner for it. None: they are not.
            Versions before 1.1 cannot read compressed objects.
        closing: Most seconds that closing the engine waits until the newest checkpoint is copied; the log names the
            checkpoints that are not.

    Raises:
        ValueError: an option is out of range, or ``url`` names no object storage.
    """

    url: Location
    _: KW_ONLY
    every: timedelta | None = None
    keep_last: int = 1
    options: Mapping[str, Any] | None = None
    rate_limit: int | None = None
    deadline: float = 60.0
    closing: float = 300.0
    compression: Compression = None

    def __post_init__(self) -> None:
        if not is_location(self.url):
            raise ValueError(f"url is that of a bucket, such as s3://bucket/run, or a store of obstore's: {self.url!r}")
        check_count("keep_last", self.keep_last)
        if self.keep_last > MOST_ENTRIES - 1:
            raise ValueError(f"keep_last is at most {MOST_ENTRIES - 1}")
        if self.rate_limit is not None:
            check_count("rate_limit", self.rate_limit)
        if self.every is not None and (not isinstance(self.every, timedelta) or self.every < timedelta(0)):
            raise ValueError(f"every is a timedelta, such as timedelta(minutes=10), or None, not {self.every!r}")
        if self.options is not None and not isinstance(self.options, Mapping):
            raise ValueError(f"options is a mapping from names, not {type(self.options).__name__}")
        check_compression(self.compression)
        _check_seconds("deadline", self.deadline)
        _check_seconds("closing", self.closing)

    def __repr__(self) -> str:
        return f"Drain({shown(self.url)!r}, every={self.every!r}, keep_last={self.keep_last})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The user's settings, validated (see :class:`pccheck_async.CheckpointEngine` for the meanings)."""

    max_in_flight: int = 2
    keep_last: int | Literal["all"] = 1
    keep: Keep = field(default_factory=Keep)
    max_stall: float | None = None
    allow_pickle: bool = False
    overwrite: bool = False
    on_busy: Literal["wait", "skip"] = "wait"
    on_error: Literal["raise", "warn"] = "raise"
    storage: StorageOptions = field(default_factory=StorageOptions)
    memory: MemoryTier | None = None
    drain: Drain | None = None

    def __post_init__(self) -> None:
        check_count("max_in_flight", self.max_in_flight)
        keep: object = self.keep
        if keep == "all" or (isinstance(self.keep, int) and not isinstance(self.keep, bool)):
            raise TypeError(f"keep is a Keep; to keep the newest {self.keep}, write keep_last={self.keep!r}")
        _check_kind("keep", self.keep, Keep, "Keep(every=1000)")
        _check_kind("storage", self.storage, StorageOptions, "StorageOptions(writers=8)")
        if self.memory is not None:
            _check_kind("memory", self.memory, MemoryTier, "MemoryTier()")
        if self.drain is not None:
            _check_kind("drain", self.drain, Drain, 'Drain("s3://bucket/run")')
        _ = self.retention
        if self.on_busy not in ("wait", "skip"):
            raise ValueError(f"on_busy is 'wait' or 'skip', not {self.on_busy!r}")
        if self.on_error not in ("raise", "warn"):
            raise ValueError(f"on_error is 'raise' or 'warn', not {self.on_error!r}")
        if self.max_stall is not None:
            _check_seconds("max_stall", self.max_stall, " or None")
        check_flag("allow_pickle", self.allow_pickle)
        check_flag("overwrite", self.overwrite)

    @property
    def retention(self) -> Retention:
        """The rules of retention. Raises ValueError: ``keep`` is given with ``keep_last="all"``."""
        if self.keep_last != "all":
            return Retention(keep_last=self.keep_last, keep=self.keep)
        if self.keep != Keep():
            raise ValueError("keep_last='all' keeps every checkpoint: give no keep=Keep(...)")
        return KeepAll()


@dataclass(frozen=True, slots=True)
class Decisions:
    """The numbers that an engine runs with, and the reason for each.

    Attributes:
        chunk_bytes: Unit of copying and writing.
        host_memory: Most staging memory in bytes.
        writers: Threads that write (PCcheck's p).
        copiers: Threads that copy and checksum.
        reasons: One sentence for each number.
    """

    chunk_bytes: int
    host_memory: int
    writers: int
    copiers: int
    reasons: dict[str, str] = field(default_factory=dict)


def decide(options: StorageOptions, *, block_bytes: int, cores: int, memory: int, cuda: bool = False) -> Decisions:
    """Return the numbers that an engine runs with: those of ``options``, and one for every "auto".

    ``block_bytes``: block size of the store; chunks are whole blocks. ``cores``: CPU cores that this process may use.
    ``memory``: bytes that it can still take. ``cuda``: whether there is a CUDA device.

    Raises ValueError: ``host_memory`` holds no chunk.
    """
    reasons: dict[str, str] = {}
    if options.host_memory == "auto":
        host_memory = memory // 4
        reasons["host_memory"] = f"a quarter of the {memory} bytes that this process can still take"
    else:
        host_memory = options.host_memory
        reasons["host_memory"] = "given"
    if options.chunk_bytes == "auto":
        most, reason = _CHUNK_BYTES[cuda]
        chunk_bytes = max(block_bytes, min(most, host_memory // _BUFFERS) // block_bytes * block_bytes)
        if chunk_bytes != most:
            reason = f"host_memory of {host_memory} bytes holds {_BUFFERS} of them"
        reasons["chunk_bytes"] = reason
    else:
        chunk_bytes = align(options.chunk_bytes, block_bytes)
        reasons["chunk_bytes"] = "given" if chunk_bytes == options.chunk_bytes else f"given, in blocks of {block_bytes}"
    if host_memory < chunk_bytes:
        if options.host_memory != "auto":
            raise ValueError(f"host_memory of {host_memory} bytes is less than one chunk of {chunk_bytes} bytes")
        host_memory = chunk_bytes
        reasons["host_memory"] += "; that is less than a chunk, so one chunk"
    if options.writers == "auto":
        writers = _WRITERS
        reasons["writers"] = f"{_WRITERS}: they wait for the device, not for a core"
    else:
        writers = options.writers
        reasons["writers"] = "given"
    copiers = min(_COPIERS, cores)
    reasons["copiers"] = f"{copiers}, of {cores} cores: training waits for copies, writes wait for the device"
    return Decisions(chunk_bytes, host_memory, writers, copiers, reasons)


def check_flag(name: str, value: object) -> None:
    """Raise ValueError if a setting is not a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is True or False, not {value!r}")


def _check_kind(name: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {kind.__name__}, such as {name}={example}, not {value!r}")


def _check_seconds(name: str, value: object, other: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise ValueError(f"{name} is a number of seconds from 0 on{other}, not {value!r}")
