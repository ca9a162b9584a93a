# SPDX-License-Identifier: Apache-2.0
"""Reads results of ``torch.save``, a file or a part of one, without running code from them.

torch's restricted unpickler does not support numpy. Arrays, scalars and dtypes of numpy are made by this module's own
code, because numpy's functions would trust the pickle.
"""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import torch

from pccheck_async.convert.model_files import refuse_other_things
from pccheck_async.convert.selection import SAVED, Saved
from pccheck_async.errors import CheckpointError, CorruptStoreError, UnsupportedStateError
from pccheck_async.format import dtypes
from pccheck_async.state import paths

__all__ = ["NotReadableError", "Reading", "Section", "read_file", "read_value"]

_PIECE_BYTES: Final = 1 << 20
_PROTOCOL: Final = 2
"""Pickle protocol that torch.save writes by default, and that the restricted unpickler reads."""


@dataclass(slots=True)
class Reading:
    """The options of an import, and its results in addition to the state.

    Attributes:
        skips: Whether values that cannot be read without running code are left out; else they are refused.
        missing: Parts that were left out, or that a resumed run will lack, each with the reason.
        unchecked: Reasons why some data could not be compared with checksums.
        saved: The facts about the checkpoint, if the file was exported by this package.
    """

    skips: bool = False
    missing: list[str] = field(default_factory=list)
    unchecked: set[str] = field(default_factory=set)
    saved: Saved | None = None


class NotReadableError(Exception):
    """A pickle that cannot be read without running code; the text names the code."""


