"""Damaged stores, and what the readers of the package make of them: what was saved, or an error, and nothing else."""

from __future__ import annotations

import errno
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pccheck_async import CheckpointError, StorageOptions, SyncCheckpointEngine, load_sync
from pccheck_async.errors import ReadError, WriteError
from pccheck_async.format.record import COMMIT_NAME, IDENTITY_NAME
from pccheck_async.medium import File, Medium
from pccheck_async.testing import CrashDisk, CrashWriter, Image, ImageWriter, WrappingWriter
from pccheck_async.transfer import PAGE_BYTES

Damaged = tuple[str, Image]
"""What was done to a store, and what is left of it."""


@dataclass(frozen=True)
class WholeStore:
    """A store at rest.

    Attributes:
        image: Its files.
        states: What was saved in it, by step.
    """

    image: Image
    states: dict[int, dict[str, Any]]

    @classmethod
    def make(cls, *, elements: int, seed: int = 0, saves: int = 4, keep_last: int = 2) -> WholeStore:
        """Save ``saves`` checkpoints of some tensors, ``elements`` floats in all, and some plain values."""
        disk, generator, states = CrashDisk(block_bytes=PAGE_BYTES), np.random.default_rng(seed), {}
        io = CrashWriter(disk, turns=0)
        with SyncCheckpointEngine(
            "memory", storage=StorageOptions(io=io, chunk_bytes=2 * PAGE_BYTES), keep_last=keep_last
        ) as engine:
            for step in range(saves):
                weights = torch.from_numpy(generator.random(elements, dtype=np.float32))
                states[step] = {
                    "model": {"weight": weights, "bias": weights[:3].clone(), "tied": weights[: elements // 2]},
                    "rng": generator.integers(0, 9, 5),
                    "step": step,
                    "history": [0.5, "a", None, {"x": 2**70}],
                }
                engine.checkpoint(states[step], step=step, metadata={"loss": 1 / (step + 1)}).result()
        return cls(Image.of(disk.contents()), states)

    def outcome(self, image: Image) -> str:
        """Load from a damaged image: ``whole``, ``older`` or ``refused``; AssertionError where it is anything else."""
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            try:
                state = load_sync("image", io=ImageWriter(image), host_memory=1 << 20)
            except CheckpointError:
                return "refused"
        step = state["step"]
        assert self.is_saved(state, step), f"the state of step {step} is another one"
        return "whole" if step == max(self.states) else "older"

    def is_saved(self, state: dict[str, Any], step: int) -> bool:
        """Whether ``state`` is what was saved of ``step``, bit for bit."""
        wanted = self.states[step]
        return (
            state.keys() == wanted.keys()
            and state["model"].keys() == wanted["model"].keys()
            and all(torch.equal(state["model"][name], tensor) for name, tensor in wanted["model"].items())
            and np.array_equal(state["rng"], wanted["rng"])
            and (state["step"], state["history"]) == (wanted["step"], wanted["history"])
        )

    def train_on(self, image: Image) -> str:
        """Open a damaged image for writing, restore, save, load: ``saved`` or ``refused``."""
        disk = CrashDisk.from_image(image, block_bytes=PAGE_BYTES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with SyncCheckpointEngine(
                    "image", storage=StorageOptions(io=CrashWriter(disk, turns=0)), keep_last=2
                ) as engine:
                    engine.checkpoint({"x": torch.ones(3), "step": 99}, step=99).result()
            except CheckpointError:
                return "refused"
            state = load_sync("image", io=CrashWriter(disk, turns=0, read_only=True))
        assert state["step"] == 99
        return "saved"


class BadBlocks(WrappingWriter):
    """A device some of whose blocks cannot be read, until they are written: then it takes others in their place.

    Args:
        inner: The writer in front of it.
        bad: Numbers of the bad blocks by file; of a file that is read as a whole, any number.
        stubborn: Writing them fails as well.
        error: What reading them says.
    """

    def __init__(
        self, inner: Medium, bad: Mapping[str, set[int]], *, stubborn: bool = False, error: int = errno.EIO
    ) -> None:
        super().__init__(inner)
        self.chains = inner.chains
        self.bad = {name: set(blocks) for name, blocks in bad.items()}
        self._stubborn = stubborn
        self._error = error

    def _hit(self, name: str, offset: int, nbytes: int) -> set[int]:
        return self.bad.get(name, set()) & {*range(offset // PAGE_BYTES, -(-(offset + nbytes) // PAGE_BYTES))}

    async def read(self, file: File, offset: int, into: memoryview) -> int:
        if self._hit(file.name, offset, len(into)):
            raise ReadError(self._error, os.strerror(self._error), file.name)
        return await super().read(file, offset, into)

    async def read_small(self, name: str) -> bytes | None:
        if self.bad.get(name):
            raise ReadError(errno.EIO, os.strerror(errno.EIO), name)
        return await super().read_small(name)

    async def write(self, file: File, offset: int, data: memoryview) -> None:
        if hit := self._hit(file.name, offset, len(data)):
            if self._stubborn:
                raise WriteError(errno.EIO, os.strerror(errno.EIO), file.name)
            self.bad[file.name] -= hit
        await super().write(file, offset, data)

    async def replace(self, name: str, data: bytes, *, keep_as: str = "") -> None:
        bad = self.bad.pop(name, set())
        if keep_as:
            self.bad[keep_as] = bad
        await super().replace(name, data, keep_as=keep_as)


def changed(image: Image, name: str, change: Callable[[bytearray], object]) -> Image:
    """Return an image one file of which is another."""
    content = bytearray(image.files[name])
    change(content)
    return Image({**image.files, name: bytes(content)}, b"")


def flipped(image: Image, name: str, at: int, mask: int) -> Image:
    """Return an image with other bits in one byte."""

    def flip(content: bytearray) -> None:
        content[at] ^= mask

    return changed(image, name, flip)


def truncations(image: Image, rng: random.Random, more: int) -> Iterator[Damaged]:
    """Cut every file at every block, and at ``more`` lengths drawn at random."""
    for name, content in image.files.items():
        blocks = range(0, len(content), PAGE_BYTES)
        for length in [*blocks, *(rng.randrange(len(content)) for _ in range(more))]:
            yield f"{name} cut to {length}", Image({**image.files, name: content[:length]}, b"")


def garbage(image: Image, rng: random.Random) -> Iterator[Damaged]:
    """Append to every file, or write over parts of it."""
    for name, content in image.files.items():
        for length in (1, 17, 512, PAGE_BYTES, 3 * PAGE_BYTES):
            noise = rng.randbytes(length)
            yield f"{length} bytes after {name}", Image({**image.files, name: content + noise}, b"")
            at = rng.randrange(len(content))
            over = content[:at] + noise + content[at + length :]
            yield f"{length} bytes over {name}", Image({**image.files, name: over}, b"")
            zeros = content[:at] + bytes(length) + content[at + length :]
            yield f"{length} zeros over {name}", Image({**image.files, name: zeros}, b"")


def exchanges(image: Image, other: Image) -> Iterator[Damaged]:
    """Swap files, double them, take them away, and take those of another store."""
    slots = sorted(name for name in image.files if name.startswith("slot"))
    for name in image.files:
        yield f"no {name}", Image({key: value for key, value in image.files.items() if key != name}, b"")
        yield f"empty {name}", Image({**image.files, name: b""}, b"")
        yield f"zeros for {name}", Image({**image.files, name: bytes(len(image.files[name]))}, b"")
        yield f"another store's {name}", Image({**image.files, name: other.files[name]}, b"")
    for one in slots:
        for two in slots:
            yield f"{one} in place of {two}", Image({**image.files, two: image.files[one]}, b"")
            swapped = {**image.files, one: image.files[two], two: image.files[one]}
            yield f"{one} and {two} swapped", Image(swapped, b"")


def pieces(image: Image, other: Image, rng: random.Random, count: int) -> Iterator[Damaged]:
    """Move blocks within a file, between files, and from another store's file of the same name."""
    names = [name for name in image.files if name not in (IDENTITY_NAME,)]
    for _ in range(count):
        name, source = rng.choice(names), rng.choice(names)
        taken = rng.choice((image, other)).files[source]
        size = rng.choice((512, PAGE_BYTES, 16 * PAGE_BYTES if name == COMMIT_NAME else PAGE_BYTES))
        content = bytearray(image.files[name])
        at, start = (rng.randrange(0, max(1, len(each)), size) for each in (content, taken))
        content[at : at + size] = taken[start : start + size]
        yield f"{size} bytes of {source} in {name}", Image({**image.files, name: bytes(content)}, b"")
