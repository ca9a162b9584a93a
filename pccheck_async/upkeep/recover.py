# SPDX-License-Identifier: Apache-2.0
"""Recovery of a store whose records or ``store.json`` are lost. Slots are only read, in any case."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import structs

from pccheck_async.engine import call_once
from pccheck_async.errors import (
    CorruptStoreError,
    NewerFormatError,
    NoCheckpointError,
    ReadError,
    StoreError,
    StoreLockedError,
    first_few,
    in_shell,
    is_exhausted,
    is_forbidden,
)
from pccheck_async.format import CheckpointInfo, Entry, Identity, Record, checksum
from pccheck_async.format.record import (
    COMMIT_NAME,
    COMMIT_NBYTES,
    FORMAT_VERSION,
    GROUP_NAME,
    GROUP_VERSION,
    IDENTITY_NAME,
    MIN_BLOCK,
    REGION_NBYTES,
    encode_domain,
    encode_identity,
    encode_record,
    is_foreign,
    largest_block,
    newest_record,
    rebuild_identity,
    region_offsets,
    slot_name,
    slot_number,
)
from pccheck_async.group import Place, SeenStore, open_folder, parts_by_key, stored_domain, view_of
from pccheck_async.medium import Medium
from pccheck_async.medium.files import Files
from pccheck_async.medium.open_medium import IO, OpenMedium
from pccheck_async.store import (
    held_by_other,
    is_group_folder,
    lock_commit,
    no_store,
    of_another_store,
    rank_folders,
    rank_name,
    read_commit,
    read_manifest,
    stored_identity,
    unread_record,
)
from pccheck_async.transfer import PAGE_BYTES
from pccheck_async.upkeep.rank_records import LostRecords, RankStores, find_parts, lock_ranks, read_ranks
from pccheck_async.upkeep.reading import LOCK_SECONDS, Progress, lost_records, lost_slots
from pccheck_async.upkeep.salvage import BUSY, FoundCheckpoint, as_recorded, find_in_slot, record_entries
from pccheck_async.upkeep.verify import RecordCopy, Verification, check_place, damaged_copies, examine_records

__all__ = ["Recovery", "recover_store"]

FileState = Literal["valid", "missing", "damaged"]
RecordsState = Literal[FileState, "older"]
_BOTH_COPIES = (
    "Both copies of a record in {} are damaged, or were cut short by a power failure. It may have been the newest: "
    "then what is named here is older"
)
_LOST_RECORD = f"{_BOTH_COPIES.format(repr(COMMIT_NAME))}; --search finds newer ones, and dropped ones."


@dataclass(frozen=True, slots=True)
class Recovery:
    """The result of a recovery.

    Attributes:
        identity: State of ``store.json``, or for a group's folder of ``group.json``.
        record: State of the commit records: ``valid`` if any of the four copies is; for a group that was searched,
            ``older`` if all are valid, and the only fault is that the records of some ranks are older than others'.
        found: The contents of each slot; empty if the slots were not searched, because a record is valid.
        named: The checkpoints that the record names, or would name, newest first.
        written: Names of the files that were written.
        kept: New names of the files that were replaced.
        identity_name: Name of the file whose state is ``identity``.
        missing: Slots that a valid record names and that are gone, cut short, or no regular files: their checkpoints
            are lost.
        problems: Everything else that is lost or damaged, in sentences.
        dropped: Checkpoints that a valid record named, and the new one does not: no slot was found to hold them whole.
        unnamed: For a group, the folders of ranks whose ``store.json`` is missing or damaged.
        refusal: The reason why ``write`` writes nothing; empty if it may.
        unrecorded: For a group, the folders of ranks whose records are missing, damaged or older than others'.
        older: The folders in ``unrecorded`` whose records are valid, but older than those of other ranks.
        verification: The result of verifying all records and checkpoints; None if the files that a trainer needs are
            not all valid, or the slots were searched.
        record_lost: Whether one record is valid and the other has no valid copy: that may have been the newest.
    """

    identity: FileState
    record: RecordsState
    found: tuple[FoundCheckpoint, ...]
    named: tuple[CheckpointInfo, ...]
    written: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    identity_name: str = IDENTITY_NAME
    missing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    refusal: str = ""
    unnamed: tuple[str, ...] = ()
    dropped: tuple[CheckpointInfo, ...] = ()
    unrecorded: tuple[str, ...] = ()
    verification: Verification | None = None
    record_lost: bool = False
    older: tuple[str, ...] = ()

    @property
    def copies(self) -> tuple[RecordCopy, ...]:
        """The damaged copies of records whose other copy is valid: nothing is lost, and ``write`` repairs them."""
        return () if self.verification is None else self.verification.damaged_copies

    @property
    def needed(self) -> bool:
        """Whether a trainer could not open the store as it was found."""
        return self.identity != "valid" or self.record != "valid" or bool(self.unnamed)

    @property
    def named_anew(self) -> bool:
        """Whether a new record was written, which names only checkpoints that were found."""
        return COMMIT_NAME in self.written and not self.copies

    @property
    def none_named(self) -> str:
        """The reason why a search of the slots found no checkpoint for a record."""
        any_whole = any(one.whole for one in self.found)
        return "no whole slot is one to name (see its note)" if any_whole else "no slot holds a whole checkpoint"

    @property
    def lost(self) -> tuple[str, ...]:
        """The kinds of facts that are lost with the records: pins and rejections; empty if a record is valid."""
        alone = self.identity_name == IDENTITY_NAME  # the other ranks' records have them, too
        return ("pins", "rejections") if alone and self.named and self.record != "valid" else ()


def recover_store(
    path: str | os.PathLike[str],
    *,
    write: bool = False,
    search: bool = False,
    slots: Collection[int] | None = None,
    progress: Progress = lambda done, total: None,
    io: IO = "auto",
) -> Recovery:
    """Examine the contents of a damaged store, and make it a store again.

    If a record is valid, it is used, also if ``store.json`` is lost. If both are valid, every checksum is checked, and
    ``write`` repairs a damaged copy of a record from its other copy. Without a record the slots are searched: a
    checkpoint is whole if its manifest decodes and every chunk has the checksum listed there. That proves that the
    bytes of its tensors are those that were written. It does not prove that the checkpoint was committed: the newest
    may be one that the engine was about to commit. A checkpoint that failed, such as one whose state changed while it
    was captured (``TornCaptureError``), is not whole, as the engine overwrites the beginning of its manifest; it is
    found here only if the process died, or the device failed, just before that. Nor does it prove that no bit of the
    manifest flipped, for only the record has its checksum: look at steps and plain values
    (:func:`describe_checkpoint`). Where a valid record has another checksum of a manifest, the checkpoint is damaged.
    Pins and rejections are known only if a record is valid: without one, a run that was
    rejected may be restored again (:attr:`Recovery.lost`).

    In a folder that holds the stores of a group's ranks, the records of all ranks are read, and ``write`` makes a lost
    or damaged ``group.json`` anew. For ranks that lost their records, it makes records of the whole parts in their
    slots that belong to checkpoints which the records of all other ranks name; with ``search`` also for ranks whose
    records are older than others'.

    Args:
        path: Folder of the store, or of a group.
        write: Write a new commit record, and ``store.json`` if it is not valid; nothing if both are. Files that are
            replaced stay under other names. By default nothing is written.
        search: Search the slots also if a record is valid, and make one that names the checkpoints found.
        slots: Numbers of the slots whose checkpoints are named; by default all that are whole, and none if one of them
            may be another run's: captured before one with a lower counter, of a smaller step, or one of two with one
            counter.
        progress: Called with bytes searched, and then bytes checked, of one slot after another.
        io: I/O backend, as for :class:`pccheck_async.CheckpointEngine`.

    Durability: the written files survive power loss when this returns. A crash in between leaves a store that can be
    recovered by another call.

    Raises:
        NoCheckpointError: there is nothing here that could be recovered.
        StoreError: with ``write``, the store of a group's rank needs a record: only the lost records named the
            checkpoints of its parts; or a slot may be another run's, and ``slots`` is not given.
        StoreLockedError: with ``write``, a trainer has the store open.
        CorruptStoreError: a newer version of this package made the store (NewerFormatError); or with ``write``, the
            records are valid, and lost or damaged checkpoints cannot be repaired.
        ReadError, WriteError: the device failed.
    """
    name = os.fspath(path)

    async def examine(opened: OpenMedium) -> Recovery:
        medium = opened.medium
        alone = write and COMMIT_NAME not in await medium.names()  # no trainer opens it so
        opening = partial(medium.open, COMMIT_NAME, writable=True)  # its lock is held until the folder is closed
        if write and not alone and await lock_commit(medium, opening, LOCK_SECONDS) is None:
            raise StoreLockedError(held_by_other(path))
        names = await medium.names()  # only now: the previous holder of the lock may have made slots
        numbers = [number for each in names if (number := slot_number(each)) is not None]
        commit = await read_commit(medium)
        foreign = commit is not None and not commit[1] and IDENTITY_NAME not in names and is_foreign(commit[0])
        if not numbers and (commit is None or foreign):
            return await _recover_group(opened, Path(path), names, write, search, slots, progress)
        facts = await medium.prepare(create=False)
        identity_state, identity, record, store_id, problems, record_lost = read = await _read(medium, commit)
        record_state: FileState = "valid" if record else "missing" if commit is None else "damaged"
        before = record.entries if record else ()
        found: list[FoundCheckpoint] = []
        if record is None or search:
            block = identity.block_bytes if identity else MIN_BLOCK
            found = [
                as_recorded(
                    await find_in_slot(opened, each, block, progress, keep=write, alone=alone), before, slots or ()
                )
                for each in numbers
            ]
            await _check_alone(medium, name, found if write else (), alone)
            problems += tuple(_not_found(record, found))
            found = [
                replace(one, entry=None, note=one.note or "not asked for") if slots and one.slot not in slots else one
                for one in found
            ]
            entries, notes, strange = record_entries(found, before)
            entries = _marked_as_before(entries, record)
            found = [replace(one, note=notes.get(one.slot, one.note)) for one in found]
        else:
            entries, strange = list(record.entries), set()
        version = _version(Path(path), identity, record)
        is_checked = identity_state == "valid" and record is not None and not search
        verification = await _verify(Place(path, opened, of_group=False), progress) if is_checked else None
        others = await _other_contents(medium, record, identity, commit) if record is not None and not search else ()
        recovery = Recovery(
            identity_state,
            record_state,
            tuple(found),
            tuple(entry.info for entry in entries),
            missing=tuple([slot_name(entry.slot) for entry in before if not await _has_slot(medium, entry)]),
            problems=(*problems, *_damaged_chunks(verification), *others),
            dropped=_dropped(before, entries),
            refusal=_only_by_its_group(Path(path))
            if version == GROUP_VERSION and (not record or search)
            else _guessed(name, entries, strange if slots is None else (), search=search),
            verification=verification,
            record_lost=record_lost,
        )
        if not write or not _is_to_be_written(name, recovery, search):
            return recovery
        if identity is None:
            block = largest_block(entries, max(facts.block_bytes, PAGE_BYTES))
            store_id = store_id or secrets.token_hex(16)
            identity = Identity(format=version, store_id=store_id, checksum=checksum.NAME, block_bytes=block)
        files: dict[str, bytes] = {}
        if record is None or search:
            files[COMMIT_NAME] = _commit_file(identity, [Record(generation, tuple(entries)) for generation in (0, 1)])
        elif recovery.copies and commit is not None:
            files[COMMIT_NAME] = _mended(commit[0], identity)
        if identity_state != "valid":  # it comes last, after the records of the store that it names
            files[IDENTITY_NAME] = encode_identity(identity)
        left = tuple(each for each in recovery.problems if IDENTITY_NAME not in files or each not in read.problems)
        return replace(recovery, problems=left, written=tuple(files), kept=await _replace_files(medium, names, files))

    async def recover() -> Recovery:
        async with await open_folder(path, io) as opened:
            return await examine(opened)

    return call_once(recover())


async def _recover_group(
    opened: OpenMedium,
    folder: Path,
    names: Collection[str],
    write: bool,
    search: bool,
    slots: Collection[int] | None,
    progress: Progress,
) -> Recovery:
    """Examine ``group.json`` and the records of all ranks; with ``write`` make the files anew that are not valid.

    Raises the error of :func:`no_store` if the folder is not a group's.
    """
    if GROUP_NAME not in names and not is_group_folder(folder):
        raise no_store(opened, folder, "no store, nor parts of one")
    if slots is not None:
        raise StoreError(f"{folder} holds a group's checkpoints: the slots of a rank are chosen in its folder")
    state: FileState = "valid"
    try:
        state = "missing" if stored_domain(folder) is None else "valid"
    except NewerFormatError as error:
        raise NewerFormatError(f"{error}: nothing was written; recover it with the version that made it") from None
    except CorruptStoreError:
        state = "damaged"
    except ReadError as error:
        if is_exhausted(error) or is_forbidden(error):
            raise
        state = "damaged"
    await opened.medium.prepare(create=False)
    stores = await read_ranks(opened, folder, search=search)
    if write and (stores.lost or stores.unnamed):
        await lock_ranks(opened, folder, [rank_name(rank) for rank in (*stores.seen, *stores.lost)])
        stores = await read_ranks(opened, folder, search=search)
    place, found = Place(folder, opened, of_group=True), dict[int, LostRecords]()
    if stores.lost or stores.unnamed:
        found = await find_parts(opened, folder, stores, progress)
        recovery = _without_records(state, stores, found)
    else:
        recovery = await _with_records(state, place, progress)
    if not write or not _is_to_be_written(os.fspath(folder), recovery, search=False):
        return recovery
    files, kept = dict[str, bytes](), list[str]()
    copied = {copy.rank for copy in recovery.copies if copy.rank is not None}
    await lock_ranks(opened, folder, [rank_name(rank) for rank in copied])
    for rank in sorted({*found, *stores.unnamed, *copied}):
        medium, own = Files(folder / rank_name(rank), opened.operations), dict[str, bytes]()
        if rank in copied and (commit := await read_commit(opened.medium, f"{rank_name(rank)}/")) is not None:
            own[COMMIT_NAME] = _mended(commit[0], place.stores[rank][0])
        if (each := found.get(rank)) is not None:
            own[COMMIT_NAME] = _commit_file(each.identity, each.records(stores.seen.values()))
        if rank in stores.unnamed:  # last, after the records of the store that it names
            own[IDENTITY_NAME] = encode_identity(stores.unnamed[rank] if each is None else each.identity)
        try:
            there = await medium.names()
            kept += [f"{rank_name(rank)}/{name}" for name in await _replace_files(medium, there, own)]
        finally:
            await medium.close()
        files |= {f"{rank_name(rank)}/{name}": data for name, data in own.items()}
    if state != "valid":
        # Any number will do: ranks that open this folder together only compare the numbers that they read.
        files[GROUP_NAME] = encode_domain(secrets.token_hex(16))
        kept += await _replace_files(opened.medium, names, {GROUP_NAME: files[GROUP_NAME]})
    return replace(recovery, written=tuple(files), kept=tuple(kept))


async def _with_records(identity: FileState, place: Place, progress: Progress) -> Recovery:
    """Verify a group in which all ranks have their records, and return that as a recovery."""
    verification = await _verify(place, progress)
    faults, torn = lost_slots(place), lost_records(place)
    newest = max((one.key for one in place.complete), default=None)
    # Older ones are nothing to mend: some rank that was killed had not dropped its part yet.
    newer = [one for one in place.incomplete if not one.proven and (newest is None or one.key > newest)]
    lacking = [f"Step {one.step} lacks the parts of {one.lacking}." for one in newer]
    if lacking and newest is None:
        lacking = [f"{place.nothing(None)}."]  # says what to do, too
    problems = (
        *lacking,
        *(f"LOST: step {info.step}: {faults[info.counter]}." for info in place.infos if info.counter in faults),
        *(f"{_BOTH_COPIES.format(name)}." for name in torn),
        *_damaged_chunks(verification),
    )
    named = tuple(place.infos)
    return Recovery(
        identity,
        "valid",
        (),
        named,
        identity_name=GROUP_NAME,
        problems=problems,
        verification=verification,
        record_lost=bool(torn),
    )


async def _check_alone(medium: Medium, name: str, found: Sequence[FoundCheckpoint], alone: bool) -> None:
    """Raise StoreLockedError if another process writes to one of these slots, or has made records meanwhile."""
    if any(one.note == BUSY for one in found):
        raise StoreLockedError(f"another process writes to a slot of {name}: nothing was written")
    if alone and COMMIT_NAME in await medium.names():
        raise StoreLockedError(f"another process recovered {name} meanwhile: nothing was written")


async def _verify(place: Place, progress: Progress) -> Verification:
    await place.look()
    return await check_place(place, progress=progress)


def _dropped(before: Sequence[Entry], named: Sequence[Entry]) -> tuple[CheckpointInfo, ...]:
    """Return the checkpoints of ``before`` that are not ``named``, neither in their slots nor, the same, in others."""
    there = {(entry.counter, entry.slot) for entry in named}
    moved = {(entry.counter, entry.manifest_checksum) for entry in named}
    return tuple(
        entry.info
        for entry in before
        if (entry.counter, entry.slot) not in there and (entry.counter, entry.manifest_checksum) not in moved
    )


def _not_found(record: Record | None, found: Sequence[FoundCheckpoint]) -> Iterator[str]:
    """Yield a sentence for each checkpoint that a record names and that a search of its slot did not find whole."""
    whole = {one.slot: one.entry for one in found if one.entry}
    moved = {(one.counter, one.manifest_checksum): slot for slot, one in whole.items()}
    there = {one.slot for one in found}
    for entry in record.entries if record else ():
        other = whole.get(entry.slot)
        at_home = other is not None and other.counter == entry.counter
        slot = None if at_home else moved.get((entry.counter, entry.manifest_checksum))
        if slot is not None:
            yield f"Step {entry.step} is in {slot_name(slot)}, and not in {slot_name(entry.slot)}, as the record says."
        elif other is not None and other.counter > entry.counter:
            yield (
                f"{slot_name(entry.slot)} holds step {other.step} in the place of step {entry.step}, which the newest "
                f"record names there: {COMMIT_NAME} is older than the slots."
            )
        elif entry.slot in there and (other is None or other.counter != entry.counter):
            yield f"DAMAGED: step {entry.step}, in {slot_name(entry.slot)}."


def _damaged_chunks(verification: Verification | None) -> Iterator[str]:
    """Yield a sentence for each part that has damaged chunks and a whole manifest."""
    for each in () if verification is None else verification.checkpoints:
        if chunks := [damage for damage in each.damage if damage.what not in ("manifest", "slot")]:
            name = each.slot if each.rank is None else f"{rank_name(each.rank)}/{each.slot}"
            yield f"DAMAGED: step {each.info.step}, in {name}: {len(chunks)} of {each.chunks} chunks."


def _mended(commit: memoryview, identity: Identity) -> bytes:
    """Return the bytes of a commit file in which damaged copies of records are replaced by their valid other copies."""
    image = bytearray(bytes(commit).ljust(COMMIT_NBYTES, b"\0"))
    for copy in damaged_copies(examine_records(memoryview(image), identity.id_bytes)):
        other = copy.offset ^ REGION_NBYTES
        image[copy.offset : copy.offset + REGION_NBYTES] = image[other : other + REGION_NBYTES]
    return bytes(image)


def _without_records(identity: FileState, ranks: RankStores, found: Mapping[int, LostRecords]) -> Recovery:
    """Return the recovery of a group in which some ranks lost their records, from the contents of their slots."""
    stores = [*ranks.seen.values()]
    stores += [SeenStore(0, rank, each.identity.id_bytes, None, each.parts) for rank, each in found.items()]
    by_key = parts_by_key(stores)
    infos = [
        replace(one.entry.info, nbytes=sum(part.entry.nbytes for _, part in by_key[one.key]))
        for one in view_of(stores, [0], []).complete
    ]
    slots = tuple(one for each in found.values() for one in each.found)
    names = ", ".join(rank_name(rank) for rank in found)
    problems = () if infos else (f"The slots of {names} hold no part of a checkpoint that all other ranks have.",)
    states: dict[RecordsState, set[int]] = {"valid": set(), "missing": ranks.gone, "older": ranks.older}
    return Recovery(
        identity,
        next((state for state, those in states.items() if those == {*ranks.lost}), "damaged"),
        slots,
        tuple(infos),
        identity_name=GROUP_NAME,
        problems=problems if found else (),
        unnamed=tuple(rank_name(rank) for rank in ranks.unnamed),
        unrecorded=tuple(rank_name(rank) for rank in ranks.lost),
        older=tuple(rank_name(rank) for rank in sorted(ranks.older)),
    )


def _is_of_group(folder: Path) -> bool:
    """Whether a folder is a rank's, by its name and by the folder above it, which is a group's."""
    parent = folder.absolute().parent
    return folder.name in {each.name for each in rank_folders(parent).values()} and is_group_folder(parent)


async def _names_a_slot(medium: Medium, identity: Identity, record: Record) -> bool:
    """Whether any slot holds a manifest that the record names: then the record belongs to this folder."""
    for entry in record.entries:
        try:
            file = await medium.open(slot_name(entry.slot), writable=False)
        except (CorruptStoreError, OSError):
            continue
        try:
            await read_manifest(medium, file, entry, identity.block_bytes)
        except (CorruptStoreError, ReadError):
            continue
        finally:
            await medium.close(file)
        return True
    return False


def _version(folder: Path, identity: Identity | None, record: Record | None) -> int:
    """Return the format version of a store, from its record or identity, else from the folder that it is in."""
    if record is not None:
        return record.version
    if identity is not None:
        return identity.format
    return GROUP_VERSION if _is_of_group(folder) else FORMAT_VERSION


class _Read(NamedTuple):
    """The identity and the newest record of a store, as far as they are valid; ``store_id`` is the record's."""

    identity_state: FileState
    identity: Identity | None
    record: Record | None = None
    store_id: str | None = None
    problems: tuple[str, ...] = ()
    record_lost: bool = False


