# SPDX-License-Identifier: Apache-2.0
"""The result of a tuning, and the file that carries its settings to later runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypedDict

import msgspec

from pccheck_async.engine import StorageOptions
from pccheck_async.errors import CorruptStoreError, InvalidTuningError, read_error, write_error
from pccheck_async.medium.folder import Folder, open_regular
from pccheck_async.medium.status_file import copied
from pccheck_async.transfer import available_cores
from pccheck_async.tuning.choice import Point

__all__ = ["TUNING_NAME", "Measurement", "TunedSettings", "Tuning", "check_target", "read_tuning"]

TUNING_NAME = "tuning.json"
"""Name of the file of settings if only its folder is given."""
_OPTIONS: Final = ("writers", "chunk_bytes", "host_memory")
"""The tuned fields of StorageOptions."""


class TunedSettings(TypedDict):
    """Keyword arguments for :class:`pccheck_async.CheckpointEngine`."""

    max_in_flight: int
    storage: StorageOptions
    """Options with ``writers``, ``chunk_bytes`` and ``host_memory``; the others have their defaults."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured times of one point.

    Attributes:
        point: The settings: checkpoints in flight, writers, bytes of a chunk.
        seconds: Seconds until one checkpoint is durable with that many in flight (Tw), for ``Tuning.nbytes``.
        bandwidth: Bytes per second that become durable.
        capture_bandwidth: Bytes per second of a capture while nothing else is in flight.
        repetitions: Number of trials at this point.
    """

    point: Point
    seconds: float
    bandwidth: float
    capture_bandwidth: float
    repetitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The outcome of a tuning.

    Attributes:
        settings: Keyword arguments for ``CheckpointEngine(path, **tuning.settings)``; add further options of the
            storage with ``dataclasses.replace(tuning.settings["storage"], gpu_capture="stream")``.
        reasons: One sentence for each setting, by its name.
        measurements: All measurements, the smallest point first.
        nbytes: Size in bytes of a checkpoint that the settings are for.
        sample_nbytes: Size of the largest sample that was measured; times are scaled from samples to ``nbytes``.
        noise: Relative difference of two measurements that may be due to chance.
        bandwidth: Highest measured bandwidth of the storage, bytes per second.
        stream_cpu: Share of a core that one running write took.
        cores: Cores that this process could use.
        seconds: Seconds that the tuning took.
        checkpoint_seconds: Least seconds between checkpoints that the settings can sustain, Tw(N)/N.
        interval: Fewest steps between checkpoints that the settings can sustain (f*); None without a step time.
        interval_floor: Fewest steps that this storage allows any method (f_min); None without a step time.
    """

    settings: TunedSettings
    reasons: Mapping[str, str]
    measurements: tuple[Measurement, ...]
    nbytes: int
    sample_nbytes: int
    noise: float
    bandwidth: float
    stream_cpu: float
    cores: int
    seconds: float
    checkpoint_seconds: float
    interval: int | None = None
    interval_floor: int | None = None

    @property
    def numbers(self) -> dict[str, int]:
        """The values of the settings, by the same names as in :attr:`reasons`."""
        storage = self.settings["storage"]
        return {"max_in_flight": self.settings["max_in_flight"]} | {name: getattr(storage, name) for name in _OPTIONS}

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the settings for :func:`pccheck_async.stores.read_tuning`, and return the file's path.

        Args:
            path: A folder, such as the store's, for a file ``tuning.json`` in it; or a file that ends in ``.json``.
                Missing folders are created.

        Durability: the file is there as a whole or not at all, and survives power loss once this returns.

        Raises:
            InvalidTuningError: there is a file of that name that no tuning wrote; it is not replaced.
            WriteError: the file could not be written; an older one is unchanged.
        """
        check_target(path)
        settings = _Settings(**self.numbers)
        file = copied(_Stored, self, version=1, settings=settings, reasons=dict(self.reasons))
        target = _file(path)
        try:
            _replace(target, msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n")
        except OSError as error:
            raise write_error(error, target) from error
        return target


def read_tuning(path: str | os.PathLike[str]) -> TunedSettings:
    """Return the settings that :meth:`Tuning.write` wrote, for ``CheckpointEngine(store, **read_tuning(path))``.

    Warns (RuntimeWarning) if they were measured with another number of cores: they work, but should be tuned again.

    Args:
        path: The path that :meth:`Tuning.write` was given.

    Raises:
        FileNotFoundError: there is no such file.
        ReadError: the file cannot be read.
        InvalidTuningError: the file is damaged, or from another version.
    """
    source = _file(path)
    try:
        with open(source.resolve(), "rb", opener=open_regular) as file:  # settings may be mounted as links
            data = file.read()
    except FileNotFoundError:
        raise
    except CorruptStoreError as error:
        raise InvalidTuningError(str(error)) from error
    except OSError as error:
        raise read_error(error, source) from error
    try:
        stored = msgspec.json.decode(data, type=_Stored)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidTuningError(
            f"{source} holds no settings that this version can use ({error}); tune again"
        ) from error
    cores = available_cores()
    if stored.cores != cores:
        warnings.warn(
            f"{source} was measured with {stored.cores} cores and this process may use {cores}; tune again",
            RuntimeWarning,
            stacklevel=2,
        )
    options = {name: getattr(stored.settings, name) for name in _OPTIONS}
    return {"max_in_flight": stored.settings.max_in_flight, "storage": StorageOptions(**options)}


_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_in_flight: _Count
    writers: _Count
    chunk_bytes: _Count
    host_memory: _Count

    def __post_init__(self) -> None:
        if self.host_memory < self.chunk_bytes:
            raise ValueError("host_memory is less than one chunk")


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the file: the settings, the number of cores, and (for people) the main measurements."""

    version: Literal[1]
    settings: _Settings
    cores: _Count
    nbytes: int
    checkpoint_seconds: float
    bandwidth: float
    reasons: dict[str, str]


def _file(path: str | os.PathLike[str]) -> Path:
    given = Path(path)
    return given if given.suffix == ".json" and not given.is_dir() else given / TUNING_NAME


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise InvalidTuningError if ``path``, as for :meth:`Tuning.write`, leads to a file that no tuning wrote."""
    target = _file(path)
    with suppress(OSError, CorruptStoreError), open(target, "rb", opener=open_regular) as file:
        data = file.read()
        try:
            found = msgspec.json.decode(data) if data else {"settings": {}}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        if not isinstance(found, dict) or "settings" not in found:
            raise InvalidTuningError(f"{target} is a file that no tuning wrote: give another one, or move it away")


def _replace(target: Path, data: bytes) -> None:
    folder, beside = Folder(target.parent), target.with_name(f".{target.name}-{os.getpid()}")
    folder.create()
    try:
        with open(beside, "wb", opener=open_regular) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder.sync()
