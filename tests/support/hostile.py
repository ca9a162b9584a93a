"""Manifests, records and identities that somebody forged, checksums and all; and what the readers make of them."""

from __future__ import annotations

import copy
import os
import random
import resource
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pccheck_async import CheckpointError, StorageOptions, SyncCheckpointEngine, list_checkpoints, load_sync
from pccheck_async.format import crc32, piece_sums
from pccheck_async.format.manifest import decode
from pccheck_async.format.record import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    FORMAT_VERSION,
    HEADER,
    IDENTITY_NAME,
    MAGIC,
    REGION_NBYTES,
    decode_identity,
    newest_record,
)
from pccheck_async.state import allocate, match
from pccheck_async.testing import CrashDisk, CrashWriter, Image, ImageWriter
from pccheck_async.transfer import PAGE_BYTES
from tests.support.round_trip import Saved

MEMORY = 1 << 30
"""Of addresses: the least that leaves room for the threads of a load."""
_FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
)
_MOST_PLACES = 10_000
NUMBERS = [*(2**n + d for n in (0, 6, 8, 9, 12, 16, 31, 32, 48, 53, 61, 62, 63) for d in (-1, 0, 1)), 0, 100, 2**64 - 1]
_NAMES = """
array stateful list tuple set frozenset dict ordered counter int complex str bytes bytearray size dtype device npscalar
npdtype tensor parameter ndarray float32 float64 bfloat16 complex64 int64 bool uint4 qint8 float8_e4m3fn <f4 >f8 g
<U536870911 |V2147483647 |S0 |O <M8[ns] <m8[999999999s] i4,i4 (2,)f4 cuda:0 cuda:99999999999 meta privateuseone:1 cpu
../../etc/passwd /etc/passwd step weight model * a.b
"""
WORDS = [*_NAMES.split(), "", "\\", "\0", "\ud7ff", "a" * 5000]