async def _read(medium: Medium, commit: tuple[memoryview, dict[int, ReadError]] | None) -> _Read:
    """Read both files. If they are of different stores, the slots decide which one belongs here."""
    state, identity = await _identity(medium)
    if commit is None:
        return _Read(state, identity)
    record, store_id = _record(*commit, identity)
    if record is not None and store_id is not None:
        lost = _lost_record(commit[0], store_id)
        return _Read(state, identity, record, store_id, (_LOST_RECORD,) if lost else (), lost)
    other = None if identity is None else rebuild_identity(commit[0])
    if identity is None or other is None or other[0].store_id == identity.store_id:
        return _Read(state, identity, record, store_id)
    text = f"{of_another_store(commit[0], identity)}. "
    if await _names_a_slot(medium, *other):
        text += f"The slots are those that the records name: --write makes {IDENTITY_NAME} anew, and keeps the records."
        return _Read("damaged", None, other[1], other[0].store_id, (text,))
    text += "No slot is one that the records name: --write makes the records anew, from the slots."
    return _Read(state, identity, record, store_id, (text,))


async def _has_slot(medium: Medium, entry: Entry) -> bool:
    """Whether the file of a checkpoint's slot exists, with the whole checkpoint's length."""
    try:
        file = await medium.open(slot_name(entry.slot), writable=False)
    except (CorruptStoreError, OSError) as error:
        if is_exhausted(error) or is_forbidden(error):
            raise
        return False
    await medium.close(file)
    return entry.manifest_offset + entry.manifest_nbytes <= file.nbytes


