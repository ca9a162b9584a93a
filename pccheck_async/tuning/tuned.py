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
"""Name of the file where only its folder is given."""
_OPTIONS: Final = ("writers", "chunk_bytes", "host_memory")
"""Of the storage."""


class TunedSettings(TypedDict):
    """Keyword arguments for :class:`pccheck_async.CheckpointEngine`."""

    max_in_flight: int
    storage: StorageOptions
    """With ``writers``, ``chunk_bytes`` and ``host_memory``."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured times of one point.

    Attributes:
        point: Checkpoints in flight, writers, bytes of a chunk.
        seconds: Time of one checkpoint to become durable with that many in flight (Tw), for ``Tuning.nbytes``.
        bandwidth: Bytes per second that become durable.
        capture_bandwidth: Bytes per second of a capture while nothing else is in flight.
        repetitions: How often it was measured.
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
        settings: For ``CheckpointEngine(path, **tuning.settings)``; further options of the storage are added by
            ``dataclasses.replace(tuning.settings["storage"], gpu_capture="stream")``.
        reasons: One sentence for each setting.
        measurements: All that was measured, the least point first.
        nbytes: Size of a checkpoint that the settings are for.
        sample_nbytes: Size of the checkpoints that were measured; times are scaled from it to ``nbytes``.
        noise: Relative difference of two measurements that means nothing.
        bandwidth: Of the storage, bytes per second: the most that was seen.
        stream_cpu: Share of a core that one running write took.
        cores: Cores that this process could use.
        seconds: Time the tuning took.
        checkpoint_seconds: Time between checkpoints that the settings can sustain, Tw(N)/N.
        interval: With a step time: the fewest steps between checkpoints that the settings sustain (f*), else None.
        interval_floor: With a step time: the fewest that any scheme sustains on this storage (f_min), else None.
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
        """The settings by the names that :attr:`reasons` has."""
        storage = self.settings["storage"]
        return {"max_in_flight": self.settings["max_in_flight"]} | {name: getattr(storage, name) for name in _OPTIONS}

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the settings for :func:`pccheck_async.stores.read_tuning`, and return the file's path.

        Args:
            path: A folder, such as the store's, for a file ``tuning.json`` in it; or a file that ends in ``.json``.
                Folders that are missing are made.

        Durability: the file is there as a whole or not at all, and survives power loss once this returns.

        Raises:
            InvalidTuningError: there is another file of that name, which is not replaced.
            WriteError: it could not be written; a file that was there is untouched.
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

    Warns (RuntimeWarning) if they were measured with another number of cores: they work, but tune again.

    Args:
        path: The path that :meth:`Tuning.write` was given.

    Raises:
        FileNotFoundError: there is none.
        ReadError: it cannot be read.
        InvalidTuningError: it is damaged, or from another version.
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
    """The file: the settings, the machine they are for, and, for people, the measurements behind them."""

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