def confine() -> None:
    """Leave this process little memory, and end it where it would run something or write a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    sys.addaudithook(_no_code)


def _no_code(event: str, arguments: tuple[object, ...]) -> None:
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if event in _FORBIDDEN or writes:
        os.write(2, f"{event} {arguments}\n".encode())
        os._exit(3)


def victim() -> dict[Any, Any]:
    """A state with something of every kind in it."""
    base = torch.arange(40.0)
    ordered: Any = OrderedDict(w=torch.nn.Parameter(torch.ones(3)))
    ordered._metadata = OrderedDict(x={"version": 1})
    state: dict[Any, Any] = {
        "model": ordered,
        "views": [base[3:9], base[20:].view(4, 5).t(), torch.rand(3, 1).expand(3, 5), torch.empty(0, 3)],
        "arrays": (np.arange(5), np.zeros((2, 3), ">i4").T, np.array("abc"), np.zeros(3, "M8[s]")),
        "odd": torch.zeros(3, dtype=torch.complex64).conj(),
        "plain": [1, 2.5, None, True, "é", b"x", bytearray(b"y"), 1j, 2**80, "\ud800", np.float32(1), np.dtype("<f4")],
        "types": {"size": torch.Size([1, 2]), "dtype": torch.int8, "device": torch.device("cpu"), "set": {1, (2, "a")}},
        3: {0: frozenset((1,)), 1.5: {"deep": [[[torch.ones(2, dtype=torch.bool)]]]}},
    }
    return {str(key): value for key, value in state.items()} | {str(n): torch.full((n,), float(n)) for n in range(3)}


class Forger:
    """Changes a tree of lists, dicts and plain values as msgpack gives it.

    Args:
        rng: Decides what.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ways: list[Callable[[Any, Any, list[tuple[Any, Any]]], object]] = [
            lambda inner, key, _: inner.__setitem__(key, self.value()),
            lambda inner, key, _: inner.__setitem__(key, self.near(inner[key])),
            lambda inner, key, _: inner.__setitem__(key, self.near(inner[key])),
            lambda inner, key, places: inner.__setitem__(key, copy.deepcopy(self.at(rng.choice(places)))),
            lambda inner, key, _: inner.__delitem__(key),
            self._double,
            self._swap,
            self._wrap,
        ]

    def forge(self, tree: Any) -> Any:
        """Return a changed copy."""
        tree = [copy.deepcopy(tree)]
        for _ in range(self._rng.choice((1, 1, 1, 2, 3, 8))):
            places = [*islice(_places(tree), _MOST_PLACES)]
            if len(places) == _MOST_PLACES:
                break  # doubled again and again, it would fill the memory of the forger
            inner, key = self._rng.choice(places)
            self._rng.choice(self._ways)(inner, key, places)
            if not tree:
                return None
        return tree[0]

    def forged(
        self,
        tree: Any,
        finish: Callable[[Any], Any] = lambda tree: tree,
        encode: Callable[[Any], bytes] = msgspec.msgpack.encode,
    ) -> bytes:
        """Return a changed copy, encoded."""
        for _ in range(20):
            try:
                return encode(finish(self.forge(tree)))
            except (RecursionError, OverflowError):
                continue  # too deep for Python to write down
        return encode(tree)

    @staticmethod
    def at(place: tuple[Any, Any]) -> Any:
        return place[0][place[1]]

    def value(self) -> Any:
        rng = self._rng
        number = rng.choice(NUMBERS) * rng.choice((1, 1, -1))
        kinds: list[Any] = [min(max(number, -(2**63)), 2**64 - 1), rng.choice(WORDS), [], {}, None, True]
        kinds += [rng.choice((0.0, float("nan"), float("inf"), 1e308)), rng.randbytes(rng.choice((0, 1, 8, 3000)))]
        kinds += [[rng.choice(WORDS), rng.choice(NUMBERS)], [rng.choice(WORDS), [1, 2]]]
        return rng.choice(kinds)

    def near(self, value: Any) -> Any:
        """Something like ``value``."""
        rng = self._rng
        match value:
            case bool() | None:
                return rng.choice((True, False, None))
            case int():
                near = value + rng.choice((-64, -8, -1, 1, 4, 64, 512, value))
                return min(max(rng.choice((near, -near, rng.choice(NUMBERS))), -(2**63)), 2**64 - 1)
            case str():
                return rng.choice((rng.choice(WORDS), value + "x", value[:-1], value.swapcase()))
            case bytes():
                return rng.choice((value[:-1], value + b"\0", rng.randbytes(len(value)), value * 3))
            case list():
                return rng.choice((value[:-1], value + value[-1:], value[::-1], value * 2, [value]))
            case dict():
                return rng.choice(({**value, rng.choice(WORDS): self.value()}, {}))
            case _:
                return self.value()

    def _double(self, inner: Any, key: Any, _: Any) -> None:
        if isinstance(inner, list):
            inner[key:key] = [inner[key]] * self._rng.choice((1, 2, 50))

    def _swap(self, inner: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
        other, index = self._rng.choice(places)
        mine, its = copy.deepcopy(inner[key]), copy.deepcopy(other[index])
        inner[key], other[index] = its, mine

    def _wrap(self, inner: Any, key: Any, _: Any) -> None:
        for _ in range(self._rng.choice((1, 5, 98, 101, 300))):
            inner[key] = self._rng.choice((["list", [inner[key]]], ["stateful", inner[key]], ["tuple", [inner[key]]]))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [tree]
    while waiting:
        inner = waiting.pop()
        for key in range(len(inner)) if isinstance(inner, list) else [*inner]:
            yield inner, key
            if isinstance(inner[key], (list, dict)):
                waiting.append(inner[key])


@dataclass(frozen=True)
class Prey:
    """A whole store, and what was saved in it."""

    image: Image
    manifest: bytes
    payload: bytes
    entries: bytes

    @classmethod
    def make(cls) -> Prey:
        disk = CrashDisk(block_bytes=PAGE_BYTES)
        with SyncCheckpointEngine(
            "x",
            storage=StorageOptions(io=CrashWriter(disk, turns=0), chunk_bytes=PAGE_BYTES, host_memory=1 << 20),
            keep_last=1,
        ) as engine:
            engine.checkpoint(victim(), step=1, metadata={"loss": 0.5}).result()
        files = disk.contents()
        record = newest_record(files[COMMIT_NAME], decode_identity(files[IDENTITY_NAME]).id_bytes)
        assert record is not None
        (entry,) = record.entries
        slot = files[f"slot-{entry.slot:03d}"]
        manifest = slot[entry.manifest_offset : entry.manifest_offset + entry.manifest_nbytes]
        return cls(Image.of(files), manifest, slot[: entry.manifest_offset], msgspec.msgpack.encode(record.entries))

    def with_manifest(self, manifest: bytes) -> Image:
        """Return the store with another manifest, which its record names rightly."""
        (entry,) = msgspec.msgpack.decode(self.entries)
        entry[6], entry[7] = len(manifest), crc32(manifest)
        name = f"slot-{entry[4]:03d}"
        slot = (self.payload + manifest).ljust(len(self.image.files[name]), b"\0")
        return Image({**self.image.files, name: slot, COMMIT_NAME: self.commit(msgspec.msgpack.encode([entry]))}, b"")

    def with_record(self, body: bytes, generation: int = 7) -> Image:
        """Return the store with another record."""
        return Image({**self.image.files, COMMIT_NAME: self.commit(body, generation)}, b"")

    def commit(self, body: bytes, generation: int = 7) -> bytes:
        """Return a commit file of one record with a valid checksum."""
        identity = decode_identity(self.image.files[IDENTITY_NAME]).id_bytes
        checked = HEADER.pack(MAGIC, FORMAT_VERSION, len(body), identity, generation, 0)[: HEADER.size - 24]
        header = HEADER.pack(MAGIC, FORMAT_VERSION, len(body), identity, generation, crc32(body, crc32(checked)))
        return (header + body)[:REGION_NBYTES].ljust(COMMIT_NBYTES, b"\0")


def of_version_2(manifest: Any) -> Any:
    """Return a manifest with the checksums of the pieces of its chunks, which are small."""
    sums = [chunk[2].to_bytes(4, "little") for chunk in manifest["chunks"]]
    return {**manifest, "version": 2, "pieces": sums}


def with_right_checksums(tree: Any, payload: bytes) -> Any:
    """Let the checksums of a forged manifest's chunks be right, where the chunks exist, and those of their pieces."""
    try:
        for index, chunk in enumerate(tree["chunks"]):
            data = payload[chunk[0] : chunk[0] + chunk[1]]
            chunk[2] = crc32(data)
            if "pieces" in tree:
                tree["pieces"][index] = piece_sums(data)
    except (TypeError, KeyError, IndexError, AttributeError):
        pass
    return tree


def examine_manifest(manifest: bytes, payload: bytes, live: dict[str, Any]) -> str:
    """Decode a manifest, load all of it, and restore it into a live state; say how far that went.

    Any exception but CheckpointError is raised on.
    """
    saved = Saved(manifest, bytearray(payload))
    found = "refused"
    try:
        decoded = decode(manifest)
        found = "decoded"
        if decoded.payload_nbytes > len(payload):
            return found  # read_manifest refuses it
        saved.fill(allocate(decoded))
        found = "loaded"
        allocate(decoded, ["*"])
        saved.fill(match(live, decoded))
        found = "restored"
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, CheckpointError) and error.errno != 74:
            raise
    return found


def examine_image(image: Image) -> str:
    """List, load, open, restore, save and pin; say how far that went."""
    found = "refused"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for info in list_checkpoints("x", io=ImageWriter(image)):
                repr(info)
            load_sync("x", io=ImageWriter(image), host_memory=1 << 20)
            found = "loaded"
        except CheckpointError:
            pass
        try:
            disk = CrashDisk.from_image(image, block_bytes=PAGE_BYTES)
            storage = StorageOptions(io=CrashWriter(disk, turns=0), host_memory=1 << 20)
            with SyncCheckpointEngine("x", overwrite=True, storage=storage) as engine:
                engine.checkpoint({"x": torch.ones(1)}, step=5).result()
                engine.pin(step=5)
            found += ", saved"
        except CheckpointError:
            pass
    return found