async def _other_contents(
    medium: Medium, record: Record, identity: Identity | None, commit: tuple[memoryview, object] | None
) -> list[str]:
    """Return a sentence, if needed, in a list, on slots without the manifests that the newest record names there."""
    found = []
    for entry in record.entries:
        if not await _has_slot(medium, entry):
            continue
        file = await medium.open(slot_name(entry.slot), writable=False)
        try:
            await read_manifest(medium, file, entry, identity.block_bytes if identity else MIN_BLOCK)
        except (CorruptStoreError, ReadError) as error:
            if is_exhausted(error):
                raise
            found.append(entry)
        finally:
            await medium.close(file)
    now = await read_commit(medium) if found else None
    if not found or now is None or commit is None or bytes(now[0]) != bytes(commit[0]):
        return []  # or a trainer has written a newer record meanwhile, and to slots that it no longer names
    slots, steps = [slot_name(entry.slot) for entry in found], [entry.step for entry in found]
    return [
        f"{first_few(slots, 5)}: not what the newest record names there (step {first_few(steps, 5)}). Damaged, or "
        f"{COMMIT_NAME} is older than the slots, as in a backup that was put back in part: --search finds the "
        "checkpoints that are whole in any slot"
    ]


def _lost_record(commit: memoryview, store_id: str) -> bool:
    """Whether one of the two records has no valid copy: it may have been the newest."""
    states = [copy.state for copy in examine_records(commit, bytes.fromhex(store_id))]
    return ["damaged"] * 2 in (states[:2], states[2:])


