"""Recovery from very many images: what a record names is read by the package once for all images that hold it."""

from __future__ import annotations

from functools import lru_cache

from pccheck_async import CheckpointError, CheckpointInfo, load_sync
from pccheck_async.format import Entry, Identity, Record
from pccheck_async.format.record import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    IDENTITY_NAME,
    decode_identity,
    encode_record,
    newest_record,
    slot_name,
)
from pccheck_async.testing import Image, ImageWriter

__all__ = ["Listed", "listed", "loaded", "newest_in"]

Listed = tuple[CheckpointInfo, int | str]
"""A checkpoint that a record names, and the step of what it loads, or what is wrong with that."""


def listed(image: Image) -> list[Listed] | None:
    """Return the checkpoints of an image, newest first; None where it holds no store. Raises CheckpointError.

    Every one of them is read, not only the newest; an entry and a slot that were read before are not read again.
    """
    found = newest_in(image)
    return None if found is None else [(entry.info, loaded(image, entry)) for entry in found[1].entries]


def newest_in(image: Image) -> tuple[Identity, Record] | None:
    """Return the identity and the newest record of an image; None where it holds no store. Raises CheckpointError."""
    if IDENTITY_NAME not in image.files:
        return None
    identity = decode_identity(image.files[IDENTITY_NAME])
    record = newest_record(image.files[COMMIT_NAME], identity.id_bytes)
    if record is None:
        raise CheckpointError("no valid record")
    return identity, record


def loaded(image: Image, entry: Entry) -> int | str:
    """Return the number of the state that an entry of an image leads to, or what is wrong with that."""
    return _loaded(image.files[IDENTITY_NAME], _Alone(entry), image.files.get(slot_name(entry.slot)))


class _Alone:
    """An entry as a key: its metadata cannot be hashed."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def __hash__(self) -> int:
        return hash((self.entry.counter, self.entry.slot))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alone) and self.entry == other.entry


@lru_cache(maxsize=512)
def _loaded(identity: bytes, alone: _Alone, slot: bytes | None) -> int | str:
    from tests.support.crash_harness import is_state_of, metadata_of

    entry = alone.entry
    if slot is None:
        return "its slot is missing"
    decoded = decode_identity(identity)
    commit = encode_record(Record(1, (entry,)), decoded.id_bytes, decoded.block_bytes).ljust(COMMIT_NBYTES, b"\0")
    image = Image.of({IDENTITY_NAME: identity, COMMIT_NAME: commit, slot_name(entry.slot): slot})
    try:
        state = load_sync("image", step=entry.step, io=ImageWriter(image), host_memory=1 << 20)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        return repr(error)
    if entry.info.metadata != metadata_of(entry.step):
        return f"the metadata of step {entry.step} are not its own"
    number: int = state["step"]
    return number if is_state_of(state, number) else f"the state of step {entry.step} is another one"