class Section(io.RawIOBase):
    """A part of an open file, as a read-only file."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._at = file, start, nbytes, 0

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer; return their number."""
        view = memoryview(buffer)[: max(0, self._nbytes - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return int(count)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Change the position in the section; return it."""
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def tell(self) -> int:
        """Return the position in the section."""
        return self._at

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True


def read_value(data: Section, reading: Reading) -> Any:
    """Return the value that ``torch.save`` wrote into a section, after comparing all bytes with their checksums.

    Raises NotReadableError if code would have to run; CorruptStoreError if the bytes are damaged or incomplete.
    """
    if data.read(2) != b"PK":  # older formats: in a tar archive, code could run up to torch 2.5 (CVE-2025-32434)
        raise CorruptStoreError("it does not begin as torch.save begins")
    data.seek(0)
    with _damage_named(""):
        _check_archive(data, reading)
        data.seek(0)
        return _load(data, mapped=False)


def read_file(file: Path, reading: Reading) -> Any:
    """Return the contents of a file of ``torch.save``; tensors are mapped, not read, unless they are compressed.

    All bytes are compared with their checksums first, if there are any.

    Raises:
        UnsupportedStateError: some values cannot be read without running code, or it is a file of another kind; names
            them, or the kind.
        CorruptStoreError: the file is incomplete or damaged.
    """
    refuse_other_things(file)
    with file.open("rb") as opened:
        head = opened.read(4)
    unreadable: list[str] = []
    try:
        with _damage_named(f"{file} is no whole file of torch.save: "):
            if mapped := head == b"PK\3\4":
                archive = _check_archive(file, reading)
                reading.saved = archive.saved
                _refuse_other_archives(file, archive)
                mapped, head = not archive.compressed, archive.head
            elif tarfile.is_tarfile(file):
                raise UnsupportedStateError(  # up to torch 2.5 such a file could run code (CVE-2025-32434)
                    f"{file} is a tar archive, as very old versions of torch saved; reading one may run code in it"
                )
            else:
                reading.unchecked.add("a file from before torch 1.6 has none")
            if reading.skips:
                unreadable = _unknown_names(file)
            with file.open("rb") as opened:
                # By another name: torch gives any file called *.safetensors to that package.
                held = _load(f"/proc/self/fd/{opened.fileno()}", mapped=mapped, unreadable=unreadable)
    except NotReadableError as error:
        if head.startswith(b"\x80") and head[1] != _PROTOCOL:
            raise UnsupportedStateError(
                f"{file} was saved with pickle_protocol={head[1]}, and torch reads without running code in it only "
                f"protocol {_PROTOCOL}: where you trust it, save torch.load(FILE, weights_only=False) anew"
            ) from error
        what = ", ".join(_unknown_names(file)) or error
        raise UnsupportedStateError(
            f"{file} cannot be read without running code in it: {what}; to import what else is in it, "
            "skip_unreadable=True (--skip-unreadable)"
        ) from error
    if unreadable and _without_unreadable(held, "", reading.missing) is _Unreadable:
        raise UnsupportedStateError(f"{file} holds no value that can be read without running code in it")
    return held


class _Archive(NamedTuple):
    """The properties of a zip archive."""

    names: list[str]
    compressed: bool
    """Whether a member is compressed: torch would map it as if it were not."""
    head: bytes
    """The first bytes of the pickle in the archive; empty without checksums."""
    saved: Saved | None
    """The facts about the checkpoint, if the file was exported by this package."""


def _check_archive(source: Any, reading: Reading) -> _Archive:
    """Compare all bytes of a zip archive with its checksums, which torch does not do; return its properties.

    If there are none, that is added to ``reading.unchecked``. Raises zipfile.BadZipFile if the archive is damaged.
    """
    with zipfile.ZipFile(source) as archive:
        members = archive.infolist()
        if any(member.header_offset < 0 for member in members):
            raise zipfile.BadZipFile("a member begins before the file")
        head = b""
        if any(member.CRC for member in members):
            for member in members:
                with archive.open(member) as opened:  # raises at the end
                    if member.filename.endswith("/data.pkl"):
                        head = opened.read(2)
                    while opened.read(_PIECE_BYTES):
                        pass
        else:
            reading.unchecked.add("torch.serialization.set_crc32_options(False) was in force when it was saved")
        names = [member.filename for member in members]
        about = next((name for name in names if name.rpartition("/")[2] == SAVED), None)
        saved = None
        if about is not None:
            with archive.open(about) as opened:
                saved = Saved.decode(opened.read(_PIECE_BYTES), str(source))  # a forged one may unpack to any size
        return _Archive(names, any(one.compress_type != zipfile.ZIP_STORED for one in members), head, saved)


def _refuse_other_archives(file: Path, archive: _Archive) -> None:
    last = {name.rpartition("/")[2] for name in archive.names}
    if "constants.pkl" in last:
        raise UnsupportedStateError(
            f"{file} is a program of TorchScript, and no checkpoint: torch.jit.load(FILE).state_dict() is its weights"
        )
    if "data.pkl" not in last:
        raise UnsupportedStateError(f"{file} is a zip archive without a data.pkl: torch.save did not write it")


@contextmanager
def _damage_named(where: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, NotReadableError, OSError, MemoryError):
        raise
    except Exception as error:  # damaged pickles lead to anything
        raise CorruptStoreError(f"{where}{type(error).__name__}: {error}") from error


def _load(source: Any, *, mapped: bool, unreadable: Sequence[str] = ()) -> Any:
    try:
        with _known(*((_Unreadable, name) for name in unreadable)):
            return _plain(torch.load(source, map_location="cpu", weights_only=True, mmap=mapped))
    except UnpicklingError as error:
        reason = str(error.__context__ or error)  # torch puts advice around it
        unknown = re.search(r"GLOBAL (\S+)", reason)
        raise NotReadableError(unknown[1] if unknown else reason[:200]) from error


def _unknown_names(file: Path) -> list[str]:
    """Return the classes and functions that the restricted unpickler refuses; [] if this torch cannot list them."""
    with suppress(Exception), _known():
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    return []


def _known(*more: tuple[type, str]) -> Any:
    """Return a context in which torch's restricted unpickler accepts numpy's names, and more."""
    return torch.serialization.safe_globals([*_STAND_INS, *more])


class _Unreadable(dict[Any, Any]):
    """Stand-in for any unknown class or function, and for its results: accepts all arguments, and does nothing.

    Derived from dict, because the unpickler sets items of dicts only.
    """

    def __new__(cls, *_: Any, **__: Any) -> _Unreadable:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, _: Any) -> None:
        pass

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def _without_unreadable(value: Any, path: str, left_out: list[str]) -> Any:
    """Return ``value`` without unreadable values in its dicts, or :class:`_Unreadable` if it is unreadable itself.

    A key is removed from its dict, and added to ``left_out``, if the key or its value is unreadable. A list, tuple or
    set is unreadable if one of its items is, because removing one would move the others.
    """
    if isinstance(value, _Unreadable) or value is _Unreadable:
        return _Unreadable
    if isinstance(value, dict):
        for (key, item), name in zip([*value.items()], paths.components([*value]), strict=True):
            below = paths.child(path, name)
            if _is_lost((key, item), below, left_out):
                left_out.append(f"{below} (cannot be read without running code in the file)")
                del value[key]
    elif isinstance(value, (list, tuple, set, frozenset)) and _is_lost(value, path, left_out):
        return _Unreadable
    return value


def _is_lost(values: Iterable[Any], path: str, left_out: list[str]) -> bool:
    return any(_without_unreadable(each, path, left_out) is _Unreadable for each in values)


class _Dtype:
    """Stand-in for a dtype of numpy, which the pickle makes first without byte order, and without the unit of times."""

    def __init__(self, name: Any, *_: Any) -> None:
        self._name = name

    def __setstate__(self, state: Any) -> None:
        order, fields = state[1], state[2:5]
        if type(self._name) is not str or fields != (None, None, None):
            raise UnpicklingError(f"a dtype of numpy that is {str(self._name)[:50]}, with fields")
        unit = ""
        if len(state) > 8:
            letters, count, _, _ = state[8][1]
            unit = f"[{'' if count == 1 else int(count)}{letters.decode()}]"
        self._name = f"{order}{self._name}{unit}"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype with byte order and unit. Raises UnpicklingError if this package does not support it."""
        try:
            return dtypes.numpy_dtype(str(self._name))
        except CorruptStoreError as error:
            raise UnpicklingError(str(error)) from None


class _Array:
    """Stand-in for an array of numpy."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype):
            raise UnpicklingError("an array of numpy of no dtype")
        order: Any = "F" if fortran is True else "C"
        self.array = np.ndarray(shape, dtype.dtype, memoryview(data), order=order).copy(order="K")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    return np.ndarray((), dtype.dtype, memoryview(data))[()]


def _no_bytes() -> bytes:
    return b""


_MULTIARRAY: Final = ("numpy.core.multiarray", "numpy._core.multiarray")  # before and from numpy 2
_STAND_INS: Final[list[Any]] = [
    (_Dtype, "numpy.dtype"),
    (_Array, "numpy.ndarray"),
    *((_reconstruct, f"{module}._reconstruct") for module in _MULTIARRAY),
    *((_scalar, f"{module}.scalar") for module in _MULTIARRAY),
    (_no_bytes, "builtins.bytes"),  # without arguments
    (frozenset, "builtins.frozenset"),
]


def _plain(value: Any) -> Any:
    """Return the value with stand-ins replaced by numpy's objects."""
    match value:
        case _Array():
            return value.array
        case _Dtype():
            return value.dtype
        case OrderedDict():
            for key, item in value.items():
                value[key] = _plain(item)
            return value
        case dict() if type(value) in (dict, Counter):
            return type(value)({_plain(key): _plain(item) for key, item in value.items()})
        case list() | tuple() | set() | frozenset() if type(value) in (list, tuple, set, frozenset):
            return type(value)(map(_plain, value))
        case _:
            return value