def _only_by_its_group(folder: Path) -> str:
    return (
        f"{folder} holds one rank's parts of a group's checkpoints, and only records that ranks wrote name them: "
        "nothing was written; where the other ranks have their records, "
        f"{in_shell('recover', folder.absolute().parent, '--search', '--write')} makes these again. Else the slots "
        "that are whole, copied into a folder of their own and recovered there as a store of one process, have what "
        "this rank had, of tensors that lie on several ranks its boxes alone"
    )


def _guessed(path: str, entries: Sequence[Entry], strange: Collection[int], *, search: bool) -> str:
    """Return a refusal to name checkpoints in the slots ``strange``, maybe another run's; empty without such slots."""
    if not strange:
        return ""
    named = sorted(entry.slot for entry in entries if entry.slot not in strange)
    options = [*["--search"] * search, *[part for slot in named for part in ("--slot", str(slot))], "--write"]
    guessed = [entry for entry in entries if entry.slot in strange]
    names = first_few([f"{slot_name(one.slot)} (step {one.step}, counter {one.counter})" for one in guessed], 5)
    return (
        f"{names} may be of another run, copied here (see the notes), or the clock was set back: "
        f"{in_shell('recover', path, *options)} leaves it out, and with its --slot, too, names it"
    )


def _is_to_be_written(name: str, recovery: Recovery, search: bool) -> bool:
    """Return whether there is something to write.

    Raises CorruptStoreError, StoreError or NoCheckpointError if files should be written and nothing can be.
    """
    if recovery.copies:
        return True
    if (
        not recovery.needed
        and not search
        and (lost := [*recovery.missing, *(problem.rstrip(".") for problem in recovery.problems)])
    ):
        look = f"; {in_shell('recover', name, '--search')} looks for what no valid record names"
        look += f", {in_shell('recover', name)} says what drops the damaged ones"
        raise CorruptStoreError(
            f"nothing can be written: the records of {name} are valid, and what they name and is lost cannot be made "
            f"again ({first_few(lost, 3)}){look * (recovery.identity_name == IDENTITY_NAME)}"
        )
    if not recovery.needed and not search:
        return False
    if recovery.refusal:
        raise StoreError(recovery.refusal)
    if not recovery.named and (recovery.found or recovery.dropped):
        raise NoCheckpointError(f"{name}: {recovery.none_named}; nothing was written")
    return True


