# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's checkpoints on stores of this package, written while training continues.

::

    model_engine, *_ = deepspeed.initialize(...)
    CheckpointEngine(model_engine)  # this line; save_checkpoint and load_checkpoint are called as before

Each file that DeepSpeed saves, several on each rank, becomes a folder of the same name, which is a store. A tag is
valid from the moment at which all ranks' parts of it are durable: then rank 0 writes the file ``complete`` into the
folder of the tag, and ``latest``. Until then the tag and ``latest`` stay as before.

Tested with DeepSpeed 0.19.8, which documents no interface for this. These parts of it are used: ``CheckpointEngine``
with its methods; the attribute ``checkpoint_engine`` and the methods ``save_checkpoint`` and ``load_checkpoint`` of
``DeepSpeedEngine``; and the calls of a decoupled checkpoint engine: ``get_commit_info`` in each step that ends a window
of gradient accumulation, and ``cleanup`` when the ``DeepSpeedEngine`` is destroyed.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from pccheck_async.api import SyncCheckpointEngine, load_sync
from pccheck_async.engine import PendingCheckpoint
from pccheck_async.errors import GroupError
from pccheck_async.group import Group, Meeting, reach
from pccheck_async.integrations.free_slots import remove_free_slots
from pccheck_async.integrations.versions import require
from pccheck_async.medium.folder import sync
from pccheck_async.telemetry.events import Durable, Event, Failed

require("deepspeed", "0.19")

from deepspeed.runtime.checkpoint_engine import checkpoint_engine  # noqa: E402

__all__ = ["CheckpointEngine"]

COMPLETE: Final = "complete"
"""Name of the file in a tag's folder with the step, in its stores, of the checkpoints that all ranks have."""
_STATE: Final = "state"
_MOST_WRITING: Final = 2
"""Most stores that a rank writes at a time: the staging memory of each is up to a quarter of the memory."""
_PATIENCE: Final = timedelta(minutes=30)
"""Most time to wait for other ranks' writes."""