def _marked_as_before(entries: Sequence[Entry], record: Record | None) -> list[Entry]:
    """Return ``entries``, pinned and rejected as in ``record``, which may name the same checkpoint in another slot."""
    recorded = record.entries if record else ()
    there = {(entry.counter, entry.slot): entry for entry in recorded}
    moved = {(entry.counter, entry.manifest_checksum): entry for entry in recorded}
    marked = []
    for entry in entries:
        named = there.get((entry.counter, entry.slot)) or moved.get((entry.counter, entry.manifest_checksum))
        marked.append(entry if named is None else structs.replace(entry, pinned=named.pinned, metadata=named.metadata))
    return marked


def _commit_file(identity: Identity, records: Sequence[Record]) -> bytes:
    """Return the bytes of a commit file that has two copies of each record."""
    image = bytearray(COMMIT_NBYTES)
    for record in records:
        data = encode_record(record, identity.id_bytes, identity.block_bytes)
        for offset in region_offsets(record.generation):
            image[offset : offset + len(data)] = data
    return bytes(image)


async def _replace_files(medium: Medium, names: Collection[str], files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Write files, durably; return the new names of the existing files (``names``) that they replace."""
    kept = []
    for name, data in files.items():
        backup_name = ""
        if name in names:
            backup_name = next(other for number in count() if (other := f"{name}.damaged-{number}") not in names)
            kept.append(backup_name)
        await medium.replace(name, data, keep_as=backup_name)
    return tuple(kept)


async def _identity(medium: Medium) -> tuple[FileState, Identity | None]:
    try:
        identity = await stored_identity(medium)
    except NewerFormatError as error:
        raise NewerFormatError(f"{error}: nothing was written; recover it with the version that made it") from None
    except CorruptStoreError:
        return "damaged", None
    except ReadError as error:
        if is_exhausted(error) or is_forbidden(error):
            raise
        return "damaged", None
    return ("missing", None) if identity is None else ("valid", identity)


def _record(
    commit: memoryview, lost: Mapping[int, ReadError], identity: Identity | None
) -> tuple[Record | None, str | None]:
    """Return the newest valid record and its store id; without ``identity`` the newest record of any store.

    The record is None if it is unknown which is the newest (:func:`unread_record`).
    """
    if identity is not None:
        store_id, record = identity.store_id, newest_record(commit, identity.id_bytes)
    elif rebuilt := rebuild_identity(commit):
        store_id, record = rebuilt[0].store_id, rebuilt[1]
    else:
        return None, None
    return None if unread_record(commit, lost, bytes.fromhex(store_id)) else record, store_id