class CheckpointEngine(checkpoint_engine.CheckpointEngine):
    """Replaces the checkpoint engine of a ``DeepSpeedEngine``, when constructed.

    ``save_checkpoint`` returns when the state is captured, which is written while training continues. The tag becomes
    valid, and ``latest`` names it, after all ranks' parts are durable: in the next step that ends a window of gradient
    accumulation, in the next ``save_checkpoint`` or ``load_checkpoint``, in :meth:`wait`, or when the
    ``DeepSpeedEngine`` is destroyed or the interpreter exits, whichever is first. The failure of a rank is raised
    there, and the tag does not become valid. If the tag existed before, it stays the old one until then. Exports
    (``save_16bit_model``) stay files of ``torch.save``, and checkpoints that were saved as files are loaded by
    DeepSpeed's own engine.

    As without this engine, DeepSpeed does not save everything: of data-parallel ranks only the first one's module is
    saved, so buffers that differ by rank (BatchNorm's averages) are rank 0's after a load; random number generators and
    data positions are saved only if they are in ``client_state``, and each rank gets its own back.

    Values that only pickle can save, such as DeepSpeed's loss scaler, are unpickled by a load, which runs code: load
    no checkpoint from strangers.

    Args:
        engine: The first result of ``deepspeed.initialize``. Every rank must construct this object.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.name = "PCcheck"
        self._files = engine.checkpoint_engine
        self._ranks = _Ranks()
        self._tag: Any = None
        self._saving = False
        self._writing: list[tuple[str, SyncCheckpointEngine, PendingCheckpoint]] = []
        engine.checkpoint_engine = self
        engine.save_checkpoint = self._saving_with(engine.save_checkpoint)
        engine.load_checkpoint = self._waiting_before(engine.load_checkpoint)
        atexit.register(self.cleanup)

    def wait(self) -> None:
        """Block until the tag that was saved last is complete, and named by ``latest``. All ranks must call this.

        Raises:
            CheckpointError: this rank's part of the tag failed.
            GroupError: another rank's part failed, or was not durable in time.
        """
        tag, self._tag = self._tag, None
        self._close_written(wait=True)
        if tag is None:
            return
        self._ranks.wait_durable()
        if self._ranks.rank != 0:
            self._ranks.wait_complete()
            return
        folder = Path(tag.save_dir)
        _replace(folder / tag.tag / COMPLETE, str(self._ranks.number))
        if tag.save_latest:
            _replace(folder / "latest", tag.tag)
        self._ranks.tell_complete()

    def create(self, info: Any) -> None:
        """Set the tag of the saves that follow."""
        if self._saving:
            self._tag = info

    def save(self, state_dict: Any, path: str) -> None:
        """Capture the contents of a file of DeepSpeed, and write them into a store in the background."""
        if not self._saving:  # an export
            self._files.save(state_dict, path)
            return
        while len(self._writing) >= _MOST_WRITING:
            self._close_first()
        ranks, complete = self._ranks, _complete(path)
        ranks.begin_part()
        engine = SyncCheckpointEngine(path, max_in_flight=1, allow_pickle=True, overwrite=True).open()
        try:
            _pin_alone(engine, complete)
            engine.on_event(partial(ranks.note, ranks.number))
            pending = engine.checkpoint({_STATE: _Snapshot(state_dict)}, step=ranks.number)
        except BaseException:
            engine.close()
            raise
        self._writing.append((path, engine, pending))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the saved state; ``map_location`` is as for ``torch.load``, with all tensors counted as the CPU's."""
        if os.path.isfile(path):
            return self._files.load(path, map_location=map_location)
        where = "cpu" if map_location is None else map_location
        return load_sync(path, step=_complete(path), device=where, allow_pickle=True)[_STATE]

    def commit(self, info: Any) -> bool:
        """Do nothing: DeepSpeed calls this for exports alone, and :meth:`get_commit_info` otherwise."""
        return True

    def is_decoupled(self) -> bool:
        """Return True: this engine, and not DeepSpeed, writes ``latest``."""
        return True

    def get_commit_info(self) -> None:
        """Publish the tag if it has become complete, without waiting for storage; return None: nothing to commit."""
        self._close_written(wait=False)
        if self._tag is not None and self._ranks.rank == 0 and self._ranks.ended():
            self.wait()

    def preserves_storage_sharing(self) -> bool:
        """Return False: only the viewed bytes of a storage are saved, so that DeepSpeed need not copy views before."""
        return False

    def cleanup(self) -> None:
        """Finish the saves in progress, and publish their tag."""
        atexit.unregister(self.cleanup)
        if self._ranks.rank == 0:
            self.wait()
        else:
            self._close_written(wait=True)  # rank 0 may leave first: this does not need it

    def _saving_with(self, save: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(save)
        def save_checkpoint(*arguments: Any, **named: Any) -> bool:
            with self._one_tag():
                return save(*arguments, **named)

        return save_checkpoint

    def _waiting_before(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def load_checkpoint(*arguments: Any, **named: Any) -> Any:
            self.wait()
            return load(*arguments, **named)

        return load_checkpoint

    @contextmanager
    def _one_tag(self) -> Iterator[None]:
        """Return a context manager for the saves of one tag; if its body raises on any rank, the tag stays invalid."""
        self.wait()
        self._ranks.begin()
        self._saving = True
        try:
            yield
        except BaseException as error:
            self._ranks.fail(self._ranks.number, error)
            self._tag = None
            raise
        finally:
            self._saving = False
        self._ranks.all_began()  # DeepSpeed returned from a barrier: all ranks began all that they save

    def _close_written(self, *, wait: bool) -> None:
        while self._writing and (wait or self._writing[0][2].done()):
            self._close_first()

    def _close_first(self) -> None:
        path, engine, pending = self._writing.pop(0)
        try:
            pending.result()
        finally:
            engine.close()
            remove_free_slots(path)


class _Snapshot:
    """Makes a state that DeepSpeed collected an object with a ``state_dict()``, to save it as that."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError("the state is loaded, and not restored")


class _Ranks:
    """Shares among the ranks whether a tag is complete, one tag at a time, by keys in a TCP store that rank 0 serves.

    No collective is called when a tag becomes complete, because ranks are at different places of their training then.
    The keys have the number of the tag as prefix: ``began`` and ``durable`` count the parts of all ranks, ``all`` is
    the final number of parts (set once no more begin), ``ended`` is "" when all are durable, or why one failed.
    """

    def __init__(self) -> None:
        group = Group.of(dist.group.WORLD)
        self.rank = group.rank
        self.number = 0
        self._meeting = Meeting(group.world_size) if group.rank == 0 else None
        address = group.share(self._meeting.address if self._meeting is not None else None)
        self._store, self._waiting = reach(address), reach(address)  # a client does one operation at a time

    def begin(self) -> None:
        """Agree on a number for the next tag, by a broadcast. All ranks must call this."""
        number = [time.time_ns()]
        dist.broadcast_object_list(number, src=0)
        self.number = number[0]

    def begin_part(self) -> None:
        self._store.add(self._key("began"), 1)

    def all_began(self) -> None:
        """Called on all ranks when none begins another part of the tag."""
        if self.rank == 0:
            parts = self._store.add(self._key("began"), 0)
            self._store.set(self._key("all"), str(parts))
            self._end_if(self.number, self._store.add(self._key("durable"), 0))

    def note(self, number: int, event: Event) -> None:
        """Count a part that became durable. Called on threads of the engines."""
        if isinstance(event, Durable):
            durable = self._store.add(f"{number}/durable", 1)
            if self._store.check([f"{number}/all"]):  # else all_began() counts it
                self._end_if(number, durable)
        elif isinstance(event, Failed):
            self.fail(number, event.error)

    def _end_if(self, number: int, durable: int) -> None:
        if int(self._store.get(f"{number}/all")) == durable:
            self._store.set(f"{number}/ended", "")

    def fail(self, number: int, error: object) -> None:
        self._store.set(f"{number}/ended", f"rank {self.rank}: {error}")

    def ended(self) -> bool:
        """Return whether all parts of the tag are durable, or one failed. Does not wait."""
        return bool(self._store.check([self._key("ended")]))

    def wait_durable(self) -> None:
        self._wait("ended")
        if why := self._waiting.get(self._key("ended")).decode():
            raise GroupError(f"the tag is not complete, and does not count: {why}")

    def tell_complete(self) -> None:
        self._store.set(self._key(COMPLETE), "")

    def wait_complete(self) -> None:
        self._wait(COMPLETE)

    def _wait(self, name: str) -> None:
        try:
            self._waiting.wait([self._key(name)], _PATIENCE)
        except RuntimeError as error:
            raise GroupError(f"the tag is not complete, and does not count: {str(error).splitlines()[0]}") from None

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"


def _complete(path: str) -> int | None:
    """Return the step of the checkpoint that all ranks have, for a path of the tag; None if no tag was completed."""
    try:
        return int(Path(path).with_name(COMPLETE).read_text())
    except FileNotFoundError:
        return None


def _pin_alone(engine: SyncCheckpointEngine, complete: int | None) -> None:
    """Pin the checkpoint of step ``complete`` alone, so that it is kept until all ranks have the new one."""
    for info in engine.checkpoints():
        if info.step == complete:
            engine.pin(step=info.step)
        elif info.pinned:
            engine.unpin(step=info.step)


def _replace(path: Path, text: str) -> None:
    """Replace the contents of a file by ``text``, durably and atomically."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    sync(new)  # crash: the name of a file without its bytes
    new.replace(path)
    sync(path.parent)
